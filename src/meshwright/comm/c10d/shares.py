"""Gathers of equal shares, reductions to them, and several operations in one launch.

A launch of several operations is one kernel of a device, and counts as one operation. On the host
all begin at once, in order, and each is finished when it has arrived: its local sum runs while the
next one is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from meshwright.comm.c10d import gloo, lookup
from meshwright.comm.shared_memory.buffers import no_memory
from meshwright.torch_internals.distributed import backend_of, coalesced

if TYPE_CHECKING:
    from meshwright.comm.collectives import Communicator
    from meshwright.comm.pending import Launched, Work

Call = Callable[[Any], "Launched"]
"""Starts an operation over the group that it is given."""


Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor that is filled, and the one that this rank gives."""


def amount_of(tensor: torch.Tensor, more: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype to report for a launch; several tensors count as a flat one.

    The dtype is theirs if they share one, otherwise the flat tensor has bytes.
    """
    if not more:
        return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    tensors = (tensor, *more)
    if len({each.dtype for each in tensors}) > 1:
        return (sum(each.nbytes for each in tensors),), "uint8"
    return (sum(each.numel() for each in tensors),), str(tensor.dtype).removeprefix("torch.")


def refusal(door: Communicator, tensor: torch.Tensor) -> str:
    """Explain why ``door`` cannot move ``tensor``."""
    axis = f"axis {door.axis}"
    if tensor.device != door.device:
        return (
            f"{axis} communicates on {door.device}, found a tensor on {tensor.device}: "
            "move it there first"
        )
    if hasattr(tensor, "device_mesh"):
        return f"{axis}: {no_memory(tensor)}"
    return (
        f"{axis}: expected a contiguous tensor, found shape {tuple(tensor.shape)} with strides "
        f"{tensor.stride()}: call .contiguous()"
    )


def all_reduce(
    tensor: torch.Tensor,
    group: Any,  # noqa: ANN401 - c10d's, here and below
    *,
    reduction: str = "sum",
    async_op: bool = True,
) -> Launched:
    """Start to reduce ``tensor`` over the ranks, in place."""
    op = lookup.REDUCTIONS[reduction]
    call = lookup.current("all_reduce")
    work = call(tensor, op=op, group=group, async_op=async_op)
    return () if work is None else (work,), None


def all_gather(
    door: Communicator,
    output: torch.Tensor,
    tensor: torch.Tensor,
    group: Any,  # noqa: ANN401
    *,
    async_op: bool = True,
) -> Launched:
    """Start to gather every rank's ``tensor`` into ``output``, rank-major."""
    if door.backend == "gloo" and lookup.replacement("all_gather") is None:
        works = gloo.all_gather(output, tensor, group, door.ranks)
        if works is not None:
            return works, None
    # No view of a line: dispatch modes would see it.
    line = output if output.dim() == 1 else output.view(-1)
    mine = tensor if tensor.dim() == 1 else tensor.view(-1)
    if tensor.dtype not in gloo.MOVED:
        line, mine = gloo.as_bytes(line), gloo.as_bytes(mine)
    work = lookup.all_gather(line, mine, group, async_op=async_op)
    return () if work is None else (work,), None


def reduce_scatter(
    door: Communicator,
    output: torch.Tensor,
    tensor: torch.Tensor,
    group: Any,  # noqa: ANN401
    *,
    reduction: str = "sum",
    async_op: bool = True,
) -> Launched:
    """Start to reduce ``tensor`` over the ranks and to keep this rank's share in ``output``."""
    if door.backend == "gloo" and lookup.replacement("reduce_scatter") is None:
        launched = gloo.reduce_scatter(output, tensor, group, reduction)
        if launched is not None:
            return launched
    op = lookup.REDUCTIONS[reduction]
    line = output if output.dim() == 1 else output.view(-1)
    whole = tensor if tensor.dim() == 1 else tensor.view(-1)
    work = lookup.reduce_scatter(line, whole, group, op=op, async_op=async_op)
    return () if work is None else (work,), None


def together(door: Communicator, calls: Sequence[Call], label: str, group: Any) -> Launched:  # noqa: ANN401
    """Start ``calls`` in one launch of the device of ``door``; on the host one after another.

    Groups that compare labels receive ``label`` for each call.
    """
    device = door.device
    if not door.is_on_host and backend_of(group, device).supports_coalescing:
        with coalesced(group, device) as works:
            for call in calls:
                call(group)
        return works, None
    found: list[Work] = []
    for call in calls:
        if label:
            group.label_next(label)
        works, finish = call(group)
        found += works
        if finish is not None:
            found[-1] = _Finished(found[-1], finish)
    return found, None


class _Finished:
    """A work with a function to run once it has ended."""

    __slots__ = ("_finish", "_work")

    def __init__(self, work: Work, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> object:
        found = self._work.wait() if timeout is None else self._work.wait(timeout)
        if self._finish is not None:
            self._finish()
            self._finish = None
        return found


def works_of(work: Work | None) -> Sequence[Work]:
    """List the works to wait for; none for a call that has ended."""
    return () if work is None else (work,)
