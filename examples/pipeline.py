"""Splits a model into stages on different ranks, and a batch into microbatches.

torchrun --nproc-per-node 2 examples/pipeline.py
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.comm import connect
from meshwright.pipelining import Schedule1F1B, balanced, clip_grad_norm_, pipeline

world = connect()  # reads what torchrun put into the environment
torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)), nn.Linear(32, 1)
)
# Traced with one microbatch of 8 rows; the largest stage is as small as it can be.
pipe = pipeline(model, (torch.randn(8, 32),), split_policy=balanced(world.size))
stage = pipe.build_stage(world.rank, world.device)
schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-3)
draw = torch.Generator().manual_seed(1)
losses: list[torch.Tensor] = []
for _ in range(50):
    x = torch.randn(64, 32, generator=draw)
    inputs = (x,) if stage.is_first else ()
    target = x.mean(dim=1, keepdim=True) if stage.is_last else None
    optimizer.zero_grad()
    schedule.step(*inputs, target=target, losses=losses)
    clip_grad_norm_(stage, 1.0)  # by the norm over all stages
    optimizer.step()
if stage.is_last:
    print(f"rank {world.rank} of {world.size}: loss {sum(losses) / len(losses):.6f}")
