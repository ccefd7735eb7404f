r"""Data-parallel training over NCCL with several ranks on one GPU, against torch's own.

    python benchmarks/device_ranks.py                          # on a GPU: 2 and 4 ranks
    python benchmarks/device_ranks.py --json figures.json
    python benchmarks/device_ranks.py --size miniature --ranks 2 --rounds 1    # what runs on a CPU

NCCL refuses two ranks of one host on one GPU, but takes ranks whose ``NCCL_HOSTID`` differs for
ranks on hosts of their own, and sends between them over sockets. The processes take turns on the
card, so each operation takes longer than on a cluster; bytes and numbers of operations are true.

Programs: `fully_shard` against FSDP2, hybrid sharding too, `replicate` against DDP under autocast,
the class against FSDP1, and 1F1B against torch's. The model is a decoder as Llama's. Arms take
turns in short rounds, and a ratio is taken within a round. Given are the medians of the rounds and
their quartiles: the time of a step, until the device has done it, of the slowest rank, and ours
over torch's. Both arms train the same model on the same batches, and their losses must agree.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.pipelining as torch_pipelining
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFullyShardedDataParallel
from torch.distributed.fsdp import MixedPrecision as TorchMixedPrecision
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from meshwright import comm, pipelining
from meshwright.data_parallel import MixedPrecisionPolicy, fully_shard, replicate
from meshwright.fsdp import FullyShardedDataParallel, MixedPrecision
from meshwright.fsdp.wrap import ModuleWrapPolicy

__all__ = ["main"]

WARM = 3
CLOSE = 0.02
"""Losses in bfloat16 may differ by so much of theirs after the steps of a benchmark."""
MICROBATCHES = 8
"""Of a pipeline, of one row each."""
NARROW: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}

Row = dict[str, Any]
"""What was measured of one comparison."""


@dataclass(frozen=True, slots=True)
class Size:
    """The measures of a decoder, of one rank's batch, and the steps of a round."""

    layers: int
    dim: int
    hidden: int
    heads: int
    vocabulary: int
    batch: tuple[int, int]
    steps: int


