"""CPU time of data-parallel training against torch's own: interleaved arms, medians of ratios.

    python benchmarks/data_parallel.py --models tiny gpt net --ranks 2 --rounds 9
    python benchmarks/data_parallel.py --family sharded

Of the family ``replicated`` the peer is torch's DDP at its best setting, of ``sharded`` the faster
one of torch's FSDP1 and FSDP2.

Every arm trains the same model on every rank in one process each; the arms take turns in short
rounds, so that a busy machine slows all of them alike. A ratio is taken within a round.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from meshwright import comm
from meshwright.data_parallel import replicate
from meshwright.data_parallel.sharded import fully_shard

__all__ = ["main"]


@dataclass(frozen=True)
class Workload:
    """A model, one rank's batch, and how many steps make a round."""

    build: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    steps: int


def encoder(layers: int, dim: int, heads: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        dim, heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def linears() -> nn.Module:
    return nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(4)))


WORKLOADS = {
    "tiny": Workload(lambda: encoder(60, 32, 4), lambda: torch.randn(4, 16, 32), 6),
    "gpt": Workload(lambda: encoder(6, 256, 8), lambda: torch.randn(4, 128, 256), 3),
    "net": Workload(linears, lambda: torch.randn(1, 2000), 6),
}


PEERS = {
    "replicated": ("ddp", "ddp view", "ddp static"),
    "sharded": ("fsdp1", "fsdp1 orig", "fsdp2"),
}
"""The arms of each family that ours are compared with."""


def arms(model: nn.Module, family: str) -> dict[str, nn.Module]:
    """The same model under each strategy, each a copy of its own."""
    return replicated_arms(model) if family == "replicated" else sharded_arms(model)


def sharded_arms(model: nn.Module) -> dict[str, nn.Module]:
    """Each layer a unit, and the root."""
    layer = type(next(iter(model.layers if hasattr(model, "layers") else model)))
    cpu = torch.device("cpu")
    flat: dict[str, Any] = {"device_id": cpu, "auto_wrap_policy": ModuleWrapPolicy({layer})}
    torch_2, ours = copy.deepcopy(model), copy.deepcopy(model)
    for name, apply in (("fsdp2", torch_fully_shard), ("ours", fully_shard)):
        whole = torch_2 if name == "fsdp2" else ours
        for part in list(whole.modules()):
            if isinstance(part, layer):
                apply(part)
        apply(whole)
    return {
        "plain": copy.deepcopy(model),
        "fsdp1": FullyShardedDataParallel(copy.deepcopy(model), **flat),
        "fsdp1 orig": FullyShardedDataParallel(copy.deepcopy(model), use_orig_params=True, **flat),
        "fsdp2": torch_2,
        "ours": ours,
    }


def replicated_arms(model: nn.Module) -> dict[str, nn.Module]:
    """The same model under DDP and replicate."""
    torchs: dict[str, dict[str, bool]] = {
        "ddp": {},
        "ddp view": {"gradient_as_bucket_view": True},
        "ddp static": {"gradient_as_bucket_view": True, "static_graph": True},
    }
    return {
        "plain": copy.deepcopy(model),
        **{
            name: DistributedDataParallel(copy.deepcopy(model), **options)
            for name, options in torchs.items()
        },
        "ours": replicate(copy.deepcopy(model)),
        "ours view": replicate(copy.deepcopy(model), gradient_as_bucket_view=True),
    }


def spend(
    model: nn.Module, optimizer: torch.optim.Optimizer, work: Workload
) -> tuple[float, float]:
    """CPU seconds and wall seconds of one round."""
    batch = work.batch()
    comm.communicator().barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(work.steps):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.process_time() - cpu, time.perf_counter() - wall


def measure(rank: int, size: int, port: int, names: list[str], rounds: int, family: str) -> None:
    """One rank of the benchmark; rank 0 prints the table."""
    environment = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({key: str(value) for key, value in environment.items()})
    torch.set_num_threads(1)
    world = comm.connect("gloo")
    for name in names:
        torch.manual_seed(0)
        work = WORKLOADS[name]
        models = arms(work.build(), family)
        optimizers = {arm: torch.optim.SGD(m.parameters(), lr=1e-4) for arm, m in models.items()}
        spent: dict[str, list[tuple[float, float]]] = {arm: [] for arm in models}
        for number in range(rounds + 1):
            order = list(models) if number % 2 else list(models)[::-1]
            for arm in order:
                seconds = spend(models[arm], optimizers[arm], work)
                mine = world.gather_numbers(seconds, label="seconds")
                if number:
                    spent[arm].append((sum(c for c, _ in mine) / size, max(w for _, w in mine)))
        if rank == 0:
            show(name, work.steps, spent, PEERS[family])
    comm.disconnect()


def show(
    name: str,
    steps: int,
    spent: dict[str, list[tuple[float, float]]],
    peers: tuple[str, ...],
) -> None:
    print(f"{name}: median of {len(spent['plain'])} rounds of {steps} steps")
    columns = f"{'CPU ms':>8} {'CPU/plain':>10} {'CPU/peer':>9} {'wall ms':>8}"
    print(f"  {'arm':<10} {columns} {'wall/peer (quartiles)':>24}")
    best = spent[min(peers, key=lambda arm: statistics.median(cpu for cpu, _ in spent[arm]))]
    for arm, rows in spent.items():
        cpu = statistics.median(c for c, _ in rows) / steps * 1e3
        wall = statistics.median(w for _, w in rows) / steps * 1e3
        plain = statistics.median(r[0] / p[0] for r, p in zip(rows, spent["plain"], strict=True))
        ddp = statistics.median(r[0] / d[0] for r, d in zip(rows, best, strict=True))
        walls = [r[1] / d[1] for r, d in zip(rows, best, strict=True)]
        low, middle, high = statistics.quantiles(walls, n=4)
        spread = f"{middle:.2f} ({low:.2f}..{high:.2f})"
        row = f"{cpu:8.2f} {plain:10.2f} {ddp:9.2f} {wall:8.2f} {spread:>24}"
        print(f"  {arm:<10} {row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--port", type=int, default=29731)
    parser.add_argument("--family", choices=list(PEERS), default="replicated")
    options = parser.parse_args()
    arguments = (options.ranks, options.port, options.models, options.rounds, options.family)
    mp.spawn(measure, arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
