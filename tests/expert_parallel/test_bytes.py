"""What a layer sends: the bytes that are necessary, and no operation for each expert."""

from __future__ import annotations

import pytest
import torch

from meshwright import comm, parallelize_module
from meshwright.comm import Recorder, observe
from meshwright.expert_parallel import ExpertParallel, experts
from meshwright.testing import Ranks
from support.expert_parallel.samples import expert_mesh

CELLS = (
    *((2048, 8, 1, "float32"), (2048, 8, 2, "float32"), (2048, 8, 4, "float32")),
    *((2048, 7, 2, "float32"), (4096, 16, 8, "float32"), (4096, 8, 2, "bfloat16")),
    *((4096, 16, 4, "bfloat16"), (1024, 4, 2, "float64"), (1024, 3, 3, "float64")),
    (2048, 2, 1, "float64"),
)
"""Features, experts, experts of a token, dtype."""


class Scaled(torch.nn.Module):
    """Experts that multiply by a number each."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.num_experts = number
        self.scale = torch.nn.Parameter(torch.arange(1.0, number + 1))

    def forward(
        self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        factors = (self.scale[indices] * weights).sum(1, keepdim=True)
        return x * factors.to(x.dtype)


def body_bytes(exchange: str) -> None:
    world, mesh = comm.communicator(), expert_mesh()
    for features, number, k, name in CELLS:
        dtype = getattr(torch, name)
        module = parallelize_module(
            experts(Scaled(number)).to(dtype), mesh, ExpertParallel(exchange=exchange)
        )
        draw = torch.Generator().manual_seed(world.rank)
        x = torch.randn(30 + world.rank, features, generator=draw).to(dtype).requires_grad_()
        logits = torch.randn(len(x), number, generator=draw)
        weights, indices = logits.softmax(1).topk(k)
        with observe(recorder := Recorder()):
            module(x, indices, weights.to(dtype)).sum().backward()
        each = -(-number // world.size)  # experts of a rank
        owners = (indices // each).tolist()
        rows = sum(len(set(row)) if exchange == "tokens" else len(row) for row in owners)
        sent = [c for c in recorder.collectives if "counts" not in c.label]
        assert [c.kind for c in sent] == ["all_to_all"] * 4, [c.label for c in sent]
        out = sent[0]
        assert out.shape[0] == rows
        needed = rows * features * dtype.itemsize
        assert needed <= out.bytes <= 1.01 * needed, (features, number, k, name)
        # What has come goes back, and so do the gradients, with those of weights.
        whole = sum(world.gather_values(needed, label="bytes"))
        assert sum(world.gather_values(sent[1].bytes, label="bytes")) == whole
        assert sent[2].bytes == needed
        assert whole <= sum(world.gather_values(sent[3].bytes, label="bytes")) <= 1.01 * whole


@pytest.mark.parametrize("exchange", ["tokens", "pairs"])
def test_rows_travel_once_to_each_rank_or_expert(ranks: Ranks, exchange: str) -> None:
    ranks(2, body_bytes, exchange)
