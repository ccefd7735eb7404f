"""The flat view of a model: one long tensor for each unit, or for all that no unit manages.

An element-wise optimizer (SGD, Adam, AdamW and the like) does the same to every element, so it may
as well step this rank's part of a whole unit at once: a few long tensors in place of hundreds of
short ones. The flat tensors are the memory of the parameters, so both change together.
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.data_parallel.flat.flat_parameters import FlatParameter, flat_parameters
from meshwright.data_parallel.sharded_modules.module_hooks import driver_of
from meshwright.data_parallel.shards.unit import Unit


def flat_groups(model: nn.Module) -> list[nn.Parameter]:
    """This rank's parts of the parameters of ``model`` that train now, as few 1-D parameters.

    One for each unit of `fully_shard` and dtype; and of the parameters that no unit manages, plain
    ones and DTensors of `parallelize_module`, one for each dtype, device and set of axes over which
    their elements lie spread, on a CPU in pieces of a few MiB. The parameters are views of them,
    and their gradients are too, from when ``.grad`` of a flat one is read; of those outside units a
    second gradient is kept for it, but for long ones that stand alone.

    A parameter without a gradient (in a unit: on any rank) counts as zeros, unless none of a flat
    one has any. Zero the gradients through the optimizer or the model, and give these to
    element-wise optimizers only: an update that looks at shapes or norms of single parameters is
    another one on flat tensors. Call it again, and build the optimizer again, when the model was
    converted or other parameters train.

    How many there are may differ with the device and the layout: save an optimizer by the names of
    the parameters, as `meshwright.checkpoint` does.

    Raises ValueError when nothing of ``model`` trains but what `FullyShardedDataParallel` manages,
    which is flat as it is, or when a parameter is on the meta device.

    >>> optimizer = torch.optim.AdamW(flat_groups(fully_shard(model)))
    """
    found: list[nn.Parameter] = []
    managed: set[int] = set()
    for unit in _units(model):
        managed.update(id(parameter) for parameter in unit.exposure.parameters(unit))
        managed.update(id(slot.full) for group in unit.groups for slot in group.slots)
        flats = (unit.exposure.shard_of(group) for group in unit.trainable_groups)
        found += [flat for flat in flats if flat is not None]
    found += flat_parameters(
        [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and id(parameter) not in managed
        ]
    )
    if not found:
        raise ValueError(
            "expected a model with parameters that train and are not flat already, found none in "
            f"this {type(model).__name__}"
        )
    return found


def follow_gradients(model: nn.Module) -> None:
    """Make flat gradients of units what ``.grad`` of the parameters of ``model`` is now."""
    for unit in _units(model):
        for group in unit.groups:
            unit.exposure.follow_gradients(group)


def parts_of_flat(
    model: nn.Module, flat: nn.Parameter, line: torch.Tensor
) -> list[tuple[nn.Parameter, torch.Tensor]] | None:
    """List the parameters of ``flat``, and what of ``line``, which is as long, each would have.

    That lies in the memory of ``line``, and is a DTensor where the parameter is one. None when
    ``flat`` is none of the `flat_groups` of ``model``.
    """
    if isinstance(flat, FlatParameter):
        return flat.parts_of(line)
    for unit in _units(model):
        for group in unit.groups:
            if unit.exposure.has_flat(group, flat):
                return unit.exposure.parts_of(group, line)
    return None


def _units(model: nn.Module) -> list[Unit]:
    drivers = dict.fromkeys(d for part in model.modules() if (d := driver_of(part)) is not None)
    return [driver.unit for driver in drivers if driver.unit is not None]
