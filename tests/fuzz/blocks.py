"""The blocks that random models are made of: each has something that a layout has to get right.

A block maps (rows, width) to (rows, ``self.width``), and treats rows alike where it is not a norm
over the batch, so that a batch may be cut anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["USUAL", "Block", "Square", "linears_of"]

WIDTHS = (2, 3, 4, 5, 6, 8)


class Block(nn.Module):
    """Something that maps ``width`` features to as many, unless it says otherwise."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__()
        self.width = width


class Widen(Block):
    """A layer to another width."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.width = draw.choice(WIDTHS)
        self.layer = nn.Linear(width, self.width, bias=draw.random() < 0.8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Residual(Block):
    """Two layers, out to another width and back, beside which the input goes."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        inner = draw.choice(WIDTHS)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Square(Block):
    """One layer from features to as many."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.layer = nn.Linear(width, width)


class Twice(Square):
    """A layer that is used twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Shared(Square):
    """Two layers with one weight."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.other = nn.Linear(width, width)
        self.other.weight = self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.tanh(self.layer(x)))


class TwoNames(Square):
    """A module under two names."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.again = self.layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.again(x))


class Frozen(Square):
    """A layer that does not train."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class HalfFrozen(Square):
    """A layer of which only the bias trains."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.layer.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Unused(Square):
    """A layer that trains, and another that no pass uses."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.unused = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Scale(Block):
    """A parameter of one element."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.scale = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Scalar(Block):
    """A parameter without dims."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Empty(Square):
    """A parameter without elements, that is used."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.nothing = nn.Parameter(torch.zeros(0, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.nothing.sum(0)


class Complex(Block):
    """Complex weights."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.complex128) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh((x.to(self.weight.dtype) @ self.weight).abs())


class HalfPrecision(Square):
    """A frozen parameter of half precision."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.offset = nn.Parameter(torch.linspace(-1, 1, width).half(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.offset.to(x.dtype))


class Normed(Square):
    """A layer and the norm of its features."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.norm = nn.LayerNorm(width, eps=1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


class BatchNormed(Square):
    """A norm over the batch, with statistics of all ranks."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.norm = nn.BatchNorm1d(width, eps=1e-2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.layer(x))


class WeightNormed(Block):
    """A weight that is computed from two parameters."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Symmetric(nn.Module):
    """A parametrization: the weight and its transpose."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight + weight.T) / 2


class Parametrized(Square):
    """A weight that is computed from one parameter."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        nn.utils.parametrize.register_parametrization(self.layer, "weight", Symmetric())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Looked(Block):
    """Rows of an embedding."""

    sparse = False

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.table = nn.Embedding(7, width, sparse=self.sparse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Of a piece-wise constant function of the first feature: rounding moves no row.
        numbers = (x[:, 0].detach() * 1e4).round().long().remainder(7)
        return x + self.table(numbers)


class LookedSparse(Looked):
    """Rows of an embedding with sparse gradients."""

    sparse = True


class Recurrent(Block):
    """A recurrent layer, which keeps a list of its weights."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.layer = nn.GRU(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.stack([x, x / 2], dim=1))[0][:, -1]


class Attended(Block):
    """Attention of two halves of the features."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.layer = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.stack([x, -x], dim=1)
        return x + self.layer(both, both, both, need_weights=False)[0][:, 0]


class Convolved(Block):
    """A convolution over the features."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.layer = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x.unsqueeze(1))).mean(1)


class Listed(Block):
    """Parameters in containers."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(width)) for _ in range(3)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(width))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.listed:
            x = torch.tanh(x * each)
        return x + self.named["shift"]


class Transposed(Block):
    """A parameter whose memory is not contiguous."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.weight = nn.Parameter(torch.randn(width + 1, width).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh((x @ self.weight)[:, :-1])


class Plain(Block):
    """No parameter: what comes in goes out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


USUAL = (
    *(Widen, Residual, Twice, Shared, TwoNames, Frozen, HalfFrozen, Unused, Scale, Scalar),
    *(Empty, Complex, HalfPrecision, Normed, BatchNormed, WeightNormed, Parametrized),
    *(Looked, LookedSparse, Recurrent, Attended, Convolved, Listed, Transposed, Plain),
)


def linears_of(model: nn.Module) -> Iterator[str]:
    """The names of the layers that axis tensor may cut."""
    seen: set[nn.Module] = set()
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module not in seen:
            seen.add(module)
            yield name
