"""Names inside of `meshwright.testing`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.testing.meeting": "World",
        "meshwright.testing.pool": "SLOWER",
        "meshwright.testing.simulated": "transport",
        "meshwright.testing.simulated.backend": (
            "BACKEND, SimulatedGroup, connected_device, register"
        ),
        "meshwright.testing.simulated.memory": "Extent",
        "meshwright.testing.simulated.streams": "Stamp",
        "meshwright.testing.simulated.transport": (
            "CommunicationStream, SimulatedWork, TransferSide"
        ),
        "meshwright.testing.training": "momentum",
    }
)
