"""A notice that is not there, or is gone again, is none: nobody waits for it to come."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from support.internals.comm import STORE, Notices, StoreClient


class _Group:
    """What notices need of a communicator, in a process that nobody watches."""

    name = "group"

    def __init__(self, store: dist.Store) -> None:
        self.kept = {"board": StoreClient(store, host=STORE)}


def _notices(store: dist.Store) -> Notices:
    return Notices(_Group(store), "topic")  # pyrefly: ignore[bad-argument-type]


def test_a_notice_that_is_gone_is_none_and_is_not_waited_for() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=2))
    reader, writer = _notices(store), _notices(store)
    assert reader.read("key") is None
    assert writer.post("key", "a text")
    assert reader.read("key") == "a text"
    store.delete_key("notices/group/topic/key")
    assert reader.read("key") is None
    assert reader.post("key", "another")  # the place is free again
    assert not writer.post("key", "a third")
    assert writer.read("key") == "another"
