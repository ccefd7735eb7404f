"""Random values of DTensors, equal to those that one process draws with the same seed.

Each rank draws the whole tensor and keeps its part. torch has every rank draw its own part: on
hosts with one seed all ranks draw the same, so the rows of a weight repeat; on GPUs values depend
on the layout, the host waits for them, and all ranks of the world must take part. Dropout calls
`bernoulli_`, unless a program calls its fused operator.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.comm.dtensors.dtensor import is_replicated, local_of, mesh_communicators
from meshwright.comm.dtensors.gather_dtensor import held_boxes, part, part_like
from meshwright.comm.failures.sameness import require_equal
from meshwright.comm.groups.registry import PROCESS
from meshwright.errors import LayoutError
from meshwright.layout import Replicate
from meshwright.torch_internals.distributed import dtensor_handlers
from meshwright.torch_internals.tensors import FakeTensor

_Operator = Callable[..., torch.Tensor]

_IN_PLACE = (
    "normal_",
    "uniform_",
    "random_",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "geometric_",
)
_NEW = ("rand_like", "randn_like", "randint_like")


@functools.cache
def draw_whole() -> None:
    """Have each rank draw whole DTensors, for the whole process."""
    aten, handlers = torch.ops.aten, dtensor_handlers()
    handlers.setdefault(aten.bernoulli_.float, _Draw(_drawn))
    handlers.setdefault(aten.bernoulli.default, _Draw(_by_chance))
    handlers.setdefault(aten.native_dropout.default, _Draw(_dropped))
    handlers.setdefault(aten.rrelu_with_noise.default, _Draw(_leaking))
    handlers.setdefault(aten.multinomial.default, _Draw(_picked))
    for names, handler in ((_IN_PLACE, _drawn), (_NEW, _new)):
        for name in names:
            operator = getattr(aten, name)
            for overload in operator.overloads():
                if "out" not in overload and "Tensor" not in overload:
                    handlers.setdefault(getattr(operator, overload), _Draw(handler))


class _Draw:
    """A handler that first requires equal random states on ranks that hold the same elements."""

    __slots__ = ("handler",)

    def __init__(self, handler: Callable[..., object]) -> None:
        self.handler = handler

    def __call__(self, op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)]
        _require_one_state(args[0], given[0] if given else None)
        return self.handler(op, args, kwargs)


def _require_one_state(tensor: DTensor, generator: torch.Generator | None) -> None:
    """Raise `LayoutError` if ranks that hold the same part of ``tensor`` would draw other values.

    Checked at the first draw into such a tensor, and at each draw by a ``generator``.
    """
    mesh, local = tensor.device_mesh, local_of(tensor)
    copies = tuple(is_replicated(each) or each.is_partial() for each in tensor.placements)
    asked = PROCESS.drawn.setdefault(mesh, set())
    if generator is None and copies in asked:
        return
    if local.is_meta or isinstance(local, FakeTensor) or mesh.get_coordinate() is None:
        return
    drawn = _default_generator(local.device) if generator is None else generator
    for axis, is_copied in zip(mesh_communicators(mesh), copies, strict=True):
        if is_copied:
            state = bytes(drawn.get_state().tolist())
            require_equal(
                axis,
                [hashlib.blake2b(state, digest_size=8).hexdigest()],
                "the random state from which ranks draw copies of a DTensor",
                label="state of random values",
                error=LayoutError,
                remedy="Give them the same seed before (torch.manual_seed, or the generator's)",
            )
    if generator is None:
        asked.add(copies)


def _default_generator(device: torch.device) -> torch.Generator:
    module = torch.get_device_module(device)
    many: Sequence[torch.Generator] = getattr(module, "default_generators", ())
    return many[device.index] if many else torch.default_generator


def _whole_like(tensor: DTensor) -> torch.Tensor:
    local = local_of(tensor)
    # With the strides of the DTensor: values are drawn in the order of memory.
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=local.dtype, device=local.device
    )


def _drawn(op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DTensor:
    """Draw into the first of ``args``, a DTensor."""
    tensor: DTensor = args[0]
    whole = op(_whole_like(tensor), *args[1:], **kwargs)
    for box, memory in held_boxes(tensor, "a tensor that is drawn"):
        memory.copy_(whole[box.slices()])
    return tensor


def _new(op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    return part_like(op(_whole_like(args[0]), *args[1:], **kwargs), args[0])


def _by_chance(op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Draw by the probabilities in the first of ``args``, which are gathered on all ranks."""
    return part_like(op(args[0].full_tensor(), **kwargs), args[0])


def _dropped(
    op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply dropout to the first of ``args`` by a mask of the whole; returns the mask, too."""
    tensor, chance, *_ = args
    mask = part_like(op(torch.zeros_like(_whole_like(tensor)), *args[1:], **kwargs)[1], tensor)
    is_training = args[2] is not False
    scale = (0.0 if chance == 1 else 1 / (1 - chance)) if is_training else 1.0
    return tensor * mask * scale, mask


def _leaking(op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Scale negative elements of the first of ``args``; the second receives the factors."""
    tensor, factors, *rest = args
    whole = _whole_like(tensor)
    found = op(tensor.full_tensor(), whole, *rest, **kwargs)
    for box, memory in held_boxes(factors, "the factors"):
        memory.copy_(whole[box.slices()])
    return part_like(found, tensor)


def _picked(op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Sample from the full tensor of probabilities, ``args[0]``; each rank gets all samples."""
    tensor: DTensor = args[0]
    found = op(tensor.full_tensor(), *args[1:], **kwargs)
    mesh = tensor.device_mesh
    return part(found, mesh, [Replicate()] * mesh.ndim, found.stride())
