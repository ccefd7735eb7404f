"""What a forward in training leaves behind: logits of routers, and counts of tokens.

A Hugging Face model says which of its modules are routers. Hooks keep what these return until the
next forward of that model, whose ``attention_mask`` says which tokens are padding.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from meshwright.comm.dtensors.exchanging import exchanged_over
from meshwright.comm.graphs.untraced import apart, untraced
from meshwright.torch_internals.autograd import running_backward

RECORDED = "_can_record_outputs"
"""Of Hugging Face: by kind of output, which modules return it, and at which index."""
OWN_LOSS = "output_router_logits"
ROUTING, TALLY = "_meshwright_routing", "_meshwright_tally"


class Logits(NamedTuple):
    """What one call of a router has returned."""

    values: torch.Tensor
    kept: torch.Tensor
    """1 for each token, 0 for padding."""
    k: int
    """How many experts a token goes to."""


class Routing:
    """Of a model that knows its routers, shared by its routers and experts."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self.kind, self.has_routers, self.has_own_loss = kind, False, False
        self.mask: torch.Tensor | None = None
        self.logits: list[Logits] = []

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one forward, for copies of the model."""
        return {**vars(self), "mask": None, "logits": []}


def kept_of(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return 1 for each row of a router or of experts that is a token, 0 for padding."""
    routing: Routing | None = vars(module).get(ROUTING)
    ones = rows.new_ones(len(rows), dtype=torch.int64)
    if routing is None or routing.mask is None:
        return ones
    if routing.mask.numel() != len(rows):
        raise ValueError(
            f"a {type(module).__name__} of {routing.kind.__name__} routes {len(rows)} tokens, and "
            f"attention_mask has shape {tuple(routing.mask.shape)}: expected a number for each "
            "token, to leave out padding. Give the mask of these tokens, or none"
        )
    return ones * (routing.mask.reshape(-1) != 0).to(ones.device)


def record_routers(root: nn.Module) -> None:
    """Have each router below ``root`` keep its logits, for the innermost model that knows it."""
    models: dict[str, nn.Module | None] = {}
    for path, part in root.named_modules():  # parents first
        above = models.get(path.rpartition(".")[0])
        model = models[path] = part if getattr(part, RECORDED, None) else above
        if model is None or (part is not model and ROUTING in vars(part)):
            continue
        index = _index_of(part, getattr(model, RECORDED).get("router_logits", ()))
        if index is None and exchanged_over(part) is None:
            continue
        if ROUTING not in vars(model):
            vars(model)[ROUTING] = Routing(type(model))
            model.register_forward_pre_hook(_begin, with_kwargs=True)
        vars(part)[ROUTING] = routing = vars(model)[ROUTING]
        if index is not None:
            routing.has_routers = True
            part.register_forward_hook(functools.partial(_keep, index))


def _index_of(part: nn.Module, recorded: Any) -> int | None:  # noqa: ANN401 - of Hugging Face
    """Return where in its output a router has its logits; None for any other module."""
    for entry in recorded if type(recorded) is list else [recorded]:
        kind = getattr(entry, "target_class", entry)
        if isinstance(kind, type) and isinstance(part, kind):
            return getattr(entry, "index", 1)
    return None


def _begin(model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Forward pre-hook of the model: forgets the last forward, and finds the padding of this."""

    def begin() -> None:
        routing: Routing = vars(model)[ROUTING]
        bound = inspect.signature(model.forward).bind_partial(*inputs).arguments if inputs else {}
        mask, asked = [{**bound, **options}.get(key) for key in ("attention_mask", OWN_LOSS)]
        is_plain = isinstance(mask, torch.Tensor) and mask.ndim == 2
        routing.mask = mask if is_plain else None
        routing.logits.clear()
        own = getattr(getattr(model, "config", None), OWN_LOSS, False)
        routing.has_own_loss = bool(own if asked is None else asked)

    if running_backward() == -1:
        untraced(begin)


def _keep(index: int, router: nn.Module, inputs: object, output: Any) -> None:  # noqa: ANN401
    """Forward hook of a router, except in recomputation."""

    def keep() -> None:
        logits = output if isinstance(output, torch.Tensor) else output[index]
        if logits is not None:
            rows = logits.reshape(-1, logits.shape[-1])
            call = Logits(rows, kept_of(router, rows), getattr(router, "top_k", 0))
            vars(router)[ROUTING].logits.append(call)

    if router.training and torch.is_grad_enabled() and running_backward() == -1:
        untraced(keep)


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
def count_tokens(experts: nn.Module, indices: torch.Tensor, number: int) -> None:
    """Add the ``indices`` (n, K) of the ``number`` experts of tokens to this step's counts.

    Not those of padding, nor in evaluation, nor once more in recomputation.
    """
    if not experts.training or running_backward() != -1:
        return
    kept = kept_of(experts, indices).unsqueeze(1).expand_as(indices).reshape(-1)
    counts = kept.new_zeros(number).scatter_add_(0, indices.reshape(-1).long(), kept)
    before, step = vars(experts).get(TALLY, (0, -1))
    now = optimizer_steps().number
    vars(experts)[TALLY] = (counts + before if step == now else counts, now)
