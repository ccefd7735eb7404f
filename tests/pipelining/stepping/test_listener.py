"""Every action of a step is told to observers and to torch's profiler, and to nobody else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from meshwright.comm import Clock, Timer, communicator, gather_timeline, observe
from meshwright.pipelining import PipelineStage, ScheduleZBVZeroBubble
from meshwright.testing import Ranks
from support.internals.pipelining import Listener
from support.internals.schedule import (
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    bubble,
    compare,
    schedule_of,
)


class Spread(nn.Linear):
    """A module that says its parameters come and go."""

    def pipeline_residency(self) -> Spread:
        return self

    def begin(self, what: str, *, training: bool) -> None: ...

    def unshard(self) -> None: ...

    def wait_unshard(self) -> None: ...

    def accumulate(self) -> None: ...

    def reshard(self) -> None: ...

    def reduce(self) -> None: ...

    def finish(self) -> None: ...

    def drop(self) -> None: ...


def body() -> None:
    world = communicator()
    torch.manual_seed(0)
    layers = [Spread(4, 4) if s == 1 else nn.Linear(4, 4) for s in range(4)]
    mine = [world.rank, 3 - world.rank]
    stages = [PipelineStage(layers[s], s, 4, torch.device("cpu")) for s in mine]
    schedule = ScheduleZBVZeroBubble(stages, 4, loss_fn=nn.MSELoss())
    x = torch.randn(8, 4)

    def run() -> None:
        schedule.step(*((x,) if world.rank == 0 else ()), target=x if world.rank == 0 else None)

    run()
    assert Listener.attached(world.clock) is None
    timer = Timer(Clock())
    with observe(timer):
        assert Listener.attached(world.clock) is not None
        run()
    timeline = gather_timeline(timer, world)
    found = schedule_of(timeline)
    assert found is not None
    assert [list(found.actions(r)) for r in (0, 1)] == [
        list(schedule.schedule.actions(r)) for r in (0, 1)
    ]
    names = [event.name for event in timeline.events if event.rank == world.rank]
    for action in schedule.lowered.actions(world.rank):
        told = str(action) in names
        comes_and_goes = action.operation in (UNSHARD, RESHARD, REDUCE_GRAD)
        is_spread = action.stage == 1 or not comes_and_goes
        assert told == is_spread, (action, names)
    lanes = {event.name: event.lane for event in timeline.events}
    assert lanes["1UNSHARD"] == lanes["1RESHARD"] == "gather"
    assert lanes["1REDUCE_GRAD"] == "reduce"
    assert lanes["0SEND_F0"] == lanes["1RECV_F0"] == "transfer"
    # What a rank waits for is not counted as its work.
    ended = {event.name: event.end for event in timeline.events}
    waited = 0
    for event in timeline.select(rank=world.rank, lane="compute").events:
        for letter, receive in (("F", RECV_F), ("I", RECV_B), ("B", RECV_B)):
            needed = ended.get(event.name.replace(letter, str(receive)))
            if event.category == letter and needed is not None:
                assert event.start >= needed
                waited += 1
    assert waited
    comparison = compare(timeline)
    assert comparison is not None
    assert 0 < bubble(timeline) == comparison.bubble < 1
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    ranges = {event.key for event in profiler.key_averages()}
    assert {f"PP:{a}" for a in schedule.schedule.actions(world.rank)} <= ranges
    kinds = {SEND_F: "send", SEND_B: "send", RECV_F: "recv", RECV_B: "recv"}
    transfers = {
        f"meshwright::{kinds[a.operation]} {a} on axis pipeline"
        for a in schedule.lowered.actions(world.rank)
        if a.operation in kinds
    }
    assert transfers
    assert transfers <= ranges


@pytest.mark.backends("shm", "gloo")
def test_actions_are_told(ranks: Ranks) -> None:
    ranks(2, body)
