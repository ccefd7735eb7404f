"""The environment variables by which ranks get their number and find each other.

=============================  ==================================================================
started by                     variables
=============================  ==================================================================
torchrun, or any that sets     ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``,
the same variables             ``MASTER_PORT``
srun                           ``SLURM_PROCID`` etc.; the first host of the step, at a port
                               computed from the job and step ids
a process on each node, with   ``PET_NODE_RANK``, ``PET_NNODES``, ``PET_MASTER_ADDR``,
the arguments of torchrun      ``PET_MASTER_PORT``
=============================  ==================================================================

The first row that applies wins, so torchrun may be started by srun, or where ``PET_*`` is set.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from meshwright.errors import CommunicationError

LOCAL_NETWORK: Mapping[str, str] = MappingProxyType(
    {
        # c10d's store looks up the name of the loopback address for every connection, and all
        # ranks wait for it, 5 s for each lost packet. With this, names come from the hosts file
        # alone, and c10d does not warn of each name that it cannot find.
        "RES_OPTIONS": "attempts:0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo",
    }
)
"""Variables for ranks that all run on this machine; the user's own values win."""


_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORT = 29500
"""The port where torchrun's nodes meet when nothing names one."""
_SLURM_PORTS = range(20_000, 32_768)
"""Below the ephemeral ports of the system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The position of this process among the ranks that a launcher has started."""

    rank: int
    size: int
    """Total number of ranks."""
    local_rank: int | None
    """Number of this rank on its machine, which selects its GPU; None if no variable gives it."""
    address: str
    """The host of rank 0, or of its launcher's store."""
    port: int
    """The port there; 0 for a single rank."""
    signals: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)
    """Signals that ask a run to save and stop."""

    def __post_init__(self) -> None:
        """Raise `CommunicationError` for an impossible rank or port."""
        if not 0 <= self.rank < self.size:
            raise CommunicationError(
                "expected a rank of at least 0 and below the number of ranks, found rank "
                f"{self.rank} of {self.size}: RANK counts the processes of all machines from 0, "
                "WORLD_SIZE is their number"
            )
        if self.port not in range(self.size > 1, 2**16):  # 0 for a single rank only
            raise CommunicationError(
                f"expected a port from 1 to 65535 to meet at, found {self.port}: set MASTER_PORT "
                "to a free one, the same on every rank"
            )


def is_launched() -> bool:
    """Check whether a launcher started this process as a rank."""
    return ("RANK" in os.environ and "WORLD_SIZE" in os.environ) or _is_of_slurm() or _is_of_pet()


def cluster(rank: int | None = None, size: int | None = None) -> Cluster:
    """Read this process's position among the ranks of its run from the launcher's variables.

    A process without a launcher is a run of one rank. ``rank`` and ``size`` override the variables
    where given. Raises `CommunicationError` when some of torchrun's variables are missing, or a
    launcher's cannot be used.
    """
    found = [name for name in _TORCHRUN if os.environ.get(name)]
    if rank is None and size is None and "RANK" not in found:
        if _is_of_slurm():
            return _of_slurm()
        if _is_of_pet():
            return _of_pet()
        if not found:
            return Cluster(rank=0, size=1, local_rank=None, address="127.0.0.1", port=0)
    rank = _number("RANK") if rank is None else rank
    size = _number("WORLD_SIZE") if size is None else size
    meets = {"MASTER_ADDR", "MASTER_PORT"}.issubset(found)
    if rank is None or size is None or (size > 1 and not meets):
        raise CommunicationError(
            f"expected {', '.join(_TORCHRUN)} in the environment, found "
            + (f"only {', '.join(found)}" if found else "none")
            + ": start the ranks with torchrun, or set all four"
        )
    return Cluster(
        rank=rank,
        size=size,
        local_rank=local_rank(),
        address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        port=_number("MASTER_PORT") or 0 if meets else 0,
    )


def local_rank() -> int | None:
    """Read the number of this rank on its machine; None if no variable gives it."""
    found = _number("LOCAL_RANK")
    return _number("SLURM_LOCALID") if found is None and _is_of_slurm() else found


def local_size() -> int | None:
    """Read the number of ranks on this machine; None if no variable gives it."""
    return _number("LOCAL_WORLD_SIZE")


