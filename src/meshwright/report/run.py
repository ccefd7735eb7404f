"""A run as its folder tells it: metrics, timeline, configuration, and how it ended."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.report.chrome_trace import read_chrome_trace
from meshwright.report.curves import METRICS, read_metrics
from meshwright.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, as a page shows it."""

    name: str
    metrics: Sequence[Mapping[str, object]] = ()
    """The objects of its steps."""
    timeline: Timeline | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    """Layout, losses, speed and so on, in words."""
    configuration: str = ""
    """Its configuration, as TOML."""
    is_finished: bool = True


def read_run(path: str | Path) -> Run:
    """Read the folder of a run, or a timeline's file alone; what is not written yet is left out.

    Raises `ValueError` for metrics or a timeline that cannot be read, and `OSError` where there is
    neither.
    """
    given = Path(path)
    if not given.is_dir():
        return Run(name=given.stem, timeline=read_chrome_trace(given))
    metrics, trace = given / METRICS, given / "timeline.json"
    summary = _json(given / "summary.json")
    configuration = given / "config.toml"
    text = configuration.read_text(encoding="utf-8") if configuration.exists() else ""
    rows = read_metrics(metrics) if metrics.exists() else []
    return Run(
        name=given.resolve().name,
        metrics=rows,
        timeline=None if metrics.exists() and not trace.exists() else read_chrome_trace(trace),
        facts=dict(_facts(summary, _json(given / "run.json"), tomllib.loads(text), rows)),
        configuration=text,
        is_finished=bool(summary),
    )


def _json(path: Path) -> Mapping[str, object]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _facts(
    summary: Mapping[str, object],
    place: Mapping[str, object],
    config: Mapping[str, object],
    rows: Sequence[Mapping[str, object]],
) -> Iterator[tuple[str, str]]:
    """Say what is known, of a run that goes on from its metrics."""
    axes = config.get("axes")
    cut = [f"{axis} {size}" for axis, size in axes.items()] if isinstance(axes, Mapping) else []
    steps = [row["step"] for row in rows if "loss" in row]
    yield "layout", " × ".join(cut) or "one process"
    yield from ((name, str(value)) for name, value in place.items())
    if not summary:
        yield "steps", f"{steps[-1] if steps else 0}, the run has not ended"
        return
    yield "ranks", str(summary["ranks"])
    yield "steps", f"{summary['step']} of {summary['steps']}"
    for name, key in (("training loss", "loss"), ("validation loss", "validation_loss")):
        if isinstance(value := summary.get(key), float):
            yield name, f"{value:.4f}"
    if parity := summary.get("parity"):
        yield "parity", str(parity)
    if isinstance(speed := summary.get("tokens_per_second"), float):
        yield "tokens a second", f"{speed:,.0f}"
    if isinstance(took := summary.get("seconds"), float):
        yield "time", f"{took:,.1f} s"
