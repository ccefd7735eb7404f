r"""Compiled data-parallel training against torch's own, on the CPU: steady state and first step.

    python benchmarks/compiled.py --models net gpt --ranks 2 --rounds 9
    python benchmarks/compiled.py --backend shm
    python benchmarks/compiled.py --first-step
    python benchmarks/compiled.py --models gpt --arms plain fully_shard "plain compiled" \
        "fully_shard compiled"

The peers are torch's DDP, eager at its best setting and compiled as `torch.compile` does by itself.
`own entry` is `meshwright.compiler.compile_module`. Torch's arms always run on Gloo. Arms take
turns in short rounds; a ratio is taken within a round; printed is the median of the rounds, and
their quartiles. Below the table is each compiled arm over the eager one.

First step: each arm in processes of its own, with caches switched off; the arms take turns.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable

import torch
import torch.multiprocessing as mp
from _data_parallel_arms import ARMS, WORKLOADS, make
from _figures import note
from torch import nn

from data_parallel import Spent, enter, ratios, show_times, spend, spread, train
from meshwright import comm
from meshwright.compiler import compile_module

__all__ = ["main"]

EAGER = ("plain", "ddp", "ddp view", "replicate", "fully_shard")
COMPILED = {f"{arm} compiled": arm for arm in ("plain", "ddp", "replicate", "fully_shard")}
OWN_ENTRY = "replicate, own entry"
PEERS = ("ddp", "ddp view", "ddp compiled")
FIRST = ("ddp compiled", "replicate compiled", OWN_ENTRY)


class Model(nn.Module):
    """``body``, run by a frame that is not torch's.

    `torch.compile` skips the frames of torch.nn: under torch's DDP, whose own frame it cannot
    compile, a bare `nn.Sequential` would run eagerly.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(batch)
        return found


def build(name: str, arm: str, model: nn.Module, group: object) -> Callable[..., torch.Tensor]:
    """A copy of ``model`` under ``arm``."""
    if arm == OWN_ENTRY:
        return compile_module(make(name, "replicate", model, group))
    if arm in ARMS:
        return make(name, arm, model, group)
    return torch.compile(make(name, COMPILED[arm], model, group))


def measure_steady(rank: int, options: argparse.Namespace) -> None:
    """One rank of the comparison of steps; rank 0 prints the tables."""
    group = enter(rank, options)
    world = comm.communicator()
    for name in options.models:
        work = WORKLOADS[name]
        torch.manual_seed(0)
        model = Model(work.build())
        arms = [a for a in (*EAGER, *COMPILED, OWN_ENTRY) if not options.arms or a in options.arms]
        models = {arm: build(name, arm, model, group) for arm in arms}
        optimizers = {arm: torch.optim.SGD(m.parameters(), 1e-4) for arm, m in models.items()}
        spent: Spent = {arm: [] for arm in arms}
        for number in range(options.rounds + 2):
            for arm in arms if number % 2 else arms[::-1]:
                numbers = spend(models[arm], optimizers[arm], work, work.steps)
                rows = world.gather_numbers(numbers, label="s")
                if number > 1:  # all is compiled by then
                    cpu, wall, pages = zip(*rows, strict=True)
                    mine = statistics.mean(cpu), max(wall), statistics.mean(pages)
                    spent[arm].append(mine)
        if rank == 0:
            peers = [arm for arm in PEERS if arm in spent]
            title = f"compiled {name}, {options.backend}"
            show_times(title, work.steps, spent, peers)
            show_over_eager(title, spent)
        del models, optimizers
    comm.disconnect()


def show_over_eager(title: str, spent: Spent) -> None:
    """Print each compiled arm over its eager one, and note it beside the plain model's."""
    plain = ratios(spent, "plain compiled", "plain") if "plain compiled" in spent else []
    for arm, eager in COMPILED.items():
        if arm not in spent or eager not in spent:
            continue
        of_cpu, of_wall = (ratios(spent, arm, eager, column) for column in (0, 1))
        print(f"  {arm:<20} over eager: CPU {spread(of_cpu)}  wall {spread(of_wall)}", flush=True)
        note(f"{title}: {arm} over eager, CPU", of_cpu)
        if plain and eager != "plain":
            above = [mine - least for mine, least in zip(of_cpu, plain, strict=True)]
            note(f"{title}: {arm} over eager, above plain's", above)


def cpu_seconds() -> float:
    """Of this process and of the compilers that it has started and seen end."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measure_first(rank: int, options: argparse.Namespace, name: str, arm: str, path: str) -> None:
    """One rank of one arm's first step; rank 0 writes CPU and wall seconds to ``path``."""
    group = enter(rank, options)
    world = comm.communicator()
    torch.manual_seed(0)
    work = WORKLOADS[name]
    model = build(name, arm, Model(work.build()), group)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    world.barrier()
    cpu, wall = cpu_seconds(), time.perf_counter()
    train(model, optimizer, work)
    spent = cpu_seconds() - cpu, time.perf_counter() - wall
    rows = world.gather_numbers(spent, label="seconds")
    if rank == 0:
        cpus, walls = zip(*rows, strict=True)
        with open(path, "a") as file:
            file.write(f"{statistics.mean(cpus)} {max(walls)}\n")
    comm.disconnect()


def show_first(options: argparse.Namespace) -> None:
    """The table of first steps."""
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    for name in options.models:
        spent: dict[str, list[tuple[float, ...]]] = {arm: [] for arm in FIRST}
        for number in range(options.rounds):
            for arm in FIRST if number % 2 else FIRST[::-1]:
                options.port += 1
                path = f"/tmp/first-step-{os.getpid()}"
                mp.spawn(measure_first, (options, name, arm, path), nprocs=options.ranks)
                with open(path) as file:
                    spent[arm].append(tuple(float(each) for each in file.read().split()))
                os.remove(path)
        print(f"{name}, {options.backend}: seconds of the first step, {options.rounds} rounds")
        for arm, rows in spent.items():
            cpu, wall = (statistics.median(column) for column in zip(*rows, strict=True))
            pairs = list(zip(rows, spent[FIRST[0]], strict=True))
            of_cpu, of_wall = (spread([a[n] / b[n] for a, b in pairs]) for n in (0, 1))
            print(f"  {arm:<20} CPU {cpu:6.1f}  ratio {of_cpu}  wall {wall:6.1f}  ratio {of_wall}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["net", "gpt"], choices=list(WORKLOADS))
    parser.add_argument("--arms", nargs="+", default=[], help="only these")
    parser.add_argument("--backend", choices=("gloo", "shm"), default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--port", type=int, default=29831)
    parser.add_argument("--first-step", action="store_true")
    options = parser.parse_args()
    if options.first_step:
        show_first(options)
    else:
        mp.spawn(measure_steady, (options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
