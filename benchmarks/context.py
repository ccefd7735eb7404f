"""Attention of sequences split over two ranks against the same written by hand, on the CPU.

    python benchmarks/context.py
    python benchmarks/context.py --works exchange --rounds 15
    python benchmarks/context.py --profile all-to-all

A step is forward and backward of causal attention of 8 heads, of keys 4 and of width 32, of one row
whose positions are split. ``attention``: 2,048 positions; ``short``: 64 rows of
64; ``exchange``: 512 rows of 8, so that the tensors' way is nearly all there is. Heads lie next to
each other in memory, as layers leave them. ``bare`` is torch's operations, written by hand: one
``all_to_all_single`` of queries, keys and values, in an autograd function of its own,
``scaled_dot_product_attention`` of half of the heads on whole sequences, and an all-to-all back; on
Gloo, and (``bare shm``) on the same shared memory as ours. ``all-to-all`` and ``ring`` are
`meshwright.context_parallel` with that method: both have contiguous parts, so that all send alike,
and ``ring, zigzag`` has the parts that are balanced under a causal mask.

Outputs and all gradients are compared first. Then the arms take turns in short rounds, so that a
busy machine slows all of them alike; a ratio is taken within a round, of the CPU times of the
processes. Printed are medians and quartiles of the rounds.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _figures import note, quartiles
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from meshwright import comm
from meshwright.context_parallel import context_parallel, context_parallel_unshard

__all__ = ["main"]

HEADS, KEYS, DIM = 8, 4, 32
OURS = ("all-to-all", "ring", "ring, zigzag")


@dataclass(frozen=True)
class Workload:
    """Rows, their length, and how many steps make a round."""

    rows: int
    length: int
    steps: int


WORKS = {
    "attention": Workload(1, 2048, 4),
    "short": Workload(64, 64, 8),
    "exchange": Workload(512, 8, 8),
}


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        found = torch.empty_like(x)
        dist.all_to_all_single(found, x, group=group)
        return found

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        found = torch.empty_like(grad)
        dist.all_to_all_single(found, grad, group=ctx.group)
        return found, None


def bare(group: dist.ProcessGroup, *qkv: torch.Tensor) -> torch.Tensor:
    """Attention of all positions for this rank's heads, and back to its positions."""
    size = dist.get_world_size(group)
    heads = [x.shape[1] // size for x in qkv]
    # (rank, row, head, position, width)
    sent = torch.cat([x.unflatten(1, (size, -1)) for x in qkv], 2).transpose(0, 1).contiguous()
    whole = _Exchange.apply(sent, group).permute(1, 2, 0, 3, 4).flatten(2, 3)
    y = attend(*whole.split(heads, 1))
    back = y.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4).contiguous()
    return _Exchange.apply(back, group).transpose(0, 1).flatten(1, 2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Arm:
    """A way to compute attention, with this rank's part of its inputs."""

    def __init__(
        self, work: Workload, mesh: DeviceMesh, group: dist.ProcessGroup | None, name: str
    ) -> None:
        self.work, self.mesh, self.group = work, mesh, group
        self.method, _, split = name.partition(", ")
        self.split = split or "contiguous"
        draw = torch.Generator().manual_seed(1)
        wholes = [
            torch.randn(work.rows, heads, work.length, DIM, generator=draw)
            for heads in (HEADS, KEYS, KEYS, HEADS)
        ]
        with self.splitting(*wholes, dim=2):
            parts = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in wholes]
        *self.qkv, self.grad = parts
        for x in self.qkv:
            x.requires_grad_()

    def splitting(self, *wholes: torch.Tensor, dim: int = 0) -> AbstractContextManager[None]:
        """Split sequences in the block, and attention unless it is written by hand."""
        given = wholes or (torch.zeros(self.work.length),)
        method = None if self.group is not None else self.method
        return context_parallel(
            self.mesh,
            buffers=given,
            buffer_seq_dims=[dim] * len(given),
            method=method,
            split=self.split,
        )

    def computing(self) -> AbstractContextManager[None]:
        """What steps are in."""
        return nullcontext() if self.group is not None else self.splitting()

    def step(self) -> torch.Tensor:
        """Forward and backward; the output."""
        y = attend(*self.qkv) if self.group is None else bare(self.group, *self.qkv)
        y.backward(self.grad)
        return y.detach()

    def clear(self) -> list[torch.Tensor]:
        """Take away all gradients."""
        found = [x.grad for x in self.qkv if x.grad is not None]
        for x in self.qkv:
            x.grad = None
        return found

    def wholes(self) -> list[torch.Tensor]:
        """The output and all gradients, of all positions."""
        with self.splitting():
            pass  # the split that is gathered is the last one
        with self.computing():
            found = [self.step(), *self.clear()]
        return context_parallel_unshard(self.mesh, found, [2] * len(found))

    def spend(self, steps: int) -> float:
        """CPU seconds of a step."""
        comm.communicator().barrier()
        with self.computing():
            cpu = time.process_time()
            for _ in range(steps):
                self.step()
                self.clear()
            return (time.process_time() - cpu) / steps


