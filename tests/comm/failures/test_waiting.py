"""Waits end by one rule: who works is waited for; who has ended, stands still or has left is named.

The bounds of the rule are shortened on the ranks, to seconds.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright import comm, fully_shard
from meshwright.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    RankFailedError,
)
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.testing import Ending, Ranks, RanksFailed
from support.internals.comm import Notices, membership, waiting, watchdog

ON_BOTH = pytest.mark.parametrize(
    "ranks", ["shm", pytest.param("gloo", marks=pytest.mark.slow)], indirect=True
)
"""On shared memory, and on Gloo among the slow tests."""


def shorten(seconds: float = 2.0) -> None:
    """Let the rule take seconds where it takes a minute."""
    waiting.STILL = watchdog.STILL = waiting.DEADLOCK = seconds
    waiting.CALL_EVERY, waiting.LINE_EVERY = 0.5, 1.0
    watchdog.END_AFTER = membership.LEAVE_TIMEOUT = 1.0


def logged() -> list[str]:
    """What this rank logs from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("meshwright").addHandler(handler)
    return lines


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def loop(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


def hold_the_lock(seconds: float) -> None:
    """One call of C in which no other thread of the process runs."""
    pattern, text, took = re.compile("(a|a)*b"), "a" * 16, 0.0
    while took < seconds / 2:  # each letter doubles the time
        start = time.monotonic()
        pattern.match(text)
        took, text = time.monotonic() - start, text + "a"


def all_reduce(calls: str) -> float:
    tensor = torch.ones(1)
    if calls == "plain":
        dist.all_reduce(tensor)
    else:
        comm.communicator().all_reduce(tensor, label="gradients").wait()
    return tensor.item()


@ON_BOTH
@pytest.mark.parametrize("calls", ["ours", pytest.param("plain", marks=pytest.mark.slow)])
def test_a_rank_that_works_is_waited_for(ranks: Ranks, calls: str) -> None:
    """Twice as long as a rank may do nothing, in each way of doing something."""

    def body() -> list[list[str]]:
        shorten(1.0)
        waiting.PATIENCE = 0.5  # the first roll call ends long before rank 1 has come
        world = comm.connect(hang_after=0.5)
        found = []
        for act in (sleep, loop, hold_the_lock):
            lines = logged()
            if world.rank == 1:
                act(2.0)
            assert all_reduce(calls) == 2
            found.append(lines)
            logging.getLogger("meshwright").handlers.clear()
        comm.disconnect()
        return found

    says = re.compile(
        r"has not ended after \d+ s: rank 1 (has not issued it|is busy|does not answer)"
    )
    acts = ("sleep", "loop", "hold_the_lock")
    for act, lines in zip(acts, ranks(2, body, connected=False)[0], strict=True):
        assert lines, act
        for line in lines:
            assert says.search(line), line
            assert "test_waiting.py" in line or "its process is at work" in line


@pytest.mark.slow
def test_a_rank_that_works_alone_is_waited_for_in_silence(ranks: Ranks) -> None:
    def body() -> list[list[str]]:
        shorten(1.0)
        world = comm.connect(hang_after=0.5)
        found = []
        acts = ((sleep, math.inf), (loop, math.inf), (sleep, 60.0))
        for act, limit in acts:
            lines = logged()
            if world.rank == 1:
                with comm.phase("alone", limit=limit):
                    act(2.0)
            all_reduce("ours")
            found.append(lines)
            logging.getLogger("meshwright").handlers.clear()
        comm.disconnect()
        return found

    *silent, named = ranks(3, body, connected=False)[0]
    # On a busy machine rank 1 may be late after its phase, too, and is named then.
    at_work = "rank 1 has not issued it: it is in alone at"
    assert not any(at_work in line for lines in silent for line in lines)
    assert any(at_work in line for line in named)


@pytest.mark.slow
@ON_BOTH
def test_a_rank_that_stands_still_is_named_without_any_limit(ranks: Ranks) -> None:
    def body() -> None:
        shorten()
        world = comm.connect(hang_after=1.0)
        world.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        world.all_reduce(torch.ones(1)).wait()

    with pytest.raises(RanksFailed) as caught:
        ranks(3, body, connected=False, grace=8.0)
    for rank in (0, 2):
        error = caught.value.outcomes[rank].exception
        assert "rank 1 does not answer" in str(error), caught.value.outcomes[rank].details()
        assert "its process is stopped by a signal" in str(error)
    assert caught.value.outcomes[1].signal == signal.SIGKILL


def test_a_rank_that_was_stopped_for_a_while_goes_on(ranks: Ranks) -> None:
    def body() -> float:
        shorten(4.0)
        world = comm.connect(timeout=20.0, hang_after=1.0)
        for step in range(40):
            if step == 3 and world.rank == 1:
                me = os.getpid()
                waker = f"kill -STOP {me}; sleep 1.5; kill -CONT {me}"
                subprocess.Popen(["sh", "-c", waker])
            time.sleep(0.02)
            total = world.all_reduce(torch.ones(1)).wait()
        comm.disconnect()
        assert total is not None
        return total.item()

    assert ranks(2, body, connected=False) == [2.0, 2.0]


def body_crossed() -> tuple[str, float]:
    """Rank 0 waits on the control channel, and rank 1 on the other, for each other."""
    waiting.CALL_EVERY = 1.0  # and none of the long bounds
    world = comm.communicator()
    world.barrier()
    world.gather_bytes(b"1", label="first")
    begun = time.monotonic()
    cross: Callable[[], object] = partial(world.barrier, label="a parameter was given anew")
    if world.rank == 0:
        cross = partial(world.gather_bytes, b"2", label="second")
    with pytest.raises(CollectiveMismatchError) as caught:
        cross()
    return str(caught.value), time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.backends("gloo")
def test_ranks_that_wait_on_both_channels_of_a_group_are_named_soon(ranks: Ranks) -> None:
    for text, seconds in ranks(2, body_crossed, timeout=50):
        assert "second" in text
        assert "a parameter was given anew" in text
        assert seconds < 20


@pytest.mark.few(1)
@pytest.mark.parametrize("calls", ["ours", "plain"])
def test_ranks_that_wait_for_each_other_are_named(ranks: Ranks, calls: str) -> None:
    """Each waits on a group on which the other never comes."""

    def body() -> None:
        shorten()
        waiting.UNSEEN = 2.0  # of a call of c10d's nothing is known but that it waits
        comm.connect("gloo", hang_after=0.5)
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        mine = first if dist.get_rank() == 0 else second
        if calls == "plain":
            dist.all_reduce(torch.ones(1), group=mine)
        else:
            comm.communicator(first, "first"), comm.communicator(second, "second")
            comm.communicator(mine).all_reduce(torch.ones(1), label="a sum").wait()

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, connected=False, grace=10.0)
    for outcome in caught.value.outcomes:
        text = outcome.details()
        assert "has not ended after" in text
        assert "its process has ended" not in text  # who ended for another was not first
        if calls == "plain":
            assert outcome.failed and outcome.signal is None, text
            assert "all_reduce of torch.distributed, called at" in text
        else:
            assert isinstance(outcome.exception, CollectiveMismatchError), text
            assert "waits for all_reduce" in text


