"""Waits for what was issued: in threads for transfers, of each stream for operations of devices."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from meshwright.comm import Pending
from meshwright.testing import FakeCommunicator
from support.internals.comm import Issued, TransferWaiter
from support.internals.testing import World


class _Transfer:
    """A work that ends when it is told to, and counts who waits for it."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.waits = 0
        self.ends = threading.Event()
        self._error = error

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waits += 1
        assert self.ends.wait(20)
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        raise AssertionError("a Gloo transfer cannot be polled")


def _ended(transfer: _Transfer) -> TransferWaiter:
    waiter = TransferWaiter(transfer, [])
    with pytest.raises(RuntimeError, match="has not ended yet"):
        waiter.wait(timedelta(seconds=0.01))
    transfer.ends.set()
    return waiter


def test_a_transfer_that_has_ended_is_not_waited_for_again() -> None:
    transfer = _Transfer()
    waiter = _ended(transfer)
    waiter.wait(timedelta(seconds=20))

    with waiter._running:  # as another thread holds it on its way through its own wait
        waiter.is_completed()
        TransferWaiter.start_together([waiter])
    waiter.wait(timedelta(seconds=20))

    assert transfer.waits == 1


def test_one_thread_waits_for_transfers_that_start_together_and_serves_again() -> None:
    idle: list = []
    transfers = [_Transfer() for _ in range(3)]
    waiters = [TransferWaiter(transfer, idle) for transfer in transfers]
    for transfer in transfers:
        transfer.ends.set()
    before = threading.active_count()

    TransferWaiter.start_together(waiters)
    waiters[-1].wait(timedelta(seconds=20))

    assert [transfer.waits for transfer in transfers] == [1, 1, 1]
    assert len(idle) == 1
    assert threading.active_count() == before + 1
    again = _Transfer()
    again.ends.set()
    TransferWaiter(again, idle).wait(timedelta(seconds=20))
    assert threading.active_count() == before + 1


def test_every_wait_raises_the_error_of_the_transfer() -> None:
    waiter = _ended(_Transfer(ConnectionError("the peer is gone")))
    for _ in range(2):
        with pytest.raises(ConnectionError, match="the peer is gone"):
            waiter.wait(timedelta(seconds=20))


class _DeviceWork:
    """An operation of a device: whoever waits for it has its current stream wait."""

    def __init__(self, ordered: list[str]) -> None:
        self.stream = "first"
        self._ordered = ordered

    def wait(self, timeout: timedelta | None = None) -> None:
        assert timeout is None
        self._ordered.append(self.stream)

    def is_completed(self) -> bool:
        return False


@pytest.mark.parametrize("finishes", [False, True])
def test_every_wait_on_a_device_orders_the_stream_that_is_current(finishes: bool) -> None:
    """What is done once, after the first, is before all of them."""
    communicator = FakeCommunicator(World(1), [0], 0)
    communicator.device = torch.device("cpu", 0)
    communicator.is_on_host = communicator.waits_on_host = False
    ordered: list[str] = []
    work, value = _DeviceWork(ordered), torch.ones(1)
    pending = Pending(communicator, Issued(0, "all_reduce", ""), value)
    pending.works = [work]
    pending.finish = (lambda: ordered.append("finish")) if finishes else None
    for stream in ("first", "second"):
        work.stream = stream
        assert pending.wait() is value
    assert ordered == (["first", "finish", "second"] if finishes else ["first", "second"])
