"""The reductions of a replica's backward: gradients of this rank become means over all ranks.

A bucket's buffer holds the gradients of its parameters one after another, followed by a use count
for each, the number of ranks that had a gradient::

    | gradient of p7 | gradient of p6 | gradient of p5 | n7 n6 n5 |

A communication hook sees the buffer with the gradients alone; counts are sent separately.

Each rank puts in its whole ``.grad``. So two backward passes without zeroing in between give the
same as one backward pass on the sum: the part reduced before is equal on all ranks, and a mean does
not change it.

A large gradient is not copied into a bucket; the last bucket carries its use count. A ``.grad``
from before the pass stays the same tensor. A ``.grad`` that the pass has made is scaled into memory
kept from pass to pass, which then becomes ``.grad``.

A sparse gradient is summed without becoming dense. The ranks exchange their numbers of rows, then
all gather the rows of all, padded to the longest list::

    numbers   rows of this rank, or one of ABSENT, DENSE, VOID     one all-gather at the launch
    rows      indices and values of every rank, in rank order      two all-gathers at the finish

Every rank adds the same rows in the same order, so the results are bitwise equal. When a rank has a
dense gradient (a table that is also used densely), all ranks sum dense gradients instead. A
communication hook gets the sparse (or dense) tensor at the finish.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

import torch

from meshwright.comm import Communicator, Pending
from meshwright.data_parallel.distributed_parameters import ARRIVED, CAME_EMPTY
from meshwright.data_parallel.replicas.bucket_layout import BucketLayout, GradientSlot, is_dense
from meshwright.data_parallel.replicas.gradient_bucket import (
    BucketPart,
    GradBucket,
    RegisteredHook,
    tensor_of,
)
from meshwright.data_parallel.replicas.options import ReductionSettings
from meshwright.errors import InternalError
from meshwright.gradients import Factor, NonFiniteValues, multiply_, times
from meshwright.torch_internals.autograd import after_hooks_of
from meshwright.torch_internals.tensors import (
    foreach_copy_,
    foreach_zero_,
    storage_id,
    storage_users,
)

BATCHED_NUMEL = 16384
"""Gradients up to this size are copied together; larger ones are scaled while they are copied."""


class Reduction(ABC):
    """One reduction of each backward pass.

    ``take`` (large gradients) -> ``fill`` -> ``launch`` -> ``finish``, and ``deliver`` where a
    communication hook reduces.
    """

    is_buffer = False
    """True where a communication hook sees it as a bucket."""
    notes: torch.Tensor | None = None
    """All numbers after the gradients; None where there are none."""
    extra: torch.Tensor | None = None
    """Those of them that are no use counts, see `plan_buckets`; None where there are none."""
    lacks = False
    """True when a parameter has no gradient on this rank in this backward pass."""
    known: Sequence[bool] | None = None
    """By parameter, whether any rank has a gradient; None while counts have to be read."""

    def __init__(self, layout: BucketLayout, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.layout = layout
        self.parameters = tuple(parameters)
        self.arrived = bytearray(len(self.parameters))
        """`ARRIVED`, `CAME_EMPTY`, or 0, for each parameter in this backward pass."""
        self.taken = bytearray(len(self.parameters))
        """1 for each parameter whose gradient `take` has had in this backward pass."""
        self.takes = [False] * len(self.parameters)
        """For each parameter, whether `take` should have its gradient as soon as it is there."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Its gradients, in as few tensors as possible; for a sparse gradient its values."""
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is not None:
                yield gradient.coalesce().values() if gradient.is_sparse else gradient

    def reset(self) -> None:
        """Forget the last backward pass."""
        self.arrived[:] = self.taken[:] = bytes(len(self.parameters))
        self.known = None

    def begin(self) -> None:
        """Inspect the gradients at the start of a backward pass; for gradients reduced alone."""
        return

    def used(self) -> Sequence[bool]:
        """Whether this rank has a gradient, by parameter; empty if no other rank needs to know."""
        return ()

    def take(self, place: int, scale: Factor) -> None:
        """Take one gradient, times ``scale``; only if `takes` is true for it."""
        return

    @abstractmethod
    def fill(self, scale: Factor) -> None:
        """Take this rank's gradients, times ``scale``; zeros for parameters without one."""

    @abstractmethod
    def stand_in(self, *, is_void: bool) -> None:
        """Take part in the reduction without a gradient of this rank.

        With ``is_void``, mark the pass as void instead: the backward of this rank has raised.
        """

    @abstractmethod
    def launch(self, communicator: Communicator) -> None:
        """Start the reduction; `finish` waits for it."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the means and make them the gradients, except those that a hook reduces."""

    @abstractmethod
    def drop(self) -> None:
        """Wait for a reduction whose result is not needed.

        A ``.grad`` that was being reduced is neither this rank's gradient nor a mean, and may have
        been zeroed meanwhile: it is dropped.
        """

    @abstractmethod
    def look(self, values: NonFiniteValues) -> None:
        """Have ``values`` check this rank's gradients for non-finite values, once filled."""

    def await_hook(self, *, unless: type | None = None) -> None:
        """Wait for the communication hook, ``unless`` its future is of that type."""
        return

    def deliver(self) -> None:
        """Set the parameters' gradients from the result of the communication hook."""
        return

    def unused(self) -> Sequence[int]:
        """List the parameters for which no rank had a gradient in the last reduction."""
        return ()


