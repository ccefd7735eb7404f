"""`parallelize` with axis pipeline: parity with one process, cuts, state, refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.comm import communicator
from meshwright.composition import parallelize
from meshwright.errors import PlanError
from meshwright.plan import PipelinePlan, Plan, TrainPlan
from meshwright.schedule import Costs, Schedule, find_schedule
from meshwright.testing import MODELS, Ranks, assert_same_training
from support.internals.axes import Axes
from support.internals.composition import _keep_unused, _partition, observe, order_of
from support.internals.schedule import build, dump_csv, lower
from support.late import raises_by_now

CUTS = {
    "sequential": "auto",  # a chain
    "frozen": "auto",
    "tied": "parameters",  # the rest are traced
    "skip": ("third",),
    "reused": ("head",),
    "transformer": "auto",
}


def plan_of(
    schedule: str, microbatches: int, split: Any = "auto", train: Any = None, **axes: int
) -> Plan:
    return Plan(
        axes=Axes.of(axes),
        pipeline=PipelinePlan(schedule=schedule, microbatches=microbatches, split=split),  # pyrefly: ignore
        train=train or TrainPlan(),
    )


@pytest.mark.few(1, slow=3)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n == "transformer" else []) for n in CUTS]
)
def test_trains_as_one_process(ranks: Ranks, name: str) -> None:
    plan = plan_of("1f1b", 2, CUTS[name], pipeline=2, train=TrainPlan(clip_norm=0.05))
    assert_same_training(MODELS[name], plan, world=2, ranks=ranks)
    accumulated = TrainPlan(accumulate=2, clip_norm=0.05)
    plan = plan_of("zb1p", 2, CUTS[name], pipeline=2, shard=2, train=accumulated)
    assert_same_training(MODELS[name], plan, world=4, batch_size=16, ranks=ranks)
    plan = plan_of("gpipe", 2, CUTS[name], replicate=2, pipeline=2, train=accumulated)
    assert_same_training(MODELS[name], plan, world=4, batch_size=16, ranks=ranks)


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (None, "No such file"),
        ("0F0,0B0", "row 1: expected|stage 1|2 stages"),
        (build("1f1b", 4, 4), "expected 2 ranks, 4 stages and 4 microbatches, found 4, 4 and 4"),
        (build("1f1b", 2, 8), "expected 2 ranks, 2 stages and 4 microbatches, found 2, 2 and 8"),
        (build("gpipe", 3, 4), "expected 2 ranks, 2 stages and 4 microbatches, found 3, 3 and 4"),
        (Schedule.of("lost", [[], []], [0, 1], 4), "missing actions for rank 0"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(
    order: Schedule | str | None, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "found.csv"
    if isinstance(order, Schedule):
        dump_csv(order, file)
    elif order is not None:
        file.write_text(order)
    with pytest.raises(PlanError, match=rf"\[pipeline\] order: .*({problem})"):
        order_of(PipelinePlan(order=str(file), microbatches=4), 2)


def test_cuts_are_balanced() -> None:
    assert _partition([5, 1, 1, 1, 1, 1], 2) == [0, 1]
    assert _partition([1, 1, 1, 1], 4) == [0, 1, 2, 3]
    assert _partition([0, 3, 0, 3, 0], 2) == [0, 2]


def test_what_no_stage_uses_is_kept_by_the_first() -> None:
    model = nn.Module()
    model.block = nn.Module()
    model.block.used, model.block.never = nn.Linear(2, 2), nn.Linear(2, 3)
    model.block.scale = nn.Parameter(torch.ones(1))
    model.register_buffer("count", torch.zeros(1))
    first, second = nn.Module(), nn.Module()
    second.block = nn.Module()
    second.block.used = model.block.used
    _keep_unused(model, [first, second])
    state = {**first.state_dict(), **second.state_dict()}
    assert state.keys() == model.state_dict().keys()
    assert type(first.block.never) is nn.Linear
    assert first.block.scale is model.block.scale
    model.block.again = nn.Linear(2, 2, bias=False)
    model.block.again.weight = model.block.used.weight
    model.block._modules = dict(reversed(model.block._modules.items()))
    _keep_unused(model, [first, second])
    assert [*second.state_dict()] == ["block.again.weight", "block.used.weight", "block.used.bias"]
    assert second.block.again.weight is model.block.used.weight
    model.block.apart = nn.Linear(2, 2)
    model.block.apart.weight = model.block.used.weight  # read by itself; its bias is not
    _keep_unused(model, [first, second])
    assert second.block.apart.weight is model.block.used.weight
    assert [name for name in first.state_dict() if "apart" in name] == ["block.apart.bias"]


class Chain(nn.Module):
    """Its forward may do something between its modules that a chain does not."""

    def __init__(self, between: str = "") -> None:
        super().__init__()
        self.between = between
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x))
        if self.between == "in place":
            with torch.no_grad():
                x.mul_(2.0)
        elif self.between == "behind":
            return self.c(x) * 2.0
        return self.c(x)


def test_a_chain_is_seen_and_not_assumed() -> None:
    x = (torch.ones(2, 4),)
    assert observe(Chain(), x).links == ["a", "b", "c"]
    for between in ("in place", "behind"):
        assert observe(Chain(between), x).links is None
    model = Chain()
    model.register_forward_hook(lambda _, __, output: output * 2)
    assert observe(model, x).links is None
    random = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    state = torch.get_rng_state()
    assert observe(random, x).links == ["0", "1"]
    assert torch.equal(state, torch.get_rng_state())


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()


def laid_out(plan: Plan, model: nn.Module | None = None, example: Any = None) -> Any:
    return parallelize(
        mlp() if model is None else model,
        plan,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01),
        loss=F.mse_loss,
        example=(torch.ones(2, 4, dtype=torch.float64),) if example is None else example,
    )


def body_order(file: str) -> None:
    one, pipeline = mlp(), PipelinePlan(order=file, microbatches=4)
    trainable = laid_out(Plan(axes=Axes.of({"pipeline": 2}), pipeline=pipeline))
    assert f"pipeline.schedule = {file}: the order" in str(trainable.describe())
    optimizer = torch.optim.Adam(one.parameters(), 0.01)
    x, y = torch.randn(2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for _ in range(3):
        loss = F.mse_loss(one(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(trainable.step(x, y).loss, loss.detach())
    torch.testing.assert_close(trainable.weights(), dict(one.state_dict()))


def test_an_order_from_a_file_trains_as_one_process(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "found.csv"
    costs = Costs(forward=[1.0, 1.0, 2.0, 1.5], input=[0.0, 1.0, 2.0, 1.5], activation=0.5)
    order = find_schedule(2, 4, costs, chunks=2, limits=[2.0, 2.0])
    assert order.name == "automatic"
    dump_csv(lower(order), file)  # with its transfers, as `meshwright simulate` writes it
    assert order_of(PipelinePlan(order=str(file), microbatches=4), 2) == order
    ranks(2, body_order, str(file))


def body_details() -> None:
    world = communicator()
    one, given = mlp(), mlp()
    trainable = laid_out(plan_of("interleaved1f1b", 4, pipeline=2), given)
    assert "stages.0.0.weight" not in trainable.state_dict()["model"]
    assert list(trainable.state_dict()["model"]) == list(one.state_dict())
    torch.manual_seed(2)
    x, y = torch.randn(2, 8, 4, dtype=torch.float64)
    before = F.mse_loss(mlp()(x), y)
    torch.testing.assert_close(trainable.step(x, y).loss, before.detach())
    assert (trainable.data_rank, trainable.data_size) == (0, 1)
    state = trainable.state_dict()
    one.load_state_dict(state["model"])
    assert len(state["optimizer"]["state"]) == 8
    for rows in (8, 3):  # as many microbatches as in a step, and too few samples for them
        found = trainable.eval(x[:rows], y[:rows])
        torch.testing.assert_close(found.output, one(x[:rows]))
        torch.testing.assert_close(found.loss, F.mse_loss(one(x[:rows]), y[:rows]).float())
    text = str(trainable.describe())
    assert "pipeline.schedule = interleaved1f1b" in text
    assert text.count(".weight ") == 2
    # A rank may have nothing to train.
    bare = laid_out(plan_of("gpipe", 2, ("1",), pipeline=2), nn.Sequential(mlp()[0], nn.Tanh()))
    reference = nn.Sequential(mlp()[0], nn.Tanh())
    optimizer = torch.optim.Adam(reference.parameters(), 0.01)
    for _ in range(2):
        bare.step(x, y)
        F.mse_loss(reference(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(bare.weights(), dict(reference.state_dict()))
    bare.load_state_dict(bare.state_dict())
    # Another layout takes the state over, and goes on with the same numbers.
    other = laid_out(plan_of("gpipe", 2, ("1",), pipeline=2))
    other.load_state_dict(state)
    assert other.steps == 1
    torch.testing.assert_close(other.step(x, y).loss, trainable.step(x, y).loss)
    for model, name in ((mlp(), "input"), (Chain("behind").double(), "x")):
        expected = F.mse_loss(model(x), y).detach()
        for example in (x, [x], {name: x}):  # as a step takes them
            staged = laid_out(plan_of("gpipe", 2, pipeline=2), copy.deepcopy(model), example)
            torch.testing.assert_close(staged.step(example, y).loss, expected)
    mixed = x if world.rank == 0 else x + 1
    fresh = laid_out(plan_of("gpipe", 2, pipeline=2))
    with raises_by_now(ValueError, match="expected batch 1 .*tensor 0 is .* on ranks .1."):
        fresh.step(mixed, y)
    with raises_by_now(ValueError, match="all microbatches of a step must have equally many"):
        laid_out(plan_of("gpipe", 2, pipeline=2)).step(x[:5], y[:5])


def test_state_evaluation_and_description(ranks: Ranks) -> None:
    ranks(2, body_details)


def body_refusals() -> None:
    def refused(text: str, *args: Any, model: nn.Module | None = None, **more: Any) -> None:
        with pytest.raises(PlanError, match=text):
            laid_out(plan_of(*args, **more, pipeline=2), model)

    refused(r"Number of microbatches \(1\) must be greater than or equal", "1f1b", 1)
    refused("split has 2 cuts, which makes 3 stages", "gpipe", 2, ("1", "2"))
    refused("gpipe has one stage a rank, but split makes 2", "gpipe", 2, ("1", "2", "3"))
    refused(
        "split names .'2', '1', '3'.: expected some of 0, 1, 2, 3, in this order",
        "loopedbfs",
        2,
        ("2", "1", "3"),
    )
    refused("too few for 4 stages", "zbv", 4, model=nn.Sequential(*mlp()[:2]))
    recompute = TrainPlan(recompute=("a",))
    refused(
        "without train.recompute", "gpipe", 2, ("c",), recompute, model=Chain("behind").double()
    )
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    refused("the model has BatchNorm", "gpipe", 2, model=norm)
    plan = plan_of("gpipe", 2, pipeline=2)
    with pytest.raises(PlanError, match="give parallelize example="):
        parallelize(mlp(), plan, optimizer=None, loss=F.mse_loss)


def test_what_cannot_be_cut_is_refused(ranks: Ranks) -> None:
    ranks(2, body_refusals)
