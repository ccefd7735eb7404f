"""The sum of sparse tensors, which hold different numbers of elements on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from meshwright.torch_internals.distributed import Work


class Gathering(Protocol):
    """The operations of a group that the sum is made of."""

    def size(self) -> int:
        """Count the ranks."""

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Gather every rank's tensor into one, rank-major."""

    def allgather(self, outputs: Sequence[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Work:
        """Gather every rank's tensor into a list, whose tensors may differ in size."""


@torch.no_grad()
def sum_sparse(tensor: torch.Tensor, group: Gathering) -> None:
    """Sum sparse tensors of one shape over all ranks, in place; ended when this returns.

    Equal indices are summed in the order of the ranks, as all sums of the backend are.
    """
    mine = tensor.detach().coalesce()
    indices, values = mine.indices(), mine.values()
    counts = torch.empty(group.size(), dtype=torch.int64)
    group.all_gather_single(counts, torch.tensor([values.shape[0]])).wait()
    places = [indices.new_empty((count, indices.shape[0])) for count in counts.tolist()]
    group.allgather([places], [indices.t().contiguous()]).wait()
    parts = [values.new_empty((count, *values.shape[1:])) for count in counts.tolist()]
    group.allgather([parts], [values]).wait()
    summed = torch.sparse_coo_tensor(
        torch.cat(places).t(), torch.cat(parts), tensor.shape, check_invariants=False
    )
    # Not on a detached tensor: that would have indices and values of its own.
    tensor.copy_(summed.coalesce())
