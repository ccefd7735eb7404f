"""Losses and biases that keep experts evenly used: the numbers of one process on every layout.

Statistics are sums over all ranks that read different samples: the axes over which data
parallelism averages gradients, or that of the exchange alone. Ranks of other axes compute the same.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.expert_parallel.forms import form_of
from meshwright.expert_parallel.layer import ExpertLayer
from meshwright.expert_parallel.routing import OWN_LOSS, RECORDED, ROUTING, TALLY, Logits, Routing
from meshwright.gradients import mean_axes

BIAS = "e_score_correction_bias"
"""The buffer by which routers choose, beside their logits."""
_FORMULA = "load_balancing_loss_func"
_TAKES = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def auxiliary_loss(
    model: nn.Module, coefficient: float = 0.01, balance: Literal["global", "rank"] = "global"
) -> torch.Tensor:
    """Return this rank's term of the load balancing loss of the last forward, to add to the loss.

    The loss is that of Hugging Face's models: ``coefficient * experts * sum(f * P)``, with f the
    share of tokens that go to each expert and P its mean probability, both over all layers, without
    padding. "global": f is over all data ranks, and the mean of the terms over data ranks is the
    loss of one process with all their samples, however many tokens each has. Collective. "rank": f
    and P are this rank's own, which gives other numbers. Under gradient accumulation the samples
    are those of one microbatch.

    Raises ValueError for a model without known routers or with another auxiliary loss, and without
    a forward in training since the last one in evaluation.
    """
    if balance not in ("global", "rank"):
        raise ValueError(f'expected balance "global" or "rank", found {balance!r}')
    routings, axes = _routed(model, "auxiliary_loss")
    terms = []
    for routing in routings:
        _check_formula(routing)
        counts, sums = _statistics(routing.logits)
        total = _summed(counts, axes if balance == "global" else ()).to(sums.dtype)
        tokens = total[-1].clamp(min=1)
        # P is this rank's part of the mean over all tokens, times the number of ranks.
        parts = _size(axes) if balance == "global" else 1
        terms.append((total[:-1] / tokens * sums).sum() * (parts * len(sums) / tokens))
    return coefficient * torch.stack(terms).sum()


def z_loss(model: nn.Module, coefficient: float = 1e-3) -> torch.Tensor:
    """Return this rank's term of the router z-loss of the last forward, to add to the loss.

    The loss is ``coefficient`` times the mean over tokens of the squared log-sum-exp of a router's
    logits, without padding, summed over layers: a router's gradient does not depend on how many
    layers there are. The mean of the terms over data ranks is the loss of one process. Collective:
    ranks may have unequal numbers of tokens. Raises ValueError as `auxiliary_loss` does.
    """
    routings, axes = _routed(model, "z_loss")
    calls = [call for routing in routings for call in routing.logits]
    squares = [(_wide(call.values).logsumexp(-1) ** 2 * call.kept).sum() for call in calls]
    tokens = _summed(torch.stack([call.kept.sum() for call in calls]), axes).clamp(min=1)
    return coefficient * _size(axes) * (torch.stack(squares) / tokens).sum()


def counts_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return how many tokens each expert got in the last step, by module, over all data ranks.

    A step is every forward in training since the last step of any optimizer, or the last call of
    `balance_experts`; the next forward in training begins a new one. A token counts for each expert
    it goes to. Padding, evaluation and recomputation are not counted. Collective.
    """
    layers = _layers(model, "counts_of")
    counts = []
    for layer in layers.values():
        settings = layer._meshwright_style
        none = torch.zeros(settings.experts, dtype=torch.int64, device=settings.site.axis.device)
        counts.append(vars(layer).get(TALLY, (none, 0))[0].to(none.device))
    total = _summed(torch.cat(counts), _data_axes(layers))
    return dict(zip(layers, total.split([len(each) for each in counts]), strict=True))


@torch.no_grad()
def balance_experts(model: nn.Module, rate: float | torch.Tensor = 1e-3) -> None:
    """Move the biases by which routers choose towards experts that got few tokens in the last step.

    ``bias += rate * sign(mean(counts) - counts)``, with the counts of `counts_of`, for each buffer
    ``e_score_correction_bias``, which routers such as DeepSeek's have. Call it on all ranks, after
    ``optimizer.step()``. Where that is skipped, ``rate=0.0`` drops the counts of the step.

    Raises ValueError for a model without such a buffer, or with one of fewer bits than float32.
    """
    layers = _layers(model, "balance_experts")
    every = [name for name, part in model.named_modules() if form_of(part) is not None]
    found = ((name, _bias_of(model, name, layer, every)) for name, layer in layers.items())
    biases = {name: bias for name, bias in found if bias is not None}
    narrow = [str(bias.dtype) for bias in biases.values() if bias.dtype.itemsize < 4]
    if narrow or not biases:
        raise ValueError(
            f"balance_experts: expected float32 buffers {BIAS} beside the experts of "
            f"{type(model).__name__}, found {narrow[0] if narrow else 'none'}. "
            + ("Keep them in float32" if narrow else "Balance by auxiliary_loss instead")
        )
    for name, counts in counts_of(model).items():
        if name in biases:  # whole numbers: the same bits on every layout
            sign = (counts.sum() - counts * len(counts)).sign()
            biases[name].add_(rate * sign.to(biases[name]))
        if TALLY in vars(layers[name]):
            vars(layers[name])[TALLY] = (vars(layers[name])[TALLY][0], -1)


