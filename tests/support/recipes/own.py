"""Factories of a user, as configurations of tests name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

Item = tuple[torch.Tensor, torch.Tensor]

CONFIG = """
[model]
factory = "support.recipes.own:build"
options = { width = 8 }

[data]
factory = "support.recipes.own:data"
batch_size = 8
validation_windows = 12

[optimizer]
factory = "torch.optim:SGD"
options = { lr = 0.3, momentum = 0.9 }
warmup_steps = 2

[run]
steps = 6
trace_steps = 2
"""


def build(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.Dropout(0.1), nn.Tanh(), nn.Linear(width, 3))


def plain(width: int) -> nn.Module:
    """The same without dropout."""
    model = build(width)
    model[1] = nn.Identity()
    return model


def data() -> tuple[Sequence[Item], Sequence[Item]]:
    points = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    items = [(point, (point[:2] > 0).long().sum()) for point in points]
    return items[:40], items[40:]


def no_validation() -> Sequence[Item]:
    return data()[0]


def two(parameters: Sequence[torch.Tensor], lr: float) -> list[torch.optim.Optimizer]:
    """One optimizer for matrices, which looks at them as wholes, and one for the rest."""
    muon = torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=lr)
    return [muon, torch.optim.AdamW([p for p in parameters if p.ndim != 2], lr=lr)]


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target)


class Dropping(nn.Module):
    """A model that drops by a function."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return F.dropout(points, 0.1, self.training)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.1), Dropping(), nn.Linear(6, 3))


class NeedsNumbers(nn.Module):
    """A model whose forward looks at what it computes, which meta does not have."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return points if points.sum().item() > 0 else -points


def needs_numbers() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.1), NeedsNumbers(), nn.Linear(6, 3))


class Labeled(nn.Module):
    """A model of dicts that knows its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 3)

    def forward(self, points: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        logits = self.line(points)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return Output(loss, logits)


class Output(NamedTuple):
    """The result of `Labeled`."""

    loss: torch.Tensor | None
    logits: torch.Tensor


def logits_loss(output: Output, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits, target)


def dicts() -> Sequence[dict[str, torch.Tensor]]:
    return [{"points": point, "labels": label} for point, label in data()[0]]


def fails(width: int) -> nn.Module:
    raise OSError(f"no weights\nof width {width}")


def looks_at_its_weights(width: int) -> nn.Module:
    model = plain(width)
    assert float(next(model.parameters()).sum()) == float(next(model.parameters()).sum())
    return model


def not_a_model() -> str:
    return "model"


def not_a_dataset() -> int:
    return 3


def odd_items() -> list[int]:
    return [1, 2, 3, 4, 5, 6, 7, 8]


def rows(items: list[Item]) -> Item:
    raise KeyError("input_ids")


not_a_function = 3


def ignored() -> list[dict[str, torch.Tensor]]:
    """The same, with labels that the model's own loss leaves out."""
    return [{**item, "labels": torch.full_like(item["labels"], -100)} for item in dicts()]
