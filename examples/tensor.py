"""Splits the matrices of each layer over the ranks, which compute every batch together.

torchrun --nproc-per-node 2 examples/tensor.py
"""

from __future__ import annotations

import torch
from torch import nn

import meshwright as mw
from meshwright.comm import connect
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel


class Block(nn.Module):
    """A feed-forward layer with a residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


world = connect()  # reads what torchrun put into the environment
torch.manual_seed(0)
model = nn.Sequential(Block(32), Block(32), nn.Linear(32, 1))
mesh = mw.init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("tensor",))
# The first matrix is split along its outputs, the second along its inputs; one sum follows.
mw.parallelize_module(model, mesh, {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after splitting
draw = torch.Generator().manual_seed(1)
for _ in range(50):
    x = torch.randn(64, 32, generator=draw)  # the same on all ranks
    loss = (model(x) - x.mean(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    mw.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print(f"rank {world.rank} of {world.size}: loss {loss:.6f}")