def _bias_of(
    model: nn.Module, name: str, layer: ExpertLayer, every: Sequence[str]
) -> torch.Tensor | None:
    """Return the bias in the largest block around the experts ``name`` that holds no others.

    ``every`` names those that are not split, too.
    """
    experts = layer._meshwright_style.experts
    while name:
        name = name.rpartition(".")[0]
        if sum(f"{other}.".startswith(f"{name}.".lstrip(".")) for other in every) > 1:
            break
        for path, buffer in model.get_submodule(name).named_buffers():
            if path.rpartition(".")[2] == BIAS and buffer.shape == (experts,):
                return buffer
    return None


def _statistics(calls: list[Logits]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return counts of this rank's tokens, by expert and in all, and sums of probabilities."""
    counts: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    for call in calls:
        probabilities, kept = call.values.softmax(-1), call.kept.unsqueeze(1)
        chosen = probabilities.detach().topk(call.k).indices
        each = kept.new_zeros(probabilities.shape[1])
        each.scatter_add_(0, chosen.reshape(-1), kept.expand_as(chosen).reshape(-1))
        counts.append(torch.cat([each, kept.sum(0)]))
        sums.append((_wide(probabilities) * kept).sum(0))
    return torch.stack(counts).sum(0), torch.stack(sums).sum(0)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _size(axes: tuple[Communicator, ...]) -> int:
    return math.prod(axis.size for axis in axes)


def _summed(counts: torch.Tensor, axes: tuple[Communicator, ...]) -> torch.Tensor:
    total = counts.clone()
    for axis in axes:
        axis.all_reduce(total, label="tokens of experts").wait()
    return total


def _data_axes(layers: dict[str, ExpertLayer]) -> tuple[Communicator, ...]:
    held = [parameter for layer in layers.values() for parameter in layer.parameters()]
    return mean_axes(held) or (next(iter(layers.values()))._meshwright_style.site.axis,)


def _layers(model: nn.Module, caller: str) -> dict[str, ExpertLayer]:
    found = {name: part for name, part in model.named_modules() if isinstance(part, ExpertLayer)}
    if not found:
        raise ValueError(
            f"{caller}: no module of {type(model).__name__} is split by ExpertParallel. Apply it, "
            "on a mesh of one rank if experts are on no axis"
        )
    return found


def _routed(model: nn.Module, caller: str) -> tuple[list[Routing], tuple[Communicator, ...]]:
    """Return what routers have returned in the last forward, and the axes of data."""
    known = dict.fromkeys(filter(None, (vars(part).get(ROUTING) for part in model.modules())))
    # One process whose routers are recorded needs no experts on an axis.
    is_whole = known and not any(isinstance(part, ExpertLayer) for part in model.modules())
    axes = () if is_whole else _data_axes(_layers(model, caller))
    if not any(routing.has_routers for routing in known):
        raise ValueError(
            f"{caller}: no module of {type(model).__name__} is known to be a router. Give its "
            f'class {RECORDED} = {{"router_logits": Router}}, as in Hugging Face, where modules of '
            "class Router return logits, and call parallelize_module with the whole model"
        )
    if not (found := [routing for routing in known if routing.logits]):
        raise ValueError(
            f"{caller}: expected a forward of {type(model).__name__} in training, with gradients, "
            "found none since the last one without. Call it between the forward and the next one"
        )
    return found, axes


def _check_formula(routing: Routing) -> None:
    """Raise ValueError for a model whose own loss counts already, or has another formula."""
    homes = [kind.__module__ for kind in routing.kind.__mro__]
    is_theirs = any(home.startswith("transformers.models.") for home in homes)
    known = (getattr(sys.modules.get(home), _FORMULA, None) for home in homes)
    given = next(filter(None, known), None)
    fault = ""
    if routing.has_own_loss:
        fault = f"it adds an auxiliary loss of its own ({OWN_LOSS}=True), which would count twice"
    elif not all(call.k for call in routing.logits):
        fault = "its routers do not say by an attribute top_k how many experts a token goes to"
    elif is_theirs and given is None:
        fault = "it has none in transformers: use balance_experts if its routers have a bias"
    elif is_theirs and list(inspect.signature(given).parameters) != _TAKES:  # pyrefly: ignore
        fault = "it has one of another formula in transformers"
    if fault:
        raise ValueError(f"auxiliary_loss of {routing.kind.__name__}: {fault}")
