"""Process groups: their state in this process, and how ranks join them.

Bottom-up:

    in_flight      device operations between their call and their end
    registry       communicators, observers, phases, the monitor: the state of a process
    rendezvous     how ranks meet: the store, and the list of all ranks
    device_choice  the backend of the world and each rank's device, chosen from all ranks' entries
    python_group   process groups whose methods are written in Python
    launch         ranks of this machine, started through torch's elastic launcher
"""

from __future__ import annotations

__all__: list[str] = []
