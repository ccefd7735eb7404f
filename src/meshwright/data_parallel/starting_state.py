"""What all ranks must hold alike before the first step: compared, then broadcast from one rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

import torch

from meshwright.comm import Communicator, watch_run
from meshwright.comm.dtensor import local_of
from meshwright.errors import CollectiveMismatchError

__all__ = ["broadcast_tensors", "compare_parameters", "compare_rows"]

SLAB_BYTES = 64 * 2**20
"""At most so many bytes are copied together for one broadcast; a larger tensor goes alone."""

_ITEM_SIZE = attrgetter("dtype.itemsize")


def compare_parameters(
    communicator: Communicator,
    named: Sequence[tuple[str, torch.Tensor]],
    sparse: Collection[str] = (),
    *,
    fresh: Collection[str] = (),
    buffers: Mapping[str, torch.Tensor] = MappingProxyType({}),
    reason: str = "",
) -> None:
    """Check that every rank has the same parameters: names, shapes, dtypes, strides, which train.

    Those whose names are in ``sparse`` give sparse gradients, those in ``fresh`` are other objects
    than before; that is compared too. So are ``buffers``, which are to be broadcast. ``reason`` is
    shown to ranks that do something else meanwhile.

    Raises CollectiveMismatchError on every rank, naming the first tensor that differs and the
    ranks on both sides.
    """
    rows = [
        [name, list(t.shape), str(t.dtype), list(t.stride()), t.requires_grad]
        + ["sparse gradient"] * (name in sparse)
        + ["given anew"] * (name in fresh)
        for name, t in named
    ]
    rows += [
        [name, list(t.shape), str(t.dtype), list(t.stride()), "buffer"]
        for name, t in buffers.items()
    ]
    meaning = "[name, shape, dtype, strides, requires_grad]"
    compare_rows(communicator, rows, meaning, reason=reason)


def compare_rows(
    communicator: Communicator,
    rows: Sequence[Sequence[object]],
    meaning: str,
    *,
    reason: str = "",
) -> None:
    """Check that every rank has the same ``rows``, which JSON can hold; ``meaning`` explains one.

    Raises CollectiveMismatchError on every rank, naming the first row that differs.
    """
    watch_run(communicator)
    if reason:
        # Some ranks may be in a gather of another size, which Gloo would take for this one.
        communicator.barrier(label=f"compare parameters{reason}")
    text = json.dumps(rows).encode()
    digest = hashlib.sha256(text).digest()
    digests = communicator.gather_bytes(digest, label=f"compare parameters{reason}")
    if len(set(digests)) == 1:
        return
    texts = communicator.gather_bytes(text, label="parameters that differ")
    everyone = [json.loads(text) for text in texts]
    raise CollectiveMismatchError(_first_difference(communicator, everyone, meaning))


def broadcast_tensors(
    communicator: Communicator,
    tensors: Iterable[torch.Tensor],
    *,
    label: str,
    source: int = 0,
) -> None:
    """Give every rank the values that rank ``source`` has, in place.

    Of DTensors the parts that this rank holds. Tensors travel together as bytes, whatever their
    dtypes, so that many small ones cost one broadcast.
    """
    # The largest elements first: each tensor then starts at a multiple of its element size.
    found = [t if t.is_contiguous() else _without_copies(t) for t in map(local_of, tensors)]
    ordered = sorted(found, key=_ITEM_SIZE, reverse=True)
    slab: list[torch.Tensor] = []
    size = 0
    for tensor in ordered:
        if slab and size + tensor.nbytes > SLAB_BYTES:
            _broadcast_slab(communicator, slab, label, source)
            slab.clear()
            size = 0
        slab.append(tensor)
        size += tensor.nbytes
    if size:
        _broadcast_slab(communicator, slab, label, source)


def _without_copies(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with one index of each dim that was expanded, whose elements share memory."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


@torch.no_grad()
def _broadcast_slab(
    communicator: Communicator, slab: Sequence[torch.Tensor], label: str, source: int
) -> None:
    if len(slab) == 1 and slab[0].is_contiguous():
        communicator.broadcast(slab[0].detach(), source=source, label=label).wait()
        return
    total = sum(tensor.nbytes for tensor in slab)
    buffer = torch.empty(total, dtype=torch.uint8, device=slab[0].device)
    views: list[torch.Tensor] = []
    offset = 0
    for tensor in slab:
        piece = buffer[offset : offset + tensor.nbytes]
        views.append(piece.view(tensor.dtype).view(tensor.shape))
        offset += tensor.nbytes
    targets = [tensor.detach() for tensor in slab]
    if communicator.rank == source:
        torch._foreach_copy_(views, targets)
    communicator.broadcast(buffer, source=source, label=label).wait()
    if communicator.rank != source:
        torch._foreach_copy_(targets, views)


def _first_difference(
    communicator: Communicator, rows: Sequence[list[list[object]]], meaning: str
) -> str:
    longest = max(len(row) for row in rows)
    for position in range(longest):
        found = [json.dumps(row[position]) if position < len(row) else "nothing" for row in rows]
        if len(set(found)) == 1:
            continue
        sides: dict[str, list[int]] = {}
        for rank, text in zip(communicator.ranks, found, strict=True):
            sides.setdefault(text, []).append(rank)
        sentences = "; ".join(f"ranks {ranks}: {text}" for text, ranks in sides.items())
        return (
            f"axis {communicator.axis}: expected the same tensors on every rank, but number "
            f"{position} is {meaning} {sentences}. Build the model in the same way on every rank, "
            "wrap and freeze the same of it"
        )
    return f"axis {communicator.axis}: the ranks list their parameters differently"
