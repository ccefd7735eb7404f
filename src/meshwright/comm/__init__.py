"""Communication: the only room that uses `torch.distributed`.

Bottom-up: `lookup` (which c10d function to call), `streams`, `observers`, `pages` (memory that is
moved), `registry` (the state of this process), `lines` (tensors whose memory comes and goes),
`failure` and `waiting` (who failed, who is missing), `pending`, `ranges` (in traces of
torch.profiler), `shown` (to CommDebugMode), `gloo`, `shared_memory` (a folder: the backend of CPU
ranks on one host), `collectives` (the door), `comparison` and `events` (whether ranks do the
same), `timelines` (measurements of all ranks), `process_groups` (joining and leaving),
`functional` (autograd), `launch`, `spread` (over which axes a tensor lies), `subclasses` (tensors
with calls of their own), `dtensor` and `shard_view` (state dicts and checkpoints), `mixed_lists`
(operators on DTensors and plain tensors together), `leaves` (what modules compute on),
`partial_gradients` (gradients that are summed at the end of a backward pass), `edges` (DTensors
that enter and leave what computes on local tensors), `marks` (operators that stand for reductions
in a graph), `untraced` (what compilers leave alone).
"""

from __future__ import annotations

from meshwright.comm.collectives import Communicator
from meshwright.comm.lookup import Transfer
from meshwright.comm.observers import Observer, Recorder, Timer
from meshwright.comm.pending import Pending, start_together
from meshwright.comm.process_groups import (
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
from meshwright.comm.registry import hears_actions, observe, phase, tell_ran
from meshwright.comm.streams import Clock, Mark
from meshwright.comm.timelines import gather_timeline

__all__ = [
    "Clock",
    "Communicator",
    "Mark",
    "Observer",
    "Pending",
    "Recorder",
    "Timer",
    "Transfer",
    "check_peers",
    "communicator",
    "connect",
    "disconnect",
    "gather_timeline",
    "hears_actions",
    "host_store",
    "is_connected",
    "observe",
    "peers",
    "phase",
    "start_together",
    "subgroup",
    "tell_ran",
    "union",
    "watch_run",
]
