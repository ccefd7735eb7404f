"""The parameters and gradients of a stage on this rank: a schedule drives them and never asks.

A module whose parameters are spread or copied over ranks offers itself by a method
``pipeline_residency()``; modules that return the same object are driven as one. While a schedule
runs, hooks of these modules neither gather, free nor reduce: UNSHARD, RESHARD and REDUCE_GRAD do.
Gradients of microbatches gather whole on each rank until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from meshwright import comm
from meshwright.comm import Communicator, Pending
from meshwright.comm.failures.events import Comparison

__all__ = ["Residency", "Several", "find_residency"]

FOREIGN_REPLICA = "DistributedDataParallel"
FOREIGN_SHARDED = ("FullyShardedDataParallel", "FSDPModule")
"""Names of torch's classes: they are recognised and not imported."""


@runtime_checkable
class Residency(Protocol):
    """Parameters that come and go, and gradients that are summed over data-parallel ranks."""

    def begin(self, what: str, *, training: bool) -> None:
        """A step begins: hooks of the module leave everything to this until it ends.

        ``what`` describes the step; data-parallel ranks must run the same.
        """
        ...

    def unshard(self) -> None:
        """Start to gather the parameters; a forward or backward waits for them."""
        ...

    def wait_unshard(self) -> None:
        """Wait for the parameters."""
        ...

    def accumulate(self) -> None:
        """A microbatch has left its gradients."""
        ...

    def reshard(self) -> None:
        """Give the gathered parameters back."""
        ...

    def computing(self, module: nn.Module, name: str) -> torch.Tensor | None:
        """Find the tensor that computes as parameter ``name``, with this rank's own gradient.

        None where that is the parameter itself, or another residency's.
        """
        ...

    def written(self, module: nn.Module, name: str) -> None:
        """The gathered parameter ``name`` of ``module`` has been written: that is its value now."""
        ...

    def reduce(self) -> None:
        """Start to sum the gradients that have come since the last time."""
        ...

    def finish(self) -> None:
        """Wait for the sums and set ``.grad``: the step has ended."""
        ...

    def drop(self) -> None:
        """The step has failed on this rank: wait for nobody."""
        ...


class Several:
    """Some residencies as one; none at all for a plain stage."""

    def __init__(self, parts: Sequence[Residency]) -> None:
        self._parts = tuple(parts)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def begin(self, what: str, *, training: bool) -> None:
        """A step begins."""
        for part in self._parts:
            part.begin(what, training=training)

    def unshard(self) -> None:
        """Start to gather the parameters."""
        for part in self._parts:
            part.unshard()

    def wait_unshard(self) -> None:
        """Wait for the parameters."""
        for part in self._parts:
            part.wait_unshard()

    def accumulate(self) -> None:
        """A microbatch has left its gradients."""
        for part in self._parts:
            part.accumulate()

    def reshard(self) -> None:
        """Give the gathered parameters back."""
        for part in self._parts:
            part.reshard()

    def computing(self, module: nn.Module, name: str) -> torch.Tensor | None:
        """Find the tensor that computes as parameter ``name`` of ``module``; None without one."""
        for part in self._parts:
            found = part.computing(module, name)
            if found is not None:
                return found
        return module._parameters.get(name)

    def written(self, module: nn.Module, name: str) -> None:
        """The gathered parameter ``name`` of ``module`` has been written."""
        for part in self._parts:
            part.written(module, name)

    def reduce(self) -> None:
        """Start to sum the gradients."""
        for part in self._parts:
            part.reduce()

    def finish(self) -> None:
        """Wait for the sums."""
        for part in self._parts:
            part.finish()

    def drop(self) -> None:
        """The step has failed."""
        for part in self._parts:
            part.drop()


