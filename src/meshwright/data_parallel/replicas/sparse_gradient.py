"""A sparse gradient, summed over the ranks without becoming dense.

Each rank tells how many rows it has, then all gather the rows of all, padded to the longest list::

    numbers   rows of this rank, or one of ABSENT, DENSE, VOID     one all-gather at the launch
    rows      indices and values of every rank, in rank order      two all-gathers at the finish

Every rank adds up the same rows in the same order, so the results are equal bit by bit. When a rank
has a dense gradient (a table that is also used densely), all ranks sum dense ones instead. A
communication hook gets the sparse tensor, or then the dense one, at the finish.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum

import torch

from meshwright.comm import Communicator, Pending
from meshwright.data_parallel.replicas.gradient_bucket import BucketPart, GradBucket, tensor_of
from meshwright.data_parallel.replicas.slots import BucketLayout, Hooked, Reduction
from meshwright.errors import InternalError
from meshwright.gradients import NonFiniteValues


class _Instead(IntEnum):
    """The words that a rank sends in place of a number of rows."""

    ABSENT = -1
    """It had no gradient."""
    DENSE = -2
    """Its gradient is dense."""
    VOID = -3
    """It gave up its backward pass."""


class SparseGradient(Reduction):
    """The reduction of one parameter whose gradients are sparse; the same steps as a `Bucket`.

    ``.grad`` becomes a coalesced sparse tensor, whose rows are those that any rank had.
    """

    def __init__(
        self, layout: BucketLayout, parameter: torch.nn.Parameter, *, zeros_for_unused: bool
    ) -> None:
        super().__init__(layout, (parameter,))
        self.is_unused = False
        """Whether no rank had a gradient in the last reduction."""
        self._zeros_for_unused = zeros_for_unused
        self._number = int(_Instead.ABSENT)
        self._gradient: torch.Tensor | None = None
        self._numbers = torch.empty(0, dtype=torch.int64)
        self._communicator: Communicator | None = None
        self._pending: Pending | None = None
        self._hook: Callable[[GradBucket], torch.futures.Future[torch.Tensor]] | None = None

    def reset(self) -> None:
        """Forget the gradient of the last backward pass."""
        self.arrived = bytearray(1)
        self._gradient = None

    def takes(self, slot: int) -> bool:
        """Never: it is moved when all is known."""
        return False

    def is_taken(self, slot: int) -> bool:
        """Never, see `takes`."""
        return False

    def take(self, slot: int, scale: float) -> None:
        """Nothing to do, see `takes`."""

    def fill(self, scale: float) -> None:
        """Scale a copy of this rank's gradient, with each row once."""
        (parameter,) = self.parameters
        gradient = parameter.grad
        if gradient is None:
            self.fill_absent()
            return
        # One index a row is what embeddings give, and what is sent.
        if gradient.is_sparse and gradient.sparse_dim() == 1:
            gradient = gradient.coalesce()
            self._number = gradient.indices().shape[1]
        else:
            self._number = _Instead.DENSE
        self._gradient = (gradient * scale).to(self.layout.dtype)

    def fill_absent(self) -> None:
        """Take part without a gradient."""
        self._number, self._gradient = _Instead.ABSENT, None

    def fill_void(self) -> None:
        """Make the reduction visibly void: this rank gave up its backward pass."""
        self._number, self._gradient = _Instead.VOID, None

    def launch(
        self,
        communicator: Communicator,
        hook: Callable[[GradBucket], torch.futures.Future[torch.Tensor]] | None = None,
    ) -> None:
        """Tell the others how many rows there are; `finish` sends them, by ``hook`` if given."""
        self._hook = hook
        own = torch.tensor([self._number], device=communicator.device)
        self._numbers = own.new_empty(communicator.size)
        self._communicator = communicator
        self._pending = communicator.all_gather(
            self._numbers, own, label=f"{self.layout.label}: rows"
        )

    def launch_hooked(self, communicator: Communicator, hooked: Hooked) -> None:
        """Have a communication hook sum the rows, as soon as their numbers are known."""
        if not hooked.is_local:
            self.launch(communicator, hooked.call)

    def unused(self) -> Sequence[int]:
        """List the parameter, where no rank had a gradient in the last reduction."""
        return (self.layout.slots[0].index,) if self.is_unused else ()

    def drop(self) -> None:
        """Take part to the end in a reduction whose result nobody wants."""
        if self._pending is not None:
            self._sum()

    def finish(self) -> None:
        """Wait for the rows of all ranks and make their sum the parameter's gradient."""
        total = self._sum()
        (parameter,) = self.parameters
        if total is not None:
            parameter.grad = total.to(parameter.dtype)
        elif self._zeros_for_unused:
            parameter.grad = torch.zeros_like(parameter).to_sparse(1)

    def look(self, values: NonFiniteValues) -> None:
        """Have ``values`` note whether this rank's gradient is not finite, once it is filled."""
        gradient = self._gradient
        if gradient is not None:
            held = gradient.values() if gradient.is_sparse else gradient
            values.look(held, lambda: [(self.layout.slots[0].name, held)])

    def _sum(self) -> torch.Tensor | None:
        """Compute the sum over the ranks; None when no rank had a gradient."""
        pending, self._pending = self._pending, None
        axis = self._communicator
        if pending is None or axis is None:
            raise InternalError(f"{self.layout.label} was not launched")
        pending.wait()
        (parameter,), numbers = self.parameters, self._numbers.tolist()
        self.is_unused = set(numbers) == {_Instead.ABSENT}
        if self.is_unused:
            return None
        if self._hook is not None:
            if _Instead.VOID in numbers:  # nobody calls the hook: the rank has no gradient for it
                return torch.full_like(parameter, math.nan).to_sparse(1)
            return self._sum_by_hook(axis, is_dense=_Instead.DENSE in numbers)
        if _Instead.DENSE in numbers:
            total = self._sum_dense(axis)
        else:
            total = self._sum_rows(axis, [max(number, 0) for number in numbers])
        return total * math.nan if _Instead.VOID in numbers else total

    def _sum_by_hook(self, axis: Communicator, *, is_dense: bool) -> torch.Tensor:
        (parameter,), gradient, layout = self.parameters, self._gradient, self.layout
        if gradient is None:
            gradient = torch.zeros(parameter.shape, dtype=layout.dtype, device=parameter.device)
        buffer = gradient if gradient.is_sparse else gradient.to_sparse(1)
        if is_dense:
            buffer = gradient.to_dense().reshape(-1)
        part = BucketPart(parameter=parameter, offset=0, shape=tuple(parameter.shape))
        bucket = GradBucket(buffer, [part], axis, index=layout.index, label=layout.label)
        if self._hook is None:
            raise InternalError(f"{layout.label} has no hook")
        found = tensor_of(self._hook(bucket))
        return found.coalesce() if found.is_sparse else found.view(parameter.shape)

    def _sum_dense(self, axis: Communicator) -> torch.Tensor:
        (parameter,), gradient = self.parameters, self._gradient
        if gradient is None:
            line = torch.zeros(parameter.shape, dtype=self.layout.dtype, device=parameter.device)
        else:
            line = gradient.to_dense().contiguous()
        axis.all_reduce(line, label=self.layout.label).wait()
        return line

    def _sum_rows(self, axis: Communicator, numbers: list[int]) -> torch.Tensor:
        (parameter,), gradient = self.parameters, self._gradient
        indices = self._numbers.new_zeros(max(numbers))
        shape = (len(indices), *parameter.shape[1:])
        values = torch.zeros(shape, dtype=self.layout.dtype, device=parameter.device)
        if gradient is not None:
            own = gradient.indices().shape[1]
            indices[:own] = gradient.indices()[0]
            values[:own] = gradient.values()
        all_indices = indices.new_empty((axis.size, *indices.shape))
        all_values = values.new_empty((axis.size, *shape))
        if len(indices):
            label = self.layout.label
            waits = [
                axis.all_gather(all_indices, indices, label=f"{label}: indices"),
                axis.all_gather(all_values, values, label=label),
            ]
            for wait in waits:
                wait.wait()
        rows = list(enumerate(numbers))
        return torch.sparse_coo_tensor(
            torch.cat([all_indices[rank, :number] for rank, number in rows]).unsqueeze(0),
            torch.cat([all_values[rank, :number] for rank, number in rows]),
            parameter.shape,
            check_invariants=True,
        ).coalesce()
