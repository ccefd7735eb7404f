"""The rows that a run with ``--trace-tensors`` writes for its tensors, and their files.

::

    runs/one/tensors/
    ├── rank_00000.jsonl     a header, then a row for each tensor that the rank holds a part of
    └── rank_00001.jsonl

Every line is one JSON object. A resumed run adds another header. The row of the loss is the last of
a step; without it, the step was not finished. An incomplete last line is ignored.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any

from meshwright.recipes.tensors.digest import SKETCH, Sums

FORMAT = 1
KINDS = ("input", "activation", "loss", "gradient", "parameter")
"""The kinds of traced tensors, in the order in which a step makes them."""

_Types = Mapping[str, type | UnionType]

_PLAIN: _Types = MappingProxyType(
    {
        **dict.fromkeys(("step", "call", "numel", "nonfinite"), int),
        **dict.fromkeys(("kind", "name", "dtype", "part", "hash", "tensor_rank"), str),
        "microbatch": int | None,
        "square": int | float,
    }
)
_LISTS: _Types = MappingProxyType({"place": int, "shape": int, "sketch": int | float})
_HEADER: _Types = MappingProxyType(
    {"rank": int, "ranks": int, "layout": str, "step": int, "run": dict}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow(Sums):
    """The part of one tensor that one rank holds in one step, and its sums."""

    step: int
    kind: str
    name: str
    """Name of a parameter or module in the original model; empty for input and loss."""
    call: int
    """The number of calls of the module before this one in the same forward pass."""
    place: tuple[int, int]
    """Index of the pipeline stage, and position in its forward order."""
    shape: tuple[int, ...]
    """Shape of the full tensor; for an input or activation, of one sample."""
    dtype: str
    part: str
    """The ranges of a sharded tensor that this rank holds; empty for all of it."""
    samples: tuple[int, int] | None
    """First sample of the global batch and one past the last, of an input or activation."""
    microbatch: int | None
    """The number of forward passes that this stage had made before in the step."""
    tensor_rank: str = ""
    """For an output: rank on axis tensor, as "0 of 2", because it may be a part of the output."""

    def to_json(self) -> dict[str, object]:
        """Return the row as a line of the file."""
        return {**asdict(self), "hash": f"{self.hash:016x}"}

    @staticmethod
    def from_json(line: Mapping[str, object]) -> TensorRow:
        """Read what `to_json` made. Raises KeyError, TypeError or ValueError for anything else."""
        row: dict[str, Any] = {"tensor_rank": "", **line}
        _require(((name, row[name], kind) for name, kind in _PLAIN.items()))
        if row["kind"] not in KINDS:
            raise ValueError(f"kind {row['kind']!r}")
        lists = _LISTS if row["samples"] is None else {**_LISTS, "samples": int}
        _require((name, item, kind) for name, kind in lists.items() for item in row[name])
        row |= {name: tuple(row[name]) for name in lists}
        if len(row["sketch"]) != SKETCH:
            raise ValueError(f"{len(row['sketch'])} signed sums")
        row["hash"] = int(row["hash"], 16)
        return TensorRow(**row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What the rows below it belong to."""

    rank: int
    ranks: int
    layout: str
    step: int
    """The first step below."""
    run: Mapping[str, object]
    """The configuration and the text."""

    def to_json(self) -> dict[str, object]:
        """Return the header as a line of the file."""
        return {"meshwright_tensors": FORMAT, **asdict(self)}

    @staticmethod
    def from_json(line: Mapping[str, object]) -> Header:
        """Read what `to_json` made. Raises KeyError, TypeError or ValueError for anything else."""
        fields: dict[str, Any] = dict(line)
        if (found := fields.pop("meshwright_tensors")) != FORMAT:
            raise ValueError(f"format {found!r}")
        _require((name, fields[name], kind) for name, kind in _HEADER.items())
        return Header(**fields)


def _require(values: Iterable[tuple[str, object, type | UnionType]]) -> None:
    for name, value, kind in values:
        if not isinstance(value, kind):
            raise TypeError(f"{name} {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """All rows of one step."""

    number: int
    rows: tuple[tuple[int, TensorRow], ...]
    """The rows, each with the rank that wrote it."""
    is_finished: bool
    """True when every rank wrote all of it."""


def trace_file(folder: Path, rank: int) -> Path:
    """Return the path of ``rank``'s file in the ``folder`` of a run."""
    return folder / "tensors" / f"rank_{rank:05}.jsonl"


class RunTrace:
    """The files of all ranks of one run, read step by step.

    Raises ``ValueError``, naming file and line, for anything that is not a trace of a run.
    """

    header: Header
    """The last header of rank 0."""
    layouts: tuple[str, ...]
    """The layouts that the run has had, in order."""

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
        headers = [line for line in self._lines(0) if isinstance(line, Header)]
        if not headers:
            raise ValueError(f"{first}: expected a header, found no line")
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
        """Read every step, in order, up to the first that not all ranks finished."""
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

    def _steps_of(self, rank: int) -> Iterator[tuple[int, int, list[TensorRow]]]:
        """Read the number, the number of ranks and this rank's rows of each step."""
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
                    is_header = number == 1 or "run" in line
                    yield (Header if is_header else TensorRow).from_json(line)
                except (KeyError, TypeError, ValueError) as error:
                    raise ValueError(
                        f"{path}, line {number}, is damaged or no tensor trace: "
                        f"{type(error).__name__}: {error}"
                    ) from error
