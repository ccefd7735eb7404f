"""Finds the first tensor in which two runs differ, by name, under any layouts.

Steps are compared in order, and within a step the input, module outputs in forward order, the loss,
gradients in backward order, and parameters: the first tensor named is where the difference began.
Rows of several ranks and microbatches are added up to the smallest pieces that both runs have.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from meshwright.recipes.run_folder import json_leaves
from meshwright.recipes.tensors.rows import KINDS, SKETCH, RunTrace, Step, Sums, TensorRow

TOLERANCES: Mapping[str, float] = MappingProxyType(
    {"float64": 1e-9, "float32": 1e-3, "float16": 3e-2, "bfloat16": 3e-2}
)
"""Relative difference that another order of summation may cause, by a step's narrowest dtype."""

FLOOR = 1e-6
"""Tensors below this fraction of the largest of their kind and step count as zero: rounding."""

_Rows = list[tuple[int, TensorRow]]
_Key = tuple[str, str, int, str]
"""Kind, name, call, and the rank of axis tensor for an output that differs between these ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFinding:
    """A difference between two runs, or between ranks of one run that should agree."""

    step: int
    kind: str
    name: str
    """Name of the parameter or module; empty for input and loss."""
    samples: tuple[int, int] | None
    """For an input or activation: first sample of the global batch, and one past the last."""
    error: float
    """Norm of the difference over the larger norm, estimated; infinite where one has no value."""
    detail: str
    """Norms, ranks and microbatches."""

    def __str__(self) -> str:
        what = {"activation": "output", "input": "input", "loss": "loss"}.get(self.kind, self.kind)
        text = f"step {self.step}: the {what}"
        if self.name:
            text += f"{'' if self.kind == 'parameter' else ' of'} {self.name!r}"
        if self.samples is not None:
            text += f" for samples {self.samples[0]} to {self.samples[1] - 1}"
        return f"{text} differs by {self.error:.1e} relative ({self.detail})"


@dataclass(slots=True)
class RunComparison:
    """The findings of `compare_runs`."""

    steps: list[int] = field(default_factory=list)
    """The steps that were compared."""
    counts: Counter[str] = field(default_factory=Counter)
    """Compared tensors by kind, over all steps."""
    tolerance: float = 0.0
    """The largest tolerance of any step."""
    divergence: TensorFinding | None = None
    """The first difference beyond the tolerance. Nothing after its step is compared."""
    first_bits: TensorFinding | None = None
    """The first difference in any bit."""
    largest: TensorFinding | None = None
    """The largest difference within the tolerance."""
    others: int = 0
    """Later tensors of the divergent step that also differ beyond the tolerance."""
    notes: list[str] = field(default_factory=list)
    """Remarks: settings that differ, tensors that were not compared."""

    def begin(self, step: int, tolerance: float) -> None:
        """Begin ``step``, in which ``tolerance`` is allowed."""
        self.steps.append(step)
        self.tolerance = max(self.tolerance, tolerance)

    def add(self, finding: TensorFinding, allowed: float) -> None:
        """Add the next difference in the order of comparison; up to ``allowed`` it is rounding."""
        if self.first_bits is None:
            self.first_bits = finding
        if finding.error > allowed:
            self.others += self.divergence is not None
            self.divergence = self.divergence or finding
        elif self.largest is None or finding.error > self.largest.error:
            self.largest = finding

    def lines(self) -> list[str]:
        """Format the findings."""
        counted = ", ".join(_counted(n, kind) for kind, n in self.counts.items())
        lines = [*self.notes, f"compared {_spans(self.steps)}: {counted}"]
        if self.first_bits is None:
            lines.append("all of them are equal, bit for bit")
        elif self.first_bits is not self.divergence:
            lines.append(f"first difference in any bit: {self.first_bits}")
        if self.divergence is not None:
            lines.append(f"DIVERGED: {self.divergence}; at most {self.tolerance:.0e} is rounding")
            if self.others:
                lines.append(f"{self.others} later tensors of this step differ by more, too")
        elif self.largest is not None:
            lines.append(f"largest difference: {self.largest}")
            lines.append(f"the runs agree: at most {self.tolerance:.0e} is rounding")
        return lines


def compare_runs(
    first: str | Path, second: str | Path, *, tolerance: float | None = None
) -> RunComparison:
    """Compare two runs that were started with ``--trace-tensors``, named A and B.

    ``tolerance`` replaces `TOLERANCES`. Raises ``ValueError`` for a folder that is not that of such
    a run, a damaged file, runs of different models, and runs that have no step in common.
    """
    runs = (RunTrace(first), RunTrace(second))
    found = RunComparison(notes=list(_notes(runs)))
    ends = [0, 0]
    left, right = runs[0].steps(), runs[1].steps()
    a, b = next(left, None), next(right, None)
    while a is not None and b is not None and found.divergence is None:
        ends = [a.number, b.number]
        if a.number == b.number:
            _StepComparison(runs, (a, b), found, tolerance).run()
        behind = min(a.number, b.number)
        if a.number == behind:
            a = next(left, None)
        if b.number == behind:
            b = next(right, None)
    if not found.steps:
        begins = [next((step.number for step in run.steps()), "none") for run in runs]
        raise ValueError(
            f"{first} and {second} have no step in common: the first begins with step "
            f"{begins[0]}, the second with step {begins[1]}"
        )
    if found.divergence is None and (a is not None or b is not None):
        longer = "A" if a is not None else "B"
        found.notes.append(f"only {longer} has steps after {min(ends)}")
    return found


class _StepComparison:
    """The comparison of one step of two runs."""

    def __init__(
        self,
        runs: tuple[RunTrace, RunTrace],
        steps: tuple[Step, Step],
        found: RunComparison,
        tolerance: float | None,
    ) -> None:
        self._runs = runs
        self._steps = steps
        self._found = found
        self._tensors = tuple(map(_by_tensor, steps))
        rows = [row for step in steps for _, row in step.rows]
        allowed = [TOLERANCES.get(row.dtype, 0.0) for row in rows]
        self._tolerance = max(allowed, default=0.0) if tolerance is None else tolerance
        self._floor = {
            kind: FLOOR * max((r.norm for r in rows if r.kind == kind), default=0.0)
            for kind in KINDS
        }

    def run(self) -> None:
        """Compare the step and add its findings."""
        found = self._found
        found.begin(self._steps[0].number, self._tolerance)
        found.notes.extend(
            f"the trace of {letter} ends in step {step.number}, which not all ranks finished"
            for letter, step in zip("AB", self._steps, strict=True)
            if not step.is_finished
        )
        a, b = self._tensors
        keys = {**b, **a}
        spread = {key[:3] for key in keys if key[3]}
        for key in sorted(keys, key=lambda key: _order(keys[key][0][1])):
            if not key[3] and key[:3] in spread:
                continue
            rows = tuple(tensors.get(key) or tensors.get((*key[:3], "")) for tensors in (a, b))
            if rows[0] is None or rows[1] is None:
                self._only_one(key)
            elif rows[0][0][1].shape != rows[1][0][1].shape:
                self._other_shape(key, rows[0][0][1], rows[1][0][1])
            else:
                self._compare(key, (rows[0], rows[1]))

    def _compare(self, key: _Key, rows: tuple[_Rows, _Rows]) -> None:
        self._found.counts[key[0]] += key[3].startswith("0 ") or not key[3]
        worst = [*self._copies(0, rows[0]), *self._copies(1, rows[1])]
        for samples in _regions(*rows):
            pieces = [_piece(each, samples) for each in rows]
            a, b = (self._sum(number, rows[number], pieces[number], samples) for number in (0, 1))
            if a is not None and b is not None and a.hash != b.hash:
                where = "" if samples is None else "; " + ", ".join(map(_where, pieces, "AB"))
                detail = f"norm {a.norm:.6g} in A, {b.norm:.6g} in B{where}"
                worst.append(self._finding(pieces[0][0][1], samples, a, b, detail))
        for finding in sorted(worst, key=lambda finding: finding.error <= self._tolerance):
            self._add(finding)

    def _finding(
        self, row: TensorRow, samples: tuple[int, int] | None, a: Sums, b: Sums, detail: str
    ) -> TensorFinding:
        if a.nonfinite or b.nonfinite:
            detail += f"; not finite: {a.nonfinite} in A, {b.nonfinite} in B"
        return TensorFinding(
            step=row.step,
            kind=row.kind,
            name=f"{row.name}, call {row.call + 1}" if row.call else row.name,
            samples=samples,
            error=_difference(a, b, self._floor[row.kind]),
            detail=detail,
        )

    def _copies(self, number: int, rows: _Rows) -> Iterator[TensorFinding]:
        """Find ranks of one run that hold the same elements with different values."""
        first: dict[object, tuple[int, TensorRow]] = {}
        for rank, row in rows:
            known, other = first.setdefault((row.samples, row.part), (rank, row))
            if other.hash != row.hash:
                detail = (
                    f"between ranks {known} and {rank} of {'AB'[number]}, which should hold the "
                    f"same: norms {other.norm:.6g} and {row.norm:.6g}"
                )
                yield self._finding(row, row.samples, other, row, detail)

    def _sum(
        self, number: int, whole: _Rows, rows: _Rows, samples: tuple[int, int] | None
    ) -> Sums | None:
        """Add up a piece of a tensor; None if an interrupted run did not write all of it."""
        one = whole[0][1]
        total = Sums.of([row for _, row in rows])
        expected = math.prod(one.shape) * (1 if samples is None else samples[1] - samples[0])
        if total.numel == expected:
            return total
        if self._steps[number].is_finished:
            raise ValueError(
                f"{self._runs[number].folder}: the traces of step {self._steps[number].number} "
                f"hold {total.numel} of {expected} elements of the {one.kind} {one.name!r}: the "
                "files are not those of one run"
            )
        return None

    def _only_one(self, key: _Key) -> None:
        kind, name, *_ = key
        number = 0 if key in self._tensors[0] else 1
        row = self._tensors[number][key][0][1]
        if not self._steps[1 - number].is_finished:
            return
        if kind == "activation":
            self._note(f"outputs that only {'AB'[number]} has are not compared, such as {name!r}")
            return
        detail = f"{'AB'[1 - number]} has none"
        finding = TensorFinding(
            step=row.step, kind=kind, name=name, samples=None, error=math.inf, detail=detail
        )
        self._add(finding)

    def _other_shape(self, key: _Key, first: TensorRow, second: TensorRow) -> None:
        kind, name, *_ = key
        a, b = first.shape, second.shape
        if kind == "activation":
            self._note(
                "outputs that are spread over ranks are not compared, such as "
                f"{name!r}: {list(a)} in A, {list(b)} in B"
            )
            return
        raise ValueError(
            f"the {kind} {name!r} has shape {list(a)} in A and {list(b)} in B: these are runs of "
            "different models or texts"
        )

    def _note(self, text: str) -> None:
        start = text.partition(", such as")[0]
        if not any(note.startswith(start) for note in self._found.notes):
            self._found.notes.append(text)

    def _add(self, finding: TensorFinding) -> None:
        self._found.add(finding, 0.0 if finding.kind == "input" else self._tolerance)


# ------------------------------------------------------------------------------------- one tensor


def _by_tensor(step: Step) -> dict[_Key, _Rows]:
    tensors: dict[_Key, _Rows] = {}
    for rank, row in step.rows:
        tensors.setdefault((row.kind, row.name, row.call, ""), []).append((rank, row))
    for key, rows in list(tensors.items()):
        if not _is_spread(rows):
            continue
        del tensors[key]
        for rank, row in rows:
            tensors.setdefault((*key[:3], row.tensor_rank), []).append((rank, row))
    return tensors


def _is_spread(rows: _Rows) -> bool:
    """True for an output that differs between ranks of axis tensor: each is compared on its own."""
    first: dict[object, int] = {}
    return any(
        first.setdefault((row.samples, row.part), row.hash) != row.hash
        for _, row in rows
        if row.tensor_rank
    )


def _order(row: TensorRow) -> tuple[int, int, int]:
    """Sort key in the order of a step: gradients from the last parameter to the first."""
    stage, number = row.place
    sign = -1 if row.kind == "gradient" else 1
    return KINDS.index(row.kind), sign * stage, sign * number


def _regions(a: _Rows, b: _Rows) -> list[tuple[int, int] | None]:
    """List the smallest ranges of samples that both runs have; None where rows have no samples."""
    edges = [
        {edge for _, row in rows if row.samples is not None for edge in row.samples}
        for rows in (a, b)
    ]
    common = sorted(edges[0] & edges[1])
    return [*itertools.pairwise(common)] if edges[0] else [None]


def _piece(rows: _Rows, samples: tuple[int, int] | None) -> _Rows:
    """Select the rows within ``samples``, each part from the first rank that wrote it."""
    first: dict[object, tuple[int, TensorRow]] = {}
    for rank, row in rows:
        begin, end = row.samples or (0, 0)
        if samples is None or (row.samples and samples[0] <= begin and end <= samples[1]):
            first.setdefault((row.samples, row.part), (rank, row))
    return list(first.values())


def _difference(a: Sums, b: Sums, floor: float) -> float:
    """Estimate the relative difference from signed sums: its square is their mean square.

    With eight sums, the estimate is typically within a quarter, nearly always within a half.
    """
    if a.nonfinite != b.nonfinite:
        return math.inf
    distance = math.dist(a.sketch, b.sketch) / math.sqrt(SKETCH)
    scale = max(a.norm, b.norm, floor)
    return distance / scale if scale else 0.0


def _where(rows: _Rows, run: str) -> str:
    places = sorted({(rank, row.microbatch) for rank, row in rows})
    rank, microbatch = places[0]
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"microbatch {microbatch} of rank {rank}{more} in {run}"


# --------------------------------------------------------------------------------------- two runs


def _notes(runs: tuple[RunTrace, RunTrace]) -> Iterator[str]:
    """Describe the two runs. Raises ValueError when their models differ."""
    for run, letter in zip(runs, "AB", strict=True):
        yield f"{letter}: {run.folder}, {', then '.join(run.layouts)}"
    a, b = (dict(json_leaves(run.header.run)) for run in runs)
    found = [
        f"{key.removeprefix('config.')} = {a.get(key, 'none')} in A, {b.get(key, 'none')} in B"
        for key in sorted({*a, *b})
        if a.get(key) != b.get(key)
    ]
    models = [e for e in found if e.startswith("model.") and not e.startswith("model.dropout")]
    if models:
        raise ValueError(
            f"expected runs of one model, found {'; '.join(models)} (A is {runs[0].folder}, B is "
            f"{runs[1].folder})"
        )
    others = [each for each in found if not each.startswith(_LAYOUT)]
    if others:
        yield f"settings differ: {'; '.join(others)}"


_LAYOUT = (
    *("axes.", "buckets.", "data.path", "pipeline.", "run.", "shard."),
    *("train.accumulate", "train.recompute"),
)
"""Settings in which two layouts of one run may differ."""


def _counted(count: int, kind: str) -> str:
    if count == 1:
        return f"1 {kind}"
    return f"{count} losses" if kind == "loss" else f"{count} {kind}s"


def _spans(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
