"""Joining, sub-groups, the registry, and leaving."""

from __future__ import annotations

import gc
import logging
import os
import socket
import time

import pytest
import torch

from meshwright import comm
from meshwright.errors import CommunicationError, LayoutError
from meshwright.testing import Ranks
from support.comm.teardown import STRATEGIES, run_once


def test_one_communicator_for_a_group(ranks: Ranks) -> None:
    def body() -> None:
        import torch.distributed as dist

        world = comm.communicator()
        assert comm.communicator() is world
        assert comm.communicator(dist.group.WORLD) is world
        assert (world.size, world.ranks, world.axis) == (4, (0, 1, 2, 3), "world")
        assert world.backend in repr(world)
        shard = comm.communicator(axis="shard")
        assert shard == world and hash(shard) == hash(world) and shard.axis == "shard"
        assert shard != comm.subgroup(world, [(0, 1), (2, 3)], "shard")

    ranks(4, body)


@pytest.mark.backends("shm", "gloo")
def test_subgroups_count_their_own_operations(ranks: Ranks) -> None:
    def body() -> tuple[tuple[int, ...], float, tuple[int, ...], float]:
        world = comm.communicator()
        rows = comm.subgroup(world, [(0, 1), (2, 3)], "shard")
        columns = comm.subgroup(world, [(0, 2), (1, 3)], "replicate")
        along = rows.all_reduce(torch.tensor([float(world.rank)])).wait().item()
        across = columns.all_reduce(torch.tensor([float(world.rank)])).wait().item()
        assert rows.issued[-1].sequence == columns.issued[-1].sequence == 0
        assert comm.subgroup(world, [(0, 1), (2, 3)], "shard") is rows
        same = comm.subgroup(world, [(0, 1, 2, 3)], "replicate")
        assert same == world and same.group is world.group
        assert (same.axis, world.axis) == ("replicate", "world")
        assert same.counts is world.counts
        assert rows.ranks[rows.rank] == world.rank
        return rows.ranks, along, columns.ranks, across

    assert ranks(4, body) == [
        ((0, 1), 1.0, (0, 2), 2.0),
        ((0, 1), 1.0, (1, 3), 4.0),
        ((2, 3), 5.0, (0, 2), 2.0),
        ((2, 3), 5.0, (1, 3), 4.0),
    ]


def test_subgroups_that_do_not_split_the_ranks_are_refused(ranks: Ranks) -> None:
    def body() -> None:
        world = comm.communicator()
        with pytest.raises(LayoutError, match=r"expected groups that hold each of the ranks"):
            comm.subgroup(world, [(0,), (0, 1)], "shard")

    ranks(2, body)


def test_a_default_group_of_torch_is_used_as_it_is(ranks: Ranks) -> None:
    def body() -> tuple[float, list[str]]:
        import torch.distributed as dist

        told: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())
        logging.getLogger("meshwright").addHandler(handler)
        logging.getLogger("meshwright").setLevel(logging.INFO)
        dist.init_process_group("gloo")
        value = comm.communicator().all_reduce(torch.ones(1)).wait().item()
        world = comm.connect()
        assert comm.communicator() is world
        comm.disconnect()
        assert not dist.is_initialized() and not comm.is_connected()
        return value, told

    (first, told), (second, silent) = ranks(2, body, connected=False)
    assert first == second == 2.0
    assert silent == []
    (line,) = told
    assert line.endswith("used as it is: 2 ranks, backend gloo, on cpu")


@pytest.mark.few(3)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("agent", [True, False])
def test_connect_again_after_disconnect(ranks: Ranks, *, agent: bool, last: int) -> None:
    """On the store of an agent, and on that of rank 0, twice in each of two attempts."""

    def body(port: int) -> None:
        import torch.distributed as dist

        if not agent:
            os.environ.update(TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT=str(port))
        for run in range(4):
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(run // 2)
            world = comm.connect(timeout=20.0)
            assert world.all_reduce(torch.ones(1)).wait().item() == 2
            comm.disconnect()
            comm.disconnect()
            gc.collect()
            assert not dist.is_initialized()
            if world.rank == last:
                time.sleep(0.3)
        with pytest.raises(CommunicationError, match="this process has joined no run"):
            comm.communicator()

    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    ranks(2, body, port, connected=False)


def test_a_process_alone_is_a_world_of_one(ranks: Ranks) -> None:
    def body() -> None:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name)
        world = comm.connect()
        assert (world.rank, world.size) == (0, 1)
        assert world.all_reduce(torch.ones(1)).wait().item() == 1
        comm.disconnect()

    ranks(1, body, connected=False)


