"""Curves over the steps of a run: loss, learning rate, gradient norm, speed, memory.

They are read from ``metrics.jsonl``, which has a JSON object for each step, and drawn as SVG.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.report.svg import round_numbers, short, text

Point = tuple[float, float]
"""A step, and the value there."""

COLOURS = ("#3b76c4", "#d98a26", "#3d9a50", "#c2475b", "#8e6bbf", "#7a5c3e", "#9aa0a6")

_WIDE, _HIGH = 560, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 26, 24
_MOST = 500
"""Places along an axis: of more points the lowest and the highest of each place are drawn."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Values over steps. Those of a stack are parts of one whole, drawn on top of each other."""

    title: str
    lines: Mapping[str, Sequence[Point]]
    stack: Mapping[str, Sequence[Point]]

    @property
    def names(self) -> list[tuple[str, str]]:
        """The colour and the name of everything that is drawn."""
        return list(zip(COLOURS, (*self.stack, *self.lines), strict=False))


def read_metrics(path: str | Path) -> list[dict[str, object]]:
    """Read ``metrics.jsonl``; a last line that a running job has only begun is left out.

    Raises ``ValueError`` for any other line that is no JSON object.
    """
    records: list[dict[str, object]] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(True), 1):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object, found {line[:40]!r}")
        records.append(record)
    return records


def charts(records: Iterable[Mapping[str, object]]) -> list[Chart]:
    """Find what ``records`` can be drawn as; charts without a point are left out."""
    rows = list(records)

    def points(key: str) -> list[Point]:
        return [
            (float(row["step"]), float(row[key]))  # pyrefly: ignore  # checked in the next line
            for row in rows
            if isinstance(row.get("step"), int) and isinstance(row.get(key), (int, float))
        ]

    found = [
        Chart("Loss", {"training": points("loss"), "validation": points("validation_loss")}, {}),
        Chart("Learning rate", {"": points("learning_rate")}, {}),
        Chart("Gradient norm", {"": points("grad_norm")}, {}),
        Chart("Tokens a second", {"": _speeds(rows, "tokens")}, {}),
        Chart("Samples a second", {"": _speeds(rows, "samples")}, {}),
        Chart("Model FLOPs utilisation (MFU)", {"": points("mfu")}, {}),
        *_memory(rows),
    ]
    return [chart for chart in found if any([*chart.lines.values(), *chart.stack.values()])]


def _speeds(rows: Iterable[Mapping[str, object]], unit: str) -> list[Point]:
    found: list[Point] = []
    before = 0.0
    for row in rows:
        step, count, took = (row.get(key) for key in ("step", unit, "seconds"))
        if not (isinstance(step, int) and isinstance(count, int) and isinstance(took, float)):
            continue
        # They are counted from the beginning of the run, seconds for each step.
        if took > 0 and (before or step == 1):
            found.append((step, (count - before) / took))
        before = count
    return found


def _memory(rows: Iterable[Mapping[str, object]]) -> list[Chart]:
    """Draw memory by category for each set of ranks that hold the same, and their peaks together.

    Of more sets than there are colours those that hold the most.
    """
    sizes: dict[str, dict[str, list[Point]]] = {}
    for row in rows:
        step, told = row.get("step"), row.get("memory")
        if not (isinstance(step, int) and isinstance(told, Mapping)):
            continue
        for ranks, parts in told.items():
            if not isinstance(parts, Mapping):
                continue  # of a version that wrote rank 0's alone
            of = sizes.setdefault(f"{'ranks' if {*'-,'} & {*ranks} else 'rank'} {ranks}", {})
            for name, size in parts.items():
                of.setdefault(name, []).append((float(step), float(size)))
    peaks = {ranks: parts.pop("peak", []) for ranks, parts in sizes.items()}
    held = {ranks: sum(line[-1][1] for line in parts.values()) for ranks, parts in sizes.items()}
    shown = sorted(sizes, key=held.__getitem__, reverse=True)[: len(COLOURS)]
    return [
        *(
            Chart(f"Bytes of tensors on {ranks}, between steps", {}, sizes[ranks])
            for ranks in shown
        ),
        Chart("Largest memory so far, in bytes", {ranks: peaks[ranks] for ranks in shown}, {}),
    ]


