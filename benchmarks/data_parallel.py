"""Data-parallel training against torch's own, on the CPU: time, memory, Python, optimizer.

    python benchmarks/data_parallel.py --models tiny gpt net --ranks 2 --rounds 9
    python benchmarks/data_parallel.py --family sharded --backend shm
    python benchmarks/data_parallel.py --memory
    python benchmarks/data_parallel.py --python-per-unit
    python benchmarks/data_parallel.py --optimizer

Of the family ``replicated`` the peer is torch's DDP at its best setting, of ``sharded`` the faster
one of torch's FSDP1 and FSDP2. Torch's arms always run on Gloo.

Time: every arm trains the same model on every rank, one thread each; the arms take turns in short
rounds, so that a busy machine slows all of them alike. A ratio is taken within a round; printed is
the median of the rounds, and their quartiles. Before them come as many steps as are a power of two
above theirs: what ours compare in steps 1, 2, 4, ... and 1,024 is in none of the rounds.

Memory: every arm in processes of its own, one after another, with AdamW; what a rank's share of the
pages (Pss: a page of n processes counts as one part in n) grows over what it was before the model
was built, at most while steps run, and between steps without gradients.

Python: one process on c10d's ``fake`` backend, which sends nothing; what a step takes longer than
the plain model's, for each unit, and construction; and both at other numbers of units over the
first of them.

Optimizer: AdamW on the shards of one rank, parameter by parameter and unit by unit.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _data_parallel_arms import FAMILIES, MODELS, PEERS, WORKLOADS, Workload, encoder, make
from _figures import note
from torch import nn

from meshwright import comm
from meshwright.data_parallel import flat_groups

__all__ = ["main"]

Spent = dict[str, list[tuple[float, ...]]]
"""For each arm and round: CPU seconds, wall seconds, page faults."""
Cost = dict[str, list[float]]
"""For each arm: microseconds a unit, of each round."""
Mebibytes = tuple[float, float]
"""At most while steps run, and between steps."""
BUILT = 240
"""Units that are built of each arm at least."""
OWN_UNITS = {"fully_shard", "facade flat", "facade orig"}


def enter(rank: int, options: argparse.Namespace) -> Any:  # noqa: ANN401 - c10d's group or None
    """Join the run; returns the group for torch's arms, None for the default one."""
    environment = {
        "RANK": rank,
        "WORLD_SIZE": options.ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": options.port,
    }
    os.environ.update({key: str(value) for key, value in environment.items()})
    torch.set_num_threads(1)
    comm.connect(options.backend)
    return None if options.backend == "gloo" else dist.new_group(backend="gloo")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, work: Workload) -> None:
    """One step."""
    model(work.batch()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# ------------------------------------------------------------------------------------ time


def faults() -> float:
    """Pages that this process has been given so far."""
    with open("/proc/self/stat") as file:
        return float(file.read().rpartition(")")[2].split()[7])


def spend(
    model: nn.Module, optimizer: torch.optim.Optimizer, work: Workload, steps: int
) -> tuple[float, float, float]:
    """CPU seconds, wall seconds and page faults of one round."""
    comm.communicator().barrier()
    before = faults()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        train(model, optimizer, work)
    spent = time.process_time() - cpu, time.perf_counter() - wall
    return *spent, faults() - before


def measure_time(rank: int, options: argparse.Namespace) -> None:
    """One rank of the comparison of times; rank 0 prints the tables."""
    group = enter(rank, options)
    world = comm.communicator()
    for name in options.models:
        work = WORKLOADS[name]
        for family in options.family:
            torch.manual_seed(0)
            model = work.build()
            chosen = [arm for arm in FAMILIES[family] if not options.arms or arm in options.arms]
            models = {arm: make(name, arm, model, group) for arm in chosen}
            optimizers = {arm: torch.optim.SGD(m.parameters(), 1e-4) for arm, m in models.items()}
            spent: Spent = {arm: [] for arm in models}
            # Ours compare more in steps 1, 2, 4, ... than in others: the rounds lie between two.
            warming = 1 << (options.rounds * work.steps).bit_length()
            for number in range(options.rounds + 1):
                steps = work.steps if number else warming
                for arm in chosen if number % 2 else chosen[::-1]:
                    numbers = spend(models[arm], optimizers[arm], work, steps)
                    rows = world.gather_numbers(numbers, label="seconds")
                    if number:
                        cpu, wall, pages = zip(*rows, strict=True)
                        mine = statistics.mean(cpu), max(wall), statistics.mean(pages)
                        spent[arm].append(mine)
            if rank == 0:
                peers = [arm for arm in PEERS[family] if arm in spent]
                show_times(f"{name}, {options.backend}", work.steps, spent, peers)
            del models, optimizers
    comm.disconnect()


def ratios(spent: Spent, arm: str, to: str, column: int = 0) -> list[float]:
    """``arm`` over ``to``, round by round."""
    return [a[column] / b[column] for a, b in zip(spent[arm], spent[to], strict=True)]


def spread(values: Sequence[float]) -> str:
    """The median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def show_times(title: str, steps: int, spent: Spent, peers: Sequence[str]) -> None:
    rounds = len(next(iter(spent.values())))
    print(f"{title}: medians and quartiles of {rounds} rounds of {steps} steps")
    print(
        f"  {'arm':<15}{'CPU ms':>9}{'CPU/plain':>11}{'CPU/best peer':>20}{'wall ms':>10}"
        f"{'wall/best peer':>20}{'faults':>9}"
    )
    best = min(peers, key=lambda arm: statistics.median(row[0] for row in spent[arm]), default="")
    for arm, rows in spent.items():
        cpu, wall, pages = (statistics.median(column) / steps for column in zip(*rows, strict=True))
        plain = statistics.median(ratios(spent, arm, "plain")) if "plain" in spent else 0.0
        columns = [spread(ratios(spent, arm, best, column)) if best else "" for column in (0, 1)]
        if best and arm not in peers and not arm.startswith("plain"):
            limit = f"plain {statistics.median(ratios(spent, 'plain', best)):.2f}"
            note(f"{title}: {arm} over torch's best, CPU", ratios(spent, arm, best), limit)
        mark = "*" if arm == best else " "
        print(
            f" {mark}{arm:<15}{cpu * 1e3:9.2f}{plain:11.2f}{columns[0]:>20}{wall * 1e3:10.2f}"
            f"{columns[1]:>20}{pages:9.0f}",
            flush=True,
        )


# ---------------------------------------------------------------------------------- memory


def pss() -> int:
    """Bytes of this process, a page that n processes share counted as one part in n."""
    with open("/proc/self/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("expected a line Pss: in /proc/self/smaps_rollup, found none")


class Sampler:
    """The highest `pss` while it runs, looked at every millisecond from a thread of its own."""

    def __init__(self) -> None:
        self.highest = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            self.highest = max(self.highest, pss())

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def measure_memory(
    rank: int, options: argparse.Namespace, name: str, arm: str, found: SimpleQueue[Mebibytes]
) -> None:
    """One rank of one arm; rank 0 prints a row, and puts it into ``found``."""
    group = enter(rank, options)
    world = comm.communicator()
    work = WORKLOADS[name]
    world.barrier()
    before = pss()
    torch.manual_seed(0)
    model = make(name, arm, work.build(), group)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    train(model, optimizer, work)
    world.barrier()
    with Sampler() as sampler:
        for _ in range(12):
            train(model, optimizer, work)
    optimizer.zero_grad()
    gc.collect()
    world.barrier()
    grown = sampler.highest - before, pss() - before
    rows = world.gather_numbers(grown, label="bytes")
    if rank == 0:
        peak, rest = (max(column) / 2**20 for column in zip(*rows, strict=True))
        found.put((peak, rest))
        print(f"  {arm:<15}{peak:9.0f} MiB at most{rest:9.0f} MiB between steps", flush=True)
    comm.disconnect()


def show_memory(options: argparse.Namespace) -> None:
    found: SimpleQueue[Mebibytes] = mp.get_context("spawn").SimpleQueue()
    for name in options.models:
        print(f"{name}, {options.backend}: growth of a rank's Pss from before the model was built")
        for family in options.family:
            grown: dict[str, Mebibytes] = {}
            for arm in FAMILIES[family]:
                if not options.arms or arm in options.arms:
                    options.port += 1
                    mp.spawn(measure_memory, (options, name, arm, found), nprocs=options.ranks)
                    grown[arm] = found.get()
            note_memory(f"{name}, {options.backend}", grown, PEERS[family])


def note_memory(title: str, grown: dict[str, Mebibytes], peers: Sequence[str]) -> None:
    """Note what each arm of ours holds over what the peer holds that holds least."""
    for column, what in enumerate(("at most", "between steps")):
        best = min((grown[arm][column] for arm in peers if arm in grown), default=0.0)
        for arm, row in grown.items():
            if best and arm not in peers and not arm.startswith("plain"):
                limit = f"plain {grown['plain'][column] / best:.2f}" if "plain" in grown else ""
                name = f"{title}: {arm} over torch's best, memory {what}"
                note(name, [row[column] / best], limit)


# ---------------------------------------------------------------------------------- python


def measure_python(options: argparse.Namespace) -> None:
    """Print what each arm adds for each unit, where nothing is sent, at each number of units."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=options.ranks)
    fewest = options.units[0]
    costs: dict[int, tuple[Cost, Cost]] = {}
    for units in options.units:
        costs[units] = measure_units(options, units)
        for what, here, least in zip(
            ("Python a unit and step", "construction a unit"),
            costs[units],
            costs[fewest],
            strict=True,
        ):
            note_units(f"{what}, {units} units", what, here)
            for arm in OWN_UNITS & here.keys() if units != fewest else ():
                ratio = statistics.median(here[arm]) / statistics.median(least[arm])
                note(f"{what}: {arm}, {units} over {fewest} units", [ratio])
    dist.destroy_process_group()


def note_units(title: str, what: str, here: Cost) -> None:
    """Note the microseconds of our arms, and the ratio to the peer that takes least."""
    peers = [arm for arm in PEERS["sharded"] if arm in here]
    best = min(peers, key=lambda arm: statistics.median(here[arm]), default=None)
    for arm in sorted(OWN_UNITS & here.keys()):
        note(f"{title}: {arm}, us", here[arm])
        if best is not None:
            values = [mine / peer for mine, peer in zip(here[arm], here[best], strict=True)]
            note(f"{title}: {arm} over torch's best", values)
            print(f"  {what}, {arm} over {best}: {spread(values) if values[1:] else values[0]}")


def measure_units(options: argparse.Namespace, units: int) -> tuple[Cost, Cost]:
    """Measure the microseconds that each arm adds to a step, and those of its construction."""
    work = WORKLOADS["few"]
    steps = max(1, work.steps * options.units[0] // units)  # as many units go by at any number
    torch.manual_seed(0)
    model = encoder(units - 1, 32, 4)
    arms = [arm for arm in FAMILIES["sharded"] if not options.arms or arm in options.arms]
    models: dict[str, nn.Module] = {}
    built: Cost = {}
    for arm in arms:
        make("few", arm, encoder(1, 32, 4))  # loads what the first of a kind loads
        taken = []
        for _ in range(max(1, BUILT // units)):
            gc.collect()
            gc.freeze()  # the collector would go through what was before, by chance now or then
            begun = time.process_time()
            models[arm] = make("few", arm, model)
            taken.append((time.process_time() - begun) / units * 1e6)
            gc.unfreeze()
        copied = statistics.median(built["plain"]) if "plain" in built else 0.0
        built[arm] = [each - copied for each in taken]  # a copy of the model, which each makes
        print(
            f"fake, {units} units: {statistics.median(built[arm]):.0f} microseconds of "
            f"construction a unit, {arm}"
        )
    spent: Spent = {arm: [] for arm in arms}
    for number in range(options.rounds + 1):
        for arm in arms if number % 2 else arms[::-1]:
            begun = time.process_time()
            for _ in range(steps):
                models[arm](work.batch()).square().mean().backward()
                models[arm].zero_grad()
            if number:
                spent[arm].append(((time.process_time() - begun) / steps,))
    print(f"fake, {units} units: microseconds of a step for each unit, above the plain model")
    added = {
        arm: [
            (mine[0] - plain[0]) / units * 1e6
            for mine, plain in zip(rows, spent["plain"], strict=True)
        ]
        for arm, rows in spent.items()
        if arm != "plain"
    }
    for arm, values in added.items():
        print(f"  {arm:<15}{spread(values):>26}", flush=True)
    return added, built


# -------------------------------------------------------------------------------- optimizer


def measure_optimizer(options: argparse.Namespace) -> None:
    """AdamW over the shards that one of two ranks holds of ``tiny``."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=options.ranks)
    torch.manual_seed(0)
    sharded = make("tiny", "fully_shard", WORKLOADS["tiny"].build())
    plain = [
        nn.Parameter(p._local_tensor.detach().clone())  # pyrefly: ignore[missing-attribute]
        for p in sharded.parameters()
    ]
    kinds: dict[str, tuple[Sequence[nn.Parameter], dict[str, bool]]] = {
        "DTensor foreach": (list(sharded.parameters()), {"foreach": True}),
        "local foreach": (plain, {"foreach": True}),
        "local fused": (plain, {"fused": True}),
        "flat foreach": (flat_groups(sharded), {"foreach": True}),
        "flat fused": (flat_groups(sharded), {"fused": True}),
    }
    steps: dict[str, Callable[[], object]] = {}
    spent: Spent = {kind: [] for kind in kinds}
    for kind, (parameters, settings) in kinds.items():
        steps[kind] = torch.optim.AdamW(parameters, 1e-4, **settings).step
    for number in range(2 * options.rounds + 1):
        for kind, (parameters, _) in kinds.items():
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.ones_like(parameter)
            begun = time.process_time()
            for _ in range(5):
                steps[kind]()
            if number:
                spent[kind].append(((time.process_time() - begun) / 5,))
    print("tiny, one of two ranks: milliseconds of an AdamW step, and how often slower than flat")
    for kind, rows in spent.items():
        columns = [spread(ratios(spent, kind, flat)) for flat in ("flat foreach", "flat fused")]
        seconds = statistics.median(row[0] for row in rows)
        print(f"  {kind:<16}{seconds * 1e3:8.2f}  / flat foreach {columns[0]:>24}"
              f"  / flat fused {columns[1]:>24}")  # fmt: skip
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--family", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--arms", nargs="+", default=[], help="only these")
    parser.add_argument("--backend", choices=("gloo", "shm"), default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--port", type=int, default=29731)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--python-per-unit", action="store_true")
    parser.add_argument("--units", type=int, nargs="+", default=[13], help="with --python-per-unit")
    parser.add_argument("--optimizer", action="store_true")
    options = parser.parse_args()
    if options.python_per_unit:
        measure_python(options)
    elif options.optimizer:
        measure_optimizer(options)
    elif options.memory:
        show_memory(options)
    else:
        mp.spawn(measure_time, (options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
