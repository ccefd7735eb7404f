"""Thousands of ranks in simulated time: requests are counted, and waits take no time of ours."""

from __future__ import annotations

from support.control_plane import SimulatedRank, Used, simulate
from support.control_plane.store import CountingStore, Server
from support.internals.comm import KeyWait


def test_requests_are_counted_by_key_and_answered_as_c10d_does() -> None:
    server = Server()
    one, other = CountingStore(server), CountingStore(server)
    one.set("a", "1")
    one.append("a", b"2")
    assert other.compare_set("a", "x", "x") == b"12" and other.bytes_read == 2
    assert not other.check(["a", "b", "c"])
    assert (other.add("n", 3), one.add("n", 0)) == (3, 3)
    assert one.compare_set("b", "x", "y") == b"x"  # nothing stands there, and nothing is left
    assert one.compare_set("b", "", "y") == other.compare_set("b", "", "z") == b"y"
    assert other.delete_key("b") and not other.delete_key("b")
    assert other.operations == {
        "check": 3,
        "add": 1,
        "compare_set": 2,
        "delete_key": 2,
    }


def test_who_waits_for_a_key_goes_on_when_it_comes_or_at_the_limit() -> None:
    def body(me: SimulatedRank) -> tuple[bool, float, Used]:
        if me.rank == 0:
            me.clock.sleep(5.0)
            me.store.set("here", "")
            return True, me.clock.now(), me.used

        def wait(arrival: KeyWait, seconds: float) -> bool:
            return arrival.wait(seconds)

        found = wait(
            me.clock.arrival(me.store, "here", lambda: None), 10.0 if me.rank == 1 else 2.0
        )
        return found, me.clock.now(), me.used

    first, second, third = simulate(3, body)
    assert first == (True, 5.0, Used(operations=1, bytes_read=0))
    assert second == (True, 5.0, Used(operations=1, bytes_read=0))
    assert third == (False, 2.0, Used(operations=1, bytes_read=0))


def test_the_ranks_of_a_run_meet_and_an_error_of_one_is_its_outcome() -> None:
    def body(me: SimulatedRank) -> int:
        if me.rank == 3:
            raise ValueError("no such token")
        me.clock.sleep(0.1 * me.rank)
        return len(me.sign_in(60.0 if me.rank else 30.0))

    outcomes = simulate(4, body)
    assert [type(outcome) for outcome in outcomes].count(ValueError) == 1
    assert "waited 30 s for 4 ranks: rank 3 did not come" in str(outcomes[0])


def test_board_looks_take_their_time() -> None:
    def body(me: SimulatedRank) -> int:
        me.sign_in()
        me.clock.sleep(1.0)
        before = me.used
        me.clock.sleep(10.0)
        return (me.used - before).operations

    assert simulate(4, body) == [40, 40, 40, 40]  # four a second
