"""Operations of a device, which the host never waits for: what does not end is named, and ended.

The bounds of the rule are shortened on the ranks, to seconds.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright import comm
from meshwright.comm import process_groups
from meshwright.errors import CollectiveTimeoutError, LaunchError, RankFailedError
from meshwright.testing import Ending, Outcome, Ranks, RanksFailed
from support.comm import late_device
from support.internals.comm import launch, nccl, registry, waiting, watchdog


def shorten() -> None:
    waiting.CALL_EVERY, waiting.LINE_EVERY, waiting.MISMATCH_AFTER = 0.5, 1.0, 0.5
    watchdog.END_AFTER, watchdog.RECOVER_AFTER, watchdog.TELL_AFTER = 1.0, 4.0, 0.5


def train(
    fault: Callable[[int], object], *, timeout: float | None = 3.0, blocks: bool = True
) -> list[str]:
    """Reduce on the device on two groups in each step, of three; the host waits at the end of each.

    Where it never ``blocks``, it makes more steps, until it hears of something.
    """
    shorten()
    late_device.install()
    world = comm.connect(late_device.NAME, timeout=timeout, hang_after=0.5)
    second = comm.apart(world, world.ranks, "second")
    for step in range(3 if blocks else 400):
        with comm.phase("forward", step):
            fault(step)
            for group, name in ((world, "loss"), (second, "norm")):
                group.all_reduce(late_device.tensor(), label=f"{name} {step}").wait()
            if blocks:
                late_device.STREAM.synchronize()
            else:
                time.sleep(0.1)
    comm.disconnect()
    return late_device.calls


def only(rank: int, step: int, act: Callable[[], object]) -> Callable[[int], object]:
    return lambda now: act() if (int(os.environ["RANK"]), now) == (rank, step) else None


def kill_own(number: signal.Signals) -> Callable[[], object]:
    return lambda: os.kill(os.getpid(), number)


def test_steps_that_go_well_abort_nothing(ranks: Ranks) -> None:
    def body() -> tuple[list[str], int]:
        def fault(step: int) -> None:
            if step == 2:  # all that came before has ended by now
                until = time.monotonic() + 10
                while registry.PROCESS.flights.oldest() is not None:
                    assert time.monotonic() < until
                    time.sleep(0.05)

        return train(fault), late_device.Mark.queries

    for calls, queries in ranks(2, body, connected=False):
        assert calls == []
        assert queries > 0


def said_by(outcome: Outcome) -> str:
    error = outcome.exception
    assert isinstance(error, RankFailedError | CollectiveTimeoutError), outcome.details()
    return str(error)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_that_hangs_is_named_on_all_others_at_the_limit(ranks: Ranks, size: int) -> None:
    def body() -> None:
        train(only(1, 1, lambda: time.sleep(60)), timeout=1.5)

    with pytest.raises(RanksFailed) as caught:
        ranks(size, body, connected=False, grace=2.0)
    for outcome in caught.value.outcomes:
        if outcome.rank == 1:
            continue
        text = said_by(outcome)
        assert outcome.seconds < 15
        assert 'all_reduce #1 "loss 1" on axis world' in text
        assert "rank 1 has not issued it: it is in forward, step 1 at" in text
        assert re.search(r"called at \S+test_devices.py:\d+ in train", text)
        assert "aborts its 2 device groups" in outcome.output


@pytest.mark.parametrize("blocks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named(ranks: Ranks, blocks: bool) -> None:
    def body() -> None:
        train(only(1, 1, kill_own(signal.SIGKILL)), timeout=None, blocks=blocks)

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, connected=False, grace=8.0)
    survivor = caught.value.outcomes[0]
    text = said_by(survivor)
    assert "rank 1 failed first" in text and "its process has ended" in text
    assert "rank 0 was in all_reduce #1" in text
    assert "aborts its 2 device groups" in survivor.output


def test_a_rank_that_raises_is_named(ranks: Ranks) -> None:
    def body() -> None:
        def fail() -> None:
            raise ValueError("no such token")

        train(only(1, 1, fail))

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, connected=False, grace=8.0)
    assert caught.value.first.rank == 1
    text = said_by(caught.value.outcomes[0])
    assert "rank 1 failed first in forward, step 1" in text
    assert "ValueError: no such token" in text


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_does_not_come_back(ranks: Ranks) -> None:
    def body() -> None:
        train(only(1, 1, kill_own(signal.SIGSTOP)))

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, connected=False, grace=1.0)
    survivor, stopped = caught.value.outcomes
    assert "rank 1 does not answer (stopped, killed or cut off)" in said_by(survivor)
    assert stopped.ending == Ending.DIED and stopped.signal == signal.SIGKILL


def compile_for(seconds: float) -> None:
    namespace: dict[str, object] = {}
    source = f"import time\ndef convert():\n    time.sleep({seconds})\n"
    exec(compile(source, "/x/torch/_dynamo/convert_frame.py", "exec"), namespace)
    convert = namespace["convert"]
    assert callable(convert)
    convert()


@pytest.mark.parametrize(
    ("timeout", "act", "seconds"),
    [(None, time.sleep, 2.0), pytest.param(2.0, compile_for, 4.5, marks=pytest.mark.slow)],
)
def test_an_operation_that_ends_late_outlives_every_limit(
    ranks: Ranks, timeout: float | None, act: Callable[[float], None], seconds: float
) -> None:
    """Its peer works without a limit of the user's, or compiles past one."""

    def body() -> tuple[list[str], list[str]]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("meshwright").addHandler(handler)
        return train(only(1, 1, lambda: act(seconds)), timeout=timeout), lines

    for calls, lines in ranks(2, body, connected=False):
        assert calls == []
        assert any("rank 1 has not issued it: it is " in line for line in lines), lines


