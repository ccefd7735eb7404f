"""`[train] compile = true`: the numbers of one process on every layout, or a refusal by name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from meshwright.composition import Trainable, check_model, parallelize
from meshwright.errors import PlanError
from meshwright.plan import PipelinePlan, Plan, ShardPlan, TensorPlan, TrainPlan
from meshwright.testing import MODELS, Ranks, Training, assert_same_training
from support.internals.axes import Axes
from support.internals.precision import Precision

# Dynamo looks at `.grad` of each input of a graph, and hides what torch says of that.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

CUT = TensorPlan(
    rules={
        "embedding": "embedding",
        "layers.*.widen": "colwise",
        "layers.*.narrow": "rowwise",
        "head": "colwise_gathered",
    }
)
MUCH = {"accumulate": 2, "clip_norm": 0.05}
AGAIN = {"recompute": ("layers.*",)}


def plan_of(train: dict[str, Any] | None = None, **parts: Any) -> Plan:
    """Numbers are sizes of axes; all else are tables of the plan."""
    axes = {name: part for name, part in parts.items() if isinstance(part, int)}
    tables = {name.rstrip("_"): part for name, part in parts.items() if name not in axes}
    return Plan(axes=Axes.of(axes), train=TrainPlan(compile=True, **(train or {})), **tables)


def in_stages(schedule: str, split: Any = "auto") -> PipelinePlan:
    return PipelinePlan(schedule=schedule, microbatches=2, split=split)  # pyrefly: ignore


CASES: dict[str, tuple[str, Plan]] = {
    "replicate": ("transformer", plan_of(replicate=2)),
    "replicate accumulated": ("transformer", plan_of(MUCH, replicate=2)),
    "replicate recomputed": ("transformer", plan_of(AGAIN, replicate=2)),
    "replicate flat": ("transformer", plan_of({"flat": True}, replicate=2)),
    "replicate tied": ("tied", plan_of(replicate=2)),
    "replicate unused": ("unused", plan_of(replicate=2)),
    "replicate keywords": ("keywords", plan_of(replicate=2)),
    "shard": ("transformer", plan_of(shard=2)),
    "shard accumulated": ("transformer", plan_of(MUCH, shard=2)),
    "shard recomputed": ("transformer", plan_of(AGAIN, shard=2)),
    "shard flat": ("transformer", plan_of({"flat": True}, shard=2)),
    "shard in one unit": ("transformer", plan_of(shard=2, shard_=ShardPlan(units=()))),
    "shard tied": ("tied", plan_of(shard=2)),
    "shard chain": ("sequential", plan_of(shard=2)),
    "hybrid": ("transformer", plan_of(replicate=2, shard=2)),
    "pipeline traced": ("transformer", plan_of(pipeline=2, pipeline_=in_stages("1f1b"))),
    "pipeline chain": ("sequential", plan_of(pipeline=2, pipeline_=in_stages("gpipe"))),
    "pipeline tied": ("tied", plan_of(pipeline=2, pipeline_=in_stages("1f1b", "parameters"))),
    "pipeline replicate": (
        "transformer",
        plan_of(MUCH, pipeline=2, replicate=2, pipeline_=in_stages("1f1b")),
    ),
    "pipeline shard": (
        "transformer",
        plan_of(MUCH, pipeline=2, shard=2, pipeline_=in_stages("interleaved1f1b")),
    ),
    "pipeline chain shard": (
        "sequential",
        plan_of(MUCH, pipeline=2, shard=2, pipeline_=in_stages("1f1b")),
    ),
    "tensor": ("transformer", plan_of(tensor=2, tensor_=CUT)),
    "tensor replicate": ("transformer", plan_of(MUCH, tensor=2, replicate=2, tensor_=CUT)),
    "tensor shard": ("transformer", plan_of(tensor=2, shard=2, tensor_=CUT)),
}


def laid_out(plan: Plan, model: nn.Module, training: Training) -> Trainable:
    """What `parallelize` makes, which says after each step whether anything was compiled."""
    torch._dynamo.reset()
    counters.clear()
    trainable = parallelize(
        model, plan, optimizer=training.optimizer, loss=training.loss, example=training.example
    )
    step = trainable.optimizer_step

    def checked() -> Any:
        assert counters["stats"]["unique_graphs"] > 0
        return step()

    trainable.optimizer_step = checked  # pyrefly: ignore
    return trainable


@pytest.mark.devices("host", reason="nothing is compiled under a dispatch mode")
@pytest.mark.few(0)
@pytest.mark.parametrize("name", CASES)
def test_trains_as_one_process(ranks: Ranks, name: str) -> None:
    model, plan = CASES[name]
    assert_same_training(
        MODELS[model],
        partial(laid_out, plan),
        world=plan.axes.world_size,
        batch_size=16,
        clip_norm=plan.train.clip_norm,
        ranks=partial(ranks, timeout=200.0),  # pyrefly: ignore
    )


# --------------------------------------------------------------------- as without the compiler

OTHERS: dict[str, tuple[str, Plan]] = {
    "bfloat16 replicate": (
        "transformer",
        replace(plan_of(replicate=2), precision=Precision(compute="bfloat16")),
    ),
    "bfloat16 shard": (
        "transformer",
        replace(plan_of(shard=2), precision=Precision(compute="bfloat16", reduce="float32")),
    ),
    "float16": (
        "transformer",
        replace(plan_of(replicate=2), precision=Precision(compute="float16")),
    ),
    "statistics of each rank": ("batch_norm", plan_of({"batch_norm": "local"}, replicate=2)),
    "statistics of all ranks": ("batch_norm", plan_of({"batch_norm": "sync"}, replicate=2)),
    "statistics of all ranks in shards": ("batch_norm", plan_of({"batch_norm": "sync"}, shard=2)),
    "masks of one process": ("dropout", plan_of({"dropout": "global"}, replicate=2)),
    "masks of one process in shards": ("dropout", plan_of({"dropout": "global"}, shard=2)),
    "masks of one process in stages": (
        "dropout",
        plan_of({"dropout": "global"}, pipeline=2, pipeline_=in_stages("1f1b")),
    ),
}


def trained(name: str, plan: Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of evaluations and steps, and the weights after them."""
    torch._dynamo.reset()
    counters.clear()
    sample = MODELS[name]
    dtype = torch.float32 if plan.precision.is_mixed else torch.float64
    torch.manual_seed(0)
    model = sample.build().to(dtype)
    generator = torch.Generator().manual_seed(1)
    batches = [sample.example_batch(8, generator) for _ in range(3)]
    training = Training(loss=sample.loss, example=(in_dtype(batches[0][0], dtype),))
    trainable = parallelize(
        model, plan, optimizer=training.optimizer, loss=sample.loss, example=training.example
    )
    losses: list[float] = []
    for batch, target in batches:
        size = len(target) // trainable.data_size
        mine = slice(trainable.data_rank * size, (trainable.data_rank + 1) * size)
        inputs, goal = in_dtype(batch, dtype)[mine], in_dtype(target, dtype)[mine]
        losses.append(trainable.eval(inputs, goal).loss.item())
        losses.append(trainable.step(inputs, goal).loss.item())
    assert (counters["stats"]["unique_graphs"] > 0) is plan.train.compile
    return losses, trainable.weights()


