"""`context_parallel` and what an own loop needs beside it.

::

    with context_parallel(mesh["cp"], buffers=[ids, labels], buffer_seq_dims=[1, 1]):
        loss = cross_entropy(model(ids), labels)      # both are this rank's part here
        loss.backward()
    optimizer.step()
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence

import torch

from meshwright.comm import Communicator, LateNumbers
from meshwright.comm.dtensors.dtensor import mesh_communicators
from meshwright.context_parallel.attention import (
    POSITIONS,
    Attending,
    Method,
    attending,
    now_attending,
)
from meshwright.context_parallel.split import (
    ContextSplit,
    SplitMethod,
    document_lengths,
    labels_of_parts,
)
from meshwright.gradients import IGNORED
from meshwright.mesh import DeviceMesh
from meshwright.tensor_parallel.functions import gathered
from meshwright.tensor_parallel.layouts import check_mesh
from meshwright.torch_internals.tensors import is_view
from meshwright.torch_internals.tracing import not_traced

_ROTATIONS: dict[str, Method] = {"allgather": "all-to-all", "alltoall": "ring"}


class _Known:
    method: Method = "auto"
    """Of `set_rotate_method`."""

    def __init__(self) -> None:
        self.last: dict[tuple[int, ...], ContextSplit] = {}
        """By the ranks of an axis: a group with several names has communicators of each."""
        self.parts: set[int] = set()
        """The ``id`` of each tensor that is a part now."""


@functools.cache
def _known() -> _Known:
    return _Known()


def set_rotate_method(rotate_method: str) -> None:
    """Choose how `context_parallel` computes attention from now on.

    Of torch's names, "allgather" computes by heads on whole sequences, and "alltoall" in a ring. By
    default it is by heads where these divide. Raises ValueError for another name.
    """
    if rotate_method not in _ROTATIONS:
        raise ValueError(f"expected one of {[*_ROTATIONS]}, found {rotate_method!r}")
    _known().method = _ROTATIONS[rotate_method]


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[torch.Tensor] | None = None,
    documents: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    method: Method | None = None,
    split: SplitMethod | None = None,
) -> Iterator[None]:
    """Split ``buffers`` over ``mesh`` along their sequences, in place, and attention with them.

    In the block each buffer is this rank's part of ``buffer_seq_dims``; afterwards it is whole
    again, but for ``no_restore_buffers``. Forward and backward belong into it: attention sees the
    keys of all ranks, whatever else the model does it does to its part. A model that makes
    positions itself has to take them from `positions`.

    ``documents``: ``position_ids`` (rows, length) of packed rows, whose documents attention keeps
    apart. ``attention_mask``: (rows, length), 0 for padding, whole. ``labels``: the buffer whose
    labels other than -100 a mean loss counts; without it, one that has such labels, or else all
    positions. ``method``: "all-to-all" (by heads), "ring", or "auto"; ``split``: "contiguous",
    "zigzag" or "documents"; by default what is balanced.

    Raises ValueError for buffers without a common length, that are views, parts already or require
    gradients; after the block when parts have unequal numbers of labels and no loss was weighed by
    `global_mean`.
    """
    check_mesh(mesh)
    LateNumbers.known(POSITIONS).settle()
    (axis,) = mesh_communicators(mesh, "cp")
    given, dims = [*(buffers or ())], [*(buffer_seq_dims or ())]
    length = _length(axis, given, dims)
    rows = [[length]] if documents is None else document_lengths(documents.reshape(-1, length))
    if len({*map(tuple, rows)}) == 1:
        rows = rows[:1]
    how = method or _known().method
    chosen = split or ("zigzag" if documents is None else "documents")
    parted = ContextSplit.of(rows, axis.size, chosen)
    _check_rows(axis, given, dims, parted)
    if labels is not None and not any(each is labels for each in given):
        raise ValueError("context_parallel: labels is none of the buffers")
    _known().last[axis.ranks] = parted
    padding = None if attention_mask is None else (attention_mask.reshape(-1, length) != 0).cpu()
    state = Attending(axis, parted, how, padding, given)
    kept = {id(each) for each in no_restore_buffers or ()}
    wholes = [each.detach() for each in given]
    try:
        with torch.no_grad():
            for each, whole, dim in zip(given, wholes, dims, strict=True):
                each.data = parted.part(whole, axis.rank, dim)
                _known().parts.add(id(each))
        with attending(state):
            yield
    finally:
        with torch.no_grad():
            for each, whole in zip(given, wholes, strict=True):
                _known().parts.discard(id(each))
                if id(each) not in kept:
                    each.data = whole
    if state.is_weighed or not state.trains:
        return
    # Only now, as on a device the host waits for them.
    named = [whole for each, whole in zip(given, wholes, strict=True) if each is labels]
    counts = _counts(wholes, dims, named[0] if named else None, parted)
    if len({*counts}) > 1:
        raise ValueError(
            f"axis {axis.axis}: the parts of its ranks have {', '.join(map(str, counts))} labels, "
            "so the mean over a part is not its share of the mean over all. Weigh the loss by "
            "meshwright.context_parallel.global_mean(sum, count, mesh) before backward"
        )


def _length(axis: Communicator, buffers: list[torch.Tensor], dims: list[int]) -> int:
    if len(buffers) != len(dims) or not buffers:
        raise ValueError(
            f"context_parallel: expected buffers and a sequence dim for each, found {len(buffers)} "
            f"buffers and {len(dims)} dims"
        )
    lengths = [each.shape[dim] for each, dim in zip(buffers, dims, strict=True)]
    if len({*lengths}) > 1:
        raise ValueError(
            f"context_parallel: expected buffers of one length along their sequences, found "
            f"{', '.join(map(str, lengths))}"
        )
    for number, each in enumerate(buffers):
        fault = (
            "requires gradients" if each.requires_grad
            else "is a part already" if id(each) in _known().parts
            else "is a view, whose tensor would not be split" if is_view(each)
            else ""
        )  # fmt: skip
        if fault:
            raise ValueError(
                f"context_parallel over axis {axis.axis}: buffer {number} of shape "
                f"{tuple(each.shape)} {fault}. Give a tensor of its own (.clone())"
            )
    return lengths[0]


def _check_rows(
    axis: Communicator, buffers: list[torch.Tensor], dims: list[int], split: ContextSplit
) -> None:
    rows = len(split.rows)
    for each, dim in zip(buffers, dims, strict=True):
        if rows > 1 and (dim % each.ndim == 0 or each.shape[0] != rows):
            raise ValueError(
                f"context_parallel over axis {axis.axis}: {rows} rows with documents of their own, "
                f"and a buffer of shape {tuple(each.shape)} split along dim {dim}: expected the "
                "rows in its dim 0"
            )


def _counts(
    buffers: list[torch.Tensor],
    dims: list[int],
    labels: torch.Tensor | None,
    split: ContextSplit,
) -> list[int]:
    """Count what a mean loss counts, of each rank's part."""
    for each, dim in zip(buffers, dims, strict=True):
        is_whole = not each.is_floating_point() and each.dtype != torch.bool
        if each is labels or (labels is None and is_whole and bool((each == IGNORED).any())):
            return labels_of_parts(each, split, dim)
    return [split.positions(rank).numel() for rank in range(split.ranks)]


