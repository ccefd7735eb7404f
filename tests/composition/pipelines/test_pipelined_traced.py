"""`parallelize` with axis pipeline and models that are no chains: encoders, decoders, any batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.composition import parallelize
from meshwright.errors import PlanError
from meshwright.plan import PipelinePlan, Plan
from meshwright.testing import Ranks
from support.internals.axes import Axes

WORDS, WIDTH = 11, 8


@dataclass
class Known:
    """An output that a trace sees into, once it is registered."""

    logits: Any
    states: Any = None


torch.export.register_dataclass(Known, serialized_type_name="Known")


@dataclass
class Unknown(Known):
    """An output that nobody has registered."""


class Named(NamedTuple):
    logits: Any
    states: Any = None


def wrapped(kind: str, logits: torch.Tensor, states: Any) -> Any:
    """What a model returns, in one of the ways in which models do."""
    kinds = {"known": Known, "unknown": Unknown, "named": Named}
    if kind == "dict":
        return {"logits": logits, "states": states, "cache": None}
    if kind == "tuple":
        return logits, states
    return kinds[kind](logits, states) if kind in kinds else logits


def logits_of(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        return output["logits"]
    if isinstance(output, tuple):
        return output[0]
    return output.logits if isinstance(output, Known) else output


class Block(nn.Module):
    """Attention with what the block before it hands on."""

    def __init__(self, *, crosses: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.cross = Block() if crosses else None

    def forward(
        self, x: torch.Tensor, bias: Any, memory: Any = None, mask: Any = None
    ) -> tuple[torch.Tensor, Any]:
        other = x if self.cross is not None or memory is None else memory
        scores = self.q(self.norm(x)) @ self.k(other).transpose(1, 2) + bias
        x = x + self.v(scores.softmax(-1) @ other).tanh()
        return (x if self.cross is None else self.cross(x, mask, memory)[0]), bias


class Bert(nn.Module):
    """An encoder, with a mask, positions in a buffer and a tied head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.register_buffer("positions", torch.arange(16)[None], persistent=False)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, mask: Any = None) -> Any:
        mask = torch.ones_like(ids) if mask is None else mask
        x = self.words(ids) + self.places(self.positions[:, : ids.size(1)])
        bias = (1.0 - mask[:, None].to(x.dtype)) * torch.finfo(x.dtype).min
        states: tuple[Any, ...] = (x,)
        for layer in self.layers:
            x = layer(x, bias)[0]
            states += (x,)
        return wrapped(self.kind, self.head(x), states)


class Stack(nn.Module):
    def __init__(self, words: nn.Embedding, *, crosses: bool) -> None:
        super().__init__()
        self.words, self.near = words, nn.Embedding(32, 1)
        self.blocks = nn.ModuleList(Block(crosses=crosses) for _ in range(2))

    def forward(
        self, kind: str, ids: torch.Tensor, mask: Any, memory: Any = None, cross: Any = None
    ) -> Any:
        places = torch.arange(ids.shape[1])
        bias = self.near(places[:, None] - places[None] + 16).permute(2, 0, 1) + mask
        x = self.words(ids)
        for block in self.blocks:
            x, bias = block(x, bias, memory, cross)
        return wrapped(kind, x, None)


class T5(nn.Module):
    """An encoder and a decoder, whose table has a name that no forward uses."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.shared = kind, nn.Embedding(WORDS, WIDTH)
        self.register_buffer("unread", torch.ones(1), persistent=False)
        self.encoder = Stack(self.shared, crosses=False)
        self.decoder = Stack(self.shared, crosses=True)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, ids: Any = None, mask: Any = None, decoder_ids: Any = None) -> Any:
        hidden = (1.0 - mask[:, None].double()) * -1e9
        memory = logits_of(self.encoder(self.kind, ids, hidden))
        size = decoder_ids.shape[1]
        causal = torch.full((size, size), -1e9).triu(1).double()
        x = logits_of(self.decoder(self.kind, decoder_ids, causal, memory, hidden))
        return wrapped(self.kind, self.head(x), memory)


class Nested(nn.Module):
    """Takes its batch as a dict that has a list."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, given: dict[str, Any]) -> torch.Tensor:
        x = first = F.one_hot(given["ids"], WIDTH).double() + given["more"][0]
        for layer in self.layers:
            x = layer(x).tanh() + first
        return self.head(x)


