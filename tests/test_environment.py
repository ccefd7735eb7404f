"""The place of a rank, from the environment of each launcher."""

from __future__ import annotations

import os
import signal

import pytest

from meshwright.comm import communicator, connect
from meshwright.errors import CommunicationError
from meshwright.testing import Ranks
from support.internals.environment import Cluster, cluster, first_host, is_launched
from support.internals.recipes import StopRequest

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "4000",
}
STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[007-012,15],login1",
}
PET = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
ASKED = (signal.SIGINT, signal.SIGTERM)
OF_TORCHRUN = Cluster(rank=3, size=8, local_rank=1, address="node1", port=4000)
OF_SLURM = Cluster(
    rank=9,
    size=16,
    local_rank=1,
    address="gpu007",
    port=20_000 + (1234 * 16 + 2) % 12_768,
    signals=(*ASKED, signal.SIGUSR1),
)
OF_PET = Cluster(rank=1, size=2, local_rank=0, address="job-node-0-0.job", port=29_400)
ALONE = Cluster(rank=0, size=1, local_rank=None, address="127.0.0.1", port=0)
# A batch script, which is no step; a step of one task, as of an interactive shell.
BATCH = {name: text for name, text in STEP.items() if name != "SLURM_STEP_ID"}
ONE_TASK = {**STEP, "SLURM_STEP_NUM_TASKS": "1"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without a launcher."""
    for name in list(os.environ):
        if name in TORCHRUN or name.startswith(("SLURM_", "PET_")):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, ALONE),
        (TORCHRUN, OF_TORCHRUN),
        ({**TORCHRUN, **STEP, **PET}, OF_TORCHRUN),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ALONE),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "4000"}, ALONE),
        (STEP, OF_SLURM),
        (BATCH, ALONE),
        (ONE_TASK, ALONE),
        (PET, OF_PET),
        ({**PET, "PET_NNODES": "1"}, ALONE),
    ],
)
def test_the_place_of_a_rank(
    environment: pytest.MonkeyPatch, variables: dict[str, str], found: Cluster
) -> None:
    for name, text in variables.items():
        environment.setenv(name, text)
    assert cluster() == found
    assert is_launched() == (found != ALONE or "RANK" in variables)


def test_a_meeting_point_that_is_named_holds_under_slurm(environment: pytest.MonkeyPatch) -> None:
    for name, text in {**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"}.items():
        environment.setenv(name, text)
    assert (cluster().address, cluster().port, cluster().rank) == ("10.0.0.1", 5000, 9)


def test_steps_and_jobs_beside_each_other_meet_at_other_ports(
    environment: pytest.MonkeyPatch,
) -> None:
    for name, text in STEP.items():
        environment.setenv(name, text)
    ports: set[int] = set()
    for job in range(1000, 1010):
        for step in range(10):
            environment.setenv("SLURM_JOB_ID", str(job))
            environment.setenv("SLURM_STEP_ID", str(step))
            ports.add(cluster().port)
    assert len(ports) == 100


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[007-012,15],login1", "gpu007"),
        ("gpu[15]", "gpu15"),
        ("rack[1-2]-node[03-04,9]", "rack1-node03"),
        ("a-b-1.example.org,c", "a-b-1.example.org"),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1"}, "expected RANK, WORLD_SIZE.* found only RANK: start"),
        ({"RANK": "1", "WORLD_SIZE": ""}, "found only RANK: start"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "found only RANK, WORLD_SIZE: start"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "found only RANK, WORLD_SIZE, MASTER_PORT: start"),
        ({**TORCHRUN, "RANK": "8"}, "found rank 8 of 8: RANK counts"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "found rank 3 of 0"),
        ({**STEP, "SLURM_PROCID": "16"}, "found rank 16 of 16"),
        ({**PET, "PET_NODE_RANK": "2"}, "found rank 2 of 2"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "expected a port from 1 to 65535 .* found 99999"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "expected a port from 1 to 65535 .* found 0: set"),
        ({**TORCHRUN, "RANK": "one"}, "expected a number in RANK, found 'one'"),
        ({**STEP, "SLURM_PROCID": ""}, "a step of SLURM: expected SLURM_PROCID"),
        ({**PET, "PET_NPROC_PER_NODE": "8"}, "start this command by torchrun"),
    ],
)
def test_an_environment_of_no_use_says_so(
    environment: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, text in variables.items():
        environment.setenv(name, text)
    with pytest.raises(CommunicationError, match=message):
        cluster()


def test_ranks_of_slurm_meet(ranks: Ranks) -> None:
    """Without a launcher of torch's: rank 0 holds the store, at the port of the job."""

    def body() -> tuple[int, int, list[int]]:
        rank = os.environ["RANK"]
        for name in (*TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE"):
            os.environ.pop(name)
        os.environ |= {**STEP, "SLURM_JOB_ID": job, "SLURM_NTASKS": "2", "SLURM_PROCID": rank}
        os.environ["SLURM_JOB_NODELIST"] = "localhost"
        world = connect(timeout=50.0)
        told = [int(str(row)) for row in world.gather_values(world.rank, label="ranks")]
        return world.rank, world.size, told

    job = str(os.getpid())
    assert ranks(2, body, connected=False) == [(0, 2, [0, 1]), (1, 2, [0, 1])]


def test_slurms_signal_asks_for_the_end(ranks: Ranks) -> None:
    def body() -> bool:
        for name in TORCHRUN:
            os.environ.pop(name)
        os.environ |= STEP
        with StopRequest(communicator()) as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            stop.begin()
            return stop.is_agreed()

    assert ranks(1, body) == [True]
