"""The policies of `fully_shard` for dtypes and for the device of shards."""

from __future__ import annotations

from dataclasses import Field, dataclass, fields
from typing import Any

import torch


@dataclass(frozen=True, kw_only=False)
class MixedPrecisionPolicy:
    """The dtypes of the computation. Shards and optimizer keep the dtype of the parameters.

    Only floating-point tensors are cast: complex parameters and inputs keep theirs.
    """

    param_dtype: torch.dtype | None = None
    """Of gathered parameters, and of inputs; that of the parameters when None."""
    reduce_dtype: torch.dtype | None = None
    """In which gradients are summed over the ranks; ``param_dtype`` when None."""
    output_dtype: torch.dtype | None = None
    """Of floating-point outputs of the module; left as they are when None."""
    cast_forward_inputs: bool = True
    """True when floating-point inputs are cast to ``param_dtype``."""

    @classmethod
    def of(cls, policy: object) -> MixedPrecisionPolicy:
        """Return ``policy``, also one of another library with the same fields; no casts for None.

        Raises TypeError for anything else.
        """
        if policy is None:
            return cls()
        if isinstance(policy, cls):
            return policy
        found: dict[str, Any] = {
            field.name: getattr(policy, field.name, field) for field in fields(cls)
        }
        if any(isinstance(value, Field) for value in found.values()):
            raise TypeError(
                f"expected mp_policy to be a MixedPrecisionPolicy, found {type(policy).__name__} "
                f"without {' and '.join(n for n, v in found.items() if isinstance(v, Field))}"
            )
        return cls(**found)


@dataclass(frozen=True)
class OffloadPolicy:
    """The default policy: shards stay on the device that computes."""

    @staticmethod
    def of(policy: object) -> OffloadPolicy:
        """Return ``policy``; a policy of another library offloads if it has ``pin_memory``.

        Raises TypeError for anything else.
        """
        if isinstance(policy, OffloadPolicy):
            return policy
        pins = getattr(policy, "pin_memory", None)
        if pins is not None:
            return CPUOffloadPolicy(pin_memory=pins)
        if policy is None or type(policy).__name__ == "OffloadPolicy":
            return OffloadPolicy()
        raise TypeError(
            f"expected offload_policy to be an OffloadPolicy, found {type(policy).__name__}"
        )


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keeps shards, gradients and optimizer on the CPU; parameters are on the device while needed.

    ``pin_memory`` lets copies to a GPU overlap with its work.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The data-parallel dims of a mesh of all axes; parameters are DTensors on that mesh.

    Several names count as one axis. Raises ValueError when there is none.
    """

    shard: str | tuple[str, ...] | None = None
    """The dims that parameters are sharded over."""
    replicate: str | tuple[str, ...] | None = None
    """The dims that they are replicated over."""

    def __post_init__(self) -> None:
        if not self.shard_names and not self.replicate_names:
            raise ValueError(
                "At least one of shard or replicate must be set in DataParallelMeshDims"
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The dims to shard over."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The dims to replicate over."""
        return _names(self.replicate)


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
