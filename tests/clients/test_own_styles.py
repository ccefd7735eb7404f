"""Tensor parallelism by styles of a program's own: a subclass of ours, and torch's protocol.

As OLMo-core lays out its blocks: norms behind attention and feed-forward on a part of the sequence,
norms of queries and keys on the way to heads, activations that stay DTensors.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module

from meshwright import tensor_parallel
from meshwright.comm import communicator
from meshwright.fsdp import fully_shard
from meshwright.mesh import DeviceMesh, init_device_mesh
from meshwright.tensor_parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from meshwright.testing import Ranks
from support.clients import assert_same, whole

pytestmark = [pytest.mark.slow]

WORDS, WIDTH, HEADS, LENGTH, ROWS, STEPS = 16, 8, 2, 6, 4, 4


class SequenceParallel(tensor_parallel.SequenceParallel):
    """A norm on a part of the sequence whose output is laid out as asked for."""

    def __init__(
        self, *, output_layouts: Placement | None = None, use_local_output: bool = False
    ) -> None:
        super().__init__(use_local_output=use_local_output)
        self.output_layouts = (output_layouts or Shard(1),)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: tuple[Placement],
        use_local_output: bool,
        module: nn.Module,
        outputs: DTensor,
        device_mesh: DeviceMesh,
    ) -> torch.Tensor:
        if outputs.placements != output_layouts:
            outputs = outputs.redistribute(placements=output_layouts, async_op=True)
        return outputs.to_local() if use_local_output else outputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            self._replicate_module_fn,
            partial(self._prepare_input_fn, self.sequence_sharding),
            partial(self._prepare_output_fn, self.output_layouts, self.use_local_output),
        )


class WholeModule(ParallelStyle):
    """A small module that every rank computes alike, with replicated parameters."""

    def __init__(self, *, output_layouts: Placement) -> None:
        super().__init__()
        self.output_layouts = (output_layouts,)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            x = inputs[0]
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
            return (x.redistribute(placements=(Replicate(),)), *inputs[1:])

        def leave(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> DTensor:
            return output.redistribute(placements=self.output_layouts)

        return distribute_module(module, device_mesh, None, enter, leave)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w_q, self.w_k, self.w_v, self.w_out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_norm(self.w_q(x)), self.k_norm(self.w_k(x)), self.w_v(x)
        q, k, v = (
            each.view(*each.shape[:2], -1, WIDTH // HEADS).transpose(1, 2) for each in (q, k, v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.w_out(mixed.transpose(1, 2).flatten(2))

    def apply_tp(self, mesh: DeviceMesh) -> None:
        parallelize_module(
            self,
            mesh,
            {
                "w_q": ColwiseParallel(output_layouts=Shard(1), use_local_output=False),
                "w_k": ColwiseParallel(output_layouts=Shard(1), use_local_output=False),
                "q_norm": SequenceParallel(output_layouts=Shard(2), use_local_output=True),
                "k_norm": SequenceParallel(output_layouts=Shard(2), use_local_output=True),
                "w_v": ColwiseParallel(),
                "w_out": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            },
        )


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 12, bias=False) for _ in range(2))
        self.w2 = nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(), nn.RMSNorm(WIDTH)
        self.feed_forward, self.feed_forward_norm = FeedForward(), nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention_norm(self.attention(x))
        return x + torch.sigmoid(self.gate(x)) * self.feed_forward_norm(self.feed_forward(x))

    def apply_tp(self, mesh: DeviceMesh) -> None:
        self.attention.apply_tp(mesh)
        parts, whole = {"input_layouts": Shard(1)}, {"desired_input_layouts": Replicate()}
        parallelize_module(
            self,
            mesh,
            {
                "attention": PrepareModuleInput(**parts, **whole),
                "attention_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(**parts, **whole),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w3": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
                "feed_forward_norm": SequenceParallel(),
                "gate": WholeModule(output_layouts=Shard(1)),
            },
        )


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleDict({str(n): Block() for n in range(2)})
        self.norm, self.w_out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embeddings(tokens)
        for block in self.blocks.values():
            h = block(h)
        return self.w_out(self.norm(h))

    def apply_tp(self, mesh: DeviceMesh) -> None:
        cut = {"output_layouts": Shard(1), "use_local_output": False}
        head = {"input_layouts": Shard(1), "use_local_output": False}
        for block in self.blocks.values():
            block.apply_tp(mesh)
        parallelize_module(
            self,
            mesh,
            {
                "embeddings": RowwiseParallel(input_layouts=Replicate(), **cut),
                "norm": SequenceParallel(),
                "w_out": ColwiseParallel(output_layouts=Shard(-1), **head),
            },
        )


def build() -> Any:
    torch.manual_seed(0)
    return Transformer().double()


def train(model: Any, rank: int, size: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        rows = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=draw).chunk(size)[rank]
        optimizer.zero_grad()
        logits = model(rows[:, :-1])
        with loss_parallel():
            loss: Any = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
    return losses


def body(size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    world, model = communicator(), build()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    model.apply_tp(mesh["tp"])
    if size == 4:
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    found = train(model, mesh["dp"].get_local_rank(), size // 2)
    losses = world.all_reduce(torch.tensor(found, dtype=torch.float64)).wait() / size
    return losses.tolist(), whole(model)


@pytest.mark.parametrize("size", [2, 4])
def test_styles_of_a_program_train_as_one_process(ranks: Ranks, size: int) -> None:
    model = build()
    expected = train(model, 0, 1)
    assert expected[-1] < expected[0]
    for losses, weights in ranks(size, body, size, timeout=240):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0.0)
        assert_same([weights], whole(model))
