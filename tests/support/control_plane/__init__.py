"""The control plane of thousands of ranks in one process, to count what each asks of the store.

Bottom-up:

    store  a store in memory that counts requests
    time   simulated time, in which one rank runs at a time
    ranks  the ranks of a run, each with a monitor of its own
"""

from __future__ import annotations

from support.control_plane.ranks import SimulatedRank, Used, simulate

__all__ = ["SimulatedRank", "Used", "simulate"]
