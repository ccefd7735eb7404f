"""16 and 32 ranks on a machine of few cores: all go on, and none is called lost, late or different.

Run it as ``python tests/soak/crowd.py [--sizes 16,32] [--rounds 3]``, with src and tests on
PYTHONPATH. Ranks are forked from a process that has torch loaded, 100 MB each. They connect, take
three steps and leave, or run the main job, with the limits that every user has. Exits with status 1
when a rank fails, or when any of them logs a warning.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

import meshwright as mw
from meshwright.comm import connect, disconnect, is_connected
from meshwright.testing import ranks
from soak.table import Table
from support.internals.recipes import train
from support.recipes.runs import read_run, write_text

__all__ = ["BODIES", "listening", "main_job", "three_steps"]


class _Words(logging.Handler):
    """Keeps what is logged as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def listening() -> Iterator[list[str]]:
    """What is logged meanwhile, and not less than a warning."""
    words = _Words()
    logging.getLogger().addHandler(words)
    try:
        yield words.lines
    finally:
        logging.getLogger().removeHandler(words)


def three_steps(folder: Path, backend: str) -> tuple[list[str], dict[str, float]]:
    """Connect, take three steps of a replica and of shards, leave; warnings, and seconds."""
    seconds, begun = {}, time.monotonic()
    with listening() as words:
        world = connect(backend)
        seconds["connect"] = time.monotonic() - begun
        for name, wrap in (("replicate", mw.replicate), ("fully_shard", mw.fully_shard)):
            begun = time.monotonic()
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
            if name == "fully_shard":
                wrap(model[0])
            wrap(model)
            optimizer = torch.optim.Adam(model.parameters())
            for step in range(3):
                draw = torch.Generator().manual_seed(100 * step + world.rank)
                model(torch.randn(4, 64, generator=draw)).square().mean().backward()
                norm = mw.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            rows = world.gather_numbers([float(norm)], label="norms")
            assert len(set(rows)) == 1, rows
            seconds[name] = time.monotonic() - begun
        begun = time.monotonic()
        disconnect()
        seconds["leave"] = time.monotonic() - begun
    return words, seconds


def main_job(folder: Path, backend: str) -> tuple[list[str], dict[str, float]]:
    """The main job, tiny: half of the ranks' axis replicates, the other shards."""
    begun, seconds = time.monotonic(), {}
    with listening() as words:
        world = connect(backend)
        seconds["connect"] = time.monotonic() - begun
        begun = time.monotonic()
        config = read_run(
            folder,
            "axes.replicate=2",
            f"axes.shard={world.size // 2}",
            f"data.batch_size={world.size}",
            "run.steps=3",
        )
        outcome = train(config, world, lambda line: None)
        assert outcome.is_finished
        seconds["train"] = time.monotonic() - begun
        begun = time.monotonic()
        disconnect()
        seconds["leave"] = time.monotonic() - begun
    assert not is_connected()
    return words, seconds


BODIES: dict[str, Callable[[Path, str], tuple[list[str], dict[str, float]]]] = {
    "three steps": three_steps,
    "main job": main_job,
}


def check(body: str, backend: str, size: int, rounds: int) -> tuple[str, str]:
    """Run one body several times; what to show, and what was said."""
    slowest: dict[str, float] = {}
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            write_text(Path(name))
            results = ranks(
                size, BODIES[body], Path(name), backend, timeout=900, grace=20, connected=False
            )
        for rank, (words, seconds) in enumerate(results):
            if words:
                return "", f"round {number}, rank {rank} said: {words[0]}"
            for what, took in seconds.items():
                slowest[what] = max(slowest.get(what, 0.0), took)
    return ", ".join(f"{what} {took:.1f} s" for what, took in slowest.items()), ""


def main() -> int:
    """Run both bodies at all sizes on both backends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="16,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backends", default="shm,gloo")
    given = parser.parse_args()
    table = Table(f"{given.rounds} rounds each", ["slowest rank"])
    for size in map(int, given.sizes.split(",")):
        for backend in given.backends.split(","):
            for body in BODIES:
                row = partial(check, body, backend, size, given.rounds)
                table.row(f"{size} ranks, {body}, {backend}", row)
    return table.end()


if __name__ == "__main__":
    raise SystemExit(main())
