"""Who failed first is named on every rank, soon; who is missing is named while others wait.

The ranks run with short bounds: a hang is reported within 1 s and a wait ends after 3 s.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from _pytest.mark import ParameterSet

from meshwright import comm
from meshwright.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    RankFailedError,
)
from meshwright.testing import Ending, Ranks, RanksFailed
from support.internals.comm import (
    ENGINE,
    LEAVE_TIMEOUT,
    FailureMonitor,
    hook_frame,
    one_line,
    own_state,
    registry,
)
from support.internals.comm import whereabouts_line_of as line_of

PHASES = ["forward", "backward", "optimizer", "save"]


def phase_and_victim(victims: tuple[int, int], every: int = 2) -> list[ParameterSet]:
    """Every phase with every victim; half of them, or fewer, in turn, in the quick run."""
    return [
        pytest.param(phase, victim, marks=[] if (row + column) % every == 0 else [pytest.mark.slow])
        for row, phase in enumerate(PHASES)
        for column, victim in enumerate(victims)
    ]


def test_the_line_of_a_wait_inside_of_python_is_the_users() -> None:
    """Of a thread that runs nothing but Python's own, it is Python's."""
    event = threading.Event()
    threads = [threading.Thread(target=target) for target in (lambda: event.wait(20), event.wait)]
    for thread in threads:
        thread.start()
    found = ["", ""]
    until = time.monotonic() + 10
    while not all(" in " in line for line in found) and time.monotonic() < until:
        frames = sys._current_frames()
        found = [line_of(frames.get(thread.ident or 0)) for thread in threads]
        waits = [frames[t.ident or 0].f_code.co_filename == threading.__file__ for t in threads]
        found = found if all(waits) else ["", ""]
    event.set()
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in <lambda>", found[0])
    assert found[1].startswith(threading.__file__)


def test_a_process_that_is_described_keeps_nothing_that_its_frames_held() -> None:
    """Without the collector of circles: else activations would live on after a long wait."""

    def holding() -> weakref.ref[torch.Tensor]:
        tensor = torch.zeros(1)
        thread = threading.Thread(target=own_state)
        thread.start()
        thread.join()
        return weakref.ref(tensor)

    gc.disable()
    try:
        assert holding()() is None
    finally:
        gc.enable()


def test_a_backward_hook_in_a_thread_of_autograd_is_shown() -> None:
    """While the main thread waits inside of autograd, and then alone."""

    def hook() -> FrameType:
        return sys._getframe()

    namespace: dict[str, object] = {"hook": sys._getframe}
    exec(compile("def run_backward():\n    return hook()\n", ENGINE, "exec"), namespace)
    waits = namespace["run_backward"]
    assert callable(waits)
    main, foreign = threading.main_thread().ident, -1
    assert main is not None
    found = hook_frame({main: waits(), foreign: hook()})
    assert found is not None
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in hook", line_of(found))
    assert hook_frame({main: waits()}) is None
    assert hook_frame({main: sys._getframe(), foreign: hook()}) is None


def steps(fault: Callable[[str, int], None], *, timeout: float = 3.0) -> float:
    """A training loop with a collective in each phase; returns the seconds until it raised."""
    world = comm.connect(timeout=timeout, hang_after=0.5)
    for step in range(3):
        for name in PHASES:
            start = time.monotonic()
            try:
                with comm.phase(name, step):
                    fault(name, step)
                    world.all_reduce(torch.ones(4), label=f"{name} sum").wait()
            except CommunicationError as error:
                error.args = (f"{error} [after {time.monotonic() - start:.1f} s]",)
                raise
    comm.disconnect()
    return 0.0


def seconds(message: str) -> float:
    return float(message.rsplit("[after ", 1)[1].split(" s]")[0])


@pytest.mark.few(1)
@pytest.mark.parametrize(("phase", "victim"), phase_and_victim((0, 1)))
def test_an_exception_is_named_with_rank_phase_and_line(
    ranks: Ranks, phase: str, victim: int
) -> None:
    def body() -> None:
        def fault(name: str, step: int) -> None:
            if name == phase and step == 1 and int(os.environ["RANK"]) == victim:
                time.sleep(0.2)  # the others have come to the next collective by then
                raise ValueError("no such token")

        steps(fault)

    with pytest.raises(RanksFailed) as caught:
        ranks(3, body, connected=False, grace=8.0)
    assert caught.value.first.rank == victim
    for outcome in caught.value.outcomes:
        if outcome.rank != victim:
            error = outcome.exception
            assert isinstance(error, RankFailedError) and error.rank == victim
            assert f"rank {victim} failed first in {phase}, step 1" in str(error)
            assert "ValueError: no such token (" in str(error) and "in fault" in str(error)
            assert f'was waiting for all_reduce #{4 + PHASES.index(phase)} "{phase} sum"' in str(
                error
            )
            assert seconds(str(error)) < 5


@pytest.mark.few(3)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize(("phase", "victim"), phase_and_victim((0, 2)))
def test_a_killed_rank_is_named(ranks: Ranks, phase: str, victim: int) -> None:
    def body() -> None:
        def fault(name: str, step: int) -> None:
            if name == phase and step == 1 and int(os.environ["RANK"]) == victim:
                os.kill(os.getpid(), signal.SIGKILL)

        steps(fault)

    with pytest.raises(RanksFailed) as caught:
        ranks(3, body, connected=False, grace=8.0)
    for outcome in caught.value.outcomes:
        if outcome.rank == victim:
            assert outcome.ending == Ending.DIED and outcome.signal == signal.SIGKILL
        else:
            error = outcome.exception
            assert isinstance(error, RankFailedError) and error.rank == victim, outcome.details()
            assert re.search(rf"rank {victim} (failed first|\(process \d+\) was lost)", str(error))
            assert seconds(str(error)) < 5


@pytest.mark.few(1, slow=2)
@pytest.mark.parametrize(("phase", "victim"), phase_and_victim((1, 0), 4))
def test_a_stopped_rank_is_named_within_the_wait_and_does_not_come_back(
    ranks: Ranks, phase: str, victim: int
) -> None:
    def body() -> None:
        def fault(name: str, step: int) -> None:
            if name == phase and step == 1 and int(os.environ["RANK"]) == victim:
                os.kill(os.getpid(), signal.SIGSTOP)

        steps(fault, timeout=2.0)

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, connected=False, grace=1.0)
    survivor, stopped = caught.value.outcomes[1 - victim], caught.value.outcomes[victim]
    assert isinstance(survivor.exception, CollectiveTimeoutError), survivor.details()
    assert f"rank {victim} does not answer (stopped, killed or cut off)" in str(survivor.exception)
    # The bound, and the two roll calls that the victim does not answer.
    assert seconds(str(survivor.exception)) < 2 + 2 * 2.5 + 1
    assert f"rank {victim} does not answer" in survivor.output  # the report at hang_after
    assert stopped.ending == Ending.DIED and stopped.signal == signal.SIGKILL


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
def test_a_late_rank_is_reported_once_on_every_rank_and_the_run_goes_on(ranks: Ranks) -> None:
    def body() -> list[str]:
        reports: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: reports.append(record.getMessage())
        logging.getLogger("meshwright").addHandler(handler)
        world = comm.connect(timeout=20.0, hang_after=1.0)
        with comm.phase("data", step=7):
            if world.rank == 1:
                time.sleep(3.0)  # the late line
        world.all_reduce(torch.ones(1), label="loss").wait()
        comm.disconnect()
        return reports

    for reports in ranks(3, body, connected=False):
        assert len(reports) == 1, reports
        assert reports[0].startswith('all_reduce #0 "loss" on axis world has not ended after')
        assert "rank 1 has not issued it: it is in data, step 7 at " in reports[0]
        assert "test_failure.py:" in reports[0] and "in body" in reports[0]
        assert "nothing issued on this axis yet; waiting: rank 0, 2" in reports[0]


@pytest.mark.backends("shm", "gloo")
def test_different_operations_are_named_with_both_labels(ranks: Ranks) -> None:
    def body() -> None:
        world = comm.connect(timeout=20.0, hang_after=1.0)
        world.barrier()
        if world.rank == 0:
            world.all_reduce(torch.ones(4), label="reduce layers.3").wait()
        else:
            world.broadcast(torch.ones(4), source=1, label="unshard layers.4").wait()
            world.all_reduce(torch.ones(4), label="reduce layers.3").wait()

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, connected=False, grace=8.0)
    text = str(caught.value.outcomes[0].exception)
    assert any(
        isinstance(outcome.exception, CollectiveMismatchError) for outcome in caught.value.outcomes
    )
    assert "unshard layers.4" in text and "reduce layers.3" in text


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
def test_a_receive_without_a_send_names_the_silent_peer(ranks: Ranks) -> None:
    def body() -> None:
        world = comm.connect(timeout=2.0, hang_after=1.0)
        with comm.phase("forward", step=0):
            if world.rank == 0:
                world.recv(torch.empty(2), 1, label="activations 1->0").wait()
            else:
                time.sleep(30)

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, connected=False, grace=0.5)
    error = caught.value.outcomes[0].exception
    assert isinstance(error, CollectiveTimeoutError)
    assert 'recv #0 "activations 1->0" from rank 1 on axis world' in str(error)
    assert "rank 1 has not issued it: it is in forward, step 0 at " in str(error)


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
def test_an_error_that_all_ranks_handle_does_not_stop_the_run(ranks: Ranks) -> None:
    def body() -> float:
        world = comm.connect(timeout=10.0, hang_after=1.0)
        for _ in range(3):
            with pytest.raises(ValueError, match="a bad batch"), comm.phase("forward", 0):
                raise ValueError("a bad batch, on all ranks")
        time.sleep(0.6)
        with comm.phase("forward", 1):
            if world.rank == 1:
                time.sleep(1.5)  # longer than a slice, so that the waiting rank looks at the board
            value = world.all_reduce(torch.ones(1)).wait()
        comm.check_peers()
        comm.disconnect()
        assert value is not None
        return value.item()

    assert ranks(2, body, connected=False) == [2.0, 2.0]


def test_who_has_raised_the_same_is_not_told_of_it_in_the_next_attempt() -> None:
    """Two ranks raise one after the other, the first has gone on by then."""
    board = dist.HashStore()
    sooner, later = (FailureMonitor(board, rank, 2, hang_after=60.0) for rank in range(2))
    try:
        for attempt in range(3):
            sooner.publish(ValueError(f"a bad batch on rank 0, {attempt}"))
            sooner.go_on()
            later.publish(ValueError(f"a bad batch on rank 1, {attempt}"))
            sooner.read()
            sooner.check()
            later.go_on()
        later.publish(ValueError("a bad batch on rank 1 alone"))
        sooner.read()
        with pytest.raises(RankFailedError, match="rank 1 failed first.* alone"):
            sooner.check()
    finally:
        sooner.stop()
        later.stop()


def raises_for(rank: int) -> None:
    """This rank's phase ends because ``rank`` failed."""

    def wait() -> None:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            comm.check_peers()
            time.sleep(0.01)

    with pytest.raises(RankFailedError, match=f"rank {rank} failed first"), comm.phase("forward"):
        wait()


