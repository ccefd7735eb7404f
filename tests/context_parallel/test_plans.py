"""Unmodified models of Hugging Face whose sequences are split by a plan: one process's numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from meshwright import init_device_mesh
from meshwright.composition import parallelize
from meshwright.context_parallel import context_parallel
from meshwright.plan import ContextPlan, ExpertPlan, PipelinePlan, Plan, TensorPlan, TrainPlan
from meshwright.testing import Ranks, RanksFailed
from support.internals.axes import Axes
from support.internals.reference import first_difference, record, train_reference

pytest.importorskip("transformers")
from support.context_parallel.hugging_face import DENSE, dense
from support.expert_parallel.hugging_face import FIVE, WORDS, tiny
from support.expert_parallel.wide import wide

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
    ),
]

LENGTH, ROWS = 13, 8
DENSE_LAYOUTS = (
    {"context": 4},
    {"replicate": 2, "context": 2},
    {"shard": 2, "context": 2},
    {"context": 2, "tensor": 2},
)
LAYOUTS = (
    *DENSE_LAYOUTS,
    {"context": 2},
    {"context": 2, "expert": 2},
    {"replicate": 2, "context": 2, "expert": 2},
    {"shard": 2, "context": 2, "expert": 2},
)
"""Of models with experts."""
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


def model_of(folder: str) -> Any:
    if folder in DENSE:
        return dense(folder)
    model = tiny(folder)
    model.set_experts_implementation("batched_mm")
    return model


def places(kind: str) -> torch.Tensor:
    """Positions of one document a row, or of several of which each row has others."""
    if kind == "packed":
        rows = [[6, 4, 3], [1, 12], [13], [5, 5, 3], [2, 2, 9], [13], [8, 5], [1, 1, 11]]
    else:
        rows = [[LENGTH]] * ROWS
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


def batches(kind: str, parts: int, part: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(3):
        words = torch.randint(3, WORDS, (ROWS, LENGTH), generator=generator)
        given = {"input_ids": words, "position_ids": places(kind)}
        if kind == "padded":
            given["attention_mask"] = torch.ones(ROWS, LENGTH, dtype=torch.long)
            given["attention_mask"][::2, -3:] = 0
        target = words.roll(-1, 1)
        target[::2, -3:] = -100
        mine = {key: each.chunk(parts)[part].clone() for key, each in given.items()}
        found.append((mine, target.chunk(parts)[part]))
    return found


def loss_of(output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = output if isinstance(output, torch.Tensor) else output["logits"]
    total = functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=-100
    )
    return total, (target != -100).sum()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plan_of(axes: dict[str, int], context: ContextPlan, **train: Any) -> Plan:
    rules = {"model.embed_tokens": "embedding", "lm_head": "colwise_gathered"}
    return Plan(
        axes=Axes.of(axes),
        context=context,
        expert=ExpertPlan(balance="none" if "expert" in axes else None),
        tensor=TensorPlan(rules=rules if "tensor" in axes else None),
        pipeline=PipelinePlan(schedule="1f1b", microbatches=2)
        if "pipeline" in axes
        else PipelinePlan(),
        train=TrainPlan(clip_norm=0.5, **train),
    )


def body(folder: str, axes: dict[str, int], context: ContextPlan, kind: str, train: Any) -> Any:
    with wide():
        example, _ = batches(kind, 1, 0)[0]
        laid = parallelize(
            model_of(folder),
            plan_of(axes, context, **train),
            optimizer=momentum,
            loss=loss_of,
            example={name: value[:2] for name, value in example.items()},
        )
        return record(laid, batches(kind, laid.data_size, laid.data_rank))


def check(
    ranks: Ranks,
    folder: str,
    axes: dict[str, int],
    context: ContextPlan,
    kind: str = "whole",
    **train: Any,
) -> None:
    with wide():
        expected = train_reference(
            model_of(folder), batches(kind, 1, 0), optimizer=momentum, loss=loss_of, clip_norm=0.5
        )
    size = Axes.of(axes).world_size
    for found in ranks(size, partial(body, folder, axes, context, kind, train), timeout=200):
        difference = first_difference(found, expected, 1e-9)
        assert difference is None, difference


METHODS = {method: ContextPlan(method=method) for method in ("ring", "all-to-all")}
RING, HEADS = METHODS.values()


@pytest.mark.parametrize("context", [RING, HEADS, ContextPlan(method="ring", split="contiguous")])
@pytest.mark.parametrize("kind", ["whole", "packed", "padded"])
@pytest.mark.parametrize("folder", DENSE)
def test_dense_models(ranks: Ranks, folder: str, kind: str, context: ContextPlan) -> None:
    check(ranks, folder, {"context": 2}, context, kind)


@pytest.mark.parametrize("axes", DENSE_LAYOUTS, ids=str)
@pytest.mark.parametrize("folder", DENSE)
def test_layouts_of_dense_models(ranks: Ranks, folder: str, axes: dict[str, int]) -> None:
    check(ranks, folder, axes, ContextPlan(), "packed")


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
@pytest.mark.parametrize("folder", FIVE)
def test_models_with_experts(ranks: Ranks, folder: str, axes: dict[str, int]) -> None:
    # gpt-oss attends across documents in transformers, with one process too.
    documents = "none" if folder == "gpt_oss" else "position_ids"
    check(ranks, folder, axes, ContextPlan(documents=documents), "packed")


def test_a_model_that_attends_across_documents_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r'documents are packed, .*documents = "none" in'):
        check(ranks, "gpt_oss", {"context": 2}, ContextPlan(), "packed")


@pytest.mark.parametrize(("folder", "layer"), [("granitemoehybrid", "mamba"), ("lfm2_moe", "conv")])
def test_layers_with_a_state_are_refused_by_name(ranks: Ranks, folder: str, layer: str) -> None:
    with pytest.raises(
        RanksFailed, match=rf"first in 'model\.layers\.0\.{layer}.*mixes positions without"
    ):
        check(ranks, folder, {"context": 2}, ContextPlan())


def test_positions_that_a_model_counts_itself_are_refused(ranks: Ranks) -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model, ids = dense("llama"), torch.randint(3, WORDS, (2, 12))
        buffers = [ids, torch.arange(12).repeat(2, 1)]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1]):
            model(input_ids=ids, position_ids=buffers[1])
            with pytest.raises(ValueError, match="LlamaAttention of layer 0 got positions 0 to 5"):
                model(input_ids=ids)
            found = model(input_ids=ids, position_ids=buffers[1], use_cache=True)
            with pytest.raises(ValueError, match=r"generate\(\) under axis cp: key and value"):
                model(input_ids=ids[:, :1], past_key_values=found.past_key_values)

    ranks(2, run)


def test_what_a_model_does_with_labels_and_documents_of_a_part_is_refused(ranks: Ranks) -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model, ids = dense("llama"), torch.randint(3, WORDS, (2, 12))
        anew = torch.cat([torch.arange(n) for n in (2, 4, 2, 4)]).repeat(2, 1)
        plain, labels = torch.arange(12).repeat(2, 1), ids.roll(-1, 1)

        def refused(match: str, documents: torch.Tensor | None = None, **given: Any) -> None:
            buffers = [ids, labels, anew, plain]
            with (
                pytest.raises(ValueError, match=match),
                context_parallel(
                    mesh,
                    buffers=buffers,
                    buffer_seq_dims=[1] * 4,
                    documents=documents,
                    split="contiguous",
                ),
            ):
                model(input_ids=ids, **given)

        refused("the model shifts labels", position_ids=plain, labels=labels)
        refused("position_ids begin anew where", position_ids=anew)
        docs = anew.clone()
        refused("documents are packed, which", docs, position_ids=anew, use_cache=True)
        ones = torch.ones(2, 6, dtype=torch.int64)
        refused("documents are packed, which", docs, position_ids=anew, attention_mask=ones)

    ranks(2, run)


def test_positions_that_are_given_may_begin_anew_on_a_part(ranks: Ranks) -> None:
    """Those of rank 1 look as if the model had counted them; it keeps no documents apart."""

    def run() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model, ids = model_of("gpt_oss"), torch.randint(3, WORDS, (2, 12))
        anew = torch.arange(6).repeat(2, 2)
        with torch.no_grad():
            whole = model(input_ids=ids, position_ids=anew).logits
            with context_parallel(
                mesh, buffers=[ids, anew], buffer_seq_dims=[1, 1], split="contiguous"
            ):
                part = model(input_ids=ids, position_ids=anew).logits
        expected = whole.chunk(2, 1)[mesh.get_local_rank()]
        torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-5)

    ranks(2, run)
