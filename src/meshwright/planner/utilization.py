"""MFU and HFU, computed here and nowhere else.

With F the operations of one forward of a step's batch, and R those of them that modules which
recompute their activations do again::

    model operations     3 F          MFU = 3 F       / (seconds x ranks x peak)
    operations done      3 F + R      HFU = (3 F + R) / (seconds x ranks x peak)

The backward of a product is two of its size. Two operations count for each parameter and token
that it multiplies, and 4 x tokens x width in a layer's attention, all keys counted (Chowdhery et
al. 2022, PaLM, arXiv 2204.02311, appendix B). The optimizer and all between products are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations of a step."""

    forward: float
    again: float = 0.0
    """Of the forward, what the backward does again."""

    @property
    def model(self) -> float:
        """Forward and backward, none twice."""
        return 3 * self.forward

    @property
    def done(self) -> float:
        """Forward and backward, and what is recomputed."""
        return 3 * self.forward + self.again

    def mfu(self, seconds: float, peak: float) -> float:
        """Share of ``peak`` operations a second, of all ranks, that the model needs."""
        return self.model / (seconds * peak)

    def hfu(self, seconds: float, peak: float) -> float:
        """The same of all that is done."""
        return self.done / (seconds * peak)

    def times(self, count: float) -> Work:
        """The work of ``count`` such steps."""
        return Work(self.forward * count, self.again * count)


def work_of(forwards: Mapping[str, float], recomputed: Iterable[str] = ()) -> Work:
    """Count a step from the operations of each module's forward; the model's name is ``""``.

    Of ``recomputed`` modules that are in others of them, the outer ones count.
    """
    names = set(recomputed)

    def is_inner(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:n]) in names for n in range(len(parts))) if name else False

    return Work(forwards[""], sum(forwards.get(name, 0.0) for name in names if not is_inner(name)))