def is_set(name: str) -> bool:
    """Read a variable that is 0 or 1; unset means 0."""
    text = os.environ.get(name) or "0"
    if text not in {"0", "1"}:
        raise CommunicationError(f"expected 0 or 1 in {name}, found {text!r}")
    return text == "1"


def _is_of_slurm() -> bool:
    """Check whether srun started this process as one of several; a batch script is no step."""
    return "SLURM_STEP_ID" in os.environ and (_slurm_size() or 1) > 1


def _slurm_size() -> int | None:
    return _number("SLURM_STEP_NUM_TASKS") or _number("SLURM_NTASKS")


def _of_slurm() -> Cluster:
    rank, size, job = _number("SLURM_PROCID"), _slurm_size(), _number("SLURM_JOB_ID")
    hosts = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    if rank is None or size is None or job is None or not hosts:
        raise CommunicationError(
            "this process is a step of SLURM: expected SLURM_PROCID, SLURM_NTASKS, SLURM_JOB_ID "
            "and SLURM_JOB_NODELIST in the environment, found "
            f"{', '.join(sorted(name for name in os.environ if name.startswith('SLURM_')))}: "
            "start the ranks with srun, or with torchrun"
        )
    # Steps of one job, and jobs with consecutive ids, may run on one host at the same time.
    port = _SLURM_PORTS[(job * 16 + (_number("SLURM_STEP_ID") or 0)) % len(_SLURM_PORTS)]
    return Cluster(
        rank=rank,
        size=size,
        local_rank=local_rank(),
        address=os.environ.get("MASTER_ADDR") or first_host(hosts),
        port=_number("MASTER_PORT") or port,
        signals=(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1),
    )


def first_host(hosts: str) -> str:
    """Return the first host of a SLURM host list: ``gpu007`` for ``gpu[007-012,15],login1``."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])+", hosts)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else ""


def _is_of_pet() -> bool:
    """Check for one process per node with torchrun's arguments as variables."""
    return "PET_NODE_RANK" in os.environ and (_number("PET_NNODES") or 1) > 1


def _of_pet() -> Cluster:
    each = os.environ.get("PET_NPROC_PER_NODE", "1")
    address = os.environ.get("PET_MASTER_ADDR", "")
    if each != "1" or not address:
        raise CommunicationError(
            "the environment has torchrun's arguments (PET_*) and no RANK: expected "
            f"PET_MASTER_ADDR and one rank a node, found PET_MASTER_ADDR {address!r} and "
            f"PET_NPROC_PER_NODE {each}: start this command by torchrun, as "
            "torchrun --no-python COMMAND"
        )
    return Cluster(
        rank=_number("PET_NODE_RANK") or 0,
        size=_number("PET_NNODES") or 1,
        local_rank=0,
        address=address,
        port=_number("PET_MASTER_PORT") or _PORT,
    )


def _number(name: str) -> int | None:
    """Read a variable that is a number; None if it is not set."""
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal():
        raise CommunicationError(f"expected a number in {name}, found {text!r}")
    return int(text)


def torchrun_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set for this rank, with an agent's store."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


# ------------------------------------------------------------------ what the machine has left


def memory_limit() -> tuple[int, str]:
    """Return the bytes that a run may still use, and the limit (machine or control group)."""
    for line in read_file(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            available, source = int(line.split()[1]) * 1024, "free on the machine"
            break
    else:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        source = "installed in the machine"
    for folder in control_groups():
        limit = read_file(folder / "memory.max") or read_file(folder / "memory.limit_in_bytes")
        used = read_file(folder / "memory.current") or read_file(folder / "memory.usage_in_bytes")
        # Files that the kernel has cached are counted as used, and given back when it is needed.
        rows = map(str.split, read_file(folder / "memory.stat").splitlines())
        cached = max((int(n) for name, n in rows if name.endswith("inactive_file")), default=0)
        left = int(limit) - int(used) if limit.isdigit() and used.isdigit() else available
        if left + cached < available:
            available, source = left + cached, f"left in control group {folder}"
    return available, source


def control_groups() -> Iterator[Path]:
    """Yield this process's control groups (version 1 and 2) and their parents, innermost first."""
    root = Path("/sys/fs/cgroup")
    for line in read_file(Path("/proc/self/cgroup")).splitlines():
        number, controllers, path = line.split(":", 2)
        mount = root if number == "0" else root / controllers
        folder = mount / path.lstrip("/")
        yield from (part for part in (folder, *folder.parents) if part.is_relative_to(mount))


def read_file(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
