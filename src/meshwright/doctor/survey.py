"""A survey of this machine for a run: its resources, its faults, and how to fix them."""

from __future__ import annotations

import os
import platform
import resource
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata

import torch

from meshwright import __version__
from meshwright.comm import shared_memory
from meshwright.doctor.collectives import measure, measure_gpus
from meshwright.doctor.machine import Finding, Gpu, Interface, Machine
from meshwright.environment import control_groups, memory_limit, read_file

_LAST = ("docker", "lo")
"""Interfaces that NCCL uses only if there is no other."""


def devices(machine: Machine) -> Iterator[Finding]:
    """Report the devices, driver and libraries, and why torch cannot use them."""
    gpus, build, driver = machine.gpus(), machine.cuda_build(), machine.driver()
    counts = Counter(gpu.name for gpu in gpus)
    names = ", ".join(f"{count} x {name}" for name, count in counts.items())
    problem, remedy = _unused(machine, gpus, build, driver)
    yield Finding(
        name="devices",
        value=f"cpu, {len(gpus)} x cuda: {names}" if gpus else "cpu",
        problem=problem,
        remedy=remedy,
    )
    local = "gloo" if shared_memory.unsupported() else "shared memory, gloo"
    nccl = machine.nccl() if gpus else ""
    yield Finding(
        name="backends",
        value=f"{local}, nccl {nccl}" if nccl else local,
        problem="expected NCCL in a torch for GPUs, found none" if gpus and not nccl else "",
        remedy="install a build of torch that has it" if gpus and not nccl else "",
    )
    if not gpus:
        return
    yield Finding(name="driver", value=f"{driver or 'unknown'}, torch is built with CUDA {build}")
    for index, gpu in enumerate(gpus):
        yield _memory_of(index, gpu)
    yield from _peers(machine, gpus)
    yield from ranks_here(machine, gpus, nccl)


def _unused(machine: Machine, gpus: Sequence[Gpu], build: str, driver: str) -> tuple[str, str]:
    """Return why torch cannot use this machine's GPUs, and what to do; empty if it can."""
    hidden = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if gpus or (not driver and not build):
        return "", ""
    if not driver:
        return (
            f"torch is built with CUDA {build}, but no NVIDIA driver is loaded",
            "load the driver, or give the container access to it; CPU ranks do not need it",
        )
    if not build:
        return (
            f"{machine.installed()} GPUs are installed, but torch was built without CUDA",
            "install a build of torch with CUDA to use them",
        )
    if hidden is not None:
        return (
            f"{machine.installed()} GPUs are installed; CUDA_VISIBLE_DEVICES={hidden!r} hides them",
            "unset CUDA_VISIBLE_DEVICES to use them",
        )
    return (
        f"{machine.installed()} GPUs are installed, but torch (CUDA {build}) cannot use any",
        f"check that driver {driver} is new enough and that the container has access to the GPUs",
    )


def _memory_of(index: int, gpu: Gpu) -> Finding:
    is_taken = gpu.free < gpu.total / 2
    kind = "a slice (MIG) of " if gpu.is_slice else ""
    return Finding(
        name=f"cuda:{index}",
        value=f"{kind}{gpu.name}, {gpu.free / 2**30:.1f} of {gpu.total / 2**30:.1f} GiB free",
        problem="expected most of its memory to be free" if is_taken else "",
        remedy="stop other programs on it (nvidia-smi lists them)" if is_taken else "",
    )