def global_mean(total: torch.Tensor, count: torch.Tensor | float, mesh: DeviceMesh) -> torch.Tensor:
    """Scale a sum over this rank's terms so that means over ranks are those over all terms.

    ``total`` (0-dim, with its graph) is the sum of this rank's ``count`` terms. The result is
    ``total * ranks / counts of all``: the mean of it, and of its gradients, over the ranks of
    ``mesh`` is the mean over all their terms, however they are spread (labels of -100, packed rows,
    unequal parts). ``mesh`` has all ranks over which gradients become means. Collective.
    """
    counts = torch.zeros((), dtype=torch.float64, device=total.device) + count
    ranks = 1
    for axis in mesh_communicators(mesh, "cp"):
        axis.all_reduce(counts, label="terms of a loss").wait()
        ranks *= axis.size
    if (state := now_attending()) is not None:
        state.is_weighed = True
    return total * (ranks / counts).to(total.dtype)


@not_traced
def positions(length: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the positions of the ``length`` tokens that this rank has of each row.

    int64, (length,), or (rows, length) where rows are split differently; 0, 1, ... outside of axis
    context. Positions count from the begin of the row. Raises ValueError for another length.
    """
    state = now_attending()
    if state is None:
        return torch.arange(length, device=device)
    if state.traced is not None:
        raise ValueError(
            f"axis {state.axis.axis}: positions() in a stage that is traced would be a constant: "
            "give the model position_ids, or make it a chain of modules"
        )
    found = state.split.positions(state.axis.rank)
    if device is not None:
        found = state.split.positions_on(state.axis.rank, torch.device(device))
    if found.shape[1] != length:
        raise ValueError(
            f"axis {state.axis.axis}: positions of {length} tokens, and this rank has "
            f"{found.shape[1]} of each row"
        )
    return found[0] if len(found) == 1 else found


def split_of(batch: torch.Tensor) -> list[torch.Tensor]:
    """Return the positions of each rank's tokens in the rows of ``batch`` (rows, tokens, ...).

    By rank, int64 on the host, ascending, (tokens,), or (rows, tokens) where rows are split
    differently. ``batch`` is a part or a whole. Raises RuntimeError outside of axis context, and
    ValueError for another number of tokens.
    """
    if (state := now_attending()) is None:
        raise RuntimeError("split_of: nothing is split here; call it inside of context_parallel")
    found = [state.split.positions(rank) for rank in range(state.split.ranks)]
    if batch.shape[1] not in (state.split.length, found[state.axis.rank].shape[1]):
        raise ValueError(
            f"axis {state.axis.axis}: expected {state.split.length} tokens in dim 1, or this "
            f"rank's {found[state.axis.rank].shape[1]}, found shape {tuple(batch.shape)}"
        )
    return [each[0] if len(each) == 1 else each for each in found]


def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int]
) -> list[torch.Tensor]:
    """Gather parts of the last `context_parallel` over ``mesh``, in the order of positions.

    Collective; without gradients. Raises ValueError before the first, and for other lengths.
    """
    (axis,) = mesh_communicators(mesh, "cp")
    if (split := _known().last.get(axis.ranks)) is None:
        raise ValueError(f"axis {axis.axis}: nothing was split by context_parallel so far")
    sizes = [split.positions(rank).shape[1] for rank in range(split.ranks)]
    found = []
    for each, dim in zip(buffers, seq_dims, strict=True):
        own, most = each.detach(), max(sizes)
        if own.shape[dim] != sizes[axis.rank]:
            raise ValueError(
                f"axis {axis.axis}: expected {sizes[axis.rank]} positions along dim {dim} on rank "
                f"{axis.rank}, found shape {tuple(own.shape)}"
            )
        if own.shape[dim] < most:
            own = torch.cat([own, own.narrow(dim, 0, 1)], dim)
        whole = gathered(own, axis, "unshard context", dim, most * axis.size)
        parts = [whole.narrow(dim, rank * most, size) for rank, size in enumerate(sizes)]
        found.append(split.whole(parts, dim))
    return found