@pytest.mark.slow
@ON_BOTH
def test_a_call_of_c10d_that_cannot_end_ends_its_process_by_name(ranks: Ranks) -> None:
    def body() -> None:
        shorten()
        comm.connect(hang_after=0.5)
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))  # of the user

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, connected=False, grace=8.0)
    survivor = caught.value.outcomes[0]
    text = survivor.details()
    assert survivor.failed and survivor.signal is None, text
    assert "rank 1 does not answer (stopped, killed or cut off)" in text
    assert "test_waiting.py" in text and "in body" in text


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_dies_while_the_groups_are_made_is_named(ranks: Ranks, victim: int) -> None:
    def body() -> None:
        shorten()
        make = dist.init_process_group

        def dies(*args: object, **more: object) -> None:
            if int(os.environ["RANK"]) == victim:
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            make(*args, **more)  # pyrefly: ignore[bad-argument-type]

        dist.init_process_group = dies
        comm.connect()

    with pytest.raises(RanksFailed) as caught:
        ranks(3, body, connected=False, grace=8.0)
    for outcome in caught.value.outcomes:
        if outcome.rank != victim:
            text = str(outcome.exception) + outcome.output
            assert f"rank {victim} failed first: its process has ended" in text, outcome.details()
            assert outcome.exit_code == 1


@pytest.mark.backends("shm", "gloo")
def test_survivors_of_a_killed_rank_end_soon_after_they_name_it(ranks: Ranks) -> None:
    """Leaving does not wait for a rank that is lost: all have ended within the grace."""

    def body() -> None:
        world = comm.connect()
        world.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            world.all_reduce(torch.ones(1)).wait()
        finally:
            comm.disconnect()

    with pytest.raises(RanksFailed) as caught:
        ranks(3, body, connected=False, grace=8.0)
    for outcome in (caught.value.outcomes[0], caught.value.outcomes[2]):
        assert outcome.ending == Ending.RAISED, outcome.details()
        assert re.search(r"rank 1\b.* (failed first|was lost)", str(outcome.exception))


