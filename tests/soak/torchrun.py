"""Kill ranks, and agents, of runs that real agents of torchrun have started.

Run it as ``python tests/soak/torchrun.py [--seed S] [--cases 24] [--case N]``. It prints one row
for each case and ends with status 1 when one is missed. What is promised:

===================================  =============================================================
killed                               everybody else
===================================  =============================================================
a rank, one agent                    the agent names it as the root cause; all have ended in 10 s
a rank, two agents                   ranks of the other agent name it in 5 s and end 5 s later, or,
                                     while they build, its own agent names it
the agent that hosts the store,      ranks of the other agent end within 10 s; its own ranks do,
of two                               or say that the store has gone
===================================  =============================================================

Where a rank is killed nobody names another one.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from soak.fleet import free_port
from soak.kills import ENDED_WITHIN, NAMED_WITHIN
from soak.strategies import program
from support.internals.environment import LOCAL_NETWORK

STRATEGIES = ("replicate", "fully_shard", "fsdp class", "plan shard", "plan pipeline", "plain send")
_WHO = """
import os
with open(os.path.join(os.environ["SOAK_FOLDER"], "process" + os.environ["RANK"]), "w") as file:
    file.write(str(os.getpid()))
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that goes wrong."""

    number: int
    strategy: str
    backend: str
    agents: int
    victim: str
    """The number of a rank, or "agent"."""
    moment: str
    """A line that every rank has written before."""
    delay: float

    def __str__(self) -> str:
        return (
            f"{self.number:4} {self.strategy:14} {self.backend:5} {self.agents} agents  "
            f"kill {self.victim:5} {self.moment:9}+{self.delay:5.2f} s"
        )


def cases(seed: int, count: int) -> list[Case]:
    """The same for a seed."""
    draw = random.Random(seed)
    found: list[Case] = []
    for number in range(count):
        agents = 1 + number % 2
        victim = "agent" if number % 6 == 5 else str(draw.randrange(2 * agents))
        strategy = STRATEGIES[(number // 2 + seed) % len(STRATEGIES)]
        found.append(
            Case(
                number=number,
                strategy=strategy,
                backend=("gloo", "shm")[draw.randrange(2)],
                agents=agents,
                victim=victim,
                moment=draw.choice(["SIGNED IN", "STEP 0", "STEP 8"]),
                delay=round(draw.uniform(0, 1), 2),
            )
        )
    return found


@dataclass
class Agent:
    """One agent: its process, what it and its ranks wrote, and when it ended."""

    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)

    def listen(self) -> None:
        """Read what is written, until the last of those who can write has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))