SIZES = {
    "llama": Size(12, 1024, 2816, 16, 4096, (4, 256), 3),
    "miniature": Size(4, 32, 48, 2, 64, (2, 8), 1),
}


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm: seven matrices and two vectors."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList([nn.RMSNorm(size.dim), nn.RMSNorm(size.dim)])
        self.q, self.k, self.v, self.o = (
            nn.Linear(size.dim, size.dim, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(size.dim, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (
            each(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """A language model; called with tokens it returns the loss of predicting each next one."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.dim)
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.norm = nn.RMSNorm(size.dim)
        self.head = nn.Linear(size.dim, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(self.norm(x)), tokens)


def loss_of(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


class Part(nn.Module):
    """A stage of a decoder: as many of its blocks as any other's, and what lies at its ends."""

    def __init__(self, model: Decoder, number: int, count: int) -> None:
        super().__init__()
        layers = len(model.blocks)
        self.embedding = model.embedding if number == 0 else None
        self.blocks = model.blocks[number * layers // count : (number + 1) * layers // count]
        self.end = nn.Sequential(model.norm, model.head) if number == count - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.end is None else self.end(x)


# ------------------------------------------------------------------------------------ arms


def mesh_of(device: torch.device, *, is_hybrid: bool) -> DeviceMesh:
    ranks = comm.communicator().size
    shape, names = ((2, ranks // 2), ("replicate", "shard")) if is_hybrid else ((ranks,), ("dp",))
    return init_device_mesh(device.type, shape, mesh_dim_names=names)


class Trained:
    """One arm: a model and its optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Train one step; returns the loss, which is 0 on ranks that have none."""
        loss = self.run(tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        """A forward and a backward."""
        loss: torch.Tensor = self.model(tokens)
        loss.backward()
        return loss


class Piped(Trained):
    """A stage of 1F1B, in bfloat16, by the ``library``: torch's or ours."""

    def __init__(self, library: Any, model: Decoder, device: torch.device) -> None:  # noqa: ANN401
        world = comm.communicator()
        part = Part(model, world.rank, world.size).bfloat16()
        super().__init__(part)
        stage = library.PipelineStage(part, world.rank, world.size, device)
        self.schedule = library.Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
        self.is_first, self.is_last = world.rank == 0, world.rank == world.size - 1

    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        target = {"target": tokens, "losses": losses} if self.is_last else {}
        self.schedule.step(*((tokens,) if self.is_first else ()), **target)
        return torch.stack(losses).mean() if losses else torch.zeros(())


Arm = Callable[[Decoder, torch.device], Trained]


def shard_with(shard: Callable[..., Any], policy: type, *, is_hybrid: bool = False) -> Arm:
    """Make an arm: each block a unit, and the root, in bfloat16 with sums in float32."""

    def arm(model: Decoder, device: torch.device) -> Trained:
        mesh = mesh_of(device, is_hybrid=is_hybrid)
        for part in (*model.blocks, model):
            shard(part, mesh=mesh, mp_policy=policy(**NARROW))
        return Trained(model)

    return arm


def wrap_with(wrapper: type[nn.Module], policy: type, precision: type) -> Arm:
    """Make an arm of the class: each block a unit, with original parameters."""

    def arm(model: Decoder, device: torch.device) -> Trained:
        wrapped = wrapper(
            model,
            auto_wrap_policy=policy({Block}),
            mixed_precision=precision(**NARROW),
            device_id=device,
            use_orig_params=True,
        )
        return Trained(wrapped)

    return arm


class Cast(nn.Module):
    """Computes under autocast, as replicas in bfloat16 do."""

    def __init__(self, inner: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.inner, self.kind = inner, device.type

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.kind, torch.bfloat16):
            loss: torch.Tensor = self.inner(tokens)
            return loss


PAIRS: dict[str, tuple[Arm, Arm]] = {
    "fully_shard": (
        shard_with(fully_shard, MixedPrecisionPolicy),
        shard_with(torch_fully_shard, TorchPolicy),
    ),
    "replicate": (
        lambda model, device: Trained(Cast(replicate(model), device)),
        lambda model, device: Trained(Cast(DistributedDataParallel(model), device)),
    ),
    "class": (
        wrap_with(FullyShardedDataParallel, ModuleWrapPolicy, MixedPrecision),
        wrap_with(TorchFullyShardedDataParallel, TorchModuleWrapPolicy, TorchMixedPrecision),
    ),
    "1F1B": (
        functools.partial(Piped, pipelining),
        functools.partial(Piped, torch_pipelining),
    ),
    "hybrid": (
        shard_with(fully_shard, MixedPrecisionPolicy, is_hybrid=True),
        shard_with(torch_fully_shard, TorchPolicy, is_hybrid=True),
    ),
}
"""Ours and torch's. ``hybrid``: two copies of shards over half of the ranks each, from 4 ranks."""


# -------------------------------------------------------------------------------- measuring


def finish(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spend(arm: Trained, tokens: torch.Tensor, steps: int) -> float:
    """Seconds of a step on the slowest rank."""
    world = comm.communicator()
    finish(tokens.device)
    world.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        arm.step(tokens)
    finish(tokens.device)
    spent = (time.perf_counter() - begun) / steps
    return max(seconds for (seconds,) in world.gather_numbers([spent], label="seconds"))


def batch_of(name: str, size: Size) -> torch.Tensor:
    """Tokens of this rank; ranks of a pipeline have the same."""
    is_pipeline = name == "1F1B"
    torch.manual_seed(1 if is_pipeline else 1 + comm.communicator().rank)
    rows, length = size.batch
    return torch.randint(size.vocabulary, (MICROBATCHES if is_pipeline else rows, length))


def compare(name: str, size: Size, rounds: int, device: torch.device) -> Row:
    """Train both arms of a program in turns."""
    torch.manual_seed(0)
    model = Decoder(size).to(device)
    arms = [make(copy.deepcopy(model), device) for make in PAIRS[name]]
    del model
    tokens = batch_of(name, size).to(device)
    losses = [[arm.step(tokens).item() for _ in range(WARM)] for arm in arms]
    for one, other in zip(*losses, strict=True):
        if not math.isclose(one, other, rel_tol=CLOSE):
            raise RuntimeError(
                f"expected equal losses, found ours {losses[0]}, torch's {losses[1]}"
            )
    spent: list[list[float]] = [[], []]
    for number in range(rounds):
        for index in (0, 1) if number % 2 else (1, 0):
            spent[index].append(spend(arms[index], tokens, size.steps))
    ratios = [mine / theirs for mine, theirs in zip(*spent, strict=True)]
    ours, theirs = ([seconds * 1e3 for seconds in each] for each in spent)
    return {
        "ours ms": quartiles(ours),
        "torch ms": quartiles(theirs),
        "ours / torch": quartiles(ratios),
    }


def quartiles(values: Sequence[float]) -> list[float]:
    """The median between the quartiles; one value is all three."""
    if len(values) == 1:
        return [values[0]] * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def measure(rank: int, ranks: int, options: argparse.Namespace, results: dict[str, Row]) -> None:
    """One rank of all comparisons; rank 0 keeps the rows."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0",  # all on the first GPU
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(options.port + ranks),
        NCCL_HOSTID=f"rank {rank}",
        NCCL_NET="Socket",
        NCCL_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    comm.connect("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    for name in options.pairs:
        if name != "hybrid" or ranks >= 4:
            row = compare(name, SIZES[options.size], options.rounds, device)
            if rank == 0:
                results[f"{name}, {ranks} ranks"] = row
    comm.disconnect()


def table(rows: dict[str, Row]) -> str:
    """The rows in Markdown."""
    columns = list(next(iter(rows.values())))
    lines = [f"| program | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        cells = (
            f"{middle:.3g} ({low:.3g}..{high:.3g})"
            for low, middle, high in (row[column] for column in columns)
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="llama" if on_gpu else "miniature")
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=list(PAIRS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--port", type=int, default=29861)
    parser.add_argument("--json", help="write the figures to this file, too")
    options = parser.parse_args()
    card = torch.cuda.get_device_name(0) if on_gpu else "CPU"
    title = f"torch {torch.__version__}, {card}, {options.size}"
    with mp.Manager() as manager:
        results = manager.dict()
        for ranks in options.ranks:
            mp.spawn(measure, (ranks, options, results), nprocs=ranks)
        rows = dict(results)
    print(f"{title}, medians of {options.rounds} rounds:\n\n{table(rows)}")
    if options.json:
        Path(options.json).write_text(json.dumps({"title": title, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
