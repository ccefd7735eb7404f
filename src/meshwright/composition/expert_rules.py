"""Rules of axis expert: which modules are split, what a plan and a model must say of each other."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from meshwright.composition.data_layout import LayoutCommunicators
from meshwright.composition.whole_run import AxisSplit
from meshwright.errors import InternalError
from meshwright.expert_parallel.forms import form_of
from meshwright.expert_parallel.style import ExpertParallel
from meshwright.plan import Plan, match_names
from meshwright.settings import Problem


def expert_styles(model: nn.Module, plan: Plan) -> dict[str, ExpertParallel]:
    """Map the modules that axis expert splits to their style: those named, or all known ones."""
    if plan.axes.size("expert") == 1:
        return {}
    named = dict(model.named_modules())
    if isinstance(plan.expert.modules, str):
        found = [name for name, module in named.items() if form_of(module) is not None]
    else:
        found = [n for pattern in plan.expert.modules for n in match_names(pattern, named)]
    expert = plan.expert
    return {
        name: ExpertParallel(exchange=expert.exchange, own_auxiliary=expert.balance == "rank")
        for name in found
    }


def expert_problems(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """Yield what axis expert, and its settings, cannot do with ``model``."""
    ranks, expert = plan.axes.size("expert"), plan.expert
    if ranks == 1:
        return
    if not expert_styles(model, plan):
        yield Problem(
            ("axes", "expert"),
            f"axis expert = {ranks}: no module of {type(model).__name__} is known to hold experts. "
            "Name them in [expert] modules, see docs/expert_parallel.md, or set expert = 1",
        )
    config = getattr(model, "config", None)
    if hasattr(config, _COEFFICIENT) and expert.balance is None:
        yield Problem(
            ("expert", "balance"),
            'axis expert: [expert] balance is not set: "global" is the loss of one process, "rank" '
            'uses each rank\'s own statistics, "none" adds no auxiliary loss',
        )
    elif getattr(config, _RETURNED, False) and expert.balance != "rank":
        yield Problem(
            ("expert", "balance"),
            "axis expert: the model returns an auxiliary loss of its own (output_router_logits="
            "True), computed from this rank's tokens. Set it to False and give [expert] auxiliary "
            'and balance = "global", or set balance = "rank"',
        )


_COEFFICIENT, _RETURNED = "router_aux_loss_coef", "output_router_logits"
"""Settings in the config of a Hugging Face model: of its auxiliary loss, and that it returns it."""


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
