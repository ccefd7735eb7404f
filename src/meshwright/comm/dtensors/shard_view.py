"""ShardView: a tensor with the shape of the whole that holds one flat range of its elements.

It represents an element-granular shard in state dicts. torch's distributed checkpoint saves and
loads it without communication, by the boxes of the range, at any number of ranks.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import torch
import torch.distributed as dist

from meshwright.comm.collectives import Communicator
from meshwright.errors import LayoutError
from meshwright.layout import Box, boxes
from meshwright.torch_internals.distributed import TensorShard as Shard
from meshwright.torch_internals.tensors import (
    COMPARISON,
    make_wrapper_subclass,
    to_copy_operator,
    without_function,
)

# Only torch's checkpoint calls for these, and has loaded itself then: that takes half a second.
if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

aten = torch.ops.aten

Ranges = list[tuple[int, int]]
"""(first row, rows) of the whole along one dim, in the order in which a local tensor has them.

A strided placement gives a rank rows from several places, laid end to end: ``[(0, 2), (4, 2)]`` are
the four rows 0, 1, 4 and 5.
"""


def boxes_in(ranges: Sequence[Ranges], local: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """List the boxes of ``ranges``, each with its memory in ``local``."""
    found: list[tuple[Box, torch.Tensor]] = []
    starts = [list(itertools.accumulate((n for _, n in held), initial=0)) for held in ranges]
    for numbers in itertools.product(*(range(len(held)) for held in ranges)):
        cut = [held[number] for held, number in zip(ranges, numbers, strict=True)]
        box = Box(tuple(a for a, _ in cut), tuple(n for _, n in cut))
        at = [held[number] for held, number in zip(starts, numbers, strict=True)]
        found.append((box, local[Box(tuple(at), box.shape).slices()]))
    return found


def length_of(ranges: Ranges) -> int:
    return sum(rows for _, rows in ranges)


def narrowed(ranges: Ranges, start: int, count: int) -> Ranges:
    """Cut ``count`` rows, from row ``start`` on, out of the concatenated ``ranges``."""
    found: Ranges = []
    for first, rows in ranges:
        skipped = min(start, rows)
        taken = min(rows - skipped, count)
        if taken:
            found.append((first + skipped, taken))
        start, count = start - skipped, count - taken
    return found


def gather_boxes(
    axis: Communicator, parts: Sequence[tuple[Box, torch.Tensor]], like: torch.Tensor, label: str
) -> tuple[torch.Tensor, int]:
    """Gather the boxes that the ranks of ``axis`` hold of a tensor shaped like ``like``.

    Returns the full tensor, on the device of ``axis``, and the number of elements gathered.
    """
    places = [[box.offset, box.shape] for box, _ in parts]
    everyones = axis.gather_values(places, label=label)
    # All parts travel in the size of the largest, padded with zeros.
    room = max(sum(math.prod(sizes) for _, sizes in each) for each in everyones)
    line = torch.zeros(room, dtype=like.dtype, device=axis.device)
    start = 0
    for box, memory in parts:
        line[start : start + box.numel].view(box.shape).copy_(memory)
        start += box.numel
    gathered = line.new_empty(axis.size * room)
    axis.all_gather(gathered, line, label=label).wait()
    found, count = line.new_zeros(like.shape), 0
    for each, part in zip(everyones, gathered.view(axis.size, room), strict=True):
        for offset, sizes in each:
            box = Box(tuple(offset), tuple(sizes))
            found[box.slices()] = part[: box.numel].view(box.shape)
            part, count = part[box.numel :], count + box.numel
    return found, count


class ShardView(torch.Tensor):
    """Elements ``start`` to ``start + local.numel()`` of a row-major tensor of ``shape``.

    ::

        a, shape (3, 4)      ShardView(local, 3, (3, 4)), local of 6 elements
        . . . 3              boxes   (0, 3) + (1, 1)
        4 5 6 7                      (1, 0) + (1, 4)
        8 . . .                      (2, 0) + (1, 1)

    ``local`` is 1-D and not copied. ``.shape`` is that of the whole tensor. ``.to``, ``.clone``,
    ``.cpu``, ``.detach`` and ``.copy_`` act on the local elements; any computation raises
    RuntimeError, naming the tensor, so an optimizer over views raises in its step. `torch.equal`,
    `torch.isclose`, `torch.allclose` and `torch.testing.assert_close` compare this rank's elements
    with those of a view of the same range, or of a whole tensor. ``communicator`` spans the ranks
    that hold the other ranges; only ``full_tensor`` needs it.

    With ``within``, which lists rows of the whole for each dim, the range belongs to the tensor of
    these rows: this rank's part of a DTensor. For our own checkpoints, which read `boxes`.
    """

    local: torch.Tensor
    """This rank's elements, 1-D; writing to them writes to the shard."""
    start: int
    """The first element, counted in the flattened whole tensor."""
    name: str = ""
    """The name that messages call it by."""

    def __new__(
        cls, local: torch.Tensor, start: int, shape: Sequence[int], **options: object
    ) -> Self:
        """Make a tensor without memory of its own."""
        view = make_wrapper_subclass(cls, torch.Size(shape), dtype=local.dtype, device=local.device)
        return cast("Self", view)

    def __init__(
        self,
        local: torch.Tensor,
        start: int,
        shape: Sequence[int],
        *,
        name: str = "",
        communicator: Communicator | None = None,
        within: Sequence[Ranges] = (),
    ) -> None:
        """Check the range. Raises `LayoutError` if it does not fit ``shape``."""
        super().__init__()
        numel = math.prod(map(length_of, within) if within else shape)
        if local.ndim != 1 or start < 0 or start + local.numel() > numel:
            raise LayoutError(
                f"{name or 'a ShardView'}: expected a 1-D range within the {numel} elements of "
                f"shape {tuple(shape)}, found shape {tuple(local.shape)} from element {start} on"
            )
        self.local = local.detach()
        self.start = start
        self.name = name
        self.communicator = communicator
        """The ranks that hold the other ranges, where that is known."""
        self._within = within

    # ------------------------------------------------------------------ what it holds

    @property
    def stop(self) -> int:
        return self.start + self.local.numel()

    def boxes(self) -> list[tuple[Box, torch.Tensor]]:
        """List the boxes of the range, each with its elements as a view of ``local``."""
        found: list[tuple[Box, torch.Tensor]] = []
        at = 0
        rows = self._within or [[(0, size)] for size in self.shape]
        for box in boxes([length_of(each) for each in rows], self.start, self.stop):
            part = self.local[at : at + box.numel].view(box.shape)
            cut = [narrowed(*own) for own in zip(rows, box.offset, box.shape, strict=True)]
            found += boxes_in(cut, part)
            at += box.numel
        if self.numel() == 0 and self.ndim:  # one empty box, so that a reader finds the tensor
            found = [(Box((0,) * self.ndim, tuple(self.shape)), self.local.view(self.shape))]
        return found

    def to_local(self) -> torch.Tensor:
        """Return ``local``; the name is DTensor's."""
        return self.local

    def local_shards(self) -> list[Shard]:
        """List the boxes as ShardedTensor does, each on the memory of ``local``."""
        rank = 0 if self.communicator is None else self.communicator.ranks[self.communicator.rank]
        return [
            Shard.from_tensor_and_offsets(part, list(box.offset), rank)
            for box, part in self.boxes()
        ]

    def full_tensor(self) -> torch.Tensor:
        """Gather the full tensor on every rank; a collective over the communicator.

        A view without a communicator, or of a part, is returned as a copy if it holds all elements.
        Raises RuntimeError if it does not, or if the ranks together do not hold all elements.
        """
        # With a communicator also a rank that holds all takes part: the others count on it.
        communicator = self.communicator
        if communicator is None or self._within:
            if self.local.numel() == self.numel():
                return self.local.view(self.shape).clone()
            raise RuntimeError(
                f"{self._called()} was made without a communicator, or is of a part, so the other "
                "ranges cannot be gathered: build it with communicator=, or load it through a "
                "checkpoint"
            )
        label = f"full tensor {self.name}"
        full, count = gather_boxes(communicator, self.boxes(), self, label)
        if count < full.numel():
            raise RuntimeError(
                f"{self._called()}: the ranks of axis {communicator.axis} hold {count} of "
                f"{full.numel()} elements"
            )
        return full.to(self.device)

    # ------------------------------------------------------------------ torch's checkpoint protocol

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        metadata, planner = dist.checkpoint.metadata, dist.checkpoint.planner
        return [
            planner.WriteItem(
                index=metadata.MetadataIndex(fqn, torch.Size(box.offset)),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    chunk=_chunk(box),
                    properties=metadata.TensorProperties.create_from_tensor(self.local),
                    size=self.shape,
                ),
            )
            for box, _ in self.boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box, _ in self.boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the elements of the box that begins at ``index.offset``, as a view."""
        for box, part in self.boxes():
            if index.offset is None or tuple(index.offset) == box.offset:
                return part
        offsets = [box.offset for box, _ in self.boxes()]
        raise ValueError(
            f"{index.fqn}: no box begins at {index.offset}; this rank's begin at {offsets}"
        )

    # ------------------------------------------------------------------ as a tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run comparisons (``equal``, ``allclose``, ``isclose``) on this rank's elements alone.

        Other functions go on to `__torch_dispatch__`.
        """
        del types
        options = dict(kwargs or {})
        with without_function():
            if func in _COMPARISONS:
                return _compared(func, args, options)
            # It counts what differs in the elements that were compared.
            if func is torch.Tensor.flatten and _called_from(COMPARISON):
                return args[0].local
            return func(*args, **options)

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override] # torch's own annotation lacks `func`
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run operators that move elements; raise for those that compute."""
        del types
        options = dict(kwargs or {})
        if func in _MOVES:
            view = args[0]
            # It names the dims of the whole tensor, and the local elements have one.
            options.pop("memory_format", None)
            moved = func(view.local, *args[1:], **options)
            return view._with(cast("torch.Tensor", moved))
        if func in _NEW:
            view, size = args[0], tuple(args[1])
            made = func(view.local, view.local.shape if size == view.shape else size, **options)
            return view._with(made) if size == view.shape else made
        if func is aten.copy_.default:
            return _copy(args[0], args[1])
        if func is aten.is_pinned.default:
            return args[0].local.is_pinned()
        view = next(_views([*args, *options.values()]))
        # Not TypeError: torch's arithmetic turns that into "unsupported operand", without the name.
        raise RuntimeError(
            f"{view._called()} holds {view.local.numel()} of {view.numel()} elements, so {func} "
            "cannot be computed on it. It is for state dicts: use .local for this rank's elements, "
            ".full_tensor() for all, and give optimizers the state that "
            "FullyShardedDataParallel.optim_state_dict_to_load returns"
        )

    def _with(self, local: torch.Tensor) -> ShardView:
        return ShardView(
            local,
            self.start,
            self.shape,
            name=self.name,
            communicator=self.communicator,
            within=self._within,
        )

    def _elements_of(self, other: torch.Tensor) -> torch.Tensor:
        """Cut this view's range out of a view or a whole tensor."""
        if not isinstance(other, ShardView):
            return other.reshape(-1)[self.start : self.stop]
        if (other.start, other.stop) != (self.start, self.stop):
            raise ValueError(
                f"{self._called()} holds elements {self.start} to {self.stop}, the other "
                f"{other.start} to {other.stop}: reshard through a checkpoint"
            )
        return other.local

    def _called(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"ShardView{name} of shape {tuple(self.shape)}"

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"ShardView({self.local!r}, start={self.start}, shape={tuple(self.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardView:
        copy = self._with(self.local.clone())
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, proto: object) -> tuple[Any, ...]:
        # A copy: files hold all the memory that a view looks at, which may be a whole unit's.
        own = (self.local.clone(), self.start, tuple(self.shape), self.name)
        return _rebuild, (*own, self._within) if self._within else own


