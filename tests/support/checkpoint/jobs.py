"""Jobs for tests of claims: processes of their own, forked from the one that tests."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch

from meshwright.checkpoint import latest, load_tensors, save_tensors
from meshwright.errors import CheckpointWriteError

__all__ = ["Job", "job", "outcome", "tensors", "until", "whole_steps"]

DEADLINE = 60.0


class Job:
    """A forked process that runs ``body``; ``tell`` gives what the body passes to its argument."""

    def __init__(self, body: Callable[[Callable[[object], None]], object]) -> None:
        ours, theirs = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            os.close(ours)
            signal.alarm(int(DEADLINE))
            code = 1
            try:
                body(lambda value: _tell(theirs, value))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(theirs)
        self._pipe = ours

    def told(self) -> object:
        """Wait for the next thing that the body tells."""
        ready, _, _ = select.select([self._pipe], [], [], DEADLINE)
        assert ready, "the job has told nothing"
        size = int.from_bytes(os.read(self._pipe, 4), "little")
        data = b""
        while len(data) < size:
            data += os.read(self._pipe, size - len(data))
        assert data, "the job has ended without a word"
        return pickle.loads(data)

    def kill(self) -> None:
        """Kill it, and do not wait."""
        os.kill(self.pid, signal.SIGKILL)

    def join(self) -> int:
        """Its exit status, or minus the signal that ended it."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


def _tell(pipe: int, value: object) -> None:
    data = pickle.dumps(value)
    os.write(pipe, len(data).to_bytes(4, "little") + data)


@contextmanager
def job(body: Callable[[Callable[[object], None]], object]) -> Iterator[Job]:
    """A job that does not outlive the block."""
    made = Job(body)
    try:
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            made.kill()
            made.join()


def until(condition: Callable[[], bool]) -> None:
    """Wait for ``condition``."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def tensors(step: int) -> dict[str, torch.Tensor]:
    """Some tensors that tell of which step they are."""
    return {f"t{number}": torch.full((20000,), float(step)) for number in range(4)}


def outcome(folder: Path, step: int, keep_last: int | None = 3) -> str:
    """Save; the text of the refusal, empty when it was saved."""
    try:
        save_tensors(folder, tensors(step), {}, step=step, keep_last=keep_last)
    except CheckpointWriteError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def whole_steps(folder: Path) -> list[int]:
    """The steps of all checkpoints of a folder, each verified to the last byte."""
    steps = []
    for path in sorted(folder.glob("step_*")):
        found = load_tensors(path)
        assert all(torch.equal(found.tensors[k], t) for k, t in tensors(found.step).items())
        steps.append(found.step)
    newest = latest(folder)
    assert newest == (folder / f"step_{steps[-1]:08d}" if steps else None)
    return cast("list[int]", steps)
