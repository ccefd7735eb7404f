"""Requests of a rank to the store of its run, by key: few, and as good as independent of the size.

Thousands of ranks run in simulated time; their boards' own looks are counted.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable

import pytest

from meshwright.errors import CollectiveTimeoutError, RankFailedError
from support.control_plane import SimulatedRank, Used, simulate

FEW, MANY = 512, 4096
SETTLED = 31.0
"""Simulated seconds after which all have signed in, and the same ranks lead for a while."""


def spread(rank: int, seconds: float) -> float:
    """A moment for ``rank`` within ``seconds``, another one than its neighbors'."""
    return seconds * (rank * 0.7548 % 1)


def sign_in(me: SimulatedRank) -> Used:
    me.clock.sleep(spread(me.rank, 1.0))
    entry = me.sign_in()[me.rank]
    assert entry["host"] and len(me.monitor.ranks.processes) == 8
    return me.used


def cost(used: Used) -> int:
    return used.operations


def settle(me: SimulatedRank, seconds: float) -> Used:
    """Sign in, and go on at a moment of this rank's own, within so many ``seconds``."""
    me.sign_in()
    me.clock.sleep(SETTLED + spread(me.rank, seconds) - me.clock.now())
    return me.used


def first_passes(me: SimulatedRank) -> Used:
    before = settle(me, 0.05)
    for number in range(10):
        me.wait_for(f"event {number}")
    return me.used - before


def wait_for_a_late_rank(me: SimulatedRank) -> Used:
    before = settle(me, 0.05)
    if me.rank == 3:
        me.clock.sleep(9.9)
    me.wait_for("the forward")
    after = me.used
    me.clock.sleep(5.0)  # whoever asks is answered
    return after - before


def leave(me: SimulatedRank) -> Used:
    before = settle(me, 3.0)
    assert me.leave()
    return me.used - before


@functools.cache
def most(body: Callable[[SimulatedRank], Used], size: int) -> Used:
    """The most that any of ``size`` ranks asks of the store."""
    outcomes = [each for each in simulate(size, body) if isinstance(each, Used)]
    assert len(outcomes) == size
    return Used(
        operations=max(each.operations for each in outcomes),
        bytes_read=max(each.bytes_read for each in outcomes),
    )


@pytest.mark.parametrize("size", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_to_sign_in_takes_few_requests_and_bytes(size: int) -> None:
    """All ask as little as in a small world, but the last to come: it reads what each has left."""
    outcomes = simulate(size, sign_in)
    *others, last = sorted((each for each in outcomes if isinstance(each, Used)), key=cost)
    assert len(others) == size - 1
    assert max(each.operations for each in others) <= 40
    assert max(each.bytes_read for each in others) <= 64 * 1024
    assert size < last.operations <= size + 40
    assert last.bytes_read <= 512 * size


@pytest.mark.few(0, slow=1)
@pytest.mark.parametrize("body", [first_passes, wait_for_a_late_rank, leave])
def test_thousands_that_wait_ask_little(body: Callable[[SimulatedRank], Used]) -> None:
    """Ten first events, ten seconds of waiting for a rank, and the end of the run."""
    few, many = most(body, FEW), most(body, MANY)
    assert many.operations <= (50 if body is first_passes else 20)
    assert many.operations <= 1.5 * few.operations


def test_those_that_wait_read_no_answers_of_others() -> None:
    """A few ranks ask where the late one is; it is named once, and the others hear of it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("meshwright")
    logger.addHandler(handler)
    size = 64

    def body(me: SimulatedRank) -> Used:
        before = settle(me, 0.05)
        if me.rank == 3:
            me.clock.sleep(12.0)
        me.wait_for("the forward")
        after = me.used
        me.clock.sleep(5.0)
        return after - before

    try:
        outcomes = simulate(size, body)
    finally:
        logger.removeHandler(handler)
    read = sorted(each.bytes_read for each in outcomes if isinstance(each, Used))
    assert len(read) == size
    assert read[-9] < 4 * 1024 < read[-8] / 10
    assert len(lines) == size and len(set(lines)) == 1
    assert "the comparison of the forward, has not ended after" in lines[0]
    assert lines[0].count("has not come to it") == 1 and "rank 3 has not come" in lines[0]


def test_a_rank_that_raises_is_named_soon_on_all_that_wait() -> None:
    size = 64

    def body(me: SimulatedRank) -> float:
        settle(me, 0.05)
        if me.rank == 3:
            me.clock.sleep(30.0)
            me.monitor.publish(ValueError("no such token"))
            me.clock.sleep(5.0)
            return 0.0
        with pytest.raises(RankFailedError, match="rank 3 failed first: ValueError") as caught:
            me.wait_for("the forward")
        assert caught.value.rank == 3
        return me.clock.now() - SETTLED - 30.0

    outcomes = simulate(size, body)
    assert all(isinstance(late, float) and late < 0.5 for late in outcomes), outcomes[:4]


def test_a_rank_that_never_comes_ends_the_wait_of_all_at_the_limit() -> None:
    """Those that ask name it; the others hear that, within the next look at the board."""
    size, limit = 64, 20.0

    def body(me: SimulatedRank) -> tuple[type[BaseException] | None, float]:
        settle(me, 0.05)
        if me.rank == 3:
            me.monitor.board.look = None  # it answers nobody any more
            me.clock.sleep(60.0)
            return None, 0.0
        with pytest.raises((CollectiveTimeoutError, RankFailedError), match="rank 3") as caught:
            me.wait_for("the forward", limit)
        return caught.type, me.clock.now() - SETTLED

    outcomes = [each for each in simulate(size, body) if isinstance(each, tuple)]
    assert len(outcomes) == size
    kinds = [kind for kind, _ in outcomes]
    assert kinds.count(None) == 1 and 1 <= kinds.count(CollectiveTimeoutError) <= 8
    assert max(when for _, when in outcomes) < limit + 2 * (2.0 + 0.25) + 1.0


@pytest.mark.slow
def test_others_ask_where_those_that_asked_are_lost() -> None:
    """The first eight to wait stand still, and another that never comes, where nobody can look."""
    size = 24
    arrivals = itertools.count()

    def body(me: SimulatedRank) -> str:
        settle(me, 0.05)
        if me.rank == 3 or next(arrivals) < 8:
            if me.rank != 3:
                me.monitor.leads("here/the forward")
            me.monitor.board.look = None
            me.clock.sleep(1000.0)
            me.monitor.publish(ValueError("nobody has asked"))
            return ""
        me.clock.sleep(0.1)
        with pytest.raises((CollectiveTimeoutError, RankFailedError)) as caught:
            me.wait_for("the forward")
        return str(caught.value)

    found = [each for each in simulate(size, body) if each]
    assert len(found) == size - 9
    assert all(isinstance(each, str) and "silent for 60" in each for each in found), found[:2]
