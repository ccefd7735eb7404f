"""Layers over tensor ranks against torch's own, on the CPU, two ranks.

    python benchmarks/tensor_parallel.py
    python benchmarks/tensor_parallel.py --works small --rounds 9
    python benchmarks/tensor_parallel.py --stepping

A step is forward, backward and optimizer of MLPs (dim, 4 dim, dim) by columns and rows. ``small``:
four of dim 64 with 64 tokens; ``large``: two of dim 1024 with 128 tokens. ``torch`` is
`torch.distributed.tensor.parallel` on Gloo, ``bare`` plain parameters with an all-reduce each way
on Gloo, written by hand; ``ours`` is `parallelize_module`, on Gloo and on shared memory, and
``flat`` the same with the optimizer on `flat_groups`.

The arms take turns in short rounds, so that a busy machine slows all of them alike; a ratio is
taken within a round. Printed are medians and quartiles of the rounds. The optimizers step through
DTensors in torch's arm and in ``ours`` alike; the ratios without them are printed beside. With
``--stepping`` the optimizer is AdamW behind clipping, and what both take alone on `flat_groups` is
compared with what they take on the plain parameters of ``bare``.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as peer
import torch.multiprocessing as mp
from _figures import note
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh

from meshwright import clip_grad_norm_, comm, flat_groups, tensor_parallel

__all__ = ["main"]

SHOWN = "CPU ms, CPU / torch, wall / torch, CPU without the optimizer / torch"
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}


@dataclass(frozen=True)
class Workload:
    """``count`` MLPs, and how many steps make a round."""

    count: int
    dim: int
    tokens: int
    steps: int


WORKS = {"small": Workload(4, 64, 64, 40), "large": Workload(2, 1024, 128, 2)}


class Bare(nn.Module):
    """This rank's part of an MLP, with what tensor parallelism needs and no more."""

    def __init__(self, whole: nn.Sequential, group: dist.ProcessGroup) -> None:
        super().__init__()
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        up, down = whole[0], whole[2]
        self.up_weight = nn.Parameter(up.weight.detach().chunk(size)[rank].clone())
        self.up_bias = nn.Parameter(up.bias.detach().chunk(size)[rank].clone())
        self.down_weight = nn.Parameter(down.weight.detach().chunk(size, 1)[rank].clone())
        self.down_bias = nn.Parameter(down.bias.detach().clone())
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _Copy.apply(x, self.group)
        hidden = nn.functional.linear(x, self.up_weight, self.up_bias).relu()
        return (
            _Sum.apply(nn.functional.linear(hidden, self.down_weight), self.group) + self.down_bias
        )


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Arm:
    """One model and its optimizer."""

    def __init__(self, model: nn.Module, work: Workload, optimizer: str, *, is_flat: bool) -> None:
        self.model = model
        self.work = work
        self.optimizer = OPTIMIZERS[optimizer](
            flat_groups(model) if is_flat else model.parameters()
        )
        self.x = torch.randn(work.tokens, work.dim, requires_grad=True)

    def spend(self) -> tuple[float, float, float]:
        """CPU and wall seconds of a step, and CPU seconds of it without the optimizer."""
        comm.communicator().barrier()
        steps, apart = self.work.steps, 0.0
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(steps):
            self.model(self.x).square().mean().backward()
            before = time.process_time()
            self.optimizer.step()
            self.optimizer.zero_grad()
            apart += time.process_time() - before
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return cpu / steps, wall / steps, (cpu - apart) / steps


def cut(kind: ModuleType, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """``model`` over ``mesh``, by torch or by us."""
    plan = {"*.0": kind.ColwiseParallel(), "*.2": kind.RowwiseParallel()}
    return kind.parallelize_module(copy.deepcopy(model), mesh, plan)


def models(work: Workload, gloo: dist.ProcessGroup) -> dict[str, nn.Module]:
    """The same model of each arm."""
    torch.manual_seed(0)
    dim = work.dim
    mlps = [
        nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))
        for _ in range(work.count)
    ]
    model = nn.Sequential(*mlps)
    slow = DeviceMesh.from_group(gloo, "cpu", mesh_dim_names=("tensor",))
    world = comm.communicator().group
    fast = DeviceMesh.from_group(world, "cpu", mesh_dim_names=("tensor",))
    made = {
        "torch": cut(peer, model, slow),
        "bare": nn.Sequential(*(Bare(mlp, gloo) for mlp in mlps)),
        "bare shm": nn.Sequential(*(Bare(mlp, world) for mlp in mlps)),
        "ours gloo": cut(tensor_parallel, model, slow),
        "ours shm": cut(tensor_parallel, model, fast),
        "flat gloo": cut(tensor_parallel, model, slow),
        "flat shm": cut(tensor_parallel, model, fast),
    }
    x = torch.randn(work.tokens, work.dim)
    expected = model(x)
    for name, found in made.items():
        torch.testing.assert_close(
            found(x), expected, msg=lambda text, name=name: f"{name}: {text}"
        )
    return made


