"""Models of Hugging Face under axes context and pipeline: stages are graphs, attention is not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from meshwright.composition import parallelize
from meshwright.plan import ContextPlan, ExpertPlan, PipelinePlan, Plan, TrainPlan
from meshwright.testing import Ranks
from support.internals.axes import Axes
from support.internals.reference import first_difference, record, train_reference

pytest.importorskip("transformers")
from context_parallel import test_plans as plans
from support.expert_parallel.wide import wide

pytestmark = plans.pytestmark


def batches(kind: str, parts: int, part: int) -> list[plans.Batch]:
    """Those of `test_plans`, of a length that the ranks divide."""
    return [
        ({key: each[:, :-1] for key, each in given.items()}, target[:, :-1])
        for given, target in plans.batches(kind, parts, part)
    ]


def body(folder: str, axes: dict[str, int], context: ContextPlan, schedule: str, kind: str) -> Any:
    with wide():
        example, _ = batches(kind, 1, 0)[0]
        plan = Plan(
            axes=Axes.of(axes),
            context=context,
            expert=ExpertPlan(balance="none" if "expert" in axes else None),
            pipeline=PipelinePlan(schedule=schedule, microbatches=2),
            train=TrainPlan(clip_norm=0.5),
        )
        laid = parallelize(
            plans.model_of(folder),
            plan,
            optimizer=plans.momentum,
            loss=plans.loss_of,
            example={name: value[:2] for name, value in example.items()},
        )
        return record(laid, batches(kind, laid.data_size, laid.data_rank))


@pytest.mark.parametrize(
    ("folder", "axes", "context", "schedule", "kind"),
    [
        ("llama", {"context": 2}, plans.RING, "1f1b", "packed"),
        ("llama", {"context": 2}, plans.HEADS, "gpipe", "padded"),
        ("llama", {"context": 2}, plans.RING, "zbv", "packed"),
        ("gemma3", {"context": 2}, plans.HEADS, "1f1b", "packed"),
        ("mixtral", {"context": 2}, plans.HEADS, "1f1b", "packed"),
        ("mixtral", {"context": 2}, plans.RING, "interleaved1f1b", "whole"),
        ("gpt_oss", {"context": 2}, ContextPlan(documents="none"), "zbv", "packed"),
        ("mixtral", {"context": 2, "expert": 2}, plans.RING, "zbv", "packed"),
        ("mixtral", {"context": 2, "expert": 2}, plans.HEADS, "1f1b", "packed"),
    ],
)
def test_models_train_as_one_process(
    ranks: Ranks,
    folder: str,
    axes: dict[str, int],
    context: ContextPlan,
    schedule: str,
    kind: str,
) -> None:
    with wide():
        expected = train_reference(
            plans.model_of(folder),
            batches(kind, 1, 0),
            optimizer=plans.momentum,
            loss=plans.loss_of,
            clip_norm=0.5,
        )
    axes = {"pipeline": 2, **axes}
    size = Axes.of(axes).world_size
    run = partial(body, folder, axes, context, schedule, kind)
    for found in ranks(size, run, timeout=300):
        difference = first_difference(found, expected, 1e-9)
        assert difference is None, difference
