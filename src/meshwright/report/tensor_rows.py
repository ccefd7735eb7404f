"""Rows that a run with ``--trace-tensors`` wrote of its tensors, and the files they are in.

::

    runs/one/tensors/
    ├── rank_00000.jsonl     a header, then a row for each tensor that the rank holds a part of
    └── rank_00001.jsonl

Every line is one JSON object. A run that goes on adds another header. The row of the loss is the
last of a step: a step without it on some rank was not finished. A last line that was cut short is
left out.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["KINDS", "SKETCH", "Header", "RunTrace", "Step", "Sums", "TensorRow", "trace_file"]

FORMAT = 1
KINDS = ("input", "activation", "loss", "gradient", "parameter")
"""What is traced, in the order in which a step makes it."""
SKETCH = 8
"""Signed sums of each tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums over some elements of a tensor; those of several parts add up.

    Signed sums, with signs drawn from the place of each element in the whole tensor, differ between
    two tensors by as much, in the mean square, as their elements do (Alon, Matias and Szegedy, The
    space complexity of approximating the frequency moments, 1999).
    """

    numel: int
    hash: int
    """Sum modulo 2**64 of a hash of each element's bits and place: no order, no layout."""
    square: float
    """Sum of the squares of the finite elements."""
    sketch: tuple[float, ...]
    """`SKETCH` signed sums of the finite elements."""
    nonfinite: int
    """Elements that are infinite or no number."""

    @property
    def norm(self) -> float:
        """The 2-norm of the finite elements."""
        return math.sqrt(self.square)

    @staticmethod
    def of(parts: Sequence[Sums]) -> Sums:
        """Find all parts together."""
        return Sums(
            numel=sum(part.numel for part in parts),
            hash=sum(part.hash for part in parts) % 2**64,
            square=math.fsum(part.square for part in parts),
            sketch=tuple(map(math.fsum, zip(*(part.sketch for part in parts), strict=True))),
            nonfinite=sum(part.nonfinite for part in parts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """The part of one tensor that one rank holds in one step."""

    step: int
    kind: str
    name: str
    """Of a parameter or module in the original model; empty for input and loss."""
    call: int
    """How often the module had been called before in the same forward pass."""
    place: tuple[int, int]
    """Number of the pipeline's stage, and within it the place in the order of the forward pass."""
    shape: tuple[int, ...]
    """Of the whole tensor; of an input or activation, of one sample."""
    dtype: str
    part: str
    """The ranges that this rank holds of a tensor that lies in parts; empty for the whole."""
    samples: tuple[int, int] | None
    """First sample of the global batch and one past the last, of an input or activation."""
    microbatch: int | None
    """How many forward passes this stage had made before in the step."""
    sums: Sums
    tensor_rank: str = ""
    """Which rank of axis tensor wrote an output, as "0 of 2": it may be a part, which nobody says.
    """

    def to_json(self) -> dict[str, object]:
        """Make a line of the file, flat."""
        fields = {name: getattr(self, name) for name in _ROW}
        return {**fields, **asdict(self.sums), "hash": f"{self.sums.hash:016x}"}

    @staticmethod
    def of(line: Mapping[str, object]) -> TensorRow:
        """From `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        samples, microbatch = line["samples"], line["microbatch"]
        stage, number = _integers(line["place"])
        if line["kind"] not in KINDS:
            raise ValueError(f"kind {line['kind']!r}")
        sums = Sums(
            numel=_integer(line["numel"]),
            hash=int(str(line["hash"]), 16),
            square=_float(line["square"]),
            sketch=tuple(_float(value) for value in _list(line["sketch"])),
            nonfinite=_integer(line["nonfinite"]),
        )
        if len(sums.sketch) != SKETCH:
            raise ValueError(f"{len(sums.sketch)} signed sums")
        first_last = None if samples is None else _integers(samples)
        return TensorRow(
            step=_integer(line["step"]),
            kind=str(line["kind"]),
            name=str(line["name"]),
            call=_integer(line["call"]),
            place=(stage, number),
            shape=_integers(line["shape"]),
            dtype=str(line["dtype"]),
            part=str(line["part"]),
            samples=None if first_last is None else (first_last[0], first_last[1]),
            microbatch=None if microbatch is None else _integer(microbatch),
            sums=sums,
            tensor_rank=str(line.get("tensor_rank", "")),
        )


_ROW = (
    "step",
    "kind",
    "name",
    "call",
    "place",
    "shape",
    "dtype",
    "part",
    "samples",
    "microbatch",
    "tensor_rank",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The subject of the rows below it."""

    rank: int
    ranks: int
    layout: str
    step: int
    """The first step below."""
    run: Mapping[str, object]
    """The configuration and the text."""

    def to_json(self) -> dict[str, object]:
        """List the first line of a file."""
        return {"meshwright_tensors": FORMAT, **asdict(self)}

    @staticmethod
    def of(line: Mapping[str, object]) -> Header:
        """From `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        run = line["run"]
        if line["meshwright_tensors"] != FORMAT or not isinstance(run, dict):
            raise ValueError(f"format {line['meshwright_tensors']!r}")
        return Header(
            rank=_integer(line["rank"]),
            ranks=_integer(line["ranks"]),
            layout=str(line["layout"]),
            step=_integer(line["step"]),
            run=run,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """All rows of one step."""

    number: int
    rows: tuple[tuple[int, TensorRow], ...]
    """Each with the rank that wrote it."""
    is_finished: bool
    """Whether every rank wrote all of it."""


def trace_file(folder: Path, rank: int) -> Path:
    """Find the file of ``rank`` in the ``folder`` of a run."""
    return folder / "tensors" / f"rank_{rank:05}.jsonl"


class RunTrace:
    """The files of all ranks of one run, read step by step.

    Raises ``ValueError``, naming file and line, for what is no trace of a run.
    """

    header: Header
    """The last of rank 0."""
    layouts: tuple[str, ...]
    """Those that the run has had, one after the other."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        first = trace_file(self.folder, 0)
        if not self.folder.is_dir():
            raise ValueError(f"{folder}: expected the folder of a run, found no such folder")
        if not first.is_file():
            raise ValueError(
                f"{folder}: expected tensor traces in {first.parent}, found none: start the run "
                "with --trace-tensors"
            )
        headers = self._headers(0)
        self.header = headers[-1]
        self.layouts = tuple(dict.fromkeys(header.layout for header in headers))
        ranks = max(header.ranks for header in headers)
        missing = [r for r in range(ranks) if not trace_file(self.folder, r).is_file()]
        if missing:
            raise ValueError(
                f"{folder}: expected the traces of {ranks} ranks in {first.parent}, found none of "
                f"ranks {', '.join(map(str, missing))}"
            )
        self._ranks = ranks

    def steps(self) -> Iterator[Step]:
        """List every step, in order, up to the first that not all ranks finished."""
        files = [self._steps_of(rank) for rank in range(self._ranks)]
        heads = [next(file, None) for file in files]
        while any(head is not None for head in heads):
            number = min(head[0] for head in heads if head is not None)
            rows: list[tuple[int, TensorRow]] = []
            finished, wanted = 0, 1
            for rank, head in enumerate(heads):
                if head is None or head[0] != number:
                    continue
                _, wanted, own = head
                rows += ((rank, row) for row in own)
                finished += any(row.kind == "loss" for row in own)
                heads[rank] = next(files[rank], None)
            yield Step(number=number, rows=tuple(rows), is_finished=finished == wanted)
            if finished < wanted:
                return

    def _headers(self, rank: int) -> list[Header]:
        found = [line for line in self._lines(rank) if isinstance(line, Header)]
        if not found:
            raise ValueError(f"{trace_file(self.folder, rank)}: expected a header, found no line")
        return found

    def _steps_of(self, rank: int) -> Iterator[tuple[int, int, list[TensorRow]]]:
        """Number, ranks and this rank's rows of each step."""
        ranks = 0
        before = 0
        for key, lines in itertools.groupby(
            self._lines(rank), lambda line: None if isinstance(line, Header) else line.step
        ):
            found = list(lines)
            rows = [line for line in found if isinstance(line, TensorRow)]
            if key is None:
                ranks = next(line.ranks for line in reversed(found) if isinstance(line, Header))
                continue
            if key <= before:
                raise ValueError(
                    f"{trace_file(self.folder, rank)} is damaged: step {key} comes after {before}"
                )
            before = key
            yield key, ranks, rows

    def _lines(self, rank: int) -> Iterator[Header | TensorRow]:
        path = trace_file(self.folder, rank)
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith("\n"):
                    return  # the run was killed while it wrote
                try:
                    line = json.loads(text)
                    yield Header.of(line) if number == 1 or "run" in line else TensorRow.of(line)
                except (KeyError, TypeError, ValueError) as error:
                    raise ValueError(
                        f"{path}, line {number}, is damaged or no tensor trace: "
                        f"{type(error).__name__}: {error}"
                    ) from error


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {value!r}")
    return value


def _integers(value: object) -> tuple[int, ...]:
    return tuple(_integer(item) for item in _list(value))


def _integer(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"expected a whole number, found {value!r}")
    return value


def _float(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"expected a number, found {value!r}")
    return float(value)
