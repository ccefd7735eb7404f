"""Which backend a group gets: shared memory on one host, Gloo between hosts, or what is asked."""

from __future__ import annotations

import ctypes
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
from meshwright.errors import CommunicationError
from meshwright.testing import Ranks
from support.comm.operations import check_operations
from support.internals.comm import arena, backend, launch, registry


def pretend_host(name: str) -> None:
    """Let this process take itself for one of another host."""
    identity = f"{name}/boot/namespace/0"
    shared_memory.host_identity = backend.host_identity = lambda: identity
    socket.gethostname = lambda: name


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


@pytest.mark.few(3)
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


def test_an_unknown_word_in_the_environment_is_named(ranks: Ranks) -> None:
    def body() -> None:
        for name, text, message in (
            ("MESHWRIGHT_CPU_BACKEND", "shared", "expected gloo or shm, found 'shared'"),
            ("LOCAL_WORLD_SIZE", "two", "expected a number in LOCAL_WORLD_SIZE, found 'two'"),
            ("MESHWRIGHT_CHECK", "true", "expected 0 or 1 in MESHWRIGHT_CHECK, found 'true'"),
        ):
            os.environ[name] = text
            with pytest.raises((ValueError, CommunicationError), match=message):
                comm.connect()
            comm.disconnect()
            os.environ[name] = ""  # as if it were not set
        assert comm.connect().size == 1
        assert registry.PROCESS.checks is None

    ranks(1, body, connected=False)


@pytest.mark.parametrize("stranger", [0, 1])
def test_torch_alone_falls_back_to_gloo_too(ranks: Ranks, stranger: int) -> None:
    """Where the first rank is the one that cannot share memory, and where another is."""

    def body() -> bool:
        if int(os.environ["RANK"]) == stranger:
            backend.unsupported = lambda: "this machine has no shared memory"
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


# ---------------------------------------------------------------------- users and launchers

NOBODY = 65534


def become_nobody(*, dumpable: bool) -> None:
    """Run as an ordinary user from here on; ``dumpable`` as after a login or an ``exec``."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    set_dumpable = 4
    assert ctypes.CDLL(None).prctl(set_dumpable, int(dumpable), 0, 0, 0) == 0


@pytest.mark.parametrize("dumpable", [True, False])
def test_ranks_of_an_ordinary_user(ranks: Ranks, dumpable: bool) -> None:
    """A process into which others of its user may not look gets Gloo, not an error."""

    def body() -> str:
        become_nobody(dumpable=dumpable)
        world = comm.connect()
        check_operations(world)
        return world.backend

    assert ranks(2, body, connected=False) == ["meshwright" if dumpable else "gloo"] * 2


def test_another_user_gets_nothing(ranks: Ranks) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be two users")

    def body() -> str:
        rank = int(os.environ["RANK"])
        if rank == 1:
            become_nobody(dumpable=True)
        world = comm.connect()
        check_operations(world)
        segment = arena.Segment.create("meshwright-test", 4096)
        places: list[tuple[int, int] | None] = [None, None]
        dist.all_gather_object(places, (os.getpid(), segment.descriptor))
        if rank == 1:
            assert places[0] is not None
            with pytest.raises(CommunicationError, match="cannot be opened"):
                arena.Segment.open(*places[0], 4096)
        world.barrier()
        return world.backend

    assert ranks(2, body, connected=False) == ["gloo", "gloo"]


RANK = """
    from meshwright import comm
    from support.comm.operations import check_operations
    world = comm.connect()
    check_operations(world)
    assert world.backend == "meshwright", world.backend
    comm.disconnect()
"""

FORKSERVER = """
import multiprocessing, os

def rank(number, port):
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": str(number)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    %s

if __name__ == "__main__":
    from meshwright.comm import host_store
    store = host_store()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.comm.operations"])
    ranks = [context.Process(target=rank, args=(number, store.port)) for number in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
"""


@pytest.mark.slow
def test_ranks_of_a_forkserver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "start.py"
    script.write_text(FORKSERVER % RANK.strip())
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=180
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_ranks_of_the_elastic_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
    assert launch([sys.executable, str(script)], 2) == 0


# ---------------------------------------------------------------------- two networks

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
    from support.comm.operations import check_operations
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
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
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
