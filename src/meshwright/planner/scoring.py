"""Errors of the planner on published runs, by source, and constants fitted without one of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.planner.constants import Constants, priors
from meshwright.planner.fitting import fit, linearize
from meshwright.planner.published import PublishedRun, Question, published_runs

ROWS_OF_A_SOURCE = 70
"""A fit takes at most so many questions of a source, and a third of the rest."""


@dataclass(frozen=True, slots=True)
class Score:
    """Predicted over measured, minus 1, of each row that was scored."""

    times: Mapping[str, Sequence[float]]
    """By source."""
    memory: Mapping[str, Sequence[float]]
    allocated: Mapping[str, float]
    """Of memory, the rows that print what torch allocated, by id."""
    large: Sequence[float]
    """Of times, runs of at least 1,024 GPUs."""
    refused: tuple[int, int]
    """Runs that did not fit and are called so, and all that did not fit."""
    feasible: tuple[int, int]
    """Runs that fitted and are called so, and all that fitted."""
    ranking: Mapping[str, tuple[float, float]]
    """Spearman's rho, and the regret of the first pick, by sweep."""
    rows: int
    unknown: int

    def last_line(self) -> str:
        """All of it in one line."""
        pooled = _sizes(self.times)
        over = _median([_median([abs(e) for e in errors]) for errors in self.times.values()])
        memory = _sizes(self.memory)
        return (
            f"score: time median over sources {over:.1%}, pooled {_median(pooled):.1%}, "
            f"p90 {_p90(pooled):.0%}; memory median {_median(memory):.1%}, p90 {_p90(memory):.0%}; "
            f"rows {len(pooled)} of {self.rows}"
        ).replace("%", " %")

    def lines(self) -> list[str]:
        """The errors by source, and last one line of all of it."""
        found = [f"{'source':<28} {'rows':>4} {'median':>7} {'largest':>8} {'bias':>7}"]
        for title, errors in (("", self.times), ("memory ", self.memory)):
            for source, each in errors.items():
                sizes = [abs(error) for error in each]
                found.append(
                    f"{title + source:<28} {len(each):>4} {_median(sizes):>7.1%} "
                    f"{max(sizes):>8.1%} {_median(each):>+7.1%}"
                )
        found += [f"allocated {name}: {error:+.1%}" for name, error in self.allocated.items()]
        if self.large:
            sizes = [abs(error) for error in self.large]
            found.append(f"at least 1,024 GPUs: median {_median(sizes):.1%}, {len(sizes)} runs")
        for sweep, (rho, regret) in self.ranking.items():
            found.append(f"ranking {sweep}: Spearman {rho:.2f}, regret {regret:.1%}")
        found.append(
            f"out of memory: {self.refused[0]} of {self.refused[1]} called infeasible; "
            f"{self.feasible[0]} of {self.feasible[1]} that ran called feasible"
        )
        if self.unknown:
            found.append(f"{self.unknown} unknown fields ignored")
        return [*found, self.last_line()]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.9 * len(values)))] if values else math.nan


def _sizes(errors: Mapping[str, Sequence[float]]) -> list[float]:
    return [abs(error) for each in errors.values() for error in each]


def score(path: str, *, leave_out: bool = False) -> Score:
    """Score the planner on a file of runs; raises ``PlanError`` with the row and field at fault.

    With ``leave_out`` the constants that score a source are fitted on all others of the file.
    """
    runs, rows, unknown = published_runs(path)
    timed = [run for run in runs if run.seconds and run.ran and run.tier in ("A", "B", "")]
    if leave_out and len({run.source for run in timed}) == 1:
        raise PlanError("--leave-out: expected runs of at least two sources, found one", path)
    fitted_without = _without(timed) if leave_out else {}
    usual = Constants()
    answers: dict[tuple[Question, Constants], float] = {}
    times: dict[str, list[float]] = {}
    sweeps: dict[str, list[tuple[float, float]]] = {}
    large: list[float] = []
    for run in timed:
        key = run.question, fitted_without.get(run.source, usual)
        if key not in answers:
            answers[key] = run.question.seconds(key[1], replay=True)
        measured = run.seconds or math.nan
        error = answers[key] / measured - 1
        times.setdefault(run.source, []).append(error)
        large += [error] if run.question.layout.gpus >= 1024 else []
        asked = run.question
        sweep = f"{run.source} {asked.shape.name} on {asked.layout.gpus} {asked.hardware.name}"
        tokens = asked.layout.batch * asked.shape.seq
        sweeps.setdefault(sweep, []).append((answers[key] / tokens, measured / tokens))
    memory: dict[str, list[float]] = {}
    allocated = {}
    for run in runs:
        if run.memory_gib and run.ran:
            error = run.question.memory(run.memory_rank) / run.memory_gib - 1
            memory.setdefault(run.source, []).append(error)
            if run.memory_kind == "max_allocated":
                allocated[run.id] = error
    failed, fitted = [r for r in runs if not r.ran], [r for r in runs if r.ran]
    return Score(
        times,
        memory,
        allocated,
        large,
        (sum(not r.question.fits for r in failed), len(failed)),
        (sum(r.question.fits for r in fitted), len(fitted)),
        {name: ranking(pairs) for name, pairs in sweeps.items() if len(pairs) >= 10},
        rows,
        unknown,
    )


def ranking(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Spearman's rho of (predicted, measured), and what the first pick loses to the best."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(values)
        return [order.index(value) + (order.count(value) - 1) / 2 for value in values]

    predicted, measured = (ranks(column) for column in zip(*pairs, strict=True))
    pick = min(pairs)[1] / min(value for _, value in pairs) - 1
    if len(set(predicted)) < 2 or len(set(measured)) < 2:
        return math.nan, pick
    return statistics.correlation(predicted, measured), pick


def _sample(
    runs: Sequence[PublishedRun],
) -> tuple[list[str], Callable[[Constants], list[float]]]:
    """Questions to fit to, each once with the median of its answers: sources, and ratios."""
    asked: dict[tuple[str, Question], list[float]] = {}
    for run in runs:
        asked.setdefault((run.source, run.question), []).append(run.seconds or math.nan)
    taken: dict[str, int] = {}
    kept: list[tuple[str, Question, float]] = []
    for (source, question), seconds in asked.items():
        taken[source] = taken.get(source, 0) + 1
        if taken[source] <= ROWS_OF_A_SOURCE or taken[source] % 3 == 0:
            kept.append((source, question, statistics.median(seconds)))
    return [source for source, _, _ in kept], lambda constants: [
        question.seconds(constants) / seconds for _, question, seconds in kept
    ]


def _without(runs: Sequence[PublishedRun]) -> dict[str, Constants]:
    """Constants for each source, fitted to all others, from the priors on."""
    sources, predict = _sample(runs)
    first = linearize(predict, priors())
    return {
        source: fit(
            linearize(predict, fit(first, sources, without=source)),
            sources,
            without=source,
            reach=0.25,
        )
        for source in dict.fromkeys(sources)
    }
