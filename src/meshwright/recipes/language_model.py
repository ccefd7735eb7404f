"""A byte-level GPT and its optimizer: AdamW, linear warm-up, cosine decay.

The model is small and plain, with names that sharding and tensor-parallel rules can address.

Shapes: ``B`` sequences, ``T`` positions, ``D`` width, ``H`` heads, ``K`` width of a head::

    tokens_BT -> embedding -> layers.0 -> ... -> layers.N-1 -> norm -> head -> logits_BTV
                              layer: x + attention(attention_norm(x)); x + feed_forward(...norm(x))

With ``experts``, ``feed_forward`` is a `Mixture`: ``N`` tokens, each to ``top_k`` of ``M`` experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional

from meshwright.expert_parallel import experts
from meshwright.expert_parallel.routing import RECORDED
from meshwright.randomness import name_seed
from meshwright.recipes.config import ModelConfig, OptimizerConfig

VOCABULARY = 256


class LanguageModel(nn.Module):
    """A model that predicts the next byte at every position.

    It holds no buffers: the rotary angles follow from the positions, so the module can be built on
    the meta device, split anywhere, and cast to any dtype.
    """

    def __init__(self, config: ModelConfig, places: Callable[..., Tensor] = torch.arange) -> None:
        """``places`` gives the positions of a number of tokens: those of a part under context."""
        super().__init__()
        self.config = config
        # As models of Hugging Face say which of their modules are routers, for auxiliary losses.
        vars(self)[RECORDED] = {"router_logits": Router}
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config, places) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Compute logits ``(B, T, 256)`` of the byte after each position of ``tokens_BT``."""
        x_BTD = self.dropout(self.embedding(tokens_BT))
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.head(self.norm(x_BTD))


class Layer(nn.Module):
    """A pre-norm block: attention, then feed-forward, each added to its input."""

    def __init__(self, config: ModelConfig, places: Callable[..., Tensor] = torch.arange) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config, places)
        self.feed_forward_norm = nn.LayerNorm(config.dim)
        self.feed_forward = Mixture(config) if config.experts else FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Compute the block's output, of the shape of its input."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        return x_BTD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTD)))