class Bucket(Reduction):
    """Several gradients in one contiguous buffer, the reduction that communication hooks see."""

    is_buffer = True

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[torch.nn.Parameter],
        buffer: torch.Tensor,
        *,
        is_gradient_view: bool,
        riders: Sequence[LargeGradient] = (),
        zeros_for_unused: bool = False,
        hook: RegisteredHook | None = None,
        is_last: bool = False,
    ) -> None:
        super().__init__(layout, parameters)
        self.buffer = buffer
        self.is_gradient_view = is_gradient_view
        """True when ``.grad`` is a view of the buffer after the backward pass."""
        numel = layout.flat.numel
        self.gradients = buffer[:numel]
        self.riders = tuple(riders)
        """The gradients that are reduced alone, when this is the last bucket."""
        held = len(self.parameters) + len(self.riders)
        self.counts = buffer[numel : numel + held]
        """Use counts: of this bucket's parameters, then of the riders."""
        self.notes = buffer[numel:]
        extra = buffer[numel + held :]
        self.extra = extra if len(extra) else None
        self.views: list[torch.Tensor] = [
            _gradient_view(buffer, offset, parameter)
            for offset, parameter in zip(layout.flat.offsets, self.parameters, strict=True)
        ]
        self._zeros_for_unused = zeros_for_unused
        self._hook, self._is_last = hook, is_last
        self._absent: list[int] = []
        self._pending: Pending | None = None
        self._future: torch.futures.Future[torch.Tensor] | None = None
        # Into a narrower dtype one scales before the cast, or a sum could overflow on the way.
        self._single = [
            p.numel() > BATCHED_NUMEL or p.dtype.itemsize > layout.dtype.itemsize
            for p in self.parameters
        ]
        if is_gradient_view:
            self.takes = self._single  # a large gradient frees its own memory

    def take(self, place: int, scale: Factor) -> None:
        """Copy one gradient in, times ``scale``, and free its own memory."""
        parameter, view = self.parameters[place], self.views[place]
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        if gradient is view:
            multiply_([view], scale)
        else:
            _scaled_copy(view, gradient, scale)
            parameter.grad = view
        self.taken[place] = 1

    def fill(self, scale: Factor) -> None:
        batch_views: list[torch.Tensor] = []
        batch: list[torch.Tensor] = []
        scaled: list[torch.Tensor] = []
        self._absent = []
        for place, parameter in enumerate(self.parameters):
            gradient, view = parameter.grad, self.views[place]
            if gradient is None:
                if self.arrived[place] == ARRIVED:
                    raise lost_gradient(self.layout.slots[place])
                self._absent.append(place)
            elif self.taken[place]:
                continue
            elif gradient.layout is not torch.strided:
                raise sparse_gradient(self.layout.slots[place], gradient)
            elif gradient is view:
                scaled.append(view)
            elif self._single[place]:
                _scaled_copy(view, gradient, scale)
            else:
                batch_views.append(view)
                batch.append(gradient)
        self.counts.fill_(1)
        self.lacks = bool(self._absent)
        if self._absent or self.riders:
            self._clear_absent()
        if batch:
            foreach_copy_(batch_views, batch)
            scaled.extend(batch_views)
        if scaled and True in self._single:
            multiply_(scaled, scale)
        elif scaled and not isinstance(scale, float):
            multiply_([self.gradients], scale)
        elif scaled and scale != 1.0:
            self.gradients.mul_(scale)  # one operation, where nothing in the buffer is scaled yet
        if self.is_gradient_view:
            for parameter, view in zip(self.parameters, self.views, strict=True):
                if parameter.grad is not None and parameter.grad is not view:
                    parameter.grad = view

    def stand_in(self, *, is_void: bool) -> None:
        self.buffer.fill_(math.nan if is_void else 0.0)
        # What is absent is given the sum as ``.grad`` where another rank had one: no void sum.
        self._absent = [] if is_void else list(range(len(self.parameters)))
        if not is_void:
            for place, rider in enumerate(self.riders, len(self.parameters)):
                if not rider.lacks:
                    self.counts[place].fill_(1)

    def launch(self, communicator: Communicator) -> None:
        """Start the reduction; with a hook, of the gradients without the counts."""
        layout = self.layout
        if self._hook is None:
            self._pending = communicator.all_reduce(self.buffer, label=layout.label)
        elif self.parameters:
            parts = [
                BucketPart(parameter, offset, tuple(parameter.shape))
                for offset, parameter in zip(layout.flat.offsets, self.parameters, strict=True)
            ]
            bucket = GradBucket(
                self.gradients,
                parts,
                communicator,
                index=layout.index,
                label=layout.label,
                is_last=self._is_last,
            )
            self._future = self._hook.call(bucket)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Its gradients: one tensor for all where ``.grad`` is a view of it."""
        return iter((self.gradients,)) if self.is_gradient_view else super().tensors()

    def await_hook(self, *, unless: type | None = None) -> None:
        """Wait for the communication hook, ``unless`` its future is of that type.

        The buffer then holds the result.
        """
        if self._future is None or (unless is not None and isinstance(self._future, unless)):
            return
        future, self._future = self._future, None
        result: object = tensor_of(future)
        if not isinstance(result, torch.Tensor) or result.numel() != self.gradients.numel():
            raise TypeError(
                f"{self.layout.label}: expected a communication hook whose future holds one tensor "
                f"of {self.gradients.numel()} elements, found "
                f"{tuple(result.shape) if isinstance(result, torch.Tensor) else type(result)}"
            )
        if result.data_ptr() != self.gradients.data_ptr() or result.dtype != self.gradients.dtype:
            self.gradients.copy_(result.view(-1))

    def drop(self) -> None:
        self.await_hook()
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = None

    def finish(self) -> None:
        """Wait for the means and make them the gradients, except those that a hook reduces.

        A parameter that had a gradient on no rank keeps ``.grad`` None, or gets zeros on request.
        """
        if self._hook is not None:
            self.await_hook()
            return
        pending, self._pending = self._pending, None
        if pending is None:
            raise InternalError(f"{self.layout.label} was not launched")
        pending.wait()
        self.deliver()

    def deliver(self) -> None:
        """Make the contents of the buffer the parameters' gradients."""
        if self._absent or (self.riders and any(rider.lacks for rider in self.riders)):
            self._adopt_absent()
        if self.is_gradient_view:
            return
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for place, view in enumerate(self.views):
            gradient = self.parameters[place].grad
            if gradient is not None:
                targets.append(gradient)
                sources.append(view)
            elif self.arrived[place] == ARRIVED:
                raise lost_gradient(self.layout.slots[place])
        if targets:
            foreach_copy_(targets, sources)

    def used(self) -> Sequence[bool]:
        return [place not in self._absent for place in range(len(self.parameters))]

    def unused(self) -> tuple[int, ...]:
        """List the parameters, riders included, that had a gradient on no rank; once reduced."""
        slots = [*self.layout.slots, *(rider.layout.slots[0] for rider in self.riders)]
        found = zip(slots, self._counts(), strict=True)
        return tuple(slot.index for slot, count in found if count == 0)

    def look(self, values: NonFiniteValues) -> None:
        names = [slot.name for slot in self.layout.slots]
        values.look(self.gradients, lambda: zip(names, self.views, strict=True))

    def _clear_absent(self) -> None:
        """Clear the views and the counts of parameters without a gradient, riders included."""
        first = len(self.parameters)
        riders = [place for place, rider in enumerate(self.riders, first) if rider.lacks]
        cleared = [self.views[place] for place in self._absent]
        cleared += [self.counts[place] for place in (*self._absent, *riders)]
        if cleared:
            foreach_zero_(cleared)

    def _adopt_absent(self) -> None:
        counts = self._counts()
        for place in self._absent:
            # A void count is not a number, and must not pass for "nobody".
            if counts[place] == 0 and not self._zeros_for_unused:
                continue
            parameter, view = self.parameters[place], self.views[place]
            parameter.grad = view if self.is_gradient_view else torch.empty_like(parameter)
        for count, rider in zip(counts[len(self.parameters) :], self.riders, strict=True):
            # Any count above zero has it adopt the sum, which is zeros where no rank had one.
            rider.adopt(math.inf if self._zeros_for_unused else count)

    def _counts(self) -> list[float]:
        """Count the ranks with a gradient, by parameter and rider; just 0 or 1 if `known`."""
        if self.known is not None:
            told = [*self.known, *(flag for rider in self.riders for flag in rider.known or ())]
            return [float(flag) for flag in told]
        return (self.counts.real if self.counts.is_complex() else self.counts).tolist()


