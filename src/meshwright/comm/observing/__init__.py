"""Observation of collectives, for programs, profilers and people.

Bottom-up:

    observers  the protocol, a recorder, and a timer
    ranges     ranges in the traces of `torch.profiler`
    shown      the operations that ``CommDebugMode`` is shown
    timelines  the measurements of all ranks, as one timeline
"""

from __future__ import annotations

__all__: list[str] = []
