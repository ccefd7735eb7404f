"""Pipelines against torch's own, on the CPU: runtime, transfers, steps, simulator.

    python benchmarks/pipelining.py --part local
    python benchmarks/pipelining.py --part transfers --rounds 7
    python benchmarks/pipelining.py --part step --schedules 1F1B GPipe
    python benchmarks/pipelining.py --part simulator

``local``: tiny stages, all on one rank, so that nothing is sent: CPU of an action (F, B, I or W).
``transfers``: the same stages on two ranks. ``step``: two ranks train `gpt8`, 8 blocks of dim 256,
and each step is compared with its floor: the compute of all stages spread over the ranks, and the
schedule's own bubble, as the simulator gives it for the forward, input half and weight half that
were measured in one process in the same round. ``simulator``: 512 ranks, 4,096 microbatches.

The arms take turns in short rounds, so that a busy machine slows all of them alike; a ratio is
taken within a round. Printed are medians and quartiles of the rounds. torch runs on Gloo.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as peer
import torch.multiprocessing as mp
from _figures import note
from torch import nn

from meshwright import comm, pipelining
from meshwright.pipelining.schedules import SCHEDULE_NAMES
from meshwright.schedule import builders
from meshwright.schedule.actions import Schedule
from meshwright.schedule.builders import stage_ranks
from meshwright.schedule.simulate import Costs, simulate

__all__ = ["main"]

MICROBATCHES = 8
CPU = torch.device("cpu")

Row = dict[str, float]


@dataclass(frozen=True)
class Workload:
    """A model in as many parts as asked for, and a batch of ``MICROBATCHES`` equal microbatches."""

    parts: Callable[[int], list[nn.Module]]
    batch: Callable[[], torch.Tensor]
    steps: int
    """How many make a round."""


def tiny(stages: int) -> list[nn.Module]:
    return [nn.Linear(8, 8) for _ in range(stages)]


def gpt8(stages: int) -> list[nn.Module]:
    blocks = [
        nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(8)
    ]
    share = 8 // stages
    return [nn.Sequential(*blocks[i * share : (i + 1) * share]) for i in range(stages)]


TINY = Workload(tiny, lambda: torch.randn(2 * MICROBATCHES, 8), 20)
GPT8 = Workload(gpt8, lambda: torch.randn(2 * MICROBATCHES, 64, 256), 1)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def chunks_of(name: str) -> int:
    return 1 if name in ("GPipe", "1F1B") else 2


def mine(name: str, ranks: int, rank: int) -> list[int]:
    """The stages of this rank."""
    style = "v" if "V" in name else "loop"
    holders = stage_ranks(ranks, ranks * chunks_of(name), style)
    return [stage for stage, holder in enumerate(holders) if holder == rank]


class Arm:
    """One pipeline with a model of its own: ``kind`` is torch or ours, on ``group``."""

    def __init__(self, kind: Any, name: str, parts: list[nn.Module], group: Any) -> None:  # noqa: ANN401
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.listed = mine(name, ranks, rank)
        self.count = len(parts)
        parts = copy.deepcopy(parts)
        self.modules = [parts[stage] for stage in self.listed]
        stages = [
            kind.PipelineStage(module, stage, self.count, CPU, group=group)
            for stage, module in zip(self.listed, self.modules, strict=True)
        ]
        made = kind.schedules.get_schedule_class(name)
        single = chunks_of(name) == 1
        self.schedule = made(stages[0] if single else stages, MICROBATCHES, loss_fn=loss_fn)

    def step(self, x: torch.Tensor, target: torch.Tensor) -> None:
        args = (x,) if 0 in self.listed else ()
        last = self.count - 1 in self.listed
        self.schedule.step(*args, **({"target": target} if last else {}))
        for module in self.modules:
            for parameter in module.parameters():
                parameter.grad = None


def actions(name: str, ranks: int) -> float:
    """Compute actions of a rank in a step, on average."""
    schedule = schedule_of(name, ranks)
    return sum(len(list(schedule.actions(rank))) for rank in range(ranks)) / ranks


def schedule_of(name: str, ranks: int) -> Schedule:
    kind = pipelining.get_schedule_class(name)
    if kind.builder is None:
        raise ValueError(f"{name} has no order of its own")
    return kind.builder(ranks, MICROBATCHES, chunks_of(name))


def spend(arm: Arm, work: Workload) -> tuple[float, float]:
    """CPU and wall seconds of a step."""
    x = work.batch()
    target = torch.zeros_like(x)
    comm.communicator().barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(work.steps):
        arm.step(x, target)
    return (time.process_time() - cpu) / work.steps, (time.perf_counter() - wall) / work.steps


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median and the quartiles."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def enter(rank: int, options: argparse.Namespace, ranks: int) -> None:
    environment = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": options.port,
    }
    os.environ.update({key: str(value) for key, value in environment.items()})
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    comm.connect("shm" if ranks > 1 else "gloo")


def arms(name: str, work: Workload, options: argparse.Namespace, gloo: Any) -> dict[str, Arm]:  # noqa: ANN401
    """All arms of a schedule, each on its own copy of one model."""
    torch.manual_seed(0)
    parts = work.parts(dist.get_world_size() * chunks_of(name))
    every: dict[str, tuple[Any, Any]] = {"torch": (peer, gloo), "ours gloo": (pipelining, gloo)}
    if dist.get_world_size() > 1:
        every["ours shm"] = (pipelining, None)
    return {
        arm: Arm(kind, name, parts, group)
        for arm, (kind, group) in every.items()
        if not options.arms or arm in options.arms
    }


def measure(rank: int, options: argparse.Namespace, part: str) -> None:
    """One rank of the comparison; rank 0 prints."""
    ranks = 1 if part == "local" else 2
    enter(rank, options, ranks)
    world = comm.communicator()
    gloo = dist.new_group(backend="gloo") if ranks > 1 else None
    work = GPT8 if part == "step" else TINY
    if rank == 0:
        print(f"{part}: medians and quartiles of {options.rounds} rounds", flush=True)
    baseline: list[float] = []
    for name in options.schedules:
        made = arms(name, work, options, gloo)
        spent: dict[str, list[Row]] = {arm: [] for arm in made}
        for number in range(options.rounds + 2):
            floor = floor_of(name, work, ranks) if part == "step" else (0.0, 0.0)
            for arm in made if number % 2 else reversed(made):
                cpu, wall = zip(
                    *world.gather_numbers(spend(made[arm], work), label="s"), strict=True
                )
                floors = world.gather_numbers(floor, label="floor")
                if number > 1:
                    spent[arm].append(
                        {
                            "cpu": statistics.mean(cpu),
                            "wall": max(wall),
                            "floor cpu": statistics.mean(row[0] for row in floors),
                            "floor wall": statistics.mean(row[1] for row in floors),
                        }
                    )
        if rank == 0:
            show(name, part, ranks, spent, baseline)
        del made
    comm.disconnect()


def floor_of(name: str, work: Workload, ranks: int) -> tuple[float, float]:
    """CPU seconds of a rank's share of the compute of a step; wall seconds with the bubble."""
    modules = _floor_modules(work)
    x = work.batch()
    target = torch.zeros_like(x)
    comm.communicator().barrier()
    begun = time.process_time()
    forward = 0.0
    for piece, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        started = time.process_time()
        loss = loss_fn(modules(piece), wanted)
        forward += time.process_time() - started
        loss.backward()
    whole = time.process_time() - begun
    modules.zero_grad()
    share = whole / ranks
    forward, backward = forward / MICROBATCHES / ranks, (whole - forward) / MICROBATCHES / ranks
    costs = Costs.shared(chunks_of(name), forward, backward / 2, backward / 2)
    return share, simulate(schedule_of(name, ranks), costs, events=False).makespan


