"""Blocks with experts, in each form that axis expert knows, and what balances them in one process.

Routers are skewed now and then, so that experts get no tokens, or all those of a rank get none.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuzz.blocks import Block
from meshwright.expert_parallel import experts, experts_of
from support.expert_parallel.samples import Fused, Grouped, Own

__all__ = ["MIXTURES", "Balance", "Mixture", "know_routers", "mixtures_in"]

BIAS = "e_score_correction_bias"
COUNTS = (1, 2, 3, 4, 4, 5, 7, 8)
"""Experts of a block; often they do not divide by the ranks."""


class Router(nn.Module):
    """Says where tokens go."""

    def __init__(self, width: int, number: int, k: int, kind: str, draw: random.Random) -> None:
        super().__init__()
        self.top_k, self.kind = k, kind
        self.layer = nn.Linear(width, number)
        skew = torch.zeros(number)
        favored = draw.choice(((), (), (0,), (number - 1,), range(number // 2 + 1)))
        skew[[*favored]] = 4.0
        if kind == "sigmoid":
            self.register_buffer(BIAS, 0.1 * torch.randn(number) + skew)
        else:
            self.layer.bias.data.add_(skew)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the weights of each token's experts, the logits, and which experts they are."""
        logits = self.layer(x)
        if self.kind == "late":  # as in gpt-oss
            chosen, indices = logits.topk(self.top_k)
            return chosen.softmax(1), logits, indices
        if self.kind == "sigmoid":  # as in DeepSeek: chooses by more than it weighs by
            scores = logits.sigmoid()
            indices = (scores + getattr(self, BIAS)).topk(self.top_k, sorted=False).indices
            weights = 1.5 * scores.gather(1, indices)
        else:
            weights, indices = logits.softmax(1).topk(self.top_k)
        if self.kind != "softmax":
            weights = weights / weights.sum(1, keepdim=True)
        return weights, logits, indices


class Mixture(Block):
    """A router and its experts, whose sum is added to the input."""

    kinds: tuple[str, ...] = ("softmax", "normalized", "late")
    """Of routers."""
    form = ""
    """Of experts of Hugging Face."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        number = draw.choice(COUNTS)
        k = min(draw.choice((1, 2, 2, 3)), number)
        self.router = Router(width, number, k, draw.choice(self.kinds), draw)
        self.experts = self.made(number, width, draw.choice((1, 2, 3, 4, 6)))
        if isinstance(self.experts, nn.ModuleList):
            experts_of(self)
        self.recomputes = draw.random() < 0.1
        if draw.random() < 0.3:
            self.shared, self.gate = nn.Linear(width, width), nn.Linear(width, 1)
        frozen = draw.choice((*[None] * 8, self.router, self.experts))
        if frozen is not None:
            frozen.requires_grad_(False)
        # As a class of Hugging Face's has it, of all models that hold it.
        self._can_record_outputs = {"router_logits": Router}

    def made(self, number: int, width: int, inner: int) -> nn.Module:
        return Fused(number, self.form, width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        y = checkpoint(self._routed, y, use_reentrant=False) if self.recomputes else self._routed(y)
        return x + 0.5 * torch.tanh(y)

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        weights, _, indices = self.router(x)
        y = self.experts(x, indices, weights)
        return y + self.gate(x).sigmoid() * self.shared(x) if hasattr(self, "shared") else y


class Mixtral(Mixture):
    """As Hugging Face has them: two tensors with the weights of all experts."""


class DeepSeek(Mixture):
    """A router that chooses by a bias, too."""

    kinds = ("sigmoid",)


class GptOss(Mixture):
    """With biases, transposed and interleaved."""

    form = "gpt_oss"


class NoGate(Mixture):
    """Two layers with nothing but a function between them."""

    form = "no gate"


class PostNorm(Mixture):
    """A norm inside of the module of experts, which all of them share."""

    form = "post norm"


class Marked(Mixture):
    """A user's own module, which loops over the experts that have tokens."""

    def made(self, number: int, width: int, inner: int) -> nn.Module:
        return experts(Own(number, width))


class RowsAndCounts(Mixture):
    """As torchtitan has them."""

    def made(self, number: int, width: int, inner: int) -> nn.Module:
        return Grouped(number, width, inner)


class ListOfExperts(Mixture):
    """A list, as one module."""

    def made(self, number: int, width: int, inner: int) -> nn.Module:
        pairs = [(nn.Linear(width, inner), nn.Linear(inner, width)) for _ in range(number)]
        return nn.ModuleList([nn.Sequential(up, nn.Tanh(), down) for up, down in pairs])


MIXTURES: Mapping[str, type[Block]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (
            *(Mixtral, DeepSeek, GptOss, NoGate, PostNorm, Marked, RowsAndCounts, ListOfExperts),
        )
    }
)


def mixtures_in(model: nn.Module) -> Iterator[tuple[str, Mixture]]:
    """The blocks with experts, each with the name of the module that holds them."""
    for name, part in model.named_modules():
        if isinstance(part, Mixture):
            yield f"{name}.experts{'.grouped' * isinstance(part, RowsAndCounts)}", part


def know_routers(model: nn.Module) -> None:
    """Have ``model`` say which modules are routers, instead of its blocks."""
    vars(model)["_can_record_outputs"] = {"router_logits": Router}
    for _, block in mixtures_in(model):
        del block._can_record_outputs


class Balance:
    """What balances experts, in one process: of the last forward, and of all since a step."""

    def __init__(self, model: nn.Module, split: Collection[str]) -> None:
        self.logits: dict[Router, torch.Tensor] = {}
        self.counts: dict[Router, torch.Tensor] = {}
        self.is_joint = hasattr(model, "_can_record_outputs")
        self.moved = [block.router for name, block in mixtures_in(model) if name in split]
        for _, block in mixtures_in(model):
            block.router.register_forward_hook(self._keep)

    def _keep(self, router: Router, args: Any, output: tuple[torch.Tensor, ...]) -> None:
        # Nothing of evaluations, and nothing twice of what a backward computes again.
        if not router.training or torch._C._current_graph_task_id() != -1:
            return
        _, self.logits[router], indices = output
        counts = indices.flatten().bincount(minlength=output[1].shape[1])
        self.counts[router] = self.counts.get(router, torch.zeros_like(counts)) + counts

    def auxiliary(self) -> torch.Tensor:
        """As Hugging Face's models have it: over all layers of a model together."""
        layers = [*self.logits.items()]
        models = [layers] if self.is_joint else [[layer] for layer in layers]
        total = torch.zeros(())
        for model in models:
            found = torch.cat([logits for _, logits in model]).softmax(1)
            number = found.shape[1]
            chosen = found.topk(model[0][0].top_k).indices.flatten().bincount(minlength=number)
            total = total + number * (chosen / len(found) * found.mean(0)).sum()
        return total

    def z(self) -> torch.Tensor:
        each = [logits.logsumexp(1).square().mean() for logits in self.logits.values()]
        return torch.stack(each).sum()

    def move(self, rate: float) -> None:
        for router, counts in self.counts.items():
            if router in self.moved and hasattr(router, BIAS):
                sign = (counts.sum() - len(counts) * counts).sign()
                getattr(router, BIAS).add_(sign, alpha=rate)
        self.counts.clear()
