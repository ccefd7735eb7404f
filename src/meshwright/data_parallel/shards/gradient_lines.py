"""Reduce-scatter inputs: flat buffers of full gradients, one for each collective.

A buffer has memory from the first gradient that is put into it until its reduction has ended. A
gradient that would fill a buffer by itself is not copied: it is reduced in autograd's memory.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TypeAlias, cast

import torch

from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import local_of
from meshwright.comm.memory.reusable_storage import line_of
from meshwright.comm.streams import is_host
from meshwright.data_parallel.distributed_parameters import PartialSum
from meshwright.layout import LineLayout
from meshwright.torch_internals.tensors import (
    foreach_add_,
    foreach_copy_,
    foreach_zero_,
    join_in_chunks,
    storage_id,
    storage_users,
)

OURS = 3
"""Python references, seen from a function, to what only an attribute or a container holds."""

COUNTS = sys.version_info < (3, 14)
"""True when references can be counted: newer interpreters borrow some, and nothing is reused."""


class KeptLine:
    """A cached gradient buffer, with tensors on its memory that are reused together with it.

    Never hand out the buffer itself, only other tensors on its memory: their uses are counted.
    """

    def __init__(self) -> None:
        self.guests: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors on the line, each with the parameter that it is the gradient of: they are used
        again for as long as the line is."""
        self._line: torch.Tensor | None = None

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized buffer that nobody else uses: the cached one if possible."""
        line = self._line
        if line is None or line.dtype != dtype or line.device != device or line.numel() != numel:
            return self._renew(numel, dtype, device)
        # References: the attribute, the name here, the argument of the call.
        if not COUNTS or sys.getrefcount(line) > OURS or not self._is_unused(line):
            return self._renew(numel, dtype, device)
        return line

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is on the memory of the cached buffer."""
        return self._line is not None and tensor.data_ptr() == self._line.data_ptr()

    def forget(self) -> None:
        """Drop the cached buffer."""
        self._line = None
        self.guests = []

    def _renew(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.guests = []
        self._line = torch.empty(numel, dtype=dtype, device=device)
        return self._line

    def _is_unused(self, line: torch.Tensor) -> bool:
        """Whether only ``line`` and the guest tensors use the memory, and nobody uses these."""
        # One use each by the line, the storage that is asked for here, and each guest's local part,
        # or the storage that begins with that.
        lines = storage_id(line.untyped_storage())
        if storage_users(lines) != 2 + len(self.guests):
            return False
        for guest, parameter in self.guests:
            # References to a guest: the pair, the name, the argument. To its part: one less.
            if parameter.grad is guest or sys.getrefcount(guest) > OURS:
                return False
            part = local_of(guest)
            if part is guest:
                continue
            # References to the part: the name in its place. Uses: the part's, and the one here.
            storage = storage_id(part.untyped_storage())
            if sys.getrefcount(part) > OURS or (storage != lines and storage_users(storage) > 2):
                return False
        return True


_Place: TypeAlias = tuple[torch.Tensor, tuple[slice, ...] | list[int] | None]
"""A place in a line, and the part of a tensor: all of it, a box, or all in another shape."""


class GradientLine:
    """The gradients of the tensors ``indices`` of a layout, as one collective takes them.

    They are in shard order: all that goes to the first rank comes first.
    """

    def __init__(
        self,
        layout: LineLayout,
        indices: range,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.indices = indices
        """The tensors in it."""
        self.start, self.stop = layout.stretch(indices)
        """The elements of a shard between which its part lies."""
        self.numel = (self.stop - self.start) * layout.parts
        self._layout = layout
        self._memory = line_of(self.numel, dtype, device)
        self._line = self._memory.tensor
        self._rows = self._line.view(layout.parts, -1)
        self.tensor = self._line
        """What is reduced, 1-D: the line, or a gradient where autograd left it."""
        self.has_gradient = False
        """True when it holds something."""
        self._is_even = self._is_filled(layout) and all(
            layout.is_even(i) and 0 not in layout.shapes[i]  # torch refuses to join what is empty
            for i in indices
        )
        self._gaps_before = self._find_joins(layout, device)
        self._memory.free()

    # A line of even parts needs these only where a tensor has no gradient.

    @cached_property
    def _slots(self) -> list[list[_Place]]:
        with torch.inference_mode(False):
            return [self._places(self._layout, index) for index in self.indices]

    @cached_property
    def _targets(self) -> list[torch.Tensor]:
        return [target for slot in self._slots for target, _ in slot]

    @cached_property
    def _is_whole(self) -> bool:
        return all(place is None for slot in self._slots for _, place in slot)

    @cached_property
    def _gaps(self) -> list[torch.Tensor]:
        with torch.inference_mode(False):
            return self._find_gaps()

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Put whole gradients of its tensors (zeros for None) in place, or add them."""
        if self.has_gradient:
            self._add(gradients)
            return
        self.has_gradient = True
        if len(gradients) == 1 and self._is_even and self._may_borrow(gradients[0]):
            self.tensor = gradients[0].view(-1)  # pyrefly: ignore[missing-attribute]
            return
        self._memory.restore()
        is_full = type(None) not in map(type, gradients)
        present = cast("Sequence[torch.Tensor]", gradients)
        if is_full and self._gaps_before is not None:
            joined = present if self._is_even else self._with_gaps(present, self._gaps_before)
            if joined:
                join_in_chunks(joined, 0, self._rows.shape[0], out=self._rows)
            return
        if self._gaps:
            foreach_zero_(self._gaps)
        if is_full and self._is_whole and self._targets:
            foreach_copy_(self._targets, present)
            return
        targets, sources = self._pairs(gradients)
        if targets:
            foreach_copy_(targets, sources)

    def release(self) -> None:
        """Forget the gradients."""
        self.tensor, self.has_gradient = self._line, False
        self._memory.free()

    def parts(self) -> list[list[torch.Tensor]]:
        """List for each of its tensors the parts that hold its gradient."""
        if self.tensor is not self._line:
            return [[self.tensor]]
        return [[target for target, _ in slot] for slot in self._slots]

    def wholes(self, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """Return the full gradients, in ``shapes``: copies, or the borrowed gradient itself."""
        if self.tensor is not self._line:
            return [self.tensor.view(shapes[0])]
        found = []
        for shape, slot in zip(shapes, self._slots, strict=True):
            whole = self._line.new_zeros(shape)
            for target, place in slot:
                if isinstance(place, list):
                    whole.view(place).copy_(target)
                else:
                    (whole if place is None else whole[place]).copy_(target)
            found.append(whole)
        return found

    # --------------------------------------------------------------------------- private

    def _find_joins(self, layout: LineLayout, device: torch.device) -> list[int] | None:
        """Return the gap in elements before each tensor in a shard.

        None where joining all chunks costs no less than a copy for each: on hosts if there are gaps
        or short chunks, and where a tensor is sharded along another dim than 0.
        """
        if self._is_even:
            return [0 for _ in self.indices]
        if is_host(device) or not layout.cuts_dims or any(layout.chunked_layout().dims):
            return None
        sizes, found, at = layout.chunked_layout().sizes, list[int](), self.start
        for index in self.indices:
            found.append(layout.offsets[index] - at)
            at = layout.offsets[index] + sizes[index]
        return found

    def _with_gaps(
        self, gradients: Sequence[torch.Tensor], gaps: Sequence[int]
    ) -> list[torch.Tensor]:
        """List ``gradients`` and zeros for the gaps, without empty tensors, which torch refuses.

        Joining them also zeroes the ends of short chunks.
        """
        parts, found = self._rows.shape[0], list[torch.Tensor]()
        zeros = gradients[0].new_zeros(parts * max(gaps))
        for gradient, gap in zip(gradients, gaps, strict=True):
            found += [each for each in (zeros[: parts * gap], gradient) if each.numel()]
        return found

    def _may_borrow(self, gradient: torch.Tensor | None) -> bool:
        """Whether the collective can read ``gradient`` in place."""
        return (
            gradient is not None
            and self._rows.shape[0] > 1  # what every rank holds whole may be summed in place
            and gradient.dtype != torch.float16  # scaled in place before the sum
            and gradient.numel() == self.numel
            and gradient.dtype == self._line.dtype
            and gradient.is_contiguous()
        )

    def _add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        if self.tensor is not self._line:
            source, self.tensor = self.tensor, self._line
            self._memory.restore()
            self._line.copy_(source)
        targets, sources = self._pairs(gradients, zeroes=False)
        if targets:
            foreach_add_(targets, sources)

    def _pairs(
        self, gradients: Sequence[torch.Tensor | None], *, zeroes: bool = True
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for slot, gradient in zip(self._slots, gradients, strict=True):
            for target, place in slot:
                if gradient is None:
                    if zeroes:
                        target.zero_()
                    continue
                targets.append(target)
                if place is None:
                    sources.append(gradient)
                elif isinstance(place, tuple):
                    sources.append(gradient[place])
                else:
                    sources.append(gradient.reshape(place))
        return targets, sources

    def _places(self, layout: LineLayout, index: int) -> list[_Place]:
        if layout.is_even(index):
            # Even chunks of rows: one strided copy for all ranks.
            start = layout.offsets[index] - self.start
            size = math.prod(layout.shapes[index]) // layout.parts
            return [(self._rows[:, start : start + size], [layout.parts, size])]
        places: list[_Place] = []
        for part, cut in layout.stretches(index):
            start = part * self._rows.shape[1] + cut.offset - self.start
            place = self._line[start : start + math.prod(cut.shape)].view(cut.shape)
            places.append((place, None if cut.shape == cut.of else cut.slices))
        return places

    def _is_filled(self, layout: LineLayout) -> bool:
        """Whether evenly split tensors fill the buffer without gaps."""
        at = self.start
        for index in self.indices:
            if layout.offsets[index] != at:
                return False
            at += math.prod(layout.shapes[index]) // layout.parts
        return at == self.stop

    def _find_gaps(self) -> list[torch.Tensor]:
        """List the ranges of the buffer that belong to no tensor."""
        begin = int(self._line.storage_offset())
        width = int(self._rows.shape[1])
        taken: list[tuple[int, int]] = []
        for target in self._targets:
            first = int(target.storage_offset()) - begin
            if target.is_contiguous():
                taken.append((first, first + target.numel()))
            else:
                size = math.prod(target.shape[1:])
                taken += [(first + n * width, first + n * width + size) for n in range(len(target))]
        gaps: list[torch.Tensor] = []
        at = 0
        for first, last in [*sorted(taken), (self.numel, self.numel)]:
            if first > at:
                gaps.append(self._line[at:first])
            at = max(at, last)
        return gaps


Summand = tuple[PartialSum, torch.Tensor]
"""A gradient, or a part of one, and the sum that it needs over other axes."""


def summands_of(sums: Sequence[tuple[int, PartialSum]], line: GradientLine) -> list[Summand]:
    """List the full gradients in ``line`` of tensors in ``sums``, each with its `PartialSum`."""
    parts = line.parts()
    return [(add, part) for index, add in sums for part in parts[index]]


@torch.no_grad()
def sum_parts(summands: Iterable[Summand]) -> None:
    """Sum in place: a collective, with one all-reduce for each axis, dtype and device."""
    together: dict[tuple[Communicator, torch.dtype, torch.device], list[torch.Tensor]] = {}
    for add, part in summands:
        if part.numel():
            key = (add.communicator, part.dtype, part.device)
            together.setdefault(key, []).append(part)
    for (axis, _, _), parts in together.items():
        line = torch.cat([part.reshape(-1) for part in parts]).to(axis.device)
        axis.all_reduce(line, label="partial gradients").wait()
        sums = line.split([part.numel() for part in parts])
        foreach_copy_(
            parts, [each.view(part.shape) for each, part in zip(sums, parts, strict=True)]
        )
