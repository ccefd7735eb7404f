"""Short texts that ranks leave for each other in the store, beside the board of failures.

A failure on the board ends the run of every rank. A notice concerns one operation of one group, and
may be taken back: what it means is up to who reads it.
"""

from __future__ import annotations

import torch.distributed as dist

from meshwright.comm.collectives import Communicator
from meshwright.comm.registry import PROCESS

__all__ = ["Notices"]


class Notices:
    """The notices of the ranks of one communicator under one topic."""

    def __init__(self, communicator: Communicator, topic: str) -> None:
        monitor = PROCESS.monitor
        store = dist.distributed_c10d._get_default_store() if monitor is None else monitor.board
        self._store: dist.Store = store
        self._prefix = f"notices/{communicator.name}/{topic}"

    def post(self, key: str, text: str) -> bool:
        """Leave ``text`` under ``key`` unless a text is there; whether it was left."""
        own = self._store.compare_set(f"{self._prefix}/{key}", "", text)
        return own.decode() == text

    def replace(self, key: str, text: str) -> None:
        """Leave ``text`` under ``key`` in place of what is there."""
        self._store.set(f"{self._prefix}/{key}", text)

    def read(self, key: str) -> str | None:
        """The text under ``key``; None when there is none."""
        path = f"{self._prefix}/{key}"
        if not self._store.check([path]):
            return None
        return self._store.get(path).decode() or None

    def withdraw(self, key: str) -> None:
        """Take back the text under ``key``."""
        # Not deleted: a rank that has just seen that it is there would wait for it to come back.
        self._store.set(f"{self._prefix}/{key}", "")
