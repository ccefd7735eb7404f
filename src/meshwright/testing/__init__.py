"""The shipped test harness: tests on several ranks that read like tests in one process.

Bottom-up:

    pool          the function `ranks`
    simulated     simulated devices, and ranks that have them
    plugin        the pytest plugin
    fake          all ranks in one process
    models        models with properties that have broken a layout
    training      parity with one process, also bit by bit
    faults        faults at a chosen place and step

Names are imported on first use, so that loading the plugin does not load torch.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.launching.outcome import Ending, Outcome, RanksFailed
    from meshwright.launching.pool import Pool, shared_pool
    from meshwright.testing.fake import FakeCommunicator, run_fake
    from meshwright.testing.faults import Fault, InjectedError, arm
    from meshwright.testing.models import MODELS, Sample, TinyTransformer
    from meshwright.testing.pool import Ranks, on_devices, ranks
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
    "launching.outcome": ("Ending", "Outcome", "RanksFailed"),
    "launching.pool": ("Pool", "shared_pool"),
    "testing.fake": ("FakeCommunicator", "run_fake"),
    "testing.faults": ("Fault", "InjectedError", "arm"),
    "testing.models": ("MODELS", "Sample", "TinyTransformer"),
    "testing.pool": ("Ranks", "on_devices", "ranks"),
    "testing.training": (
        *("LaidOut", "Training", "assert_same_training"),
        *("masked_microbatches", "unmasked", "wrapped"),
    ),
}
_HOMES = MappingProxyType({name: home for home, names in _NAMES.items() for name in names})


def __getattr__(name: str) -> object:
    """Import the module of ``name`` on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"meshwright.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
