"""What all ranks must hold alike before the first step: compared, then broadcast from one rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence

import torch

from meshwright.comm import Communicator, watch_run
from meshwright.comm.dtensor import local_of
from meshwright.errors import CollectiveMismatchError

__all__ = ["broadcast_tensors", "compare_parameters", "compare_rows"]

SLAB_BYTES = 64 * 2**20
"""At most so many bytes are copied together for one broadcast; a larger tensor goes alone."""


def compare_parameters(
    communicator: Communicator,
    named: Sequence[tuple[str, torch.Tensor]],
    sparse: Collection[str] = (),
    *,
    reason: str = "",
) -> None:
    """Check that every rank has the same parameters: names, shapes, dtypes, strides, which train.

    Those whose names are in ``sparse`` give sparse gradients; that is compared too. ``reason`` is
    shown to ranks that do something else meanwhile.

    Raises CollectiveMismatchError on every rank, naming the first parameter that differs and the
    ranks on both sides.
    """
    rows = [
        [name, list(t.shape), str(t.dtype), list(t.stride()), t.requires_grad]
        + ["sparse gradient"] * (name in sparse)
        for name, t in named
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
    tensors: Sequence[torch.Tensor],
    *,
    label: str,
    source: int = 0,
) -> None:
    """Give every rank the values that rank ``source`` has, in place.

    Of DTensors the parts that this rank holds. Tensors travel together as bytes, whatever their
    dtypes, so that many small ones cost one broadcast.
    """
    # The largest elements first: each tensor then starts at a multiple of its element size.
    ordered = sorted(map(local_of, tensors), key=lambda tensor: -tensor.dtype.itemsize)
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
            f"axis {communicator.axis}: expected the same parameters on every rank, but number "
            f"{position} is {meaning} {sentences}. Build the model in the same way on every rank, "
            "wrap and freeze the same of it"
        )
    return f"axis {communicator.axis}: the ranks list their parameters differently"
