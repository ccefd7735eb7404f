"""Random values of DTensors: those that one process draws with the same seed.

On hosts each rank draws the whole tensor, and keeps its part. torch has every rank draw a part of
its own there, which with one seed is the same on all of them: a weight whose rows come again.
Dropout comes here by `bernoulli_`, unless a program calls its one operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.comm.dtensors.dtensor import local_of
from meshwright.comm.dtensors.gather_dtensor import held_boxes, part, part_like
from meshwright.comm.streams import is_host
from meshwright.layout import Replicate
from meshwright.torch_internals.distributed import dtensor_handlers, without_handler

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
    """Have each rank draw the whole of every DTensor of hosts from now on."""
    aten, handlers = torch.ops.aten, dtensor_handlers()
    handlers.setdefault(aten.bernoulli_.float, _OnHosts(_drawn))
    handlers.setdefault(aten.bernoulli.default, _OnHosts(_by_chance))
    handlers.setdefault(aten.native_dropout.default, _OnHosts(_dropped))
    handlers.setdefault(aten.rrelu_with_noise.default, _OnHosts(_leaking))
    handlers.setdefault(aten.multinomial.default, _OnHosts(_picked))
    for names, handler in ((_IN_PLACE, _drawn), (_NEW, _new)):
        for name in names:
            operator = getattr(aten, name)
            for overload in operator.overloads():
                if "out" not in overload and "Tensor" not in overload:
                    handlers.setdefault(getattr(operator, overload), _OnHosts(handler))


class _OnHosts:
    """A handler for tensors of hosts: of devices torch has one generator that all ranks share."""

    __slots__ = ("handler",)

    def __init__(self, handler: Callable[..., object]) -> None:
        self.handler = handler

    def __call__(self, op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        draw = self.handler if is_host(local_of(args[0]).device) else without_handler
        return draw(op, args, kwargs)


def _whole_like(tensor: DTensor) -> torch.Tensor:
    local = local_of(tensor)
    # With the strides of the DTensor: values are drawn in the order of memory.
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=local.dtype, device=local.device
    )


def _drawn(op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DTensor:
    """Draw into the DTensor that is the first of ``args``."""
    tensor: DTensor = args[0]
    whole = op(_whole_like(tensor), *args[1:], **kwargs)
    for box, memory in held_boxes(tensor, "a tensor that is drawn"):
        memory.copy_(whole[box.slices()])
    return tensor


def _new(op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Draw a DTensor that lies as the first of ``args``."""
    return part_like(op(_whole_like(args[0]), *args[1:], **kwargs), args[0])


def _by_chance(op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Draw by the chances that are the first of ``args``, of which all ranks need the whole."""
    return part_like(op(args[0].full_tensor(), **kwargs), args[0])


def _dropped(
    op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop by a mask of the whole of the first of ``args``; the mask is returned, too."""
    tensor, chance, *_ = args
    mask = part_like(op(torch.zeros_like(_whole_like(tensor)), *args[1:], **kwargs)[1], tensor)
    is_training = args[2] is not False
    scale = (0.0 if chance == 1 else 1 / (1 - chance)) if is_training else 1.0
    return tensor * mask * scale, mask


def _leaking(op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Scale what is negative in the first of ``args``; the second becomes the factors."""
    tensor, factors, *rest = args
    whole = _whole_like(tensor)
    found = op(tensor.full_tensor(), whole, *rest, **kwargs)
    for box, memory in held_boxes(factors, "the factors"):
        memory.copy_(whole[box.slices()])
    return part_like(found, tensor)


def _picked(op: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Pick by all chances of the first of ``args``; each rank has all that was picked."""
    tensor: DTensor = args[0]
    found = op(tensor.full_tensor(), *args[1:], **kwargs)
    mesh = tensor.device_mesh
    return part(found, mesh, [Replicate()] * mesh.ndim, found.stride())
