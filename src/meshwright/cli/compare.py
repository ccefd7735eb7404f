"""``meshwright compare``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from meshwright.cli.words import at_least_0
from meshwright.errors import PlanError
from meshwright.recipes.tensors.compare import compare_runs


@dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """Name the first tensor in which two runs differ, whatever their layouts.

    Both must have run with --trace-tensors. The exit status is 0 when they agree, else 1.
    """

    first: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN_A")]
    """The folder of a run."""
    second: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN_B")]
    """The folder of another run."""
    tolerance: Annotated[str, tyro.conf.arg(metavar="X")] = ""
    """Relative difference that is rounding; default: 1e-9 (float64), 1e-3 (float32), else 3e-2."""

    def run(self, words: list[str]) -> int:
        try:
            tolerance = at_least_0("--tolerance", self.tolerance) if self.tolerance else None
            found = compare_runs(self.first, self.second, tolerance=tolerance)
        except ValueError as error:
            raise PlanError(str(error)) from error
        print("\n".join(found.lines()))
        return int(found.divergence is not None)
