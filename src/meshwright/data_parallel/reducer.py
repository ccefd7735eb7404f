"""Gradients of one model over one axis: hooks count them in, buckets are reduced meanwhile.

A backward pass, step by step:

1. The hook of an output (or the first gradient) opens it and asks autograd for a call at its end.
2. Each gradient counts its bucket down. A full bucket is launched when all before it have been:
   the order of the launches is the same on every rank, whatever order gradients come in.
3. At the end the rest is launched, with zeros for what this rank has not used, and everything is
   waited for.

::

    phase      may become
    IDLE       BACKWARD (1.)
    BACKWARD   IDLE     (3., or when a pass that raised is abandoned)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import torch

from meshwright.comm import Communicator
from meshwright.data_parallel.buckets import Bucket, BucketLayout, GradientSlot, plan_buckets
from meshwright.data_parallel.starting_state import compare_parameters

__all__ = ["GradientReducer", "ReductionPhase", "ReductionSettings"]


class ReductionPhase(StrEnum):
    """Whether a backward pass is under way."""

    IDLE = "idle"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionSettings:
    """How gradients are put together and reduced."""

    first_bytes: int = 2**20
    """The first bucket of a dtype is closed at this size."""
    cap_bytes: int = 25 * 2**20
    """Every later bucket is closed at this size."""
    is_gradient_view: bool = False
    """Leave ``.grad`` as a view of the bucket: saves one copy and the memory of the gradients."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which gradients are summed; that of each parameter when None."""
    is_watched: bool = False
    """Look for values that are not finite before they are mixed with those of other ranks."""


