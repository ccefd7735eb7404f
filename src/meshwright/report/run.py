"""A run as read from its folder: metrics, timeline, configuration, and how it ended."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from meshwright.report.chrome_trace import read_chrome_trace
from meshwright.report.curves import METRICS, read_metrics
from meshwright.timeline import Timeline

PREDICTION = "prediction.json"
"""Of a step, [predicted, measured]: ``time``, seconds by lane; ``memory``, bytes by category."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, as a page shows it."""

    name: str
    metrics: Sequence[Mapping[str, object]] = ()
    """The objects of its steps."""
    timeline: Timeline | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    """Layout, losses, speed and the like, as text."""
    prediction: Mapping[str, Any] = field(default_factory=dict)
    """What `PREDICTION` holds."""
    configuration: str = ""
    """Its configuration, as TOML."""
    is_finished: bool = True


def read_run(path: str | Path) -> Run:
    """Read the folder of a run, or a single timeline file; files not written yet are left out.

    Raises `ValueError` for metrics or a timeline that cannot be read, and `OSError` if there is
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
        prediction=_json(given / PREDICTION),
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
    """List the facts; speed, time, and the losses of an unfinished run come from its metrics."""
    axes = config.get("axes")
    cut = [f"{axis} {size}" for axis, size in axes.items()] if isinstance(axes, Mapping) else []
    steps = [row for row in rows if "loss" in row]
    last: Mapping[str, Any] = steps[-1] if steps else {}
    known: dict[str, object] = {}
    for each in (*rows, {key: value for key, value in summary.items() if value is not None}):
        known.update(each)
    yield "layout", " × ".join(cut) or "one process"
    yield from ((name, str(value)) for name, value in place.items())
    if summary:
        yield "ranks", str(summary["ranks"])
        yield "steps", f"{summary['step']} of {summary['steps']}"
    else:
        yield "steps", f"{last.get('step', 0)}, the run has not ended"
    for name, key in (("training loss", "loss"), ("validation loss", "validation_loss")):
        if isinstance(value := known.get(key), float):
            yield name, f"{value:.4f}"
    if parity := summary.get("parity"):
        yield "parity", str(parity)
    took = sum(cast(float, row.get("seconds", 0.0)) for row in steps)
    for unit in ("tokens", "samples"):
        if took and unit in last:
            speed = last[unit] / last["step"] * len(steps) / took
            yield f"{unit} a second", f"{speed:,.0f}"
    if isinstance(flops := known.get("flops_per_second"), float):
        yield "operations of the model", f"{flops / 1e9:,.4g} GFLOP/s"
    for key in ("mfu", "hfu"):
        if isinstance(share := known.get(key), float):
            yield key.upper(), f"{share:.1%}"
    if took:
        yield "time", f"{took:,.1f} s"
