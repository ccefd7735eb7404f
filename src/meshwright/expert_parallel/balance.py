"""Losses and biases that keep experts evenly used: the numbers of one process on every layout.

Statistics are sums over all ranks that read different samples: the axes over which data
parallelism averages gradients, or the axis of the exchange alone. Ranks of other axes have the same
samples, so they compute the same.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.expert_parallel.layer import ExpertLayer
from meshwright.expert_parallel.routing import ROUTING, TALLY, Logits, Routing, end_step
from meshwright.gradients import mean_axes

_BIAS = "e_score_correction_bias"
_FORMULA = "load_balancing_loss_func"
_TAKES = ("gate_logits", "num_experts", "top_k", "attention_mask")


def auxiliary_loss(
    model: nn.Module,
    coefficient: float = 0.01,
    balance: Literal["global", "rank"] = "global",
) -> torch.Tensor:
    """Return this rank's term of the load balancing loss of the last forward, to add to the loss.

    The loss is that of Hugging Face's models: with f the share of tokens that go to each expert and
    P its mean probability, both over all layers, ``coefficient * experts * sum(f * P)``. Padding is
    left out. "global": f is over all data ranks, and the mean of the terms over data ranks is the
    loss of one process with all their samples, also for ranks with unequal numbers of tokens. This
    is collective. "rank": f and P are this rank's own, which gives other numbers.

    With gradient accumulation the samples are those of one microbatch, on all ranks.

    Raises ValueError for a model without known routers, without a forward in training since the
    last one in evaluation, or whose own auxiliary loss is another one or would be added, too.
    """
    if balance not in ("global", "rank"):
        raise ValueError(f'expected balance "global" or "rank", found {balance!r}')
    found, axes = _routed(model, "auxiliary_loss")
    terms = []
    for routing in found:
        _check_formula(routing)
        counts, sums = _statistics(routing)
        own, parts = counts, 1
        if balance == "global":
            counts = _summed(counts, axes, "auxiliary_loss")
            # This rank has a part of the mean over tokens, and of the mean over ranks.
            parts = math.prod(axis.size for axis in axes)
        tokens = counts[-1].clamp(min=1)
        shares = counts[:-1].to(sums.dtype) / tokens
        terms.append((shares * sums).sum() * (parts * len(own[:-1]) / tokens))
    return coefficient * sum(terms[1:], terms[0])


def z_loss(model: nn.Module, coefficient: float = 1e-3) -> torch.Tensor:
    """Return this rank's term of the router z-loss of the last forward, to add to the loss.

    The loss is ``coefficient`` times the mean over tokens of the squared log-sum-exp of a router's
    logits, summed over layers: so a router's gradient does not depend on how many layers there are.
    Padding is left out. The mean of the terms over data ranks is the loss of one process with all
    their samples. This is collective, since ranks may have unequal numbers of tokens.

    Raises ValueError as `auxiliary_loss` does.
    """
    found, axes = _routed(model, "z_loss")
    calls = [call for routing in found for call in routing.logits]
    squares = [(_wide(call.values).logsumexp(-1).square() * call.kept).sum() for call in calls]
    tokens = _summed(torch.stack([call.kept.sum() for call in calls]), axes, "z_loss")
    parts = math.prod(axis.size for axis in axes)
    return coefficient * parts * (torch.stack(squares) / tokens.clamp(min=1)).sum()


def counts_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return how many tokens each expert got in the last step, by module, over all data ranks.

    A step is every forward in training since the last step of an optimizer, or call of
    `balance_experts`. It can be read until the next forward in training. A token counts for each
    expert that it goes to; padding, evaluation and recomputation are not counted. Collective.
    """
    layers = _layers(model, "counts_of")
    parts = []
    for layer in layers.values():
        tally, settings = vars(layer).get(TALLY), layer._meshwright_style
        none = torch.zeros(settings.experts, dtype=torch.int64, device=settings.site.axis.device)
        parts.append(none if tally is None else tally.counts.to(none.device))
    total = _summed(torch.cat(parts), _data_axes(layers.values()), "counts_of")
    return dict(zip(layers, total.split([len(part) for part in parts]), strict=True))


