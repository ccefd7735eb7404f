"""Gloo beside a device: it sends memory of the host alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.comm import Transfer, communicator
from meshwright.testing import Ranks
from meshwright.testing.simulated import DEVICE, simulated
from support.internals.comm import lookup


def test_transfers_of_a_device_go_through_memory_of_the_host(ranks: Ranks) -> None:
    """Both ranks of a pair send and receive at once, then one sends to the other."""

    def body() -> list[float]:
        world = communicator()
        transfer, seen = lookup.transfer, list[bool]()
        with simulated() as device, pytest.MonkeyPatch.context() as patch:

            def looked(given: Transfer, *args: Any) -> Any:
                seen.append(device.memory.is_host(given.tensor))
                return transfer(given, *args)

            patch.setattr(lookup, "transfer", looked)
            world.device, world.is_on_host = DEVICE, False
            sent = torch.arange(3.0) + world.rank
            came = torch.zeros(3)
            posted = [
                Transfer(direction="send", tensor=sent, peer=1 - world.rank),
                Transfer(direction="recv", tensor=came, peer=1 - world.rank),
            ]
            for pending in world.batch(posted):
                pending.wait()
                pending.wait()
            alone = world.send(sent + 5, 1) if world.rank == 0 else world.recv(came, 0)
            alone.wait()
            world.device, world.is_on_host = torch.device("cpu"), True
            found = (came * 1).tolist()
            assert device.faults == []
        assert seen == [True] * 3, "Gloo is given memory of the host"
        return found

    assert ranks(2, body, backend="gloo") == [[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]]
