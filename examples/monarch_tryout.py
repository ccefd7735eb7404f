"""A try-out, not a supported way: ranks as actors of Monarch, which is still changing.

Run it where ``torchmonarch`` is installed: ``python examples/monarch_tryout.py``.
"""

from __future__ import annotations

import os

import torch
from monarch.actor import Actor, current_rank, endpoint, this_host

import meshwright as mw
from meshwright.comm import connect, disconnect

RANKS = 2


class Rank(Actor):
    """A rank: its place among the processes is what torchrun would have said."""

    @endpoint
    def train(self, steps: int) -> float:
        """Train for ``steps`` and return the last loss."""
        rank = str(current_rank()["ranks"])
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(RANKS)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
        world = connect()
        model = mw.replicate(torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        draw = torch.Generator().manual_seed(world.rank)
        for _ in range(steps):
            x = torch.randn(32, 8, generator=draw)
            loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        disconnect()
        return loss.item()


if __name__ == "__main__":
    ranks = this_host().spawn_procs({"ranks": RANKS}).spawn("ranks", Rank)
    print(ranks.train.call(steps=50).get())
