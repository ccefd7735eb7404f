"""Where the parameters and gradients of a stage are: what a schedule drives, and never asks about.

A module whose parameters are spread or copied over ranks offers itself by a method
``pipeline_residency()``. While a schedule runs, its own hooks neither gather, free nor reduce:
UNSHARD, RESHARD and REDUCE_GRAD do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from meshwright import comm
from meshwright.comm import Communicator, Pending

__all__ = ["Residency", "Several", "find_residency"]

OURS = ("meshwright.data_parallel", "meshwright.fsdp")
"""Packages whose modules must offer themselves: their own hooks would reduce each microbatch."""
FOREIGN_REPLICA = "DistributedDataParallel"
FOREIGN_SHARDED = ("FullyShardedDataParallel", "FSDPModule")
"""Names of torch's classes: they are recognised and not imported."""


@runtime_checkable
class Residency(Protocol):
    """Parameters that come and go, and gradients that are summed over data-parallel ranks."""

    def begin(self) -> None:
        """A step begins: hooks of the module leave everything to this until `finish`."""
        ...

    def unshard(self) -> None:
        """Start to gather the parameters; a forward or backward waits for them."""
        ...

    def wait_unshard(self) -> None:
        """Wait for the parameters."""
        ...

    def reshard(self) -> None:
        """Give the gathered parameters back."""
        ...

    def reduce(self) -> None:
        """Start to sum the gradients that have come since the last time."""
        ...

    def finish(self) -> None:
        """Wait for the sums and set ``.grad``: the step has ended, well or not."""
        ...


class Several:
    """Some residencies as one; none at all for a plain stage."""

    def __init__(self, parts: Sequence[Residency]) -> None:
        self._parts = tuple(parts)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def begin(self) -> None:
        """A step begins."""
        for part in self._parts:
            part.begin()

    def unshard(self) -> None:
        """Start to gather the parameters."""
        for part in self._parts:
            part.unshard()

    def wait_unshard(self) -> None:
        """Wait for the parameters."""
        for part in self._parts:
            part.wait_unshard()

    def reshard(self) -> None:
        """Give the gathered parameters back."""
        for part in self._parts:
            part.reshard()

    def reduce(self) -> None:
        """Start to sum the gradients."""
        for part in self._parts:
            part.reduce()

    def finish(self) -> None:
        """Wait for the sums."""
        for part in self._parts:
            part.finish()


class _ForeignReplica:
    """torch's DistributedDataParallel in a stage: its gradients are averaged once a step."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        group = getattr(module, "process_group")  # noqa: B009
        self._communicator: Communicator = comm.communicator(group, axis="replicate")
        self._pending: list[tuple[Pending, torch.Tensor, list[torch.Tensor]]] = []
        self._before: bool = True

    def begin(self) -> None:
        """Keep the module's own reducer from running."""
        self._before = getattr(self._module, "require_backward_grad_sync")  # noqa: B009
        setattr(self._module, "require_backward_grad_sync", False)  # noqa: B010

    def unshard(self) -> None:
        """The parameters are there."""

    def wait_unshard(self) -> None:
        """The parameters are there."""

    def reshard(self) -> None:
        """The parameters stay."""

    def reduce(self) -> None:
        """Start to average ``.grad`` over the replicas, dtype by dtype."""
        grads = [
            p.grad for p in self._module.parameters() if p.requires_grad and p.grad is not None
        ]
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            same = [grad for grad in grads if grad.dtype is dtype]
            flat = torch.cat([grad.reshape(-1) for grad in same])
            flat.div_(self._communicator.size)
            pending = self._communicator.all_reduce(flat, label="reduce a stage", async_op=True)
            self._pending.append((pending, flat, same))

    def finish(self) -> None:
        """Write the averages to ``.grad``."""
        for pending, flat, grads in self._pending:
            pending.wait()
            at = 0
            for grad in grads:
                grad.copy_(flat[at : at + grad.numel()].view(grad.shape))
                at += grad.numel()
        self._pending.clear()
        setattr(self._module, "require_backward_grad_sync", self._before)  # noqa: B010


def find_residency(module: nn.Module) -> Several:
    """All of ``module`` that is spread or copied over ranks, outermost parts only.

    Raises ``TypeError`` for torch's fully sharded modules, whose own hooks cannot be driven.
    """
    found: list[Residency] = []
    _collect(module, "", found)
    return Several(found)


def _collect(module: nn.Module, name: str, found: list[Residency]) -> None:
    kinds = type(module).__mro__
    foreign = {kind.__name__ for kind in kinds if kind.__module__.startswith("torch.")}
    for kind in FOREIGN_SHARDED:
        if kind in foreign:
            raise TypeError(
                f"module {name or type(module).__name__!r} of a pipeline stage is sharded by "
                f"torch's {kind}, which cannot be driven by a schedule without wrong gradients; "
                "use meshwright.fully_shard or meshwright.FullyShardedDataParallel"
            )
    offer = getattr(module, "pipeline_residency", None)
    if offer is not None:
        found.append(offer())
        return
    if any(kind.__module__.startswith(OURS) for kind in kinds):
        raise TypeError(
            f"module {name or type(module).__name__!r} of a pipeline stage is a "
            f"{type(module).__name__}, which schedules cannot drive yet; use plain modules, or "
            "torch's DistributedDataParallel, whose gradients are averaged once a step"
        )
    if FOREIGN_REPLICA in foreign:
        found.append(_ForeignReplica(module))
        return
    for child_name, child in module.named_children():
        _collect(child, f"{name}.{child_name}" if name else child_name, found)
