"""Checks that tensors on all ranks of an axis are equal up to rounding.

Computed values may differ by rounding: some GPU operators add in no fixed order, and other
processors add in another order. Where digests differ, values are compared with those of the axis'
first rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType

import torch

from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import local_of
from meshwright.comm.failures.sameness import RowDifference, refusal, require_equal

Held = tuple[str, torch.Tensor | None]
"""A tensor by name, as this rank has it."""

_ROUNDING = MappingProxyType({torch.float64: 1e-8, torch.float32: 1e-3})
"""Norm of a difference over the norm of what is expected; half precision has `_COARSE`."""
_COARSE = 5e-2
_FLOOR = 1e-3
"""Of the largest: smaller ones may be nothing but rounding, as gradients of key biases are."""

MOST_APART = 1024
"""The most passes between two that are compared."""


def is_due(number: int) -> bool:
    """Whether pass ``number`` is compared: 1, 2, 4, 8, ..., 1024, 2048, 3072 are."""
    return number.bit_count() == 1 or number % MOST_APART == 0


def require_close(
    axis: Communicator,
    named: Sequence[Held],
    digests: Sequence[Sequence[object]],
    meaning: str,
    *,
    error: Callable[[str], Exception],
    remedy: str,
) -> None:
    """Check that tensors with different ``digests`` differ by rounding only. Collective.

    ``digests`` has those of each rank. Raises ``error`` on every rank as `require_equal` does.
    """
    kinds = [(name, "missing" if t is None else kind_of(t)) for name, t in named]
    label = "kinds of what ranks hold whole"
    require_equal(axis, kinds, meaning, label=label, error=error, remedy=remedy)
    if found := beyond_rounding_first(axis, named, digests):
        raise error(refusal(axis, meaning, found, remedy))


@torch.no_grad()
def beyond_rounding_first(
    axis: Communicator,
    named: Sequence[Held],
    digests: Sequence[Sequence[object]],
    *,
    share: float = 1.0,
) -> RowDifference | None:
    """Find the first tensor that differs by more than rounding. Collective.

    Only tensors whose ``digests``, one list for each rank, differ are compared. Shapes and dtypes
    must be equal on all ranks. For ``share`` see `beyond_rounding`.
    """
    floor = rounding_floor([t for _, t in named if t is not None and _is_real(t)])
    for (name, mine), said in zip(named, zip(*digests, strict=True), strict=True):
        if mine is None or len(set(said)) == 1:
            continue
        if _is_real(mine):
            found = _distances(axis, name, mine, floor, share)
        else:
            found = [*map(str, said)]
        if len(set(found)) > 1:
            return RowDifference(name, axis.ranks, found)
    return None


def _distances(
    axis: Communicator, name: str, mine: torch.Tensor, floor: float, share: float
) -> list[str]:
    """Describe how far each rank's values are from the first's, see `beyond_rounding`."""
    first = mine.coalesce().to_dense() if mine.is_sparse else mine.clone().contiguous()
    values = first.clone()
    axis.broadcast(first, label=f"values of {name}, which differ").wait()
    error = beyond_rounding(values, first, floor, share=share)
    errors = axis.gather_numbers([error], label=f"differences of {name}")
    near = f"that of rank {axis.ranks[0]}"
    return [f"off by {error:.3g} of its norm" if error else near for (error,) in errors]


def rounding_floor(tensors: Iterable[torch.Tensor]) -> float:
    """Bound the norm that rounding may give a tensor, relative to others of its computation."""
    norms = [float(local_of(t).detach().abs().float().norm()) for t in tensors]
    return _FLOOR * max(filter(math.isfinite, norms), default=0.0)


def beyond_rounding(
    found: torch.Tensor, expected: torch.Tensor, floor: float, *, share: float = 1.0
) -> float:
    """The norm of the difference over that of ``expected``; 0 if it is within rounding.

    A norm of up to ``floor`` may come from rounding. The result is infinite unless both have
    non-finite values in the same places. ``share`` scales the allowed rounding.
    """
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = found.detach().to(wide), expected.detach().to(wide)
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return float("inf")
    a, b = a.where(finite, 0.0), b.where(finite, 0.0)
    difference, size = float((a - b).norm()), float(b.norm())
    tolerance = share * _ROUNDING.get(expected.dtype.to_real(), _COARSE)
    if difference <= tolerance * (size + floor):
        return 0.0
    return difference / max(size, torch.finfo(torch.float64).tiny)


def kind_of(tensor: torch.Tensor) -> str:
    """Name shape and dtype."""
    return f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"


def _is_real(tensor: torch.Tensor) -> bool:
    """Whether its values can differ by rounding."""
    return tensor.is_floating_point() or tensor.is_complex()
