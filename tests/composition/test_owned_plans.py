"""Plans whose optimizers look at whole matrices: the numbers of one process, on from any layout."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright import checkpoint
from meshwright.plan import Plan, TrainPlan
from meshwright.testing import Ranks
from support.data_parallel.matrices import batch, factory, loss_of, mixture, mlp, plan_of, solo
from support.internals.axes import Axes

CLOSE = {"rtol": 0, "atol": 1e-12}
TWO = [{"replicate": 2}, {"shard": 2}, {"tensor": 2}, {"pipeline": 2}, {"expert": 2}]
FOUR = [
    {"replicate": 4},
    {"replicate": 2, "shard": 2},
    {"shard": 2, "tensor": 2},
    {"pipeline": 2, "shard": 2},
    {"shard": 2, "expert": 2},
    {"pipeline": 2, "replicate": 2},
]


def laid(axes: dict[str, int], kind: str) -> Any:
    model = mixture()
    make = factory(kind, model)
    return mw.parallelize(model, plan_of(axes), optimizer=make, loss=loss_of, example=(batch(0),))


def train(trainable: Any, *steps: int) -> None:
    for step in steps:
        trainable.step(batch(step).chunk(trainable.data_size)[trainable.data_rank])


def one_process(kind: str, steps: int) -> dict[str, torch.Tensor]:
    model = mixture()
    solo(model, factory(kind)(model.parameters()), range(steps))
    return copy.deepcopy(model.state_dict())


def same(trainable: Any, expected: dict[str, torch.Tensor], about: object) -> None:
    found = trainable.weights()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, **CLOSE, msg=lambda t, n=name: f"{about} {n}: {t}"
        )


def body_trains(kind: str, folder: Path, layouts: list[dict[str, int]]) -> None:
    after = {steps: one_process(kind, steps) for steps in (3, 5)}
    paths = []
    for number, axes in enumerate(layouts):
        many = laid(axes, kind)
        assert [type(e).__name__ for e in many.optimizer.optimizers][1] == "AdamW"
        train(many, 0, 1, 2)
        same(many, after[3], axes)
        paths.append(checkpoint.save(folder / f"{number}", 3, model=many))
        state = copy.deepcopy(many.state_dict())
        assert {*state["optimizer"]["state"]} == {n for n, _ in mixture().named_parameters()}
        train(many, 3, 4)
        same(many, after[5], axes)
        many.load_state_dict(state)  # the owners gather the weights of before
        train(many, 3, 4)
        same(many, after[5], ("again", axes))
    for axes in layouts:
        for path, source in zip(paths, layouts, strict=True):
            many = laid(axes, kind)
            checkpoint.load(path, model=many)
            train(many, 3, 4)
            same(many, after[5], (source, axes))


@pytest.mark.parametrize("kind", [pytest.param("muon", marks=pytest.mark.slow), "own"])
def test_a_plan_trains_as_one_process_and_goes_on_from_others(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    ranks(2, body_trains, kind, tmp_path, TWO if kind == "own" else TWO[:2], timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["muon", "own"])
def test_four_ranks_go_on_from_six_layouts(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    ranks(4, body_trains, kind, tmp_path, FOUR, timeout=600)


def body_own_loop(path: Path, folder: Path) -> None:
    """A loop of one's own: on shards from one process, and back."""
    model = mixture()
    mw.fully_shard(model)
    optimizers = factory("own", model)(model.parameters())
    checkpoint.load(path, model=model, optimizer=optimizers)
    world = mw.connect()
    for step in (3, 4):
        loss_of(model(batch(step).chunk(world.size)[world.rank])).backward()
        mw.clip_grad_norm_(model, 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    checkpoint.save(folder, 5, model=model, optimizer=optimizers)


def test_a_loop_of_ones_own_goes_on_from_one_process(ranks: Ranks, tmp_path: Path) -> None:
    one = mixture()
    optimizers = factory("own")(one.parameters())
    solo(one, optimizers, range(3))
    path = checkpoint.save(tmp_path / "one", 3, model=one, optimizer=optimizers)
    ranks(2, body_own_loop, path, tmp_path / "two")
    solo(one, optimizers, range(3, 5))
    again = mixture()
    loaded = factory("own")(again.parameters())
    checkpoint.load(tmp_path / "two", model=again, optimizer=loaded)
    for found, expected in zip(again.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)
    solo(one, optimizers, range(5, 7))
    solo(again, loaded, range(5, 7))  # with the state that the owners had
    for found, expected in zip(again.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


def body_describes() -> None:
    def build(train_plan: TrainPlan, make: Any) -> Any:
        plan = Plan(axes=Axes.of({"shard": 2}), train=train_plan)
        return mw.parallelize(mlp(), plan, optimizer=make, loss=loss_of)

    found = build(TrainPlan(), factory("muon"))
    line = next(each for each in found.describe().settings if "own_matrices" in each)
    rank = mw.connect().rank
    # Work: 8 x 8 has 512 and 3 x 6 has 54, on rank 0; 8 x 6 and 6 x 8 have 288 each, on rank 1. Of
    # 3 rows rank 0 has 2, which stay, and sends 1.
    gradients, weights = ((24 + 24, 32 + 6), (32 + 6, 24 + 24))[rank]
    assert line == (
        "own_matrices: Muon steps each of 4 matrices on one of 2 ranks, 2 on this one, which sends "
        f"{8 * (gradients + weights)} bytes a step; the busiest has 1.01 times the mean work"
    )
    single = build(TrainPlan(), torch.optim.Adafactor)
    assert "Adafactor steps each of 8 matrices" in str(single.describe())
    train(single, 0)
    with pytest.raises(TypeError, match="Adafactor looks at .* own_matrices makes whole"):
        build(TrainPlan(flat=True), torch.optim.Adafactor)
    train(build(TrainPlan(), lambda ps: [torch.optim.SGD(ps, lr=0.1)]), 0)
    with pytest.raises(ValueError, match="more than one parameter group"):
        build(TrainPlan(), lambda ps: [torch.optim.SGD(held := list(ps)), torch.optim.SGD(held)])


def test_a_plan_says_who_owns_what(ranks: Ranks) -> None:
    ranks(2, body_describes)
