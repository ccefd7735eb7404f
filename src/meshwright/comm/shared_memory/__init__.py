"""The c10d backend `meshwright`: collectives through shared memory on one CPU host.

Bottom-up:

    arena         segments of memory, tensors in them, the layout of a group's
    waits         waiting for the steps of other ranks, and detecting lost ones
    fingerprints  the calls of ranks, compared before data moves
    reductions    reductions in rank order
    buffers       strided tensors as contiguous memory
    collectives   each collective, as a generator of steps
    queue         the order of calls, and their works
    transfers     point-to-point messages, and the channels between ranks
    group         the process group that c10d calls
    backend       registers the backend with `torch.distributed`; how ranks join one arena
"""

from __future__ import annotations

from meshwright.comm.shared_memory.arena import host_identity, unsupported
from meshwright.comm.shared_memory.backend import allocate, register
from meshwright.comm.shared_memory.group import BACKEND, SharedMemoryGroup

__all__ = [
    "BACKEND",
    "SharedMemoryGroup",
    "allocate",
    "host_identity",
    "register",
    "unsupported",
]

register()  # so that `init_process_group("cpu:meshwright")` works without `connect`
