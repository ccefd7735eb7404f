"""Transfers, gathers and reductions added to compute actions; deadlocks found."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import ScheduleError
from meshwright.schedule import Action, Operation, Schedule, dependencies
from support.internals.schedule import (
    BUILDERS,
    Costs,
    build,
    check,
    check_lowered,
    forward_part,
    lower,
    received,
    simulate,
    stage_ranks,
    with_residency,
)

COMPUTE = (Operation.F, Operation.I, Operation.W, Operation.B)


def rows(texts: list[str]) -> list[list[Action]]:
    return [[Action.parse(word) for word in text.split()] for text in texts]


def drawn(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, schedule.actions(rank))) for rank in range(schedule.ranks)]


def test_1f1b_in_full() -> None:
    assert drawn(lower(build("1f1b", 2, 2))) == [
        "0UNSHARD 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0REDUCE_GRAD 0RESHARD",
        "1UNSHARD 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1RESHARD",
    ]


def test_stages_of_one_rank_hand_over_without_messages() -> None:
    lowered = drawn(lower(build("zbv", 1, 2)))
    assert "SEND" not in lowered[0]
    assert "RECV" not in lowered[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", BUILDERS)
def test_no_schedule_deadlocks(name: str) -> None:
    for ranks in (2, 3, 4, 8):
        for microbatches in (1, 2, 3, 4, 6, 8, 9, 16):
            for chunks in (1, 2, 4):
                try:
                    schedule = build(name, ranks, microbatches, chunks)
                except ValueError:
                    continue
                lowered = lower(schedule)
                check_lowered(lowered)
                check_lowered(lower(forward_part(schedule), reduce=False))
                costs = Costs.shared(chunks)
                free = simulate(schedule, costs, events=False).makespan
                assert simulate(lowered, costs, events=False).makespan == pytest.approx(free)


@st.composite
def random_orders(draw: st.DrawFn) -> Schedule:
    """Any order of compute actions that the rule allows, with skips and any stage map."""
    ranks = draw(st.integers(1, 4))
    stages = ranks * draw(st.integers(1, 3))
    microbatches = draw(st.integers(1, 4))
    style = draw(st.sampled_from(["loop", "v"]))
    skips = draw(st.sets(st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1))))
    edges = {(s, s + 1) for s in range(stages - 1)} | {(s, t) for s, t in skips if s < t}
    dice = random.Random(draw(st.integers(0, 10**6)))
    todo: list[Action] = []
    for stage in range(stages):
        for k in range(microbatches):
            splits = dice.random() < 0.5
            todo += [Action(stage, op, k) for op in (COMPUTE[:3] if splits else COMPUTE[::3])]
    placed: list[list[Action]] = [[] for _ in range(ranks)]
    holders = stage_ranks(ranks, stages, style)
    plain = Schedule.of("random", [todo], holders, microbatches, edges)
    done: set[Action] = set()
    while todo:
        ready = [
            a
            for a in todo
            if all(n in done for n in dependencies(a, plain) if n.operation in COMPUTE)
        ]
        chosen = dice.choice(ready)
        todo.remove(chosen)
        done.add(chosen)
        placed[holders[chosen.stage]].append(chosen)
    return Schedule.of("random", placed, holders, microbatches, edges)


@pytest.mark.parametrize("unsharded", [1, 2, 3])
def test_gathers_of_one_rank_are_those_of_all(unsharded: int) -> None:
    schedule = build("dualpipev", 2, 6)
    lowered = lower(schedule, unsharded=unsharded, reduce=False)
    kinds = {*COMPUTE, Operation.OVERLAP_F_B, Operation.UNSHARD, Operation.RESHARD}
    for rank in range(schedule.ranks):
        expected = [action for action in lowered.actions(rank) if action.operation in kinds]
        row = [each for action in schedule.actions(rank) for each in (action, None)]
        assert with_residency(row, unsharded) == expected


@settings(max_examples=150, deadline=None)
@given(random_orders(), st.integers(1, 3))
def test_random_orders_are_completed(schedule: Schedule, unsharded: int) -> None:
    check(schedule)
    lowered = lower(schedule, unsharded=unsharded)
    check_lowered(lowered)
    for rank in range(schedule.ranks):
        there: set[int] = set()
        for action in lowered.actions(rank):
            if action.operation is Operation.UNSHARD:
                assert action.stage not in there
                there.add(action.stage)
            elif action.operation is Operation.RESHARD:
                there.remove(action.stage)
            assert len(there) <= unsharded
        assert not there


def test_gathers_are_as_few_as_they_can_be() -> None:
    schedule = Schedule.of("one", rows(["0F0 1F0 2F0 2B0 1B0 0B0"]), [0, 0, 0], 1)
    for limit, gathers in ((1, 5), (2, 4), (3, 3)):
        lowered = lower(schedule, unsharded=limit)
        found = [a for a in lowered.actions(0) if a.operation is Operation.UNSHARD]
        assert len(found) == gathers


def test_an_order_that_cannot_end_is_refused() -> None:
    crossed = Schedule.of("crossed", rows(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"]), [0, 1], 2)
    with pytest.raises(ScheduleError, match="Malformed compute schedule, can't schedule"):
        lower(crossed)
    with pytest.raises(ScheduleError, match="never ends"):
        simulate(crossed)


def test_what_nobody_reads_is_refused() -> None:
    schedule = Schedule.of("unread", rows(["0F0 0B0", "1B0"]), [0, 1], 1)
    with pytest.raises(ScheduleError, match="rank 1 has no action that reads what 0SEND_F0"):
        lower(schedule)


def test_communication_in_a_compute_schedule_is_refused() -> None:
    lowered = lower(build("gpipe", 2, 2))
    with pytest.raises(ValueError, match="Expected compute-only schedule but found communication"):
        lower(lowered)


def test_a_deadlock_is_drawn_with_its_cycle() -> None:
    texts = [
        "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    ]
    with pytest.raises(ScheduleError) as caught:
        check_lowered(Schedule.of("blocked", rows(texts), [0, 1], 2))
    text = str(caught.value)
    assert "rank 0 at 0SEND_F1 waits for the receive of the outputs of stage 0" in text
    assert "rank 1 at 1SEND_B0 waits for the receive of the gradients of stage 1" in text
    assert text.count("<-- ERROR HERE") == 2


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ("0F0 0SEND_F0 0RECV_B0 0B0", "1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0", "0UNSHARD"),
        ("0UNSHARD 0F0 0SEND_F0 0RECV_B0 0B0", "1UNSHARD 1F0 1B0 1SEND_B0", "1RECV_F0"),
        (
            "0UNSHARD 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD",
            "1UNSHARD 1RECV_F0 1F0 1REDUCE_GRAD 1B0 1SEND_B0",
            "1B0 has to come before",
        ),
        ("0UNSHARD 0SEND_F0 0F0 0RECV_B0 0B0", "1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0", "0F0"),
    ],
)
def test_what_no_waiting_brings_is_named(first: str, second: str, text: str) -> None:
    with pytest.raises(ScheduleError, match=text):
        check_lowered(Schedule.of("broken", rows([first, second]), [0, 1], 1))


def test_receives_are_posted_in_the_order_of_the_sends() -> None:
    texts = [
        "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
        "1UNSHARD 1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    ]
    schedule = Schedule.of("swapped", rows(texts), [0, 1], 2)
    check_lowered(schedule)
    posted = received(schedule, 1)
    assert [m.microbatch for m in posted[Action(1, Operation.RECV_F, 1)]] == [0, 1]
    assert posted[Action(1, Operation.RECV_F, 0)] == ()


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["0F0 0B0", ""], "Schedule is missing actions for rank 1"),
        (["0F0 0B0 0F1 0B1", "1F0 1B0"], "Got 1 F microbatches for stage 1, expected 2"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0"], "Invalid backward microbatches for stage 1"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1I1"], "Invalid backward microbatches for stage 1"),
        (["0B0 0F0 0F1 0B1", "1F0 1F1 1B0 1B1"], "0F0 has to come before"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1W0 1I0 1B1"], "1I0 has to come before"),
        (["0F0 0B0 0F1 0B1", "1F0 1F0 1B0 1B1"], "it has been there before"),
        (["0F0 0B0 0F1 0B1 1F0", "1F1 1B0 1B1"], "stage 1 is on rank 1"),
        (["0F0 0B0 0F1 0B1", "1F0 1F2 1B0 1B1"], "there is no microbatch 2"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1I0 1B0 1W0 1B1"], "its input half has run already"),
        (["0F0 0B0 0F1 0B1 7F0", "1F0 1F1 1B0 1B1"], "there is no stage 7"),
    ],
)
def test_incomplete_schedules(texts: list[str], problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        check(Schedule.of("bad", rows(texts), [0, 1], 2))


def test_the_number_of_ranks_is_checked() -> None:
    text = "Schedule has incorrect number of ranks - expected 3, actual 2"
    with pytest.raises(AssertionError, match=text):
        check(build("gpipe", 2, 2), ranks=3)
