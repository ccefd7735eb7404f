"""Looks up functions of `torch.distributed` by name at the moment of each call.

Profilers and tests replace functions of `torch.distributed` and expect to see every call. So a
function is never bound at import; the original is kept only to notice a replacement.

torch 2.13 renames two operations (``all_gather_single``, ``reduce_scatter_single``) and warns on
each call of the old name, the only one in earlier releases. A replaced spelling wins, then the
spelling that this torch prefers.

Where nothing is replaced, transfers and the operations of sharded training call the process group
directly: most of a call's overhead is in the checks of c10d's functions, and `Communicator` has
made its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from meshwright.comm.groups.python_group import PythonGroup
from meshwright.comm.groups.registry import PROCESS
from meshwright.comm.shared_memory import BACKEND
from meshwright.comm.streams import is_host
from meshwright.torch_internals.distributed import (
    all_gather_single_of,
    make_group,
    reduce_scatter_single_of,
)

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
        "barrier": ("barrier",),
    }
)
"""The names of each operation on `torch.distributed`, the preferred one first."""

REDUCTIONS = MappingProxyType(
    {
        "sum": dist.ReduceOp.SUM,
        "product": dist.ReduceOp.PRODUCT,
        "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN,
        "band": dist.ReduceOp.BAND,
        "bor": dist.ReduceOp.BOR,
        "bxor": dist.ReduceOp.BXOR,
    }
)
"""The reductions by name. A mean is a sum of tensors that were scaled on the way in."""

_AT_IMPORT = MappingProxyType(
    {
        name: getattr(dist, name)
        for names in SPELLINGS.values()
        for name in names
        if hasattr(dist, name)
    }
)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One point-to-point message of a batch. ``peer`` is a rank of the communicator."""

    direction: Literal["send", "recv"]
    tensor: torch.Tensor
    peer: int
    tag: int = 0
    label: str = ""


def reduction(name: str) -> dist.ReduceOp.RedOpType:
    """Look a reduction up by its name. Raises ``ValueError`` for any other."""
    try:
        return REDUCTIONS[name]
    except KeyError:
        raise ValueError(
            f"unknown reduction {name!r}: expected one of {', '.join(REDUCTIONS)}"
        ) from None


def replacement(kind: str) -> Callable[..., Any] | None:
    """Return the function that has replaced ``kind`` since the import, if any."""
    for name in SPELLINGS[kind]:
        function = getattr(dist, name, None)
        if function is not None and function is not _AT_IMPORT.get(name):
            return function
    return None


def current(kind: str) -> Callable[..., Any]:
    """Return the function to call for ``kind``: a replacement, or torch's own."""
    function = replacement(kind)
    if function is not None:
        return function
    for name in SPELLINGS[kind]:
        if name in _AT_IMPORT:
            return _AT_IMPORT[name]
    raise AttributeError(f"torch.distributed has none of {', '.join(SPELLINGS[kind])}")


def all_gather(
    output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool
) -> Any:  # noqa: ANN401 - c10d's work, or None
    """Gather equal 1-D shares into ``output``."""
    if replacement("all_gather") is not None or tensor.is_complex():
        return current("all_gather")(output, tensor, group=group, async_op=async_op)
    options = c10d.AllgatherOptions()
    options.asyncOp = async_op
    work = all_gather_single_of(group)(output, tensor, options)
    return work if async_op or work is None else _waited(work)


def reduce_scatter(
    output: torch.Tensor,
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    op: dist.ReduceOp.RedOpType,
    async_op: bool,
) -> Any:  # noqa: ANN401 - c10d's work, or None
    """Reduce 1-D ``tensor`` over the ranks, and keep this rank's share in ``output``."""
    if replacement("reduce_scatter") is not None or tensor.is_complex():
        return current("reduce_scatter")(output, tensor, op=op, group=group, async_op=async_op)
    options = c10d.ReduceScatterOptions()
    options.reduceOp = op  # pyrefly: ignore[bad-assignment]
    options.asyncOp = async_op
    work = reduce_scatter_single_of(group)(output, tensor, options)
    return work if async_op or work is None else _waited(work)


def transfer(given: Transfer, world_peer: int, group: dist.ProcessGroup) -> Any:  # noqa: ANN401
    """Begin to send or receive; ``world_peer`` is the other rank in the world; returns the work."""
    direction, tensor = given.direction, given.tensor
    if replacement(direction) is not None or tensor.is_complex():
        return current(direction)(tensor, world_peer, group=group, tag=given.tag)
    post = group.send if direction == "send" else group.recv
    return post([tensor], given.peer, given.tag)


def _waited(work: Any) -> None:  # noqa: ANN401
    """Wait for the ``work`` of a synchronous call."""
    work.wait()


def checks_in_detail() -> bool:
    """Check whether c10d's debug level is DETAIL, which asks for checks that cost collectives."""
    return dist.get_debug_level() == dist.DebugLevel.DETAIL


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend by which ``group`` moves tensors of ``device``."""
    if isinstance(group, PythonGroup):
        return str(group.host_backend if is_host(device) else group.name())
    names = dict(
        part.split(":", 1) for part in dist.get_backend_config(group).split(",") if ":" in part
    )
    name = names.get(device.type, dist.get_backend(group))
    return "gloo" if name == BACKEND else name  # its ranks are not of one host


def host_group(ranks: Sequence[int]) -> Any:  # noqa: ANN401 - c10d's
    """Make a group of ``ranks`` of the world for host tensors; only these ranks call it."""
    name = f"host/{PROCESS.name_group(tuple(ranks))}"
    return make_group(name, ranks, timedelta(days=1), backend="gloo")  # waits have bounds of ours
