"""The meeting point of the ranks of one call: a store on a free port, reached as under torchrun."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

__all__ = ["connect", "disconnect", "host", "torchrun_variables"]


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


def connect(backend: str | None) -> None:
    """Connect this rank to the others, from its environment."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend or "gloo", timeout=timedelta(seconds=60))


def disconnect() -> None:
    """Leave the others in peace."""
    if dist.is_initialized():
        dist.destroy_process_group()
