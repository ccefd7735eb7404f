"""Observation of collectives, and deferred reads of numbers on a device.

Bottom-up:

    observers  the protocol, a recorder, and a timer
    shown      collectives as torch's profiler and ``CommDebugMode`` see them
    late       deferred host reads: numbers on a device, checked once they are computed
"""

from __future__ import annotations

__all__: list[str] = []