def test_a_callback_of_torch_hides_nobody(ranks: Ranks) -> None:
    """torch's DDP raises a RuntimeError of its own where a wait of the transport has failed."""

    def body() -> None:
        world = comm.connect()
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        for step in range(1000):
            if step == 3 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(2, 4)).sum().backward()

    with pytest.raises(RanksFailed) as caught:
        ranks(3, body, backend="shm", grace=8.0)
    for rank in (0, 2):
        text = caught.value.outcomes[rank].details()
        assert "when running the callback" in text
        assert re.search(r"rank 1 .*(failed first|was lost)", text), text
        assert f"rank {2 - rank} failed first" not in text


@pytest.mark.few(1)
@pytest.mark.parametrize("alike", [False, True])
def test_who_has_raised_is_not_waited_for_at_the_end(ranks: Ranks, alike: bool) -> None:
    """Rank 0 goes on after its error, for which the others have raised, or as they; all leave."""

    def body() -> None:
        membership.LEAVE_TIMEOUT = 600.0
        world = comm.communicator()

        def step() -> None:
            with comm.phase("data"):
                if alike or world.rank == 0:
                    raise ValueError("no such token")
                world.all_reduce(torch.ones(1)).wait()

        with pytest.raises(ValueError if alike or world.rank == 0 else RankFailedError):
            step()

    ranks(3, body, timeout=30.0)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [fully_shard, FullyShardedDataParallel])
def test_uneven_batches_of_evaluation_are_named_within_ten_seconds(
    ranks: Ranks, kind: Callable[[nn.Module], nn.Module]
) -> None:
    """The rank with fewer waits at a barrier, for good."""

    @torch.no_grad()
    def evaluate(model: nn.Module, world: comm.Communicator) -> None:
        for _ in range(3 - world.rank):
            model(torch.ones(2, 4))
        world.barrier()

    def body() -> float:
        world = comm.communicator()
        model = kind(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        model(torch.ones(2, 4)).sum().backward()
        world.barrier()
        start = time.monotonic()
        with pytest.raises(CommunicationError, match="not equally many, evaluate the plain module"):
            evaluate(model.eval(), world)
        return time.monotonic() - start

    assert max(ranks(2, body)) < 10


def own_store(port: int) -> None:
    """Let rank 0 host the store, at ``port``, as without torchrun."""
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT=str(port))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("where", ["in a wait", "between ranks' questions", "at work"])
def test_the_rank_that_hosts_the_store_is_named(
    ranks: Ranks, free_port: int, number: signal.Signals, where: str
) -> None:
    def body() -> None:
        own_store(free_port)
        shorten()
        world = comm.connect(hang_after=1.0)
        model = fully_shard(nn.Linear(4, 4))
        world.barrier()
        if world.rank == 0:
            time.sleep(0.2)
            os.kill(os.getpid(), number)
        if where == "in a wait":
            world.all_reduce(torch.ones(1)).wait()
        elif where == "between ranks' questions":
            model(torch.ones(2, 4))
        until = time.monotonic() + 20
        while time.monotonic() < until:
            comm.check_peers()
            time.sleep(0.01)

    with pytest.raises(RanksFailed) as caught:
        ranks(3, body, connected=False, grace=8.0)
    for outcome in caught.value.outcomes[1:]:
        text = str(outcome.exception)
        assert re.search(
            r"rank 0(, which hosts the store,)? (failed first|does not|\(process)", text
        )
        assert isinstance(outcome.exception, RankFailedError | CollectiveTimeoutError)
        assert "rank 1 failed first" not in text and "rank 2 failed first" not in text


FIRST: dict[str, Callable[[], object]] = {
    "fully_shard": lambda: fully_shard(nn.Linear(2, 2)),
    "connect": comm.connect,
    "communicator": lambda: Notices(comm.communicator(), "topic").read("key"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("first", FIRST)
def test_a_store_whose_host_has_left_is_named_at_once(
    ranks: Ranks, free_port: int, first: str
) -> None:
    """Rank 0 hosts it in a group of torch's, and leaves before another rank joins the run."""

    def body() -> float:
        own_store(free_port)
        dist.init_process_group("gloo", init_method="env://")
        dist.barrier()
        if dist.get_rank() == 0:
            time.sleep(1.0)  # the others have left the barrier
            os._exit(0)
        time.sleep(2.0)
        start = time.monotonic()
        with pytest.raises(RankFailedError, match=r"rank 0's, unless a launcher.* has ended"):
            FIRST[first]()
        return time.monotonic() - start

    with pytest.raises(RanksFailed) as caught:
        ranks(3, body, connected=False, grace=30.0)
    for outcome in caught.value.outcomes[1:]:
        assert outcome.value is not None and outcome.value < 5, outcome


@pytest.mark.slow  # it stands still for a minute
def test_a_host_that_is_stopped_before_ranks_come_is_named(ranks: Ranks, free_port: int) -> None:
    def body() -> None:
        own_store(free_port)
        if os.environ["RANK"] == "0":
            store = comm.host_store(port=free_port)
            assert store.port == free_port
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)
        with pytest.raises(CommunicationError, match="store of rank 0.*does not answer"):
            comm.connect(timeout=0.5)

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, connected=False, grace=30.0)
    assert caught.value.outcomes[1].ending == Ending.RETURNED


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.mark.few(1)
@pytest.mark.parametrize("ends", ["is killed", "goes astray", "leaves"])
def test_a_rank_lost_before_a_first_pass_is_named_soon(ranks: Ranks, ends: str) -> None:
    """Ranks ask each other about a first pass before any collective that would notice."""

    def train(model: nn.Module) -> None:
        model(torch.ones(2, 4)).sum().backward()
        comm.communicator().barrier()

    def body() -> float:
        world = comm.communicator()
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in layers:
            fully_shard(layer)
        model = fully_shard(layers)
        world.barrier()
        start = time.monotonic()
        if world.rank == 1 and ends == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if world.rank == 1 and ends == "leaves":
            return 0.0
        kinds: tuple[type[Exception], ...] = (RankFailedError, CollectiveMismatchError)
        with pytest.raises(kinds):
            train(model[1] if world.rank == 1 else model)
        return time.monotonic() - start

    if ends == "is killed":
        with pytest.raises(RanksFailed) as caught:
            ranks(2, body, grace=8.0)
        took = caught.value.outcomes[0].value
        assert caught.value.outcomes[0].ending == Ending.RETURNED
    else:
        took = ranks(2, body)[0]
    assert took < 10  # there is no limit that ends it


