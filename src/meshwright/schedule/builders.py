"""Schedules as pure functions of ranks, microbatches and chunks per rank: compute actions only.

======================  =====  ===========================================================
builder                 map    source of the order
======================  =====  ===========================================================
`gpipe`                 loop   Huang et al. 2019, arXiv 1811.06965
`one_f_one_b`           loop   Narayanan et al. 2019, PipeDream, and 2021, arXiv 2006.09503
`interleaved_1f1b`      loop   Narayanan et al. 2021, arXiv 2104.04473
`looped_bfs`            loop   Lamy-Poirier 2023, arXiv 2211.05953
`zb1p`                  loop   Qi et al. 2024, arXiv 2401.10241 (ZB-H1)
`zb2p`                  loop   Qi et al. 2024, arXiv 2401.10241 (ZB-H2)
`zbv`                   V      Qi et al. 2024, arXiv 2405.15362; few microbatches: our own
`vhalf`, `vmin`         V      building blocks of Qi et al. 2024, arXiv 2405.15362
`dualpipev`             V      phases of DeepSeek-AI 2025, DualPipe (its half)
======================  =====  ===========================================================

On the loop map, local chunk c of rank r is stage ``c * ranks + r``. On the V map, rank r has stages
r and ``2 * ranks - 1 - r``, so that the first and the last stage are on one rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from types import MappingProxyType

from meshwright.errors import ScheduleError
from meshwright.schedule.actions import Action, B, F, I, Schedule, W, overlap
from meshwright.schedule.list_scheduling import Queues, arrange, greedy
from meshwright.schedule.lowering import forward_part

Edges = Iterable[tuple[int, int]] | None


def stage_ranks(ranks: int, stages: int, style: str = "loop") -> tuple[int, ...]:
    """Return the rank of each stage: round and round (``loop``) or back and forth (``v``).

    Raises ``ValueError`` for another style, or if ``stages`` is not a multiple of ``ranks``.
    """
    if style not in ("loop", "v"):
        raise ValueError(f"Style {style} is not supported. Expected 'loop' or 'v'.")
    if stages % ranks:
        kind = "V schedules" if style == "v" else "looped schedules"
        raise ValueError(
            f"num_stages {stages} must be evenly divisible by pp_size {ranks} for {kind}"
        )
    turns = (divmod(stage, ranks) for stage in range(stages))
    return tuple(
        place if style == "loop" or turn % 2 == 0 else ranks - 1 - place for turn, place in turns
    )


def forward_only(ranks: int, microbatches: int, chunks: int = 1, edges: Edges = None) -> Schedule:
    """Run all forwards, chunk by chunk; no backward."""
    return forward_part(_breadth_first("forward-only", ranks, microbatches, chunks, edges))


def gpipe(ranks: int, microbatches: int, chunks: int = 1, edges: Edges = None) -> Schedule:
    """Run all forwards, then all backwards. With several chunks per rank this is `looped_bfs`."""
    return _breadth_first("gpipe", ranks, microbatches, chunks, edges)


def looped_bfs(ranks: int, microbatches: int, chunks: int = 1, edges: Edges = None) -> Schedule:
    """Run all forwards, chunk by chunk; then the chunks in reverse, all backwards of each."""
    return _breadth_first("loopedbfs", ranks, microbatches, chunks, edges)


def _breadth_first(name: str, ranks: int, microbatches: int, chunks: int, edges: Edges) -> Schedule:
    _check_sizes(ranks, microbatches, chunks)
    total = microbatches * chunks
    return _in_turn(name, ranks, microbatches, chunks, edges, group=microbatches, first=total)


def one_f_one_b(ranks: int, microbatches: int, chunks: int = 1, edges: Edges = None) -> Schedule:
    """Run just enough forwards to keep the last rank busy, then backward and forward in turn.

    Raises ``ValueError`` for fewer microbatches than stages, or several chunks.
    """
    _check_sizes(ranks, microbatches, chunks)
    if chunks != 1:
        raise ValueError(
            f"1F1B has one stage a rank, but got {chunks}. Use interleaved1f1b for several"
        )
    if microbatches < ranks:
        raise ValueError(
            f"Number of microbatches ({microbatches}) must be greater than or equal to the number "
            f"of stages ({ranks})."
        )
    return _in_turn("1f1b", ranks, microbatches, 1, edges, group=microbatches, lead=1)


def interleaved_1f1b(
    ranks: int, microbatches: int, chunks: int = 1, edges: Edges = None
) -> Schedule:
    """1F1B over several chunks per rank, in groups of microbatches that run chunk by chunk.

    Raises ``ValueError`` for microbatches that do not divide into ``max(1, m // ranks)`` rounds.
    """
    group = _group(ranks, microbatches, chunks, "Interleaved 1F1B")
    first = (chunks - 1) * group
    return _in_turn(
        "interleaved1f1b", ranks, microbatches, chunks, edges, group=group, first=first, lead=2
    )


def zb1p(ranks: int, microbatches: int, chunks: int = 1, edges: Edges = None) -> Schedule:
    """Zero bubble with the memory of 1F1B: the weight halves fill the gaps at the end.

    Raises ``ValueError`` for microbatches that do not divide into ``max(1, m // ranks)`` rounds.
    """
    group = _group(ranks, microbatches, chunks, "Zero bubble")
    first = (chunks - 1) * group
    return _in_turn(
        "zb1p", ranks, microbatches, chunks, edges, group=group, first=first, lead=1, lag=1
    )


def zb2p(ranks: int, microbatches: int, chunks: int = 1, edges: Edges = None) -> Schedule:
    """Zero bubble with twice the memory of 1F1B, ``2 * ranks - 1`` microbatches on every rank.

    With ``F = I = W`` no rank idles between its first and its last action, but ranks begin and end
    one after another: only without a barrier between steps is no time lost. Raises ``ValueError``
    for several chunks.
    """
    _check_sizes(ranks, microbatches, chunks)
    if chunks != 1:
        raise ValueError(f"ZB2P has one stage a rank, but got {chunks}. Use zb1p for several")
    return _in_turn("zb2p", ranks, microbatches, 1, edges, group=microbatches, lead=2, lag=2)


def _in_turn(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    edges: Edges,
    *,
    group: int,
    first: int = 0,
    lead: int = 0,
    lag: int = 0,
) -> Schedule:
    """Run some forwards ahead, then a forward and a backward in turn; backwards reverse the chunks.

    Chunk c of a rank is stage ``c * ranks + rank``; each chunk runs ``group`` microbatches in turn.
    ``first`` forwards run ahead on the last rank, and ``lead`` more for each rank below another.
    With ``lag`` backwards are halves, and weight halves lag by it for each rank above: as large as
    ``lead``, it makes the sum of the activations that wait for either the same on all ranks.
    """
    rows = []
    for rank in range(ranks):
        forwards = []
        for turn in range(microbatches * chunks):
            lap, place = divmod(turn, group * chunks)
            forwards.append(Action(place // group * ranks + rank, F, group * lap + turn % group))
        ahead = first + lead * (ranks - 1 - rank)
        row, late = forwards[:ahead], deque[Action]()
        last = (chunks - 1) * ranks + 2 * rank
        for turn, (stage, _, k, _) in enumerate(forwards):
            row += forwards[ahead + turn : ahead + turn + 1]
            row.append(Action(last - stage, I if lag else B, k))
            late += [Action(last - stage, W, k)] if lag else []
            if late and turn >= lag * rank:
                row.append(late.popleft())
        rows.append([*row, *late])
    return Schedule.of(name, rows, stage_ranks(ranks, ranks * chunks), microbatches, edges)


def _group(ranks: int, microbatches: int, chunks: int, name: str) -> int:
    """The number of microbatches that run through one chunk before the next chunk starts."""
    _check_sizes(ranks, microbatches, chunks)
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        raise ValueError(
            f"{name} requires the number of microbatches to be a multiple of the number of rounds "
            f"({rounds}), but got {microbatches}."
        )
    return microbatches // rounds


# ------------------------------------------------------------------------------ V map


def zbv(ranks: int, microbatches: int, chunks: int = 2, edges: Edges = None) -> Schedule:
    """Zero bubble on the V map, with the activations of ``ranks`` microbatches on every rank.

    From ``2 * ranks - 1`` microbatches on, half of the idle time of 1F1B's fill remains. With fewer
    the order is a list schedule: at unit costs each idle rank takes an input half (of its earlier
    stage first), else a forward (of its later stage first) if it has room for another activation,
    else a weight half. Raises ``ValueError`` for other than two chunks per rank.
    """
    _check_v("ZBV", ranks, microbatches, chunks)
    if microbatches < 2 * ranks - 1:
        like = _v("zbv", [[]] * ranks, microbatches, None)
        return _listed("zbv", greedy(like, is_deep=True), microbatches, 2 * ranks, edges)
    rows = [_zigzag(ranks, rank, microbatches) for rank in range(ranks)]
    return _v("zbv", rows, microbatches, edges)


def _zigzag(ranks: int, rank: int, microbatches: int) -> list[Action]:
    """Build the row of one rank with all of the V busy: fill, steady state, drain."""
    row = _VRow(ranks, rank)
    below = ranks - rank
    for _ in range(2 * below - 1):
        row.forward(row.down)
    for _ in range(rank):
        row.forward(row.up)
        row.forward(row.down)
    for _ in range(below):
        row.forward(row.up)
        row.halves(row.up)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        row.forward(row.down)
        row.halves(row.down)
        row.forward(row.up)
        row.halves(row.up)
    for _ in range(microbatches - row.forwards[row.up]):
        row.halves(row.down)
        row.forward(row.up)
        row.halves(row.up)
    # In the drain weight halves are deferred, so that gradients are sent sooner.
    for _ in range(rank):
        row.input(row.down)
        row.input(row.up)
    for _ in range(microbatches - row.backwards[row.down]):
        row.input(row.down)
        row.weight()
    row.rest()
    return row.actions


def _listed(name: str, queues: Queues, microbatches: int, room: int, edges: Edges) -> Schedule:
    """Order the queues of the V map at unit costs, in memory for ``room`` microbatches of a stage.

    The rows do for any edges: a chain has each stage wait for all stages before it.
    """
    ranks = len(queues)
    found = arrange(queues, _v(name, [[]] * ranks, microbatches, None), room=[room] * ranks)
    if found is None:
        raise ScheduleError(f"no order of {microbatches} microbatches in the memory of {room}")
    return _v(name, found[0].rows, microbatches, edges)


def vhalf(ranks: int, microbatches: int, chunks: int = 2, edges: Edges = None) -> Schedule:
    """Half the activations of 1F1B, ``(ranks + 2) // 2`` microbatches a rank, in half its bubble.

    Raises ``ValueError`` for other than two chunks per rank.
    """
    _check_v("V-Half", ranks, microbatches, chunks)
    return _repeated("vhalf", ranks, microbatches, edges, down=2, up=1, home=4, room=ranks // 2 + 1)


def vmin(ranks: int, microbatches: int, chunks: int = 2, edges: Edges = None) -> Schedule:
    """A third of the activations of 1F1B, ``(ranks + 4) // 3`` microbatches a rank.

    With ``F = I = W`` it idles two thirds as long as 1F1B, and longer the more they differ. Raises
    ``ValueError`` for other than two chunks per rank.
    """
    _check_v("V-Min", ranks, microbatches, chunks)
    return _repeated(
        "vmin", ranks, microbatches, edges, down=1, up=1, home=3, room=(ranks + 4) // 3
    )


def _repeated(
    name: str,
    ranks: int,
    microbatches: int,
    edges: Edges,
    *,
    down: int,
    up: int,
    home: int,
    room: int,
) -> Schedule:
    """Repeat the building block of a V every six time slots, one for each F, I and W of a rank.

    ``down`` and ``up`` are the slots from rank to rank on the ways down and up, of F and of I: the
    fewer, the sooner a microbatch ends, and the fewer are held at a time. On rank 0 the second F is
    in slot 1 of a period, its I in slot 2, the last I in slot ``home``: then no rank has two of
    them in one slot. Weight halves take the slots that are left.
    """
    way = (ranks - 1) * (down + up)
    second = way + 1 + -way % 6
    last = second + 2 + way + (home - 3 - way) % 6
    queues = []
    for rank in range(ranks):
        early, late = rank, 2 * ranks - 1 - rank
        slots = sorted(
            (start + 6 * k, Action(stage, operation, k))
            for k in range(microbatches)
            for start, stage, operation in (
                (down * rank, early, F),
                (second - up * rank, late, F),
                (second + 1 + down * rank, late, I),
                (last - up * rank, early, I),
            )
        )
        queues.append([[action for _, action in slots]])
    return _listed(name, queues, microbatches, 2 * room, edges)


def dualpipev(ranks: int, microbatches: int, chunks: int = 2, edges: Edges = None) -> Schedule:
    """Overlap forwards of one half of the V with backwards of the other (OVERLAP_F_B).

    Raises ``ValueError`` for fewer microbatches than stages, or other than two chunks per rank.
    """
    _check_v("DualPipeV", ranks, microbatches, chunks)
    if microbatches < 2 * ranks:
        raise ValueError(
            f"DualPipeV requires at least as many microbatches as stages, but got {microbatches} "
            f"microbatches for {2 * ranks} stages"
        )
    rows = [_dual_row(ranks, rank, microbatches) for rank in range(ranks)]
    return _v("dualpipev", rows, microbatches, edges)


def _dual_row(ranks: int, rank: int, microbatches: int) -> list[Action]:
    """Build the row of a rank, phase by phase."""
    row = _VRow(ranks, rank)
    below, down, up = ranks - 1 - rank, row.down, row.up
    for _ in range(2 * below):
        row.forward(down)
    for _ in range(rank + 1):
        row.forward(down)
        row.forward(up)
    for _ in range(below):
        row.halves(up)
        row.forward(up)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        row.both(down, up)
        row.both(up, down)
    for _ in range(below):
        row.backward(up)
        row.both(up, down)
    # In the second half of the drain weight halves are deferred, so that gradients go sooner.
    for turn in range(2 * (rank + 1)):
        stage = down if turn % 2 else up
        if turn > rank:
            row.input(stage)
        else:
            row.backward(stage)
    for _ in range(below):
        row.weight()
        row.input(down)
    row.rest()
    return row.actions


class _VRow:
    """A growing row on the V map; it numbers the microbatches itself."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.down = rank
        """The stage of the way down."""
        self.up = 2 * ranks - 1 - rank
        """The stage of the way up."""
        self.actions: list[Action] = []
        self.forwards = {self.down: 0, self.up: 0}
        self.backwards = {self.down: 0, self.up: 0}
        self._late: deque[Action] = deque()

    def forward(self, stage: int) -> None:
        """Add the next F of ``stage``."""
        self.actions.append(self._next_forward(stage))

    def backward(self, stage: int) -> None:
        """Add the next B of ``stage``."""
        self.actions.append(self._next_backward(stage))

    def both(self, forward: int, backward: int) -> None:
        """Add an overlap of the next F of one stage and the next B of the other."""
        pair = overlap(self._next_forward(forward), self._next_backward(backward))
        self.actions.append(pair)

    def input(self, stage: int) -> None:
        """Add the next I of ``stage``; its W is deferred."""
        whole = self._next_backward(stage)
        self.actions.append(whole._replace(operation=I))
        self._late.append(whole._replace(operation=W))

    def weight(self) -> None:
        """Add the oldest deferred W."""
        self.actions.append(self._late.popleft())

    def halves(self, stage: int) -> None:
        """Add the next I of ``stage`` and the oldest deferred W."""
        self.input(stage)
        self.weight()

    def rest(self) -> None:
        """Add all deferred W."""
        self.actions += self._late
        self._late.clear()

    def _next_forward(self, stage: int) -> Action:
        self.forwards[stage] += 1
        return Action(stage, F, self.forwards[stage] - 1)

    def _next_backward(self, stage: int) -> Action:
        self.backwards[stage] += 1
        return Action(stage, B, self.backwards[stage] - 1)


# -------------------------------------------------------------------------- by name

BUILDERS = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved1f1b": interleaved_1f1b,
        "loopedbfs": looped_bfs,
        "zb1p": zb1p,
        "zb2p": zb2p,
        "zbv": zbv,
        "vhalf": vhalf,
        "vmin": vmin,
        "dualpipev": dualpipev,
    }
)
"""The builders by the names that a plan uses."""

