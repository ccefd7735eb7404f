"""Curves over the steps of a run: loss, learning rate, gradient norm, speed, memory.

They are read from ``metrics.jsonl``, which has a JSON object for each step, and drawn as SVG.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from meshwright.report.svg import round_numbers, short, text

METRICS = "metrics.jsonl"
"""The file of a run's folder that `read_metrics` reads."""
Point = tuple[float, float]
"""A step, and the value there."""

COLORS = ("#3b76c4", "#d98a26", "#3d9a50", "#c2475b", "#8e6bbf", "#7a5c3e", "#9aa0a6")

_WIDE, _HIGH = 560, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 26, 44
_MOST = 500
"""Bins along the step axis: of more points, the lowest and highest of each bin are drawn."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Values over steps. Those of ``stack`` are parts of a sum, drawn on top of each other."""

    title: str
    lines: Mapping[str, Sequence[Point]]
    stack: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    from_zero: bool = False
    """True where the axis begins at zero, as for sizes."""

    @property
    def names(self) -> list[tuple[str, str]]:
        """Color and name of every curve; the colors repeat after the last."""
        return list(zip(cycle(COLORS), (*self.stack, *self.lines), strict=False))

    def constant(self) -> str:
        """One line of text to show instead of the chart if no value changes; else ""."""
        named = {name or "value": line for name, line in (*self.stack.items(), *self.lines.items())}
        values = {name: {value for _, value in line} for name, line in named.items() if line}
        is_level = all(len(seen) == 1 and math.isfinite(*seen) for seen in values.values())
        if not is_level or all(len(named[name]) == 1 for name in values):
            return ""
        said = (f"{'' if name == 'value' else f'{name} '}{short(*v)}" for name, v in values.items())
        return f"{self.title}: {', '.join(said)} in every step"


def read_metrics(path: str | Path) -> list[dict[str, object]]:
    """Read ``metrics.jsonl``; an incomplete last line, of a running job, is left out.

    Raises ``ValueError`` for any other line that is not a JSON object.
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


def charts(runs: Mapping[str, Iterable[Mapping[str, object]]]) -> list[Chart]:
    """Make the charts of the metrics of ``runs``; charts without a point are left out.

    With several runs, the names of curves begin with the name of the run.
    """
    several = {(f"{name} " if len(runs) > 1 else ""): [*rows] for name, rows in runs.items()}

    def curves(key: str, name: str = "", scale: float = 1.0) -> dict[str, list[Point]]:
        found = {(run + name).strip(): _points(rows, key, scale) for run, rows in several.items()}
        return {name: line for name, line in found.items() if line}

    def speeds(unit: str) -> dict[str, list[Point]]:
        found = {run.strip(): _speeds(rows, unit) for run, rows in several.items()}
        return {run: line for run, line in found.items() if line}

    losses = {**curves("loss", "training"), **curves("validation_loss", "validation")}
    found = [
        Chart("Loss", losses),
        Chart("Learning rate", curves("learning_rate"), from_zero=True),
        Chart("Gradient norm", curves("grad_norm")),
        *(Chart(f"{unit.title()} a second", speeds(unit)) for unit in ("tokens", "samples")),
        Chart("Operations of the model, GFLOP/s", curves("flops_per_second", scale=1e-9)),
        Chart("MFU and HFU, %", {**curves("mfu", "MFU", 100), **curves("hfu", "HFU", 100)}),
        Chart("Tokens of the busiest expert, over the mean of its layer", curves("imbalance")),
        *_memory(several),
    ]
    return [chart for chart in found if any([*chart.lines.values(), *chart.stack.values()])]


def _points(rows: Iterable[Mapping[str, object]], key: str, scale: float) -> list[Point]:
    return [
        (float(row["step"]), scale * float(row[key]))  # pyrefly: ignore  # checked in the next line
        for row in rows
        if isinstance(row.get("step"), int) and isinstance(row.get(key), (int, float))
    ]


def _speeds(rows: Iterable[Mapping[str, object]], unit: str) -> list[Point]:
    found: list[Point] = []
    before = 0.0
    for row in rows:
        step, count, took = (row.get(key) for key in ("step", unit, "seconds"))
        if not (isinstance(step, int) and isinstance(count, int) and isinstance(took, float)):
            continue
        # Units are counted from the beginning of the run, seconds per step.
        if took > 0 and (before or step == 1):
            found.append((step, (count - before) / took))
        before = count
    return found


def _memory(runs: Mapping[str, Iterable[Mapping[str, object]]]) -> list[Chart]:
    """Charts of memory by category for each set of ranks with equal sizes, and one of their peaks.

    With more sets than colors, those that hold the most; with several runs, only the peaks.
    """
    sizes: dict[str, dict[str, list[Point]]] = {}
    for run, row in ((run, row) for run, rows in runs.items() for row in rows):
        step, told = row.get("step"), row.get("memory")
        if not (isinstance(step, int) and isinstance(told, Mapping)):
            continue
        for ranks, parts in told.items():
            if not isinstance(parts, Mapping):
                continue  # written by an older version, for rank 0 only
            of = f"{run}{'ranks' if {*'-,'} & {*ranks} else 'rank'} {ranks}"
            for name, size in parts.items():
                line = sizes.setdefault(of, {}).setdefault(name, [])
                line.append((float(step), float(size) / 2**20))
    peaks = {ranks: parts.pop("peak", []) for ranks, parts in sizes.items()}
    held = {ranks: sum(line[-1][1] for line in parts.values()) for ranks, parts in sizes.items()}
    shown = sorted(sizes, key=held.__getitem__, reverse=True)[: len(COLORS)]
    return [
        *(
            Chart(f"Tensors on {ranks} between steps, MiB", {}, sizes[ranks], from_zero=True)
            for ranks in shown
            if len(runs) == 1
        ),
        Chart("Largest memory so far, MiB", {of: peaks[of] for of in shown}, from_zero=True),
    ]


def draw_chart(chart: Chart) -> str:
    """Format a ``<div>`` with an ``<svg>``, 560 units wide, and the data for the page's script."""
    stacked = _stacked(chart.stack)
    drawn = [
        *(point for _, upper in stacked for point in upper),
        *(point for line in chart.lines.values() for point in line),
    ]
    finite = [(step, value) for step, value in drawn if math.isfinite(value)]
    if not finite:
        finite = [(step, 0.0) for step, _ in drawn] or [(0.0, 0.0)]
    steps, values = zip(*finite, strict=True)
    low, high = min(0.0, *values) if chart.from_zero else min(values), max(values)
    if low == high:  # draw a level line in the middle
        low, high = low - (abs(low) or 1.0), high + (abs(high) or 1.0)
    frame = _Frame(min(steps), max(steps), low, high)
    curves: list[str] = []
    told: list[dict[str, object]] = []
    colors = cycle(COLORS)
    for (name, part), (lower, upper) in zip(chart.stack.items(), stacked, strict=True):
        path = " ".join(frame.place(point) for point in [*upper, *reversed(lower)])
        color = next(colors)
        curves.append(f'<polygon points="{path}" fill="{color}" fill-opacity="0.8"/>')
        told.append({"name": name, "points": _thinned(part, frame)})
    for name, line in chart.lines.items():
        color, pieces = next(colors), [_thinned(piece, frame) for piece in _pieces(line)]
        dash = "4 3" if name.endswith("validation") else "none"
        curves += [_drawn(piece, frame, color, dash) for piece in pieces]
        points = [point for piece in pieces for point in piece]
        told.append({"name": name, "color": color, "dash": dash, "points": points})
    page = {"left": _LEFT, "right": _WIDE - _RIGHT, "top": _TOP, "floor": _HIGH - _BOTTOM}
    data = {"frame": {**page, "zero": chart.from_zero}, "lines": told, "stacked": bool(stacked)}
    title = text(_LEFT, 15, chart.title, "start", "rank")
    cursor = f'<line class="cursor" style="display:none" y1="{_TOP}" y2="{_HIGH - _BOTTOM}"/>'
    return (
        f'<div class="chart" data-chart="{html.escape(json.dumps(data))}">'
        f'<svg viewBox="0 0 {_WIDE} {_HIGH}" xmlns="http://www.w3.org/2000/svg">{title}'
        f'<g class="marks">{"".join(frame.values())}</g>{"".join(frame.steps())}'
        f'<g class="curves">{"".join(curves)}</g>{cursor}</svg></div>'
    )


