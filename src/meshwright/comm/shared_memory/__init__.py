"""The c10d backend `meshwright`: collectives through shared memory on one CPU host.

Bottom-up: `arena` (segments of memory, tensors in them, the layout of a group's), `waits` (steps,
sleeping, lost ranks), `calls` (what a rank calls, compared before data moves), `reductions`,
`collectives` (each as a generator of steps), `buffers` (strided tensors), `queue` (order of calls,
works), `channels` and `transfers` (point-to-point messages), `joining` (how ranks come to share an
arena), `group` (the methods that c10d calls), `backend` (registered with `torch.distributed`).
"""

from __future__ import annotations

from meshwright.comm.shared_memory.arena import host_identity
from meshwright.comm.shared_memory.backend import allocate, is_supported, register
from meshwright.comm.shared_memory.group import BACKEND, SharedMemoryGroup

__all__ = [
    "BACKEND",
    "SharedMemoryGroup",
    "allocate",
    "host_identity",
    "is_supported",
    "register",
]
