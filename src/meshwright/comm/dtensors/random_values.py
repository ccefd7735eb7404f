"""Random values of DTensors: those that one process draws with the same seed.

Each rank draws the whole tensor, and keeps its part. torch has every rank draw a part of its own
on hosts, which with one seed is the same on all of them: a weight whose rows come again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.comm.dtensors.dtensor import local_of
from meshwright.comm.dtensors.gather_dtensor import held_boxes, part_like
from meshwright.torch_internals.distributed import dtensor_handlers

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
    """Draw the values of every DTensor so from now on."""
    aten, handlers = torch.ops.aten, dtensor_handlers()
    handlers.setdefault(aten.bernoulli_.float, _drawn)
    for names, handler in ((_IN_PLACE, _drawn), (_NEW, _new)):
        for name in names:
            operator = getattr(aten, name)
            for overload in operator.overloads():
                if "out" not in overload and "Tensor" not in overload:
                    handlers.setdefault(getattr(operator, overload), handler)


def _whole_like(tensor: DTensor) -> torch.Tensor:
    local = local_of(tensor)
    return torch.empty(tensor.shape, dtype=local.dtype, device=local.device)


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