def fails() -> None:
    with pytest.raises(ValueError, match="a bad batch"), comm.phase("forward"):
        raise ValueError("a bad batch")


def test_who_goes_on_sooner_does_not_raise_again_for_the_same_failure(ranks: Ranks) -> None:
    """Each step waits until the ranks that it names have done the one before."""

    def body() -> float:
        world, monitor = comm.communicator(), registry.PROCESS.monitor
        assert monitor is not None
        rank = world.rank

        def meet(place: str, count: int = 3) -> None:
            monitor.board.add(f"test/{place}", 1)
            until = time.monotonic() + 20
            while monitor.board.add(f"test/{place}", 0) < count:
                assert time.monotonic() < until, place
                time.sleep(0.01)

        def goes_on() -> None:
            with comm.phase("forward"):
                monitor.read()
                comm.check_peers()  # as every wait does

        if rank == 0:
            fails()
        else:
            raises_for(0)
            goes_on()
        meet("the first failure stands")
        if rank == 1:
            fails()
        elif rank == 2:
            raises_for(1)
        meet("a later failure is named")
        if rank == 0:
            raises_for(1)
        meet("by every rank")
        for first in range(3):
            goes_on()
            meet(f"all go on {first}")
            fails()  # all together: one notice, whoever posts it
            meet(f"all have failed {first}")
            if rank == first:
                goes_on()
            meet(f"one goes on {first}")
        goes_on()
        meet("nothing stands")
        difference = CollectiveMismatchError("the ranks differ")
        if rank == 0:
            monitor.publish(difference, is_cause=True)
            monitor.go_on()  # before the others have read of it
        meet("it has been taken back")
        monitor.read()
        if rank == 1:
            raises_for(0)
        elif rank == 2:  # finds the same by itself
            monitor.publish(difference, is_cause=True)
        meet("everybody has heard of it once")
        goes_on()
        with comm.phase("forward"):
            value = world.all_reduce(torch.ones(1)).wait()
        world.barrier()
        monitor.read()
        assert monitor.failure is None
        assert value is not None
        return value.item()

    assert ranks(3, body) == [3.0, 3.0, 3.0]


