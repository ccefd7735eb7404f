"""A timeline as an SVG picture: a band for each rank, a row in it for each lane.

::

    rank 0  | 0 | 1 | 2 |   | 0 |   | 1 |      compute: a box for each action, by kind of action
            '-'   '-'           '-'            transfer, gather, reduce: thin rows below
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from meshwright.timeline import LANES, Event, Timeline

__all__ = ["COLOURS", "draw_timeline", "kind_of", "seconds"]

COLOURS: Mapping[str, tuple[str, str]] = MappingProxyType(
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


def kind_of(event: Event) -> str:
    """Find the operation of the action that ``event`` is named after; empty for other events."""
    match = _ACTION.fullmatch(event.name)
    return match[2] if match is not None and (match[2] in COLOURS) else ""


def draw_timeline(timeline: Timeline, *, span: float | None = None) -> str:
    """Write an ``<svg>`` element, 1150 units wide. ``span`` is how many seconds its width stands
    for.

    Posted receives are left out: a message is drawn where it is sent.
    """
    events = [event for event in timeline.events if event.category != "recv"]
    origin = min((event.start for event in events), default=0.0)
    whole = span or max((event.end for event in events), default=0.0) - origin
    scale = _WIDTH / whole if whole > 0 else 0.0
    parts: list[str] = []
    top = float(_TOP)
    for rank in timeline.ranks:
        mine = [event for event in events if event.rank == rank]
        lanes = [lane for lane in LANES if lane == "compute" or any(e.lane == lane for e in mine)]
        parts.append(_text(_LEFT - 10, top + 16, f"rank {rank}", "end", "rank"))
        end = max((event.end for event in events), default=origin)
        parts.append(_box(_LEFT, top, (end - origin) * scale, _HIGH, "idle"))
        for lane in lanes:
            high = _HIGH if lane == "compute" else _THIN
            drawn = [event for event in mine if event.lane == lane]
            parts += [_event(event, origin, scale, top, high) for event in drawn]
            top += high + 2
        top += _GAP
    parts += _axis(whole, scale, top - _GAP / 2)
    size = f"0 0 {_LEFT + _WIDTH + _RIGHT} {top + _AXIS:.0f}"
    return f'<svg viewBox="{size}" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'


def _event(event: Event, origin: float, scale: float, top: float, high: float) -> str:
    kind = kind_of(event)
    colour, _ = COLOURS[kind]
    left, wide = _LEFT + (event.start - origin) * scale, max(0.4, event.duration * scale)
    title = f"{event.name}: {seconds(event.duration)}, at {seconds(event.start - origin)}"
    if event.bytes:
        title += f", {event.bytes:,} bytes"
    match = _ACTION.fullmatch(event.name)
    shade = 1.0 if match is None or high < _HIGH else _shade(int(match[1]))
    box = (
        f'<rect x="{left:.2f}" y="{top:.1f}" width="{wide:.2f}" height="{high}" fill="{colour}" '
        f'fill-opacity="{shade:.2f}" stroke="#fff" stroke-width="{0.5 if wide > 2 else 0}">'
        f"<title>{html.escape(title)}</title></rect>"
    )
    label = (match[3] if match is not None else event.name) if high == _HIGH else ""
    if label and wide > 6.5 * len(label) + 3:
        box += _text(left + wide / 2, top + high / 2 + 4, label, "middle", "label")
    return box


def _shade(stage: int) -> float:
    """Stages beside each other on one rank are told apart by how full their colour is."""
    return (1.0, 0.82, 0.66, 0.9, 0.74)[stage % 5]


def _axis(whole: float, scale: float, top: float) -> Sequence[str]:
    """Marks at round times."""
    if whole <= 0:
        return []
    step = _round_step(whole / 8)
    count = int(whole / step * (1 + 1e-9)) + 1
    parts = []
    for number in range(count):
        x = _LEFT + number * step * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{top + 4:.1f}" class="tick"/>'
        )
        parts.append(_text(x, top + 18, seconds(number * step), "middle", "time"))
    return parts


def _round_step(wanted: float) -> float:
    size = 1.0
    while size > wanted:
        size /= 10
    while size * 10 <= wanted:
        size *= 10
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor >= wanted * 0.999)


def _box(left: float, top: float, wide: float, high: float, kind: str) -> str:
    return f'<rect x="{left}" y="{top:.1f}" width="{wide:.2f}" height="{high}" class="{kind}"/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}"'
    return f"<text {place}>{html.escape(text)}</text>"


def seconds(value: float) -> str:
    """Write a time in a unit that fits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value * 1e6:.4g} µs" if value else "0"