_MOVES = frozenset(
    {
        to_copy_operator,
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.empty_like.default,
        aten.zeros_like.default,
    }
)
"""Operators that give a view with the same range."""

_NEW = frozenset({aten.new_empty.default, aten.new_zeros.default})
"""Operators that give such a view for the shape of the whole, and a plain tensor for another."""

_COMPARISONS = frozenset(
    {
        torch.allclose,
        torch.equal,
        torch.isclose,
        torch.Tensor.allclose,
        torch.Tensor.equal,
        torch.Tensor.isclose,
    }
)


def _rebuild(
    local: torch.Tensor,
    start: int,
    shape: Sequence[int],
    name: str,
    within: Sequence[Ranges] = (),
) -> ShardView:
    """Make a view from a pickle, without its communicator."""
    return ShardView(local, start, shape, name=name, within=within)


torch.serialization.add_safe_globals([_rebuild])  # for `torch.load(..., weights_only=True)`


def _compared(func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:  # noqa: ANN401
    """Apply ``func`` to this rank's elements of two tensors."""
    left, right = args[0], args[1] if len(args) > 1 else options.pop("other")
    view = left if isinstance(left, ShardView) else right
    if tuple(left.shape) != tuple(right.shape):
        raise ValueError(
            f"{view._called()}: expected another tensor of the same shape, found "
            f"{tuple((right if view is left else left).shape)}"
        )
    return func(view._elements_of(left), view._elements_of(right), *args[2:], **options)


def _called_from(module: str) -> bool:
    """Whether the function being handled was called from ``module``."""
    # 0 is this frame, 1 that of `__torch_function__`, 2 that of its caller.
    return sys._getframe(2).f_globals.get("__name__") == module


def _chunk(box: Box) -> ChunkStorageMetadata:
    return dist.checkpoint.metadata.ChunkStorageMetadata(
        offsets=torch.Size(box.offset), sizes=torch.Size(box.shape)
    )


def _views(values: Iterable[object]) -> Iterator[ShardView]:
    for value in values:
        if isinstance(value, ShardView):
            yield value
        elif isinstance(value, Iterable) and not isinstance(value, str | torch.Tensor):
            yield from _views(value)


def _copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Fill ``target`` from a view of the same range, or from a whole tensor."""
    if not isinstance(target, ShardView):
        assert isinstance(source, ShardView)
        raise RuntimeError(
            f"{source._called()} holds {source.local.numel()} of {source.numel()} elements and "
            "cannot fill a whole tensor: use .full_tensor()"
        )
    if tuple(source.shape) != tuple(target.shape):
        raise ValueError(
            f"{target._called()}: expected a source of the same shape, found {tuple(source.shape)}"
        )
    target.local.copy_(target._elements_of(source))
    return target
