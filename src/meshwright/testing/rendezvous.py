"""The meeting point of the ranks of one call: a store on a free port, reached as under torchrun."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["host", "torchrun_variables"]


def host() -> dist.TCPStore:
    """A store of this process on a port that the system chooses."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


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
