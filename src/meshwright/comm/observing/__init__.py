"""Observation of collectives, for programs, profilers and people.

Bottom-up:

    observers  the protocol, a recorder, and a timer
    shown      collectives as torch's profiler and ``CommDebugMode`` see them
"""

from __future__ import annotations

__all__: list[str] = []