class Attention(nn.Module):
    """Causal self-attention with rotary positions.

    The number of heads follows from the projection's width at run time, so a column-parallel
    ``wq``, ``wk``, ``wv`` simply computes fewer heads on each rank.
    """

    def __init__(self, config: ModelConfig, places: Callable[..., Tensor] = torch.arange) -> None:
        super().__init__()
        self.places = places
        self.head_dim = config.dim // config.heads
        self.rotary_base = config.rotary_base
        self.dropout = config.dropout
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.dim, bias=False)
        self.wv = nn.Linear(config.dim, config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Compute the attention's output ``(B, T, D)``."""
        places_T = self.places(x_BTD.shape[1], device=x_BTD.device)
        turn = _rotary_angles(x_BTD, places_T, self.head_dim, self.rotary_base)
        query_BHTK = _rotate(self._heads(self.wq(x_BTD)), turn)
        key_BHTK = _rotate(self._heads(self.wk(x_BTD)), turn)
        value_BHTK = self._heads(self.wv(x_BTD))
        mixed_BHTK = functional.scaled_dot_product_attention(
            query_BHTK,
            key_BHTK,
            value_BHTK,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        return self.wo(mixed_BHTK.transpose(1, 2).flatten(2))

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """``w2(gelu(w1(x)))``, or ``w2(silu(w1(x)) * w3(x))`` for ``swiglu``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden or 4 * config.dim
        self.w1 = nn.Linear(config.dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, config.dim, bias=False)
        self.w3 = (
            nn.Linear(config.dim, hidden, bias=False) if config.activation == "swiglu" else None
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Compute the feed-forward output ``(B, T, D)``."""
        if self.w3 is None:
            return self.w2(functional.gelu(self.w1(x_BTD)))
        return self.w2(functional.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Router(nn.Linear):
    """Logits of the experts of each token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.dim, config.experts, bias=False)
        self.top_k = config.top_k


class Mixture(nn.Module):
    """The sum of a token's ``top_k`` experts, weighed by their share of the router's softmax."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = experts(Experts(config))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Compute the output ``(B, T, D)``."""
        x_ND = x_BTD.flatten(0, 1)
        weights_NK, indices_NK = self.router(x_ND).softmax(-1).topk(self.router.top_k)
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        return self.experts(x_ND, indices_NK, weights_NK).view_as(x_BTD)


class Experts(nn.Module):
    """Feed-forward layers, in tensors with one row for each: ``w1``, ``w2``, and ``w3``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_experts = config.experts
        hidden = config.hidden or 4 * config.dim
        wide, narrow = (config.experts, config.dim, hidden), (config.experts, hidden, config.dim)
        self.w1, self.w2 = Parameter(torch.empty(wide)), Parameter(torch.empty(narrow))
        self.w3 = Parameter(torch.empty(wide)) if config.activation == "swiglu" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw values as `nn.Linear` does; `initialize` draws others."""
        for parameter in self.parameters():
            bound = 1 / math.sqrt(parameter.shape[1])
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x_ND: Tensor, indices_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Compute the weighed sum of each token's experts ``(N, D)``."""
        found_ND = torch.zeros_like(x_ND)
        for expert in range(self.num_experts):
            token, slot = (indices_NK == expert).nonzero(as_tuple=True)
            rows = x_ND[token]
            hidden = rows @ self.w1[expert]
            if self.w3 is None:
                hidden = functional.gelu(hidden)
            else:
                hidden = functional.silu(hidden) * (rows @ self.w3[expert])
            rows = hidden @ self.w2[expert] * weights_NK[token, slot, None]
            found_ND = found_ND.index_add(0, token, rows.to(found_ND.dtype))
        return found_ND


def initialize(model: nn.Module, seed: int) -> nn.Module:
    """Fill every parameter of ``model`` in place; returns it.

    A value depends on the seed and on the parameter's name alone, never on the order or number of
    parameters: a stage of a pipeline starts with the values it would have in the whole model.
    Matrices are normal with deviation 0.02, those that write into the residual stream smaller by
    the square root of the number of additions; vectors of norms start at one, biases at zero.
    """
    depth = sum(1 for name, _ in model.named_modules() if name.endswith(".attention"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
                continue
            writers = ("attention.wo.weight", "feed_forward.w2.weight", "experts.w2")
            writes_residual = name.endswith(writers)
            deviation = 0.02 / math.sqrt(2 * depth) if writes_residual else 0.02
            generator = torch.Generator().manual_seed(name_seed(seed, name))
            values = torch.empty(parameter.shape, device="cpu")
            parameter.copy_(values.normal_(0.0, deviation, generator=generator))
    return model


def _rotary_angles(
    x_BTD: Tensor, places_T: Tensor, head_dim: int, base: float
) -> tuple[Tensor, Tensor]:
    """Compute cosine and sine ``(T, K/2)`` by which pairs of channels turn at each position."""
    precise = torch.float64 if x_BTD.dtype == torch.float64 else torch.float32
    pairs = torch.arange(0, head_dim, 2, device=x_BTD.device, dtype=precise)
    angles = torch.outer(places_T.to(precise), base ** (-pairs / head_dim))
    return angles.cos().to(x_BTD.dtype), angles.sin().to(x_BTD.dtype)


def _rotate(x_BHTK: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate by positions (Su et al., 2021): channel ``i`` is paired with ``i + K/2``."""
    cosine, sine = turn
    first, second = x_BHTK.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Compute the learning rate of step ``step`` (the first is 1) in a run of ``steps``.

    It rises linearly to ``config.highest_rate`` over the warm-up, then falls along half a cosine
    to ``final_fraction`` of it at the last step (Loshchilov and Hutter, 2017).
    """
    warmup = min(config.warmup_steps, steps)
    if step <= warmup:
        return config.highest_rate * step / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.highest_rate * (config.final_fraction + (1 - config.final_fraction) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def adamw(config: OptimizerConfig) -> Callable[[Iterable[Parameter]], torch.optim.Optimizer]:
    """Make a factory of AdamW, which decays matrices only, for ``parallelize`` to call."""

    def build(parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
        owned = [parameter for parameter in parameters if parameter.requires_grad]
        groups = [
            {"params": [p for p in owned if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in owned if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
        )

    return build
