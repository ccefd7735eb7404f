"""Let ranks take long, alive: everybody has to wait for them, and say so truly.

Run it as ``python tests/soak/slow_ranks.py [--scale X] [--case NAME] [--backend NAME]``. It prints
one row for each case, and ends with status 1 when one misses. With ``--scale 0.1`` everything takes
a tenth, and the bounds of `meshwright.comm.failures.waiting` too.

============  ====================================================================================
case          what rank 1 does while rank 0 waits for it
============  ====================================================================================
sleep         sleeps for 90 s in one step
python        loops in Python for 90 s
one C call    holds the interpreter's lock in one call for 90 s, so that no thread of it answers
validation    validates for 10 minutes, with a timeout of 30 minutes
idle          nothing for five minutes, as rank 0, in the middle of the run
at the end    validates alone for 2 minutes after the last step, while rank 0 is done
limit         sleeps for 90 s, with a timeout of 30 s: then the run has to end, and name it
============  ====================================================================================
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from soak.fleet import Fleet, Rank

PROGRAM = """
import logging, os, re, sys, time
import torch
import torch.distributed as dist
from meshwright import comm
from meshwright.comm.failures import membership
from meshwright.comm.failures import waiting
from meshwright.comm.failures import watchdog

logging.basicConfig(format="%(message)s", level=logging.WARNING)
SCALE = float(os.environ["SCALE"])
for name in ("STILL", "DEADLOCK", "UNSEEN", "LINE_EVERY", "CALL_EVERY"):
    setattr(waiting, name, getattr(waiting, name) * SCALE)
watchdog.STILL, watchdog.UNSEEN = waiting.STILL, waiting.UNSEEN
membership.LEAVE_TIMEOUT *= SCALE
limit = float(os.environ["LIMIT"]) * SCALE or None
world = comm.connect(os.environ["BACKEND"], timeout=limit, hang_after=10 * SCALE)
seconds = float(os.environ["SECONDS"]) * SCALE

def reduce():
    if os.environ["CALLS"] == "plain":
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        return tensor
    return world.all_reduce(torch.ones(2), label="gradients").wait()

def sleep():
    time.sleep(seconds)

def python():
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(n * n for n in range(1000))

def one_c_call():
    pattern, text = re.compile("(a|a)*b"), "a" * 18
    start = time.monotonic()
    while pattern.match(text) is None and time.monotonic() - start < 0.05:
        start, text = time.monotonic(), text + "a"
    # Each letter doubles the time.
    while seconds > (took := time.monotonic() - start) and took < 0.6 * seconds:
        start, text = time.monotonic(), text + "a"
        pattern.match(text)

def idle():
    time.sleep(seconds)

for step in range(5):
    reduce()
act = {"sleep": sleep, "python": python, "one C call": one_c_call, "validation": sleep,
       "idle": idle, "at the end": None, "limit": sleep}[os.environ["CASE"]]
print("BEGINS", flush=True)
if act is idle or (act is not None and world.rank == 1):
    with comm.phase("validation", step=5):
        act()
if act is not None:
    for step in range(5):
        assert reduce()[0] == 2
elif world.rank == 1:
    sleep()
print("GOES ON", flush=True)
comm.disconnect()
print("DONE", flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something that takes long."""

    name: str
    seconds: float
    limit: float = 0.0
    calls: str = "ours"


CASES = (
    Case(name="sleep", seconds=90),
    Case(name="python", seconds=90),
    Case(name="one C call", seconds=90),
    Case(name="sleep", seconds=90, calls="plain"),
    Case(name="one C call", seconds=90, calls="plain"),
    Case(name="limit", seconds=90, limit=30),
    Case(name="limit", seconds=90, limit=30, calls="plain"),
    Case(name="at the end", seconds=120),
    Case(name="idle", seconds=300),
    Case(name="validation", seconds=600, limit=1800),
)

WAITS = re.compile(r"rank 1 (has not issued it: it is|is busy: it is|does not answer: its)")


def run(case: Case, backend: str, fleet: Fleet, scale: float) -> list[str]:
    """Let rank 1 take long; what was not as promised."""
    environment = {
        "BACKEND": backend,
        "CASE": case.name,
        "SECONDS": str(case.seconds),
        "LIMIT": str(case.limit),
        "CALLS": case.calls,
        "SCALE": str(scale),
    }
    ranks = fleet.start(PROGRAM, 2, agent=False, environment=environment)
    fleet.wait(120, lambda: all("BEGINS" in rank.text for rank in ranks))
    start = time.monotonic()
    fleet.wait(120 + 3 * case.seconds * scale)
    if case.name == "limit":
        return _named_at_limit(ranks, start, case.limit * scale)
    found = [f"rank {r.number} ended with {r.status}" for r in ranks if r.status != 0]
    said = [line for rank in ranks for _, line in rank.lines if line not in _EXPECTED]
    found += [line for line in said if not (WAITS.search(line) or _LATE.search(line))]
    waits = [line for _, line in ranks[0].lines if WAITS.search(line)]
    lines = max(1, int(case.seconds * 0.7 // 30))
    if case.name not in ("idle", "at the end") and len(waits) < lines:
        found.append(f"{len(waits)} lines say who is waited for, expected {lines} at least")
    return found


_EXPECTED = {"BEGINS", "GOES ON", "DONE"}
_LATE = re.compile(r"rank 0 left the run .* before rank 1|rank 1 has not come to it: it is")


def _named_at_limit(ranks: list[Rank], start: float, limit: float) -> list[str]:
    names = re.compile(
        r"CollectiveTimeoutError: .*rank 1 (has not issued it|is busy)|rank 1 failed first"
    )
    found = []
    if ranks[0].status in (None, 0):
        found.append(f"rank 0 ended with {ranks[0].status}")
    elif not limit <= ranks[0].ended - start <= limit + 15:
        found.append(f"rank 0 ended after {ranks[0].ended - start:.0f} s")
    if ranks[0].first(lambda line: names.search(line) is not None) is None:
        found.append("rank 0 does not name rank 1")
    return found


def main() -> int:
    """Run all cases on both backends, or those of one name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--case", help="run those of this name alone, and show what ranks wrote")
    parser.add_argument("--backend", help="run on this one alone: gloo or shm")
    chosen = parser.parse_args()
    missed = 0
    with Fleet() as fleet:
        for case in CASES:
            if chosen.case not in (None, case.name):
                continue
            for backend in ("gloo", "shm"):
                if chosen.backend not in (None, backend):
                    continue
                start = time.monotonic()
                found = run(case, backend, fleet, chosen.scale)
                fleet.clear()
                row = "ok" if not found else "MISSED: " + "; ".join(found)
                print(
                    f"{case.name:12} {case.calls:6} {backend:5} {time.monotonic() - start:6.1f} s"
                    f"  {row}",
                    flush=True,
                )
                missed += bool(found)
                for rank in fleet.last if found or chosen.case else ():
                    print(f"    --- rank {rank.number}, status {rank.status}")
                    for at, line in rank.lines[-40:]:
                        print(f"    {at - start:6.1f} {line[:300]}")
    print(f"{missed} cases missed", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
