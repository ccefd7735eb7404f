"""Backend and devices follow from what all ranks say, alike on all of them."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import CommunicationError
from meshwright.testing import Ranks
from support.internals.comm import choose, device_of, own_entry, require_own_devices

NCCL = "cpu:gloo,cuda:nccl"
SHM = "cpu:meshwright"


def rank(
    host: str, devices: str, local: int | None = None, asked: str = "", **more: Any
) -> dict[str, Any]:
    """A rank's entry; each letter of ``devices`` is a GPU that it sees."""
    return {
        "host": host,
        "place": host,
        "unsupported": "",
        "asked": asked,
        "variable": "",
        "local": local,
        "devices": list(devices),
        "chosen": None,
        "nccl": True,
        **more,
    }


def world(hosts: dict[str, tuple[int, str]], asked: str = "") -> list[dict[str, Any]]:
    """Ranks that torchrun has started: so many on each host, which all see its GPUs."""
    return [
        rank(host, devices, local, asked)
        for host, (count, devices) in hosts.items()
        for local in range(count)
    ]


class Row(NamedTuple):
    name: str
    roll: list[dict[str, Any]]
    backend: str
    devices: list[int | None]
    says: str = ""
    """Words of the warning; none where it is empty."""


CPUS = [None, None]
TABLE = [
    Row("a GPU for each", world({"a": (4, "pqrs")}), NCCL, [0, 1, 2, 3]),
    Row("two nodes", world({"a": (2, "pq"), "b": (2, "rs")}), NCCL, [0, 1, 0, 1]),
    Row("more GPUs than ranks", world({"a": (2, "pqrs")}), NCCL, [0, 1]),
    Row("one rank on a node of four", [rank("a", "pqrs")], NCCL, [0]),
    Row("no GPU", world({"a": (2, "")}), SHM, CPUS),
    Row("gloo on a machine with GPUs", world({"a": (2, "pq")}, "gloo"), "gloo", CPUS, "'gloo' was"),
    Row("shm on a machine with GPUs", world({"a": (2, "pq")}, "shm"), SHM, CPUS, "'shm' was asked"),
    Row("shm where there is no GPU", world({"a": (2, "")}, "shm"), SHM, CPUS),
    Row("gloo by name for GPUs", world({"a": (2, "p")}, "cpu:gloo,cuda:gloo"), "=", [0, 0]),
    Row("gloo by name for CPUs", world({"a": (2, "p")}, "cpu:gloo"), "=", CPUS),
    Row("nccl by name", world({"a": (2, "pq")}, "nccl"), "=", [0, 1]),
    Row("one visible GPU a rank", [rank("a", d, n) for n, d in enumerate("pqrs")], NCCL, [0] * 4),
    Row("one visible GPU, no LOCAL_RANK", [rank("a", d) for d in "pq"], NCCL, [0, 0]),
    Row("no LOCAL_RANK", [rank("a", "pq"), rank("b", "rs"), rank("a", "pq")], NCCL, [0, 0, 1]),
    Row("the user has chosen", [rank("a", "pq", 0, chosen=1), rank("b", "r", 0)], NCCL, [1, 0]),
    Row(
        "a node without GPUs",
        world({"a": (1, "p"), "b": (1, "")}),
        "gloo",
        CPUS,
        "rank 1 (host b) sees no GPU, and rank 0 sees 1 GPU",
    ),
    Row(
        "a node with too few",
        world({"a": (2, "pq"), "b": (2, "r")}),
        SHM,
        [None] * 4,
        "ranks 2 and 3 on the same GPU (host b, number 0 of the 1 that rank 3 sees)",
    ),
    Row(
        "the same GPU in two containers",
        [rank("a", "p", 0), rank("b", "p", 0)],
        "gloo",
        CPUS,
        "ranks 0 and 1 on the same GPU",
    ),
    Row(
        "a torch without NCCL",
        [rank("a", "pq", 0), rank("a", "pq", 1, nccl=False)],
        SHM,
        CPUS,
        "torch has no NCCL on rank 1, and rank 0 sees 2 GPUs",
    ),
]


@pytest.mark.parametrize("row", TABLE, ids=[row.name for row in TABLE])
def test_what_the_world_gets(row: Row) -> None:
    choice = choose(row.roll)
    expected = row.roll[0]["asked"] if row.backend == "=" else row.backend
    assert (choice.backend, list(choice.devices)) == (expected, row.devices)
    assert choice.is_bound == ("nccl" in choice.backend)
    warnings = [text for level, text in choice.notes if level == logging.WARNING]
    assert len(warnings) == bool(row.says)
    assert all(row.says in text and "without NCCL" in text for text in warnings)


