"""A simulated device: what a GPU would make of a program, shown by ranks on the CPU.

Bottom-up:

    streams    the order of work: streams, events, threads of the host
    operators  what an operator reads, writes and makes
    memory     the memory of a device, and who uses it in which order
    device     one device, its streams, its memory, and the host beside it
    seen       the places at which it sees a program
    transport  operations of ranks by order alone, as NCCL's
    backend    the c10d backend ``simulated``, and ranks on it

::

    program ──> modes of torch (seen) ──> SimulatedDevice ──> Memory: clocks of every access
       │                                       ^                │
       └──> Communicator ──> SimulatedGroup ───┘                └──> Fault: kind, label, line
                             (queue by order)

Operators run at once and give the numbers of the CPU; beside them vector clocks tell which work
comes after which. A test of ranks gets such devices by ``@pytest.mark.devices("simulated")``.
"""

from __future__ import annotations

from meshwright.testing.simulated.backend import device_of
from meshwright.testing.simulated.device import DEVICE, SimulatedDevice, SimulationError, Stop
from meshwright.testing.simulated.memory import Fault
from meshwright.testing.simulated.seen import simulated
from meshwright.testing.simulated.streams import Event, WorkLine

__all__ = [
    "DEVICE",
    "Event",
    "Fault",
    "SimulatedDevice",
    "SimulationError",
    "Stop",
    "WorkLine",
    "device_of",
    "simulated",
]
