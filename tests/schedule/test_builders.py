"""Every schedule against the formulas and spot values of its paper."""

from __future__ import annotations

import pytest

from meshwright.schedule import Action, Operation, Schedule
from support.internals.schedule import (
    BUILDERS,
    Costs,
    build,
    check,
    parts_of,
    simulate,
    stage_ranks,
)

RANKS = (2, 3, 4, 8)
COSTS = ((1.0, 1.0, 1.0), (1.0, 1.5, 0.5), (1.0, 0.8, 1.2), (2.0, 1.0, 1.0))
EQUAL = (1.0, 1.0, 1.0)
LOOPED = ("interleaved1f1b", "loopedbfs", "zb1p")


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """For each rank the most microbatches of a stage whose activations it holds at a time.

    They are held from F until W or B.
    """
    peaks = []
    for rank in range(schedule.ranks):
        held = peak = 0
        for part in (part for action in schedule.actions(rank) for part in parts_of(action)):
            if part.operation is Operation.F:
                held += 1
                peak = max(peak, held)
            elif part.operation in (Operation.W, Operation.B):
                held -= 1
        peaks.append(peak)
    return tuple(peaks)


def wall_bubble(
    schedule: Schedule, chunks: int, costs: tuple[float, float, float] = EQUAL
) -> float:
    """Makespan less one rank's work; costs are those of a rank's whole share."""
    found = simulate(schedule, Costs.shared(chunks, *costs), events=False)
    return found.makespan - schedule.microbatches * sum(costs)