V_SHAPED = ("zbv", "dualpipev", "vhalf", "vmin")
"""Schedules on the V map, with exactly two stages per rank."""

TWO_A_RANK = ("interleaved1f1b", "loopedbfs", *V_SHAPED)
"""Schedules with two stages per rank by default."""


def build(
    name: str, ranks: int, microbatches: int, chunks: int | None = None, edges: Edges = None
) -> Schedule:
    """Build the schedule called ``name`` in a plan; None takes its usual ``chunks`` per rank.

    Raises ``ValueError`` for an unknown name and for sizes that the schedule does not support.
    """
    if name not in BUILDERS:
        raise ValueError(f"unknown schedule {name!r}; known: {', '.join(BUILDERS)}")
    usual = 2 if name in TWO_A_RANK else 1
    return BUILDERS[name](ranks, microbatches, usual if chunks is None else chunks, edges)


def _check_sizes(ranks: int, microbatches: int, chunks: int) -> None:
    for what, size in (("ranks", ranks), ("microbatches", microbatches), ("stages a rank", chunks)):
        if size < 1:
            raise ValueError(f"expected at least 1 for the number of {what}, found {size}")


def _check_v(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    _check_sizes(ranks, microbatches, chunks)
    if chunks != 2:
        raise ValueError(f"{name} requires exactly 2 stages per rank, but got {chunks}.")


def _v(
    name: str, rows: Sequence[Iterable[Action | None]], microbatches: int, edges: Edges
) -> Schedule:
    ranks = len(rows)
    return Schedule.of(name, rows, stage_ranks(ranks, 2 * ranks, "v"), microbatches, edges)
