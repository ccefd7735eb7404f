"""Names inside of `meshwright.testing`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.testing.fake": "World",
        "meshwright.testing.pool": "SLOWER",
        "meshwright.testing.simulated": "backend",
        "meshwright.testing.simulated.backend": (
            "BACKEND, CommunicationStream, SimulatedGroup, SimulatedWork, TransferSide, "
            "connected_device, register"
        ),
        "meshwright.testing.simulated.memory": "Extent",
        "meshwright.testing.simulated.streams": "Stamp",
        "meshwright.testing.training": "momentum",
    }
)
