"""Precision: the dtypes of parameters, computation, gradient reduction and optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FloatName", "Precision"]

FloatName = Literal["float16", "bfloat16", "float32", "float64"]
"""The dtypes that a precision may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Names of dtypes; ``None`` follows from ``parameters`` as ``resolved`` says.

    ``Precision(compute="bfloat16")`` is the usual mixed precision: parameters, gradients on the
    wire and optimizer in float32, matrix products in bfloat16.
    """

    parameters: FloatName = "float32"
    """Parameters and buffers as the user sees them, and as they are saved.

    Any but the default converts all floating-point ones of the model, also those of modules with a
    dtype of their own; the default leaves a mixed model as it is. Complex ones are never converted.
    """
    compute: FloatName | None = None
    """Forward and backward; by default that of ``parameters``."""
    reduce: FloatName | None = None
    """Gradients while they are summed over ranks; by default that of ``parameters``."""
    optimizer: FloatName | None = None
    """Master copy and optimizer state; by default that of ``parameters``."""

    def resolved(self) -> Precision:
        """Find the same precision with every dtype named."""
        return Precision(
            parameters=self.parameters,
            compute=self.compute or self.parameters,
            reduce=self.reduce or self.parameters,
            optimizer=self.optimizer or self.parameters,
        )

    @property
    def is_mixed(self) -> bool:
        """True when computation runs in another dtype than the parameters have."""
        return self.compute is not None and self.compute != self.parameters

    @property
    def needs_loss_scaling(self) -> bool:
        """True when small gradients would vanish without scaling: computation in float16."""
        return (self.compute or self.parameters) == "float16"
