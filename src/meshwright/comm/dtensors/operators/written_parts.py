"""Writes to views of DTensors, such as ``weight[0].zero_()``, change the DTensor itself.

torch gathers a DTensor before it takes rows along a sharded dim, and a write to these rows would be
lost with the copy, as for the padding row of an `nn.Embedding` that is initialized after sharding.
Here each rank copies its part back; nothing is sent::

    weight          Shard(0)      rows 0 1 on rank 0, 2 3 on rank 1
    weight[:3]      Replicate()   a view of a copy of rows 0 1 2 3, on each rank
    .zero_()                      writes to the copy, of which each rank keeps its two rows
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.comm.dtensors.dtensor import AtRest, at_rest, local_of
from meshwright.comm.dtensors.gather_dtensor import ranges_held
from meshwright.comm.dtensors.operators.corrected import correct_operators
from meshwright.comm.dtensors.operators.derivatives import differentiate_moves
from meshwright.comm.dtensors.operators.random_values import draw_whole
from meshwright.comm.dtensors.shard_view import Ranges
from meshwright.torch_internals.autograd import running_backward
from meshwright.torch_internals.distributed import (
    DTensorSpec,
    dtensor_handlers,
    on_gathered_views,
    without_handler,
)
from meshwright.torch_internals.tensors import operator_names, schema_of, storage_id, version_of

_Operator = Callable[..., Any]
_COPY = "_meshwright_copy"
"""The attribute of a copy's memory that says what it is a copy of."""


@functools.cache
def write_through() -> None:
    """Have writes to views of DTensors change the DTensors, for the whole process.

    Once a view has needed a gather, each write to a DTensor costs an extra check.
    """
    draw_whole()
    correct_operators()
    differentiate_moves()
    on_gathered_views(_note)


def _note(op: _Operator, tensor: DTensor, gathered: torch.Tensor, lies: DTensorSpec) -> None:
    """Record on the memory of ``gathered`` what it is a copy of."""
    memory = gathered.untyped_storage()
    if storage_id(memory) != storage_id(local_of(tensor).untyped_storage()):
        _watch_writes()
        setattr(memory, _COPY, _Copy(str(op), tensor, gathered, lies))


class _Copy:
    """A copy that torch has gathered from a DTensor to take views of it."""

    __slots__ = ("_of", "changes", "is_traced", "lies", "rest", "taken_by", "view")

    def __init__(self, taken_by: str, of: DTensor, copy: torch.Tensor, lies: DTensorSpec) -> None:
        self.taken_by = taken_by
        # Not the DTensor itself, with the graph that it hangs on.
        self._of, self.rest = weakref.ref(of), at_rest(of)
        # Parts of gradients are the engine's, to add to when the whole is gone. A forward that it
        # computes once more has grad mode on.
        is_engine = running_backward() != -1 and not torch.is_grad_enabled()
        self.changes = None if is_engine or of.is_inference() else self._count()
        self.lies = lies
        self.is_traced = type(copy) is not torch.Tensor
        # Not the copy, on whose memory this is noted: neither would be given back.
        self.view = copy.storage_offset(), tuple(copy.shape), tuple(copy.stride())

    def _count(self) -> int:
        """Sum the writes to the DTensor, while it is alive, and to its local tensor."""
        of = self._of()
        return version_of(self.rest.local) + (0 if of is None else version_of(of))

    def places(self, copy: torch.Tensor) -> list[torch.Tensor | None]:
        """Return, for each dim, the rows of the copy that this rank holds; None for all.

        Raises RuntimeError if the DTensor was written since it was copied, and in a compiled
        function; `LayoutError` for a Partial.
        """
        if self.is_traced:
            raise RuntimeError(
                f"a compiled function writes to a part that {self.taken_by} took of a DTensor of "
                f"shape {self.rest.shape}, {self.rest.placements}: where ranks hold rows of "
                "their own, a part is of a copy. Write to it outside of the compiled function"
            )
        if self.changes is not None and self.changes < self._count():
            raise RuntimeError(
                f"expected a part that is not older than its DTensor of shape "
                f"{self.rest.shape}, {self.rest.placements}, found one that {self.taken_by} "
                "took before the last write to that: where ranks hold rows of their own, a part is "
                "of a copy. Take it again after each write to the DTensor"
            )
        name = f"a DTensor of which {self.taken_by} took a part that is written to"
        everything = AtRest(
            local=copy,
            mesh=self.lies.mesh,
            placements=tuple(self.lies.placements),
            shape=tuple(self.lies.shape),
            stride=tuple(self.lies.stride),
        )
        held = ranges_held(self.rest, name)
        return [
            None if rows == of else torch.searchsorted(_rows(of), _rows(rows)).to(copy.device)
            for rows, of in zip(held, ranges_held(everything, name), strict=True)
        ]

    def bring_back(
        self, written: torch.Tensor, places: Sequence[torch.Tensor | None], writes: int
    ) -> None:
        """Copy what was ``written`` to the copy back into the DTensor.

        The operator counts as ``writes`` writes, once it is done.
        """
        start, shape, stride = self.view
        held, memory = self.rest.local.detach(), written.untyped_storage()
        copy = held.new_empty(0).set_(memory, start, shape, stride)
        count = memory.nbytes() // copy.itemsize
        is_written = torch.zeros(count, dtype=torch.bool, device=copy.device)
        if written.dtype == copy.dtype:
            at = written.shape, written.stride(), written.storage_offset()
            is_written.as_strided(*at).fill_(True)
        else:  # its strides count other elements
            is_written.fill_(True)
        is_written = is_written.as_strided(shape, stride, start)
        for dim, rows in enumerate(places):
            if rows is not None:
                copy, is_written = (each.index_select(dim, rows) for each in (copy, is_written))
        held.copy_(torch.where(is_written, copy, held))
        if self.changes is not None:
            self.changes = self._count() + writes


def _copies(tensor: DTensor) -> Iterator[tuple[_Copy, torch.Tensor]]:
    """Iterate over the copies that ``tensor`` is a view of, each made from the next."""
    part = local_of(tensor)
    while (copy := getattr(part.untyped_storage(), _COPY, None)) is not None:
        yield copy, part
        part = copy.rest.local


def _rows(ranges: Ranges) -> torch.Tensor:
    rows = [torch.arange(first, first + count, device="cpu") for first, count in ranges]
    return torch.cat([torch.arange(0, device="cpu"), *rows])


@functools.cache
def _watch_writes() -> None:
    """Watch each operator that writes for writes to such copies."""
    handlers = dtensor_handlers()
    for name in operator_names():
        kind, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and (kind.endswith("_") or "out" in overload):
            operator = getattr(getattr(torch.ops.aten, kind), overload or "default")
            handlers[operator] = _Write(operator, handlers.get(operator, without_handler))


class _Write:
    """A handler that runs the previous one and brings writes to copies back to their DTensors."""

    __slots__ = ("before", "written")

    def __init__(self, operator: _Operator, before: _Operator) -> None:
        arguments = enumerate(schema_of(operator).arguments)
        self.before = before
        self.written = [
            (number, argument.name)
            for number, argument in arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]

    def __call__(self, op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        found: list[tuple[_Copy, torch.Tensor, list[torch.Tensor | None]]] = []
        for number, name in self.written:
            value = args[number] if number < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, Sequence) else (value,):
                if isinstance(tensor, DTensor):
                    found += [(copy, part, copy.places(part)) for copy, part in _copies(tensor)]
        result = self.before(op, args, kwargs)
        for copy, part, places in found:
            copy.bring_back(part, places, writes=len(found))
        return result