def test_check_peers_raises_between_collectives(ranks: Ranks) -> None:
    def body() -> None:
        world = comm.communicator()
        if world.rank == 0:
            with comm.phase("load"):
                raise OSError("disk gone")
        until = time.monotonic() + 5
        while time.monotonic() < until:
            comm.check_peers()
            time.sleep(0.05)

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, grace=6.0)
    assert "rank 0 failed first in load: OSError: disk gone" in str(
        caught.value.outcomes[1].exception
    )


def test_compiling_does_not_count(ranks: Ranks) -> None:
    """A rank that compiles while another waits is waited for, past the bound."""

    def body() -> float:
        world = comm.connect(timeout=1.0, hang_after=0.5)
        if world.rank == 1:
            namespace: dict[str, object] = {}
            source = "import time\ndef convert():\n    time.sleep(3.5)\n"
            exec(compile(source, "/x/torch/_dynamo/convert_frame.py", "exec"), namespace)
            namespace["convert"]()
        value = world.all_reduce(torch.ones(1)).wait()
        comm.disconnect()
        assert value is not None
        return value.item()

    assert ranks(2, body, connected=False) == [2.0, 2.0]


def test_a_finished_run_leaves_no_notice_on_the_store(ranks: Ranks) -> None:
    def body() -> list[bytes]:
        world = comm.connect(hang_after=0.6)
        monitor = registry.PROCESS.monitor
        assert monitor is not None
        if world.rank == 1:
            time.sleep(1.5)
        world.barrier()
        board = monitor.board
        comm.disconnect()
        return [str(slot).encode() for slot in range(1, 5) if board.check([f"slot/{slot}"])]

    assert ranks(2, body, connected=False) == [[], []]


