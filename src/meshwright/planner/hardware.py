"""What one GPU, its node and its network can do: the hardware file of the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from meshwright.errors import PlanError
from meshwright.settings import Above, AtLeast
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

    @cached_property
    def products(self) -> Mapping[int, float]:
        """Measured ceilings of matrix products in operations a second, by bytes of a number."""
        bf16 = self.matmul_tflops * 1e12
        fp8 = self.matmul_fp8_tflops * 1e12 if self.matmul_fp8_tflops else bf16
        fp4 = self.matmul_fp4_tflops * 1e12 if self.matmul_fp4_tflops else fp8
        return {2: bf16, 1: fp8, 0: fp4}


def hardware_names() -> tuple[str, ...]:
    """The shipped hardware files."""
    found = _MACHINES.iterdir()
    return tuple(sorted(file.name[:-5] for file in found if file.name.endswith(".toml")))


def load_hardware(name: str) -> Hardware:
    """Read a shipped file by its name, or any file that ends in .toml; raises ``PlanError``."""
    if name.endswith(".toml"):
        return read_file(name, Hardware)
    if name not in hardware_names():
        known = ", ".join(hardware_names())
        raise PlanError(f"--hardware: expected a .toml file or one of {known}, found '{name}'")
    return read_file(Path(str(_MACHINES / f"{name}.toml")), Hardware)
