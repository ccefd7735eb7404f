"""Ranks as processes of their own that really end, for programs that kill and stop them.

A zygote with torch and meshwright loaded forks the ranks, so that one starts in a fraction of a
second; each goes through the interpreter's own end, `atexit` and uncaught exceptions included. What
a rank writes is kept line by line with the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from meshwright.comm import host_store
from support.internals.environment import LOCAL_NETWORK

__all__ = ["Fleet", "Rank", "free_port"]

_ZYGOTE = """
import json, os, signal, sys
import torch, meshwright.comm, meshwright.recipes.loop, meshwright.cli
import torch.distributed.fsdp, torch.nn.parallel, torch._dynamo
import meshwright.fsdp, meshwright.pipelining, meshwright.tensor_parallel, meshwright.composition
import gc
gc.collect()
gc.freeze()
while True:
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        continue
    rank = os.fork()
    if rank:
        print(rank, flush=True)
        os._exit(0)
    break
order = json.loads(line)
for target in (1, 2):
    os.dup2(os.open(order["output"], os.O_WRONLY), target)
os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
os.environ.clear()
os.environ.update(order["environment"])
sys.argv = ["rank.py", *order["arguments"]]
sys.stdout.reconfigure(line_buffering=True)
torch.manual_seed(0)
import linecache
_text = order["program"]
linecache.cache["rank.py"] = (len(_text), None, _text.splitlines(True), "rank.py")
exec(compile(_text, "rank.py", "exec"), {"__name__": "__main__"})
"""

_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Rank:
    """One rank: its process, what it wrote, and how it ended."""

    number: int
    pid: int
    lines: list[tuple[float, str]] = field(default_factory=list)
    """Times (of the monotonic clock) and texts."""
    status: int | None = None
    """Exit status, or minus the signal; None while it runs."""
    ended: float = 0.0

    @property
    def text(self) -> str:
        """All that it wrote."""
        return "\n".join(text for _, text in self.lines)

    def send(self, number: int) -> float:
        """Send a signal; returns when."""
        now = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        return now

    def first(self, matches: Callable[[str], bool], since: float = 0.0) -> float | None:
        """When it first wrote a line that ``matches``, after ``since``."""
        found = (at for at, text in list(self.lines) if at >= since and matches(text))
        return next(found, None)


class Fleet:
    """Starts ranks, follows them, and ends what is left. Use it in a ``with``."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._zygote = subprocess.Popen(
            [sys.executable, "-c", _ZYGOTE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **LOCAL_NETWORK, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        self._stores: list[object] = []
        self.ranks: list[Rank] = []
        self.last: list[Rank] = []
        """The ranks that were cleared last."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        self._zygote.wait(timeout=30)

    def start(
        self,
        program: str,
        ranks: int,
        *,
        agent: bool,
        environment: Mapping[str, str] | None = None,
        arguments: tuple[str, ...] = (),
    ) -> list[Rank]:
        """Start ``program`` on ``ranks`` processes; the store is rank 0's, or this process's."""
        if agent:
            store = host_store()
            self._stores.append(store)
            port = store.port
        else:
            port = free_port()
        self.ranks = [
            self._fork(
                number,
                program,
                arguments,
                {
                    **os.environ,
                    **LOCAL_NETWORK,
                    "OMP_NUM_THREADS": "1",
                    "RANK": str(number),
                    "LOCAL_RANK": str(number),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "TORCHELASTIC_USE_AGENT_STORE": str(agent),
                    **(environment or {}),
                },
            )
            for number in range(ranks)
        ]
        return self.ranks

    def _fork(
        self, number: int, program: str, arguments: tuple[str, ...], environment: dict[str, str]
    ) -> Rank:
        reading, writing = os.pipe()
        order = {
            "output": f"/proc/{os.getpid()}/fd/{writing}",
            "environment": environment,
            "program": program,
            "arguments": arguments,
        }
        assert self._zygote.stdin is not None and self._zygote.stdout is not None
        self._zygote.stdin.write(json.dumps(order) + "\n")
        self._zygote.stdin.flush()
        rank = Rank(number, int(self._zygote.stdout.readline()))
        threading.Thread(target=_listen, args=(rank, reading, writing), daemon=True).start()
        return rank

    def wait(self, seconds: float, condition: Callable[[], bool] | None = None) -> bool:
        """Wait until ``condition`` holds, by default until all ranks have ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._reap()
            if all(rank.status is not None for rank in self.ranks):
                return condition is None or condition()
            if condition is not None and condition():
                return True
            time.sleep(0.01)
        return False

    def _reap(self) -> None:
        for rank in self.ranks:
            if rank.status is not None:
                continue
            with contextlib.suppress(ChildProcessError):
                found, status = os.waitpid(rank.pid, os.WNOHANG)
                if found:
                    rank.ended = time.monotonic()
                    rank.status = os.waitstatus_to_exitcode(status)

    def clear(self) -> None:
        """Kill what is left, and let go of the stores."""
        for rank in self.ranks:
            if rank.status is None:
                rank.send(signal.SIGKILL)
        self.wait(10)
        self.last, self.ranks = self.ranks, []
        self._stores.clear()


def _listen(rank: Rank, reading: int, writing: int) -> None:
    # The end for writing stays open here until the rank has opened it, or is gone.
    threading.Timer(5.0, os.close, (writing,)).start()
    with open(reading, encoding="utf-8", errors="replace") as file:
        for line in file:
            rank.lines.append((time.monotonic(), line.rstrip("\n")))


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
