"""Where the ranks of one call meet: on this host alone, with the variables that torchrun sets."""

from __future__ import annotations

from types import MappingProxyType

__all__ = ["LOCAL_NETWORK", "NO_NAME_SERVER", "torchrun_variables"]

NO_NAME_SERVER = MappingProxyType({"RES_OPTIONS": "attempts:0"})
"""c10d's store asks the name server for the name of ::ffff:127.0.0.1 at every connection, and all
ranks wait with it, 5 s for each packet that is lost. So names come from the hosts file alone."""

LOCAL_NETWORK = MappingProxyType({**NO_NAME_SERVER, "GLOO_SOCKET_IFNAME": "lo"})
"""What a rank's environment has where the caller's says nothing else."""


def torchrun_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables that torchrun would set for this rank, with the store of an agent."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
