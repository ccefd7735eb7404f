"""Actions as text, and what needs what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.schedule import Action, Operation, Schedule, dependencies
from support.internals.schedule import PER_MICROBATCH, overlap

NUMBERS = st.integers(0, 10_000)
SINGLE = [operation for operation in Operation if operation is not Operation.OVERLAP_F_B]


@st.composite
def single(draw: st.DrawFn) -> Action:
    operation = draw(st.sampled_from(SINGLE))
    microbatch = draw(NUMBERS) if operation in PER_MICROBATCH else None
    return Action(draw(NUMBERS), operation, microbatch)


@st.composite
def pair(draw: st.DrawFn) -> Action:
    compute = st.sampled_from([Operation.F, Operation.I, Operation.W, Operation.B])
    parts = [Action(draw(NUMBERS), draw(compute), draw(NUMBERS)) for _ in range(2)]
    return overlap(*parts)


@given(st.one_of(single(), pair()))
def test_text_is_read_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, Operation.F, 0)),
        ("1UNSHARD", Action(1, Operation.UNSHARD)),
        ("3SEND_F1", Action(3, Operation.SEND_F, 1)),
        ("1REDUCE_GRAD", Action(1, Operation.REDUCE_GRAD)),
        (
            "(0F8;3B0)OVERLAP_F_B",
            overlap(Action(0, Operation.F, 8), Action(3, Operation.B, 0)),
        ),
    ],
)
def test_examples(text: str, action: Action) -> None:
    assert Action.parse(text) == action
    assert str(action) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "2F",
        "2f0",
        "02F0",
        "2F00",
        "2F-1",
        "1F0zzz",
        "2FRED",
        "1UNSHARD0",
        "1REDUCE_GRAD3",
        "2F0 ",
        " 2F0",
        "2F0\n",
        "2F٣",
        "OVERLAP_F_B",
        "0OVERLAP_F_B",
        "(0F8)OVERLAP_F_B",
        "(0F8;3B0)",
        "(0F8;3B0;1F1)OVERLAP_F_B",
        "(0F8;1UNSHARD)OVERLAP_F_B",
        "((0F8;3B0)OVERLAP_F_B;1F0)OVERLAP_F_B",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(RuntimeError, match="Invalid"):
        Action.parse(text)


@given(st.text(alphabet="0123456789FIWBSENDRCV_ULOTGA();", max_size=14))
def test_whatever_is_accepted_is_written_as_it_was(text: str) -> None:
    try:
        action = Action.parse(text)
    except RuntimeError:
        return
    assert str(action) == text


def test_torch_names_are_aliases() -> None:
    assert Operation.FORWARD is Operation.F
    assert Operation["FULL_BACKWARD"] is Operation.B


def needs(text: str, schedule: Schedule) -> set[str]:
    return set(map(str, dependencies(Action.parse(text), schedule)))


def test_dependencies_of_a_chain() -> None:
    rows = [["0F0", "0B0"], ["1F0", "1I0", "1W0"]]
    schedule = Schedule.of("two", [[Action.parse(text) for text in row] for row in rows], [0, 1], 1)
    assert needs("0F0", schedule) == {"0UNSHARD"}
    assert needs("1F0", schedule) == {"0F0", "1RECV_F0", "1UNSHARD"}
    assert needs("1I0", schedule) == {"1F0", "1UNSHARD"}
    assert needs("1W0", schedule) == {"1I0", "1UNSHARD"}
    assert needs("0B0", schedule) == {"0F0", "1I0", "0RECV_B0", "0UNSHARD"}
    assert needs("0SEND_F0", schedule) == {"0F0"}
    assert needs("1RECV_F0", schedule) == {"0SEND_F0"}
    assert needs("1SEND_B0", schedule) == {"1I0"}
    assert needs("0RECV_B0", schedule) == {"1SEND_B0"}
    assert needs("0REDUCE_GRAD", schedule) == {"0B0"}
    assert needs("1REDUCE_GRAD", schedule) == {"1W0"}


def test_dependencies_of_a_skip_and_of_a_local_edge() -> None:
    edges = [(0, 1), (1, 2), (2, 3), (0, 3)]
    schedule = Schedule.of("v", [[], []], [0, 1, 1, 0], 1, edges)
    assert needs("3F0", schedule) == {"2F0", "0F0", "3RECV_F0", "3UNSHARD"}
    assert needs("2F0", schedule) == {"1F0", "2UNSHARD"}
    assert needs("0B0", schedule) == {"0F0", "1B0", "3B0", "0RECV_B0", "0UNSHARD"}
    assert needs("3RECV_F0", schedule) == {"2SEND_F0"}
    both = "(1F0;2B0)OVERLAP_F_B"
    assert needs(both, schedule) == {
        "0F0", "1RECV_F0", "1UNSHARD", "2F0", "3B0", "2RECV_B0", "2UNSHARD",
    }  # fmt: skip