def in_dtype(value: Any, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def body_as_uncompiled(name: str) -> None:
    model, plan = OTHERS[name]
    losses, weights = trained(model, plan)
    expected, plain = trained(model, replace(plan, train=replace(plan.train, compile=False)))
    # Graphs round to half precision in fewer places.
    close = 1e-2 if plan.precision.is_mixed else 1e-9
    torch.testing.assert_close(losses, expected, rtol=close, atol=close)
    assert weights.keys() == plain.keys()
    for key, value in plain.items():
        torch.testing.assert_close(weights[key], value, rtol=close, atol=close, msg=key)


@pytest.mark.few(0, slow=3)
@pytest.mark.devices("host", reason="nothing is compiled under a dispatch mode")
@pytest.mark.parametrize("name", OTHERS)
def test_trains_and_evaluates_as_without_the_compiler(ranks: Ranks, name: str) -> None:
    ranks(2, body_as_uncompiled, name, timeout=200.0)


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("schedule", ["zb1p", "zb2p", "zbv", "vhalf", "vmin", "dualpipev"])
def test_half_backwards_are_refused_by_the_names_of_the_plan(schedule: str) -> None:
    plan = plan_of(pipeline=2, pipeline_=replace(in_stages(schedule), microbatches=4))
    with pytest.raises(PlanError, match=f"compile = true: schedule = '{schedule}' in .pipeline."):
        check_model(MODELS["sequential"].build(), plan, 2)
