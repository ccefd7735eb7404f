"""Small models, each with a property that has broken a layout before.

``MODELS`` maps a name to a `Sample`: how to build the model, an example batch, and a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

FEATURES = 7
"""Width of the inputs: a prime, so that nothing divides by accident."""

CLASSES = 5
WORDS = 11
LENGTH = 6
"""Positions of the transformer's inputs."""


def _features(batch_size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(batch_size, FEATURES, generator=generator, device=generator.device)


def _classes(batch_size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(CLASSES, (batch_size,), generator=generator, device=generator.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A model to try a layout with."""

    name: str
    build: Callable[[], nn.Module]
    """Draws the weights from torch's global generator."""
    inputs: Callable[[int, torch.Generator], object] = _features
    """A batch: one tensor, or a mapping of keyword arguments."""
    targets: Callable[[int, torch.Generator], torch.Tensor] = _classes
    loss: Callable[..., torch.Tensor] = F.cross_entropy
    """``loss(output, target)``, a mean over the batch."""
    depends_on: Literal["", "batch", "random numbers"] = ""
    """What else its output depends on. A model that depends on the whole batch (BatchNorm) or on
    random numbers (dropout) may train differently on another number of ranks."""

    def example_batch(
        self, batch_size: int, generator: torch.Generator
    ) -> tuple[object, torch.Tensor]:
        """Make a batch and its target, in float32 or int64, drawn from ``generator``."""
        return self.inputs(batch_size, generator), self.targets(batch_size, generator)


class _Tied(nn.Module):
    """One weight under two names, as an embedding and as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, FEATURES)
        self.hidden = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, WORDS)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(words))))


class _Unused(nn.Module):
    """Parameters that no forward pass uses: their gradients stay None."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(FEATURES, CLASSES)
        self.never = nn.Linear(FEATURES, CLASSES)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class _Skip(nn.Module):
    """Residual connections that skip layers: a stage must pass on more than one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.third = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.first(x))
        second = x + torch.tanh(self.second(first))
        return self.head(first + torch.tanh(self.third(second)))


class _Reused(nn.Module):
    """One module called twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class _Keywords(nn.Module):
    """Keyword arguments, one of them not a tensor, and a dictionary as output."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(FEATURES, CLASSES)
        self.right = nn.Linear(FEATURES, CLASSES)

    def forward(self, *, x: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
        return {"left": self.left(x), "right": self.right(x) * scale}


class _Block(nn.Module):
    """Pre-norm attention and feed-forward, causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_feed_forward = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        mixed = self.query_key_value(self.norm_attention(x))
        split = mixed.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.widen(self.norm_feed_forward(x))))


class TinyTransformer(nn.Module):
    """A causal language model of ``layers`` blocks over ``words`` words."""

    def __init__(
        self, *, words: int = WORDS, width: int = 8, heads: int = 2, layers: int = 2
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) * 0.1)
        self.layers = nn.ModuleList([_Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Compute logits ``(batch, length, words)`` of the next word at each position."""
        x = self.embedding(words) + self.position[: words.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))


def _frozen() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, CLASSES)
    )
    model[2].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model


def _uneven() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 13), nn.Tanh(), nn.Linear(13, 1), nn.Linear(1, 3), nn.Linear(3, CLASSES)
    )


def _dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))


def _batch_norm() -> nn.Module:
    return nn.Sequential(
        # Without a bias: in front of BatchNorm, its gradient would be only rounding noise.
        nn.Linear(FEATURES, 4, bias=False),
        nn.BatchNorm1d(4),
        nn.Tanh(),
        nn.Linear(4, CLASSES),
    )


def _words(batch_size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(WORDS, (batch_size, LENGTH), generator=generator, device=generator.device)


def _keyword_inputs(batch_size: int, generator: torch.Generator) -> dict[str, object]:
    return {"x": _features(batch_size, generator), "scale": 0.5}


def _word_loss(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def _keyword_loss(output: Mapping[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["left"] + output["right"], target)


def _of_words(name: str, build: Callable[[], nn.Module]) -> Sample:
    return Sample(name=name, build=build, inputs=_words, targets=_words, loss=_word_loss)


MODELS: Mapping[str, Sample] = MappingProxyType(
    {
        sample.name: sample
        for sample in (
            Sample(name="sequential", build=_sequential),
            Sample(name="frozen", build=_frozen),
            Sample(name="uneven", build=_uneven),
            Sample(name="unused", build=_Unused),
            Sample(name="skip", build=_Skip),
            Sample(name="reused", build=_Reused),
            _of_words("tied", _Tied),
            _of_words("transformer", TinyTransformer),
            Sample(name="keywords", build=_Keywords, inputs=_keyword_inputs, loss=_keyword_loss),
            Sample(name="dropout", build=_dropout, depends_on="random numbers"),
            Sample(name="batch_norm", build=_batch_norm, depends_on="batch"),
        )
    }
)
"""Samples by name."""