def test_a_rank_that_ends_without_a_word_is_told_at_the_end(ranks: Ranks) -> None:
    def body() -> str:
        world = comm.communicator()
        world.barrier()
        if world.rank == 1:
            os._exit(0)
        time.sleep(1.0)
        with pytest.raises(RankFailedError) as caught:
            comm.disconnect()
        return str(caught.value)

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, grace=8.0)
    outcome = caught.value.outcomes[0]
    assert outcome.ending == Ending.RETURNED
    assert "rank 1 failed first: its process has ended without a word" in str(outcome.value)


@ON_BOTH
def test_the_limits_that_users_give_are_heard(ranks: Ranks) -> None:
    def body() -> tuple[object, ...]:
        given = timedelta(seconds=7)
        is_gloo = os.environ.get("MESHWRIGHT_CPU_BACKEND") == "gloo"
        dist.init_process_group(
            "gloo" if is_gloo else "cpu:meshwright", timeout=timedelta(seconds=9)
        )
        world = comm.connect()
        asked = comm.communicator(dist.new_group([0, 1], timeout=given)).timeout
        default = comm.communicator(dist.new_group([0, 1])).timeout
        inner = comm.subgroup(world, [(0,), (1,)], "inner").timeout
        group = dist.new_group([0, 1], timeout=timedelta(seconds=1.5))
        start = time.monotonic()
        message = ""
        if world.rank == 0:
            with pytest.raises(CollectiveTimeoutError) as caught:
                comm.communicator(group, "short").all_reduce(torch.ones(1)).wait()
            message = str(caught.value)
            assert time.monotonic() - start < 8
        else:
            time.sleep(4)
        return world.timeout, asked, default, inner, message

    found = ranks(2, body, connected=False)
    assert found[0][:4] == (9.0, 7.0, None, 9.0)
    assert "rank 1 has not issued it: it is at " in str(found[0][4])


def test_without_a_limit_there_is_none(ranks: Ranks) -> None:
    def body() -> tuple[float | None, float | None]:
        world = comm.communicator()
        return world.timeout, comm.subgroup(world, [(0,), (1,)], "inner").timeout

    assert ranks(2, body) == [(None, None)] * 2


def test_an_error_handled_by_leaving_is_told_to_the_others(ranks: Ranks, tmp_path: Path) -> None:
    """As in ``finally: disconnect()``, before the hook for exceptions can see it."""

    def body() -> None:
        world = comm.communicator()
        if world.rank == 1:
            try:
                raise ValueError("no such token")
            finally:
                comm.disconnect()
        world.all_reduce(torch.ones(1)).wait()

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, grace=8.0)
    text = str(caught.value.outcomes[0].exception)
    assert "rank 1 failed first: ValueError: no such token" in text


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_error_behind_the_last_operation_is_told_to_ranks_that_are_done(
    ranks: Ranks, victim: int
) -> None:
    """It comes to the end of the run as the others do, who would take that for a good one."""

    def body() -> None:
        world = comm.communicator()
        world.all_reduce(torch.ones(1)).wait()
        try:
            if world.rank == victim:
                time.sleep(0.5)
                raise ValueError("no room to save")
        finally:
            comm.disconnect()

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, grace=8.0)
    text = str(caught.value.outcomes[1 - victim].exception)
    assert f"rank {victim} failed first, after all_reduce #0: ValueError: no room to save" in text
