"""Which c10d function stands on `torch.distributed` at the moment of a call.

Profilers and tests replace functions of `torch.distributed` and expect to see every call. So a
function is looked up by name when it is called, never bound at import; what stood there at import
is kept only to notice a replacement.

torch 2.13 spells two operations anew (``all_gather_single``, ``reduce_scatter_single``) and warns
on each call of the old name, which is the only name before. A replaced spelling wins, then the
spelling that this torch prefers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

__all__ = ["SPELLINGS", "checks_in_detail", "current", "is_replaced"]

SPELLINGS = MappingProxyType(
    {
        "all_reduce": ("all_reduce",),
        "all_gather": ("all_gather_single", "all_gather_into_tensor"),
        "all_gather_list": ("all_gather",),
        "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
        "broadcast": ("broadcast",),
        "all_to_all": ("all_to_all_single",),
        "send": ("isend",),
        "recv": ("irecv",),
        "batch": ("batch_isend_irecv",),
        "barrier": ("barrier",),
    }
)
"""The names of each operation on `torch.distributed`, the preferred one first."""

_AT_IMPORT = MappingProxyType(
    {
        name: getattr(dist, name)
        for names in SPELLINGS.values()
        for name in names
        if hasattr(dist, name)
    }
)


def is_replaced(kind: str) -> bool:
    """Whether somebody has put another function in the place of ``kind`` since the import."""
    return any(getattr(dist, name, None) is not _AT_IMPORT.get(name) for name in SPELLINGS[kind])


def current(kind: str) -> Callable[..., Any]:
    """The function that ``kind`` must call now: a replaced spelling first, then torch's own."""
    names = SPELLINGS[kind]
    for name in names:
        function = getattr(dist, name, None)
        if function is not None and function is not _AT_IMPORT.get(name):
            return function
    for name in names:
        if name in _AT_IMPORT:
            return _AT_IMPORT[name]
    raise AttributeError(f"torch.distributed has none of {', '.join(names)}")


def checks_in_detail() -> bool:
    """Whether c10d's debug level is DETAIL now, which asks for checks that cost collectives."""
    return dist.get_debug_level() == dist.DebugLevel.DETAIL
