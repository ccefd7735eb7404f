"""Equality of values that the ranks of an axis replicate: parameters, their gradients, and inputs.

Digests are compared first, in one exchange. Parameters must be equal bit by bit. Computed values
may differ by rounding, see `meshwright.gradients.closeness`. Digests of values on a device are
computed there and compared once they have reached the host, see `LateNumbers`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from meshwright.comm import Communicator, LateNumbers
from meshwright.comm.dtensors.dtensor import (
    is_replicated,
    known_at_rest,
    local_of,
    mesh_communicators,
)
from meshwright.comm.failures.sameness import (
    Exchange,
    differing,
    require_equal,
)
from meshwright.comm.streams import is_host, moved
from meshwright.errors import LayoutError
from meshwright.gradients import Held, digests_of, kind_of, require_close

_LABEL = "digest of what ranks hold whole"
_SHARES = (
    "each rank computed a share of the gradient, and the module needs a style that sums them "
    '(SequenceParallel, or "replicated" in [tensor] rules)'
)
_WRITTEN = (
    "Something has written them on some ranks alone: a state dict that is loaded there, or an "
    "optimizer whose settings or state are others there. Do it on every rank, or load one state on "
    "all"
)
_BATCHES = (
    "Give all ranks of the axis the same batches in the same order: seed and shard data by the "
    "data-parallel rank, not by the global rank. Where each rank holds a part, declare it "
    "(input_layouts=Shard(dim)) or pass a DTensor. Modules without a style that draw random "
    "numbers before it need one seed on all of them"
)


@torch.no_grad()
def verify_replicated(module: nn.Module, communicator: Communicator | None = None) -> None:
    """Check that parameters replicated over the ranks of an axis are equal there, bit by bit.

    DTensors are compared over each axis of their mesh that replicates them, plain parameters over
    ``communicator`` if given. All ranks must call this; each axis exchanges digests once.
    Parameters on the meta device are left out.

    Raises `LayoutError` on all ranks of the axis, naming the first parameter that differs and the
    ranks of each version.
    """
    by_axis: dict[Communicator, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in module.named_parameters():
        for axis, local in _replicated(parameter, communicator):
            if not axis.is_alone and local.device.type != "meta":
                by_axis.setdefault(axis, []).append((name, local))
    for axis, named in by_axis.items():
        hint = "Seed all ranks alike, or parallelize with src_data_rank=0"
        _verify(axis, named, hint, functools.partial(axis.gather_values, label=_LABEL))


@torch.no_grad()
def verify_plain(
    axis: Communicator, named: Sequence[tuple[str, torch.Tensor]], exchange: Exchange
) -> None:
    """Check that parameters without a style are equal on the ranks of ``axis``, bit by bit.

    All ranks must call this; digests go through ``exchange``. Raises `LayoutError` on all.
    """
    hint = (
        "Without a style each rank keeps its own. Seed all ranks alike, or load the same state "
        "on all; where ranks are to differ, give its module a ParallelStyle of your own"
    )
    _verify(axis, named, hint, exchange)


def verify_gradients(
    axis: Communicator,
    named: Sequence[tuple[str, torch.Tensor]],
    exchange: Exchange,
    late: LateNumbers,
) -> None:
    """Check that parameters that the ranks of ``axis`` replicate are equal, and their gradients.

    All ranks must call this before the update, with the same parameters in the same order. Raises
    `LayoutError` on all of them, because after the step the copies would differ. On a device
    ``late`` raises it.
    """
    gradients = [(f"the gradient of {n}", held_whole(p, axis, p.grad)) for n, p in named]
    # Sharded layers may read a parameter that differs: its gradient, a sum, is equal anyway.
    of = zip(named, gradients, strict=True)
    weights = [(n, None if g is None else held_whole(p, axis, p)) for (n, p), (_, g) in of]

    def judge(held: Sequence[Held], digests: Sequence[str]) -> None:
        everyone = differing(axis, digests, label=_LABEL, exchange=exchange)
        if everyone:
            count = len(gradients)
            require_close(
                axis,
                held[:count],
                [said[:count] for said in everyone],
                "all that each of them holds whole",
                error=LayoutError,
                remedy=f"A step would make the copies diverge. Either {_SHARES}, "
                "or the ranks took different branches, got different batches, or had other "
                "weights: a state dict that one loads alone",
            )
            rows = [said[count:] for said in everyone]
            _require_close_weights(axis, held[count:], rows, _WRITTEN)

    look_at_bits([*gradients, *weights], late, judge, is_late=not axis.is_on_host)


def verify_weights(
    axis: Communicator,
    named: Sequence[tuple[str, torch.Tensor]],
    exchange: Exchange,
    late: LateNumbers,
    *,
    is_late: bool,
) -> None:
    """Check that parameters that the ranks of ``axis`` replicate are equal, before a forward.

    For parameters that no optimizer steps, which `verify_gradients` would miss.
    """
    weights = [(n, held_whole(p, axis, p)) for n, p in named]

    def judge(held: Sequence[Held], digests: Sequence[str]) -> None:
        everyone = differing(axis, digests, label=_LABEL, exchange=exchange)
        if everyone:
            _require_close_weights(axis, held, everyone, f"{_WRITTEN}. Or {_SHARES}")

    look_at_bits(weights, late, judge, is_late=is_late)


def verify_inputs(
    axis: Communicator,
    given: tuple[str, torch.Tensor],
    exchange: Exchange,
    late: LateNumbers,
    *,
    where: str,
    weights: Callable[[], Sequence[tuple[str, torch.Tensor]]],
) -> None:
    """Check that an input that a style declares Replicate is equal on the ranks of ``axis``.

    As `verify_weights`, but raises ValueError. ``where`` names the pass, and ``weights`` lists the
    parameters that may have computed the input: if they differ, their LayoutError is raised. On a
    device the shape and dtype are compared at once, since this pass sends what they determine.
    """
    meaning, (name, tensor) = f"what a style declares Replicate() in {where}", given
    if not axis.is_on_host:
        require_equal(
            axis,
            {name: kind_of(tensor)},
            meaning,
            label=_LABEL,
            error=ValueError,
            remedy=_BATCHES,
            exchange=exchange,
        )

    def judge(held: Sequence[Held], digests: Sequence[str]) -> None:
        everyone = differing(axis, digests, label=_LABEL, exchange=exchange)
        if everyone:
            now = LateNumbers()
            verify_weights(axis, weights(), exchange, now, is_late=False)
            now.settle()
            require_close(axis, held, everyone, meaning, error=ValueError, remedy=_BATCHES)

    look_at_bits([given], late, judge, is_late=not axis.is_on_host)


def _require_close_weights(
    axis: Communicator, held: Sequence[Held], digests: Sequence[Sequence[str]], remedy: str
) -> None:
    meaning = "the weights that each of them holds whole"
    require_close(axis, held, digests, meaning, error=LayoutError, remedy=remedy)


def held_whole(
    parameter: torch.Tensor, axis: Communicator, value: torch.Tensor | None
) -> torch.Tensor | None:
    """Return this rank's copy of ``value`` if ``axis`` replicates it and ``parameter``, else None.

    None also for kinds of tensors whose bits cannot be read.
    """
    if value is None or _is_cut(parameter, axis) or _is_cut(value, axis):
        return None
    local = local_of(value).detach()
    is_known = type(local) in (torch.Tensor, nn.Parameter) and local.device.type != "meta"
    readable = local.layout in (torch.strided, torch.sparse_coo) and not local.is_nested
    return local if is_known and readable and not local.is_quantized else None


def _is_cut(tensor: torch.Tensor, axis: Communicator) -> bool:
    """Whether the ranks of ``axis`` have different shards or summands of a DTensor."""
    rest = known_at_rest(tensor)
    if rest is None:
        return False
    over = zip(mesh_communicators(rest.mesh, "tensor"), rest.placements, strict=True)
    # Shards over more ranks differ on these, too: those of all data ranks, on axis expert.
    return any({*axis.ranks} <= {*c.ranks} and not is_replicated(placed) for c, placed in over)


def look_at_bits(
    named: Sequence[Held],
    late: LateNumbers,
    judge: Callable[[Sequence[Held], Sequence[str]], None],
    *,
    is_late: bool,
) -> None:
    """Call ``judge`` with the tensors and a digest of each: through ``late`` if ``is_late``.

    Ranks whose judges exchange digests must agree on ``is_late``, even one without tensors. If
    ``is_late``, the judge gets copies. Digests include shapes and dtypes.
    """
    devices = [tensor.device for _, tensor in named if tensor is not None]
    device = next((each for each in devices if not is_host(each)), torch.device("cpu"))
    held = [(n, None if t is None else t.detach().clone() if is_late else t) for n, t in named]
    parts = [() if tensor is None else _parts_of(tensor) for _, tensor in held]
    spans = [len(each) for each in parts]
    digests = digests_of([*itertools.chain.from_iterable(parts)])
    unread = torch.zeros((), dtype=torch.int64, device=device)
    sums = [unread if each is None else moved(each, device) for each in digests]

    def read(numbers: Sequence[float]) -> None:
        rest = iter(numbers)
        digests = [
            "missing" if tensor is None else f"{kind_of(tensor)} {[*itertools.islice(rest, span)]}"
            for (_, tensor), span in zip(held, spans, strict=True)
        ]
        judge(held, digests)

    late.look(torch.stack(sums) if sums else torch.empty(0, device=device), read, is_late=is_late)


def _replicated(
    parameter: nn.Parameter, communicator: Communicator | None
) -> Iterator[tuple[Communicator, torch.Tensor]]:
    """Yield the axes that replicate ``parameter``, each with the tensor to compare there."""
    rest = known_at_rest(parameter)
    if rest is None:
        if communicator is not None:
            yield communicator, parameter.detach()
        return
    axes = mesh_communicators(rest.mesh, "tensor")
    for axis, placement in zip(axes, rest.placements, strict=True):
        if is_replicated(placement):
            yield axis, rest.local.detach()


def _verify(
    axis: Communicator,
    named: Sequence[tuple[str, torch.Tensor]],
    hint: str,
    exchange: Exchange,
) -> None:
    late = LateNumbers()

    def judge(held: Sequence[Held], digests: Sequence[str]) -> None:
        rows = {name: digest for (name, _), digest in zip(held, digests, strict=True)}
        meaning = "the parameters that they replicate, by digests,"
        require_equal(
            axis, rows, meaning, label=_LABEL, error=LayoutError, remedy=hint, exchange=exchange
        )

    look_at_bits(named, late, judge, is_late=False)
    late.settle()


def _parts_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    if not tensor.is_sparse:
        return [tensor.detach()]
    whole = tensor.detach().coalesce()
    return [whole.indices(), whole.values()]