@pytest.mark.parametrize(
    ("roll", "says"),
    [
        (world({"a": (2, "")}, "nccl"), r"'nccl' was asked for, .*found none on rank 0 \(host a\)"),
        (world({"a": (2, "p")}, NCCL), r"found ranks 0 and 1 on the same GPU \(host a, number 0"),
        (
            [*world({"a": (1, "p")}, "cpu:gloo,cuda:gloo"), rank("b", "", 0, "cpu:gloo,cuda:gloo")],
            r"found none on rank 1 \(host b\)",
        ),
        (
            [rank("a", "", 0, "gloo"), rank("a", "", 1)],
            r"the same on every rank, found 'gloo' on rank 0 and '' on rank 1",
        ),
        (
            [rank("a", "", 0), rank("b", "", 0, variable="gloo")],
            r"MESHWRIGHT_CPU_BACKEND to be the same on every rank, found '' on rank 0 and 'gloo'",
        ),
    ],
)
def test_what_cannot_be_is_refused_alike_on_all_ranks(
    roll: list[dict[str, Any]], says: str
) -> None:
    with pytest.raises(CommunicationError, match=says):
        choose(roll)


def test_ranks_of_the_users_own_group_on_one_gpu_are_named() -> None:
    chosen = [rank("a", "pq", n, chosen=n) for n in range(2)]
    require_own_devices(chosen)
    with pytest.raises(CommunicationError, match="ranks 0 and 1 on the same GPU.*set_device"):
        require_own_devices([{**entry, "chosen": 0} for entry in chosen])


class Gpus:
    """Stands for `torch.cuda` in a process that sees ``count`` GPUs."""

    def __init__(self, count: int, current: int = 0, *, is_initialized: bool = False) -> None:
        self.count, self.current, self.begun = count, current, is_initialized

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("is_available", "device_count", "is_initialized", "current_device"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        for name in ("set_device", "get_device_properties"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def is_initialized(self) -> bool:
        return self.begun

    def current_device(self) -> int:
        self.begun = True
        return self.current

    def set_device(self, device: int) -> None:
        self.begun, self.current = True, device

    def get_device_properties(self, index: int) -> Any:
        self.begun = True

        class Properties:
            uuid = f"GPU-{index}"

        return Properties


def test_ranks_of_cpus_do_not_begin_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(2)
    gpus.install(monkeypatch)
    assert own_entry("gloo")["devices"] == ["", ""]
    assert not gpus.begun
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    both = own_entry(None)["devices"]
    assert len({*both}) == 2 and all(both)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_entry(None)["devices"] == ["", both[1]]


@pytest.mark.parametrize("hosts", ["ab", "aa"])
def test_ranks_share_a_gpu_where_nccl_takes_them_for_ranks_of_two_hosts(
    monkeypatch: pytest.MonkeyPatch, hosts: str
) -> None:
    Gpus(1).install(monkeypatch)
    roll = []
    for number, host in enumerate(hosts):
        monkeypatch.setenv("LOCAL_RANK", str(number))
        monkeypatch.setenv("NCCL_HOSTID", host)
        roll.append({**own_entry(None), "nccl": True})
    assert (choose(roll).backend == NCCL) == (hosts == "ab")


@pytest.mark.parametrize(
    ("backend", "gpus", "bound", "expected"),
    [
        ("gloo", Gpus(2), None, "cpu"),
        ("cpu:gloo,cuda:gloo", Gpus(2), None, "cuda:1"),
        ("cpu:gloo,cuda:gloo", Gpus(4, 3, is_initialized=True), None, "cuda:3"),
        ("cpu:gloo,cuda:gloo", Gpus(1), None, "cuda:0"),
        ("cpu:gloo,cuda:gloo", Gpus(2), 0, "cuda:0"),
        ("cpu:gloo,cuda:gloo", Gpus(0), None, "cpu"),
    ],
)
def test_the_device_of_a_default_group_of_the_users_own(
    ranks: Ranks, backend: str, gpus: Gpus, bound: int | None, expected: str
) -> None:
    """The second rank of a host, whose process sees so many GPUs."""

    def body() -> str:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("LOCAL_RANK", "1")
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            gpus.install(monkeypatch)
            group = dist.distributed_c10d._get_default_group()
            if bound is not None:
                group.bound_device_id = torch.device("cuda", bound)
            found = device_of(group, group)
            group.bound_device_id = None
            dist.destroy_process_group()
            return str(found)

    assert ranks(1, body, connected=False) == [expected]