def _peers(machine: Machine, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Report which GPUs reach each other's memory; the others transfer through host memory."""
    count = len(gpus)
    if count < 2:
        return
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    lacking = [f"{a}-{b}" for a, b in pairs if not machine.reaches(a, b)]
    shown = ", ".join(lacking[:6]) + (", ..." if len(lacking) > 6 else "")
    yield Finding(
        name="peer access",
        value=f"{len(pairs) - len(lacking)} of {len(pairs)} pairs of GPUs",
        problem=f"expected all, found none for {shown}" if lacking else "",
        remedy="NCCL uses host memory there, which is slower; "
        "virtual machines and IOMMUs often disable peer access"
        if lacking
        else "",
    )


def ranks_here(machine: Machine, gpus: Sequence[Gpu], nccl: str) -> Iterator[Finding]:
    """Report what a run with one rank for each GPU of this machine would be."""
    slices = any(gpu.is_slice for gpu in gpus)
    yield Finding(
        name="ranks",
        value=f"{len(gpus)}, one for each GPU" + (", by NCCL" if nccl else ", on CPUs"),
        problem="expected whole GPUs, found slices, which NCCL does not connect" if slices else "",
        remedy="run jobs of one rank, or turn MIG off" if slices else "",
    )


# ------------------------------------------------------------------------------ other hosts


def way_out(machine: Machine) -> Iterator[Finding]:
    """Report the network interface through which ranks on several hosts would connect."""
    interfaces, environment = machine.interfaces(), machine.environment
    found = gloo_interface(interfaces, environment, machine.own_address())
    yield _interface("Gloo to other hosts", "GLOO_SOCKET_IFNAME", found)
    if machine.nccl() and machine.cuda_build():
        found = nccl_interface(interfaces, environment)
        yield _interface("NCCL to other hosts", "NCCL_SOCKET_IFNAME", found)


def _interface(name: str, variable: str, found: Interface | str) -> Finding:
    value = found if isinstance(found, str) else f"{found.name} ({found.address})"
    if isinstance(found, str) or found.address.startswith("127."):
        value += f"; on several hosts, set {variable} to an interface that the others can reach"
    return Finding(name=name, value=value)


def gloo_interface(
    interfaces: Sequence[Interface], environment: Mapping[str, str], address: str
) -> Interface | str:
    """Find the interface that Gloo uses: the one named, or that of the host's own name."""
    asked = environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if asked:
        named = [interface for interface in interfaces if interface.name == asked]
        return named[0] if named else f"none is called {asked} (GLOO_SOCKET_IFNAME)"
    here = [interface for interface in interfaces if interface.address == address]
    if here:
        return here[0]
    return f"none has {address}" if address else "the host's own name has no address"


def nccl_interface(
    interfaces: Sequence[Interface], environment: Mapping[str, str]
) -> Interface | str:
    """Find the first interface that NCCL uses.

    ``NCCL_SOCKET_IFNAME`` lists prefixes of names, exact names after ``=``, or names to exclude
    after ``^``. Without it, InfiniBand comes first, and docker and loopback come last.
    """
    asked = environment.get("NCCL_SOCKET_IFNAME", "")
    if asked:
        left_out, is_exact = asked.startswith("^"), asked.lstrip("^").startswith("=")
        names = asked.lstrip("^=").split(",")

        def is_listed(interface: Interface) -> bool:
            return any(
                interface.name == name if is_exact else interface.name.startswith(name)
                for name in names
            )

        fitting = [each for each in interfaces if is_listed(each) != left_out]
        return fitting[0] if fitting else f"none fits NCCL_SOCKET_IFNAME={asked}"

    def rank(interface: Interface) -> int:
        if interface.name.startswith("ib"):
            return 0
        return 1 + next((i + 1 for i, n in enumerate(_LAST) if interface.name.startswith(n)), 0)

    return min(interfaces, key=rank, default="there is none")


_LEAST_MEMORY = 2 * 2**30
_LEAST_FILES = 256


def examine(*, measure_collectives: bool = True, machine: Machine | None = None) -> list[Finding]:
    """List all findings about ``machine`` (by default this one), in printing order."""
    machine = Machine() if machine is None else machine
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _versions,
        partial(devices, machine),
        _processors,
        _memory,
        _shared_memory,
        _files,
        _network,
        partial(way_out, machine),
    )
    findings = [finding for check in checks for finding in check()]
    if measure_collectives and not any(finding.is_broken for finding in findings):
        findings.extend(measure())
        if machine.nccl() and (count := len(machine.gpus())):
            findings.extend(measure_gpus(count))
    return findings


