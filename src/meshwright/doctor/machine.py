"""Facts about this machine (its GPUs, their driver, its network interfaces), and what is wrong.

Tests replace `Machine` by an invented one.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fact about this machine."""

    name: str
    value: str
    problem: str = ""
    """What was expected instead; empty when the fact is as it should be."""
    remedy: str = ""
    """What to do about the problem."""
    is_broken: bool = False
    """True if training cannot work before this is fixed; false for advice."""


def report_lines(findings: list[Finding]) -> list[str]:
    """Format the findings: one line each, then the problems and what to do about them."""
    width = max(len(finding.name) for finding in findings)
    lines = [f"{finding.name:<{width}}  {finding.value}" for finding in findings]
    problems = [finding for finding in findings if finding.problem]
    lines.append("")
    if not problems:
        return [*lines, "Everything needed for training is in place."]
    for finding in problems:
        kind = "broken" if finding.is_broken else "advice"
        lines.append(f"{kind}: {finding.name}: {finding.problem}; {finding.remedy}")
    return lines


_GET_ADDRESS = 0x8915
"""Linux's request for the address of an interface, SIOCGIFADDR."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that this process sees."""

    name: str
    uuid: str
    total: int
    """Bytes of memory."""
    free: int
    """Bytes of free memory."""

    @property
    def is_slice(self) -> bool:
        return " MIG " in f"{self.name} " or self.uuid.startswith("MIG-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface and its IPv4 address."""

    name: str
    address: str


class Machine:
    """The machine that this process runs on."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables that ranks started here would have."""
        return os.environ

    def cuda_build(self) -> str:
        """Return the CUDA version that torch was built with; empty for none."""
        return torch.version.cuda or ""

    def nccl(self) -> str:
        """Return the NCCL version of torch; empty if it has none."""
        try:
            return ".".join(map(str, torch.cuda.nccl.version()))
        except AttributeError:  # torch was built without it
            return ""

    def driver(self) -> str:
        """Return the version of the kernel's NVIDIA driver; empty if none is loaded."""
        said = _read(Path("/proc/driver/nvidia/version"))
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", said)
        return found.group(1) if found else ""

    def installed(self) -> int:
        """Count the GPUs that the driver knows, usable by this process or not."""
        folder = Path("/proc/driver/nvidia/gpus")
        return len(list(folder.iterdir())) if folder.is_dir() else 0

    def gpus(self) -> list[Gpu]:
        if not torch.cuda.is_available():
            return []
        found = []
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            found.append(Gpu(name=facts.name, uuid=str(facts.uuid), total=total, free=free))
        return found

    def reaches(self, first: int, second: int) -> bool:
        """Check whether the GPU ``first`` can read the memory of ``second`` directly."""
        return torch.cuda.can_device_access_peer(first, second)

    def interfaces(self) -> list[Interface]:
        """List the network interfaces that have an address, in the kernel's order."""
        found = []
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                try:
                    answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
                except OSError:
                    continue  # no IPv4 address
                found.append(Interface(name=name, address=socket.inet_ntoa(answer[20:24])))
        return found

    def own_address(self) -> str:
        """Return the address to which this machine's own name resolves; empty for none."""
        try:
            return socket.gethostbyname(socket.gethostname())
        except OSError:
            return ""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
