"""A loop that may stop at any step and resume, on the same number of ranks or another.

torchrun --nproc-per-node 2 examples/own_loop.py runs/own 20
torchrun --nproc-per-node 2 examples/own_loop.py runs/own 40
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from torch import nn

import meshwright as mw
from meshwright import checkpoint
from meshwright.comm import connect
from meshwright.data import DataLoader

if len(sys.argv) != 3:
    sys.exit("usage: torchrun --nproc-per-node 2 examples/own_loop.py FOLDER STEPS")
folder, steps = sys.argv[1], int(sys.argv[2])
world = connect()  # reads what torchrun put into the environment
torch.manual_seed(0)
model = mw.fully_shard(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
samples = [(x, x.sum().view(1)) for x in inputs]
# 32 samples a step over all ranks, in an order that does not depend on them.
loader: DataLoader[list[torch.Tensor]] = DataLoader(
    samples, 32, seed=1, data_rank=world.rank, data_size=world.size
)
state: dict[str, Any] = {
    "model": model,
    "optimizer": optimizer,
    "scheduler": scheduler,
    "data": loader,
}
step, loss = 0, torch.tensor(float("nan"))
if checkpoint.latest(folder):
    step = checkpoint.load(folder, **state).step
batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
while step < steps:
    x, y = next(batches)
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    mw.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    step += 1
    if step % 10 == 0 or step == steps:
        checkpoint.save(folder, step, **state, keep_last=2)
print(f"rank {world.rank} of {world.size}: step {step}, loss {loss:.6f}")