def _scaled_copy(view: torch.Tensor, gradient: torch.Tensor, scale: Factor) -> None:
    """Scale in one pass over the memory; a wider reduction scales in the wider dtype."""
    if gradient.dtype.itemsize < view.dtype.itemsize:
        multiply_([view.copy_(gradient)], scale)
    else:
        times(gradient, scale, view)


def _gradient_view(
    buffer: torch.Tensor, offset: int, parameter: torch.nn.Parameter
) -> torch.Tensor:
    """Return the parameter's view in ``buffer``, with its strides if they leave no holes."""
    if not is_dense(parameter):
        return buffer[offset : offset + parameter.numel()].view(parameter.shape)
    return buffer.as_strided(parameter.shape, parameter.stride(), offset)


class KeptMemory:
    """Reusable memory for one tensor of ``numel`` elements at a time."""

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
        """Make an uninitialized tensor; None where even newly allocated memory is held elsewhere.

        It is not a view of another tensor, because the user may detach it in place.
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
    """Whether no tensor and no other reference uses ``storage``."""
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
        super().reset()
        self._tensor = None

    def look(self, values: NonFiniteValues) -> None:
        tensor = self._tensor
        if tensor is not None:
            held = tensor.values() if tensor.is_sparse else tensor
            values.look(held, lambda: [(self.layout.slots[0].name, held)])


class LargeGradient(_AloneGradient):
    """The reduction of one gradient in its own memory, without a copy into a bucket.

    Its use count is in the last bucket, which calls `adopt` when it has finished.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameter: torch.nn.Parameter,
        allocate: Callable[[int, torch.dtype], torch.Tensor],
    ) -> None:
        super().__init__(layout, parameter)
        self._memory = KeptMemory(layout.numel, layout.dtype, allocate)
        self._references = _fewest_references()

    def begin(self) -> None:
        """Note whether the pass that begins makes the gradient, so that `take` may move it."""
        self.takes[0] = self.parameters[0].grad is None

    def take(self, place: int, scale: Factor) -> None:
        """Scale the gradient into the kept memory, unless either memory is referenced elsewhere."""
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
        self.lacks = not is_void
        self._tensor = torch.full_like(self.parameters[0], math.nan if is_void else 0.0)

    def launch(self, communicator: Communicator) -> None:
        if self._tensor is None:
            raise InternalError(f"{self.layout.label} was not filled")
        # Dense, but perhaps transposed, of which `view(-1)` would make no flat view.
        flat = self._tensor.as_strided((self._tensor.numel(),), (1,))
        self._pending = communicator.all_reduce(flat, label=self.layout.label)

    def drop(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.wait()
        (parameter,) = self.parameters
        if parameter.grad is self._tensor:
            parameter.grad = None

    def finish(self) -> None:
        """Wait for the mean; copies it to a gradient whose layout is not the parameter's."""
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
        return (not self.lacks,)

    def adopt(self, count: float) -> None:
        """Take the mean as ``.grad`` if this rank had none but another rank had."""
        if self.lacks and count != 0:
            self.parameters[0].grad = self._tensor


class _Instead(IntEnum):
    """Codes that a rank sends instead of its number of rows."""

    ABSENT = -1
    """It had no gradient."""
    DENSE = -2
    """Its gradient is dense."""
    VOID = -3
    """It gave up its backward pass."""


class SparseGradient(_AloneGradient):
    """The reduction of one parameter whose gradients are sparse.

    ``.grad`` becomes a coalesced sparse tensor with the rows that any rank had.
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
        """Scale a coalesced copy of this rank's gradient."""
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
        return (self.layout.slots[0].index,) if self.is_unused else ()

    def drop(self) -> None:
        if self._pending is not None:
            self._sum()  # to the end, as the other ranks do

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


def _is_alike(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether the gradient's memory can be reduced and written in place."""
    return (
        gradient.stride() == parameter.stride()
        and gradient.dtype == parameter.dtype
        and not gradient.requires_grad
    )


def _references(parameter: torch.Tensor) -> int:
    """Count the Python references to the gradient; torch's own differ by version."""
    gradient = parameter.grad
    return sys.getrefcount(gradient)


def _fewest_references() -> int:
    """Count the `_references` to a gradient that nobody else holds."""
    probe = torch.empty(0, device="cpu", requires_grad=True)
    probe.grad = torch.empty(0, device="cpu")
    return _references(probe)


def build_reductions(
    layouts: Sequence[BucketLayout],
    parameters: Sequence[torch.nn.Parameter],
    settings: ReductionSettings,
    communicators: Sequence[Communicator],
    hook: RegisteredHook | None,
) -> tuple[Reduction, ...]:
    """Build the reduction of each layout, whose slots index ``parameters``.

    ``communicators`` are numbered by the layouts' groups.
    """
    built: list[Reduction] = []
    alone: list[LargeGradient] = []
    zeros = settings.zeros_for_unused
    for layout in layouts:
        members = [parameters[slot.index] for slot in layout.slots]
        communicator = communicators[layout.group]
        if layout.is_sparse:
            built.append(SparseGradient(layout, members[0], zeros_for_unused=zeros, hook=hook))
            continue
        if layout.is_alone:
            alone.append(LargeGradient(layout, members[0], communicator.empty_shared))
            built.append(alone[-1])
            continue
        is_view = settings.is_gradient_view and all(
            parameter.dtype == layout.dtype
            and (getattr(parameter, "grad_dtype", None) or layout.dtype) == layout.dtype
            for parameter in members
        )
        built.append(
            Bucket(
                layout,
                members,
                communicator.empty_shared(layout.numel, layout.dtype),
                is_gradient_view=is_view,
                riders=alone if layout is layouts[-1] else (),
                zeros_for_unused=zeros,
                hook=hook,
                is_last=layout is layouts[-1],
            )
        )
    return tuple(built)


def sparse_gradient(slot: GradientSlot, gradient: torch.Tensor) -> RuntimeError:
    """Make the error for a sparse gradient of a parameter that has a dense place in a buffer."""
    return RuntimeError(
        f"parameter {slot.name!r} has a sparse gradient ({gradient.layout}), and no module that "
        "announces one: replicate reduces sparse gradients of nn.Embedding and nn.EmbeddingBag "
        "with sparse=True. Use one of them, or put the module into ignored_modules"
    )


def lost_gradient(slot: GradientSlot) -> RuntimeError:
    """Make the error for a gradient that was consumed before it had become the mean."""
    return RuntimeError(
        f"parameter {slot.name!r} got a gradient in this backward pass, and had none any more when "
        "it was to be summed over the ranks: a hook took it, which has seen the gradient of this "
        "rank alone. Step after backward(), or register optimizer_in_backward_hook of "
        "meshwright.data_parallel.comm_hooks with register_comm_hook"
    )


def came_empty(parameter: torch.Tensor) -> int:
    """Classify an empty arrival: `CAME_EMPTY`, or `ARRIVED` if a hook may have taken a gradient.

    Autograd also runs hooks where a function of the graph has returned None.
    """
    hooks = after_hooks_of(parameter) or {}
    first = next(iter(hooks.values()), None)
    is_ours = getattr(first, "__module__", "").startswith("meshwright.data_parallel.")
    return CAME_EMPTY if is_ours else ARRIVED
