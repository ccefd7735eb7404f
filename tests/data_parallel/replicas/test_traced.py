"""The host's part of compiled replicas on simulated devices, where no graph can be compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import communicator, settle
from meshwright.data_parallel import ReductionSettings
from meshwright.errors import CollectiveMismatchError
from meshwright.testing import Ranks, on_devices
from meshwright.testing.simulated import device_of
from support.internals.data_parallel import GradientReducer, traced

ALL, SOME = json.dumps(["net", [["weight", "bias"]]]), json.dumps(["net", [["bias"]]])

LAG = 8
"""How many operations a simulated device is behind."""


class Counts:
    """A compiler that has nothing to count."""

    def ran(self, plan: str) -> None:
        assert json.loads(plan)


class Graph:
    """A graph that runs as a compiled one does: it asks before it reduces."""

    def __init__(self) -> None:
        traced._marking = Counts  # the compiler itself takes seconds to load
        torch.manual_seed(1)
        self.module = nn.Linear(2, 2)
        named = list(self.module.named_parameters())
        world = communicator()
        self.marking = traced.Marking(
            self.module, GradientReducer(world, named, ReductionSettings()), world
        )
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.reduced = 0
        """Passes that were about to reduce."""

    def step(self, *plans: str, updates: bool = True, gradient: float = 1.0) -> None:
        """Run graphs with ``plans`` in one backward pass, and step."""
        reducer: Any = self.marking._reducer
        reducer.synchronize(False)
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        for _ in range(LAG):  # what is queued before is through by then
            y = y * 1
        y.register_hook(lambda _: self._reduce(plans, gradient))
        y.sum().backward()
        if updates:
            self.optimizer.step()

    def steps(self, *plans: str, gradient: float = 1.0) -> None:
        """Run a pass with each of ``plans``."""
        for plan in plans:
            self.step(plan, gradient=gradient)

    def _reduce(self, plans: tuple[str, ...], gradient: float) -> None:
        for plan in plans:
            self.marking.agree([0, 1] if plan == ALL else [1], plan)
        self.reduced += 1
        for parameter in self.module.parameters():
            parameter.grad = torch.full_like(parameter, gradient)


def body_steady(*plans: str) -> None:
    graph = Graph()
    for _ in range(2):
        graph.step(*plans)
    with device_of(communicator()).forbid_stops():
        for _ in range(8):  # gradients are compared in number 4 and 8
            graph.step(*plans)
    settle()
    assert graph.reduced == 10


@pytest.mark.parametrize("plans", [(ALL,), (SOME, ALL)])
def test_the_host_does_not_wait_for_the_device(ranks: Ranks, plans: tuple[str, ...]) -> None:
    on_devices(ranks)(2, body_steady, *plans)


def body_left_out(end: str) -> None:
    graph, rank = Graph(), communicator().rank
    for number in range(5):
        graph.step(ALL, updates=(number, rank) != (3, 1))
    said = "gradients of different passes.*One step of an optimizer may have used them"
    with pytest.raises(CollectiveMismatchError, match=said):
        settle() if end == "settle" else graph.step(ALL)
    assert graph.reduced == 5, "seen before the next pass reduces"


@pytest.mark.parametrize("end", ["settle", "next pass"])
def test_a_step_that_a_rank_left_out_shows_in_the_next_pass(ranks: Ranks, end: str) -> None:
    on_devices(ranks)(2, body_left_out, end)


def body_other_plan() -> None:
    graph, rank = Graph(), communicator().rank
    for _ in range(3):
        graph.step(ALL)
    said = r"graphs of ranks \[1\] do not do what they did in the pass before.*on rank {}"
    with pytest.raises(CollectiveMismatchError, match=said.format(rank)):
        graph.steps(SOME if rank == 1 else ALL, ALL)
    # Rank 1 knows before it reduces, the other one a pass later.
    assert graph.reduced == 3 + (rank == 0)


def test_a_rank_with_another_graph_knows_at_once_and_all_in_the_next_pass(ranks: Ranks) -> None:
    on_devices(ranks)(2, body_other_plan)


def body_left_gradients() -> None:
    graph, rank = Graph(), communicator().rank
    for _ in range(3):
        graph.step(ALL)
    if rank == 1:
        graph.marking.keep()
    with pytest.raises(CollectiveMismatchError, match="as many passes without a reduction"):
        graph.steps(ALL, ALL)
    assert graph.reduced == 3 + (rank == 0)


def test_gradients_that_were_left_on_one_rank_are_told(ranks: Ranks) -> None:
    on_devices(ranks)(2, body_left_gradients)


def body_other_gradient() -> None:
    graph, rank = Graph(), communicator().rank
    for _ in range(3):
        graph.step(ALL)
    with pytest.raises(CollectiveMismatchError, match="the gradient of 'weight' is "):
        graph.steps(ALL, ALL, gradient=1.0 + rank)
    assert graph.reduced == 4


@pytest.mark.parametrize("is_on_host", [True, False])
def test_gradients_that_differ_after_pass_4_are_told(ranks: Ranks, is_on_host: bool) -> None:
    (ranks if is_on_host else on_devices(ranks))(2, body_other_gradient)


def body_other_weights() -> None:
    graph, world = Graph(), communicator()
    for _ in range(5):
        graph.step(ALL)
    if world.rank == 1:
        graph.module.weight.data.add_(1)
    said = r"copies of the weights.* but weight is that of rank 0 on ranks \[0\]; off by"
    with pytest.raises(CollectiveMismatchError, match=said):
        graph.steps(*[ALL] * 6)
    # Compared before the step behind pass 8; a device's digest is sent in pass 9, and read in 10.
    assert graph.reduced == (8 if world.is_on_host else 10)


@pytest.mark.parametrize("is_on_host", [True, False])
def test_weights_that_one_rank_writes_alone_are_told(ranks: Ranks, is_on_host: bool) -> None:
    (ranks if is_on_host else on_devices(ranks))(2, body_other_weights)
