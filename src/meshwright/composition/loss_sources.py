"""Checks which parameters a loss may read besides the model's output.

A gradient through the loss is correct for a parameter that is unsharded, in the last stage and
trained by this layout. Any other would get a partial gradient, or one that is neither summed nor
scaled, and is rejected by name::

    whole parameter of the model     as in one process
    DTensor over axis tensor         its full_tensor()
    DTensor over axis shard          rejected: its gradient is not summed and scaled with the others
    parameter of another stage       rejected: that may have been reduced by then
    any other                        rejected: nobody trains it
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from meshwright.comm.dtensors.dtensor import is_dtensor, known_at_rest
from meshwright.comm.dtensors.local_leaves import local_leaf
from meshwright.data_parallel.sharded_modules.module_hooks import driver_of
from meshwright.errors import LayoutError, PlanError
from meshwright.gradients import leaves_of

_ADVICE = "Or compute the term in the model's forward, and return it with the output"


class LossSources:
    """The tensors that the loss of one layout may read."""

    def __init__(self, module: nn.Module, others: Mapping[int, nn.Module]) -> None:
        """``others`` are this rank's other stages if ``module`` is the last stage."""
        self._module = module
        self._others = dict(others)
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}
        """Leaves that have been accepted, by ``id``."""

    def look(self, total: torch.Tensor, ends: Collection[object]) -> None:
        """Raise LayoutError for a forbidden leaf in the graph between ``ends`` and ``total``."""
        found = leaves_of(total, ends)
        for leaf in found:
            known = self._known.get(id(leaf))
            if known is None or known() is not leaf:
                self._judge(leaf)
                self._known[id(leaf)] = weakref.ref(leaf)
        if type(total) is not torch.Tensor and is_dtensor(total):
            names = [self._name(self._module, leaf) for leaf in found if is_dtensor(leaf)]
            raise LayoutError(
                f"the loss is a DTensor, because it reads {names[0]!r}, of which each rank of axis "
                f"tensor holds a part: take the parameter's `full_tensor()` in the loss. {_ADVICE}"
            )

    def _judge(self, leaf: torch.Tensor) -> None:
        for stage, module in self._others.items():
            name = self._name(module, leaf)
            if name is not None:
                raise LayoutError(
                    f"the loss reads parameter {name!r} of stage {stage}. It is on this rank, and "
                    "the loss belongs to the last stage: another schedule has it elsewhere, and "
                    "its gradient may have been reduced by then. Where it is tied, read it by a "
                    f"name that the last stage has. {_ADVICE}"
                )
        name = self._name(self._module, leaf)
        rest = known_at_rest(leaf)
        if rest is not None and "shard" in (rest.mesh.mesh_dim_names or ()):
            raise LayoutError(
                f"the loss reads parameter {name or tuple(leaf.shape)!r} when each rank of axis "
                "shard holds a part of it, and its gradient would not be summed and scaled with "
                f"the others: set reshard_after_forward = false in [shard]. {_ADVICE}"
            )
        if name is None:
            raise LayoutError(
                f"the loss reads a tensor of shape {tuple(leaf.shape)} that requires grad and is "
                "no parameter of the model, so that its gradient would neither be summed over "
                "ranks nor scaled: make it a parameter of the model, or let it not require grad"
            )

    def _name(self, module: nn.Module, leaf: torch.Tensor) -> str | None:
        """The name of the parameter of ``module`` that forwards use as ``leaf``, or None."""
        return next((name for name, found in _computing(module) if found is leaf), None)


def _computing(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that forwards use, under the names of parameters."""
    for path, part in module.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                name = f"{path}.{key}".lstrip(".")
                yield name, parameter
                yield name, local_leaf(parameter)
        driver = driver_of(part)
        for group in () if driver is None or driver.unit is None else driver.unit.groups:
            for slot in group.slots:
                yield slot.name, slot.full


def check_own_parameters(loss: object, model: nn.Module) -> None:
    """Raise PlanError for a loss with parameters of its own, which no layout would train."""
    if not isinstance(loss, nn.Module):
        return
    known = {id(parameter) for parameter in model.parameters()}
    own = [n for n, p in loss.named_parameters() if p.requires_grad and id(p) not in known]
    if own:
        raise PlanError(
            f"the loss, a {type(loss).__name__}, has the parameter {own[0]!r}, which is none of "
            "the model: its gradient would neither be summed over ranks nor scaled. Make it a "
            "parameter of the model, or let it not require grad"
        )
