"""The order check on the real engine: ranks that run different units name them and do not hang."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import fully_shard
from meshwright.errors import CollectiveMismatchError, CommunicationError, RankFailedError
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.testing import Ranks
from support.internals.comm import registry

SOON = 8.0
"""Seconds in which every rank has raised; a loaded machine included."""


class Paths(nn.Module):
    """Two branches of equally many elements; ``path`` says which of them run, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.left = nn.Linear(6, 6, bias=False)
        self.right = nn.Sequential(nn.Linear(6, 3, bias=False), nn.Linear(3, 6, bias=False))
        self.tower = nn.Linear(6, 50)
        self.path = ["left"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for name in self.path:
            x = getattr(self, name)(x)
        return x


def plain() -> Paths:
    torch.manual_seed(0)
    return Paths().double()


def sharded() -> Paths:
    model = plain()
    for part in (model.left, model.right, model.tower, model):
        fully_shard(part)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    model(torch.ones(2, 6).double()).sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def on_last(model: Paths, path: list[str]) -> None:
    """Another path on the last rank."""
    world = communicator()
    if world.rank == world.size - 1:
        model.path = path


def caught(call: Callable[[], None]) -> str:
    begun = time.monotonic()
    with pytest.raises(CommunicationError) as raised:
        call()
    assert time.monotonic() - begun < SOON
    assert isinstance(raised.value, CollectiveMismatchError | RankFailedError)
    return str(raised.value)


def body_differs(path: list[str], other: list[str], steps_before: int) -> str:
    model = sharded()
    model.path = path
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps_before):
        step(model, optimizer)
    exposed = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    before = [parameter.to_local().clone() for parameter in exposed]
    on_last(model, other)
    text = caught(lambda: step(model, optimizer))
    for parameter, kept in zip(exposed, before, strict=True):
        assert torch.equal(parameter.to_local(), kept)  # no optimizer has stepped
    return text


PATHS = {
    "equal sizes": (["left"], ["right"]),
    "a tower on one rank": (["left"], ["left", "tower"]),
    "nothing on one rank": (["left", "right"], []),
    "unequal sizes": (["left"], ["tower"]),
    "the other way round": (["left", "right"], ["right", "left"]),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("case", PATHS)
def test_divergent_execution_is_an_error_on_every_rank(
    ranks: Ranks, size: int, steps_before: int, case: str
) -> None:
    path, other = PATHS[case]
    texts = ranks(size, body_differs, path, other, steps_before)
    for text in texts:
        assert "Forward order differs across ranks: rank" in text
        assert "Run the unit on every rank" in text
    assert any(text.startswith("Forward order differs") for text in texts)
    names = {name for name in (path[:1] or other[:1]) + other[:1] if path[:1] != other[:1]}
    for name in names:
        assert any(name in text for text in texts)


def body_goes_on(sooner: int) -> None:
    """The other rank's failure stands while ``sooner`` waits for it in its next pass."""
    model, one = sharded(), plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    on_last(model, ["right"])
    caught(lambda: step(model, optimizer))
    model.path = ["left"]
    world, monitor = communicator(), registry.PROCESS.monitor
    assert monitor is not None
    looks, board = monitor.check, monitor.board

    def look() -> None:
        monitor.read()
        looks()
        board.add(f"test/{sooner} has looked", 1)

    if world.rank == sooner:
        monitor.check = look
    else:
        until = time.monotonic() + SOON
        while not board.add(f"test/{sooner} has looked", 0) and time.monotonic() < until:
            time.sleep(0.01)
    for _ in range(2):
        step(model, optimizer)
    theirs = torch.optim.AdamW(one.parameters(), lr=0.1)
    for _ in range(2):
        step(one, theirs)
    for (name, found), expected in zip(model.named_parameters(), one.parameters(), strict=True):
        assert isinstance(found, DTensor)
        torch.testing.assert_close(found.full_tensor(), expected, msg=name)


def test_a_rank_may_go_on_sooner_than_the_other(ranks: Ranks) -> None:
    for sooner in range(2):
        ranks(2, body_goes_on, sooner)


def body_together() -> list[int]:
    model = sharded()
    counts: list[int] = []
    for path in (["left"], ["left"], ["right"], ["left", "right"], [], ["tower"], ["tower"]):
        model.path = path
        recorder = Recorder()
        with observe(recorder):
            step(model)
        counts.append(sum(c.label == "order" for c in recorder.collectives))
    return counts


def test_one_rank_compares_nothing(ranks: Ranks) -> None:
    assert ranks(1, body_together) == [[0] * 7]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_change_together_are_silent(ranks: Ranks, size: int) -> None:
    assert ranks(size, body_together) == [[1] * 7] * size


def body_evaluation() -> None:
    model = sharded()
    step(model)
    model.eval()
    on_last(model, ["left"])
    model.path = ["right"]
    with torch.no_grad():
        model(torch.ones(2, 6).double())
    model(torch.ones(2, 6).double())
    model.train()
    with torch.no_grad():
        model(torch.ones(2, 6).double())
    model.path = ["left"]
    recorder = Recorder()
    with observe(recorder):
        for _ in range(2):
            step(model)
    assert sum(c.label == "order" for c in recorder.collectives) == 2


def test_evaluation_between_steps_shifts_nothing(ranks: Ranks) -> None:
    ranks(2, body_evaluation)


# ------------------------------------------------------------------------------- the facade


def wrapped() -> nn.Module:
    torch.manual_seed(0)
    model = Paths().double()
    for name in ("left", "right", "tower"):
        setattr(model, name, FullyShardedDataParallel(getattr(model, name)))
    return FullyShardedDataParallel(model)


def branch(path: list[str]) -> nn.Module:
    model = wrapped()
    model.module.path = path
    return model


def body_class(path: list[str], other: list[str], steps_before: int) -> str:
    model = branch(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps_before):
        step(model, optimizer)
    held = optimizer.param_groups[0]["params"]
    before = [parameter.detach().clone() for parameter in held]
    on_last(model.module, other)
    text = caught(lambda: step(model, optimizer))
    for parameter, kept in zip(held, before, strict=True):
        assert torch.equal(parameter, kept)  # no optimizer has stepped
    return text


@pytest.mark.few(3)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("case", PATHS)
def test_the_class_raises_as_fully_shard_does(
    ranks: Ranks, size: int, steps_before: int, case: str
) -> None:
    path, other = PATHS[case]
    texts = ranks(size, body_class, path, other, steps_before)
    assert any(text.startswith("Forward order differs") for text in texts)
    for text in texts:
        assert "Forward order differs across ranks: rank" in text
        assert "Run the unit on every rank" in text


def body_skip(path: list[str], other: list[str]) -> str:
    model = branch(path)
    for _ in range(2):
        step(model)
    on_last(model.module, other)
    return caught(lambda: step(model))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("path", "other"),
    [(["left"], []), (["left"], ["left", "tower"]), (["left", "right"], ["right"])],
)
def test_a_rank_that_skips_a_unit_is_named_and_not_waited_for(
    ranks: Ranks, path: list[str], other: list[str]
) -> None:
    for text in ranks(2, body_skip, path, other):
        assert "Forward order differs across ranks: rank 1 in forward 3, position" in text