def draw_chart(chart: Chart) -> str:
    """Write an ``<svg>`` element, 560 units wide."""
    stacked = _stacked(chart.stack)
    drawn = [
        *(point for _, upper in stacked for point in upper),
        *(point for line in chart.lines.values() for point in line),
    ]
    finite = [(step, value) for step, value in drawn if math.isfinite(value)]
    if not finite:
        finite = [(step, 0.0) for step, _ in drawn] or [(0.0, 0.0)]
    steps, values = zip(*finite, strict=True)
    low, high = min(0.0, *values) if chart.stack else min(values), max(values)
    if low == high:  # a level line stands in the middle
        low, high = low - (abs(low) or 1.0), high + (abs(high) or 1.0)
    frame = _Frame(min(steps), max(steps), low, high)
    parts = [text(_LEFT, 15, chart.title, "start", "rank"), *frame.marks()]
    colours = iter(COLOURS)
    for lower, upper in stacked:
        outline = [*upper, *reversed(lower)]
        path = " ".join(frame.place(point) for point in outline)
        parts.append(f'<polygon points="{path}" fill="{next(colours)}" fill-opacity="0.8"/>')
    for line in chart.lines.values():
        colour = next(colours)
        for piece in _pieces(line):
            if len(piece) == 1:
                x, y = frame.place(piece[0]).split(",")
                parts.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>')
            else:
                path = " ".join(map(frame.place, _thinned(piece, frame)))
                parts.append(
                    f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
                )
    size = f'viewBox="0 0 {_WIDE} {_HIGH}" xmlns="http://www.w3.org/2000/svg"'
    return f"<svg {size}>{''.join(parts)}</svg>"


@dataclass(frozen=True, slots=True)
class _Frame:
    """The ranges of steps and values that a chart shows."""

    first: float
    last: float
    low: float
    high: float

    def place(self, point: Point) -> str:
        """Compute where ``point`` stands, as ``x,y``."""
        across = (point[0] - self.first) / ((self.last - self.first) or 1.0)
        up = (point[1] - self.low) / ((self.high - self.low) or 1.0)
        x = _LEFT + across * (_WIDE - _LEFT - _RIGHT)
        y = _HIGH - _BOTTOM - up * (_HIGH - _TOP - _BOTTOM)
        return f"{x:.1f},{y:.1f}"

    def marks(self) -> Iterable[str]:
        """Draw lines at round values, and name round values and steps."""
        right, floor = _WIDE - _RIGHT, _HIGH - _BOTTOM
        for value in round_numbers(self.low, self.high, 4) or [self.low]:
            y = float(self.place((self.first, value)).split(",")[1])
            yield f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="tick"/>'
            yield text(_LEFT - 6, y + 4, short(value), "end", "time")
        for step in round_numbers(self.first, self.last, 6) or [self.first]:
            x = float(self.place((step, self.low)).split(",")[0])
            yield text(x, floor + 16, short(step), "middle", "time")


def _stacked(stack: Mapping[str, Sequence[Point]]) -> list[tuple[list[Point], list[Point]]]:
    """Put each part on top of those before it: its lower and its upper edge."""
    below: dict[float, float] = {}
    found = []
    for part in stack.values():
        lower = [(step, below.get(step, 0.0)) for step, _ in part]
        below |= {step: below.get(step, 0.0) + value for step, value in part}
        found.append((lower, [(step, below[step]) for step, _ in part]))
    return found


def _pieces(line: Iterable[Point]) -> list[list[Point]]:
    """Cut a line where a value is not finite."""
    pieces: list[list[Point]] = [[]]
    for point in line:
        if math.isfinite(point[1]):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _thinned(line: Sequence[Point], frame: _Frame) -> Sequence[Point]:
    """Keep of each place along the axis the lowest and the highest point, so no peak is lost."""
    if len(line) <= 2 * _MOST:
        return line
    places: dict[int, list[Point]] = {}
    for point in line:
        across = (point[0] - frame.first) / ((frame.last - frame.first) or 1.0)
        places.setdefault(int(across * _MOST), []).append(point)
    return [
        point
        for there in places.values()
        for point in sorted({min(there, key=_value), max(there, key=_value)})
    ]


def _value(point: Point) -> float:
    return point[1]
