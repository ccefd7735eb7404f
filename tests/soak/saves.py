"""Kill a rank in every phase of a save in the background, and load what is left.

Run it as ``python tests/soak/saves.py [--seed S] [--kills 60] [--first N] [--last N]``. Two ranks
train and save in the background, and one of them is killed in one save: before it exchanges a step
of it, before an operation on files, at a byte of its files, or some time after the copy is made. It
prints one row for each case, and ends with status 1 when in one of them

* the survivor does not name the rank, or ends with status 0, or hangs;
* the newest checkpoint is not whole, to the last byte, or is older than one known to be complete;
* the folder cannot be saved to afterwards, or keeps a torso.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from meshwright import checkpoint
from meshwright.checkpoint import latest, save_tensors, verify
from meshwright.comm import Communicator, connect
from meshwright.composition import parallelize
from meshwright.plan import Plan
from soak.fleet import Fleet, Rank
from support.checkpoint.faulty_storage import CountingStorage, KilledStorage
from support.internals.axes import Axes

__all__ = ["Kill", "kills", "run_case", "train"]

EVERY, ARMED = 3, 9
"""Steps between saves, and the step of the save in which a rank is killed."""
PAUSE = 0.01
"""Seconds that each operation on files takes longer, so that steps lie between them."""
EXCHANGES = ("describe", "prepare", "stage")
OPERATIONS = (24, 6)
"""Operations on files of a save, at least: on rank 0, which commits, and on rank 1."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One rank, and where in the save it is killed."""

    number: int
    victim: int
    axis: str
    exchange: str = ""
    operation: int | None = None
    byte: int | None = None
    delay: float | None = None

    def __str__(self) -> str:
        at = {k: v for k, v in asdict(self).items() if v not in (None, "")}
        where = ", ".join(
            f"{k} {at[k]}" for k in ("exchange", "operation", "byte", "delay") if k in at
        )
        return f"{self.number:3} {self.axis:9} rank {self.victim} at {where:24}"


def kills(seed: int, count: int) -> Iterator[Kill]:
    """Every exchange and operation of both ranks; then bytes and delays by chance."""
    draw = random.Random(seed)
    places: list[dict[str, object]] = [
        *({"victim": rank, "exchange": name} for name in EXCHANGES for rank in (0, 1)),
        *({"victim": rank, "operation": n} for rank in (0, 1) for n in range(OPERATIONS[rank])),
        *({"victim": rank, "byte": draw.randrange(100_000)} for rank in (0, 1) * 5),
    ]
    while len(places) < count:
        places.append({"victim": draw.randrange(2), "delay": round(draw.uniform(0, 0.5), 3)})
    for number, place in enumerate(places[:count]):
        yield Kill(number=number, axis=("replicate", "shard")[number % 2], **place)


class _SlowStorage(CountingStorage):
    def before(self, operation: str, path: Path, data: bytes = b"") -> None:
        time.sleep(PAUSE)
        super().before(operation, path, data)


class _SlowKilledStorage(KilledStorage):
    def before(self, operation: str, path: Path, data: bytes = b"") -> None:
        time.sleep(PAUSE)
        super().before(operation, path, data)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(case: Kill) -> None:
    """Have this process end in the save that comes."""
    if case.exchange:
        gather = Communicator.gather_bytes

        def gathers(self: Communicator, payload: bytes, *, label: str) -> list[bytes]:
            if label == f"checkpoint step {ARMED}: {case.exchange}":
                _die()
            return gather(self, payload, label=label)

        Communicator.gather_bytes = gathers
    else:
        storage = _SlowKilledStorage(at_operation=case.operation, at_byte=case.byte, really=True)
        checkpoint.training.loops.Storage = lambda: storage


def train() -> None:
    """Train and save on this rank, until one is killed."""
    folder = Path(os.environ["SOAK_FOLDER"])
    case = Kill(**json.loads(os.environ["SOAK_CASE"]))
    world = connect(backend="meshwright")
    is_victim = world.rank == case.victim
    checkpoint.training.loops.Storage = _SlowStorage
    made = parallelize(
        nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)),
        Plan(axes=Axes.of({case.axis: world.size})),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        loss=lambda output: output.square().mean(),
        example=torch.ones(2, 64),
    )
    pending = None
    while True:
        made.step(torch.rand(2, 64))
        step = made.steps
        if pending is not None and pending.done():
            print(f"WHOLE {pending.path.name}", flush=True)
            pending = None
        if step % EVERY:
            continue
        if is_victim and step == ARMED:
            checkpoint.finish()
            _arm(case)
        elif step == ARMED:
            checkpoint.finish()
        if is_victim and step > ARMED:
            checkpoint.finish()  # where the save has fewer operations or bytes
            _die()
        pending = checkpoint.save(folder, step, model=made, background=True, keep_last=2)
        if is_victim and step == ARMED and case.delay is not None:
            threading.Timer(case.delay, _die).start()


def run_case(case: Kill, fleet: Fleet) -> tuple[str, list[str]]:
    """Run one case; returns what was loaded, and what was not as promised."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        ranks = fleet.start(
            "from soak.saves import train\ntrain()\n",
            2,
            agent=True,
            environment={"SOAK_FOLDER": str(folder), "SOAK_CASE": json.dumps(asdict(case))},
        )
        fleet.wait(600)
        return _judged(case, ranks, folder)
    finally:
        fleet.clear()
        shutil.rmtree(folder, ignore_errors=True)


def _judged(case: Kill, ranks: list[Rank], folder: Path) -> tuple[str, list[str]]:
    victim, survivor = ranks[case.victim], ranks[1 - case.victim]
    problems: list[str] = []
    if victim.status != -signal.SIGKILL:
        problems.append(f"the victim ended with {victim.status}")
    if survivor.status in (0, None):
        problems.append(f"the survivor ended with {survivor.status}")
    if f"rank {case.victim}" not in survivor.text:
        problems.append("the survivor never names the rank")
    told = [text.split()[1] for rank in ranks for _, text in rank.lines if text.startswith("WHOLE")]
    newest = latest(folder)
    if newest is None:
        return "nothing", [*problems, "no checkpoint is left"]
    for path in folder.glob("step_*"):
        verify(path)
    if told and newest.name < max(told):
        problems.append(f"{max(told)} was complete, {newest.name} is the newest")
    save_tensors(folder, {"t": torch.ones(3)}, {}, step=99_999)
    if torsos := [path.name for path in folder.iterdir() if path.name.startswith(".step")]:
        problems.append(f"{torsos} stay")
    return newest.name, problems


def main() -> int:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--first", type=int, default=0, help="leave out the cases before this one")
    parser.add_argument("--last", type=int, help="leave out the cases after this one")
    chosen = parser.parse_args()
    count = missed = 0
    with Fleet() as fleet:
        for case in kills(chosen.seed, chosen.kills):
            if case.number < chosen.first or case.number > (chosen.last or chosen.kills):
                continue
            begun = time.monotonic()
            newest, problems = run_case(case, fleet)
            row = "ok" if not problems else "MISSED: " + "; ".join(problems)
            load = f"load {os.getloadavg()[0]:4.1f}"
            print(f"{case} {time.monotonic() - begun:6.1f} s  {load}  {newest}  {row}", flush=True)
            count, missed = count + 1, missed + bool(problems)
            for rank in fleet.last if problems else ():
                print(f"      --- rank {rank.number}, status {rank.status}")
                for _, line in rank.lines[-8:]:
                    print(f"      {line[:300]}")
    print(f"{count - missed} of {count} kills left a whole checkpoint", flush=True)
    return 1 if missed or not count else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
