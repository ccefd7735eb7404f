"""Draws a timeline as SVG: a band per rank, in it a row per lane, and a color per kind of event.

::

    rank 0  | 0 | 1 | 2 |   | 0 |   | 1 |      compute: a box for each action, by kind of action
            '-'   '-'           '-'            transfer, gather, reduce: thin rows below
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from meshwright.report.svg import round_numbers, seconds, text
from meshwright.timeline import LANES, Event, Timeline

_COLORS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "F": ("#3b76c4", "forward"),
        "B": ("#3d9a50", "backward"),
        "I": ("#2fa3a0", "backward, input half"),
        "W": ("#d98a26", "backward, weight half"),
        "optimizer": ("#7a5c3e", "optimizer"),
        "compute": ("#5f7484", "other compute"),
        "SEND_F": ("#8fb4e6", "outputs on their way"),
        "SEND_B": ("#97cfa2", "gradients on their way"),
        "UNSHARD": ("#8e6bbf", "gather parameters"),
        "RESHARD": ("#c9b6e2", "free parameters"),
        "REDUCE_GRAD": ("#c2475b", "reduce gradients"),
        "tensor": ("#d4a017", "axis tensor"),
        "": ("#9aa0a6", "checks, norms, losses"),
    }
)
"""Color and description by kind of event."""

_SPANS: Mapping[str, str] = MappingProxyType(
    {"forward": "F", "backward": "B", "optimizer": "optimizer"}
)
"""Kinds of the spans that a `Trainable` names."""

_ACTION = re.compile(r"([0-9]+)(SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD|[FBIW])([0-9]*)")
_LEFT, _WIDTH, _RIGHT = 70, 1060, 20
_HIGH, _THIN, _GAP, _TOP, _AXIS = 24, 7, 12, 6, 26
_SHADES = (1.0, 0.82, 0.66, 0.9, 0.74)
"""Opacities that distinguish the stages of one rank."""


def legend(timelines: Iterable[Timeline]) -> str:
    """Format as HTML the legend of the colors of all events of ``timelines``."""
    events = [e for timeline in timelines for e in timeline.events if e.category != "recv"]
    kinds = {kind_of(event) for event in events}
    return keys(color_and_name for kind, color_and_name in _COLORS.items() if kind in kinds)


def keys(colors: Iterable[tuple[str, str]]) -> str:
    """Format a legend as HTML: each color with its name."""
    spans = (
        f'<span><i style="background:{color}"></i>{html.escape(what)}</span>'
        for color, what in colors
    )
    return f'<p class="legend">{"".join(spans)}</p>'


def kind_of(event: Event) -> str:
    """Return the kind of ``event``, a key of `_COLORS`."""
    match = _ACTION.fullmatch(event.name)
    if match is not None and match[2] in _COLORS:
        return match[2]
    if event.lane == "compute":
        return _SPANS.get(event.name, "compute")
    if event.axis == "tensor":
        return "tensor"
    purpose = event.label.partition(" ")[0]
    return {"unshard": "UNSHARD", "reduce": "REDUCE_GRAD"}.get(purpose, "")


def draw_timeline(timeline: Timeline, *, span: float | None = None) -> str:
    """Format an ``<svg>`` element, 1150 units wide, that covers ``span`` seconds.

    Posted receives are left out: a message is drawn where it is sent.
    """
    shown = Timeline(event for event in timeline.events if event.category != "recv")
    origin = shown.start
    whole = span or shown.end - origin
    scale = _WIDTH / whole if whole > 0 else 0.0
    parts: list[str] = []
    top = float(_TOP)
    for rank in timeline.ranks:
        parts.append(text(_LEFT - 10, top + 16, f"rank {rank}", "end", "rank"))
        size = f'width="{(shown.end - origin) * scale:.2f}" height="{_HIGH}"'
        parts.append(f'<rect x="{_LEFT}" y="{top:.1f}" {size} class="idle"/>')
        for lane in LANES:
            drawn = shown.select(rank=rank, lane=lane).events
            if drawn or lane == "compute":
                high = _HIGH if lane == "compute" else _THIN
                parts += [_event(event, origin, scale, top, high) for event in drawn]
                top += high + 2
        top += _GAP
    for time in round_numbers(0.0, whole, 8):
        at = _LEFT + time * scale
        size = f'x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{top - _GAP / 2 + 4:.1f}"'
        parts.append(f'<line {size} class="tick mark"/>')
        parts.append(text(at, top - _GAP / 2 + 18, seconds(time), "middle", "time mark"))
    size = f'viewBox="0 0 {_LEFT + _WIDTH + _RIGHT} {top + _AXIS:.0f}"'
    zoom = f'class="timeline" data-left="{_LEFT}" data-width="{_WIDTH}"'
    return f'<svg {size} {zoom} xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'


def _event(event: Event, origin: float, scale: float, top: float, high: float) -> str:
    color, _ = _COLORS[kind_of(event)]
    left, wide = _LEFT + (event.start - origin) * scale, max(0.4, event.duration * scale)
    title = f"{event.name}: {seconds(event.duration)}, at {seconds(event.start - origin)}"
    if event.bytes:
        title += f", {event.bytes:,} bytes"
    match = _ACTION.fullmatch(event.name)
    shade = 1.0 if match is None or high < _HIGH else _SHADES[int(match[1]) % 5]
    box = (
        f'<rect x="{left:.2f}" y="{top:.1f}" width="{wide:.2f}" height="{high}" fill="{color}" '
        f'fill-opacity="{shade:.2f}" stroke="#fff" stroke-width="{0.5 if wide > 2 else 0}">'
        f"<title>{html.escape(title)}</title></rect>"
    )
    label = (match[3] if match is not None else event.name) if high == _HIGH else ""
    if label and wide > 6.5 * len(label) + 3:
        box += text(left + wide / 2, top + high / 2 + 4, label, "middle", "label")
    return box
