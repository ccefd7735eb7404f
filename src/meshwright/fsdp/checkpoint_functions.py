"""What torch's functions for state dicts of optimizers find where modules are wrapped.

`torch.distributed.checkpoint.state_dict` looks for torch's own wrapper. With any other module it
takes what ``optimizer.state_dict()`` returns for whole tensors, and names parameters as
``named_parameters`` does. While it asks, and only then, it is answered otherwise::

    torch asks                                    the answer
    1  modules, how names change: with all the    hooks on the optimizers; where one has no state,
       optimizers at hand                         one of zero steps, until it was read or steps
    2  ``optimizer.state_dict()``                 each value in the shape of its whole parameter
    3  ``model.named_parameters()``               names as before wrapping
    4  ``optimizer.load_state_dict(...)``         this rank's part of each value is taken

Alternatives considered: to stand in for torch's functions, which changes them for every model of
the process; to give optimizers whole shapes always, which no optimizer computes with.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from meshwright.fsdp.exposure import exposed_of
from meshwright.fsdp.managed_parameters import names_by_parameter
from meshwright.fsdp.optimizer_state import spread_state, state_to_load
from meshwright.fsdp.traversal import WRAPPED
from meshwright.fsdp.unit_wrapper import UnitWrapper

__all__ = ["CheckpointNames", "asked_in", "prepare_optimizers"]

_HOOKS = "_meshwright_checkpoint_hooks"

_UNABLE = "torch.distributed.checkpoint.state_dict can neither read nor load the optimizer of a "
_INSTEAD = (
    "Use FullyShardedDataParallel.optim_state_dict and optim_state_dict_to_load, whose values "
    "torch.distributed.checkpoint saves and loads at any number of ranks"
)


def asked_in(*functions: str) -> Mapping[str, Any] | None:
    """The variables of the torch checkpoint function that has called: any, or one of those."""
    frame = sys._getframe(1)
    while frame is not None:
        is_torch = frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
        if is_torch and (not functions or frame.f_code.co_name in functions):
            return frame.f_locals
        frame = frame.f_back
    return None


class CheckpointNames(dict[str, str]):
    """For torch's checkpoint functions: a wrapper's place in names, read but never written.

    Neither state dicts nor the names that those functions are given have it. Another torch that
    writes names otherwise would write this rank's elements as if they were all.
    """

    def __init__(self, wrapper: UnitWrapper) -> None:
        inner = getattr(getattr(wrapper, WRAPPED), "_fqn_modifiers", dict)
        super().__init__({**inner(), "": WRAPPED})

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - as of any dict
        """As of any dict; RuntimeError for the wrapper itself."""
        if key == WRAPPED:
            raise RuntimeError(f"{_UNABLE}FullyShardedDataParallel in this torch. {_INSTEAD}")
        return super().get(key, default)


def prepare_optimizers(wrapper: UnitWrapper) -> None:
    """Get the optimizers ready that torch's checkpoint functions were called with, if they ask.

    Raises RuntimeError for those whose state cannot be given or taken.
    """
    asked, unit = asked_in("_verify_options"), wrapper._unit
    if asked is None or unit is None:
        return
    own = exposed_of(unit).parameters(unit)
    for optimizer in asked["optims"]:
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if held.isdisjoint(own):
            continue
        if not wrapper._use_orig_params:
            raise RuntimeError(
                f"{_UNABLE}FullyShardedDataParallel with use_orig_params=False: one tensor stands "
                f"for several names. Wrap with use_orig_params=True. Or: {_INSTEAD}. "
                "get_model_state_dict and set_model_state_dict work"
            )
        if not hasattr(optimizer, _HOOKS):
            setattr(optimizer, _HOOKS, _Hooks(optimizer))
        getattr(optimizer, _HOOKS).begin(optimizer)


class _Hooks:
    """The hooks on one optimizer. They do nothing unless torch's checkpoint functions call it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer)
        for name in ("state_dict", "load_state_dict"):
            if getattr(kind, name) is not getattr(torch.optim.Optimizer, name):
                raise RuntimeError(
                    f"{_UNABLE}FullyShardedDataParallel when its class, {kind.__name__}, has a "
                    f"{name} of its own, which need not call the hooks. {_INSTEAD}"
                )
        self._zero: defaultdict[torch.Tensor, Any] | None = None
        """The state of zero steps that the optimizer has for a while."""
        optimizer.register_state_dict_post_hook(self._give)
        optimizer.register_load_state_dict_pre_hook(self._take)
        optimizer.register_step_pre_hook(self._end)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """See to it that torch finds a state: it would make one by a step of the weights."""
        if not any(optimizer.state.values()):
            self._zero = optimizer.state = _state_of_zero_steps(optimizer)

    def _end(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._zero is not None and optimizer.state is self._zero:
            optimizer.state = defaultdict(dict)
        self._zero = None

    def _give(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> dict[str, Any] | None:
        asked = asked_in("_get_optim_state_dict")
        if asked is None:
            return None
        is_full = asked["info"].full_state_dict
        found = spread_state(asked["model"], optimizer, state, is_full=is_full)
        self._end(optimizer)
        return found

    def _take(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> dict[str, Any] | None:
        asked = asked_in("_load_optim_state_dict")
        if asked is None:
            return None
        model = asked["model"]
        _check_names(model, optimizer, asked["state_dict"], state["state"])
        return state_to_load(model, optimizer.param_groups, state)


def _state_of_zero_steps(optimizer: torch.optim.Optimizer) -> defaultdict[torch.Tensor, Any]:
    """The state that ``optimizer`` begins with: of a step by a twin, on zeros."""
    kind = type(optimizer)
    twin = object.__new__(kind)
    # A scheduler's ``step`` on the object is bound to the original.
    vars(twin).update({key: own for key, own in vars(optimizer).items() if key != "step"})
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [_zeros(p) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    twin.step()
    stand_ins = [p for group in twin.param_groups for p in group["params"]]
    originals = [p for group in optimizer.param_groups for p in group["params"]]
    found: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    for original, stand_in in zip(originals, stand_ins, strict=True):
        own = twin.state.get(stand_in)
        if own:
            if "step" in own:
                own["step"] = own["step"] * 0
            found[original] = own
    return found


def _zeros(parameter: nn.Parameter) -> nn.Parameter:
    stand_in = nn.Parameter(torch.zeros_like(parameter), parameter.requires_grad)
    if parameter.requires_grad:
        stand_in.grad = torch.zeros_like(parameter)
    return stand_in


def _check_names(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    given: Mapping[str, Any],
    state: Mapping[Any, Any],
) -> None:
    """Raise where state was ``given`` that torch has not found the parameter of."""
    names = names_by_parameter(model)
    known = {name for own in names.values() for name in own}
    unknown = sorted(map(str, set(state) - known))
    if unknown:
        raise ValueError(
            f"expected optimizer state under names of the model's parameters, found {unknown[:3]}: "
            "give what get_optimizer_state_dict returned"
        )
    if "state" in given:
        return
    flat = {key.removeprefix("state.").rpartition(".")[0] for key in given if key[:6] == "state."}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        lost = [name for name in names[parameter] if name in flat and not state.get(name)]
        if lost and parameter.numel():
            raise RuntimeError(
                f"the flat state dict has state of {lost[0]}, and torch leaves it out, because "
                "this optimizer has state of other parameters but none of that one. Load it into "
                "an optimizer that has not stepped, or without flatten_optimizer_state_dict"
            )