STRANGERS = (
    "no JSON",
    "[]",
    "null",
    "{}",
    '{"kind": 1}',
    '{"kind": "party"}',
    '{"kind": "failed"}',
    '{"kind": "failed", "rank": "1", "by": 1, "phase": null}',
    '{"kind": "ended", "rank": 7}',
    '{"kind": "recovered", "rank": []}',
    '{"kind": "call", "about": "all"}',
    '{"kind": "call", "about": [{}, "x", 99]}',
    '{"kind": "report", "text": {}}',
    '{"kind": "deviation", "rank": 0}',
    "[" * 100_000,
    "\xff\x00",
)


def test_what_a_stranger_writes_on_the_board_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The thread that reads the board answers and hears of failures after it as before."""
    store = dist.HashStore()
    monitor, other = (
        FailureMonitor(store, rank, 2, hang_after=1.0, interval=0.01) for rank in range(2)
    )
    try:
        store.append("roll/1/0/0", "[1, 2]\n")  # beside what rank 1 says when it comes
        monitor.sign_in({})
        for number, text in enumerate(STRANGERS, 1):
            store.set(f"slot/{number}", text.encode("latin-1"))
        store.set(f"answer/{len(STRANGERS) + 1}/1", '{"line": 3}')
        assert set(monitor.roll_call(0.2)) == {0}
        other.sign_in({})
        assert set(monitor.roll_call(5.0, [1])) == {0, 1}
        other.publish(ValueError("no such token"))
        monitor.read()
        with pytest.raises(RankFailedError, match="rank 1 failed first: ValueError: no such token"):
            monitor.check()
        warnings = [record for record in caplog.records if "ignores a notice" in record.message]
        assert len(warnings) == 2  # one of each rank
    finally:
        monitor.stop()
        other.stop()


def body_rank_0_has_raised() -> float:
    world, monitor = comm.communicator(), registry.PROCESS.monitor
    assert monitor is not None
    if world.rank == 0:
        monitor.has_raised = True  # and has handled it: it does not leave in order
    begun = time.monotonic()
    comm.disconnect()
    return time.monotonic() - begun


def test_nobody_waits_at_the_end_for_a_rank_0_that_has_raised(ranks: Ranks) -> None:
    # Far below the seconds for which ranks wait for others there.
    assert max(ranks(2, body_rank_0_has_raised)) < LEAVE_TIMEOUT / 2


def body_calls_on(kind: str) -> None:
    """Rank 1 is gone: the transport of rank 0 says so in a call that it makes, not in a wait."""
    world = comm.communicator()
    send, recv = (
        world.send(torch.ones(1), 1 - world.rank),
        world.recv(torch.ones(1), 1 - world.rank),
    )
    send.wait()
    recv.wait()
    if world.rank == 1:
        raise ValueError("no such token")
    until = time.monotonic() + 10
    while time.monotonic() < until:
        getattr(world, kind)(torch.ones(1), 1)
        time.sleep(0.05)


@pytest.mark.backends("gloo")
@pytest.mark.parametrize("kind", ["send", "recv"])
def test_who_is_gone_when_a_call_is_made_is_named(ranks: Ranks, kind: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(2, body_calls_on, kind)
    error = caught.value.outcomes[0].exception
    assert isinstance(error, RankFailedError) and error.rank == 1, caught.value
    assert "rank 1 failed first" in str(error) and "ValueError: no such token" in str(error)
    assert f"rank 0 was waiting for {kind} #" in str(error)


def body_opens_a_group() -> None:
    world = comm.communicator()
    world.barrier()
    if world.rank == 1:
        raise ValueError("no such token")
    dist.new_group([0, 1])


@pytest.mark.backends("shm")
def test_who_has_ended_before_a_group_is_opened_is_named_by_its_error(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(2, body_opens_a_group)
    error = caught.value.outcomes[0].exception
    assert isinstance(error, RankFailedError) and error.rank == 1, caught.value
    assert "rank 1 failed first" in str(error) and "ValueError: no such token" in str(error)
    assert "rank 0 was waiting for the opening of the group of ranks 0, 1" in str(error)


def test_of_a_long_error_the_end_is_kept() -> None:
    """An error of a data loader's worker has its cause there."""
    error = RuntimeError("Caught in worker process 0.\n" + "a frame\n" * 400 + "KeyError: 'token'")
    text = one_line(error)
    assert text.startswith("RuntimeError: Caught in worker process 0.")
    assert text.endswith("KeyError: 'token'")
    assert len(text) < 700


@pytest.mark.parametrize("waits", [False, True])
def test_a_lost_store_ends_every_rank(ranks: Ranks, waits: bool) -> None:
    """The launcher is gone: ranks that compute and ranks that wait hear of it."""

    def body() -> None:
        import torch.distributed as dist

        port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.environ.update(WORLD_SIZE="1", RANK="0", MASTER_PORT=str(port.port))
        world = comm.connect(timeout=20.0, hang_after=1.0)
        del port
        until = time.monotonic() + 10
        while time.monotonic() < until:
            comm.check_peers()
            if waits:
                world.barrier()
            time.sleep(0.05)

    with pytest.raises(RanksFailed) as caught:
        ranks(1, body, connected=False)
    error = caught.value.outcomes[0].exception
    assert isinstance(error, RankFailedError) and error.rank == -1, caught.value
    assert "the run's store failed first: it cannot be reached" in str(error)
