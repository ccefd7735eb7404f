"""Observation of collectives and of numbers on a device, for programs, profilers and people.

Bottom-up:

    observers  the protocol, a recorder, and a timer
    shown      collectives as torch's profiler and ``CommDebugMode`` see them
    late       deferred reads: numbers of a device, judged when the device has come to them
"""

from __future__ import annotations

__all__: list[str] = []
