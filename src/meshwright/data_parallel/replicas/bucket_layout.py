"""Which gradients are reduced together, and in which order: fixed by parameter index.

Layouts depend only on the model and the settings, so every rank and every run has the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from meshwright.data_parallel.replicas.options import ReductionSettings
from meshwright.layout import FlatLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSlot:
    """One trainable parameter as a bucket sees it; ``dtype`` is the dtype of the reduction."""

    index: int
    """Position among all parameters, in registration order."""
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_alone: bool = False
    """Reduced in its own memory and not in a bucket's buffer."""
    is_sparse: bool = False
    """Its gradients are sparse, see `SparseGradient`; it is alone too."""
    turn: int = 0
    """Reduced after all with a lower one."""
    group: int = 0
    """The ranks that it is reduced over: 0 for all, others for those that hold the same experts."""
    most: int = 0
    """Elements of the largest part on any rank, where ranks hold parts: plans must be equal."""

    @property
    def bytes(self) -> int:
        """The bytes of the gradient in the dtype of the reduction, on the rank with most."""
        return max(self.most, math.prod(self.shape)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """The parameters of one reduction, and the places of their gradients in its buffer."""

    index: int
    """Position in the order of the launches."""
    label: str
    """The name of the reduction in records and reports."""
    slots: tuple[GradientSlot, ...]
    dtype: torch.dtype
    flat: FlatLayout
    is_alone: bool = False
    """One gradient in its own memory; another bucket carries its use count."""
    is_sparse: bool = False
    """One sparse gradient, which sends its own use count."""
    group: int = 0
    """That of its slots."""
    notes: int = 0
    """Numbers after the gradients: use counts, and what else all ranks must know of each other."""

    @property
    def numel(self) -> int:
        """Elements of the buffer: the gradients and the notes."""
        return self.flat.numel + self.notes

    @property
    def bytes(self) -> int:
        """Bytes that one reduction moves on this rank."""
        return self.numel * self.dtype.itemsize


def slot_of(
    index: int,
    names: Sequence[str],
    parameter: torch.nn.Parameter,
    settings: ReductionSettings,
    *,
    may_be_alone: bool,
    group: int = 0,
    most: int = 0,
) -> GradientSlot:
    """Describe ``parameter``, number ``index`` of ``names``, for the bucket layout."""
    dtype = parameter.dtype
    if settings.reduce_dtype is not None and dtype.is_floating_point:
        dtype = settings.reduce_dtype
    return GradientSlot(
        index=index,
        name=names[index],
        shape=tuple(parameter.shape),
        dtype=dtype,
        is_alone=may_be_alone
        and max(parameter.numel(), most) * dtype.itemsize >= settings.alone_bytes
        and parameter.dtype == dtype
        and is_dense(parameter),
        is_sparse=names[index] in settings.sparse,
        turn=_turn(index, names, settings),
        group=group,
        most=most,
    )


def _turn(index: int, names: Sequence[str], settings: ReductionSettings) -> int:
    """The sort key that puts delayed parameters right after the bucket they wait for."""
    if not settings.delayed:
        return 0
    if names[index] in settings.delayed:
        return 1
    trigger = names.index(settings.trigger) if settings.trigger in names else 0
    return 0 if index >= trigger else 2


def plan_buckets(
    slots: Sequence[GradientSlot],
    *,
    first_bytes: int,
    cap_bytes: int,
    listed_bytes: Sequence[int] = (),
    extra_notes: int = 0,
    is_packed: bool = False,
) -> tuple[BucketLayout, ...]:
    """Put ``slots`` into buckets, last registered parameter first.

    A backward pass produces the last layers' gradients first. The first bucket of a dtype is small
    (``first_bytes``), so that communication starts early. A bucket is closed once it has reached
    its size; buckets are reduced in the order of closing. ``listed_bytes`` gives the sizes one by
    one, the last of them for all that follow. The last bucket, which is reduced over all ranks,
    also carries the use counts of gradients that are reduced alone and ``extra_notes`` more
    numbers. With ``is_packed`` a gradient
    is reduced alone only where its bucket would hold no other and is not the last: on a device
    several operations take much longer than one with as many bytes.

    Alternatives considered: ordering by arrival, measured in the first iteration, overlaps a little
    better for models that are registered out of order, but changes the last bits of Gloo's sums
    between the first and the second iteration, and a resumed run would differ.
    """
    closed: list[list[GradientSlot]] = []
    open_by_kind: dict[tuple[int, torch.dtype], list[GradientSlot]] = {}
    limits = list(listed_bytes) or [first_bytes, cap_bytes]
    counts: dict[tuple[int, torch.dtype], int] = {}
    turn = (0, False)
    # Sparse gradients come last in their turn: tables are where a backward pass ends.
    for slot in sorted(slots, key=lambda slot: (slot.turn, slot.is_sparse, -slot.index)):
        if (slot.turn, slot.is_sparse) > turn:
            turn = (slot.turn, slot.is_sparse)
            closed.extend(open_by_kind.values())
            open_by_kind.clear()
        if slot.is_sparse or (slot.is_alone and not is_packed):
            closed.append([slot])
            continue
        kind = slot.group, slot.dtype
        current = open_by_kind.setdefault(kind, [])
        current.append(slot)
        number = counts.get(kind, 0)
        if sum(member.bytes for member in current) >= limits[min(number, len(limits) - 1)]:
            counts[kind] = number + 1
            closed.append(open_by_kind.pop(kind))
    # What all ranks reduce comes last, since that carries the notes.
    closed.extend(sorted(open_by_kind.values(), key=lambda members: members[0].group == 0))
    if is_packed and closed and extra_notes and not closed[-1][0].group:
        closed[-1] = [replace(slot, is_alone=False) for slot in closed[-1]]
    layouts = [_layout(index, members) for index, members in enumerate(closed)]
    riders = sum(layout.is_alone for layout in layouts) + extra_notes
    if not riders:
        return tuple(layouts)
    if not layouts or layouts[-1].is_alone or layouts[-1].is_sparse or layouts[-1].group:
        layouts.append(_layout(len(layouts), []))
    layouts[-1] = replace(layouts[-1], notes=layouts[-1].notes + riders)
    return tuple(layouts)


def _layout(index: int, members: Sequence[GradientSlot]) -> BucketLayout:
    dtype = members[0].dtype if members else torch.float32
    is_sparse = len(members) == 1 and members[0].is_sparse
    is_alone = len(members) == 1 and members[0].is_alone and not is_sparse
    flat = FlatLayout.pack(
        [slot.name for slot in members],
        [slot.shape for slot in members],
        str(dtype).removeprefix("torch."),
        1,
    )
    return BucketLayout(
        index=index,
        label=f"reduce bucket {index}",
        slots=tuple(members),
        dtype=dtype,
        flat=flat,
        is_alone=is_alone,
        is_sparse=is_sparse,
        group=members[0].group if members else 0,
        notes=0 if is_alone or is_sparse else len(members),
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the strides cover ``tensor.numel()`` contiguous elements, without holes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