class GradientReducer:
    """Makes ``.grad`` of every trainable parameter the mean over the ranks of ``communicator``.

    A scale other than the mean's can be set with `scale_by`. Parameters are counted by their
    position in ``named``; those that do not require grad have no place in a bucket, and are given
    one in the first forward pass that finds them trainable.
    """

    def __init__(
        self,
        communicator: Communicator,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        settings: ReductionSettings,
    ) -> None:
        self.communicator = communicator
        self.settings = settings
        self.named = tuple(named)
        self.is_wanted = True
        """Whether forward passes from now on lead to a reduction."""
        self.is_synchronising = True
        """Whether the next backward pass reduces: what was wanted when its forward pass began."""
        self.phase = ReductionPhase.IDLE
        self.found_non_finite: list[str] = []
        """Parameters with a value of this rank that was not finite, in the last backward pass."""
        self._parameters = tuple(parameter for _, parameter in named)
        self._mean = 1.0 / communicator.size
        self._scale: Callable[[], float] | None = None
        self._hooked: set[int] = set()
        self._next = 0
        self._factor: float | None = None
        self._trainable: list[bool] = []
        self.buckets: tuple[Bucket, ...] = ()
        self._homes: list[tuple[Bucket, int] | None] = []
        self._arrange()

    @property
    def layouts(self) -> tuple[BucketLayout, ...]:
        """The buckets, in the order in which they are reduced."""
        return tuple(bucket.layout for bucket in self.buckets)

    def gradients(self) -> tuple[torch.Tensor, ...]:
        """All gradients in as few tensors as hold them: whole buckets where ``.grad`` is a view."""
        found: list[torch.Tensor] = []
        for bucket in self.buckets:
            if bucket.is_gradient_view:
                found.append(bucket.gradients)
            else:
                found.extend(p.grad for p in bucket.parameters if p.grad is not None)
        return tuple(found)

    def scale_by(self, scale: Callable[[], float] | None) -> None:
        """Multiply gradients by ``scale()`` on the way into the buckets, instead of by 1/ranks.

        It is called once for each backward pass that reduces, just before the first bucket.
        """
        self._scale = scale

    def begin_forward(self) -> None:
        """Get ready for the gradients of a forward pass that has just begun."""
        if self.phase is ReductionPhase.BACKWARD:
            self.abandon()
        self.is_synchronising = self.is_wanted
        if [parameter.requires_grad for parameter in self._parameters] != self._trainable:
            compare_parameters(self.communicator, self.named)
            self._arrange()

    def begin_backward(self) -> None:
        """Open a backward pass, unless one is open; must be called from inside it."""
        if self.phase is ReductionPhase.BACKWARD or not self.is_synchronising:
            return
        self.phase = ReductionPhase.BACKWARD
        self.found_non_finite = []
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def abandon(self) -> None:
        """Close a backward pass that raised, so that the next one starts clean.

        What this rank has not launched is launched void: peers that raised at another place have
        issued the same reductions then, and peers that did not raise get NaN and never a mean
        that lacks a rank.
        """
        with torch.no_grad():
            for bucket in self.buckets[self._next :]:
                bucket.fill_void()
                bucket.launch(self.communicator)
        for bucket in self.buckets:
            bucket.drop()
        self._reset()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward passes in the block leave their gradients on this rank, to be reduced later."""
        before, self.is_wanted = self.is_wanted, False
        try:
            yield
        finally:
            self.is_wanted = before

    def _arrange(self) -> None:
        """Give every parameter that requires grad now its place in a bucket."""
        self._trainable = [parameter.requires_grad for parameter in self._parameters]
        slots = [
            GradientSlot(
                index=index,
                name=name,
                shape=tuple(parameter.shape),
                dtype=self.settings.reduce_dtype or parameter.dtype,
            )
            for index, (name, parameter) in enumerate(self.named)
            if parameter.requires_grad
        ]
        layouts = plan_buckets(
            slots, first_bytes=self.settings.first_bytes, cap_bytes=self.settings.cap_bytes
        )
        self.buckets = tuple(self._build(layout) for layout in layouts)
        self._homes = [None] * len(self._parameters)
        for bucket in self.buckets:
            for place, slot in enumerate(bucket.layout.slots):
                self._homes[slot.index] = (bucket, place)
        for slot in slots:
            if slot.index not in self._hooked:
                self._hooked.add(slot.index)
                self._parameters[slot.index].register_post_accumulate_grad_hook(
                    partial(self._arrived, slot.index)
                )

    def _build(self, layout: BucketLayout) -> Bucket:
        parameters = [self._parameters[slot.index] for slot in layout.slots]
        is_view = self.settings.is_gradient_view and all(
            parameter.dtype == layout.dtype for parameter in parameters
        )
        buffer = self.communicator.empty_shared(layout.numel, layout.dtype)
        return Bucket(layout, parameters, buffer, is_gradient_view=is_view)

    def _arrived(self, index: int, _: torch.Tensor) -> None:
        """One gradient is complete on this rank. Called for every parameter: keep it short."""
        home = self._homes[index]
        if not self.is_synchronising or home is None:
            return
        if self.phase is not ReductionPhase.BACKWARD:
            self.begin_backward()
        bucket, place = home
        if bucket.arrived[place]:
            if bucket.layout.index < self._next or bucket.is_taken(place):
                self._refuse_late(bucket, place)
            return
        if bucket.takes(place):
            self._take(bucket, place)
        bucket.arrived[place] = 1
        bucket.missing -= 1
        if bucket.missing == 0 and bucket.layout.index == self._next:
            self._launch_ready()

    def _launch_ready(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._launch_next()

    @torch.no_grad()
    def _take(self, bucket: Bucket, place: int) -> None:
        bucket.take(place, self._current_factor())

    def _current_factor(self) -> float:
        """What gradients are multiplied by in this backward pass."""
        if self._factor is None:
            self._factor = self._mean if self._scale is None else self._scale()
        return self._factor

    @torch.no_grad()
    def _launch_next(self) -> None:
        bucket = self.buckets[self._next]
        bucket.fill(self._current_factor())
        if self.settings.is_watched:
            self.found_non_finite.extend(bucket.non_finite())
        bucket.launch(self.communicator)
        self._next += 1

    @torch.no_grad()
    def _finish(self) -> None:
        while self._next < len(self.buckets):
            self._launch_next()
        for bucket in self.buckets:
            bucket.finish()
        self._reset()

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        self._next = 0
        self._factor = None
        self.phase = ReductionPhase.IDLE

    def _refuse_late(self, bucket: Bucket, place: int) -> None:
        name = bucket.layout.slots[place].name
        raise RuntimeError(
            f"Expected to mark a variable ready only once. Rank {self.communicator.rank}: "
            f"parameter {name!r} got another gradient after the first had gone into "
            f"{bucket.layout.label!r}. A reentrant activation checkpoint around a module that is "
            "used twice does this: pass use_reentrant=False to torch.utils.checkpoint"
        )