def test_half_an_environment_is_named(ranks: Ranks) -> None:
    def body() -> None:
        os.environ.pop("WORLD_SIZE")
        with pytest.raises(CommunicationError, match="start the ranks with torchrun"):
            comm.connect()

    ranks(1, body, connected=False)


def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    def body() -> str:
        if os.environ["RANK"] == "1":
            time.sleep(2)
            return ""
        with pytest.raises(CommunicationError) as caught:
            comm.connect(timeout=1.0)
        return str(caught.value)

    found = ranks(2, body, connected=False)
    assert found[0] == (
        "rank 0 waited 1 s for 2 ranks: rank 1 did not come: start as many processes as "
        "WORLD_SIZE says, each with a RANK of its own, all with one MASTER_ADDR and MASTER_PORT"
    )


def test_ranks_that_were_told_different_numbers_of_ranks_are_named(ranks: Ranks) -> None:
    def body() -> str:
        if os.environ["RANK"] == "1":
            os.environ["WORLD_SIZE"] = "3"
            time.sleep(0.5)  # rank 0 waits by then
        with pytest.raises(CommunicationError) as caught:
            comm.connect(timeout=20.0)
        return str(caught.value)

    told = "expected one WORLD_SIZE on all ranks, found 2 on rank 0 and 3 on rank 1: start"
    first, second = ranks(2, body, connected=False)
    assert first.startswith("rank 1 failed first") and told in first
    assert second.startswith(told)


def test_two_processes_with_one_rank_are_refused(ranks: Ranks) -> None:
    def body() -> str:
        os.environ["RANK"] = "0"
        try:
            comm.connect(timeout=1.0)
        except CommunicationError as error:
            return str(error)
        return ""

    assert any(
        "two processes have the same RANK" in text for text in ranks(2, body, connected=False)
    )


def test_a_taken_port_is_named(ranks: Ranks) -> None:
    def body(port: int) -> str:
        os.environ["MASTER_PORT"] = str(port)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        with pytest.raises(CommunicationError) as caught:
            comm.connect(timeout=2.0)
        return str(caught.value)

    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        (message,) = ranks(1, body, port, connected=False)
    assert message.startswith(f"rank 0 of 1 cannot listen on 127.0.0.1:{port}: ")
    assert "\n" not in message and "MASTER_PORT to a free port there" in message


@pytest.mark.slow
@pytest.mark.parametrize("leave", ["comm.disconnect()", ""])
def test_fresh_interpreters_leave_with_status_0(leave: str) -> None:
    """Gloo has been seen to abort at exit; a process whose work is done must end well."""
    assert run_once(leave) == [(0, "")] * 2


@pytest.mark.few(0, slow=1)
@pytest.mark.parametrize("leave", ["comm.disconnect()", ""])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_many_teardowns_in_a_row(strategy: str, backend: str, leave: str) -> None:
    for _ in range(3):
        assert run_once(leave, strategy, backend) == [(0, "")] * 2


@pytest.mark.backends("shm", "gloo")
def test_only_some_ranks_make_groups(ranks: Ranks) -> None:
    """Rank 0 makes three, rank 1 two, rank 2 two others, rank 3 one; each by its own ranks."""

    def body() -> dict[str, float]:
        world, found = comm.communicator(), {}
        chosen = {"alone": (0,), "pair": (1, 0), "last": (2, 3), "ends": (0, 2), "solo": (1,)}
        for axis, members in chosen.items():
            if world.rank in members:
                axis_of = comm.peers(world, members, axis)
                assert axis_of.ranks == tuple(sorted(members))
                found[axis] = axis_of.all_reduce(torch.tensor(float(world.rank))).wait().item()
        return found

    assert ranks(4, body) == [
        {"alone": 0.0, "pair": 1.0, "ends": 2.0},
        {"pair": 1.0, "solo": 1.0},
        {"last": 5.0, "ends": 2.0},
        {"last": 5.0},
    ]


@pytest.mark.backends("shm", "gloo")
def test_groups_are_made_again_under_other_names(ranks: Ranks) -> None:
    """After one was destroyed, and after the ranks have left their run and met again."""

    def body() -> list[str]:
        import torch.distributed as dist

        names = []
        for attempt in range(2):
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
            world = comm.connect()
            if world.rank == 0:
                comm.peers(world, [0], "alone")
            for _ in range(2):
                pair = comm.subgroup(world, [(1, 0), (2,)], "pair")
                pair.all_reduce(torch.ones(1)).wait()
                names.append(pair.name)
                world.barrier()  # no rank closes what another still reads
                dist.destroy_process_group(pair.group)
            comm.disconnect()
        return names

    first, second, alone = ranks(3, body, connected=False)
    assert first == second == [*first[:2], *first[:2]]
    assert len({*first, *alone}) == 4
