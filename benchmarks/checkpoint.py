"""CPU time of saving, loading and verifying checkpoints: of many small tensors, and of large ones.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --raw
    python benchmarks/checkpoint.py --background

Prints, for each number of tensors, seconds of CPU time and microseconds a tensor. Exits with status
1 where a tensor among the most costs three times one among the fewest. With ``--raw`` it prints the
times of 1,000 small tensors, and of 200 MB, over those of a bare write and fsync, or a bare read,
of as many bytes, tensor by tensor: into memory that was used before, as a model's, or into new
memory, all of which stays, as that of a dict does. With ``--background`` it prints how long a save
in the background holds up the loop, over one copy of the state into memory that was used before,
and of the first save over one into new memory, for states of 0.3 and 1.2 GB: what a save costs
beside the copy goes by the number of tensors. Exits with status 1 above 1.2 for the larger one.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from _figures import note, quartiles

from meshwright.checkpoint import (
    finish,
    load_into,
    load_tensors,
    save,
    save_tensors,
    verify,
)

COUNTS = (1_000, 10_000, 100_000)
LIMIT = 3.0


def seconds(run: Callable[[], object]) -> float:
    """CPU time of one call."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def measure(folder: Path, count: int) -> dict[str, float]:
    """Seconds of each operation on ``count`` tensors."""
    tensors = {f"layers.{n}.weight": torch.full((2, 3), float(n)) for n in range(count)}
    saved: list[Path] = []
    found = {"save": seconds(lambda: saved.append(save_tensors(folder, tensors, {}, step=count)))}
    found["load"] = seconds(lambda: load_tensors(saved[0]))
    found["load_into"] = seconds(lambda: load_into(saved[0], tensors))
    found["verify"] = seconds(lambda: verify(saved[0]))
    return found


def raw_write(path: Path, parts: Sequence[memoryview]) -> None:
    """Write ``parts``, one after the other, and have the disk take them."""
    with open(path, "wb", buffering=0) as file:
        for part in parts:
            file.write(part)
        os.fsync(file.fileno())


def raw_read(path: Path, parts: Iterable[memoryview]) -> list[memoryview]:
    """Read a file into memory, part by part; returns all of them."""
    kept: list[memoryview] = []
    with open(path, "rb", buffering=0) as file:
        for part in parts:
            file.readinto(part)
            kept.append(part)
    return kept


def beside_raw(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """Measure, in seconds, each operation on ``tensors`` and the bare ones on as many bytes."""
    targets = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    parts = [memoryview(tensor.numpy()).cast("B") for tensor in tensors.values()]
    room = [memoryview(tensor.numpy()).cast("B") for tensor in targets.values()]
    fresh = (memoryview(bytearray(len(part))) for part in parts)
    bare, saved = folder / "bare", list[Path]()
    return {
        "raw write": seconds(lambda: raw_write(bare, parts)),
        "raw read": seconds(lambda: raw_read(bare, room)),
        "raw read of new memory": seconds(lambda: raw_read(bare, fresh)),
        "save": seconds(lambda: saved.append(save_tensors(folder / "run", tensors, {}, step=0))),
        "load": seconds(lambda: load_tensors(saved[0])),
        "load_into": seconds(lambda: load_into(saved[0], targets)),
    }


STILL = 1.2
"""How long the loop may stand still, over a memory copy of the state."""


def measure_background(rounds: int) -> int:
    """Print how long saves in the background hold up the loop; the exit status."""
    _, large = (held_up(rounds, width) for width in (1024, 2048))
    return int(large > STILL)


def held_up(rounds: int, width: int) -> float:
    """Print how long a save of linear layers holds up the loop; the copies that take as long."""
    layers = [torch.nn.Linear(width, width) for _ in range(24)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, width)).sum().backward()
    optimizer.step()
    state = [tensor for each in optimizer.state.values() for tensor in each.values()]
    state = [*map(torch.Tensor.detach, model.parameters()), *state]
    nbytes = sum(tensor.nbytes for tensor in state)
    spent: dict[str, list[float]] = {"copy": [], "save": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            begun = time.perf_counter()
            copies = [torch.empty_like(tensor).copy_(tensor) for tensor in state]
            if number:
                begun = time.perf_counter()
                for copy, tensor in zip(copies, state, strict=True):
                    copy.copy_(tensor)
            spent["copy"].append(time.perf_counter() - begun)
            del copies
            begun = time.perf_counter()
            save(folder, number, model=model, optimizer=optimizer, keep_last=1, background=True)
            spent["save"].append(time.perf_counter() - begun)
            finish()  # what the thread does beside it is not counted
    first, *over = (a / b for a, b in zip(spent["save"], spent["copy"], strict=True))
    note(f"checkpoint, {nbytes / 1e6:.0f} MB: a save in the background over a memory copy", over)
    low, middle, high = quartiles(over)
    beside = [a - b for a, b in zip(spent["save"][1:], spent["copy"][1:], strict=True)]
    each = 1e6 * statistics.median(beside) / len(state)
    print(
        f"{nbytes / 1e6:.0f} MB in {len(state)} tensors: a save in the background holds up the "
        f"loop for {middle:.2f} ({low:.2f}..{high:.2f}) copies of {1e3 * min(spent['copy']):.0f} "
        f"ms, {each:.0f} us a tensor beside the copy; the first one, for {first:.2f} copies into "
        "new memory",
        flush=True,
    )
    return middle


OVER = {"save": "raw write", "load": "raw read of new memory", "load_into": "raw read"}


def measure_raw(rounds: int) -> None:
    """Print what each operation costs over the bare one."""
    for title, count, numel in (("1,000 small tensors", 1000, 250), ("200 MB", 8, 6_250_000)):
        tensors = {f"layers.{n}.weight": torch.rand(numel) for n in range(count)}
        spent: dict[str, list[float]] = {name: [] for name in OVER}
        for number in range(rounds + 1):
            with tempfile.TemporaryDirectory() as folder:
                each = beside_raw(Path(folder), tensors)
            for name, values in spent.items():
                if number:
                    values.append(each[name] / each[OVER[name]])
        for name, values in spent.items():
            note(f"checkpoint, {title}: {name} over a {OVER[name]}", values)
            low, middle, high = quartiles(values)
            print(f"{title}: {name} over a {OVER[name]} {middle:.1f} ({low:.1f}..{high:.1f})")


def main() -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--background", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.background:
        return measure_background(options.rounds)
    if options.raw:
        measure_raw(options.rounds)
        return 0
    each: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), 100)  # what the first call loads is not counted
        gc.collect()
        gc.freeze()  # nor passes of the collector over what torch has made when it was loaded
        for count in COUNTS:
            found = measure(Path(folder), count)
            note(f"checkpoint, {count:,} tensors: verify, s", [found["verify"]])
            each.append({name: spent / count * 1e6 for name, spent in found.items()})
            row = (
                f"{name} {spent:.2f} s ({spent / count * 1e6:.0f} us)"
                for name, spent in found.items()
            )
            print(f"{count:>7,} tensors: {', '.join(row)}", flush=True)
    worst = max(each[-1][name] / each[0][name] for name in each[0])
    print(f"a tensor among {COUNTS[-1]:,} costs at most {worst:.2f} times one among {COUNTS[0]:,}")
    return 0 if worst < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
