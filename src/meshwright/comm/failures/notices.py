"""Short texts that ranks leave for each other in the store, beside the board of failures.

A failure on the board ends the run of every rank. A notice concerns one operation of one group:
what it means is up to who reads it.
"""

from __future__ import annotations

import torch.distributed as dist

from meshwright.comm.collectives import Communicator
from meshwright.comm.failures.board import STORE, Board
from meshwright.comm.groups.registry import PROCESS
from meshwright.torch_internals.distributed import default_store


class Notices:
    """The notices of the ranks of one communicator under one topic.

    Every method raises `RankFailedError`, naming who hosts the store, when that is lost.
    """

    def __init__(self, communicator: Communicator, topic: str) -> None:
        self._board = _board(communicator)
        self._prefix = f"notices/{communicator.name}/{topic}"

    def post(self, key: str, text: str) -> bool:
        """Leave ``text`` under ``key`` unless a text is there; tells whether it was left."""
        return self._board.compare_set(f"{self._prefix}/{key}", "", text) == text

    def replace(self, key: str, text: str) -> None:
        """Leave ``text`` under ``key`` in place of what is there."""
        self._board.set(f"{self._prefix}/{key}", text)

    def read(self, key: str) -> str | None:
        """Return the text under ``key``; None when there is none."""
        return self._board.get(f"{self._prefix}/{key}") or None


def _board(communicator: Communicator) -> Board:
    """Find the run's board, or one kept with the communicator where nobody watches the run."""
    if PROCESS.monitor is not None:
        return PROCESS.monitor.board
    if "board" not in communicator.kept:
        # The store of ranks that are no processes answers nothing.
        is_fake = communicator.backend == "fake"
        store = dist.HashStore() if is_fake else default_store()
        communicator.kept["board"] = Board(store, host=STORE)
    board: Board = communicator.kept["board"]
    return board
