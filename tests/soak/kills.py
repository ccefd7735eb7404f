"""Kill and stop ranks at random moments of every strategy, and see who is named, and how soon.

Run it as ``python tests/soak/kills.py [--seed S] [--kills 100] [--stops 40] [--first N] [--last N]
[--strategy NAME ...] [--case N] [--inside]``. It prints one row for each case, with the machine's
load, and ends with status 1 when a case misses what is promised:

=============  ===================================================================================
what happens   every survivor
=============  ===================================================================================
kill           names the rank within 5 s, and has ended 5 s later, with another status than 0
stop           the same, counted from the limit that the user gave
stop, go on    goes on, as does the rank, when it was stopped for 3 s; nobody says a word
=============  ===================================================================================

With ``--inside`` they are killed and stopped in each exchange of attention and of experts.
No other rank is named. Under torchrun its agent ends the survivors; then it has to name the rank.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from soak.fleet import Fleet, Rank
from soak.strategies import INSIDE, STRATEGIES, program

NAMED_WITHIN, ENDED_WITHIN = 5.0, 5.0
LIMIT = 10.0
"""The timeout that programs give where ranks are stopped."""
SLACK = 6.0
"""Roll calls at the limit, and what a loaded machine takes."""

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

TRAIN = """
[model]
layers = 1
heads = 2
dim = 16
context = 16
[data]
path = "{text}"
batch_size = 6
validation_windows = 6
[run]
trace_steps = 0
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that goes wrong."""

    number: int
    strategy: str
    backend: str
    store: str
    """Who hosts the store: rank 0, or an agent."""
    ranks: int
    action: str
    """kill, stop, or go on."""
    victim: int
    moment: str
    """connect, first or later."""
    delay: float
    """Seconds from the line of that moment."""
    inside: str = ""
    """The operation in which it happens, by the end of its label."""

    def __str__(self) -> str:
        if self.inside:
            return (
                f"{self.number:4} {self.strategy:20} {self.backend:5} {self.store:6} "
                f"{self.ranks} ranks  {self.action:6} rank {self.victim} in {self.inside:22}"
            )
        return (
            f"{self.number:4} {self.strategy:20} {self.backend:5} {self.store:6} {self.ranks} ranks"
            f"  {self.action:6} rank {self.victim} {self.moment:8}+{self.delay:5.2f} s"
        )


def cases(
    seed: int, kills: int, stops: int, strategies: Sequence[str] = STRATEGIES
) -> Iterator[Case]:
    """The same for a seed. Strategies, backends and stores come in turn, the rest by chance."""
    draw = random.Random(seed)
    for number in range(kills + stops):
        action = "kill" if number < kills else ("stop", "go on")[number % 2]
        strategy = strategies[(number * 7 + seed) % len(strategies)]
        ranks = draw.choice([2, 2, 3]) if "pipeline" not in strategy else 2
        moment = draw.choice(["connect", "first", "later", "later"])
        if action == "go on" and moment == "connect":
            moment = "first"
        yield Case(
            number=number,
            strategy=strategy,
            backend=("gloo", "shm")[draw.randrange(2)],
            store=("rank 0", "agent")[draw.randrange(2)],
            ranks=ranks,
            action=action,
            victim=draw.randrange(ranks),
            moment=moment,
            delay=round(draw.uniform(0, {"connect": 0.15, "first": 0.3, "later": 2.0}[moment]), 2),
        )


def cases_inside() -> Iterator[Case]:
    """Kill and stop a rank in each exchange of `INSIDE`."""
    for number, ((strategy, inside), action) in enumerate(
        itertools.product(INSIDE, ("kill", "stop"))
    ):
        ranks = 2 + number % 4 // 2
        yield Case(
            number=number,
            strategy=strategy,
            backend=("shm", "gloo")[number % 3 == 2],
            store=("rank 0", "agent")[number % 2],
            ranks=ranks,
            action=action,
            victim=number % ranks,
            moment="later",
            delay=0.0,
            inside=inside,
        )


def run(case: Case, fleet: Fleet) -> tuple[list[str], str]:
    """Let it go wrong; what was not as promised, and the times of the slowest survivor."""
    folder = tempfile.mkdtemp(prefix="soak-")
    text = Path(folder, "text.txt")
    text.write_bytes(b"".join(b"%d + %d = %d\n" % (n, n % 7, n + n % 7) for n in range(800)))
    Path(folder, "train.toml").write_text(TRAIN.format(text=text))
    environment = {
        "SOAK_BACKEND": case.backend,
        "SOAK_FOLDER": folder,
        "SOAK_STEPS": "150" if case.action == "go on" else "1000000",
        "SOAK_PAUSE": "0.03",
        "SOAK_INSIDE": f"{case.inside}|{case.victim}|{_SIGNALS.get(case.action, 0):d}",
        "SOAK_LIMIT": "" if case.action == "kill" else str(LIMIT + 10 * (case.action == "go on")),
    }
    try:
        ranks = fleet.start(
            program(case.strategy),
            case.ranks,
            agent=case.store == "agent",
            environment=environment,
        )
        sign = {"connect": "SIGNED IN", "first": "STEP 0", "later": "STEP 8"}[case.moment]
        sign = "STRUCK" if case.inside else sign
        victim = ranks[case.victim]
        # Nobody can know of a host of the store that has gone before they came.
        seen = ranks if sign == "SIGNED IN" and case.store == "rank 0" else [victim]
        if not fleet.wait(120, lambda: all(sign in rank.text for rank in seen)):
            return ["never came to " + sign], ""
        time.sleep(case.delay)
        if case.action == "go on":
            return _go_on(fleet, ranks, victim), ""
        # Inside of an operation the rank does it itself.
        struck = victim.first(lambda line: line == "STRUCK") if case.inside else None
        when = victim.send(_SIGNALS[case.action]) if struck is None else struck
        when += 0 if case.action == "kill" else LIMIT + SLACK
        fleet.wait(NAMED_WITHIN + ENDED_WITHIN + (when - time.monotonic()) + 30)
        survivors = [rank for rank in ranks if rank is not victim]
        times = (
            max(_named_at(rank, case) or float("nan") for rank in survivors) - when,
            max(rank.ended or float("nan") for rank in survivors) - when,
        )
        found = [problem for rank in survivors for problem in _problems(rank, case, when)]
        return found, "named {:+.1f} s, ended {:+.1f} s".format(*times)
    finally:
        fleet.clear()
        shutil.rmtree(folder, ignore_errors=True)


def _go_on(fleet: Fleet, ranks: list[Rank], victim: Rank) -> list[str]:
    victim.send(signal.SIGSTOP)
    time.sleep(3)
    victim.send(signal.SIGCONT)
    fleet.wait(120)
    found = [f"rank {r.number} ended with {r.status}" for r in ranks if r.status != 0]
    # One may say that it waits for a rank that does not answer, which is true; no more than that.
    found += [f"rank {r.number}: {x}" for r in ranks for _, x in r.lines if "failed first" in x]
    return found


def _names(rank: int) -> re.Pattern[str]:
    return re.compile(
        rf"rank {rank}( \(process \d+[^)]*\))?(, which hosts the store,)? "
        r"(failed first|was lost|has failed|does not answer)"
    )


def _named_at(rank: Rank, case: Case) -> float | None:
    """When ``rank`` first named the victim."""
    names = _names(case.victim)
    return rank.first(lambda line: names.search(line) is not None)


def _problems(rank: Rank, case: Case, when: float) -> list[str]:
    """What one survivor did not do as promised, times counted from ``when``."""
    named = _named_at(rank, case)
    found: list[str] = []
    late = max(0.0, (named or 0.0) - when)
    if named is None:
        found.append(f"rank {rank.number} never names it")
    elif late > NAMED_WITHIN:
        found.append(f"rank {rank.number} names it after {late:.1f} s")
    if rank.status is None:
        found.append(f"rank {rank.number} hangs")
    elif rank.status == 0:
        found.append(f"rank {rank.number} ends with status 0")
    elif rank.ended - when > NAMED_WITHIN + ENDED_WITHIN:
        found.append(f"rank {rank.number} ends after {rank.ended - when:.1f} s")
    others = [other for other in range(case.ranks) if other != case.victim]
    blamed = [other for other in others if _names(other).search(rank.text)]
    return found + [f"rank {rank.number} blames rank {other}" for other in blamed]


def main() -> int:
    """Run all cases, or one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--stops", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="leave out the cases before this one")
    parser.add_argument("--last", type=int, help="leave out the cases after this one")
    parser.add_argument("--strategy", choices=STRATEGIES, nargs="+", default=STRATEGIES)
    parser.add_argument("--inside", action="store_true", help="in each exchange of both axes")
    parser.add_argument("--case", type=int, help="run this one alone, and show what ranks wrote")
    chosen = parser.parse_args()
    every = cases(chosen.seed, chosen.kills, chosen.stops, chosen.strategy)
    if chosen.inside:
        every = cases_inside()
    else:
        print(f"seed {chosen.seed}, {chosen.kills} kills, {chosen.stops} stops", flush=True)
    missed = 0
    with Fleet() as fleet:
        for case in every:
            if case.number < chosen.first or chosen.case not in (None, case.number):
                continue
            if chosen.last is not None and case.number > chosen.last:
                break
            start = time.monotonic()
            found, times = run(case, fleet)
            row = "ok" if not found else "MISSED: " + "; ".join(found)
            print(f"{case}  {times:31}  load {os.getloadavg()[0]:4.1f}  {row}", flush=True)
            missed += bool(found)
            if found or chosen.case is not None:
                for rank in fleet.last:
                    print(f"      --- rank {rank.number}, status {rank.status}")
                    for at, line in rank.lines[-12 if chosen.case is None else -60 :]:
                        print(f"      {at - start:6.1f} {line[:300]}")
    print(f"{missed} cases missed", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
