"""Where the ranks of one call meet: on this host alone, with the variables that torchrun sets."""

from __future__ import annotations

__all__ = ["torchrun_variables"]


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
