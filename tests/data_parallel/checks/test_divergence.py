"""Ranks that do different things: each case is named on every rank, soon, and never trains on.

Where a strategy can train on, its gradient is the mean over the ranks of what each has run, with
zeros where it has run nothing: those cases are listed with what the weights must be then.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import communicator, settle
from meshwright.data_parallel import fully_shard, replicate
from meshwright.errors import CommunicationError
from meshwright.fsdp import FullyShardedDataParallel, ShardingStrategy
from meshwright.testing import Ranks
from support.late import as_on_a_host

SOON = 30.0
STRATEGIES = ("replicate", "fully_shard", "facade")


class Paths(nn.Module):
    """Units of equal size; ``path`` says which of them run."""

    def __init__(self, tower: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.left = nn.Linear(6, 6, bias=False)
        self.right = nn.Linear(6, 6, bias=False)
        self.tower = nn.Linear(6, tower)
        self.head = nn.Linear(6, 3)
        self.path = ["left", "right"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for name in self.path:
            x = torch.tanh(getattr(self, name)(x))
        return self.head(x)


class Loop:
    """A user's loop around a model that is laid out by one strategy."""

    def __init__(self, strategy: str, model: Paths | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.plain = (model or Paths()).double()
        parts = ("left", "right", "tower")
        self.model: Any = self.plain
        if strategy == "replicate":
            replicate(self.plain)
        elif strategy == "fully_shard":
            for name in parts:
                fully_shard(getattr(self.plain, name))
            fully_shard(self.plain)
        else:
            options = {"use_orig_params": True, **options}
            for name in parts:
                part = FullyShardedDataParallel(getattr(self.plain, name), **options)
                setattr(self.plain, name, part)
            self.model = FullyShardedDataParallel(self.plain, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def loss(self) -> torch.Tensor:
        inputs = torch.full((2, 6), 1.0 + communicator().rank)
        return self.model(inputs.double()).square().sum()

    def step(self, count: int = 1, *, passes: int = 1) -> None:
        for _ in range(count):
            for _ in range(passes):
                self.loss().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


Case = Callable[[str, bool], None]


def on_a_path(path: list[str]) -> Case:
    def case(strategy: str, is_odd: bool) -> None:
        loop = Loop(strategy)
        loop.step(4)
        if is_odd:
            loop.plain.path = path
        loop.step(3)

    return case


def frozen_from_the_start(strategy: str, is_odd: bool) -> None:
    model = Paths()
    model.left.requires_grad_(not is_odd)
    Loop(strategy, model).step(3)


def frozen_later(strategy: str, is_odd: bool) -> None:
    loop = Loop(strategy)
    loop.step(2)
    if is_odd:
        loop.plain.left.requires_grad_(False)
    loop.step(3)


def one_more_backward(strategy: str, is_odd: bool) -> None:
    loop = Loop(strategy)
    loop.step(2)
    loss = loop.loss()
    if is_odd:
        loss.backward(retain_graph=True)
    loss.backward()
    loop.optimizer.step()
    loop.step(3)


def one_more_step(strategy: str, is_odd: bool) -> None:
    Loop(strategy).step(4 if is_odd else 3)


def without_a_reduction(strategy: str, is_odd: bool) -> None:
    loop = Loop(strategy)
    loop.step(2)
    if is_odd:
        with loop.model.no_sync():
            loop.step()
    else:
        loop.step()
    loop.step(3)


def evaluates(strategy: str, is_odd: bool) -> None:
    loop = Loop(strategy)
    loop.step(2)
    loop.model.train(not is_odd)
    loop.step(3)


def without_gradients(strategy: str, is_odd: bool) -> None:
    loop = Loop(strategy)
    loop.step(2)
    if is_odd:
        with torch.no_grad():
            loop.loss()
    else:
        loop.step()
    loop.step(3)


def more_microbatches(strategy: str, is_odd: bool) -> None:
    loop = Loop(strategy)
    loop.step(2)
    loop.step(3, passes=3 if is_odd else 2)


def keeps_whole_parameters(strategy: str, is_odd: bool) -> None:
    if strategy == "facade":
        keeps = ShardingStrategy.SHARD_GRAD_OP
        Loop(strategy, sharding_strategy=keeps if is_odd else None).step()
        return
    loop = Loop(strategy)
    loop.step(2)
    if is_odd:
        loop.model.set_reshard_after_forward(False)
    loop.step(3)


def another_shape(strategy: str, is_odd: bool) -> None:
    Loop(strategy, Paths(tower=7 if is_odd else 6)).step()


def another_name(strategy: str, is_odd: bool) -> None:
    model = Paths()
    if is_odd:
        model.attic = model.head
        del model.head
        model.__dict__["head"] = model.attic
    Loop(strategy, model).step()


def another_strategy(strategy: str, is_odd: bool) -> None:
    others = dict(zip(STRATEGIES, STRATEGIES[1:] + STRATEGIES[:1], strict=True))
    Loop(others[strategy] if is_odd else strategy).step()


CASES: dict[str, tuple[Case, str]] = {
    "skips a unit": (on_a_path(["left"]), "position 2: .*right"),
    "runs one more": (on_a_path(["left", "right", "tower"]), "position 3: .*tower"),
    "swaps two": (on_a_path(["right", "left"]), "position 1: .*left.*right|position 1: .*right"),
    "frozen from the start": (frozen_from_the_start, "left.*(true|True)"),
    "frozen later": (frozen_later, "left.weight"),
    "one more backward": (one_more_backward, "backward pass"),
    "one more step": (one_more_step, r"leaves the run .*\(batches\) on every rank.*join\(\)"),
    "without a reduction": (without_a_reduction, "synchronize=False|backward pass 1"),
    "evaluates": (evaluates, "a forward pass in evaluation"),
    "without gradients": (without_gradients, "a forward pass in evaluation|leaves the run"),
    "more microbatches": (more_microbatches, "passes"),
    "keeps whole parameters": (keeps_whole_parameters, "keep_full_after_forward"),
    "another shape": (another_shape, r"tower.*\[7, 6\]"),
    "another name": (another_name, "attic"),
    "another strategy": (another_strategy, "number 0|differ at step 1 "),
}
TRAINS = {
    # No collective comes with a forward pass there; what a rank does not run counts as zero.
    ("replicate", "skips a unit"),
    ("replicate", "runs one more"),
    ("replicate", "swaps two"),
    ("replicate", "evaluates"),
}


def body(strategy: str, name: str) -> tuple[str, float]:
    """What this rank said, and after how many seconds."""
    case, _ = CASES[name]
    world = communicator()
    begun = time.monotonic()
    said = ""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            case(strategy, world.rank == world.size - 1)
            settle()
        except CommunicationError as error:
            said = f"{type(error).__name__}: {error}"
    texts = [str(warning.message) for warning in told if "differ" in str(warning.message)]
    return "; ".join([*texts, said]), as_on_a_host(time.monotonic() - begun)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        # Every case with one strategy, in turn, in the quick run.
        pytest.param(strategy, name, marks=[] if row % 3 == column else [pytest.mark.slow])
        for row, name in enumerate(CASES)
        for column, strategy in enumerate(STRATEGIES)
    ],
)
def test_ranks_that_differ_are_named(ranks: Ranks, strategy: str, name: str) -> None:
    if (strategy, name) == ("replicate", "keeps whole parameters"):
        strategy, name = "fully_shard", name  # replicas have nothing to keep
    size = 2
    said = ranks(size, body, strategy, name, timeout=SOON + 15)
    _, pattern = CASES[name]
    for text, seconds in said:
        assert seconds < SOON
        if (strategy, name) == ("replicate", "evaluates") or (
            strategy == "replicate" and (strategy, name) in TRAINS
        ):
            assert text == ""
            continue
        # A rank that is done with its own part of the run has nothing to raise.
        if name == "one more step" or (strategy, name) == ("replicate", "without gradients"):
            continue
        assert re.search(pattern, text), text
        assert re.search(r"rank(s \[)? ?[01]", text), text
    assert (strategy, name) in TRAINS or any(re.search(pattern, text) for text, _ in said)
