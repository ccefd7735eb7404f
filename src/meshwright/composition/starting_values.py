"""The starting values of a model that is given on the meta device: those of the plan's seed.

They are those of `randomness.initialize` in one process, bit by bit, on every layout. Ranks that
shard parameters draw module by module and keep their parts. Axes pipeline and tensor look at how
the whole model computes, so it is whole on each of their ranks until it has been cut.
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.plan import Plan
from meshwright.randomness.initialization import HeldBoxes, held_whole, initialize

__all__ = ["draw", "is_drawn_in_parts", "is_on_meta"]


def is_on_meta(model: nn.Module) -> bool:
    """Check that ``model`` has no values yet. Raises PlanError where only some parameters have."""
    empty = {name: parameter.is_meta for name, parameter in model.named_parameters()}
    if any(empty.values()) and not all(empty.values()):
        first = next(name for name, is_empty in empty.items() if is_empty)
        known = next(name for name, is_empty in empty.items() if not is_empty)
        raise PlanError(
            f"parameter {first!r} is on the meta device and {known!r} is not: give parallelize a "
            "model that is all on the meta device, to be drawn from [train] seed, or none of it"
        )
    return any(empty.values())


def is_drawn_in_parts(plan: Plan) -> bool:
    """Check that no rank needs the whole model."""
    # What is drawn in another dtype has other values.
    is_cast = plan.precision.parameters != Plan().precision.parameters
    others = max(plan.axes.size("pipeline"), plan.axes.size("tensor"))
    return plan.axes.size("shard") > 1 and others == 1 and not is_cast


def draw(model: nn.Module, plan: Plan, device: torch.device, held: HeldBoxes = held_whole) -> None:
    """Give ``model`` memory on ``device`` and the values of the plan's seed.

    ``held`` tells which parts of parameters this rank has. Raises PlanError for modules that nobody
    can initialise.
    """
    try:
        initialize(model, plan.train.seed, device=device, held=held)
    except (ValueError, RuntimeError) as error:
        raise PlanError(
            f"the model is on the meta device, and cannot be drawn from [train] seed: {error}. "
            "Build it on a device instead"
        ) from error
