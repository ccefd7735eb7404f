"""Blocks whose passes do more than compute: hooks, buffers, other weights, control flow."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuzz.blocks import USUAL, Block, Square

__all__ = ["BLOCKS"]


class Counted(Square):
    """A buffer that each pass gives another tensor."""

    count: torch.Tensor

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + float(self.training)
        return self.layer(x) / (1 + 0.1 * self.count)


class CountedInPlace(Counted):
    """A buffer that each pass writes to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(float(self.training))
        return self.layer(x) / (1 + 0.1 * self.count.clone())


class Remembered(Square):
    """A buffer that each pass makes of a weight, and that no state dict has."""

    before: torch.Tensor

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.register_buffer("before", torch.zeros(width, width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) + x @ self.before
        self.before = 0.1 * self.layer.weight.detach().clone()
        return y


class Recomputed(Square):
    """Activations that are computed again in the backward."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.reentrant = draw.random() < 0.3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._inner, x, use_reentrant=self.reentrant)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, 0.5 * (gradient * x).sum(0)


class OwnFunction(Square):
    """An autograd function of the model's own, which saves a parameter."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(_Scaled.apply(x, self.weight))


class HookedActivation(Square):
    """A hook on an activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.5)
        return torch.tanh(y)


class HookedGradient(Square):
    """A hook on the gradient of a parameter."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.layer.weight.register_hook(lambda gradient: gradient * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class HookedAfter(Square):
    """A hook for when the gradient of a parameter is there."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.heard: list[int] = []
        self.layer.bias.register_post_accumulate_grad_hook(lambda p: self.heard.append(p.ndim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


def _double(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def _halve(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0] / 2,)


def _less(module: nn.Module, given: Any, got: Any) -> Any:
    return tuple(None if gradient is None else gradient * 0.9 for gradient in given)


class HookedModule(Square):
    """Hooks on a module, of its input, its output, and the gradient of its input."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.layer.register_forward_hook(_double)
        self.layer.register_forward_pre_hook(_halve)
        if draw.random() < 0.5:
            self.layer.register_full_backward_hook(_less)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Penalized(Square):
    """A weight that is read beside its layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + 0.1 * self.layer.weight.square().mean()


class Borrowed(Square):
    """A weight of another module, which is none of its own."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.inner(x), self.layer.weight, self.inner[0].bias)


class WithoutGradient(Square):
    """A part that no gradient goes through."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.other = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            fixed = self.other(x)
        return self.layer(x) + self.other(x + fixed)


class Alternating(Square):
    """One of two layers in each pass."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.other = nn.Linear(width, width)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        return torch.tanh((self.layer if self.passes % 2 else self.other)(x))


class InPlace(Square):
    """Activations that are written to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).add_(1).sigmoid_()


class Deciding(Square):
    """Control flow that depends on a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return torch.tanh(y) if self.layer.weight.sum() > 0 else torch.sin(y)


class Dropped(Square):
    """Dropout that drops nothing."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(torch.tanh(self.layer(x)))


class _Doubled(torch.Tensor):
    """A weight with which layers compute twice as much."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = super().__torch_function__(func, types, args, kwargs)
        return 2 * found.as_subclass(torch.Tensor) if func is F.linear else found


class Subclassed(Square):
    """A parameter of a tensor subclass of the model's own."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.layer.weight = nn.Parameter(self.layer.weight.detach().as_subclass(_Doubled))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Called(Square):
    """A layer that is called with other weights than its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = {name: 0.5 * p for name, p in self.layer.named_parameters()}
        return torch.tanh(torch.func.functional_call(self.layer, weights, (x,)))


BLOCKS: Mapping[str, type[Block]] = MappingProxyType(
    {
        cls.__name__: cls
        for cls in (
            *USUAL,
            *(Counted, CountedInPlace, Remembered, Recomputed, OwnFunction, HookedActivation),
            *(HookedGradient, HookedAfter, HookedModule, Penalized, Borrowed, WithoutGradient),
            *(Alternating, InPlace, Deciding, Dropped, Subclassed, Called),
        )
    }
)
