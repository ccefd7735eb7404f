"""The flat view of a sharded model: one long tensor for each unit and dtype, for the optimizer.

An element-wise optimizer (SGD, Adam, AdamW and the like) does the same to every element, so it may
as well step this rank's shard of a whole unit at once: a few long tensors in place of hundreds of
short ones. The flat tensors are the memory of the sharded parameters, so both change together.
"""

from __future__ import annotations

from torch import nn

from meshwright.data_parallel.driver import driver_of
from meshwright.data_parallel.exposed_tensors import ExposedTensors

__all__ = ["flat_groups"]


def flat_groups(model: nn.Module) -> list[nn.Parameter]:
    """This rank's shards of ``model``, 1-D, one for each unit and dtype that trains.

    ``.grad`` of each is set by the backward pass; the gradients of the parameters are views of it.
    A parameter without a gradient on any rank counts as zeros here. Zero the gradients through the
    optimizer or the model, and give these to element-wise optimizers only: an update that looks at
    shapes or norms of single parameters is another one on flat tensors.

    Raises ValueError when ``model`` has no parameter that fully_shard has sharded and that trains.

    >>> optimizer = torch.optim.AdamW(flat_groups(fully_shard(model)))
    """
    found: list[nn.Parameter] = []
    drivers = dict.fromkeys(d for part in model.modules() if (d := driver_of(part)) is not None)
    for driver in drivers:
        unit = driver.unit
        if unit is None or not isinstance(unit.exposure, ExposedTensors):
            continue
        found += [unit.exposure.flat(group) for group in unit.trainable_groups]
    if not found:
        raise ValueError(
            f"expected a model with parameters that fully_shard has sharded and that train, found "
            f"none in this {type(model).__name__}. Call fully_shard first"
        )
    return found
