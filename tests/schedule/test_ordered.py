"""Schedules on a transport that goes by order alone: they end, and no message is another."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from meshwright.errors import ScheduleError
from meshwright.schedule import Action, Schedule
from support.internals.schedule import (
    BUILDERS,
    Message,
    build,
    forward_part,
    lanes,
    lower,
)
from support.schedule import OrderedTransfer, check_ordered, check_rows, issued


def found(name: str) -> list[Schedule]:
    """The schedule over 2 to 8 ranks, several numbers of microbatches, and stages a rank."""
    schedules = []
    for ranks in range(2, 9):
        for microbatches in (1, 2, 3, 4, 8, 16):
            for chunks in (1, 2, 3):
                try:
                    schedules.append(build(name, ranks, microbatches, chunks))
                except ValueError:
                    continue
    return schedules


@pytest.mark.few(2)
@pytest.mark.parametrize("name", BUILDERS)
def test_nothing_deadlocks_and_nothing_is_mixed_up(name: str) -> None:
    schedules = found(name)
    assert {schedule.ranks for schedule in schedules} == set(range(2, 9))
    for schedule in schedules:
        check_ordered(lower(schedule))
        check_ordered(lower(forward_part(schedule), reduce=False))


@pytest.mark.parametrize("name", BUILDERS)
def test_skips_neither(name: str) -> None:
    for ranks, chunks in ((2, 2), (3, 1), (4, 1), (4, 2)):
        for microbatches in (4, 8):
            stages = ranks * chunks
            edges = [(s, t) for s in range(stages) for t in range(s + 1, stages) if (s + t) % 2]
            try:
                schedule = build(name, ranks, microbatches, chunks, edges=edges)
            except ValueError:
                continue
            check_ordered(lower(schedule))


def test_each_side_of_a_lane_has_its_order() -> None:
    for name in BUILDERS:
        schedule = lower(build(name, 4, 8))
        for late in (False, True):
            rows = [issued(schedule, rank, late=late) for rank in range(4)]
            for (source, target), messages in lanes(schedule).items():
                for rank, is_send in ((source, True), (target, False)):
                    told = [
                        each.message
                        for each in rows[rank]
                        if isinstance(each, OrderedTransfer)
                        and each.is_send == is_send
                        and (each.message.source_rank, each.message.target_rank) == (source, target)
                    ]
                    assert told == list(messages)


def both_ways(message: Message) -> Hashable:
    return frozenset((message.source_rank, message.target_rank))


def everything(message: Message) -> Hashable:
    return "the group"


@pytest.mark.parametrize("lane", [both_ways, everything])
def test_one_communicator_for_both_directions_deadlocks(lane: object) -> None:
    with pytest.raises(ScheduleError, match="1f1b never ends: rank 0 waits with 0B0, and its que"):
        check_ordered(lower(build("1f1b", 2, 4)), lane=lane)  # type: ignore[arg-type]


def planted(rank: int, is_send: bool) -> list[list[Action | OrderedTransfer]]:
    """What ranks give to their devices, with the first two sends or receives of one swapped."""
    schedule = lower(build("gpipe", 2, 4))
    rows = [issued(schedule, number) for number in range(2)]
    row = rows[rank]
    one, two, *_ = [
        n for n, e in enumerate(row) if isinstance(e, OrderedTransfer) and e.is_send == is_send
    ]
    row[one], row[two] = row[two], row[one]
    return rows


@pytest.mark.parametrize(("rank", "is_send"), [(0, True), (1, False), (1, True), (0, False)])
def test_what_is_swapped_is_named(rank: int, is_send: bool) -> None:
    with pytest.raises(ScheduleError, match=r"rank \d sends .* where rank \d takes it for .*"):
        check_rows(lower(build("gpipe", 2, 4)), planted(rank, is_send))
