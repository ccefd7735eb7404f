"""Requests of a rank to the store of its run, by key: few, and as good as independent of the size.

Thousands of ranks run in simulated time; their boards' own looks are counted.
"""

from __future__ import annotations

import functools

from meshwright.testing.control_plane import SimulatedRank, Used, simulate

FEW, MANY = 512, 4096


def spread(rank: int, seconds: float) -> float:
    """A moment for ``rank`` within ``seconds``, another one than its neighbours'."""
    return seconds * (rank * 0.7548 % 1)


def sign_in(me: SimulatedRank) -> Used:
    me.clock.sleep(spread(me.rank, 1.0))
    entry = me.sign_in()[me.rank]
    assert entry["host"] and len(me.monitor.ranks.roll.processes) == 8
    return me.used


@functools.cache
def most(size: int) -> Used:
    """The most that any of ``size`` ranks asks of the store."""
    outcomes = [each for each in simulate(size, sign_in) if isinstance(each, Used)]
    assert len(outcomes) == size
    return Used(
        operations=max(each.operations for each in outcomes),
        bytes_read=max(each.bytes_read for each in outcomes),
    )


def test_to_sign_in_takes_few_requests_and_bytes() -> None:
    few, many = most(FEW), most(MANY)
    assert many.operations <= 40 and many.bytes_read <= 64 * 1024
    assert many.operations <= 1.5 * few.operations
