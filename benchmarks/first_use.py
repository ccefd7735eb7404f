"""CPU time from a fresh interpreter to the first use of a strategy, over that of torch's own.

    python benchmarks/first_use.py --rounds 5

Each arm imports what its user imports and wraps one small model in a world of one rank. The arms
take turns, each in a process of its own; a difference is taken within a round.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys

from _figures import note, quartiles

__all__ = ["main"]

_START = """
import torch
from torch import nn
"""
_TORCH = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
_OURS = """
from meshwright import comm
comm.connect("gloo")
"""
ARMS = {
    "torch": _START,
    "ddp": _START
    + _TORCH
    + "from torch.nn.parallel import DistributedDataParallel as D; D(nn.Linear(2, 2))",
    "fsdp2": _START
    + _TORCH
    + "from torch.distributed.fsdp import fully_shard; fully_shard(nn.Linear(2, 2))",
    "replicate": _START
    + _OURS
    + "from meshwright.data_parallel import replicate; replicate(nn.Linear(2, 2))",
    "fully_shard": _START
    + _OURS
    + "from meshwright.data_parallel import fully_shard; fully_shard(nn.Linear(2, 2))",
}
PEER = {"replicate": "ddp", "fully_shard": "fsdp2"}


def seconds(code: str) -> float:
    """Measure the CPU seconds of a process that runs ``code``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    spent: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(rounds):
        for arm, code in ARMS.items():
            spent[arm].append(seconds(code))
    for arm, values in spent.items():
        low, middle, high = quartiles(values)
        print(f"{arm:<12} {middle:.2f} s ({low:.2f}..{high:.2f})")
    for arm, peer in PEER.items():
        more = [a - b for a, b in zip(spent[arm], spent[peer], strict=True)]
        note(f"first use, s: {arm} more than {peer}", more)
        print(f"{arm} takes {quartiles(more)[1]:.2f} s more than {peer}")


if __name__ == "__main__":
    main()