MODELS = {"bert": Bert, "t5": T5, "nested": Nested}


def model_of(name: str, kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name](kind).double()


def batch_of(name: str, rows: int) -> tuple[Any, torch.Tensor]:
    draw = torch.Generator().manual_seed(rows)
    ids = torch.randint(WIDTH, (rows, 6), generator=draw)
    mask = torch.ones(rows, 6, dtype=torch.long)
    mask[0, 4:] = 0
    if name == "nested":
        return ({"ids": ids, "more": [torch.randn(rows, 6, WIDTH, generator=draw).double()]},), ids
    if name == "bert":
        return (ids, mask), ids
    return {"ids": ids, "mask": mask, "decoder_ids": ids[:, :5]}, ids[:, 1:]


def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_of(output).flatten(0, 1), target.flatten())


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def call(model: nn.Module, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, Mapping) else model(*batch)


def laid_out(name: str, kind: str, rows: int, **axes: int) -> Any:
    plan = Plan(axes=Axes.of(axes), pipeline=PipelinePlan(schedule="1f1b", microbatches=2))
    example = batch_of(name, rows)[0]
    return parallelize(model_of(name, kind), plan, optimizer=adam, loss=loss, example=example)


def check(name: str, kind: str, rows: int, **axes: int) -> None:
    """Train with a smaller last batch, save, load, go on and evaluate, as one process does."""
    alone = model_of(name, kind)
    optimizer = adam(alone.parameters())
    trainable = laid_out(name, kind, rows, **axes)
    for size in (8, 4, 8):
        batch, target = batch_of(name, size)
        expected = loss(call(alone, batch), target)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()

        def mine(value: torch.Tensor) -> torch.Tensor:
            return value.chunk(trainable.data_size)[trainable.data_rank]

        share = torch.utils._pytree.tree_map(mine, batch)
        found = trainable.step(share, mine(target)).loss
        torch.testing.assert_close(found, expected.detach())
        state = trainable.state_dict()
        names = [n for n, _ in alone.named_parameters()]
        assert state["optimizer"]["param_groups"][0]["params"] == names
        trainable.load_state_dict(state)
    torch.testing.assert_close(state["model"], dict(alone.state_dict()))
    batch, target = batch_of(name, 4)
    output, expected = trainable.eval(batch, target).output, call(alone.eval(), batch)
    assert type(output) is type(expected)
    torch.testing.assert_close(logits_of(output), logits_of(expected))


def body_quick() -> None:
    check("t5", "known", 1, pipeline=2)
    check("nested", "", 1, pipeline=2)


@pytest.mark.slow
def test_encoders_and_decoders_train_on_batches_of_any_size(ranks: Ranks) -> None:
    ranks(2, body_quick)


def body_all(axes: dict[str, int]) -> None:
    for name in MODELS:
        for kind, rows in (("tuple", 2), ("dict", 1), ("known", 2)):
            check(name, kind, rows, **axes)


@pytest.mark.few(0, slow=1)
@pytest.mark.devices("host", reason="torch.export sees cpu and cpu:0 as two devices")
@pytest.mark.parametrize("axes", [{"shard": 2}, {"replicate": 2}])
def test_encoders_and_decoders_on_other_axes(ranks: Ranks, axes: dict[str, int]) -> None:
    ranks(4, body_all, {**axes, "pipeline": 2}, timeout=400)


def body_refused() -> None:
    with pytest.raises(PlanError, match=r"dataclass Unknown.*call torch.export.register_data"):
        laid_out("bert", "unknown", 2, pipeline=2)
    check("bert", "named", 2, pipeline=2)


def test_outputs_that_cannot_cross_are_refused_and_named_ones_cross(ranks: Ranks) -> None:
    ranks(2, body_refused)
