"""The models of the strategy table, and which of their modules become units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.testing import MODELS, Sample, TinyTransformer

WIDTH = 7
CLASSES = 5


class Sometimes(nn.Module):
    """A layer that a caller may leave out: here every other rank does."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, CLASSES)
        self.sometimes = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.always(x) + self.sometimes(x) if use else self.always(x)


class Cast(nn.Module):
    """Computes the layer in the dtype of its weight."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x.to(self.layer.weight.dtype))).to(x.dtype)


class TwoDtypes(nn.Module):
    """Two layers in one unit, of which one has a dtype of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Sequential(Cast(nn.Linear(WIDTH, 3)), Cast(nn.Linear(3, WIDTH)))
        self.head = Cast(nn.Linear(WIDTH, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.both(x))


class Recomputed(TinyTransformer):
    """Its layers are computed again in the backward pass."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words) + self.position[: words.shape[1]]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


def features(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size, WIDTH, generator=generator)


def classes(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(CLASSES, (size,), generator=generator)


def _of_features(name: str, build: Callable[[], nn.Module]) -> Sample:
    return Sample(name=name, build=build, inputs=features, targets=classes, loss=F.cross_entropy)


def children(model: nn.Module) -> list[str]:
    """Every child with parameters, and the layers of a list, are one unit each."""
    found: list[str] = []
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            found += [f"{name}.{number}" for number in range(len(child))]
        elif any(True for _ in child.parameters()):
            found.append(name)
    return found


def root_only(model: nn.Module) -> list[str]:
    return []


def nested(model: nn.Module) -> list[str]:
    """Units in units."""
    return ["layers.0.widen", "layers.0.narrow", "layers.0", "layers.1", "head"]


def single_second(model: nn.Module) -> nn.Module:
    model.both[1].float()
    return model


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model of the table."""

    sample: Sample
    judge: Sample | None = None
    """What trains in one process, when that is not ``sample``; its parameters are the same."""
    units: Callable[[nn.Module], list[str]] = children
    convert: Callable[[nn.Module], nn.Module] = lambda model: model
    """After the model got the dtype of the cell."""
    flips: str = ""
    """A unit that is frozen in every other step."""
    refused_flat: str = ""
    """What one flat parameter for each unit cannot hold, in the words of the error."""
    differs_by_rank: bool = False
    tolerance: float = 1e-9
    """In double precision."""


def _transformer(kind: Callable[[], nn.Module], name: str) -> Sample:
    base = MODELS["transformer"]
    return Sample(name=name, build=kind, inputs=base.inputs, targets=base.targets, loss=base.loss)


_ROWS: dict[str, Row] = {
    name: Row(sample=MODELS[name])
    for name in ("sequential", "uneven", "unused", "skip", "reused", "transformer", "keywords")
} | {
    "frozen": Row(
        sample=MODELS["frozen"],
        refused_flat="has both parameters with requires_grad=True and False",
    ),
    "unused in a unit": Row(sample=MODELS["unused"], units=root_only),
    "tied in a unit": Row(sample=MODELS["tied"], units=root_only),
    "tied over units": Row(sample=MODELS["tied"]),
    "nested units": Row(sample=MODELS["transformer"], units=nested),
    "recomputed": Row(sample=_transformer(Recomputed, "recomputed"), judge=MODELS["transformer"]),
    "batch norm": Row(sample=MODELS["batch_norm"]),
    "used on some ranks": Row(
        sample=_of_features("sometimes", Sometimes), units=root_only, differs_by_rank=True
    ),
    "flipped": Row(sample=MODELS["skip"], flips="second"),
    "two dtypes": Row(
        sample=_of_features("two dtypes", TwoDtypes),
        convert=single_second,
        refused_flat="Must flatten tensors with uniform dtype",
        tolerance=1e-5,
    ),
}

ROWS: Mapping[str, Row] = MappingProxyType(_ROWS)


def share_of(row: Row, number: int, seed: int, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    """The microbatch of one rank, ``number``, and its target."""
    generator = torch.Generator().manual_seed(seed)
    batch, target = row.sample.example_batch(3, generator)
    if row.differs_by_rank:
        batch = {"x": batch, "use": number % 2 == 1}
    cast = {"x": batch} if isinstance(batch, torch.Tensor) else dict(batch)
    cast = {
        name: value.to(dtype)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in cast.items()
    }
    return (cast["x"] if isinstance(batch, torch.Tensor) else cast), target