def arms(work: Workload, gloo: dist.ProcessGroup) -> dict[str, Arm]:
    """All arms, whose outputs and gradients are equal."""
    world = comm.communicator().group
    mesh = DeviceMesh.from_group(world, "cpu", mesh_dim_names=("cp",))
    by_hand = {"bare": gloo, "bare shm": world}
    made = {name: Arm(work, mesh, by_hand.get(name), name) for name in (*by_hand, *OURS)}
    for name in by_hand:
        made[name].split = "contiguous"
    expected = made["bare"].wholes()
    for name, arm in made.items():
        for mine, other in zip(arm.wholes(), expected, strict=True):
            torch.testing.assert_close(
                mine, other, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
    return made


def profiled(step: Callable[[], object], steps: int) -> None:
    """Print where the Python of ``steps`` calls spends its time."""
    with cProfile.Profile() as profile:
        for _ in range(steps):
            step()
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def spread(values: Sequence[float]) -> str:
    """The median and the quartiles."""
    low, middle, high = quartiles(values)
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def measure(rank: int, options: argparse.Namespace) -> None:
    """One rank of the comparison; rank 0 prints."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port)
    )
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    world = comm.connect("shm")
    gloo = dist.new_group(backend="gloo")
    assert gloo is not None
    for name in options.works:
        work = WORKS[name]
        made = arms(work, gloo)
        spent: dict[str, list[float]] = {arm: [] for arm in made}
        for number in range(options.rounds + 2):
            for arm in made if number % 2 else reversed(made):
                row = [made[arm].spend(work.steps)]
                (ranks,) = zip(*world.gather_numbers(row, label="seconds"), strict=True)
                if number > 1:
                    spent[arm].append(statistics.mean(ranks))
        if rank == 0:
            print(f"{name}: CPU ms, over bare shm, over bare; {options.rounds} rounds", flush=True)
            for arm, rows in spent.items():
                ratios = []
                for over in ("bare shm", "bare"):
                    values = [a / b for a, b in zip(rows, spent[over], strict=True)]
                    ratios.append(spread(values))
                    if arm in OURS:
                        note(f"context {name}: ours {arm} over {over}, CPU", values)
                print(f"  {arm:12} {1e3 * statistics.median(rows):8.2f}  {'  '.join(ratios)}")
        if options.profile:
            arm = made[options.profile]
            with arm.computing():
                (profiled if rank == 0 else _repeated)(
                    lambda arm=arm: (arm.step(), arm.clear()), 50
                )
    comm.disconnect()


def _repeated(step: Callable[[], object], steps: int) -> None:
    for _ in range(steps):
        step()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", choices=("bare", "bare shm", *OURS))
    parser.add_argument("--port", type=int, default=29873)
    mp.spawn(measure, (parser.parse_args(),), nprocs=2)


if __name__ == "__main__":
    main()
