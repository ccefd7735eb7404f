"""The c10d backend `meshwright`: collectives through shared memory on one CPU host.

Bottom-up: `arena` (segments of memory, tensors in them, the layout of a group's), `waits` (steps,
sleeping, lost ranks), `calls` (what a rank calls, compared before data moves), `reductions`,
`collectives` (each as a generator of steps), `buffers` (strided tensors), `sparse` (sums of sparse
ones), `queue` (order of calls, works), `channels` and `transfers` (point-to-point messages),
`joining` (how ranks come to share an arena), `transport` and `group` (what c10d asks and calls),
`backend` (registered with c10d).
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