class _ForeignReplica:
    """torch's DistributedDataParallel in a stage: its gradients are averaged once a step."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        group = getattr(module, "process_group")  # noqa: B009
        self._communicator: Communicator = comm.communicator(group, axis="replicate")
        self._pending: list[tuple[Pending, torch.Tensor, list[nn.Parameter]]] = []
        self._comparison = Comparison()
        self._is_wanted: bool | None = None
        """What was set before the step; None between steps."""

    def begin(self, what: str, *, training: bool) -> None:
        """Keep the module's own reducer from running; compare steps that are new."""
        self._comparison.compare(self._communicator, what)
        self._is_wanted = getattr(self._module, "require_backward_grad_sync")  # noqa: B009
        setattr(self._module, "require_backward_grad_sync", False)  # noqa: B010

    def unshard(self) -> None:
        """The parameters are there."""

    def wait_unshard(self) -> None:
        """The parameters are there."""

    def accumulate(self) -> None:
        """They are in ``.grad``."""

    def reshard(self) -> None:
        """The parameters stay."""

    def computing(self, module: nn.Module, name: str) -> torch.Tensor | None:
        """Find the parameters themselves."""
        return None

    def written(self, module: nn.Module, name: str) -> None:
        """There is no other copy."""

    def reduce(self) -> None:
        """Start to average ``.grad`` over the replicas, dtype by dtype.

        What a replica has not used counts as zero; what none has used gets no gradient.
        """
        if not self._is_wanted:
            return
        left_out = frozenset(getattr(self._module, "parameters_to_ignore", ()))
        named = getattr(self._module, "module").named_parameters()  # noqa: B009
        trained = [p for name, p in named if p.requires_grad and name not in left_out]
        for dtype in dict.fromkeys(p.dtype for p in trained):
            same = [p for p in trained if p.dtype is dtype]
            used = torch.tensor([p.grad is not None for p in same]).to(same[0])
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
            flat = torch.cat([used, *(grad.reshape(-1) for grad in grads)])
            flat.div_(self._communicator.size)
            pending = self._communicator.all_reduce(flat, label="reduce a stage", async_op=True)
            self._pending.append((pending, flat, same))

    def finish(self) -> None:
        """Write the averages to ``.grad``."""
        for pending, flat, parameters in self._pending:
            pending.wait()
            used, at = flat[: len(parameters)].tolist(), len(parameters)
            for parameter, is_used in zip(parameters, used, strict=True):
                mean = flat[at : at + parameter.numel()].view(parameter.shape)
                at += parameter.numel()
                if parameter.grad is not None:
                    parameter.grad.copy_(mean)
                elif is_used:
                    parameter.grad = mean.clone()
        self.drop()

    def drop(self) -> None:
        """Set the module's own reducer to run again."""
        self._pending.clear()
        if self._is_wanted is not None:
            setattr(self._module, "require_backward_grad_sync", self._is_wanted)  # noqa: B010
            self._is_wanted = None


def find_residency(module: nn.Module) -> Several:
    """Find all of ``module`` that is spread or copied over ranks, nested parts too.

    Raises ``TypeError`` for torch's fully sharded modules, whose own hooks cannot be driven.
    """
    found: dict[int, Residency] = {}
    for name, part in module.named_modules():
        kinds = type(part).__mro__
        foreign = {kind.__name__ for kind in kinds if kind.__module__.startswith("torch.")}
        for kind in FOREIGN_SHARDED:
            if kind in foreign:
                raise TypeError(
                    f"module {name or type(part).__name__!r} of a pipeline stage is sharded by "
                    f"torch's {kind}, which cannot be driven by a schedule without wrong "
                    "gradients; use meshwright.fully_shard or meshwright.FullyShardedDataParallel"
                )
        offer = getattr(part, "pipeline_residency", None)
        if offer is not None:
            residency = offer()
            found.setdefault(id(residency), residency)
        elif FOREIGN_REPLICA in foreign:
            replica = _ForeignReplica(part)
            found[id(replica)] = replica
    return Several(list(found.values()))
