"""The control channel: the same ranks on the host, with counts of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.comm import Transfer, communicator
from meshwright.testing import FakeCommunicator, Ranks, on_devices, run_fake
from meshwright.testing.simulated import DEVICE
from support.internals.comm import differing, lookup, own_state


def body() -> None:
    world = communicator()
    control = world.control
    assert control.control.name == control.name != world.name
    assert control.device == torch.device("cpu") and control.is_on_host
    before = dict(world.counts)
    peer = 1 - world.rank
    mine = torch.tensor([world.rank]).cpu()
    theirs = torch.zeros(1, dtype=torch.int64).cpu()
    # A payload of the same pair is under way, in the other order on the other rank.
    payload = torch.full((2,), float(world.rank), device=world.device)
    incoming = torch.empty_like(payload)
    pendings = [control.recv(theirs, peer), control.send(mine, peer)]
    both = [
        Transfer(direction="send", tensor=payload, peer=peer),
        Transfer(direction="recv", tensor=incoming, peer=peer),
    ]
    pendings += world.batch(both if world.rank else both[::-1])
    for pending in reversed(pendings):
        pending.wait()
    assert (theirs.item(), incoming.tolist()) == (peer, [float(peer)] * 2)
    assert world.counts == {**before, f"send:{peer}": 1, f"recv:{peer}": 1}
    rows = world.gather_values({"rank": world.rank}, label="ranks")
    assert rows == [{"rank": 0}, {"rank": 1}]
    assert world.gather_bytes(b"ab" * world.rank, label="bytes") == [b"", b"ab"]
    assert differing(world, "alike", label="alike") == []
    assert world.counts.get("", 0) == before.get("", 0)
    groups = own_state()["groups"]
    assert groups[control.name]["last"][-1]["label"] == "alike"
    assert groups[world.name]["counts"] == world.counts


def test_control_data_has_counts_and_an_order_of_its_own(ranks: Ranks) -> None:
    ranks(2, body, backend="gloo")
    ranks(2, body)


def body_on_devices() -> None:
    world = communicator()
    assert world.device == DEVICE
    assert world.control.backend == "gloo"
    body()


def test_control_data_stays_on_the_host(ranks: Ranks) -> None:
    on_devices(ranks)(2, body_on_devices)


def body_where_ranks_have_made_other_groups() -> None:
    world = communicator()
    if world.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    group = lookup.host_group(world.ranks)
    found = torch.ones(1).cpu()
    dist.all_reduce(found, group=group)
    assert found.item() == 2 and dist.get_backend(group) == "gloo"


def test_a_channel_of_its_own_is_made_whatever_groups_a_rank_has(ranks: Ranks) -> None:
    ranks(2, body_where_ranks_have_made_other_groups)


def among_threads(world: FakeCommunicator) -> list[int]:
    assert world.control.gather_values(world.rank, label="ranks") == [0, 1, 2]
    return world.gather_values(world.rank, label="ranks")


def test_threads_have_it_too() -> None:
    assert run_fake(3, among_threads) == [[0, 1, 2]] * 3
