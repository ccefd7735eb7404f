"""Observers hear everything, cost nothing when absent, and can never break the training."""

from __future__ import annotations

import logging

import torch

from meshwright import comm
from meshwright.comm import Clock, Recorder, Timer, observe
from meshwright.testing import Ranks
from support.internals.comm import registry
from support.internals.timeline import Collective


class Broken(Recorder):
    """Fails when it hears of a collective."""

    def issued(self, collective: Collective) -> None:
        raise OSError("disk full")


def test_a_failing_observer_is_removed_and_logged(ranks: Ranks) -> None:
    def body() -> tuple[int, int]:
        world = comm.communicator()
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logging.getLogger("meshwright").addHandler(handler)
        with observe(Broken(), recorder := Recorder()):
            for _ in range(2):
                assert world.all_reduce(torch.ones(1)).wait().item() == 2
        assert len(messages) == 1 and "is removed" in messages[0]
        assert registry.PROCESS.observers == []
        return len(recorder.collectives), len(messages)

    assert ranks(2, body) == [(2, 1)] * 2


def test_timer_measures_collectives_and_spans_on_their_lanes(ranks: Ranks) -> None:
    def body() -> list[tuple[str, str, int, int]]:
        world = comm.communicator()
        timer = Timer()
        with observe(timer):
            with timer.span("forward"):
                pending = world.all_reduce(torch.ones(8), label="reduce bucket 0")
            pending.wait()
            world.all_gather(torch.empty(4), torch.ones(2), label="unshard").wait()
        timeline = timer.timeline(world.rank)
        for event in timeline.events:
            assert event.end >= event.start > 0
        return [(e.name, e.lane, e.rank, e.bytes) for e in timeline.events]

    for rank, events in enumerate(ranks(2, body)):
        assert sorted(events) == [
            ("forward", "compute", rank, 0),
            ("reduce bucket 0", "reduce", rank, 32),
            ("unshard", "gather", rank, 16),
        ]


def test_timer_keeps_the_newest() -> None:
    timer = Timer(keep=2)
    for name in "abc":
        with timer.span(name):
            pass
    assert [event.name for event in timer.timeline(0).events] == ["b", "c"]
    timer.clear()
    assert timer.timeline(0).events == ()


def test_the_clock_of_a_cpu_moves_on() -> None:
    clock = Clock()
    first, second = clock.mark(), clock.mark()
    assert second.seconds() >= first.seconds()
