"""A report as one HTML file that loads nothing: what was measured, and the same simulated.

A timeline is drawn as SVG, a band for each rank, a row in it for each lane::

    rank 0  | 0 | 1 | 2 |   | 0 |   | 1 |      compute: a box for each action, by kind of action
            '-'   '-'           '-'            transfer, gather, reduce: thin rows below
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from meshwright.schedule.measured import Comparison, compare
from meshwright.timeline import LANES, Event, Timeline

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #202124; background: #fff; margin: 2rem auto;
  max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
svg { width: 100%; height: auto; display: block; font-family: system-ui, sans-serif; }
.rank { font-size: 13px; fill: #202124; } .time { font-size: 11px; fill: #5f6368; }
.label { font-size: 11px; fill: #fff; pointer-events: none; } .idle { fill: #eceff1; }
.tick { stroke: #b0b6bb; stroke-width: .5; stroke-dasharray: 2 3; }
table { border-collapse: collapse; margin: .6rem 0; } td, th { padding: .15rem .9rem .15rem 0;
  text-align: right; font-variant-numeric: tabular-nums; } th:first-child, td:first-child
  { text-align: left; } th { font-weight: 600; border-bottom: 1px solid #b0b6bb; }
.legend span { display: inline-block; margin-right: 1.1rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; }
p.note { color: #5f6368; max-width: 60rem; }
"""


_COLOURS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "F": ("#3b76c4", "forward"),
        "B": ("#3d9a50", "backward"),
        "I": ("#2fa3a0", "backward, input half"),
        "W": ("#d98a26", "backward, weight half"),
        "SEND_F": ("#8fb4e6", "outputs on their way"),
        "SEND_B": ("#97cfa2", "gradients on their way"),
        "UNSHARD": ("#8e6bbf", "gather parameters"),
        "RESHARD": ("#c9b6e2", "free parameters"),
        "REDUCE_GRAD": ("#c2475b", "reduce gradients"),
        "": ("#9aa0a6", "other"),
    }
)
"""By operation, its colour and what it is."""

_ACTION = re.compile(r"([0-9]+)(SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD|[FBIW])([0-9]*)")
_LEFT, _WIDTH, _RIGHT = 70, 1060, 20
_HIGH, _THIN, _GAP, _TOP, _AXIS = 24, 7, 12, 6, 26
_SHADES = (1.0, 0.82, 0.66, 0.9, 0.74)
"""Of stages beside each other on one rank."""


def write_page(timeline: Timeline, path: str | Path, *, title: str = "Timeline") -> None:
    """Write a page on ``timeline`` to ``path``.

    Where it holds a pipeline's steps the last one is drawn, and under it what its schedule should
    have done had each action taken its measured median; other timelines are drawn whole.
    """
    comparison = compare(timeline)
    parts = _whole(timeline) if comparison is None else _compared(comparison)
    name = html.escape(title)
    document = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{name}</h1>\n" + "\n".join(parts)
    )
    Path(path).write_text(document + "\n</body></html>\n", encoding="utf-8")


def _compared(found: Comparison) -> list[str]:
    both = (found.measured, found.simulated)
    span = max(_span(timeline) for timeline in both)
    return [
        _legend(both),
        f"<h2>Measured: {_seconds(_span(found.measured))}, {found.bubble:.1%} of it idle</h2>",
        draw_timeline(found.measured, span=span),
        f"<h2>Simulated: {_seconds(_span(found.simulated))}, "
        f"{found.simulated_bubble:.1%} of it idle</h2>",
        draw_timeline(found.simulated, span=span),
        _table(found),
        '<p class="note">Idle is the share of the ranks\' time, from the first action to the last, '
        "in which nothing is computed. The simulation runs the same order of actions, each as long "
        "as the median of its kind and stage. Numbers in the boxes are microbatches; shades tell "
        "the stages of one rank apart.</p>",
    ]


def _whole(timeline: Timeline) -> list[str]:
    rows = [
        [
            f"rank {rank}",
            *(_seconds(timeline.busy(rank, lane)) for lane in LANES),
            _seconds(timeline.exposed(rank)),
        ]
        for rank in timeline.ranks
    ]
    head = ["", *LANES, "exposed"]
    return [
        _legend([timeline]),
        draw_timeline(timeline),
        _rows(head, rows),
        '<p class="note">Seconds during which each lane was busy. Exposed is communication beside '
        "which nothing was computed.</p>",
    ]


