"""The environment variables by which the ranks of one machine find each other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

LOCAL_NETWORK: Mapping[str, str] = MappingProxyType(
    {
        # c10d's store asks the name server for the name of the loopback address at every
        # connection, and all ranks wait with it, 5 s for each packet that is lost. So names come
        # from the hosts file alone, and c10d need not warn of each one that it does not find.
        "RES_OPTIONS": "attempts:0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo",
    }
)
"""Variables of ranks that all live on this machine; what the user has set wins."""


def is_launched() -> bool:
    """Check that torchrun or the like has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def torchrun_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """List the variables that torchrun would set for this rank, with the store of an agent."""
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
