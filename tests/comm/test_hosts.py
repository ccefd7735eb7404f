"""Which backend a group gets: shared memory on one host, Gloo between hosts, or what is asked."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshwright import comm
from meshwright.comm import shared_memory
from meshwright.comm.shared_memory import arena, joining
from meshwright.testing import Ranks


def pretend_host(name: str) -> None:
    """Let this process take itself for one of another host."""
    identity = f"{name}/boot/namespace/0"
    shared_memory.host_identity = joining.host_identity = lambda: identity
    socket.gethostname = lambda: name


def check_operations(world: comm.Communicator) -> None:
    """Every kind of operation through ``world``, whatever moves it."""
    rank, size = world.rank, world.size
    mine = torch.arange(40_000.0) + rank
    expected = torch.arange(40_000.0) * size + size * (size - 1) / 2
    assert torch.equal(world.all_reduce(mine.clone()).wait(), expected)
    share = torch.empty(40_000 // size)
    world.reduce_scatter(share, mine).wait()
    gathered = torch.empty(40_000)
    world.all_gather(gathered, share).wait()
    assert torch.equal(gathered, expected)
    received = torch.empty(3)
    receive = world.recv(received, (rank - 1) % size)
    world.send(torch.full((3,), float(rank)), (rank + 1) % size).wait()
    receive.wait()
    assert received.tolist() == [(rank - 1) % size] * 3
    world.barrier()


def test_groups_within_a_host_share_memory_and_others_do_not(ranks: Ranks) -> None:
    def body() -> list[str]:
        rank = int(os.environ["RANK"])
        pretend_host(f"host{rank // 2}")
        world = comm.connect()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        groups = [
            world,
            comm.communicator(mesh.get_group("replicate")),
            comm.communicator(mesh.get_group("shard")),
            comm.subgroup(world, [(0, 1), (2, 3)], "inner"),
        ]
        for group in groups:
            check_operations(group)
            shared = group.empty_shared(100, torch.float32).fill_(1)
            assert group.all_reduce(shared).wait().sum() == 100 * group.size
        gathered: list[object] = [None] * 4
        dist.all_gather_object(gathered, rank)
        assert gathered == [0, 1, 2, 3]
        return [group.backend for group in groups]

    expected = ["gloo", "gloo", "meshwright", "meshwright"]
    assert ranks(4, body, connected=False) == [expected] * 4


@pytest.mark.parametrize(
    ("asked", "variable", "place", "expected"),
    [
        (None, None, "together", "meshwright"),
        ("gloo", None, "together", "gloo"),
        (None, "gloo", "together", "gloo"),
        ("shm", "gloo", "together", "meshwright"),
        (None, None, "apart", "gloo"),
        ("shm", None, "apart", "gloo"),
        ("shm", None, "arm", "gloo"),
        (None, None, "arm", "gloo"),
    ],
)
def test_what_the_world_gets(
    ranks: Ranks, asked: str | None, variable: str | None, place: str, expected: str
) -> None:
    def body() -> tuple[str, list[str]]:
        rank, said = int(os.environ["RANK"]), list[str]()
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("meshwright").addHandler(handler)
        os.environ.pop("MESHWRIGHT_CPU_BACKEND", None)
        if variable is not None:
            os.environ["MESHWRIGHT_CPU_BACKEND"] = variable
        if place == "apart":
            pretend_host(f"host{rank}")
        if place == "arm" and rank == 1:
            arena.platform.machine = lambda: "aarch64"
        return comm.connect(asked).backend, said

    found = ranks(2, body, connected=False)
    assert [backend for backend, _ in found] == [expected] * 2
    warned = found[0][1]
    assert bool(warned) == (asked == "shm" and expected == "gloo")
    if warned and place == "arm":
        assert "store order of x86-64, and this is aarch64: the ranks communicate" in warned[0]


def test_an_unknown_name_in_the_environment_is_named(ranks: Ranks) -> None:
    def body() -> None:
        os.environ["MESHWRIGHT_CPU_BACKEND"] = "shared"
        with pytest.raises(ValueError, match="expected gloo or shm, found 'shared'"):
            comm.connect()

    ranks(1, body, connected=False)


@pytest.mark.parametrize("stranger", [0, 1])
def test_torch_alone_falls_back_to_gloo_too(ranks: Ranks, stranger: int) -> None:
    """Where the first rank is the one that cannot share memory, and where another is."""

    def body() -> bool:
        shared_memory.register()
        if int(os.environ["RANK"]) == stranger:
            joining.unsupported = lambda: "this machine has no shared memory"
        dist.init_process_group("cpu:meshwright")
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [3.0] * 3
        dist.barrier()
        pair = dist.new_group([0, 1])
        apart = dist.new_group([1, 2] if stranger == 0 else [0, 2])
        assert isinstance(pair, shared_memory.SharedMemoryGroup) is False
        dist.destroy_process_group()
        return isinstance(apart, shared_memory.SharedMemoryGroup)

    assert any(ranks(3, body, connected=False))


HOSTS = ("meshwright-a", "meshwright-b")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, ...]]:
    """Two network namespaces joined by a cable, which is what tells two machines apart."""
    names = tuple(f"{host}-{os.getpid()}" for host in HOSTS)
    cable = [f"mw{side}{os.getpid()}"[-15:] for side in "ab"]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for index, (name, end) in enumerate(zip(names, cable, strict=True)):
            inside = ("ip", "netns", "exec", name, "ip")
            _run("ip", "link", "set", end, "netns", name)
            _run(*inside, "addr", "add", f"10.213.7.{index + 1}/24", "dev", end)
            _run(*inside, "link", "set", end, "up")
            _run(*inside, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        _remove(names)
        pytest.skip(f"this machine allows no network namespaces: {error}")
    yield (*names, *cable)
    _remove(names)


def _remove(names: tuple[str, ...]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


RANK_OF_TWO_HOSTS = """
    import socket, torch
    from comm.test_hosts import check_operations
    from meshwright import comm
    world = comm.connect(timeout=30.0)
    row = comm.subgroup(world, [(0, 1), (2, 3)], "inner")
    column = comm.subgroup(world, [(0, 2), (1, 3)], "outer")
    for group in (world, row, column):
        check_operations(group)
    comm.disconnect()
    print(world.backend, row.backend, column.backend)
"""


@pytest.mark.slow
def test_two_hosts_with_networks_of_their_own(two_hosts: tuple[str, ...]) -> None:
    running = []
    for rank in range(4):
        host = rank // 2
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank % 2),
            "MASTER_ADDR": "10.213.7.1",
            "MASTER_PORT": "29713",
            "GLOO_SOCKET_IFNAME": two_hosts[2 + host],
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
        }
        program = (
            f"import ctypes, socket\nassert ctypes.CDLL(None).unshare({0x04000000}) == 0\n"
            f"socket.sethostname({HOSTS[host]!r})\n"
        )
        command = [sys.executable, "-c", program + textwrap.dedent(RANK_OF_TWO_HOSTS)]
        running.append(
            subprocess.Popen(
                ["ip", "netns", "exec", two_hosts[host], *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=180) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (output, errors) in zip(running, said, strict=True):
        assert process.returncode == 0, errors
        assert output.split() == ["gloo", "meshwright", "gloo"]
