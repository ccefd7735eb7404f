"""What a failing call shows: every rank's traceback, who was first, stacks of a hang, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from meshwright.comm import communicator
from meshwright.errors import RankFailedError
from meshwright.testing import Ending, Outcome, Ranks, RanksFailed


class OddError(Exception):
    def __init__(self, number: int, *, reason: str) -> None:
        super().__init__(f"{number} is odd: {reason}")
        self.number = number


def compare(left: int, right: int) -> None:
    assert left == right


def failing(ranks: Ranks, *args: object, **kwargs: object) -> RanksFailed:
    with pytest.raises(RanksFailed) as caught:
        ranks(*args, **kwargs)  # type: ignore[arg-type]
    return caught.value


def endings(error: RanksFailed) -> list[Ending]:
    return [outcome.ending for outcome in error.outcomes]


class TestExceptions:
    def test_every_traceback_and_the_first(self, ranks: Ranks) -> None:
        def body() -> None:
            if communicator().rank == 1:
                time.sleep(0.05)
                raise OddError(1, reason="because")
            communicator().barrier()

        ranks(3, dir)  # the first call starts the pool
        started = time.monotonic()
        error = failing(ranks, 3, body)
        assert time.monotonic() - started < 20.0
        assert error.first.rank == 1
        assert endings(error) == [Ending.RAISED] * 3
        assert isinstance(error.__cause__, OddError)
        assert error.__cause__.number == 1
        for rank in (0, 2):
            assert isinstance(error.outcomes[rank].exception, RankFailedError)
        text = str(error)
        assert text.startswith("3 of 3 ranks failed; rank 1 was first: it raised")
        assert 'raise OddError(1, reason="because")' in text
        assert text.index("--- rank 1") < text.index("--- rank 0")
        assert "launching/server.py" not in error.first.traceback

    def test_others_have_a_grace_then_end(self, ranks: Ranks) -> None:
        def body() -> None:
            if communicator().rank == 0:
                raise ValueError("at once")
            time.sleep(60.0)

        started = time.monotonic()
        error = failing(ranks, 2, body, grace=0.3)
        assert time.monotonic() - started < 10.0
        assert endings(error) == [Ending.RAISED, Ending.ENDED]
        assert "time.sleep(60.0)" in body_line(error.outcomes[1])

    def test_some_ranks_succeed(self, ranks: Ranks) -> None:
        def body() -> int:
            rank = communicator().rank
            if rank == 2:
                print("about to fail")
                raise KeyError("missing")
            return rank

        error = failing(ranks, 3, body)
        assert error.first.rank == 2
        assert "about to fail" in error.first.output
        assert "about to fail" in str(error)
        assert [outcome.value for outcome in error.outcomes] == [0, 1, None]

    def test_equal_reports_are_shown_once(self) -> None:
        outcomes = [
            Outcome(
                rank=rank,
                ending=Ending.RAISED,
                seconds=1.0,
                order=5.0 - rank,
                traceback="Traceback\nValueError: on all ranks\n",
            )
            for rank in range(3)
        ]
        text = str(RanksFailed(outcomes))
        assert text.startswith("3 of 3 ranks failed; rank 2 was first: it raised ValueError: on")
        assert text.count("(the same as rank 2)") == 2

    def test_assertions_explain_themselves(self, ranks: Ranks) -> None:
        def nested() -> None:
            total = 3
            assert total + 1 == 5

        assert "assert (3 + 1) == 5" in str(failing(ranks, 1, nested))
        assert "assert 1 == 2" in str(failing(ranks, 1, compare, 1, 2))

    def test_raises_works_inside(self, ranks: Ranks) -> None:
        def body() -> str:
            with pytest.raises(OddError, match="odd") as caught:
                raise OddError(3, reason="tested")
            return str(caught.value)

        assert ranks(1, body) == ["3 is odd: tested"]

    def test_skip_and_xfail_inside(self, ranks: Ranks) -> None:
        def skip() -> None:
            if communicator().rank == 1:
                pytest.skip("not on this machine")
            communicator().barrier()

        with pytest.raises(pytest.skip.Exception, match="not on this machine"):
            ranks(2, skip)
        with pytest.raises(pytest.xfail.Exception, match="known"):
            ranks(1, lambda: pytest.xfail("known"))

    def test_unsendable_values_are_errors_of_the_rank(self, ranks: Ranks) -> None:
        error = failing(ranks, 1, lambda: (number for number in range(3)))
        assert "cannot be sent between this process and its ranks" in str(error)

    def test_system_exit_is_a_failure(self, ranks: Ranks) -> None:
        assert "SystemExit: 0" in str(failing(ranks, 1, lambda: sys.exit(0)))


class TestDeaths:
    @pytest.mark.few(1)
    @pytest.mark.parametrize("victim", [0, 2])
    def test_a_killed_rank_is_named(self, ranks: Ranks, victim: int) -> None:
        def body() -> None:
            if communicator().rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            communicator().all_reduce(torch.ones(3)).wait()

        error = failing(ranks, 3, body, grace=6.0)
        assert error.first.rank == victim
        assert error.first.ending == Ending.DIED
        assert error.first.signal == signal.SIGKILL
        assert f"rank {victim} was first: it was killed by signal 9 (SIGKILL)" in str(error)

    def test_a_quiet_exit_is_a_failure(self, ranks: Ranks) -> None:
        error = failing(ranks, 1, lambda: os._exit(0))
        assert endings(error) == [Ending.DIED]
        assert "left with exit code 0" in str(error)

    def test_a_crash_shows_the_stack(self, ranks: Ranks) -> None:
        error = failing(ranks, 1, lambda: signal.raise_signal(signal.SIGSEGV))
        assert error.first.signal == signal.SIGSEGV
        assert "Fatal Python error: Segmentation fault" in error.first.stack
        assert "test_failures.py" in error.first.stack

    def test_a_bad_end_after_a_good_result(self, ranks: Ranks) -> None:
        def body() -> int:
            import atexit

            atexit.register(os.abort)
            return 7

        error = failing(ranks, 2, body)
        assert endings(error) == [Ending.TEARDOWN] * 2
        assert error.outcomes[1].value == 7
        assert "it left with exit -6 after its body returned" in str(error)


class TestHangs:
    def test_stacks_of_all_ranks(self, ranks: Ranks) -> None:
        def body() -> None:
            if communicator().rank == 1:
                time.sleep(60.0)
            communicator().barrier()

        started = time.monotonic()
        error = failing(ranks, 2, body, timeout=2.0)
        assert time.monotonic() - started < 10.0
        assert endings(error) == [Ending.HUNG] * 2
        assert "time.sleep(60.0)" in body_line(error.outcomes[1])
        assert "communicator().barrier()" in body_line(error.outcomes[0])
        assert "in barrier" in error.outcomes[0].stack

    def test_a_stopped_rank_is_named_and_killed(self, ranks: Ranks) -> None:
        def body() -> int:
            if communicator().rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP), time.sleep(60)  # wakes to show its stack
            return os.getpid()

        error = failing(ranks, 2, body, timeout=2.0)
        stopped = error.first
        assert stopped.rank == 1
        assert stopped.ending == Ending.HUNG
        assert stopped.stopped
        assert "it was stopped (SIGSTOP)" in str(error)
        assert "SIGSTOP" in body_line(stopped)

    def test_a_thread_that_keeps_the_process(self, ranks: Ranks) -> None:
        def body() -> int:
            import threading

            threading.Thread(target=time.sleep, args=(60.0,)).start()
            return 3

        error = failing(ranks, 1, body, timeout=2.0)
        assert endings(error) == [Ending.TEARDOWN]
        assert "its process had not ended" in str(error)


class TestOrphans:
    def test_what_a_body_starts_ends_with_the_call(self, ranks: Ranks) -> None:
        def body() -> int:
            return int(subprocess.check_output("setsid sleep 60 >&2 & echo $!", shell=True))

        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks(2, body))

    def test_everything_ends_when_the_caller_is_killed(self, tmp_path: Path) -> None:
        script = tmp_path / "caller.py"
        script.write_text(
            "import os, pathlib, sys, time\n"
            "from meshwright.testing import ranks\n"
            "def body(folder):\n"
            "    pathlib.Path(folder, f'pid{os.getpid()}').touch()\n"
            "    pathlib.Path(folder, f'pid{os.getppid()}').touch()\n"
            "    time.sleep(60)\n"
            "if __name__ == '__main__':\n"
            "    ranks(2, body, sys.argv[1])\n"
        )
        pids = tmp_path / "pids"
        pids.mkdir()
        with subprocess.Popen([sys.executable, str(script), str(pids)]) as caller:
            found = wait_for(lambda: len(files := list(pids.iterdir())) == 3 and files)
            caller.kill()
        numbers = [file.name.removeprefix("pid") for file in found]
        servers = [line.split()[3] for number in numbers if (line := stat(number))]
        assert str(caller.pid) not in servers
        wait_for(lambda: not any(stat(number) for number in {*numbers, *servers} - {"1"}))


def wait_for(condition, seconds: float = 20.0):  # noqa: ANN001, ANN201
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)
    return value


def stat(number: str) -> str:
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if ") Z " in text else text


def body_line(outcome: Outcome) -> str:
    """The source line of this file in which the rank's stack is."""
    for line in outcome.stack.splitlines():
        if "test_failures.py" in line:
            number = int(line.split("line ")[1].split()[0])
            return Path(__file__).read_text().splitlines()[number - 1]
    raise AssertionError(outcome.stack)
