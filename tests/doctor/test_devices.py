"""Findings about invented machines: their GPUs, drivers, slices and networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch

from meshwright.comm import communicator
from meshwright.doctor import Finding, examine
from meshwright.testing import Ranks
from support.internals.doctor import (
    Gpu,
    Interface,
    Machine,
    devices,
    findings_of_gpus,
    gloo_interface,
    medians_on_device,
    nccl_interface,
    way_out,
)

GIB = 2**30


@dataclass
class Invented(Machine):
    """A machine that says what it was made with."""

    count: int = 0
    name: str = "NVIDIA H100"
    build: str = "13.0"
    version: str = "2.28.9"
    loaded: str = "580.95.05"
    there: int = 0
    free: int = 79 * GIB
    apart: frozenset[tuple[int, int]] = frozenset()
    network: tuple[Interface, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> Mapping[str, str]:
        return self.variables

    def cuda_build(self) -> str:
        return self.build

    def nccl(self) -> str:
        return self.version

    def driver(self) -> str:
        return self.loaded

    def installed(self) -> int:
        return self.there or self.count

    def gpus(self) -> list[Gpu]:
        return [
            Gpu(name=self.name, uuid=f"GPU-{index}", total=80 * GIB, free=self.free)
            for index in range(self.count)
        ]

    def reaches(self, first: int, second: int) -> bool:
        return (first, second) not in self.apart

    def interfaces(self) -> list[Interface]:
        return list(self.network)

    def own_address(self) -> str:
        return "10.0.0.7"


def found(machine: Machine) -> dict[str, Finding]:
    findings = {finding.name: finding for finding in devices(machine)}
    for finding in findings.values():
        assert bool(finding.problem) == bool(finding.remedy), finding
        assert not finding.is_broken
    return findings


def test_one_gpu() -> None:
    findings = found(Invented(count=1))
    assert findings["devices"].value == "cpu, 1 x cuda: 1 x NVIDIA H100"
    assert findings["backends"].value.endswith("nccl 2.28.9")
    assert findings["driver"].value == "580.95.05, torch is built with CUDA 13.0"
    assert findings["cuda:0"].value == "NVIDIA H100, 79.0 of 80.0 GiB free"
    assert findings["ranks"].value == "1, one for each GPU, by NCCL"
    assert "peer access" not in findings
    assert not any(finding.problem for finding in findings.values())


def test_eight_gpus_of_which_one_pair_is_apart() -> None:
    findings = found(Invented(count=8, apart=frozenset({(2, 5), (5, 2)})))
    assert findings["ranks"].value.startswith("8, one for each GPU")
    assert findings["peer access"].value == "54 of 56 pairs of GPUs"
    assert findings["peer access"].problem == "expected all, found none for 2-5, 5-2"
    assert found(Invented(count=8))["peer access"].problem == ""


def test_a_gpu_that_others_use() -> None:
    assert found(Invented(count=1, free=10 * GIB))["cuda:0"].problem


def test_slices() -> None:
    findings = found(Invented(count=1, name="NVIDIA H100 MIG 1g.10gb"))
    assert findings["cuda:0"].value.startswith("a slice (MIG) of NVIDIA H100")
    assert "NCCL does not connect" in findings["ranks"].problem


def test_a_torch_without_nccl() -> None:
    findings = found(Invented(count=2, version=""))
    assert "NCCL" in findings["backends"].problem
    assert findings["ranks"].value == "2, one for each GPU, on CPUs"


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (Invented(build="", loaded=""), ""),
        (Invented(loaded=""), "torch is built with CUDA 13.0, but no NVIDIA driver is loaded"),
        (Invented(build="", there=8), "8 GPUs are installed, but torch was built without CUDA"),
        (
            Invented(there=8, variables={"CUDA_VISIBLE_DEVICES": ""}),
            "8 GPUs are installed; CUDA_VISIBLE_DEVICES='' hides them",
        ),
        (Invented(there=8), "8 GPUs are installed, but torch (CUDA 13.0) cannot use any"),
    ],
    ids=["none", "no driver", "no build", "hidden", "too old"],
)
def test_why_no_gpu_can_be_used(machine: Machine, said: str) -> None:
    findings = found(machine)
    assert findings["devices"].value == "cpu"
    assert findings["devices"].problem == said
    assert "nccl" not in findings["backends"].value
    assert findings.keys() == {"devices", "backends"}


def test_an_invented_machine_is_examined_in_full() -> None:
    names = [f.name for f in examine(measure_collectives=False, machine=Invented(count=2))]
    assert names.index("cuda:1") < names.index("cores") < names.index("Gloo to other hosts")


# ------------------------------------------------------------------------------ other hosts

LO, DOCKER = Interface(name="lo", address="127.0.0.1"), Interface(name="docker0", address="1.2.3.4")
ETH, SECOND = Interface(name="eth0", address="10.0.0.7"), Interface(name="eth1", address="10.1.0.7")
IB = Interface(name="ib0", address="10.2.0.7")
ALL = [LO, DOCKER, ETH, SECOND, IB]


@pytest.mark.parametrize(
    ("variable", "address", "expected"),
    [
        ("", "10.0.0.7", ETH),
        ("", "127.0.0.1", LO),
        ("", "10.9.9.9", "none has 10.9.9.9"),
        ("", "", "the host's own name has no address"),
        ("eth1", "10.0.0.7", SECOND),
        ("eth9", "10.0.0.7", "none is called eth9 (GLOO_SOCKET_IFNAME)"),
    ],
)
def test_the_interface_of_gloo(variable: str, address: str, expected: Interface | str) -> None:
    assert gloo_interface(ALL, {"GLOO_SOCKET_IFNAME": variable}, address) == expected


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("", IB),
        ("eth", ETH),
        ("=eth1", SECOND),
        ("=eth", "none fits NCCL_SOCKET_IFNAME==eth"),
        ("^lo,docker,ib", ETH),
        ("^=lo,docker0,eth0", SECOND),
    ],
)
def test_the_interface_of_nccl(variable: str, expected: Interface | str) -> None:
    assert nccl_interface(ALL, {"NCCL_SOCKET_IFNAME": variable}) == expected


def test_nccl_takes_docker_and_loopback_last() -> None:
    assert nccl_interface([LO, DOCKER, ETH], {}) == ETH
    assert nccl_interface([LO, DOCKER], {}) == DOCKER
    assert nccl_interface([LO], {}) == LO
    assert nccl_interface([], {}) == "there is none"


def test_the_ways_out_are_named_and_loopback_is_told() -> None:
    lines = {f.name: f.value for f in way_out(Invented(count=1, network=(LO, ETH)))}
    assert lines == {
        "Gloo to other hosts": "eth0 (10.0.0.7)",
        "NCCL to other hosts": "eth0 (10.0.0.7)",
    }
    (gloo,) = way_out(Invented(build="", network=(Interface(name="lo", address="127.0.0.1"),)))
    assert gloo.value.startswith("none has 10.0.0.7; on several hosts, set GLOO_SOCKET_IFNAME")


def test_facts_of_this_machine_can_be_gathered() -> None:
    machine = Machine()
    assert Interface(name="lo", address="127.0.0.1") in machine.interfaces()
    assert len(machine.gpus()) == torch.cuda.device_count()
    assert machine.installed() >= len(machine.gpus())


# -------------------------------------------------------------------------------- measured


def body_device() -> tuple[int, float]:
    free = iter([1000, 400])
    finished = []
    answer = medians_on_device(communicator(), lambda: next(free), lambda: finished.append(1))
    assert len(finished) > 50
    return answer["bytes"], answer["medians"]["all_reduce 64 MiB"]


@pytest.mark.slow
def test_an_all_reduce_is_measured_and_its_communicator_counted(ranks: Ranks) -> None:
    for taken, seconds in ranks(2, body_device):
        assert taken == 600
        assert seconds > 0


def test_what_is_told_of_a_measured_all_reduce() -> None:
    answer = {"medians": {"all_reduce 64 MiB": 0.001}, "bytes": 300 * 2**20, "backend": "nccl"}
    reduce, taken = findings_of_gpus(4, answer)
    assert reduce.value == "1,000 us (median, 4 GPUs, nccl), 100.7 GB/s a GPU"
    assert taken.value.startswith("1 of 4 ranks takes 300 MiB of each GPU")
    (alone, _) = findings_of_gpus(1, answer)
    assert alone.value == "1,000 us (median, 1 GPUs, nccl)"