def _drawn(piece: Sequence[Point], frame: _Frame, color: str, dash: str) -> str:
    if len(piece) == 1:
        x, y = frame.place(piece[0]).split(",")
        return f'<circle cx="{x}" cy="{y}" r="2.5" fill="{color}"/>'
    path = " ".join(map(frame.place, piece))
    style = f'fill="none" stroke="{color}" stroke-width="1.5" stroke-dasharray="{dash}"'
    return f'<polyline points="{path}" {style}/>'


@dataclass(frozen=True, slots=True)
class _Frame:
    """The ranges of steps and values that a chart shows."""

    first: float
    last: float
    low: float
    high: float

    def place(self, point: Point) -> str:
        """Compute the position of ``point``, as ``x,y``."""
        across = (point[0] - self.first) / ((self.last - self.first) or 1.0)
        up = (point[1] - self.low) / ((self.high - self.low) or 1.0)
        x = _LEFT + across * (_WIDE - _LEFT - _RIGHT)
        y = _HIGH - _BOTTOM - up * (_HIGH - _TOP - _BOTTOM)
        return f"{x:.1f},{y:.1f}"

    def values(self) -> Iterable[str]:
        """Draw lines at round values, with labels."""
        for value in round_numbers(self.low, self.high, 4) or [self.low]:
            y = float(self.place((self.first, value)).split(",")[1])
            right = _WIDE - _RIGHT
            yield f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="tick"/>'
            yield text(_LEFT - 6, y + 4, short(value), "end", "time")

    def steps(self) -> Iterable[str]:
        """Label round steps, and the axis."""
        for step in round_numbers(self.first, self.last, 6) or [self.first]:
            x = float(self.place((step, self.low)).split(",")[0])
            yield text(x, _HIGH - _BOTTOM + 16, short(step), "middle", "time")
        yield text(_WIDE - _RIGHT, _HIGH - 4, "step", "end", "time")


def _stacked(stack: Mapping[str, Sequence[Point]]) -> list[tuple[list[Point], list[Point]]]:
    """Stack the parts: the lower and upper edge of each."""
    below: dict[float, float] = {}
    found = []
    for part in stack.values():
        lower = [(step, below.get(step, 0.0)) for step, _ in part]
        below |= {step: below.get(step, 0.0) + value for step, value in part}
        found.append((lower, [(step, below[step]) for step, _ in part]))
    return found


def _pieces(line: Iterable[Point]) -> list[list[Point]]:
    """Split a line where a value is not finite."""
    pieces: list[list[Point]] = [[]]
    for point in line:
        if math.isfinite(point[1]):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _thinned(line: Sequence[Point], frame: _Frame) -> Sequence[Point]:
    """Keep the lowest and the highest point of each bin along the axis, so that no peak is lost."""
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
