"""Trains a plain model on as many processes as torchrun starts: the first example of the README."""

from __future__ import annotations

import torch

import meshwright as mw
from meshwright.comm import connect

world = connect()  # reads torchrun's environment variables
model = mw.replicate(torch.nn.Linear(8, 1))  # every rank starts from the weights of rank 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(world.rank)  # each rank draws different data
for _ in range(50):
    x = torch.randn(32, 8, generator=draw)
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()  # gradients are averaged over the ranks while this runs
    optimizer.step()
print(f"rank {world.rank} of {world.size}: loss {loss:.6f}, weights {model.weight.sum():.6f}")