@torch.no_grad()
def balance_experts(model: nn.Module, rate: float = 1e-3) -> None:
    """Move the bias of each router towards experts that got few tokens in the last step.

    ``bias += rate * sign(mean(counts) - counts)``, with the counts of `counts_of`: the buffer
    ``e_score_correction_bias`` of routers such as DeepSeek's, which selects experts and has no
    gradient. Call it after ``optimizer.step()``, on all ranks. It ends the step: where the
    optimizer's step is skipped, ``rate=0.0`` drops the counts, which would else be part of the
    next step's.

    Raises ValueError for a model without such a buffer, or one of fewer bits than float32.
    """
    layers = _layers(model, "balance_experts")
    biases = {name: bias for name in layers if (bias := _bias_of(model, name, layers)) is not None}
    narrow = [name for name, bias in biases.items() if bias.dtype.itemsize < 4]
    if narrow or not biases:
        found = f"one of dtype {biases[narrow[0]].dtype} at '{narrow[0]}'" if narrow else "none"
        raise ValueError(
            f"balance_experts: expected a buffer {_BIAS} of float32 beside the experts of "
            f"{type(model).__name__}, found {found}. "
            + ("Keep it in float32" if narrow else "Balance by auxiliary_loss instead")
        )
    counts = counts_of(model)
    for name, bias in biases.items():
        # Whole numbers, so every layout has the same bits.
        above = counts[name] * len(counts[name]) - counts[name].sum()
        bias.sub_(above.sign().to(bias), alpha=rate)
    for layer in layers.values():
        end_step(layer)


def _bias_of(model: nn.Module, name: str, names: Collection[str]) -> torch.Tensor | None:
    """Return the bias in the largest block around the experts ``name`` that holds no others."""
    experts = model.get_submodule(name)._meshwright_style.experts
    while name:
        name = name.rpartition(".")[0]
        if sum(f"{other}.".startswith(f"{name}.".lstrip(".")) for other in names) > 1:
            break
        for path, buffer in model.get_submodule(name).named_buffers():
            if path.rpartition(".")[2] == _BIAS and buffer.shape == (experts,):
                return buffer
    return None


# -------------------------------------------------------------------------------- statistics


def _statistics(routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return counts of this rank's tokens, by expert and in all, and sums of probabilities."""
    counts, sums = [], []
    for call in routing.logits:
        probabilities = call.values.softmax(-1)
        chosen = probabilities.detach().topk(_k_of(call, routing)).indices
        ones = call.kept.unsqueeze(1).expand_as(chosen).reshape(-1)
        by_expert = call.kept.new_zeros(probabilities.shape[1])
        by_expert.scatter_add_(0, chosen.reshape(-1), ones)
        counts.append(torch.cat([by_expert, call.kept.sum().view(1)]))
        sums.append((_wide(probabilities) * call.kept.unsqueeze(1)).sum(0))
    return torch.stack(counts).sum(0), torch.stack(sums).sum(0)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _k_of(call: Logits, routing: Routing) -> int:
    if call.k is None:
        raise ValueError(
            f"auxiliary_loss: expected an attribute top_k, how many experts a token goes to, of "
            f"'{routing.routers[0]}', which returns the router logits of {routing.kind.__name__}"
        )
    return call.k


def _summed(tensor: torch.Tensor, axes: Sequence[Communicator], label: str) -> torch.Tensor:
    """Add up ``tensor``, of integers, over all data ranks."""
    total = tensor.clone()
    for axis in axes:
        axis.all_reduce(total, label=label).wait()
    return total


def _data_axes(layers: Iterable[ExpertLayer]) -> tuple[Communicator, ...]:
    """Return the axes whose ranks read different samples."""
    first, *rest = layers
    axes = mean_axes(p for layer in (first, *rest) for p in layer.parameters())
    return axes or (first._meshwright_style.site.axis,)


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
    layers = _layers(model, caller)
    known = {id(r): r for part in model.modules() if (r := vars(part).get(ROUTING)) is not None}
    routings = [routing for routing in known.values() if routing.routers]
    name = type(model).__name__
    if not routings:
        raise ValueError(
            f"{caller}: no module of {name} is known to be a router. Give its class "
            '_can_record_outputs = {"router_logits": Router}, as models of Hugging Face have it, '
            "where modules of class Router return logits, and call parallelize_module with the "
            "whole model"
        )
    found = [routing for routing in routings if routing.logits]
    if not found:
        raise ValueError(
            f"{caller}: expected a forward of {name} in training, with gradients, found none since "
            "the last one without. Call it after the forward and before the next one"
        )
    return found, _data_axes(layers.values())


def _check_formula(routing: Routing) -> None:
    """Raise ValueError for a model that has its own loss turned on, or another one."""
    name = routing.kind.__name__
    if routing.has_own:
        raise ValueError(
            f"auxiliary_loss: {name} adds an auxiliary loss of its own (output_router_logits=True) "
            "to its loss, which would count twice. Set it to False, or leave auxiliary_loss out"
        )
    homes = [sys.modules[kind.__module__] for kind in routing.kind.__mro__]
    if not any(home.__name__.startswith("transformers.models.") for home in homes):
        return
    given = next((getattr(home, _FORMULA) for home in homes if hasattr(home, _FORMULA)), None)
    if given is None or tuple(inspect.signature(given).parameters) != _TAKES:
        raise ValueError(
            f"auxiliary_loss: {name} has {'no' if given is None else 'another'} auxiliary loss in "
            "transformers, and its routers choose by other numbers than the softmax of their "
            "logits: leave auxiliary_loss out, and use balance_experts where routers have a bias"
        )
