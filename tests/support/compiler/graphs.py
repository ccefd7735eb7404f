"""Small graphs with marked gradients, traced without any process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from support.internals.comm import grad_reduce

__all__ = ["chain", "mark", "traced"]

SIZES = (64, 256)


def mark(
    gradient: torch.Tensor,
    index: int,
    *,
    mode: str = "coalesced",
    group: str = "0",
    model: str = "0/0",
    sizes: Sequence[int] = SIZES,
) -> torch.Tensor:
    return grad_reduce(
        gradient, index=index, ranks=2, group=group, model=model, mode=mode, sizes=sizes
    )


def traced(function: Callable[..., object], *shapes: tuple[int, ...]) -> fx.Graph:
    """The graph of ``function`` on tensors of ``shapes``, as a compiler would be given it."""
    inputs = [torch.zeros(shape) for shape in shapes]
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def chain(count: int, *, size: int = 4, mode: str = "coalesced") -> fx.Graph:
    """A backward through ``count`` layers, last one first; each gradient is marked."""

    def backward(gradient: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for index in reversed(range(count)):
            found.append(mark(gradient.t() @ gradient, index, mode=mode))
            gradient = gradient @ weights[index]
        return found

    return traced(backward, (3, size), *[(size, size)] * count)