_MODULES: dict[int, nn.Module] = {}


def _floor_modules(work: Workload) -> nn.Module:
    if id(work) not in _MODULES:
        torch.manual_seed(0)
        _MODULES[id(work)] = nn.Sequential(*work.parts(1))
    return _MODULES[id(work)]


def show(
    name: str, part: str, ranks: int, spent: dict[str, list[Row]], baseline: list[float]
) -> None:
    count = actions(name, ranks)
    print(f"  {name}")
    for arm, rows in spent.items():
        cpu = [row["cpu"] for row in rows]
        line = f"    {arm:<10} CPU {spread([c / count * 1e6 for c in cpu], 0)} us an action"
        if part == "step":
            note(
                f"gpt8, {name}: {arm}, CPU over compute", [r["cpu"] / r["floor cpu"] for r in rows]
            )
            note(
                f"gpt8, {name}: {arm}, wall over floor", [r["wall"] / r["floor wall"] for r in rows]
            )
            line = f"    {arm:<10} CPU {spread([c * 1e3 for c in cpu], 1)} ms"
            line += f", wall {spread([r['wall'] * 1e3 for r in rows], 1)} ms"
            line += f", wall/floor {spread([r['wall'] / r['floor wall'] for r in rows])}"
            line += f", CPU/compute {spread([r['cpu'] / r['floor cpu'] for r in rows])}"
        if "torch" in spent and arm != "torch":
            others = spent["torch"]
            for what in ("cpu", "wall"):
                values = [a[what] / b[what] for a, b in zip(rows, others, strict=True)]
                line += f", {what}/torch {spread(values)}"
                note(f"{part}, {name}: {arm} over torch, {what}", values)
        print(line, flush=True)


def measure_simulator() -> None:
    begun = time.process_time()
    schedule = builders.one_f_one_b(512, 4096)
    built = time.process_time()
    found = simulate(schedule, events=False)
    ended = time.process_time()
    print(
        f"simulator, 1F1B on 512 ranks, 4096 microbatches: built in {built - begun:.1f} s, "
        f"simulated in {ended - built:.1f} s of CPU, bubble {found.bubble_fraction:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("local", "transfers", "step", "simulator")
    parser.add_argument("--part", nargs="+", choices=parts, default=list(parts))
    parser.add_argument(
        "--schedules", nargs="+", default=list(SCHEDULE_NAMES), choices=SCHEDULE_NAMES
    )
    parser.add_argument("--arms", nargs="+", default=[], help="only these")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--port", type=int, default=29761)
    options = parser.parse_args()
    for part in options.part:
        options.port += 1
        if part == "simulator":
            measure_simulator()
        elif part == "local":
            mp.spawn(measure, (options, part), nprocs=1)
        else:
            mp.spawn(measure, (options, part), nprocs=2)


if __name__ == "__main__":
    main()
