"""Tensors of a model whose stages lie on other ranks: known by name here, and without values.

A pipeline's rank computes with the model's own parameters. Those of other ranks stay the objects
that they are, and who asks for their values is told where they are.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import nn

from meshwright.comm.dtensors.unreadable import SETTINGS, make_unreadable
from meshwright.errors import LayoutError

__all__ = ["is_elsewhere", "let_go"]

_ELSEWHERE = "_meshwright_elsewhere"

_REMEDY = (
    "A loss can read what the last stage holds: compute what needs other parameters in the model's "
    "forward, and return it with the output. `Trainable.weights` gives all values, and "
    "`Trainable.eval` runs the whole model"
)


def let_go(model: nn.Module, held: Container[int], where: Mapping[str, str]) -> None:
    """Give back the memory of all of ``model`` whose identity is not ``held`` on this rank.

    ``where`` says by name which stage and rank have it. What no stage has, as a buffer that no
    forward reads, is left as it is.
    """
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if id(tensor) not in held and name in where:
                text = f"{kind} {name!r} {where[name]}"
                make_unreadable(tensor, text, _REMEDY, error=LayoutError, settings=SETTINGS)
                vars(tensor)[_ELSEWHERE] = True


def is_elsewhere(tensor: object) -> bool:
    """Check for a tensor of a stage on another rank."""
    return isinstance(tensor, torch.Tensor) and _ELSEWHERE in vars(tensor)
