"""Process groups: their state in this process, and how ranks come to them.

Bottom-up:

    in_flight      operations of devices between their call and their end
    registry       communicators, observers, phases, the monitor: the state of a process
    rendezvous     the meeting of the ranks: the store, and the roll of all of them
    device_choice  the backend of the world and each rank's device, from what all ranks say
    python_group   process groups whose methods are written in Python
    launch         ranks of this machine, started through torch's elastic launcher
"""

from __future__ import annotations

__all__: list[str] = []
