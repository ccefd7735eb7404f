"""Launches of a step: one gather and one reduction move all of a unit, whatever it holds."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import fully_shard
from meshwright.testing import Ranks
from support.internals.data_parallel import buffer, sharding
from support.internals.testing import SimulatedGroup

WIDE = 32


class LlamaBlock(nn.Module):
    """Seven large matrices and two small vectors, one of them of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDE), nn.RMSNorm(WIDE)])
        self.attention = nn.ModuleList([nn.Linear(WIDE, WIDE, bias=False) for _ in range(4)])
        self.gates = nn.ModuleList([nn.Linear(WIDE, 2 * WIDE, bias=False) for _ in range(2)])
        self.down = nn.Linear(2 * WIDE, WIDE, bias=False)
        self.norms[1].double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (layer(y) for layer in self.attention[:3])
        x = x + self.attention[3](torch.softmax(q @ k.mT, -1) @ v)
        y = self.norms[1](x.double()).to(x.dtype)
        return x + self.down(nn.functional.silu(self.gates[0](y)) * self.gates[1](y))


def body() -> tuple[dict[tuple[str, str], int], int]:
    """Launches of one step by label, and how many of them were of several operations."""
    world = communicator()
    torch.manual_seed(0)
    plain = nn.Sequential(LlamaBlock(), LlamaBlock())
    torch.manual_seed(0)
    model = nn.Sequential(LlamaBlock(), LlamaBlock())
    x = torch.randn(2, 4, WIDE)
    recorder, together = Recorder(), mock.Mock(side_effect=SimulatedGroup._start_coalescing)
    with (
        mock.patch.object(buffer, "ALONE", 4 * WIDE * WIDE),  # as of a block of usual width
        mock.patch.object(sharding, "ALONE", 4 * WIDE * WIDE),
    ):
        for block in model:
            fully_shard(block)
        fully_shard(model)
    for _ in range(2):
        recorder.clear()
        together.reset_mock()
        model.zero_grad()
        with (
            observe(recorder),
            mock.patch.object(SimulatedGroup, "_start_coalescing", lambda *args: together(*args)),
        ):
            model(x).sum().backward()
    plain(x).sum().backward()
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert expected.grad is not None and found.grad is not None
        whole = found.grad.full_tensor()
        torch.testing.assert_close(whole, expected.grad, msg=lambda text, n=name: f"{n}: {text}")
    kinds = ("all_gather", "reduce_scatter")
    counts = Counter(
        (c.kind, c.label)
        for c in recorder.collectives
        if c.kind in kinds and c.label.startswith(("unshard", "reduce"))
    )
    return dict(counts), (-1 if world.is_on_host else together.call_count)


@pytest.mark.devices("host", "simulated")
def test_a_block_is_gathered_by_one_launch_and_reduced_by_one(ranks: Ranks) -> None:
    for counts, together in ranks(2, body):
        assert counts == {
            ("all_gather", "unshard 0"): 2,  # once for the forward and once for the backward
            ("all_gather", "unshard 1"): 2,
            ("reduce_scatter", "reduce 0"): 1,
            ("reduce_scatter", "reduce 1"): 1,
        }
        assert together in (-1, 6)
