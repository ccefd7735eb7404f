"""A report as one self-contained HTML file: curves, a timeline, and its simulation."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from meshwright.report.curves import charts, draw_chart
from meshwright.report.lanes import draw_timeline, keys, kind_of, legend
from meshwright.report.run import Run
from meshwright.report.svg import seconds
from meshwright.schedule.measured import Comparison, compare
from meshwright.timeline import LANES, Timeline

_FILES = Path(__file__).parent
_CONTROLS = (
    '<p class="controls"><label><input type="checkbox" id="log"> logarithmic</label>'
    '<label>smoothing <input type="range" id="smooth" min="0" max="0.99" step="0.01" value="0">'
    "</label></p>"
)
_ZOOM = (
    "Ctrl or Shift with the wheel zooms a timeline, dragging moves it, a double click shows all."
)

_MFU = (
    "MFU = 3 F / (seconds x peak), HFU = (3 F + R) / (seconds x peak): F is the number of "
    "floating-point operations of a step's forward, R those of them that recomputing does again, "
    "and the peak that of all ranks' devices. F has 2 operations for each parameter and token that "
    "it multiplies, and 4 x context x width for each token in a layer's attention, all keys "
    "counted (Chowdhery et al., PaLM, 2022, appendix B). The peak of a device is [run] "
    "peak_tflops, or its hardware file's, which meshwright plan --calibrate measures."
)


def write_page(
    timeline: Timeline | None,
    path: str | Path,
    *,
    title: str = "Timeline",
    metrics: Iterable[Mapping[str, object]] = (),
) -> None:
    """Write a page of ``timeline`` and ``metrics``, the objects of a run's steps, to ``path``.

    Of a pipeline's timeline, the last step is drawn, and below it the simulation of its schedule
    with the measured median of each action. Other timelines are drawn completely.
    """
    write_runs([Run(name=title, metrics=[*metrics], timeline=timeline)], path, title=title)


def write_runs(
    runs: Sequence[Run], path: str | Path, *, title: str, refresh: float | None = None
) -> None:
    """Write a page of ``runs``: the facts of each, their curves together, their timelines.

    With ``refresh``, browsers reload the page after so many seconds.
    """
    parts = [_facts(runs), *_curves({run.name: run.metrics for run in runs})]
    for run in runs:
        name = f"{run.name}. " if len(runs) > 1 else ""
        parts += _predicted(run, name)
        if run.timeline is not None:
            found = compare(run.timeline)
            parts += _whole(run.timeline, name) if found is None else _compared(found, name)
    parts += [_configuration(run) for run in runs if run.configuration]
    _write(parts, path, title, refresh)


def write_simulation(
    timeline: Timeline,
    path: str | Path,
    *,
    title: str,
    idle: float | None = None,
    held: Sequence[float] = (),
) -> None:
    """Write a page of a simulated ``timeline``, which is drawn once, to ``path``.

    Its times are in the unit of the costs. ``idle`` is the fraction of all ranks' time without
    computation, ``held`` the largest number of microbatches whose activations each rank holds.
    """
    said = "" if idle is None else f"<h2>Simulated: {idle:.1%} of the ranks' time idle</h2>"
    rows = [
        [f"rank {rank}", f"{timeline.busy(rank, 'compute'):g}", f"{peak:g}"]
        for rank, peak in zip(timeline.ranks, held, strict=bool(held))
    ]
    table = _rows(["", "computes", "microbatches held at most"], rows) if rows else ""
    _write([said, legend([timeline]), _timeline(timeline), table], path, title)


def _write(
    parts: Iterable[str], path: str | Path, title: str, refresh: float | None = None
) -> None:
    name = html.escape(title)
    again = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh:g}">'
    style, script = (_FILES.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    document = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{again}<title>{name}</title><style>{style}</style></head><body>\n<h1>{name}</h1>\n"
        + "\n".join(part for part in parts if part)
        + f'\n<div id="tip"></div>\n<script>{script}</script></body></html>\n'
    )
    Path(path).write_text(document, encoding="utf-8")


def _facts(runs: Sequence[Run]) -> str:
    names = dict.fromkeys(name for run in runs for name in run.facts)
    rows = [[name, *(run.facts.get(name, "") for run in runs)] for name in names]
    head = ["", *(run.name for run in runs)] if len(runs) > 1 else []
    return _rows(head, rows, kind="facts") if rows else ""


def _predicted(run: Run, name: str) -> Iterator[str]:
    """Draw what was predicted of a step beside what was measured."""
    rows = []
    for what, pairs in run.prediction.items():
        for key, pair in pairs.items():
            is_time, ratio = what == "time", f"{pair[0] / pair[1]:.2f}" if pair[1] else ""
            said = [seconds(each) if is_time else f"{each / 2**20:,.2f} MiB" for each in pair]
            rows.append([f"lane {key}" if is_time else key, *said, ratio])
    if rows:
        yield f"<h2>{html.escape(name)}A step on rank 0, predicted and measured</h2>"
        yield _rows(["", "predicted", "measured", "predicted / measured"], rows)


def _configuration(run: Run) -> str:
    text = html.escape(run.configuration)
    summary = f"<summary>Configuration of {html.escape(run.name)}</summary>"
    return f"<details>{summary}<pre>{text}</pre></details>"


def _curves(runs: Mapping[str, Iterable[Mapping[str, object]]]) -> list[str]:
    found = charts(runs)
    if not found:
        return []
    constant = [said for chart in found if (said := chart.constant())]
    drawn = []
    for chart in found:
        if not chart.constant():
            named = [(color, name) for color, name in chart.names if name]
            drawn.append(f"<div>{draw_chart(chart)}{keys(named) if named else ''}</div>")
    parts = ["<h2>Over the steps</h2>"]
    if drawn:
        parts += [_CONTROLS, f'<div class="charts">{"".join(drawn)}</div>']
    parts += [f"<p>{html.escape(said)}.</p>" for said in constant]
    if any("MFU" in chart.title for chart in found):
        parts.append(f'<p class="note">{html.escape(_MFU)}</p>')
    return parts


def _timeline(timeline: Timeline, span: float | None = None) -> str:
    return f'<div class="wide">{draw_timeline(timeline, span=span)}</div>'


def _compared(found: Comparison, name: str = "") -> list[str]:
    both = (found.measured, found.simulated)
    span = max(_span(timeline) for timeline in both)
    return [
        f"<h2>{html.escape(name)}Measured: {seconds(_span(found.measured))}, "
        f"{found.bubble:.1%} of it idle</h2>",
        legend(both),
        _timeline(found.measured, span),
        f"<h2>{html.escape(name)}Simulated: {seconds(_span(found.simulated))}, "
        f"{found.simulated_bubble:.1%} of it idle</h2>",
        _timeline(found.simulated, span),
        _table(found),
        '<p class="note">Idle is the share of the ranks\' time, from the first action to the last, '
        "in which nothing is computed. The simulation runs the same order of actions, each as long "
        "as the median of its kind and stage. Numbers in the boxes are microbatches; shades tell "
        f"the stages of one rank apart. {_ZOOM}</p>",
    ]


def _whole(timeline: Timeline, name: str = "") -> list[str]:
    checks = Timeline(event for event in timeline.events if kind_of(event) == "")
    others = Timeline(event for event in timeline.events if kind_of(event) != "")
    rows = [
        [
            f"rank {rank}",
            *(seconds(others.busy(rank, lane)) for lane in LANES),
            seconds(sum(checks.busy(rank, lane) for lane in LANES)),
            seconds(timeline.exposed(rank)),
        ]
        for rank in timeline.ranks
    ]
    head = ["", *LANES, "checks", "exposed"]
    return [
        f"<h2>{html.escape(name)}The last steps: {seconds(timeline.end - timeline.start)}</h2>",
        legend([timeline]),
        _timeline(timeline),
        _rows(head, rows),
        '<p class="note">Time during which each lane was busy; checks are the collectives of '
        "checks, norms and losses, which the lanes do not include. Exposed is the time of "
        f"communication during which nothing was computed. {_ZOOM}</p>",
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


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    first = line("th", head) if head else ""
    table = f'<table class="{kind}">{first}{"".join(line("td", row) for row in rows)}</table>'
    return f'<div class="wide">{table}</div>'


def _span(timeline: Timeline) -> float:
    """Seconds from the first to the last computation."""
    computing = timeline.select(lane="compute")
    return computing.end - computing.start
