"""Precision: the dtypes of parameters, computation, gradient reduction and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from meshwright.errors import LayoutError

FloatName = Literal["float16", "bfloat16", "float32", "float64"]
"""The dtypes that a precision may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Names of dtypes; ``None`` means the dtype of ``parameters``.

    ``Precision(compute="bfloat16")`` is the usual mixed precision: parameters, gradient reductions
    and optimizer in float32, matrix products in bfloat16.
    """

    parameters: FloatName = "float32"
    """Parameters and buffers as the user sees them, and as they are saved.

    Any but the default converts all floating-point tensors of the model, also in modules with a
    dtype of their own; the default leaves a mixed model as it is. Complex ones are never converted.
    """
    compute: FloatName | None = None
    """Forward and backward; by default that of ``parameters``."""
    reduce: FloatName | None = None
    """Gradients while they are summed over ranks; by default that of ``parameters``."""
    optimizer: FloatName | None = None
    """Master copy and optimizer state; by default that of ``parameters``."""

    def resolved(self) -> Precision:
        """Return a precision in which each ``None`` is replaced by ``parameters``."""
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
        """True when small gradients would underflow without scaling: computation in float16."""
        return (self.compute or self.parameters) == "float16"


_FLOAT8 = "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
_BY_BYTES = {
    1: f"bool uint8 int8 {_FLOAT8}",
    2: "uint16 int16 float16 bfloat16",
    4: "uint32 int32 float32 complex32",
    8: "uint64 int64 float64 complex64",
    16: "complex128",
}
_BYTES: Mapping[str, int] = MappingProxyType(
    {name: size for size, names in _BY_BYTES.items() for name in names.split()}
)


def dtype_bytes(name: str) -> int:
    """Look up the bytes of one element of the dtype called ``name``, such as ``"float32"``.

    Raises LayoutError for a name that is not one of torch's dtypes.
    """
    try:
        return _BYTES[name]
    except KeyError:
        known = ", ".join(sorted(_BYTES))
        raise LayoutError(f"unknown dtype {name!r}; known dtypes: {known}") from None
