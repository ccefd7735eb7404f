"""What one GPU, its node and its network can do: the hardware file of the planner."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from meshwright.errors import PlanError
from meshwright.planner.constants import Constants, ranges
from meshwright.settings import Above, AtLeast, Problem
from meshwright.toml_source import read_file

_MACHINES = files("meshwright.planner") / "machines"
Positive = Annotated[float, Above(0)]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of machine. Rates count 10^12 operations or 10^9 bytes a second, for one GPU."""

    name: str
    generation: Literal["ampere", "hopper", "blackwell"] = "ampere"
    """Which of the fitted efficiencies hold."""
    memory_gib: Positive
    peak_tflops: Positive
    """Dense bf16 rate of the data sheet: the denominator of MFU."""
    matmul_tflops: Positive
    """The largest rate that matrix products were measured at, in bf16."""
    matmul_fp32_tflops: Positive | None = None
    """The same in fp32, where `--calibrate` measured it: the peak of fp32 runs."""
    matmul_fp8_tflops: Positive | None = None
    matmul_fp4_tflops: Positive | None = None
    memory_gbps: Positive
    """Rate of the GPU's own memory."""
    processors: Annotated[int, AtLeast(1)] = 108
    """Multiprocessors, over which a matrix product spreads its tiles."""
    node: Annotated[int, AtLeast(1)] = 8
    """GPUs that the fast links join."""
    intra_gbps: Positive
    """Fast links, in one direction."""
    inter_gbps: Positive
    """Network cards of the node, in one direction, divided by its GPUs."""
    constants: Constants = field(default_factory=Constants)
    """What no data sheet says: fitted, or where `--calibrate` measured it, this machine's."""

    def problems(self) -> Iterator[Problem]:
        """Check that numbers are possible: constants within a hundred times their ranges."""
        # Shares and seconds are at most 1, slowdowns at least.
        limits = {
            name: (low if low == 1 else low / 100, 1 if high <= 1 else 100 * high)
            for name, (low, high) in ranges().items()
        }
        for name, value in {**vars(self), **asdict(self.constants)}.items():
            least, most = limits.get(name, (1e-9, 1e9))
            if isinstance(value, int | float) and not least <= value <= most:
                key = ("constants", name) if name in ranges() else (name,)
                yield Problem(key, f"{name}: expected {least:g} to {most:g}, found {value:g}")
        if (found := self.matmul_tflops) > (most := self.peak_tflops):
            text = f"matmul_tflops: expected at most {most:g} (peak_tflops), found {found:g}"
            yield Problem(("matmul_tflops",), text)

    def peak(self, size: int = 2) -> float:
        """Operations a second that MFU is a share of, for numbers of ``size`` bytes."""
        return 1e12 * ((self.matmul_fp32_tflops if size > 2 else None) or self.peak_tflops)

    @cached_property
    def products(self) -> Mapping[int, float]:
        """Measured ceilings of matrix products in operations a second, by bytes of a number."""
        bf16 = self.matmul_tflops * 1e12
        fp8 = self.matmul_fp8_tflops * 1e12 if self.matmul_fp8_tflops else bf16
        fp4 = self.matmul_fp4_tflops * 1e12 if self.matmul_fp4_tflops else fp8
        # fp32 has a sixteenth of the rate where GPUs have no units for it.
        fp32 = self.matmul_fp32_tflops * 1e12 if self.matmul_fp32_tflops else bf16 / 16
        return {4: fp32, 2: bf16, 1: fp8, 0: fp4}

    def shared(self, ranks: int) -> Hardware:
        """Return what each of ``ranks`` has of it: more ranks than cores share a CPU."""
        if self.name != "cpu" or ranks <= self.node:
            return self
        share = self.node / ranks
        names = ("peak_tflops", "matmul_tflops", "memory_gbps", "memory_gib", "intra_gbps")
        fp32 = self.matmul_fp32_tflops and self.matmul_fp32_tflops * share
        less = {name: getattr(self, name) * share for name in names}
        constants = replace(self.constants, launch=self.constants.launch / share)
        return replace(self, node=ranks, matmul_fp32_tflops=fp32, constants=constants, **less)


def calibrated_file() -> Path:
    """Return the file of this machine that ``meshwright plan --calibrate`` writes."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "meshwright", "hardware.toml")


def this_machine(device: str, *, calibrated: bool = True) -> Hardware | None:
    """Find the machine with ``device``, ``cpu`` or the name that CUDA gives a GPU, if known.

    What was ``calibrated`` here comes first, then the shipped file of the GPU's name.
    """
    if calibrated and calibrated_file().exists():
        found = read_file(calibrated_file(), Hardware)
        if found.name == device:
            return found
    words = set(re.split(r"[\s-]+", device.lower()))
    names = () if words & {"pcie", "nvl", "mig"} else hardware_names()  # these are slower
    shipped = [name for name in names if words.issuperset(name.split("-"))]
    return load_hardware(max(shipped, key=len)) if shipped else None


def require_machine(device: str) -> Hardware:
    """Return `this_machine`; raises ``PlanError`` where it is not known."""
    if (found := this_machine(device)) is None:
        raise PlanError(
            f"the rates of this machine ({device}) are not known: measure it first with "
            "meshwright plan --calibrate"
        )
    return found


def hardware_names() -> tuple[str, ...]:
    """The shipped hardware files."""
    found = _MACHINES.iterdir()
    return tuple(sorted(file.name[:-5] for file in found if file.name.endswith(".toml")))


def load_hardware(name: str | Path) -> Hardware:
    """Read a shipped file by its name, or any file that ends in .toml; raises ``PlanError``."""
    if (name := str(name)).endswith(".toml"):
        return read_file(name, Hardware)
    if name not in hardware_names():
        known = ", ".join(hardware_names())
        raise PlanError(f"--hardware: expected a .toml file or one of {known}, found '{name}'")
    return read_file(Path(str(_MACHINES / f"{name}.toml")), Hardware)
