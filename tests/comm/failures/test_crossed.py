"""Ranks that wait crosswise all end within ten seconds; a rank that works is waited for.

No bound of the rule is shortened here: the times are those of users.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright import comm
from meshwright.errors import CommunicationError
from meshwright.pipelining import PipelineStage, ScheduleGPipe
from meshwright.testing import Ranks

BOUND = 10.0
"""Seconds within which all ranks of a crossed wait raise."""


def reduce(axis: comm.Communicator, label: str = "a sum") -> None:
    axis.all_reduce(torch.ones(2, device=axis.device), label=label).wait()


def receive(axis: comm.Communicator, source: int) -> None:
    axis.recv(torch.ones(2, device=axis.device), source, label="a message").wait()


def two_axes() -> tuple[comm.Communicator, comm.Communicator]:
    first, second = (comm.communicator(dist.new_group(), name) for name in ("first", "second"))
    return first, second


def another_operation() -> None:
    world = comm.communicator()
    if world.rank:
        world.barrier()
    else:
        reduce(world)


def another_channel() -> None:
    """One rank waits for control data of the group, the other for a tensor."""
    world = comm.communicator()
    world.gather_bytes(b"1", label="before")
    if world.rank:
        reduce(world)
    else:
        world.gather_bytes(b"2", label="settings")


def two_groups() -> None:
    """Neither group has been used before."""
    first, second = two_axes()
    reduce(second if first.rank else first)


def two_groups_in_use() -> None:
    first, second = two_axes()
    reduce(first), reduce(second)
    reduce(second if first.rank else first)


def three_groups_in_a_circle() -> None:
    """Each rank waits on the group of it and the next, of three."""
    world = comm.communicator()
    groups = [dist.new_group(sorted((rank, (rank + 1) % 3))) for rank in range(3)]
    reduce(comm.communicator(groups[world.rank], "pair"))


def collective_against_message() -> None:
    world = comm.communicator()
    if world.rank:
        receive(world, 0)
    else:
        reduce(world)


def both_receive() -> None:
    world = comm.communicator()
    receive(world, 1 - world.rank)


def messages_in_a_circle() -> None:
    """Each of three ranks waits for a message of the next."""
    world = comm.communicator()
    receive(world, (world.rank + 1) % 3)


def pipeline_against_collective() -> None:
    """The first stage waits for gradients of the second, whose rank has left the loop."""
    world = comm.communicator()
    stage = PipelineStage(nn.Linear(2, 2), world.rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    for _ in range(2 - world.rank):
        if world.rank:
            schedule.step(target=torch.ones(4, 2))
        else:
            schedule.step(torch.ones(4, 2))
    world.barrier()


CROSSED: dict[str, tuple[int, Callable[[], None]]] = {
    "another operation": (2, another_operation),
    "another channel": (2, another_channel),
    "two groups": (2, two_groups),
    "two groups in use": (2, two_groups_in_use),
    "three groups in a circle": (3, three_groups_in_a_circle),
    "a collective against a message": (2, collective_against_message),
    "both receive": (2, both_receive),
    "messages in a circle": (3, messages_in_a_circle),
    "a pipeline against a collective": (2, pipeline_against_collective),
}


def body_of(cross: Callable[[], None]) -> tuple[str, str, float]:
    comm.communicator().barrier()
    start = time.monotonic()
    try:
        cross()
    except CommunicationError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", 0.0


@pytest.mark.few(1, slow=17)
@pytest.mark.parametrize("kind", CROSSED)
@pytest.mark.backends("shm", "gloo")
def test_ranks_that_wait_crosswise_all_end_within_ten_seconds(ranks: Ranks, kind: str) -> None:
    size, cross = CROSSED[kind]
    for name, text, seconds in ranks(size, body_of, cross, timeout=100.0):
        assert name == "CollectiveMismatchError", text
        assert seconds < BOUND, (seconds, text)


def body_of_a_chain() -> float:
    """Rank 0 waits for rank 1, which waits for rank 2, which works for longer than the bound."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    world = comm.communicator()
    axes = [
        comm.communicator(g, "pair") if world.rank in pair else world
        for g, pair in zip(groups, ((0, 1), (1, 2)), strict=True)
    ]
    start = time.monotonic()
    if world.rank == 2:
        time.sleep(BOUND + 2)
    if world.rank > 0:
        reduce(axes[1])
    if world.rank < 2:
        reduce(axes[0])
    return time.monotonic() - start


def body_of_threads() -> float:
    """Both main threads wait for each other, until a second thread of rank 0 has come."""
    first, second = two_axes()

    def reduces_twice() -> None:
        reduce(second)
        time.sleep(BOUND + 2)
        reduce(second)

    start = time.monotonic()
    if first.rank == 0:
        beside = threading.Thread(target=reduces_twice)
        beside.start()
        reduce(first)
        beside.join()
    else:
        reduce(second)
        reduce(second)
        reduce(first)
    return time.monotonic() - start


WORKING: dict[str, tuple[int, Callable[[], float]]] = {
    "a chain of waits": (3, body_of_a_chain),
    "a second thread": (2, body_of_threads),
}


@pytest.mark.few(0, slow=4)
@pytest.mark.parametrize("kind", WORKING)
@pytest.mark.backends("shm", "gloo")
def test_ranks_that_wait_for_one_that_works_go_on(ranks: Ranks, kind: str) -> None:
    size, body = WORKING[kind]
    for seconds in ranks(size, body, timeout=100.0):
        assert seconds >= BOUND