def usable_cores() -> float:
    """Count the cores this process may use: its affinity, or less if a control group limits it."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in control_groups():
        words = read_file(folder / "cpu.max").split() or [
            read_file(folder / "cpu.cfs_quota_us"),
            read_file(folder / "cpu.cfs_period_us"),
        ]
        if words[0].isdigit() and words[1].isdigit():
            cores = min(cores, int(words[0]) / int(words[1]))
    return cores


def _versions() -> Iterator[Finding]:
    yield Finding(name="meshwright", value=__version__)
    python = f"{platform.python_version()} on {platform.platform()}"
    for name, value, found, least, remedy in (
        ("python", python, platform.python_version(), "3.11", "install a newer Python"),
        ("torch", torch.__version__, torch.__version__, "2.11", "pip install 'torch>=2.11'"),
    ):
        is_old = [*map(int, found.split(".")[:2])] < [*map(int, least.split("."))]
        problem, remedy = (f"expected {least} or newer", remedy) if is_old else ("", "")
        yield Finding(name=name, value=value, problem=problem, remedy=remedy, is_broken=is_old)
    for package in ("numpy", "safetensors", "tyro", "rich"):
        yield Finding(name=package, value=_version(package))


def _processors() -> Iterator[Finding]:
    cores = usable_cores()
    yield Finding(name="cores", value=f"{cores:g} usable of {os.cpu_count()}")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    is_advised = threads.isdigit() and int(threads) > cores
    yield Finding(
        name="OMP_NUM_THREADS",
        value=threads or "not set (ranks started by meshwright get 1)",
        problem=f"expected at most {cores:g}, the usable cores" if is_advised else "",
        remedy="set OMP_NUM_THREADS to the cores divided by the ranks" if is_advised else "",
    )


def _memory() -> Iterator[Finding]:
    available, source = memory_limit()
    is_low = available < _LEAST_MEMORY
    yield Finding(
        name="memory",
        value=f"{available / 2**30:.1f} GiB {source}",
        problem=f"expected at least {_LEAST_MEMORY / 2**30:g} GiB for two ranks" if is_low else "",
        remedy="stop other programs or raise the limit" if is_low else "",
    )


def _shared_memory() -> Iterator[Finding]:
    problem = shared_memory.unsupported()
    yield Finding(
        name="shared memory",
        value="not usable" if problem else "usable between the CPU ranks of this machine",
        problem=problem,
        remedy="ranks use Gloo over loopback, which is slower; fix the cause" * bool(problem),
    )


def _files() -> Iterator[Finding]:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = limit != resource.RLIM_INFINITY and limit < _LEAST_FILES
    yield Finding(
        name="open files",
        value="no limit" if limit == resource.RLIM_INFINITY else f"at most {limit}",
        problem=f"expected at least {_LEAST_FILES}" if is_low else "",
        remedy=f"ulimit -n {4 * _LEAST_FILES}" if is_low else "",
    )


def _network() -> Iterator[Finding]:
    for name in ("localhost", socket.gethostname()):
        try:
            address = str(socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)[0][4][0])
            problem = ""
        except OSError as error:
            address, problem = "unknown", f"expected an address, found: {error}"
        is_local = name == "localhost"
        yield Finding(
            name=f"name {name}",
            value=address,
            problem=problem,
            remedy=f"add '127.0.0.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo"
            if problem
            else "",
            is_broken=bool(problem) and is_local,
        )
    problem, port = "", 0
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError as error:
        problem = f"expected to listen on 127.0.0.1 and connect to it, found: {error}"
    yield Finding(
        name="loopback port",
        value="none" if problem else f"{port} is free and answers",
        problem=problem,
        remedy="allow connections on the loopback device" if problem else "",
        is_broken=bool(problem),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed (the command line needs tyro; rich draws progress)"
