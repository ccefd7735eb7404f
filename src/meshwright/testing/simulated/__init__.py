"""A simulated device, which finds errors on CPU ranks that a program would have on GPUs.

Bottom-up:

    streams    the order of work: streams, events, host threads
    operators  what an operator reads, writes and makes
    memory     the memory of a device, and who uses it in which order
    device     one device, its streams, its memory, and its host
    seen       the hooks into torch through which it observes a program
    backend    the c10d backend ``simulated``, and ranks on it

::

    program ──> modes of torch (seen) ──> SimulatedDevice ──> Memory: clocks of every access
       │                                       ^                │
       └──> Communicator ──> SimulatedGroup ───┘                └──> Fault: kind, label, line
                             (queue by order)

Operators run immediately, on the CPU; vector clocks record which work is ordered after which.
``@pytest.mark.devices("simulated")`` gives the ranks of a test such devices.
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
