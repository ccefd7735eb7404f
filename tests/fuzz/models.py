"""Random models: a few blocks in a row, in a chain or in a module that does more with them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from fuzz.blocks import Block
from fuzz.mixtures import MIXTURES, know_routers
from fuzz.odd_blocks import BLOCKS

__all__ = [
    "IN",
    "OUT",
    "TRAITS",
    "ModelSpec",
    "build",
    "call",
    "draw_mixture",
    "draw_model",
    "last_of",
    "loss_of",
    "output_of",
    "with_experts",
]

IN, OUT = 4, 3
"""Features of inputs and of targets."""

TRAITS = ("keywords", "dict", "named tuple", "nested", "penalty", "skip", "gain", "tied")
"""What a model that is no chain may have beside its blocks."""

ROUTED = "routed"
"""The trait of a model that says itself which of its modules are routers, all alike."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """All that a model is built from."""

    seed: int
    blocks: tuple[tuple[str, int], ...]
    """Names of `BLOCKS` and `MIXTURES`, each with what its draws begin with."""
    is_chain: bool
    traits: tuple[str, ...] = ()

    def __str__(self) -> str:
        kind = "chain" if self.is_chain else "net"
        return " ".join([kind, "+".join(name for name, _ in self.blocks), *self.traits])


class Pair(NamedTuple):
    """An output with names."""

    main: torch.Tensor
    other: tuple[object, ...]


class Net(nn.Module):
    """Blocks, with what its traits say around them."""

    def __init__(self, blocks: list[Block], traits: tuple[str, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(blocks[-1].width, OUT)
        self.traits = traits
        if "gain" in traits:
            self.gain = nn.Parameter(torch.linspace(0.5, 1.5, OUT))
        if "tied" in traits:
            _tie(self)

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> Any:
        y = x
        for block in self.blocks:
            y = block(y)
        y = self.head(y) * factor
        if "skip" in self.traits:
            y = y + x[:, :OUT]
        if "gain" in self.traits:
            y = y * self.gain
        penalty = y.new_zeros(())
        if "penalty" in self.traits:
            penalty = 0.1 * sum(p.square().sum().real for p in self.head.parameters())
        return self._shaped(y, penalty)

    def _shaped(self, y: torch.Tensor, penalty: torch.Tensor) -> Any:
        if "dict" in self.traits:
            return {"main": y, "penalty": penalty, "rest": [None, 3, "text"]}
        if "named tuple" in self.traits:
            return Pair(y, (penalty, None))
        if "nested" in self.traits:
            return ((y, {"penalty": penalty}), [y.detach()])
        return y + 0 * penalty if "penalty" not in self.traits else (y, penalty)


def _tie(net: Net) -> None:
    """Give the last layer of a shape the weight of the first one."""
    first: dict[torch.Size, nn.Linear] = {}
    for block in net.blocks:
        layer = getattr(block, "layer", None)
        if type(layer) is nn.Linear and layer.weight.requires_grad:
            if layer.weight.shape in first and not layer.weight._backward_hooks:
                layer.weight = first[layer.weight.shape].weight
            first.setdefault(layer.weight.shape, layer)


def draw_model(draw: random.Random, share: float = 0.35) -> ModelSpec:
    """Usual blocks, a ``share`` of all at least, and a few that are not."""
    usual = ("Widen", "Residual", "Widen", "Normed")
    names = [*BLOCKS]
    count = draw.randint(1, 5)
    blocks = [draw.choice(usual if draw.random() < share else names) for _ in range(count)]
    is_chain = draw.random() < 0.5
    some = () if is_chain else draw.sample(TRAITS, draw.randint(0, 3))
    shapes = [each for each in some if each in ("dict", "named tuple", "nested")]
    return ModelSpec(
        seed=draw.randrange(2**16),
        blocks=tuple((name, draw.randrange(2**16)) for name in blocks),
        is_chain=is_chain,
        traits=tuple(sorted(t for t in some if t not in shapes[1:])),
    )


def draw_mixture(draw: random.Random, *, is_chain: bool) -> ModelSpec:
    """A few blocks, one or two of which have experts."""
    spec = draw_model(draw, 0.7)
    blocks = spec.blocks[:3]
    traits = () if is_chain else spec.traits if draw.random() < 0.5 else (ROUTED,)
    spec = replace(spec, blocks=blocks, is_chain=is_chain, traits=traits)
    return with_experts(draw, spec, draw.choice((1, 1, 2)))


def with_experts(draw: random.Random, spec: ModelSpec, count: int) -> ModelSpec:
    """``spec`` and ``count`` blocks with experts between its own."""
    blocks, seed = [*spec.blocks], draw.randrange(2**16)
    for _ in range(count):
        seed = seed if ROUTED in spec.traits else draw.randrange(2**16)
        blocks.insert(draw.randint(0, len(blocks)), (draw.choice([*MIXTURES]), seed))
    return replace(spec, blocks=tuple(blocks))


def build(spec: ModelSpec) -> nn.Module:
    """The model of ``spec``, in float64, with the same values every time."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            width, made = IN, list[Block]()
            for name, seed in spec.blocks:
                made.append({**BLOCKS, **MIXTURES}[name](width, random.Random(seed)))
                width = made[-1].width
            if spec.is_chain:
                return nn.Sequential(*made, nn.Linear(width, OUT))
            net = Net(made, spec.traits)
            if ROUTED in spec.traits:
                know_routers(net)
            return net
    finally:
        torch.set_default_dtype(before)


def call(spec: ModelSpec, x: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the model for a batch."""
    return ((), {"x": x, "factor": 1.5}) if "keywords" in spec.traits else ((x,), {})


def last_of(model: nn.Module) -> nn.Linear:
    """The last layer."""
    return model[-1] if isinstance(model, nn.Sequential) else model.head  # pyrefly: ignore


def output_of(output: Any) -> tuple[torch.Tensor, torch.Tensor | float]:
    """What the model has computed, and what it adds to the loss, of whatever it returns."""
    if isinstance(output, Mapping):
        return output["main"], output["penalty"]
    if isinstance(output, Pair):
        return output.main, output.other[0]  # pyrefly: ignore
    if isinstance(output, tuple) and isinstance(output[0], tuple):
        return output[0][0], output[0][1]["penalty"]
    return output if isinstance(output, tuple) else (output, 0.0)


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    """A mean over rows."""
    main, penalty = output_of(output)
    return (main - target).square().mean() + penalty
