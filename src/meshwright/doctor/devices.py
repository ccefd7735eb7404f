"""Findings about GPUs, the backend of ranks on this machine, and the network to other hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from meshwright.comm import shared_memory
from meshwright.doctor.finding import Finding
from meshwright.doctor.machine import Gpu, Interface, Machine

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
    """Report which GPUs reach each other's memory; the others send through the host's memory."""
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
        remedy="NCCL goes through the host's memory there, which is slower; "
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
    """Report the interface through which ranks on several hosts would connect."""
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
