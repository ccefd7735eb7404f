"""The gradients that are reduced together, and their order: fixed by parameter index.

Nothing here runs: the layouts are the same on every rank and in every run, because they depend on
the model and the settings alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from meshwright.comm import Communicator
from meshwright.gradients import Factor, NonFiniteValues
from meshwright.layout import FlatLayout
from meshwright.torch_internals.autograd import after_hooks_of

ARRIVED, CAME_EMPTY = 1, 2
"""A gradient in this backward pass; one that a function of the graph has left undefined."""


class Arrivals:
    """The gradients that a backward pass has yet to bring. Hooks hold it: it refers to no tensor.

    Hooks count in it while `is_open`. They leave the rest to the reducer: the first gradient of
    a pass, the last of a bucket, a second one of a parameter, one that is None.
    """

    def __init__(self) -> None:
        self.is_open = False
        """True in a pass that reduces in hooks."""
        self.homes: Sequence[tuple[bytearray, int, int] | None] = ()
        """Of each parameter the marks of its bucket, its place in them, and the bucket's number."""
        self.missing: list[int] = []
        """Of each bucket, the parameters without a gradient so far in this backward pass."""

    def arrange(self, homes: Sequence[tuple[bytearray, int, int] | None]) -> None:
        """Count by ``homes`` from the next pass on."""
        self.homes = homes

    def open(self, is_open: bool) -> None:
        """Have hooks count from now on, or leave all to the reducer."""
        self.is_open = is_open

    def start_over(self, sizes: Sequence[int]) -> None:
        """Close a pass: buckets of ``sizes`` lack all their gradients."""
        self.missing, self.is_open = list(sizes), False


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSlot:
    """One trainable parameter as a bucket sees it. ``dtype`` is that of the reduction."""

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

    @property
    def bytes(self) -> int:
        """The bytes of the gradient while it is reduced."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """The parameters of one reduction, and the places of their gradients in its buffer."""

    index: int
    """Position in the order of the launches."""
    slots: tuple[GradientSlot, ...]
    dtype: torch.dtype
    flat: FlatLayout
    is_alone: bool = False
    """One gradient in its own memory; its use count rides elsewhere."""
    is_sparse: bool = False
    """One sparse gradient, which sends its own use count."""
    notes: int = 0
    """Numbers behind the gradients: use counts, and what else all ranks must know of each other."""

    @property
    def label(self) -> str:
        """The name of the reduction in records and reports."""
        return f"reduce bucket {self.index}"

    @property
    def numel(self) -> int:
        """Elements of the buffer: the gradients and the notes."""
        return self.flat.numel + self.notes

    @property
    def bytes(self) -> int:
        """Bytes that one reduction moves on this rank."""
        return self.numel * self.dtype.itemsize


class Reduction(ABC):
    """One reduction of each backward pass: gradients of this rank become means over all.

    ``take`` (large gradients) -> ``fill`` -> ``launch`` -> ``finish``, and ``deliver`` where a
    communication hook reduces.
    """

    is_buffer = False
    """True where a communication hook sees it as a bucket."""
    notes: torch.Tensor | None = None
    """All numbers behind the gradients; None where there are none."""
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

    def tensors(self) -> Iterator[torch.Tensor]:
        """Its gradients, in as few tensors as hold them; of a sparse one the values."""
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is not None:
                yield gradient.coalesce().values() if gradient.is_sparse else gradient

    def reset(self) -> None:
        """Forget the last backward pass."""
        self.arrived[:] = self.taken[:] = bytes(len(self.parameters))
        self.known = None

    def begin(self) -> None:
        """Look at what a backward pass that begins finds: called where the layout is alone."""
        return

    def used(self) -> Sequence[bool]:
        """By parameter, whether this rank has a gradient, where others need to know."""
        return ()

    def know(self, used: Sequence[bool]) -> None:
        """Note for which parameters any rank has a gradient."""
        self.known = used

    def takes(self, slot: int) -> bool:
        """Whether `take` should have this gradient as soon as it is there."""
        return False

    def take(self, slot: int, scale: Factor) -> None:
        """Take one gradient, times ``scale``, for which `takes` holds."""
        return

    @abstractmethod
    def fill(self, scale: Factor) -> None:
        """Take this rank's gradients, times ``scale``."""

    @abstractmethod
    def stand_in(self, *, is_void: bool) -> None:
        """Take part without a gradient, or visibly void: this rank gave up its backward pass."""

    @abstractmethod
    def launch(self, communicator: Communicator) -> None:
        """Start the reduction; `finish` waits for it."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the means and make them the parameters' gradients, but for those of a hook."""

    @abstractmethod
    def drop(self) -> None:
        """Take part to the end in a reduction whose result nobody wants."""

    @abstractmethod
    def look(self, values: NonFiniteValues) -> None:
        """Have ``values`` note what is not finite of what it holds."""

    def await_hook(self, *, unless: type | None = None) -> None:
        """Wait for the communication hook, ``unless`` its future is of that type."""
        return

    def deliver(self) -> None:
        """Make what a communication hook has left the parameters' gradients."""
        return

    def unused(self) -> Sequence[int]:
        """List the parameters that no rank had a gradient of in the last reduction."""
        return ()


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

    The last layers' gradients come first in a backward pass. The first bucket of a dtype is small
    (``first_bytes``), so that communication starts early; a bucket is closed once it has reached
    its size, and reduced in the order of closing. ``listed_bytes`` gives the sizes one by one, the
    last of them for all that follow. The last bucket carries the use counts of gradients that are
    reduced alone and ``extra_notes`` more numbers. The result depends on nothing but the
    arguments, so it is the same on every rank and in every run. With ``is_packed`` a gradient is
    reduced alone only where its bucket would hold no other, and is not the last: a device takes
    much longer for several operations than for one of as many bytes.

    Alternatives considered: an order by arrival, measured in the first iteration, overlaps a
    little better for models that are registered out of order, but changes the last bits of Gloo's
    sums between the first and the second iteration, and a resumed run would differ.
    """
    closed: list[list[GradientSlot]] = []
    open_by_dtype: dict[torch.dtype, list[GradientSlot]] = {}
    limits = list(listed_bytes) or [first_bytes, cap_bytes]
    counts: dict[torch.dtype, int] = {}
    turn = (0, False)
    # Sparse gradients come last in their turn: tables are where a backward pass ends.
    for slot in sorted(slots, key=lambda slot: (slot.turn, slot.is_sparse, -slot.index)):
        if (slot.turn, slot.is_sparse) > turn:
            turn = (slot.turn, slot.is_sparse)
            closed.extend(open_by_dtype.values())
            open_by_dtype.clear()
        if slot.is_sparse or (slot.is_alone and not is_packed):
            closed.append([slot])
            continue
        current = open_by_dtype.setdefault(slot.dtype, [])
        current.append(slot)
        number = counts.get(slot.dtype, 0)
        if sum(member.bytes for member in current) >= limits[min(number, len(limits) - 1)]:
            counts[slot.dtype] = number + 1
            closed.append(open_by_dtype.pop(slot.dtype))
    closed.extend(open_by_dtype.values())
    if is_packed and closed and extra_notes:
        closed[-1] = [replace(slot, is_alone=False) for slot in closed[-1]]
    layouts = [_layout(index, members) for index, members in enumerate(closed)]
    riders = sum(layout.is_alone for layout in layouts) + extra_notes
    if not riders:
        return tuple(layouts)
    if not layouts or layouts[-1].is_alone or layouts[-1].is_sparse:
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
        slots=tuple(members),
        dtype=dtype,
        flat=flat,
        is_alone=is_alone,
        is_sparse=is_sparse,
        notes=0 if is_alone or is_sparse else len(members),
    )


def sparse_gradient(slot: GradientSlot, gradient: torch.Tensor) -> RuntimeError:
    """The error for a gradient that has no place in a buffer."""
    return RuntimeError(
        f"parameter {slot.name!r} has a sparse gradient ({gradient.layout}), and no module that "
        "announces one: replicate reduces sparse gradients of nn.Embedding and nn.EmbeddingBag "
        "with sparse=True. Use one of them, or put the module into ignored_modules"
    )


def lost_gradient(slot: GradientSlot) -> RuntimeError:
    """The error for a gradient that somebody has used up before it was the mean."""
    return RuntimeError(
        f"parameter {slot.name!r} got a gradient in this backward pass, and had none any more when "
        "it was to be summed over the ranks: a hook took it, which has seen the gradient of this "
        "rank alone. Step after backward(), or register optimizer_in_backward_hook of "
        "meshwright.data_parallel.comm_hooks with register_comm_hook"
    )


def came_empty(parameter: torch.Tensor) -> int:
    """The mark of an empty arrival: `CAME_EMPTY`, or `ARRIVED` if a hook may have taken it.

    Autograd runs hooks also where a function of the graph has returned None.
    """
    hooks = after_hooks_of(parameter) or {}
    first = next(iter(hooks.values()), None)
    is_ours = getattr(first, "__module__", "").startswith("meshwright.data_parallel.")
    return CAME_EMPTY if is_ours else ARRIVED
