"""A report as one HTML file that loads nothing: curves, a timeline, and the same simulated."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from meshwright.report.curves import charts, draw_chart
from meshwright.report.lanes import draw_timeline, keys, legend
from meshwright.report.svg import seconds
from meshwright.schedule.measured import Comparison, compare
from meshwright.timeline import LANES, Timeline

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
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
.legend { margin: .2rem 0; } .charts .legend { padding-left: 11%; }
.legend span { display: inline-block; margin-right: 1.1rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; }
p.note { color: #5f6368; max-width: 60rem; }
"""

_MFU = (
    "MFU is the number of floating-point operations that the model needs for the tokens of a "
    "second, over what the devices of all ranks could do. A token needs 6 operations for each "
    "parameter that multiplies (not the embedding's) and 12 x layers x width x context for "
    "attention, forward and backward (Chowdhery et al., PaLM, 2022, appendix B). A device can do "
    "[run] peak_tflops, or what one large matrix product reached on rank 0 when the run began."
)


def write_page(
    timeline: Timeline | None,
    path: str | Path,
    *,
    title: str = "Timeline",
    metrics: Iterable[Mapping[str, object]] = (),
) -> None:
    """Write a page on ``timeline`` and ``metrics``, the objects of a run's steps, to ``path``.

    Where the timeline holds a pipeline's steps the last one is drawn, and under it what its
    schedule should have done had each action taken its measured median; others are drawn whole.
    """
    parts = _curves(metrics)
    if timeline is not None:
        comparison = compare(timeline)
        parts += _whole(timeline) if comparison is None else _compared(comparison)
    _write(parts, path, title)


def write_simulation(timeline: Timeline, path: str | Path, *, title: str) -> None:
    """Write a page on a simulated ``timeline``, which is drawn once, to ``path``.

    Its times are in the unit that its costs had.
    """
    _write([legend([timeline]), draw_timeline(timeline)], path, title)


def _write(parts: Iterable[str], path: str | Path, title: str) -> None:
    name = html.escape(title)
    document = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{name}</h1>\n" + "\n".join(parts)
    )
    Path(path).write_text(document + "\n</body></html>\n", encoding="utf-8")


def _curves(metrics: Iterable[Mapping[str, object]]) -> list[str]:
    found = charts(metrics)
    if not found:
        return []
    drawn = []
    for chart in found:
        named = [(colour, name) for colour, name in chart.names if name]
        drawn.append(f"<div>{draw_chart(chart)}{keys(named) if named else ''}</div>")
    parts = ["<h2>Over the steps</h2>", f'<div class="charts">{"".join(drawn)}</div>']
    if any(chart.title.endswith("(MFU)") for chart in found):
        parts.append(f'<p class="note">{html.escape(_MFU)}</p>')
    return parts


def _compared(found: Comparison) -> list[str]:
    both = (found.measured, found.simulated)
    span = max(_span(timeline) for timeline in both)
    return [
        f"<h2>Measured: {seconds(_span(found.measured))}, {found.bubble:.1%} of it idle</h2>",
        legend(both),
        draw_timeline(found.measured, span=span),
        f"<h2>Simulated: {seconds(_span(found.simulated))}, "
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
            *(seconds(timeline.busy(rank, lane)) for lane in LANES),
            seconds(timeline.exposed(rank)),
        ]
        for rank in timeline.ranks
    ]
    head = ["", *LANES, "exposed"]
    return [
        f"<h2>The last steps: {seconds(timeline.end - timeline.start)}</h2>",
        legend([timeline]),
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
            cells += [seconds(busy), f"{1 - busy / max(_span(timeline), 1e-12):.1%}"]
        rows.append([*cells, f"{peak:g}"])
    head = ["", "computes", "idle", "simulated", "idle", "microbatches held at most"]
    return _rows(head, rows)


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return f"<table>{line('th', head)}{''.join(line('td', row) for row in rows)}</table>"


def _span(timeline: Timeline) -> float:
    """Count the seconds from the first to the last compute."""
    computing = timeline.select(lane="compute")
    return computing.end - computing.start
