"""MFU and HFU, computed here and nowhere else.

With F the operations of one forward of a step's batch, and R those of them that modules which
recompute do again::

    MFU = 3 F / (seconds x peak of all ranks)      HFU = (3 F + R) / (seconds x peak of all ranks)

The backward takes two products for each of the forward. Two operations count for each parameter and
token that it multiplies, 4 x tokens x width for a token in a layer's attention, all keys counted
(Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B); what lies between products does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepWork:
    """Floating-point operations of a step: F and R."""

    forward: float
    again: float = 0.0

    @property
    def model(self) -> float:
        """What the model needs: forward and backward, none twice."""
        return 3 * self.forward

    def mfu(self, seconds: float, peak: float) -> float:
        """Share of ``peak`` operations a second that the model needs."""
        return self.model / (seconds * peak)

    def hfu(self, seconds: float, peak: float) -> float:
        """The same of all that is computed."""
        return (self.model + self.again) / (seconds * peak)

    def times(self, count: float) -> StepWork:
        return StepWork(self.forward * count, self.again * count)


def work_of(forwards: Mapping[str, float], recomputed: Iterable[str] = ()) -> StepWork:
    """Count a step from the operations of each module's forward; the model's name is ``""``."""
    names = set(recomputed)
    outer = [n for n in names if not any(n.startswith(f"{other}.") for other in names)]
    return StepWork(forwards[""], sum(forwards.get(name, 0.0) for name in outer))
