"""The data-parallel parameters and gradients of a stage, driven by a schedule.

A module whose parameters are sharded or replicated over ranks has a method
``pipeline_residency()``; modules that return the same object are driven as one. While a schedule
runs, hooks of these modules neither gather, free nor reduce: UNSHARD, RESHARD and REDUCE_GRAD do.
Until REDUCE_GRAD each rank accumulates unsharded gradients of its microbatches.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import nn

FOREIGN = {
    "DistributedDataParallel": "meshwright.replicate or meshwright.DistributedDataParallel",
    "FullyShardedDataParallel": "meshwright.FullyShardedDataParallel or meshwright.fully_shard",
    "FSDPModule": "meshwright.fully_shard or meshwright.FullyShardedDataParallel",
}
"""torch's classes by name (they are not imported), with our replacements."""


@runtime_checkable
class Residency(Protocol):
    """Parameters that come and go, and gradients that are summed over data-parallel ranks."""

    def begin(self, what: str, *, training: bool) -> None:
        """Begin a step: hooks of the module are inactive until it ends.

        ``what`` describes the step; data-parallel ranks must run the same one.
        """

    def unshard(self) -> None:
        """Start to gather the parameters; a forward or backward waits for them."""

    def wait_unshard(self) -> None:
        """Wait for the parameters."""

    def accumulate(self) -> None:
        """Accumulate the gradients of a microbatch."""

    def reshard(self) -> None:
        """Free the gathered parameters."""

    def computing(self, module: nn.Module, name: str) -> torch.Tensor | None:
        """Return the tensor that forwards use as parameter ``name``, with this rank's gradient.

        None if that is the parameter itself, or belongs to another residency.
        """

    def written(self, module: nn.Module, name: str) -> None:
        """Take over the current value of the gathered parameter ``name`` of ``module``."""

    def reduce(self) -> None:
        """Start to sum the gradients accumulated since the last call."""

    def finish(self) -> None:
        """Wait for the sums and set ``.grad``: the step has ended."""

    def drop(self) -> None:
        """Abandon a step that has failed on this rank, without waiting for other ranks."""


Residencies = tuple[Residency, ...]
"""Those of a stage, driven together; none for a plain stage."""


def computing(residencies: Residencies, module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the tensor that forwards use as parameter ``name``; None without such a parameter."""
    for residency in residencies:
        found = residency.computing(module, name)
        if found is not None:
            return found
    return module._parameters.get(name)


def find_residencies(module: nn.Module) -> Residencies:
    """Collect the residencies of ``module`` and its submodules.

    Raises ``TypeError`` for torch's data-parallel modules, whose own hooks cannot be driven.
    """
    found: dict[int, Residency] = {}
    for name, part in module.named_modules():
        kinds = type(part).__mro__
        foreign = {kind.__name__ for kind in kinds if kind.__module__.startswith("torch.")}
        for kind, ours in FOREIGN.items():
            if kind in foreign:
                raise TypeError(
                    f"module {name or type(part).__name__!r} of a pipeline stage is wrapped by "
                    f"torch's {kind}, which cannot be driven by a schedule without wrong "
                    f"gradients; use {ours}"
                )
        offer = getattr(part, "pipeline_residency", None)
        if offer is not None:
            residency = offer()
            found.setdefault(id(residency), residency)
    return tuple(found.values())