def test_a_process_that_an_abort_does_not_free_ends_with_the_report(ranks: Ranks) -> None:
    def body() -> None:
        late_device.LateGroup.ignores_aborts = True
        train(only(1, 1, kill_own(signal.SIGKILL)), timeout=None)

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, connected=False, grace=12.0)
    survivor = caught.value.outcomes[0]
    assert survivor.ending == Ending.DIED and survivor.exit_code == 1, survivor.details()
    assert "RankFailedError: rank 1 failed first" in survivor.output


@pytest.mark.slow
def test_the_creation_of_a_communicator_that_hangs_is_named(ranks: Ranks) -> None:
    """The call itself does not return: there is no work that could be asked."""

    def body() -> None:
        late_device.LateGroup.creates_lazily = True
        train(only(1, 0, lambda: time.sleep(60)))

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, connected=False, grace=4.0)
    text = said_by(caught.value.outcomes[0])
    assert 'all_reduce #0 "loss 0" on axis world' in text
    assert "rank 1 has not issued it" in text


@pytest.mark.slow
def test_nothing_is_asked_while_a_graph_is_captured(ranks: Ranks) -> None:
    """What is captured is not noted, and what came before is asked about afterwards."""

    def body() -> tuple[int, int]:
        def fault(step: int) -> None:
            if step == 1:
                world = comm.communicator()
                world.all_reduce(late_device.tensor()).wait()
                late_device.STREAM.is_capturing = True
                world.all_reduce(late_device.tensor()).wait()
                time.sleep(1.0)
                late_device.STREAM.is_capturing = False
            if step == 2:
                time.sleep(0.5)

        train(fault)
        return late_device.Mark.queries, late_device.Mark.queries_in_a_capture

    for queries, in_a_capture in ranks(2, body, connected=False):
        assert queries > 0
        assert in_a_capture == 0


@pytest.mark.parametrize(
    "ended_by", ["our lease", pytest.param("c10d's limit", marks=pytest.mark.slow)]
)
def test_a_process_whose_monitor_is_dead_ends(ranks: Ranks, ended_by: str) -> None:
    def body() -> None:
        if ended_by == "our lease":
            watchdog.LEASE, watchdog.RENEW_EVERY = 2.0, 0.1
        else:
            process_groups.TRANSPORT_TIMEOUT = timedelta(seconds=2)

        def die() -> None:
            watcher = registry.PROCESS.watcher
            assert watcher is not None
            while watcher._renewed is None:
                time.sleep(0.05)
            watcher._look = watcher._renew = threading.Event().wait  # type: ignore[method-assign]
            time.sleep(0.5 if ended_by == "c10d's limit" else 60.0)

        train(lambda step: only(1, 1, lambda: time.sleep(60))(step) or only(0, 1, die)(step))

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, connected=False, grace=1.0)
    outcome = caught.value.outcomes[0]
    if ended_by == "our lease":
        assert outcome.exit_code == 1 and "Timeout (0:00:02)!" in outcome.output
    else:
        assert outcome.signal == signal.SIGABRT, outcome.details()


RANK = """
import runpy, signal, sys, time
sys.path.insert(0, {tests!r})
tests = runpy.run_path({file!r})
act = {{"kill": tests["kill_own"](signal.SIGKILL), "hang": lambda: time.sleep(60)}}[sys.argv[1]]
tests["train"](tests["only"](1, 1, act))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "hang"])
def test_the_launcher_names_the_first_rank(tmp_path: Path, how: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(tests=str(Path(__file__).parents[2]), file=__file__))
    with pytest.raises(LaunchError) as caught:
        launch([sys.executable, str(script), how], 2, grace=5.0)
    if how == "kill":
        assert "rank 1 of 2 was ended by signal 9" in str(caught.value)
    else:
        assert "rank 0 of 2 exited with status 1: CollectiveTimeoutError: " in str(caught.value)
        assert "rank 1 has not issued it: it is in forward, step 1" in str(caught.value)


def test_what_the_user_says_of_c10d_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in nccl.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_ASYNC_ERROR_HANDLING", "1")  # the older name
    monkeypatch.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "60")
    nccl.prepare()
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    assert os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "60"
    assert os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "15000"
    for name in nccl.SETTINGS:  # what was set is taken back at the end
        monkeypatch.setenv(name, "")


def test_the_table_of_variables_is_complete() -> None:
    text = (Path(__file__).parents[3] / "docs" / "devices.md").read_text(encoding="utf-8")
    for name, value in nccl.SETTINGS.items():
        assert f"| `{name}` | {value} |" in text


@pytest.mark.slow
def test_a_default_group_of_the_users_has_its_own_limit(ranks: Ranks) -> None:
    """c10d is told a later one, since it would end the process at it without a name."""

    def body(given: float | None) -> tuple[float | None, float]:
        late_device.install()
        timeout = None if given is None else timedelta(seconds=given)
        dist.init_process_group(late_device.NAME, timeout=timeout)
        world = comm.connect()
        return world.timeout, world.group.limit.total_seconds()  # type: ignore[attr-defined]

    assert ranks(2, body, 90.0, connected=False) == [(90.0, 24 * 3600 + 90.0)] * 2
    assert ranks(2, body, None, connected=False) == [(None, 24 * 3600.0)] * 2
