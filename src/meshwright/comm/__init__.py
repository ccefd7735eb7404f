"""Communication: the only package that sends and receives through `torch.distributed`.

Bottom-up:

    streams         a common interface to devices, streams and clocks
    memory          pages that move between tensors, and tensors with reusable memory
    observing       observers of collectives, profilers, ``CommDebugMode``, timelines
    groups          per-process communication state, rendezvous, and launching of ranks
    failures        failed and missing ranks, bounded waits, and checks that ranks agree
    pending         a collective that has been issued, and the bounded wait for it
    shared_memory   the c10d backend of CPU ranks on one host
    c10d            lookup of c10d's functions at call time, and faster algorithms for Gloo
    collectives     one `Communicator` for each process group; every collective goes through it
    process_groups  joining the ranks, making sub-groups, and leaving
    graphs          collectives for autograd and compilers, marks of gradients in graphs
    dtensors        torch's DTensors: their local tensors, their gradients, their full values
"""

from __future__ import annotations

from meshwright.comm.c10d.lookup import Transfer
from meshwright.comm.collectives import Communicator
from meshwright.comm.dtensors.gather_dtensor import held_boxes
from meshwright.comm.groups.registry import hears_actions, observe, phase, tell_ran
from meshwright.comm.observing.late import LateNumbers, settle
from meshwright.comm.observing.observers import Observer, Recorder, Timer, gather_timeline
from meshwright.comm.pending import Pending, start_together
from meshwright.comm.process_groups import (
    apart,
    check_peers,
    communicator,
    connect,
    disconnect,
    host_store,
    is_connected,
    peers,
    subgroup,
    union,
    watch_run,
)
from meshwright.comm.streams import Clock, Mark
from meshwright.torch_internals.distributed import fake_world

__all__ = [
    "Clock",
    "Communicator",
    "LateNumbers",
    "Mark",
    "Observer",
    "Pending",
    "Recorder",
    "Timer",
    "Transfer",
    "apart",
    "check_peers",
    "communicator",
    "connect",
    "disconnect",
    "fake_world",
    "gather_timeline",
    "hears_actions",
    "held_boxes",
    "host_store",
    "is_connected",
    "observe",
    "peers",
    "phase",
    "settle",
    "start_together",
    "subgroup",
    "tell_ran",
    "union",
    "watch_run",
]
