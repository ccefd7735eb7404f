"""Gradients that are reduced alone: a large one in its own memory, a sparse one by its rows.

A large gradient is neither copied into a bucket nor out of it. A ``.grad`` that a backward pass
began with stays the tensor that it is. One that the pass has made is scaled into memory that is
kept from pass to pass, and that becomes ``.grad``.

A sparse gradient is summed without becoming dense. Each rank tells how many rows it has, then all
gather the rows of all, padded to the longest list::

    numbers   rows of this rank, or one of ABSENT, DENSE, VOID     one all-gather at the launch
    rows      indices and values of every rank, in rank order      two all-gathers at the finish

Every rank adds up the same rows in the same order, so the results are equal bit by bit. When a rank
has a dense gradient (a table that is also used densely), all ranks sum dense ones instead. A
communication hook gets the sparse tensor, or then the dense one, at the finish.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum

import torch

from meshwright.comm import Communicator, Pending
from meshwright.data_parallel.replicas.gradient_bucket import (
    BucketPart,
    GradBucket,
    RegisteredHook,
    tensor_of,
)
from meshwright.data_parallel.replicas.slots import (
    ARRIVED,
    BucketLayout,
    Reduction,
    lost_gradient,
    sparse_gradient,
)
from meshwright.errors import InternalError
from meshwright.gradients import Factor, NonFiniteValues, multiply_, times
from meshwright.torch_internals.tensors import storage_id, storage_users


class KeptMemory:
    """Memory in which tensors of ``numel`` elements lie, one after the other."""

    def __init__(
        self, numel: int, dtype: torch.dtype, allocate: Callable[[int, torch.dtype], torch.Tensor]
    ) -> None:
        self._numel, self._dtype = numel, dtype
        self._allocate = allocate
        # Now and not in the first backward pass, where it would lie among what autograd frees.
        self._kept, self._offset = self._fresh()
        """The memory, and the element of it at which tensors begin."""

    def tensor(
        self, shape: Sequence[int], stride: Sequence[int], device: torch.device
    ) -> torch.Tensor | None:
        """Make an uninitialized tensor; None where somebody holds even newly allocated memory.

        It is no view of another tensor: the user may detach it in place.
        """
        if not _is_ours_alone(self._kept):
            self._kept, self._offset = self._fresh()
        if not _is_ours_alone(self._kept):
            return None
        tensor = torch.empty(0, dtype=self._dtype, device=device)
        return tensor.set_(self._kept, self._offset, tuple(shape), tuple(stride))

    def _fresh(self) -> tuple[torch.UntypedStorage, int]:
        base = self._allocate(self._numel, self._dtype)
        return base.untyped_storage(), int(base.storage_offset())


def _is_ours_alone(storage: torch.UntypedStorage) -> bool:
    """Whether no tensor and no other name uses ``storage``."""
    # References: the attribute, the name here, the argument of the call.
    return storage_users(storage_id(storage)) == 1 and sys.getrefcount(storage) <= 3


class _AloneGradient(Reduction):
    """The reduction of one gradient; the same steps as a `Bucket`."""

    def __init__(self, layout: BucketLayout, parameter: torch.nn.Parameter) -> None:
        super().__init__(layout, (parameter,))
        self._tensor: torch.Tensor | None = None
        """The scaled gradient of this rank, and the mean where that takes its place."""
        self._pending: Pending | None = None

    def reset(self) -> None:
        """Forget the gradient of the last backward pass."""
        super().reset()
        self._tensor = None

    def look(self, values: NonFiniteValues) -> None:
        """Have ``values`` note whether this rank's gradient is not finite, once it is filled."""
        tensor = self._tensor
        if tensor is not None:
            held = tensor.values() if tensor.is_sparse else tensor
            values.look(held, lambda: [(self.layout.slots[0].name, held)])


