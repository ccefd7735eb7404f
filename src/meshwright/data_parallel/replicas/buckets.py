"""Gradient buckets: several gradients in one contiguous buffer, reduced in one call.

A bucket's buffer holds the gradients of its parameters one after another and behind them one use
count for each: how many ranks had a gradient::

    | gradient of p7 | gradient of p6 | gradient of p5 | n7 n6 n5 |

A large gradient is reduced `alone`, in its own memory, and its use count rides in the last
bucket. With a communication hook the buffer is what the hook sees, and counts go beside it.

What a rank puts in is its ``.grad`` as it stands, so a backward pass after another one without
zeroing gives what one backward pass on the sum would give: the part that was reduced before is
equal on all ranks, and a mean leaves it as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from meshwright.comm import Communicator, Pending
from meshwright.data_parallel.replicas.alone import InPlaceGradient, is_dense
from meshwright.data_parallel.replicas.gradient_bucket import (
    BucketPart,
    GradBucket,
    RegisteredHook,
    tensor_of,
)
from meshwright.data_parallel.replicas.options import ReductionSettings
from meshwright.data_parallel.replicas.slots import (
    ARRIVED,
    BucketLayout,
    GradientSlot,
    Reduction,
    lost_gradient,
    sparse_gradient,
)
from meshwright.errors import InternalError
from meshwright.gradients import Factor, NonFiniteValues, multiply_, times
from meshwright.torch_internals.tensors import foreach_copy_, foreach_zero_

BATCHED_NUMEL = 16384
"""Gradients up to this size are copied together; larger ones are scaled while they are copied."""


def slot_of(
    index: int,
    names: Sequence[str],
    parameter: torch.nn.Parameter,
    settings: ReductionSettings,
    *,
    may_be_alone: bool,
) -> GradientSlot:
    """Describe ``parameter``, which is number ``index`` of ``names``, as a bucket needs it."""
    dtype = parameter.dtype
    if settings.reduce_dtype is not None and dtype.is_floating_point:
        dtype = settings.reduce_dtype
    return GradientSlot(
        index=index,
        name=names[index],
        shape=tuple(parameter.shape),
        dtype=dtype,
        is_alone=may_be_alone
        and parameter.nbytes >= settings.alone_bytes
        and parameter.dtype == dtype
        and is_dense(parameter),
        is_sparse=names[index] in settings.sparse,
        turn=_turn(index, names, settings),
    )


def _turn(index: int, names: Sequence[str], settings: ReductionSettings) -> int:
    """The turn that puts delayed parameters right after the bucket of the one they wait for."""
    if not settings.delayed:
        return 0
    if names[index] in settings.delayed:
        return 1
    trigger = names.index(settings.trigger) if settings.trigger in names else 0
    return 0 if index >= trigger else 2


class Bucket(Reduction):
    """The buffer of one `BucketLayout`, from gradients of this rank to means over all ranks.

    It is the reduction that communication hooks see.
    """

    is_buffer = True

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[torch.nn.Parameter],
        buffer: torch.Tensor,
        *,
        is_gradient_view: bool,
        riders: Sequence[InPlaceGradient] = (),
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
        """All numbers behind the gradients."""
        extra = buffer[numel + held :]
        self.extra = extra if len(extra) else None
        """More numbers that are summed over the ranks, see `plan_buckets`."""
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

    def takes(self, slot: int) -> bool:
        """Whether `take` should copy this gradient: it is large, and frees its own memory."""
        return self.is_gradient_view and self._single[slot]

    def take(self, slot: int, scale: Factor) -> None:
        """Copy one gradient in as soon as it is there, times ``scale``, and free its own memory."""
        parameter, view = self.parameters[slot], self.views[slot]
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        if gradient is view:
            multiply_([view], scale)
        else:
            _scaled_copy(view, gradient, scale)
            parameter.grad = view
        self.taken[slot] = 1

    def fill(self, scale: Factor) -> None:
        """Copy this rank's gradients in, times ``scale``; zeros for parameters without one.

        Raises RuntimeError naming the parameter when a gradient is sparse.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        self.counts.fill_(1)
        self._absent = [slot for slot, gradient in enumerate(gradients) if gradient is None]
        for slot in self._absent:
            if self.arrived[slot] == ARRIVED:
                raise lost_gradient(self.layout.slots[slot])
        self.lacks = bool(self._absent)
        if self._absent or self.riders:
            self._clear_absent()
        try:
            self._copy_in(gradients, scale)
        except RuntimeError as error:
            self._explain(gradients, error)
            raise
        if self.is_gradient_view:
            for parameter, gradient, view in zip(
                self.parameters, gradients, self.views, strict=True
            ):
                if gradient is not None and gradient is not view:
                    parameter.grad = view

    def stand_in(self, *, is_void: bool) -> None:
        """Take part with zeros, used by nobody here, or visibly void."""
        self.buffer.fill_(math.nan if is_void else 0.0)
        self._absent = [] if is_void else list(range(len(self.parameters)))
        if not is_void:
            for place, rider in enumerate(self.riders, len(self.parameters)):
                if not rider.lacks:
                    self.counts[place].fill_(1)

    def launch(self, communicator: Communicator) -> None:
        """Start the reduction; with a hook of the gradients alone, as counts are the caller's."""
        if self._hook is None:
            self._pending = communicator.all_reduce(self.buffer, label=self.layout.label)
            return
        if not self.parameters:
            return
        layout = self.layout
        parts = [
            BucketPart(parameter, offset, tuple(parameter.shape))
            for offset, parameter in zip(layout.flat.offsets, self.parameters, strict=True)
        ]
        self._future = self._hook.call(
            GradBucket(
                self.gradients,
                parts,
                communicator,
                index=layout.index,
                label=layout.label,
                is_last=self._is_last,
            )
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        """Its gradients, all in one tensor where ``.grad`` is a view of it."""
        return iter((self.gradients,)) if self.is_gradient_view else super().tensors()

    def await_hook(self, *, unless: type | None = None) -> None:
        """Wait for the communication hook, ``unless`` its future is of that type.

        Its result is in the buffer then.
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
        """Wait for a reduction whose result nobody wants.

        A ``.grad`` that is a view of it is given up, as by `InPlaceGradient.drop`.
        """
        self.await_hook()
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = None

    def finish(self) -> None:
        """Wait for the means and make them the parameters' gradients, but for those of a hook.

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
        """Make what the buffer holds the parameters' gradients."""
        if self._absent or any(rider.lacks for rider in self.riders):
            self._adopt_absent()
        if not self.is_gradient_view:
            self._copy_out()

    def used(self) -> Sequence[bool]:
        """By parameter, whether this rank has a gradient."""
        return [slot not in self._absent for slot in range(len(self.parameters))]

    def unused(self) -> tuple[int, ...]:
        """List the parameters, riders too, that no rank had a gradient of; once reduced."""
        slots = [*self.layout.slots, *(rider.layout.slots[0] for rider in self.riders)]
        found = zip(slots, self._counts(), strict=True)
        return tuple(slot.index for slot, count in found if count == 0)

    def look(self, values: NonFiniteValues) -> None:
        """Have ``values`` note which gradients of this rank are not finite, once it is filled."""
        names = [slot.name for slot in self.layout.slots]
        values.look(self.gradients, lambda: zip(names, self.views, strict=True))

    def _copy_in(self, gradients: Sequence[torch.Tensor | None], scale: Factor) -> None:
        """Scale and copy, in as few calls as the sizes allow."""
        batch_views: list[torch.Tensor] = []
        batch: list[torch.Tensor] = []
        scaled: list[torch.Tensor] = []
        rows = zip(gradients, self.views, self._single, self.taken, strict=True)
        for gradient, view, is_single, is_taken in rows:
            if gradient is None or is_taken:
                continue
            if gradient is view:
                scaled.append(view)
            elif is_single:
                _scaled_copy(view, gradient, scale)
            else:
                batch_views.append(view)
                batch.append(gradient)
        if batch:
            foreach_copy_(batch_views, batch)
            scaled.extend(batch_views)
        if scaled and True in self._single:
            multiply_(scaled, scale)
        elif scaled and not isinstance(scale, float):
            multiply_([self.gradients], scale)
        elif scaled and scale != 1.0:
            self.gradients.mul_(scale)

    def _copy_out(self) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for slot, view in enumerate(self.views):
            gradient = self.parameters[slot].grad
            if gradient is not None:
                targets.append(gradient)
                sources.append(view)
            elif self.arrived[slot] == ARRIVED:
                raise lost_gradient(self.layout.slots[slot])
        if targets:
            foreach_copy_(targets, sources)

    def _clear_absent(self) -> None:
        """Clear the views and the counts of parameters without a gradient, riders among them."""
        first = len(self.parameters)
        riders = [slot for slot, rider in enumerate(self.riders, first) if rider.lacks]
        cleared = [self.views[slot] for slot in self._absent]
        cleared += [self.counts[slot] for slot in (*self._absent, *riders)]
        if cleared:
            foreach_zero_(cleared)

    def _adopt_absent(self) -> None:
        counts = self._counts()
        for slot in self._absent:
            # A void count is not a number, and must not pass for "nobody".
            if counts[slot] == 0 and not self._zeros_for_unused:
                continue
            parameter, view = self.parameters[slot], self.views[slot]
            parameter.grad = view if self.is_gradient_view else torch.empty_like(parameter)
        for count, rider in zip(counts[len(self.parameters) :], self.riders, strict=True):
            rider.adopt(math.inf if self._zeros_for_unused else count)

    def _counts(self) -> list[float]:
        """Count for each parameter, riders too, the ranks that have a gradient, or know it."""
        if self.known is not None:
            told = [*self.known, *(flag for rider in self.riders for flag in rider.known or ())]
            return [float(flag) for flag in told]
        return (self.counts.real if self.counts.is_complex() else self.counts).tolist()

    def _explain(self, gradients: Sequence[torch.Tensor | None], error: RuntimeError) -> None:
        for slot, gradient in zip(self.layout.slots, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise sparse_gradient(slot, gradient) from error


def _scaled_copy(view: torch.Tensor, gradient: torch.Tensor, scale: Factor) -> None:
    """Scale in one pass over the memory; a wider reduction scales in the wider dtype."""
    if gradient.dtype.itemsize < view.dtype.itemsize:
        multiply_([view.copy_(gradient)], scale)
    else:
        times(gradient, scale, view)


def _gradient_view(
    buffer: torch.Tensor, offset: int, parameter: torch.nn.Parameter
) -> torch.Tensor:
    """Return the parameter's place in ``buffer``, with its strides when they leave no holes."""
    if not is_dense(parameter):
        return buffer[offset : offset + parameter.numel()].view(parameter.shape)
    return buffer.as_strided(parameter.shape, parameter.stride(), offset)
