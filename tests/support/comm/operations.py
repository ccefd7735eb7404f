"""Every kind of operation of a communicator, with the values that each must give."""

from __future__ import annotations

import torch

from meshwright import comm


def check_operations(world: comm.Communicator) -> None:
    """Every kind of operation through ``world``, whatever moves it."""
    rank, size = world.rank, world.size
    mine = torch.arange(40_000.0) + rank
    expected = torch.arange(40_000.0) * size + size * (size - 1) / 2
    assert torch.equal(world.all_reduce(mine.clone()).wait(), expected)
    share = torch.empty(40_000 // size)
    world.reduce_scatter(share, mine).wait()
    gathered = torch.empty(40_000)
    world.all_gather(gathered, share).wait()
    assert torch.equal(gathered, expected)
    received = torch.empty(3)
    receive = world.recv(received, (rank - 1) % size)
    world.send(torch.full((3,), float(rank)), (rank + 1) % size).wait()
    receive.wait()
    assert received.tolist() == [(rank - 1) % size] * 3
    world.barrier()