class InPlaceGradient(_AloneGradient):
    """The reduction of one gradient where it lies.

    Whether any rank had a gradient is known when the bucket that carries its use count has
    finished, which then calls `adopt`.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameter: torch.nn.Parameter,
        allocate: Callable[[int, torch.dtype], torch.Tensor],
    ) -> None:
        super().__init__(layout, parameter)
        self._memory = KeptMemory(layout.numel, layout.dtype, allocate)
        self._began_without = False
        self._references = _fewest_references()

    def begin(self) -> None:
        """Note whether the backward pass that begins makes the gradient."""
        self._began_without = self.parameters[0].grad is None

    def takes(self, slot: int) -> bool:
        """Whether the gradient was made by this pass, so that `take` may move it."""
        return self._began_without

    def take(self, slot: int, scale: Factor) -> None:
        """Move the gradient, times ``scale``, unless somebody else holds either memory."""
        (parameter,) = self.parameters
        gradient = parameter.grad
        if gradient is None or not _is_alike(gradient, parameter):
            return
        if _references(parameter) > self._references + 1:  # the name in this function
            return
        tensor = self._memory.tensor(parameter.shape, parameter.stride(), parameter.device)
        if tensor is None:
            return
        self._tensor = times(gradient, scale, tensor)
        parameter.grad = tensor
        self.taken[0] = 1

    def fill(self, scale: Factor) -> None:
        """Scale this rank's gradient, or stand in with zeros."""
        (parameter,) = self.parameters
        gradient = parameter.grad
        self.lacks = gradient is None
        if gradient is None and self.arrived[0] == ARRIVED:
            raise lost_gradient(self.layout.slots[0])
        if self.taken[0]:
            return
        if gradient is None:
            self._tensor = torch.zeros_like(parameter)
        elif gradient.layout is not torch.strided:
            raise sparse_gradient(self.layout.slots[0], gradient)
        elif _is_alike(gradient, parameter):
            self._tensor = gradient
            multiply_([gradient], scale)
        else:
            self._tensor = times(gradient, scale, torch.empty_like(parameter))

    def stand_in(self, *, is_void: bool) -> None:
        """Take part with zeros, or visibly void."""
        self.lacks = not is_void
        self._tensor = torch.full_like(self.parameters[0], math.nan if is_void else 0.0)

    def launch(self, communicator: Communicator) -> None:
        """Start the reduction; `finish` waits for it."""
        if self._tensor is None:
            raise InternalError(f"{self.layout.label} was not filled")
        flat = self._tensor.as_strided((self._tensor.numel(),), (1,))
        self._pending = communicator.all_reduce(flat, label=self.layout.label)

    def drop(self) -> None:
        """Wait for a reduction whose result nobody wants.

        A ``.grad`` that was reduced meanwhile is neither this rank's nor a mean, and may have been
        zeroed while it was written: it is given up.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.wait()
        (parameter,) = self.parameters
        if parameter.grad is self._tensor:
            parameter.grad = None

    def finish(self) -> None:
        """Wait for the mean. A gradient of another form than the parameter's gets it copied."""
        pending, self._pending = self._pending, None
        if pending is None or self._tensor is None:
            raise InternalError(f"{self.layout.label} was not launched")
        pending.wait()
        gradient = self.parameters[0].grad
        if gradient is None and self.arrived[0] == ARRIVED:
            raise lost_gradient(self.layout.slots[0])
        if gradient is not None and gradient is not self._tensor:
            gradient.copy_(self._tensor)

    def used(self) -> Sequence[bool]:
        """Whether this rank has a gradient."""
        return (not self.lacks,)

    def adopt(self, count: float) -> None:
        """Take the mean as ``.grad`` where this rank had none, unless no rank had one."""
        if self.lacks and count != 0:
            self.parameters[0].grad = self._tensor


class _Instead(IntEnum):
    """Codes that a rank sends in place of a number of rows."""

    ABSENT = -1
    """It had no gradient."""
    DENSE = -2
    """Its gradient is dense."""
    VOID = -3
    """It gave up its backward pass."""


