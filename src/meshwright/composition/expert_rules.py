"""Rules of axis expert: which modules are split, and what to do about a split that changes a model.

Experts are rows of parameters, so that a module of them may have any number of experts.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from meshwright.composition.data_layout import LayoutCommunicators
from meshwright.composition.whole_run import AxisSplit
from meshwright.errors import InternalError, PlanError
from meshwright.plan import Plan, match_names


def expert_names(
    model: nn.Module, plan: Plan, holds: Callable[[nn.Module], bool]
) -> tuple[str, ...]:
    """List the modules that axis expert splits: those that ``plan`` names, or that ``holds`` finds.

    Raises PlanError if there are none.
    """
    named = dict(model.named_modules())
    if isinstance(plan.expert.modules, str):
        found = [name for name, module in named.items() if holds(module)]
    else:
        found = [n for pattern in plan.expert.modules for n in match_names(pattern, named)]
    if not found:
        raise PlanError(
            f"axis expert = {plan.axes.size('expert')}: no module of {type(model).__name__} is "
            "known to hold experts. Name them in [expert] modules, see docs/expert_parallel.md, "
            "or set expert = 1"
        )
    return tuple(dict.fromkeys(found))


def expert_split(peers: LayoutCommunicators) -> AxisSplit:
    """How axis expert splits a model: each rank computes all outputs of its own samples.

    All ranks have the same example, so the gradient is that of the mean of their losses.
    """
    axis = peers.expert
    if axis is None:
        raise InternalError("a plan without axis expert has no split of it")
    return AxisSplit(
        axis=axis,
        judges=peers.passes,
        setting="[expert] modules",
        on_shapes="A module of experts returns a row for each that it is given: leave others out "
        "of [expert] modules",
        on_outputs="a module outside of [expert] modules reads the experts of one in them, or "
        "their number",
        on_gradients="Name in [expert] modules only those whose parameters have a row for each "
        "expert, and are used in their own forward",
        sums=True,
        share=1.0 / axis.size,
    )
