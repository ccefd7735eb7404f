"""Channels between ranks with simulated devices: a communicator each, made by two ranks alone."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.comm import communicator
from meshwright.testing import Ranks, on_devices
from support.internals.pipelining import P2PChannels

PAIRS = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 0)]


def nothing() -> None:
    pass


def body() -> None:
    """Ranks have other numbers of groups, and each sends before any receives."""
    world = communicator()
    for number in range(2):
        channels = P2PChannels(world, PAIRS, number)
        channels.open(nothing)
        channels.open(nothing)
        sent = [torch.full((n + 1,), float(world.rank + n)) for n in range(3)]
        pendings = []
        for source, target in PAIRS:
            if world.rank == source:
                pendings += channels.send(sent[:1], target, "one")
                several = channels.send(sent, target, "several")
                pendings += several
                assert [pending.issued.label for pending in several] == ["several"] * 3
                works = [pending.works for pending in several]
                is_one = len({id(work) for each in works for work in each}) == 1
                assert is_one != world.is_on_host
                assert [len(each) for each in works] == [1] * 3
        for source, target in PAIRS:
            if world.rank == target:
                one, *several = (torch.zeros(n) for n in (1, 1, 2, 3))
                for pending in channels.recv([one], source, "one"):
                    pending.wait()
                for pending in channels.recv(several, source, "several"):
                    pending.wait()
                for n, tensor in enumerate([one, *several]):
                    wanted = torch.full_like(tensor, float(source + max(n - 1, 0)))
                    assert torch.equal(tensor, wanted)
        for pending in pendings:
            pending.wait()
    if not world.is_on_host:
        mine = sum(world.rank in pair for pair in PAIRS)
        names = [name for name in dist.distributed_c10d._world.pg_names.values() if "lane" in name]
        assert len(names) == 2 * mine


def test_channels_of_devices(ranks: Ranks) -> None:
    on_devices(ranks)(3, body)


def test_channels_of_the_host_are_the_group(ranks: Ranks) -> None:
    ranks(3, body)
