"""Count clean teardowns: two ranks in fresh interpreters, again and again.

Run it as ``python tests/support/comm/teardown.py [COUNT [STRATEGY [BACKEND]]]``: the strategy is
replicate, fully_shard or facade and the backend gloo or shm; it exits with status 1 at the first
rank that does not end normally. Every second run leaves without ``disconnect``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from support.internals.environment import LOCAL_NETWORK

__all__ = ["RANK", "STRATEGIES", "run_once"]

RANK = """
import torch
from meshwright import comm
{load}
world = comm.connect({backend!r})
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
{wrap}
for _ in range(2):
    model(torch.ones(4, 64)).sum().backward()
pending = world.all_reduce(torch.ones(1000))
world.barrier()
assert pending.wait()[0] == 2
{leave}
"""


STRATEGIES = {
    "replicate": (
        "from meshwright.data_parallel import replicate",
        "model = replicate(plain)",
    ),
    "fully_shard": (
        "from meshwright.data_parallel.sharded_modules.sharded import fully_shard",
        "fully_shard(plain[0]); model = fully_shard(plain)",
    ),
    "facade": (
        "from meshwright.fsdp import FullyShardedDataParallel as Wrapper",
        "plain[0] = Wrapper(plain[0]); model = Wrapper(plain)",
    ),
}
"""How each strategy is loaded and applied."""


def run_once(
    leave: str, strategy: str = "replicate", backend: str = "gloo"
) -> list[tuple[int, str]]:
    """Exit status and stderr of each of two ranks that trained and left."""
    load, wrap = STRATEGIES[strategy]
    program = RANK.format(leave=leave, load=load, wrap=wrap, backend=backend)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program],
            env={**os.environ, **LOCAL_NETWORK, **common, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ends = [rank.communicate(timeout=120)[1] for rank in ranks]
    return [(rank.returncode, end) for rank, end in zip(ranks, ends, strict=True)]


def _main(count: int, strategy: str = "replicate", backend: str = "gloo") -> int:
    for number in range(1, count + 1):
        ends = run_once("comm.disconnect()" if number % 2 else "", strategy, backend)
        if ends != [(0, "")] * 2:
            sys.stdout.write(f"teardown {number} of {count} failed: {ends}\n")
            return 1
    sys.stdout.write(f"{count} of {count} teardowns of 2 ranks ended with status 0\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(_main(int(sys.argv[1]) if len(sys.argv) > 1 else 200, *sys.argv[2:]))
