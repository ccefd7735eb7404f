"""A decoder that is sharded on the meta device, its last norm and its head as one unit.

The order of torchtitan: build on meta, recompute and shard blocks, give memory, draw the weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from meshwright.comm import communicator
from meshwright.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.clients import assert_same, whole

pytestmark = [pytest.mark.slow]

WORDS, WIDTH, LENGTH, ROWS, STEPS, ACCUMULATE = 31, 8, 6, 8, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.wqkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ffn_norm = nn.RMSNorm(WIDTH)
        self.w1 = nn.Linear(WIDTH, 12, bias=False)
        self.w2 = nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        heads = self.wqkv(self.attention_norm(x)).unflatten(-1, (3, 2, -1)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in heads)
        mixed = F.scaled_dot_product_attention(q * turns, k * turns, v, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).flatten(2))
        return x + self.w2(F.silu(self.w1(self.ffn_norm(x))))

    def init_weights(self, std: float) -> None:
        for norm in (self.attention_norm, self.ffn_norm):
            norm.reset_parameters()
        for linear in (self.wqkv, self.wo, self.w1, self.w2):
            nn.init.trunc_normal_(linear.weight, mean=0.0, std=std)


class Decoder(nn.Module):
    turns: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("turns", self._turns(), persistent=False)
        self.layers = nn.ModuleDict({str(n): Block() for n in range(3)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def _turns(self) -> torch.Tensor:
        return torch.cos(torch.arange(LENGTH, dtype=torch.float64)).unsqueeze(-1)

    def init_weights(self) -> None:
        self.turns = self._turns()
        nn.init.normal_(self.tok_embeddings.weight)
        for number, layer in enumerate(self.layers.values()):
            layer.init_weights(0.3 / (number + 1))
        self.norm.reset_parameters()
        bound = 3 * WIDTH**-0.5
        nn.init.trunc_normal_(self.output.weight, std=WIDTH**-0.5, a=-bound, b=bound)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.turns)
        return self.output(self.norm(h))


def apply_fsdp(model: Any, mesh: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
    options = {"mesh": mesh, "mp_policy": policy}
    for name, block in model.layers.items():
        model.layers[name] = checkpoint_wrapper(block)
    fully_shard(model.tok_embeddings, **options)
    for block in model.layers.values():
        fully_shard(block, **options)
    fully_shard([model.norm, model.output], **options, reshard_after_forward=False)
    fully_shard(model, **options)


def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (ACCUMULATE, ROWS, LENGTH + 1), generator=draw)
    return tokens[..., :-1], tokens[..., 1:]


def train(model: Any, rank: int, size: int) -> tuple[list[float], list[float]]:
    """Losses of this rank's rows, and norms; the state is in the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / STEPS)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for micro, (x, y) in enumerate(zip(*batches(step), strict=True)):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro == ACCUMULATE - 1)
            logits = model(x.chunk(size)[rank])
            loss = F.cross_entropy(logits.flatten(0, 1), y.chunk(size)[rank].flatten())
            (loss / ACCUMULATE).backward()
            total += loss.item() / ACCUMULATE
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
        norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
        optimizer.step()
        schedule.step()
        losses.append(total)
    return losses, norms


def alone() -> tuple[Any, ...]:
    torch.manual_seed(7)
    model = Decoder().double()
    torch.manual_seed(8)
    model.init_weights()
    return *train(model, 0, 1), whole(model)


def body(shape: tuple[int, ...]) -> tuple[Any, ...]:
    world = communicator()
    with torch.device("meta"):
        model: Any = Decoder().double()
    names = ("replicate", "shard")[-len(shape) :]
    apply_fsdp(model, init_device_mesh("cpu", shape, mesh_dim_names=names))
    model.to_empty(device="cpu")
    torch.manual_seed(8)
    with torch.no_grad():
        model.init_weights()
    model.train()
    losses, norms = train(model, world.rank, world.size)
    mean = world.all_reduce(torch.tensor(losses, dtype=torch.float64)).wait() / world.size
    state = whole(model)
    return mean.tolist(), norms, state


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
def test_norm_and_head_are_one_unit_from_meta_on(ranks: Ranks, shape: tuple[int, ...]) -> None:
    losses, norms, weights = alone()
    assert losses[-1] < losses[0]
    for found in ranks(torch.Size(shape).numel(), body, shape, timeout=240):
        torch.testing.assert_close(found[:2], (losses, norms), rtol=1e-9, atol=0.0)
        assert_same([found[2]], weights)
