"""The shipped test harness: tests on several ranks that read like tests in one process.

Bottom-up: `wire` (messages), `modules` (test modules in ranks), `outcome` (how a rank ended),
`rendezvous` (the meeting point), `rank_process`, `supervisor`, `server` (the processes), `pool`
(the caller's side), `plugin` (pytest).

::

    pytest ── Pool ──(socket)── server ── supervisor ─┬─ rank 0
                                 │         (a call)    ├─ rank 1
                                 │                     └─ ...
                      torch loaded once, one thread; forks only

Names are looked up when they are used, so that loading the plugin does not load torch.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.testing.outcome import Ending, Outcome, RanksFailed
    from meshwright.testing.pool import Pool, Ranks, ranks, shared_pool

__all__ = [
    "Ending",
    "Outcome",
    "Pool",
    "Ranks",
    "RanksFailed",
    "ranks",
    "shared_pool",
]

_HOMES = MappingProxyType(
    {
        "Ending": "outcome",
        "Outcome": "outcome",
        "Pool": "pool",
        "Ranks": "pool",
        "RanksFailed": "outcome",
        "ranks": "pool",
        "shared_pool": "pool",
    }
)


def __getattr__(name: str) -> object:
    """Load the module that holds ``name`` when the name is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"meshwright.testing.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
