"""The shipped test harness: tests on several ranks that read like tests in one process.

Bottom-up:

    wire          messages and their bytes
    modules       test modules in ranks
    outcome       the ends of ranks
    simulated     simulated devices, and ranks that have them
    rank_process  the life of one rank
    supervisor    one call: its ranks, watched
    server        the clean process that ranks are forked from
    pool          the caller's side
    plugin        the pytest plugin
    meeting       the meeting of fake ranks
    fake          all ranks in one process
    models        models that have broken a layout
    training      parity with one process, also bit by bit
    faults        faults at a chosen place and step
    control_plane  thousands of ranks on a store that counts, in simulated time

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
    from meshwright.testing.fake import FakeCommunicator, run_fake
    from meshwright.testing.faults import Fault, InjectedError, arm
    from meshwright.testing.models import MODELS, Sample, TinyTransformer
    from meshwright.testing.outcome import Ending, Outcome, RanksFailed
    from meshwright.testing.pool import Pool, Ranks, on_devices, ranks, shared_pool
    from meshwright.testing.training import (
        LaidOut,
        Training,
        assert_same_training,
        masked_microbatches,
        unmasked,
        wrapped,
    )

__all__ = [
    "MODELS",
    "Ending",
    "FakeCommunicator",
    "Fault",
    "InjectedError",
    "LaidOut",
    "Outcome",
    "Pool",
    "Ranks",
    "RanksFailed",
    "Sample",
    "TinyTransformer",
    "Training",
    "arm",
    "assert_same_training",
    "masked_microbatches",
    "on_devices",
    "ranks",
    "run_fake",
    "shared_pool",
    "unmasked",
    "wrapped",
]

_NAMES = {
    "fake": ("FakeCommunicator", "run_fake"),
    "faults": ("Fault", "InjectedError", "arm"),
    "models": ("MODELS", "Sample", "TinyTransformer"),
    "outcome": ("Ending", "Outcome", "RanksFailed"),
    "pool": ("Pool", "Ranks", "on_devices", "ranks", "shared_pool"),
    "training": (
        *("LaidOut", "Training", "assert_same_training"),
        *("masked_microbatches", "unmasked", "wrapped"),
    ),
}
_HOMES = MappingProxyType({name: home for home, names in _NAMES.items() for name in names})


def __getattr__(name: str) -> object:
    """Load the module that holds ``name`` when the name is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"meshwright.testing.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
