"""Reductions of tensors in rank order, so that a result never depends on timing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

Combine = Callable[..., torch.Tensor]

REDUCTIONS = MappingProxyType(
    {
        "sum": torch.add,
        "avg": torch.add,
        "product": torch.mul,
        "max": torch.maximum,
        "min": torch.minimum,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }
)
"""The operation on two tensors for each reduction."""

NAMES = MappingProxyType(
    {hash(dist.ReduceOp(getattr(dist.ReduceOp, name.upper()))): name for name in REDUCTIONS}
)
"""By the hash of c10d's reduction, which tells its kind."""

Options: TypeAlias = Any
"""c10d's options of an operation: a class for each, with the attributes that it has."""

NARROW = frozenset(
    {torch.float16, torch.bfloat16}
    | {
        dtype
        for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
        if (dtype := getattr(torch, name, None)) is not None
    }
)
"""Types whose sums and products are taken in float32 and rounded once."""


def reduction_of(options: Options) -> str:
    """Find the name of the reduction in c10d's options, or in the reduction itself."""
    if options is None:
        return "sum"
    reduction = getattr(options, "reduceOp", options)
    try:
        return NAMES[hash(reduction)]
    except KeyError:
        return str(reduction)


def check_reduction(reduction: str, dtype: torch.dtype) -> None:
    """Raise when ``reduction`` does not exist, or not for ``dtype``."""
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"the reduction {reduction!r} is not available in shared memory; "
            f"there are {', '.join(REDUCTIONS)}"
        )
    bitwise = reduction in ("band", "bor", "bxor")
    if bitwise and (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"{reduction} needs an integer or bool tensor, but this one is {dtype}")
    if dtype.is_complex and reduction in ("max", "min"):
        raise ValueError(f"{reduction} has no meaning for complex numbers ({dtype})")


def accumulate(
    target: torch.Tensor, sources: Sequence[torch.Tensor], reduction: str, alias: int | None = None
) -> None:
    """Reduce ``sources``, in order, into ``target``.

    ``alias`` says that ``target`` shares its memory with ``sources[alias]``.
    """
    combine = REDUCTIONS[reduction]
    if target.dtype in NARROW:
        target.copy_(_reduced_wide(sources, combine, reduction))
        return
    if len(sources) == 1:
        target.copy_(sources[0])
        return
    if alias is not None and alias >= 2:
        # The first sum would overwrite a term that is still to come.
        result = torch.empty_like(target)
        accumulate(result, sources, reduction)
        target.copy_(result)
        return
    combine(sources[0], sources[1], out=target)
    for source in sources[2:]:
        combine(target, source, out=target)
    if reduction == "avg":
        _divide(target, len(sources))


def _reduced_wide(
    sources: Sequence[torch.Tensor], combine: Combine, reduction: str
) -> torch.Tensor:
    total = sources[0].float()
    for source in sources[1:]:
        combine(total, source.float(), out=total)
    if reduction == "avg":
        total.div_(len(sources))
    return total


def _divide(target: torch.Tensor, count: int) -> None:
    if target.dtype.is_floating_point or target.dtype.is_complex:
        target.div_(count)
    else:
        target.div_(count, rounding_mode="trunc")
