"""What a forward in training leaves behind: logits of routers, and tokens of each expert.

A Hugging Face model says in a class attribute which modules are its routers. Hooks keep what these
return until the next forward of that model. Its ``attention_mask`` says which tokens are padding.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from meshwright.comm.dtensors.exchanging import exchanged_over
from meshwright.comm.graphs.untraced import apart, untraced
from meshwright.torch_internals.autograd import running_backward

(_RECORDED,) = ("_can_record_outputs",)
"""Of Hugging Face: by kind of output, which modules return it, and at which index."""
_OWN = "output_router_logits"
_MASK = "attention_mask"
ROUTING, TALLY = "_meshwright_routing", "_meshwright_tally"


class Logits(NamedTuple):
    """What one call of a router has returned."""

    values: torch.Tensor
    kept: torch.Tensor
    """1 for each token, 0 for padding."""
    k: int | None
    """How many experts a token goes to, where the router says it."""


class Routing:
    """Of a model that knows its routers, shared by its routers and experts."""

    def __init__(self, model: nn.Module, axis: str, *, own_auxiliary: bool) -> None:
        self.kind, self.axis, self.own_auxiliary = type(model), axis, own_auxiliary
        self.routers: list[str] = []
        self.has_own = False
        """True when the model computes an auxiliary loss itself."""
        self.mask: torch.Tensor | None = None
        self.logits: list[Logits] = []

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one forward: copies are made of what can be copied."""
        return {**vars(self), "mask": None, "logits": []}

    def kept(self, rows: int) -> torch.Tensor | None:
        """Tell which of ``rows`` tokens are no padding; None if all are."""
        if self.mask is not None and self.mask.numel() != rows:
            raise ValueError(
                f"axis {self.axis}: a layer of {self.kind.__name__} routes {rows} tokens, and "
                f"{_MASK} has shape {tuple(self.mask.shape)}: expected one number for each token, "
                "to leave out padding. Give the mask of these tokens, or none"
            )
        return None if self.mask is None else self.mask.reshape(-1) != 0


def record_routers(root: nn.Module, axis: str, *, own_auxiliary: bool) -> None:
    """Have each router below ``root`` keep its logits, for the innermost model that knows it."""
    homes: dict[str, tuple[str, nn.Module] | None] = {}
    for path, part in root.named_modules():  # parents first
        above = homes.get(path.rpartition(".")[0])
        homes[path] = home = (path, part) if getattr(part, _RECORDED, None) else above
        if home is None or ROUTING in vars(part):
            continue
        index = _index_of(part, path[len(home[0]) :], getattr(home[1], _RECORDED))
        if index is None and exchanged_over(part) is None:
            continue
        model = home[1]
        if ROUTING not in vars(model):
            vars(model)[ROUTING] = Routing(model, axis, own_auxiliary=own_auxiliary)
            model.register_forward_pre_hook(_begin, with_kwargs=True)
        vars(part)[ROUTING] = routing = vars(model)[ROUTING]
        if index is not None:
            routing.routers.append(path)
            part.register_forward_hook(functools.partial(_keep, index))


def _index_of(part: nn.Module, path: str, recorded: Mapping[str, Any]) -> int | None:
    """Return where in its output a router has its logits; None for any other module."""
    given = recorded.get("router_logits", ())
    for entry in given if isinstance(given, list | tuple) else [given]:
        kind, inside = getattr(entry, "target_class", entry), getattr(entry, "layer_name", None)
        is_there = not inside or f".{inside.strip('.')}." in f"{path}."
        if isinstance(kind, type) and isinstance(part, kind) and is_there:
            return getattr(entry, "index", 1)
    return None


def _begin(model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Forward pre-hook of the model: forgets the last forward, and finds the padding of this."""
    untraced(_begin_forward, model, inputs, options)


def _begin_forward(model: nn.Module, inputs: Sequence[Any], options: Mapping[str, Any]) -> None:
    if running_backward() != -1:
        return
    routing: Routing = vars(model)[ROUTING]
    given = dict(options)
    if len(inputs) > 1:
        given |= inspect.signature(model.forward).bind_partial(*inputs).arguments
    mask, asked = given.get(_MASK), given.get(_OWN)
    is_plain = isinstance(mask, torch.Tensor) and mask.ndim == 2
    routing.mask, routing.logits = mask if is_plain else None, []
    own = getattr(getattr(model, "config", None), _OWN, False) if asked is None else asked
    routing.has_own = bool(own)
    if own and not routing.own_auxiliary:
        raise own_auxiliary_error(routing.axis)


def own_auxiliary_error(axis: str) -> ValueError:
    return ValueError(
        f"axis {axis}: the model returns an auxiliary loss of its own ({_OWN}=True), computed from "
        "this rank's tokens. Set it to False and give [expert] auxiliary and "
        'balance = "global", or set balance = "rank"'
    )


def _keep(index: int, router: nn.Module, inputs: object, output: Any) -> None:  # noqa: ANN401
    """Forward hook of a router."""
    if router.training and torch.is_grad_enabled():
        untraced(_keep_logits, index, router, output)


def _keep_logits(index: int, router: nn.Module, output: Any) -> None:  # noqa: ANN401
    logits = output if isinstance(output, torch.Tensor) else output[index]
    if logits is None or running_backward() != -1:
        return
    routing: Routing = vars(router)[ROUTING]
    logits = logits.reshape(-1, logits.shape[-1])
    kept = routing.kept(len(logits))
    ones = logits.new_ones(len(logits), dtype=torch.int64)
    kept = ones if kept is None else ones * kept.to(ones.device)
    routing.logits.append(Logits(logits, kept, getattr(router, "top_k", None)))


# ---------------------------------------------------------------------------------- counts


class Tally:
    """The tokens of each expert of one layer, of this rank, in one step."""

    def __init__(self, counts: torch.Tensor) -> None:
        self.counts, self.step = counts, optimizer_steps().number


class _OptimizerSteps:
    number = 0

    @apart
    def __call__(self, *given: object) -> None:
        self.number += 1


@functools.cache
def optimizer_steps() -> _OptimizerSteps:
    """Count the steps of all optimizers of this process, from now on."""
    steps = _OptimizerSteps()
    register_optimizer_step_post_hook(steps)
    return steps


@torch.no_grad()
def count_tokens(module: nn.Module, indices: torch.Tensor, experts: int) -> None:
    """Add the experts ``indices`` (n, K) of tokens to the tally of ``module``.

    Not of padding, nor in evaluation, nor once more in recomputation. The first forward after a
    step of an optimizer, or after `end_step`, begins a new tally.
    """
    if not module.training or running_backward() != -1:
        return
    routing: Routing | None = vars(module).get(ROUTING)
    kept = None if routing is None else routing.kept(len(indices))
    ones = torch.ones_like(indices, dtype=torch.int64)
    if kept is not None:
        ones = ones * kept.to(ones.device).unsqueeze(1)
    counts = ones.new_zeros(experts).scatter_add_(0, indices.flatten().long(), ones.flatten())
    tally: Tally | None = vars(module).get(TALLY)
    if tally is None or tally.step != optimizer_steps().number:
        vars(module)[TALLY] = Tally(counts)
    else:
        tally.counts += counts


def end_step(module: nn.Module) -> None:
    """Have the next forward of ``module`` begin a new tally."""
    if (tally := vars(module).get(TALLY)) is not None:
        tally.step = -1
