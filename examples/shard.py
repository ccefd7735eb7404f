"""Shards parameters, gradients and optimizer state over the ranks.

torchrun --nproc-per-node 2 examples/shard.py
"""

from __future__ import annotations

import torch
from torch import nn

import meshwright as mw
from meshwright.comm import connect

world = connect()  # reads what torchrun put into the environment
torch.manual_seed(0)  # all ranks start from the same weights
blocks = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)]
model = nn.Sequential(*blocks, nn.Linear(32, 1))
for block in blocks:
    mw.fully_shard(block)  # one unit: gathered just before it computes, freed afterwards
mw.fully_shard(model)  # the rest of it
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after sharding
draw = torch.Generator().manual_seed(1)
for _ in range(50):
    batch = torch.randn(64, 32, generator=draw)
    x = batch.chunk(world.size)[world.rank]  # each rank reads its share
    loss = (model(x) - x.mean(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()  # gradients are reduced to the parts while this runs
    mw.clip_grad_norm_(model.parameters(), 1.0)  # by the norm over all ranks
    optimizer.step()
print(f"rank {world.rank} of {world.size}: loss {loss:.6f}")