def arms(work: Workload, optimizer: str, gloo: dist.ProcessGroup) -> dict[str, Arm]:
    made = models(work, gloo)
    return {
        name: Arm(found, work, optimizer, is_flat=name.startswith("flat"))
        for name, found in made.items()
    }


class Stepping:
    """Clipping and AdamW alone, of one model's parameters as they are or as flat ones."""

    def __init__(self, model: nn.Module, work: Workload, *, is_flat: bool) -> None:
        self.model = model
        self.work = work
        self.parameters = flat_groups(model) if is_flat else list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4)
        self.x = torch.randn(work.tokens, work.dim)

    def spend(self) -> float:
        """CPU seconds of a step; forward and backward are not counted."""
        taken = 0.0
        for _ in range(self.work.steps):
            self.model(self.x).square().mean().backward()
            before = time.process_time()
            clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            taken += time.process_time() - before
        return taken / self.work.steps


def measure_stepping(options: argparse.Namespace, gloo: dist.ProcessGroup) -> None:
    """Clipping and AdamW on `flat_groups` of ours, on its DTensors, and on plain parameters."""
    world = comm.communicator()
    for name in options.works:
        made = models(WORKS[name], gloo)
        shown = {
            "plain": Stepping(made["bare"], WORKS[name], is_flat=False),
            "DTensors": Stepping(made["ours gloo"], WORKS[name], is_flat=False),
            "flat": Stepping(made["flat gloo"], WORKS[name], is_flat=True),
        }
        spent: dict[str, list[float]] = {arm: [] for arm in shown}
        for number in range(options.rounds + 2):
            for arm in shown if number % 2 else reversed(shown):
                (seconds,) = zip(
                    *world.gather_numbers([shown[arm].spend()], label="seconds"), strict=True
                )
                if number > 1:
                    spent[arm].append(statistics.mean(seconds))
        if world.rank == 0:
            print(f"{name}, clipping and AdamW: CPU ms, CPU / plain; {options.rounds} rounds")
            for arm, rows in spent.items():
                ratios = [one / two for one, two in zip(rows, spent["plain"], strict=True)]
                print(f"  {arm:10} {1e3 * statistics.median(rows):8.3f}  {spread(ratios)}")


def spread(values: Sequence[float]) -> str:
    """The median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
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
    if options.stepping:
        measure_stepping(options, gloo)
        comm.disconnect()
        return
    for name, optimizer in itertools.product(options.works, options.optimizers):
        made = arms(WORKS[name], optimizer, gloo)
        spent: dict[str, list[list[float]]] = {arm: [] for arm in made}
        for number in range(options.rounds + 2):
            for arm in made if number % 2 else reversed(made):
                ranks = world.gather_numbers(made[arm].spend(), label="seconds")
                if number > 1:
                    spent[arm].append([statistics.mean(one) for one in zip(*ranks, strict=True)])
        if rank == 0:
            print(f"{name}, {optimizer}: {SHOWN}; {options.rounds} rounds", flush=True)
            for arm, rows in spent.items():
                pairs = list(zip(rows, spent["torch"], strict=True))
                ratios = [[one[n] / two[n] for one, two in pairs] for n in range(3)]
                taken = 1e3 * statistics.median(row[0] for row in rows)
                for over in ("torch", "bare", "bare shm"):
                    if arm != over and not arm.startswith(("torch", "bare")):
                        values = [a[0] / b[0] for a, b in zip(rows, spent[over], strict=True)]
                        note(f"tensor {name}, {optimizer}: {arm} over {over}, CPU", values)
                print(f"  {arm:10} {taken:8.2f}  {'  '.join(map(spread, ratios))}", flush=True)
    comm.disconnect()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS))
    chosen = list(OPTIMIZERS)
    parser.add_argument("--optimizers", nargs="+", default=chosen, choices=chosen)
    parser.add_argument("--stepping", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--port", type=int, default=29861)
    mp.spawn(measure, (parser.parse_args(),), nprocs=2)


if __name__ == "__main__":
    main()
