"""The ranks of a simulated run: the code of real ones, on clients of a counting store.

A rank has a `FailureMonitor` of its own. The looks of its board come when they are due::

    rank 0   ──sign in──┐ waits for a key ┄┄┄┄┄┄┄┄┄┄┄┌──on──
    rank 1              └──sign in──┐ pauses ┄┄┄┄┌───┘
    boards        │ looks           │         │ looks            every so many simulated seconds
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from support.control_plane.store import CountingStore, Server
from support.control_plane.time import SimulatedClock
from support.internals.comm import (
    Awaited,
    Entry,
    FailureMonitor,
    Need,
    Process,
    device_choice,
    meet,
    membership,
    rendezvous,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """The requests of one rank."""

    operations: int
    bytes_read: int

    def __sub__(self, before: Used) -> Used:
        return Used(
            operations=self.operations - before.operations,
            bytes_read=self.bytes_read - before.bytes_read,
        )


class _Place(Awaited):
    """A place of the program that all ranks come to."""

    lacks = "has not come to it"

    def __init__(self, name: str, others: Sequence[int]) -> None:
        self.ranks = others
        self._name = name

    def describe(self) -> str:
        return f"the comparison of {self._name},"

    def topic(self, answers: Mapping[int, Mapping[str, Any]]) -> str:
        return self._name

    def need(self) -> Need:
        ranks = Need.listed(self.ranks)
        return Need(ranks=ranks, channel="world", number=sys.maxsize, place=self._name)

    def has_come(self, rank: int, answer: Mapping[str, Any]) -> bool:
        return self._name in answer["described"]["places"]["come to"]


class SimulatedRank:
    """One rank of a simulated run."""

    def __init__(
        self, server: Server, clock: SimulatedClock, rank: int, size: int, per_host: int
    ) -> None:
        self.store = CountingStore(server)
        self.clock = clock
        self._per_host = per_host
        self.host = f"node-{rank // per_host:04d}"
        self.rank = rank
        self.monitor = FailureMonitor(
            self.store,
            rank,
            size,
            hang_after=10.0,
            clock=clock,
            process=Process(
                place=f"{self.host}/0a5f3c1e-77d2-4c0b-9b3e-{rank // per_host:012d}/4026531836",
                pid=100_000 + 7 * rank,
                started=1_000_000 + 3 * rank,
            ),
        )
        self._places: list[str] = []
        self.monitor.ranks.describers["places"] = self

    def sign_in(self, timeout: float | None = None) -> Sequence[Entry]:
        """Come to the roll of the run, with the words of a rank that sees the GPUs of its host."""
        local = self.rank % self._per_host
        devices = [""] * self._per_host
        devices[local] = _digest(f"GPU {self.rank}")
        entry = device_choice.own_entry("gloo") | {
            "host": self.host,
            "place": _digest(self.host),
            "local": local,
            "devices": devices,
        }
        return rendezvous.sign_in(self.monitor, entry, timeout)

    def wait_for(self, place: str, timeout: float | None = None) -> None:
        """Come to ``place`` of the program, and wait until all ranks have come."""
        self._places.append(place)
        there = _Place(place, self.monitor.others)
        meet(self.monitor, f"here/{place}", there, lambda answers: False, timeout)

    def describe(self) -> Mapping[str, Any]:
        """Tell ranks that ask where this one has come to."""
        return {"come to": self._places}

    def leave(self) -> bool:
        """Leave the run; tells whether all have left it together."""
        return membership.leave_together(self.monitor)

    @property
    def used(self) -> Used:
        """The requests so far."""
        count = self.store.operations.total()
        return Used(operations=count, bytes_read=self.store.bytes_read)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def simulate(
    size: int, body: Callable[[SimulatedRank], T], *, per_host: int = 8
) -> list[T | BaseException]:
    """Run ``body`` on ``size`` ranks; returns what it returned or raised, in rank order."""
    server, clock = Server(), SimulatedClock()
    ranks = [SimulatedRank(server, clock, rank, size, per_host) for rank in range(size)]

    def main(rank: SimulatedRank) -> T | BaseException:
        try:
            return body(rank)
        except Exception as error:
            return error
        finally:
            rank.monitor.stop()

    return clock.run([functools.partial(main, rank) for rank in ranks])