def _table(found: Comparison) -> str:
    rows = []
    for rank, peak in zip(found.measured.ranks, found.peaks, strict=True):
        cells = [f"rank {rank}"]
        for timeline in (found.measured, found.simulated):
            busy = timeline.busy(rank, "compute")
            cells += [_seconds(busy), f"{1 - busy / max(_span(timeline), 1e-12):.1%}"]
        rows.append([*cells, f"{peak:g}"])
    head = ["", "computes", "idle", "simulated", "idle", "microbatches held at most"]
    return _rows(head, rows)


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return f"<table>{line('th', head)}{''.join(line('td', row) for row in rows)}</table>"


def _legend(timelines: Iterable[Timeline]) -> str:
    events = [e for timeline in timelines for e in timeline.events if e.category != "recv"]
    kinds = {_kind_of(event) for event in events}
    spans = [
        f'<span><i style="background:{colour}"></i>{html.escape(what)}</span>'
        for kind, (colour, what) in _COLOURS.items()
        if kind in kinds
    ]
    return f'<p class="legend">{"".join(spans)}</p>'


def _span(timeline: Timeline) -> float:
    """Count the seconds from the first to the last compute."""
    computing = timeline.select(lane="compute")
    return computing.end - computing.start


# -------------------------------------------------------------------------------- one timeline


def _kind_of(event: Event) -> str:
    """Find the operation of the action that ``event`` is named after; empty for other events."""
    match = _ACTION.fullmatch(event.name)
    return match[2] if match is not None and (match[2] in _COLOURS) else ""


def draw_timeline(timeline: Timeline, *, span: float | None = None) -> str:
    """Write an ``<svg>`` element, 1150 units wide, which stand for ``span`` seconds.

    Posted receives are left out: a message is drawn where it is sent.
    """
    shown = Timeline(event for event in timeline.events if event.category != "recv")
    origin = shown.start
    whole = span or shown.end - origin
    scale = _WIDTH / whole if whole > 0 else 0.0
    parts: list[str] = []
    top = float(_TOP)
    for rank in timeline.ranks:
        parts.append(_text(_LEFT - 10, top + 16, f"rank {rank}", "end", "rank"))
        size = f'width="{(shown.end - origin) * scale:.2f}" height="{_HIGH}"'
        parts.append(f'<rect x="{_LEFT}" y="{top:.1f}" {size} class="idle"/>')
        for lane in LANES:
            drawn = shown.select(rank=rank, lane=lane).events
            if drawn or lane == "compute":
                high = _HIGH if lane == "compute" else _THIN
                parts += [_event(event, origin, scale, top, high) for event in drawn]
                top += high + 2
        top += _GAP
    parts += _axis(whole, scale, top - _GAP / 2)
    size = f"0 0 {_LEFT + _WIDTH + _RIGHT} {top + _AXIS:.0f}"
    return f'<svg viewBox="{size}" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'


def _event(event: Event, origin: float, scale: float, top: float, high: float) -> str:
    kind = _kind_of(event)
    colour, _ = _COLOURS[kind]
    left, wide = _LEFT + (event.start - origin) * scale, max(0.4, event.duration * scale)
    title = f"{event.name}: {_seconds(event.duration)}, at {_seconds(event.start - origin)}"
    if event.bytes:
        title += f", {event.bytes:,} bytes"
    match = _ACTION.fullmatch(event.name)
    shade = 1.0 if match is None or high < _HIGH else _SHADES[int(match[1]) % 5]
    box = (
        f'<rect x="{left:.2f}" y="{top:.1f}" width="{wide:.2f}" height="{high}" fill="{colour}" '
        f'fill-opacity="{shade:.2f}" stroke="#fff" stroke-width="{0.5 if wide > 2 else 0}">'
        f"<title>{html.escape(title)}</title></rect>"
    )
    label = (match[3] if match is not None else event.name) if high == _HIGH else ""
    if label and wide > 6.5 * len(label) + 3:
        box += _text(left + wide / 2, top + high / 2 + 4, label, "middle", "label")
    return box


def _axis(whole: float, scale: float, top: float) -> Sequence[str]:
    """Draw marks at round times."""
    if whole <= 0:
        return []
    size = 10.0 ** math.floor(math.log10(whole / 8))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= whole / 8 * 0.999)
    count = int(whole / step * (1 + 1e-9)) + 1
    parts = []
    for number in range(count):
        x = _LEFT + number * step * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{top + 4:.1f}" class="tick"/>'
        )
        parts.append(_text(x, top + 18, _seconds(number * step), "middle", "time"))
    return parts


def _text(x: float, y: float, text: str, anchor: str, kind: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}"'
    return f"<text {place}>{html.escape(text)}</text>"


def _seconds(value: float) -> str:
    """Write a time in a unit that fits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value * 1e6:.4g} µs" if value else "0"
