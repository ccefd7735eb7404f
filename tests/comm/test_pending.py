"""Waits for point-to-point transfers in threads: each is waited for once, whoever else asks."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from meshwright.comm.pending import TransferWaiter


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