def can_build(name: str, ranks: int, microbatches: int, chunks: int) -> bool:
    rounds = max(1, microbatches // ranks)
    return {
        "gpipe": chunks == 1,
        "1f1b": chunks == 1 and microbatches >= ranks,
        "interleaved1f1b": microbatches % rounds == 0,
        "loopedbfs": True,
        "zb1p": microbatches % rounds == 0,
        "zb2p": chunks == 1,
        "zbv": chunks == 2,
        "vhalf": chunks == 2,
        "vmin": chunks == 2,
        "dualpipev": chunks == 2 and microbatches >= 2 * ranks,
    }[name]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", BUILDERS)
def test_every_schedule_is_complete_and_in_order(name: str) -> None:
    for ranks in (1, *RANKS):
        for microbatches in range(1, 12):
            for chunks in (1, 2, 4):
                if can_build(name, ranks, microbatches, chunks):
                    check(build(name, ranks, microbatches, chunks), ranks=ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_gpipe_and_1f1b(ranks: int) -> None:
    for costs in COSTS:
        for microbatches in (1, 2, 5, 8, 19, 32):
            bubble = (ranks - 1) * sum(costs)
            assert wall_bubble(build("gpipe", ranks, microbatches), 1, costs) == pytest.approx(
                bubble
            )
            if microbatches >= ranks:
                one = build("1f1b", ranks, microbatches)
                assert wall_bubble(one, 1, costs) == pytest.approx(bubble)
    for microbatches in (ranks, ranks + 3):
        assert set(peak_activations(build("gpipe", ranks, microbatches))) == {microbatches}
        expected = tuple(min(microbatches, ranks - rank) for rank in range(ranks))
        assert peak_activations(build("1f1b", ranks, microbatches)) == expected


@pytest.mark.few(2)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_looped(ranks: int, chunks: int) -> None:
    for microbatches in range(1, 25):
        rounds = max(1, microbatches // ranks)
        for forward, inputs, weight in COSTS:
            extra = (chunks - 1) * max(0, ranks - microbatches)
            bubble = (ranks - 1 + extra) / chunks * (forward + inputs + weight)
            costs = (forward, inputs, weight)
            breadth = build("loopedbfs", ranks, microbatches, chunks)
            assert wall_bubble(breadth, chunks, costs) == pytest.approx(bubble)
            if microbatches % rounds:
                continue
            inter = build("interleaved1f1b", ranks, microbatches, chunks)
            assert wall_bubble(inter, chunks, costs) == pytest.approx(bubble)
            if microbatches >= ranks:
                zero = build("zb1p", ranks, microbatches, chunks)
                least = (ranks - 1) / chunks * (forward + max(0.0, inputs - weight))
                assert wall_bubble(zero, chunks, costs) == pytest.approx(least)
                group = microbatches // rounds
                peaks = tuple(
                    min(microbatches * chunks, group * (chunks - 1) + 2 * (ranks - rank) - 1)
                    for rank in range(ranks)
                )
                assert peak_activations(inter) == peaks
                if microbatches % ranks == 0:
                    assert set(peak_activations(zero)) == {min(microbatches, ranks) * chunks}


@pytest.mark.parametrize("ranks", RANKS)
def test_zbv(ranks: int) -> None:
    for microbatches in range(2 * ranks - 1, 33):
        schedule = build("zbv", ranks, microbatches)
        assert wall_bubble(schedule, 2) == pytest.approx((ranks - 1) / 2)
        assert set(peak_activations(schedule)) == {2 * ranks}
    for microbatches in range(1, 2 * ranks - 1):
        assert max(peak_activations(build("zbv", ranks, microbatches))) <= 2 * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_zb2p(ranks: int) -> None:
    for microbatches in (1, ranks, 2 * ranks - 1, 2 * ranks, 3 * ranks + 1, 4 * ranks):
        schedule = build("zb2p", ranks, microbatches)
        assert set(peak_activations(schedule)) == {min(microbatches, 2 * ranks - 1)}
        if microbatches >= 2 * ranks - 1:
            found = simulate(schedule, events=False)
            assert found.spans == pytest.approx([3.0 * microbatches] * ranks)
            assert found.makespan == pytest.approx(3.0 * microbatches + ranks - 1)
    # Gaps that the weight halves in memory are too short for stay.
    for forward, inputs, weight in COSTS:
        costs = Costs(forward=forward, input=inputs, weight=weight)
        lost = max(simulate(build("zb2p", ranks, 4 * ranks), costs).spans)
        least = max(inputs - forward, forward + inputs - 2 * weight, 0.0)
        assert lost - 4 * ranks * sum((forward, inputs, weight)) == pytest.approx(
            (ranks - 1) * least
        )


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("name", "bubbles"),
    [("vhalf", {2: 1.0, 3: 2.5, 4: 3.5, 8: 9.5}), ("vmin", {2: 1.0, 3: 3.5, 4: 5.5, 8: 13.5})],
)
def test_vhalf_and_vmin(ranks: int, name: str, bubbles: dict[int, float]) -> None:
    """Activations of p/2 and p/3 microbatches, about 1/2 and 2/3 of the 3 (p - 1) of 1F1B idle."""
    most = (ranks + 2) // 2 if name == "vhalf" else (ranks + 4) // 3
    for microbatches in (1, 2, ranks, 2 * ranks, 6 * ranks + 1):
        schedule = build(name, ranks, microbatches)
        peak = max(peak_activations(schedule))
        assert peak == 2 * most if microbatches >= ranks else peak <= 2 * most
        if microbatches >= ranks:
            assert wall_bubble(schedule, 2) == bubbles[ranks]
    # Other costs lengthen each period of V-Min; V-Half has room for them.
    costs = (1.0, 1.1, 0.7)
    few, many = (wall_bubble(build(name, ranks, m * ranks), 2, costs) for m in (4, 8))
    assert (many > few + 0.1) is (name == "vmin" and ranks > 2)


@pytest.mark.parametrize("ranks", RANKS)
def test_dualpipev(ranks: int) -> None:
    for microbatches in (2 * ranks, 3 * ranks + 1, 4 * ranks):
        schedule = build("dualpipev", ranks, microbatches)
        assert wall_bubble(schedule, 2) == pytest.approx((ranks - 1) / 2)
        assert set(peak_activations(schedule)) == {2 * ranks + 1}
        operations = [action.operation for action in schedule.actions(0)]
        assert operations.count(Operation.OVERLAP_F_B) >= 2


MAKESPANS = {
    (4, 8): (33, 33, 28.5, 28.5, 25.5, 27, 25.5, 27.5, 29.5, 25.5),
    (4, 16): (57, 57, 52.5, 52.5, 49.5, 51, 49.5, 51.5, 53.5, 49.5),
    (8, 32): (117, 117, 106.5, 106.5, 99.5, 103, 99.5, 105.5, 109.5, 99.5),
}
ORDER = tuple(BUILDERS)


@pytest.mark.parametrize(("ranks", "microbatches"), MAKESPANS)
def test_makespans(ranks: int, microbatches: int) -> None:
    found = []
    for name in ORDER:
        chunks = 1 if name in ("gpipe", "1f1b", "zb2p") else 2
        schedule = build(name, ranks, microbatches, chunks)
        found.append(simulate(schedule, Costs.shared(chunks), events=False).makespan)
    assert found == pytest.approx(MAKESPANS[ranks, microbatches])


def test_spot_values() -> None:
    for name, makespan in (("interleaved1f1b", 50.25), ("zb1p", 48.75)):
        found = simulate(build(name, 4, 16, 4), Costs.shared(4), events=False)
        assert found.makespan == pytest.approx(makespan)
    few = {"interleaved1f1b": (9, 7.5, 6), "loopedbfs": (9, 7.5, 6), "zb1p": (5.5, 3.5, 2.5)}
    for name, bubbles in few.items():
        found = [wall_bubble(build(name, 4, m, 2), 2) for m in (1, 2, 3)]
        assert found == pytest.approx(bubbles)
    for ranks, most in ((4, (6, 5, 4, 3, 2, 1.5)), (2, (2, 1, 0.5))):
        for microbatches, bubble in enumerate(most, 1):
            assert wall_bubble(build("zbv", ranks, microbatches), 2) <= bubble + 1e-9
    unequal = {
        (1.0, 1.5, 0.5): (3.0, 3.0, 3.25, 9.0),
        (1.0, 1.2, 0.8): (2.1, 1.8, 2.1, 9.0),
        (1.0, 0.8, 1.2): (1.5, 1.7, 1.5, 9.0),
    }
    for costs, most in unequal.items():
        for name, chunks, bubble in zip(
            ("zb1p", "zbv", "dualpipev", "1f1b"), (2, 2, 2, 1), most, strict=True
        ):
            assert wall_bubble(build(name, 4, 16, chunks), chunks, costs) <= bubble + 1e-9


def test_orders_by_hand() -> None:
    def row(schedule: Schedule, rank: int) -> str:
        return " ".join(map(str, schedule.actions(rank)))

    assert row(build("gpipe", 2, 2), 1) == "1F0 1F1 1B0 1B1"
    assert row(build("1f1b", 2, 3), 0) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert row(build("1f1b", 2, 3), 1) == "1F0 1B0 1F1 1B1 1F2 1B2"
    assert row(build("loopedbfs", 2, 2, 2), 0) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"
    assert row(build("zb1p", 2, 2), 0) == "0F0 0F1 0I0 0W0 0I1 0W1"
    assert row(build("zb1p", 2, 2), 1) == "1F0 1I0 1F1 1I1 1W0 1W1"
    assert row(build("zb2p", 2, 4), 0) == "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3"
    assert row(build("zb2p", 2, 4), 1) == "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3"
    found = row(build("interleaved1f1b", 2, 2, 2), 1)
    assert found == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"


def test_stage_maps() -> None:
    assert stage_ranks(2, 4) == (0, 1, 0, 1)
    assert stage_ranks(2, 4, "v") == (0, 1, 1, 0)
    assert stage_ranks(3, 9, "v") == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    with pytest.raises(ValueError, match="Style snake is not supported"):
        stage_ranks(2, 4, "snake")
    text = "num_stages 5 must be evenly divisible by pp_size 2 for V schedules"
    with pytest.raises(ValueError, match=text):
        stage_ranks(2, 5, "v")


@pytest.mark.parametrize(
    ("name", "sizes", "text"),
    [
        ("1f1b", (4, 3), r"Number of microbatches \(3\) must be greater than or equal to"),
        ("1f1b", (2, 4, 2), "one stage a rank, but got 2"),
        ("interleaved1f1b", (2, 5, 2), "Interleaved 1F1B requires the number of microbatches"),
        ("zb1p", (2, 5, 2), "Zero bubble requires the number of microbatches"),
        ("zb2p", (2, 4, 2), "ZB2P has one stage a rank, but got 2. Use zb1p for several"),
        ("vhalf", (2, 4, 1), r"V-Half requires exactly 2 stages per rank, but got 1\."),
        ("vmin", (2, 4, 3), r"V-Min requires exactly 2 stages per rank, but got 3\."),
        ("zbv", (2, 4, 1), r"ZBV requires exactly 2 stages per rank, but got 1\."),
        ("dualpipev", (2, 4, 3), r"DualPipeV requires exactly 2 stages per rank, but got 3\."),
        ("dualpipev", (2, 3), "DualPipeV requires at least as many microbatches as stages"),
        ("gpipe", (0, 3), "the number of ranks, found 0"),
        ("gpipe", (2, 0), "the number of microbatches, found 0"),
        ("2f2b", (2, 2), "unknown schedule '2f2b'"),
    ],
)
def test_sizes_that_a_schedule_cannot_have(name: str, sizes: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build(name, *sizes)


def test_a_pipeline_of_one_rank() -> None:
    for name in ("gpipe", "1f1b", "zb1p"):
        actions = list(build(name, 1, 2).actions(0))
        assert actions[0] == Action(0, Operation.F, 0)
