"""The simulated transport on real ranks: by order alone, as NCCL's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from meshwright.testing import Ranks
from meshwright.testing.simulated import SimulatedDevice, SimulationError, simulated
from support.internals.testing import CommunicationStream, SimulatedWork, TransferSide, backend


def stream_of(device: SimulatedDevice, name: str) -> CommunicationStream:
    """A communicator of all ranks with a queue of its own."""
    store = dist.PrefixStore(f"simulated {name}", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    return CommunicationStream(
        device, dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=20)), name
    )


def moved(stream: CommunicationStream, *messages: TransferSide) -> SimulatedWork:
    """Issue ``messages`` at once."""
    reads = [message.tensor for message in messages if message.is_send]
    writes = [message.tensor for message in messages if not message.is_send]
    what = " and ".join("send" if message.is_send else "recv" for message in messages)
    return stream.issue(what, stream.queue.transfers(messages), reads, writes)


def send(stream: CommunicationStream, value: float) -> SimulatedWork:
    """Send a value to the other rank."""
    return moved(stream, TransferSide(True, torch.full((4,), value), 1 - dist.get_rank()))


def receive(stream: CommunicationStream) -> tuple[torch.Tensor, SimulatedWork]:
    """Receive a value from the other rank."""
    into = torch.zeros(4)
    return into, moved(stream, TransferSide(False, into, 1 - dist.get_rank()))


def body_in_order() -> None:
    """The first send is met by the first receive, and the host waits for neither."""
    with simulated() as device:
        stream = stream_of(device, "one")
        with device.forbid_stops():
            if dist.get_rank() == 0:
                for work in [send(stream, 1.0), send(stream, 2.0)]:
                    work.wait()
            else:
                (first, one), (second, other) = receive(stream), receive(stream)
                other.wait()
                one.wait()
                total = first * 10 + second
        if dist.get_rank() == 1:
            assert total.tolist() == [12.0] * 4
        dist.barrier()


def body_blocked() -> None:
    """Two ranks that both send first wait for each other for good."""
    backend.PATIENCE = 1.0
    with simulated() as device:
        stream = stream_of(device, "one")
        work = send(stream, 1.0)
        receive(stream)
        with pytest.raises(SimulationError, match="deadlock: in the queue stand send, then recv"):
            work.wait()


def body_at_once() -> None:
    """In one batch, or over one communicator for each direction, they do not."""
    me = dist.get_rank()
    with simulated() as device:
        stream = stream_of(device, "one")
        given, into = torch.full((4,), me + 1.0), torch.zeros(4)
        moved(stream, TransferSide(True, given, 1 - me), TransferSide(False, into, 1 - me)).wait()
        assert into.tolist() == [2.0 - me] * 4
        ways = [stream_of(device, name) for name in ("up", "down")]
        out = send(ways[me], me + 5.0)
        into, back = receive(ways[1 - me])
        out.wait()
        back.wait()
        assert into.tolist() == [6.0 - me] * 4
        dist.barrier()


def body_unwaited() -> None:
    """Who reads what has not been waited for, or writes what is being sent, is told."""
    with simulated() as device:
        stream = stream_of(device, "one")
        if dist.get_rank() == 0:
            given = torch.ones(4)
            work = moved(stream, TransferSide(True, given, 1))
            given.zero_()
        else:
            given, work = receive(stream)
            given.sum()
        (fault,) = device.faults
        assert fault.kind == "unordered"
        assert "the stream of group one" in fault.text
        assert "test_transport.py" in fault.text
        device.faults.clear()
        work.wait()
        given.add_(1)
        assert not device.faults
        del given, work
        assert not device.faults
        dist.barrier()


@pytest.mark.few(1)
@pytest.mark.parametrize("body", [body_in_order, body_blocked, body_at_once, body_unwaited])
def test_transfers_go_by_order_alone(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body, backend="gloo", timeout=60)
