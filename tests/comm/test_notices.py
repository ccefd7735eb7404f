"""Notices may be taken back while another rank reads them: nobody waits for them to come back."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshwright.comm.notices import Notices


class _Interrupted:
    """A store in which another rank takes a notice back between two questions of this one."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.meanwhile: Any = None

    def check(self, keys: list[str]) -> bool:
        found = self._store.check(keys)
        if self.meanwhile is not None:
            self.meanwhile()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _notices(store: Any) -> Notices:
    notices = object.__new__(Notices)
    vars(notices).update(_store=store, _prefix="notices/group")
    return notices


def test_a_notice_that_is_taken_back_while_it_is_read_is_none() -> None:
    board = dist.HashStore()
    board.set_timeout(timedelta(seconds=2))
    store = _Interrupted(board)
    reader, writer = _notices(store), _notices(board)
    assert writer.post("key", "a text")
    store.meanwhile = lambda: writer.withdraw("key")
    assert reader.read("key") is None

    store.meanwhile = None
    assert reader.read("key") is None
    assert reader.post("key", "another")  # the place is free again
    assert not writer.post("key", "a third")
    assert writer.read("key") == "another"
