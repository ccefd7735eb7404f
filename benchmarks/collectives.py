"""Collectives of one host: Gloo, shared memory (staged and in place) and memcpy, interleaved.

    python benchmarks/collectives.py --ranks 2 4 --sizes 4KB 256KB 4MB 64MB --rounds 7

A size is that of the full tensor: what all_reduce reduces, what all_gather writes, what
reduce_scatter and all_to_all read; an all_gather reads a slice of what it writes, one "elsewhere" a
tensor of its own. Barrier, reduce_scatter and ring of the first size have a fifth arm, ``bare``:
the same written by hand over shared memory, without anything beside. With ``--check`` every call is
compared with those of the other ranks first, as by ``connect(check=True)``. The arms take turns in
short rounds, so that a busy machine slows all of them alike; a ratio is taken within a round.
Printed: the median time of a call, its CPU time over all threads of the rank, and the ratios of
both with the quartiles of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _bare import Bare
from _figures import note, quartiles

from meshwright import comm
from meshwright.comm import shared_memory

__all__ = ["main"]

UNITS = {"KB": 1 << 10, "MB": 1 << 20}
ARMS = ("memcpy", "gloo", "staged", "in place", "bare")
RATIOS = (
    ("gloo", "staged"),
    ("gloo", "in place"),
    ("staged", "memcpy"),
    ("in place", "memcpy"),
    ("staged", "bare"),
)
Call = Callable[[], object]
Times = dict[str, list[tuple[float, float]]]
"""By arm and round: seconds and CPU seconds of a call."""


def size_of(text: str) -> int:
    return int(text[:-2]) * UNITS[text[-2:]]


def current(name: str, older: str) -> Callable[..., object]:
    """c10d's function under the name that this torch has."""
    return getattr(dist, name, None) or getattr(dist, older)


def calls(
    group: dist.ProcessGroup, whole: torch.Tensor, other: torch.Tensor, kinds: list[str]
) -> dict[str, Call]:
    """The operations on tensors of one size, ``whole`` and ``other``, over ``group``."""
    rank, size = dist.get_rank(), dist.get_world_size()
    share = whole.numel() // size
    own = other[rank * share : (rank + 1) * share]
    separate, elsewhere = torch.empty(share), torch.empty(share)
    gather = current("all_gather_single", "all_gather_into_tensor")
    scatter = current("reduce_scatter_single", "reduce_scatter_tensor")

    def ring() -> None:
        peers = (rank + 1) % size, (rank - 1) % size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, whole, group=group, group_peer=peers[0]),
                dist.P2POp(dist.irecv, other, group=group, group_peer=peers[1]),
            ]
        )
        for work in works:
            work.wait()

    def asynchronous() -> None:
        work = dist.all_reduce(whole, group=group, async_op=True)
        assert work is not None
        work.wait()

    every: dict[str, Call] = {
        "barrier": lambda: dist.barrier(group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_reduce async": asynchronous,
        "all_gather": lambda: gather(other, own, group=group),
        "all_gather elsewhere": lambda: gather(other, elsewhere, group=group),
        "reduce_scatter": lambda: scatter(separate, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, group=group, group_src=0),
        "ring": ring,
    }
    return {kind: every[kind] for kind in kinds}


def seconds_of(call: Call, count: int) -> tuple[float, float]:
    """The median time of a call, and its mean CPU time."""
    call()
    times = []
    cpu = time.process_time()
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times), (time.process_time() - cpu) / count


def measure(
    nbytes: int, kinds: list[str], rounds: int, ours: dist.ProcessGroup, bare: Bare | None
) -> dict[str, Times]:
    """By operation and arm, the times of a call in each round."""
    numel = nbytes // 4
    world = dist.group.WORLD
    assert world is not None
    plain = torch.zeros(numel), torch.zeros(numel)
    shared = [shared_memory.allocate(ours, numel, torch.float32).zero_() for _ in range(2)]
    arms = {
        "gloo": calls(world, *plain, kinds),
        "staged": calls(ours, *plain, kinds),
        "in place": calls(ours, shared[0], shared[1], kinds),
        "bare": bare.calls(dist.get_rank(), *plain) if bare is not None else {},
    }
    count = max(2, min(100, (8 << 20) // nbytes))
    times: dict[str, Times] = {kind: {arm: [] for arm in ARMS} for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            times[kind]["memcpy"].append(seconds_of(lambda: plain[0].copy_(plain[1]), count))
            for arm, every in arms.items():
                if kind in every:
                    dist.barrier(group=ours)
                    times[kind][arm].append(seconds_of(every[kind], count))
    return times


def report(title: str, label: str, kind: str, times: Times) -> str:
    """A line of the table ``title``: microseconds of each arm (CPU), ratios of the rounds (CPU)."""
    fields = []
    for arm in ARMS:
        columns = zip(*times[arm], strict=True)
        found = [1e6 * statistics.median(column) for column in columns]
        fields.append(f"{found[0]:9.1f} ({found[1]:.1f})" if found else f"{'-':>9}")
    for over, under in RATIOS:
        if not times[under] or (under == "memcpy" and "MB" not in label):
            continue
        pairs = list(zip(times[over], times[under], strict=True))
        values = [a[0] / b[0] for a, b in pairs]
        low, middle, high = quartiles(values)
        note(f"{title}, {label} {kind}: {over} over {under}", values)
        cpu = statistics.median(a[1] / max(b[1], 1e-9) for a, b in pairs)
        fields.append(f"{over}/{under} {middle:.1f} [{low:.1f}, {high:.1f}] (CPU {cpu:.1f})")
    return f"{label:>6} {kind:<17}" + "  ".join(f"{field:<22}" for field in fields)


def rank_main(rank: int, size: int, port: int, options: argparse.Namespace, bare: Bare) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    shared_memory.register()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    ours = dist.new_group(backend=shared_memory.BACKEND)
    assert ours is not None
    if options.check:
        comm.connect(check=True)
    if rank == 0:
        print(f"{size} ranks; microseconds (CPU), ratios [quartiles], of {options.rounds} rounds")
        print(f"{'':>6} {'':<17}" + "  ".join(f"{arm:<22}" for arm in ARMS))
    for text in options.sizes:
        is_first = text == options.sizes[0]
        kinds = [kind for kind in options.operations if is_first or kind != "barrier"]
        beside = bare if is_first else None
        for kind, times in measure(size_of(text), kinds, options.rounds, ours, beside).items():
            if rank == 0:
                print(report(f"{size} ranks", text, kind, times), flush=True)
    comm.disconnect()


def main() -> None:
    kinds = [
        "barrier",
        "all_reduce",
        "all_reduce async",
        "all_gather",
        "all_gather elsewhere",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "ring",
    ]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=["4KB", "256KB", "4MB", "64MB"])
    parser.add_argument("--operations", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--check", action="store_true", help="compare every call")
    options = parser.parse_args()
    for size in options.ranks:
        store = comm.host_store()
        bare = Bare(size, size_of(options.sizes[0]))
        words = (size, store.port, options, bare)
        mp.start_processes(rank_main, words, nprocs=size, start_method="fork")


if __name__ == "__main__":
    main()
