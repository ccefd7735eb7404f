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
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor

from meshwright.comm.dtensors.gather_dtensor import ShardedPiece
from meshwright.layout import Box
from meshwright.toml_source import adapter

SKETCH = 8
"""Number of signed sums of each tensor."""

_BLOCK = 1 << 16
"""Elements processed at once; each takes about 200 bytes meanwhile."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums over some elements of a tensor; those of several parts add up.

    The signs of the signed sums come from each element's index in the full tensor. In the mean
    square, these sums of two tensors differ by as much as the elements do (Alon, Matias and
    Szegedy, The space complexity of approximating the frequency moments, 1999).
    """

    numel: int
    hash: int
    """Sum modulo 2**64 of a hash of each element's bits and index: free of order and layout."""
    square: float
    """Sum of the squares of the finite elements."""
    sketch: tuple[float, ...]
    """`SKETCH` signed sums of the finite elements."""
    nonfinite: int
    """Elements that are infinite or NaN."""

    @property
    def norm(self) -> float:
        """The 2-norm of the finite elements."""
        return math.sqrt(self.square)

    @staticmethod
    def of(parts: Sequence[Sums]) -> Sums:
        """Add up the parts of a tensor."""
        return Sums(
            numel=sum(part.numel for part in parts),
            hash=sum(part.hash for part in parts) % 2**64,
            square=math.fsum(part.square for part in parts),
            sketch=tuple(math.fsum(part.sketch[i] for part in parts) for i in range(SKETCH)),
            nonfinite=sum(part.nonfinite for part in parts),
        )


@torch.no_grad()
def digest(holding: ShardedPiece) -> Sums:
    """Compute the sums of this rank's elements."""
    flat = holding.tensor.reshape(-1)
    parts: list[Sums] = []
    position = 0
    for box in holding.boxes:
        for start in range(0, box.numel, _BLOCK):
            stop = min(start + _BLOCK, box.numel)
            places = _places(box, holding.global_shape, start, stop, flat.device)
            parts.append(_digest(flat[position + start : position + stop], places))
        position += box.numel
    return Sums.of(parts)


def _digest(flat: Tensor, places: Tensor) -> Sums:
    numel = flat.numel()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
        places = (2 * places[:, None] + torch.arange(2, device=places.device)).reshape(-1)
    bits = flat.contiguous().view(_INTEGERS[flat.element_size()]).long()
    mixed = _mix(places)
    values = flat.double()
    is_finite = values.isfinite()
    values = torch.where(is_finite, values, 0.0)
    shifts = torch.arange(SKETCH, device=flat.device)[:, None]
    signs = 1.0 - 2.0 * ((mixed >> shifts) & 1).double()
    numbers = torch.stack([*(signs @ values), values @ values, (~is_finite).sum().double()])
    *sketch, square, nonfinite = numbers.tolist()
    return Sums(
        numel=numel,
        hash=int(_mix(mixed + bits).sum()) % 2**64,
        square=square,
        sketch=tuple(sketch),
        nonfinite=int(nonfinite),
    )


def _places(
    box: Box, shape: tuple[int, ...], start: int, stop: int, device: torch.device
) -> Tensor:
    """Return the flat indices, in the full tensor, of elements ``start`` to ``stop`` of ``box``."""
    left = torch.arange(start, stop, device=device)
    places = torch.zeros_like(left)
    for dim in reversed(range(len(shape))):
        here = left % box.shape[dim] + box.offset[dim]
        places += here * math.prod(shape[dim + 1 :])
        left = left // box.shape[dim]
    return places


def _mix(words: Tensor) -> Tensor:
    """Compute the finalizer of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of 64 bits."""
    words = words + _signed(0x9E3779B97F4A7C15)
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, count: int) -> Tensor:
    """Shift to the right with zeros from the left: torch's own shift repeats the sign."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


Kind = Literal["input", "activation", "loss", "gradient", "parameter"]
KINDS: tuple[str, ...] = get_args(Kind)
"""The kinds of traced tensors, in the order in which a step makes them."""


class _Hexadecimal:
    """Annotates a number that is hexadecimal text in JSON."""

    def __get_pydantic_core_schema__(self, kind: object, schema: object) -> dict[str, object]:
        read = partial(int, base=16)
        return {"type": "function-plain", "function": {"type": "no-info", "function": read}}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow(Sums):
    """The part of one tensor that one rank holds in one step, and its sums."""

    hash: Annotated[int, _Hexadecimal()]
    step: int
    kind: Kind
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The subject of the rows below it, and the first line of a file."""

    meshwright_tensors: Literal[1] = 1
    """The format of the file."""
    rank: int
    ranks: int
    layout: str
    step: int
    """The first step below."""
    run: Mapping[str, object]
    """The configuration and the text."""


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
        from pydantic import ValidationError

        path = trace_file(self.folder, rank)
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith("\n"):
                    return  # the run was killed while it wrote
                is_header = number == 1 or text.startswith('{"meshwright_tensors"')
                kind = adapter(Header if is_header else TensorRow, is_finite=False)
                damaged = f"{path}, line {number}, is damaged or no tensor trace"
                try:
                    (line,) = kind.validate_json(f"[{text}]")
                except ValidationError as error:
                    first = error.errors(include_url=False)[0]
                    what = ".".join(map(str, first["loc"][1:]))
                    raise ValueError(f"{damaged}: {what}: {first['msg']}") from error
                except TypeError as error:  # a hash that is no text
                    raise ValueError(f"{damaged}: {error}") from error
                if isinstance(line, TensorRow) and len(line.sketch) != SKETCH:
                    raise ValueError(f"{damaged}: {len(line.sketch)} signed sums")
                yield line