class SparseGradient(_AloneGradient):
    """The reduction of one parameter whose gradients are sparse.

    ``.grad`` becomes a coalesced sparse tensor, whose rows are those that any rank had.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameter: torch.nn.Parameter,
        *,
        zeros_for_unused: bool,
        hook: RegisteredHook | None = None,
    ) -> None:
        super().__init__(layout, parameter)
        self.is_unused = False
        """True when no rank had a gradient in the last reduction."""
        self._zeros_for_unused = zeros_for_unused
        self._number = int(_Instead.ABSENT)
        self._numbers = torch.empty(0, dtype=torch.int64, device="cpu")
        self._communicator: Communicator | None = None
        self._hook = hook

    def fill(self, scale: Factor) -> None:
        """Scale a copy of this rank's gradient, with each row once."""
        (parameter,) = self.parameters
        gradient = parameter.grad
        if gradient is None:
            self.stand_in(is_void=False)
            return
        # One index a row is what embeddings give, and what is sent.
        if gradient.is_sparse and gradient.sparse_dim() == 1:
            gradient = gradient.coalesce()
            self._number = gradient.indices().shape[1]
        else:
            self._number = _Instead.DENSE
        self._tensor = (gradient * scale).to(self.layout.dtype)

    def stand_in(self, *, is_void: bool) -> None:
        """Take part without a gradient, or visibly void."""
        self._number = _Instead.VOID if is_void else _Instead.ABSENT
        self._tensor = None

    def launch(self, communicator: Communicator) -> None:
        """Send the number of rows; `finish` sends the rows, or has a hook sum them."""
        if self._hook is not None and self._hook.is_local:
            return
        own = torch.tensor([int(self._number)], device="cpu")
        self._numbers = torch.empty(communicator.size, dtype=torch.int64, device="cpu")
        self._communicator = communicator
        self._pending = communicator.control.all_gather(
            self._numbers, own, label=f"{self.layout.label}: rows"
        )

    def unused(self) -> Sequence[int]:
        """List the parameter, where no rank had a gradient in the last reduction."""
        return (self.layout.slots[0].index,) if self.is_unused else ()

    def drop(self) -> None:
        """Take part to the end in a reduction whose result nobody wants."""
        if self._pending is not None:
            self._sum()

    def finish(self) -> None:
        """Wait for the rows of all ranks and make their sum the parameter's gradient."""
        if self._hook is not None and self._hook.is_local:
            return
        total = self._sum()
        (parameter,) = self.parameters
        if total is not None:
            parameter.grad = total.to(parameter.dtype)
        elif self._zeros_for_unused:
            parameter.grad = torch.zeros_like(parameter).to_sparse(1)

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
            return self._sum_by_hook(self._hook, axis, is_dense=_Instead.DENSE in numbers)
        if _Instead.DENSE in numbers:
            total = self._sum_dense(axis)
        else:
            total = self._sum_rows(axis, [max(number, 0) for number in numbers])
        return total * math.nan if _Instead.VOID in numbers else total

    def _sum_by_hook(
        self, hook: RegisteredHook, axis: Communicator, *, is_dense: bool
    ) -> torch.Tensor:
        (parameter,), gradient, layout = self.parameters, self._tensor, self.layout
        if gradient is None:
            gradient = torch.zeros(parameter.shape, dtype=layout.dtype, device=parameter.device)
        buffer = gradient if gradient.is_sparse else gradient.to_sparse(1)
        if is_dense:
            buffer = gradient.to_dense().reshape(-1)
        part = BucketPart(parameter, 0, tuple(parameter.shape))
        bucket = GradBucket(buffer, [part], axis, index=layout.index, label=layout.label)
        found = tensor_of(hook.call(bucket))
        return found.coalesce() if found.is_sparse else found.view(parameter.shape)

    def _sum_dense(self, axis: Communicator) -> torch.Tensor:
        (parameter,), gradient = self.parameters, self._tensor
        if gradient is None:
            line = torch.zeros(parameter.shape, dtype=self.layout.dtype, device=parameter.device)
        else:
            line = gradient.to_dense().contiguous()
        axis.all_reduce(line, label=self.layout.label).wait()
        return line

    def _sum_rows(self, axis: Communicator, numbers: list[int]) -> torch.Tensor:
        (parameter,), gradient = self.parameters, self._tensor
        indices = torch.zeros(max(numbers), dtype=torch.int64, device=axis.device)
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
            device=parameter.device,
            check_invariants=True,
        ).coalesce()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the strides cover ``tensor.numel()`` elements in a row, without holes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _is_alike(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether the gradient's memory can be reduced as it is, and written to."""
    return (
        gradient.stride() == parameter.stride()
        and gradient.dtype == parameter.dtype
        and not gradient.requires_grad
    )


def _references(parameter: torch.Tensor) -> int:
    """Count Python's references to the gradient; torch's own differ with its version."""
    gradient = parameter.grad
    return sys.getrefcount(gradient)


def _fewest_references() -> int:
    """Count `_references` of a gradient that nobody else holds."""
    probe = torch.empty(0, device="cpu", requires_grad=True)
    probe.grad = torch.empty(0, device="cpu")
    return _references(probe)
