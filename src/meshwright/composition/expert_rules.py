"""Rules of axis expert: which modules are split, what a plan and a model must say of each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.composition.carried_plans import carries, expert_modules, unknown_words
from meshwright.composition.data_layout import LayoutCommunicators
from meshwright.composition.whole_run import AxisSplit
from meshwright.errors import InternalError
from meshwright.expert_parallel import (
    ExpertParallel,
    auxiliary_loss,
    balance_experts,
    counts_of,
    z_loss,
)
from meshwright.expert_parallel.balance import BIAS
from meshwright.expert_parallel.forms import form_of
from meshwright.expert_parallel.layer import ExpertLayer
from meshwright.expert_parallel.routing import TALLY
from meshwright.gradients import LocalLoss
from meshwright.plan import ExpertPlan, Plan, match_names
from meshwright.settings import Problem


def expert_styles(model: nn.Module, plan: Plan) -> dict[str, ExpertParallel]:
    """Map the modules that axis expert splits to their style: those named, or all known ones."""
    if plan.axes.size("expert") == 1:
        return {}
    named = dict(model.named_modules())
    if plan.expert.modules == "model":
        found = expert_modules(model)
    elif isinstance(plan.expert.modules, str):
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
    for pattern, word in unknown_words(model) if expert.modules == "model" else ():
        yield Problem(
            ("expert", "modules"),
            f'[expert] modules = "model": the ep_plan of {type(model).__name__} gives {pattern!r} '
            f"the word {word!r}, which is not known. Name the modules of experts, or leave them to "
            '"auto"',
        )
    if expert.modules == "model" and not expert_modules(model):
        yield Problem(
            ("expert", "modules"),
            f'[expert] modules = "model": {carries(model)}, and no ep_plan that names a module of '
            'it. Name the modules of experts, or leave them to "auto"',
        )
    elif not expert_styles(model, plan):
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
    buffers = (name.rpartition(".")[2] for name, _ in model.named_buffers())
    if expert.bias_rate is not None and BIAS not in buffers:
        yield Problem(
            ("expert", "bias_rate"),
            f"axis expert: bias_rate moves buffers {BIAS}, and {type(model).__name__} has none. "
            "Leave bias_rate out, or give auxiliary",
        )
    stages = plan.axes.size("pipeline")
    if expert.auxiliary and stages > 1:
        yield Problem(
            ("expert", "auxiliary"),
            f"axis expert with pipeline = {stages}: the auxiliary loss of {type(model).__name__} "
            "multiplies means over all layers, of which a stage has some. Leave auxiliary out, or "
            "set pipeline = 1",
        )
    for key in ("z_loss", "bias_rate") if stages > 1 else ():
        if getattr(expert, key):
            yield Problem(
                ("expert", key),
                f"axis expert with pipeline = {stages}: a stage does not see which tokens are "
                f"padding, which must not count. Leave {key} out, or set pipeline = 1",
            )


def with_balance(
    local: LocalLoss, model: nn.Module, expert: ExpertPlan, data: Communicator
) -> LocalLoss:
    """Add this rank's terms of the losses that balance experts to the loss of its microbatch.

    Their mean over ``data`` is that of one process. Beside a sum they weigh as the terms of all
    ranks do in this microbatch; then this is collective.
    """
    added = []
    if expert.auxiliary and expert.balance in ("global", "rank"):
        added.append(auxiliary_loss(model, expert.auxiliary, expert.balance))
    if expert.z_loss:
        added.append(z_loss(model, expert.z_loss))
    if not added:
        return local
    term = sum(added[1:], added[0])
    if not local.is_mean:
        counts = torch.zeros(1, dtype=torch.float64, device=data.device)
        counts += local.count
        data.all_reduce(counts, label="terms of a microbatch").wait()
        term = term * (counts / data.size).to(term.dtype).squeeze()
    return replace(local, total=local.total + term.to(local.total.dtype))


def move_biases(model: nn.Module, expert: ExpertPlan, *, is_skipped: bool) -> None:
    """Move the biases by which routers choose, after a step; one that is skipped does not count."""
    if expert.bias_rate is not None and _has_experts(model):
        balance_experts(model, 0.0 if is_skipped else expert.bias_rate)


def forget_counts(model: nn.Module) -> None:
    """Forget the tokens of passes that belong to no step, as those over the example."""
    for part in model.modules():
        vars(part).pop(TALLY, None)


def imbalance(model: nn.Module, everyone: Communicator) -> float:
    """Return the tokens of the busiest expert, over the mean of its layer, in the last step."""
    own = 0.0
    for counts in counts_of(model).values() if _has_experts(model) else ():
        own = max(own, counts.max().item() * len(counts) / max(counts.sum().item(), 1))
    return max(everyone.gather_values(own, label="imbalance of experts"))


def _has_experts(model: nn.Module) -> bool:
    return any(isinstance(part, ExpertLayer) for part in model.modules())


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
        sums=(axis,),
        share=1.0 / axis.size,
    )
