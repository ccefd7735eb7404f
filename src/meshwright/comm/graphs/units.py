"""Operators by which a traced graph gathers, frees and reduces sharded units.

Operators in a trace, pure functions until a pass replaces them:

==================  ==============================================================================
``unshard_unit``    the full parameters of a unit. Its backward is ``reduce_unit``
``reduce_unit``     takes full gradients of a unit; the zero that it returns is the gradient of
                    the token, which keeps it in the graph
==================  ==============================================================================

Operators that the pass inserts. All write to the token, so that they keep their order:

==================  ==============================================================================
``drive_units``     begins a graph; starts a gather; frees a unit (it writes to the unit's buffers
                    and reads ``after``, so all readers of the buffers come before); keeps the
                    buffers, whose memory is the unit's, alive
``whole_unit``      waits for a gather: a buffer of full parameters, in memory that the unit frees
``send_unit``       starts a reduction. Gradients of the previous one are passed again, because
                    their memory is read until this one starts
==================  ==============================================================================

Everything that determines shapes, order and gradients is an argument, as text (`UnitForm`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import torch

from meshwright.comm.graphs.untraced import apart
from meshwright.comm.groups.registry import PROCESS
from meshwright.errors import InternalError

BEGIN, BEGIN_BACKWARD = "begin", "begin backward"
START, START_BACKWARD = "start", "start backward"
FREE, FREE_BACKWARD = "free", "free backward"
HOLD = "hold"
"""The acts of `drive_units`."""

NEEDED = "needed"
"""Says that a backward will need the unit that is freed."""
NO_UNIT = -1


class UnitPart(NamedTuple):
    """The position of one full parameter in a buffer of its unit."""

    line: int
    start: int
    """Elements before it."""
    shape: tuple[int, ...]
    trains: bool
    """True when it is given a gradient."""


@dataclass(frozen=True, slots=True)
class UnitForm:
    """The form of one unit in a graph."""

    name: str
    around: tuple[int, ...]
    """The numbers of the units whose modules contain its module."""
    lines: tuple[tuple[str, int], ...]
    """The dtype and the elements of each."""
    parts: tuple[UnitPart, ...]
    has_backward: bool
    """True when gradients were enabled."""

    def text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def of(cls, text: str) -> UnitForm:
        read = json.loads(text)
        parts = tuple(
            UnitPart(line, start, tuple(shape), trains)
            for line, start, shape, trains in read["parts"]
        )
        lines = tuple((dtype, numel) for dtype, numel in read["lines"])
        return cls(read["name"], tuple(read["around"]), lines, parts, read["has_backward"])


class TracedRoot(Protocol):
    """The units of one root, addressed by number from graphs."""

    def drive(self, what: str, number: int, said: str) -> None:
        """Do ``what``, a constant above. ``said`` is a digest of the graph, or `NEEDED`."""

    def whole(self, number: int, line: int) -> torch.Tensor:
        """Wait for the gather of a unit, and return one of its buffers."""

    def send(self, number: int, gradients: Sequence[torch.Tensor], indices: Sequence[int]) -> None:
        """Start to reduce the ``gradients`` of the parameters ``indices`` of a unit."""


for _name, _arguments in (
    ("unshard_unit", "(Tensor token, str model, int unit, str form) -> Tensor[]"),
    (
        "reduce_unit",
        "(Tensor token, Tensor[] gradients, int[] indices, str model, int unit) -> Tensor",
    ),
    (
        "drive_units",
        "(Tensor(a!) token, Tensor(b!)[] held, Tensor[] after, str model, str what, int unit,"
        " str said) -> ()",
    ),
    ("whole_unit", "(Tensor(a!) token, str model, int unit, int line, str form) -> Tensor"),
    (
        "send_unit",
        "(Tensor(a!) token, Tensor[] gradients, int[] indices, Tensor[] before, str model,"
        " int unit) -> ()",
    ),
):
    torch.library.define(f"meshwright::{_name}", _arguments, tags=(torch.Tag.cudagraph_unsafe,))

UNSHARD = torch.ops.meshwright.unshard_unit.default
REDUCE = torch.ops.meshwright.reduce_unit.default
DRIVE = torch.ops.meshwright.drive_units.default
WHOLE = torch.ops.meshwright.whole_unit.default
SEND = torch.ops.meshwright.send_unit.default

unshard = UNSHARD
"""Full parameters of unit ``unit`` of ``model``, of the ``form`` that is given as text."""


@torch.library.register_fake("meshwright::unshard_unit")
def _wholes(token: torch.Tensor, model: str, unit: int, form: str) -> list[torch.Tensor]:
    read = UnitForm.of(form)
    return [
        token.new_empty(part.shape, dtype=getattr(torch, read.lines[part.line][0]))
        for part in read.parts
    ]


@torch.library.register_fake("meshwright::whole_unit")
def _line(token: torch.Tensor, model: str, unit: int, line: int, form: str) -> torch.Tensor:
    dtype, numel = UnitForm.of(form).lines[line]
    return token.new_empty(numel, dtype=getattr(torch, dtype))


@torch.library.register_fake("meshwright::reduce_unit")
def _zero(token: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(token)


@torch.library.register_fake("meshwright::drive_units")
@torch.library.register_fake("meshwright::send_unit")
def _nothing(*_: object) -> None:
    return None


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:  # noqa: ANN401
    token, *mark, form = inputs
    ctx.mark = mark
    ctx.save_for_backward(token)
    parts = UnitForm.of(form).parts
    ctx.set_materialize_grads(False)  # zeros would be reduced as gradients
    ctx.mark_non_differentiable(*(w for w, p in zip(output, parts, strict=True) if not p.trains))


def _backward(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:  # noqa: ANN401
    (token,) = ctx.saved_tensors
    found = {n: gradient for n, gradient in enumerate(gradients) if gradient is not None}
    return REDUCE(token, [*found.values()], [*found], *ctx.mark), None, None, None


torch.library.register_autograd("meshwright::unshard_unit", _backward, setup_context=_set_up)


@torch.library.impl("meshwright::unshard_unit", "CompositeExplicitAutograd")
def _unshard_alone(token: torch.Tensor, model: str, unit: int, form: str) -> list[torch.Tensor]:
    raise InternalError(f"a graph gathers unit {UnitForm.of(form).name!r} and no pass has seen it")


@torch.library.impl("meshwright::reduce_unit", "CompositeExplicitAutograd")
def _reduce_alone(
    token: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    indices: Sequence[int],
    model: str,
    unit: int,
) -> torch.Tensor:
    raise InternalError(f"a graph reduces unit {unit} of {model} and no pass has seen it")


@torch.library.impl("meshwright::drive_units", "CompositeExplicitAutograd")
@apart
def _drive(
    token: torch.Tensor,
    held: Sequence[torch.Tensor],
    after: Sequence[torch.Tensor],
    model: str,
    what: str,
    unit: int,
    said: str,
) -> None:
    _find(model).drive(what, unit, said)


@torch.library.impl("meshwright::whole_unit", "CompositeExplicitAutograd")
@apart
def _whole(token: torch.Tensor, model: str, unit: int, line: int, form: str) -> torch.Tensor:
    found: torch.Tensor = _find(model).whole(unit, line)
    return found


@torch.library.impl("meshwright::send_unit", "CompositeExplicitAutograd")
@apart
def _send(
    token: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    indices: Sequence[int],
    before: Sequence[torch.Tensor],
    model: str,
    unit: int,
) -> None:
    _find(model).send(unit, gradients, indices)


def _find(name: str) -> TracedRoot:
    root = PROCESS.roots.get(name)
    if root is None:
        raise InternalError(f"a graph drives units of model {name}, which is gone")
    return root