def run(case: Case) -> tuple[list[str], str, list[Agent]]:
    """Let it go wrong; what was not as promised, the times, and the agents with what was said."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    (folder / "rank.py").write_text(_WHO + program(case.strategy))
    agents = _start(case, folder)
    try:
        ranks = 2 * case.agents
        if not _wait(120, lambda: _count(agents, case.moment) >= ranks):
            return [f"never came to {case.moment}"], "", agents
        pids = _processes(folder, ranks)
        time.sleep(case.delay)
        target, mine = agents[0].process.pid, agents[0].process.pid
        if case.victim != "agent":
            target, mine = pids[int(case.victim)]
        when = time.monotonic()
        os.kill(target, signal.SIGKILL)
        others = [pid for pid, at in pids.values() if at != mine]
        own = [pid for pid, at in pids.values() if at == mine and pid != target]
        awaited = others if case.victim == "agent" else others + own
        _wait(30, lambda: not any(map(_lives, awaited)))
        ended = time.monotonic() - when
        found = [f"process {pid} goes on" for pid in awaited if _lives(pid)]
        if ended > NAMED_WITHIN + ENDED_WITHIN:
            found.append(f"ended after {ended:.1f} s")
        # An agent says its word when its ranks have ended, and orphans may say theirs later.
        _wait(NAMED_WITHIN + ENDED_WITHIN - ended, lambda: not _words(case, agents, when)[1])
        named, problems = _words(case, agents, when)
        return found + problems, f"named {named:+.1f} s, ended {ended:+.1f} s", agents
    finally:
        for agent in agents:
            agent.process.kill()
        for file in folder.glob("process*"):
            if _lives(pid := int(file.read_text())):
                os.kill(pid, signal.SIGKILL)
        for agent in agents:
            agent.process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _start(case: Case, folder: Path) -> list[Agent]:
    environment = {
        **os.environ,
        **LOCAL_NETWORK,
        "OMP_NUM_THREADS": "1",
        "SOAK_BACKEND": case.backend,
        "SOAK_FOLDER": str(folder),
        "SOAK_STEPS": "1000000",
        "SOAK_PAUSE": "0.03",
        "SOAK_LIMIT": "",
    }
    port, agents = free_port(), []
    for number in range(case.agents):
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        words += [f"--nnodes={case.agents}", "--rdzv-backend=c10d", "--rdzv-id=soak"]
        words += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
        words += [f"--rdzv-conf=is_host={number == 0}", str(folder / "rank.py")]
        process = subprocess.Popen(
            words,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        agents.append(Agent(process))
        threading.Thread(target=agents[-1].listen, daemon=True).start()
    return agents


def _wait(seconds: float, condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _count(agents: list[Agent], words: str) -> int:
    said = "\n".join(line for agent in agents for _, line in list(agent.lines))
    return len(re.findall(rf"{words}(?=\D|$)", said))  # two ranks may write into one line


def _processes(folder: Path, ranks: int) -> dict[int, tuple[int, int]]:
    """Rank to its process and that of its agent."""
    found = {}
    for rank in range(ranks):
        pid = (folder / f"process{rank}").read_text()
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found[rank] = int(pid), parent
    return found


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _words(case: Case, agents: list[Agent], when: float) -> tuple[float, list[str]]:
    """Seconds until the victim was named, and what is wrong with what was said."""
    if case.victim == "agent":
        names = re.compile(r"the run's store failed first|failed first.*store")
    elif case.agents == 1:
        names = re.compile(rf"rank\s+: {case.victim} \(local_rank")
    else:
        names = re.compile(rf"rank {case.victim}\b.*(failed first|was lost|has failed)")
        # Ranks that import and build wait for nobody, and their agent ends them when it misses the
        # store of the first one.
        gone = any("RendezvousConnectionError" in line for _, line in list(agents[1].lines))
        if gone and case.moment == "SIGNED IN":
            names = re.compile(rf"{names.pattern}|rank\s+: {case.victim} \(local_rank")
    said = [(at, line) for agent in agents for at, line in list(agent.lines) if at >= when]
    named = next((at - when for at, line in said if names.search(line)), float("nan"))
    found = []
    if not named <= (NAMED_WITHIN if case.agents == 2 else NAMED_WITHIN + ENDED_WITHIN):
        found.append("not named in time")
    # Where an agent has gone, the other ends its ranks, whose processes have then ended indeed.
    for rank in range(2 * case.agents if case.victim != "agent" else 0):
        blames = re.compile(rf"rank {rank}\b[^:]* (failed first|was lost|has failed)")
        if str(rank) != case.victim and any(blames.search(line) for _, line in said):
            found.append(f"rank {rank} is blamed")
    if case.victim != "agent" and case.agents == 1:
        text = "\n".join(line for _, line in said).partition("Root Cause")[2]
        first = re.search(r"rank\s+: (\d+)", text)
        if first is None or first[1] != case.victim:
            found.append("the agent's root cause is another")
    return named, found


def main() -> int:
    """Run all cases, or one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--case", type=int, help="run this one alone, and show what was written")
    chosen = parser.parse_args()
    missed = 0
    for case in cases(chosen.seed, chosen.cases):
        if chosen.case not in (None, case.number):
            continue
        start = time.monotonic()
        found, times, agents = run(case)
        row = "ok" if not found else "MISSED: " + "; ".join(found)
        print(f"{case}  {times:31}  load {os.getloadavg()[0]:4.1f}  {row}", flush=True)
        missed += bool(found)
        if found or chosen.case is not None:
            for number, agent in enumerate(agents):
                for at, line in agent.lines[-30 if chosen.case is None else -150 :]:
                    print(f"      agent {number} {at - start:6.1f} {line[:300]}")
    print(f"{missed} cases missed", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
