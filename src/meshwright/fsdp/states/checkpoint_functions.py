"""Supports torch's functions for state dicts of optimizers on wrapped modules.

`torch.distributed.checkpoint.state_dict` recognizes torch's own wrapper by class. For any other
module it assumes that ``optimizer.state_dict()`` returns whole tensors, and names parameters as
``named_parameters`` does. Only while it runs, our wrappers answer differently; for names see
`meshwright.data_parallel.modules.checkpoint_names`::

    torch calls                                   the answer
    1  modules, for how names change, with all    hooks on the optimizers; an optimizer without
       optimizers at hand                         state gets one of zero steps until read or stepped
    2  ``optimizer.state_dict()``                 each value in the shape of its whole parameter;
                                                  a flat parameter's under the names of its parts
    3  ``optimizer.load_state_dict(...)``         takes this rank's part of each value

Alternatives considered: replacing torch's functions, which would affect every model of the process;
giving optimizers whole shapes always, with which no optimizer can compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from meshwright.data_parallel.modules.checkpoint_names import StepOver, without_compiled
from meshwright.fsdp.exposures.exposure import exposed_of
from meshwright.fsdp.states.optimizer_state import (
    MADE,
    OWN,
    managed_parameters,
    spread_state,
    state_of_zero_steps,
    state_to_load,
)
from meshwright.fsdp.traversal import clean_name
from meshwright.fsdp.unit_wrapper import UnitWrapper
from meshwright.torch_internals.modules import WRAPPED, asked

_HOOKS = "_meshwright_checkpoint_hooks"

_UNABLE = "torch.distributed.checkpoint.state_dict can neither read nor load the optimizer of a "
_INSTEAD = (
    "Use FullyShardedDataParallel.optim_state_dict and optim_state_dict_to_load, whose values "
    "torch.distributed.checkpoint saves and loads at any number of ranks"
)


class CheckpointNames(StepOver):
    """For torch's checkpoint functions: a wrapper's component in names, read but never written.

    Neither state dicts nor names passed to those functions contain it. A torch release that writes
    names differently would otherwise save this rank's elements as the whole.
    """

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - as of any dict
        """Return what any wrapper has; raises RuntimeError for the wrapper itself."""
        if key == WRAPPED:
            raise RuntimeError(f"{_UNABLE}FullyShardedDataParallel in this torch. {_INSTEAD}")
        return super().get(key, default)


def prepare_optimizers(wrapper: UnitWrapper) -> None:
    """Prepare the optimizers that torch's checkpoint functions were called with, if these run.

    Raises RuntimeError for those whose state cannot be returned or loaded.
    """
    found, unit = asked("optimizers"), wrapper._unit
    if found is None or unit is None:
        return
    own = exposed_of(unit).parameters(unit)
    for optimizer in found[0]:
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if held.isdisjoint(own):
            continue
        if not hasattr(optimizer, _HOOKS):
            setattr(optimizer, _HOOKS, _Hooks(optimizer))
        getattr(optimizer, _HOOKS).begin(optimizer)


class _Hooks:
    """Hooks on one optimizer. They do nothing unless torch's checkpoint functions call it."""

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
        """Give the optimizer a state: otherwise torch would create one by stepping the weights.

        Before loading, also for parameters without state, which torch would skip.
        """
        if not any(optimizer.state.values()):
            self._zero = optimizer.state = state_of_zero_steps(optimizer)
        elif asked("to load optimizers") is not None:
            trained = (p for group in optimizer.param_groups for p in group["params"])
            without = [p for p in trained if p.requires_grad and not optimizer.state.get(p)]
            if without:
                zero = state_of_zero_steps(optimizer)
                optimizer.state.update({p: zero[p] for p in without if p in zero})

    def _end(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._zero is not None and optimizer.state is self._zero:
            optimizer.state = defaultdict(dict)
        self._zero = None

    def _give(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> dict[str, Any] | None:
        question = asked("optimizer state")
        if question is None:
            return None
        model, info = question
        kind = OWN if self._zero is None or optimizer.state is not self._zero else MADE
        found, parts = spread_state(
            model, optimizer, state, is_full=info.full_state_dict, kind=kind
        )
        self._end(optimizer)
        if not parts:
            return found
        flat = {
            key: {without_compiled(name): own for name, own in named.items()}
            for key, named in parts.items()
        }
        return _named_apart(found, flat)

    def _take(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> dict[str, Any] | None:
        found = asked("optimizer state to load")
        if found is None:
            return None
        (model,) = found
        return state_to_load(model, optimizer.param_groups, _by_own_names(model, state))


# ----------------------------------------------------- one parameter under several names

State = dict[str, Any]


class _Parts(dict[str, State]):
    """The state of a flat parameter: a state for each of its parameters, by name."""


class _StateApart(dict[Any, Any]):
    """State in which torch's single entry for a flat parameter becomes those of its parts."""

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401 - as of any dict
        if isinstance(value, _Parts):
            self.update(value)
        else:
            super().__setitem__(key, value)


class _GroupApart(dict[str, Any]):
    """A parameter group in which torch's single name becomes those of all parts."""

    def __init__(self, group: Mapping[str, Any], parts: Mapping[Any, Mapping[str, State]]) -> None:
        super().__init__(group)
        self._names = [parts.get(key) for key in group["params"]]

    def __setitem__(self, key: str, value: Any) -> None:  # noqa: ANN401 - as of any dict
        if key == "params":
            pairs = zip(value, self._names, strict=True)
            value = [name for one, own in pairs for name in (own or (one,))]
        super().__setitem__(key, value)


class _GroupsApart(list[Any]):
    """Groups, each read as a plain dict once torch has named its parameters."""

    def __iter__(self) -> Iterator[Any]:
        for group in super().__iter__():
            is_named = all(isinstance(key, str) for key in group["params"])
            yield dict(group) if is_named else group


def _named_apart(
    state: Mapping[str, Any], parts: Mapping[Any, Mapping[str, State]]
) -> dict[str, Any]:
    """Copy ``state`` so that torch replaces flat parameters by their ``parts``."""
    kept = {name: _Parts({n: own for n, own in p.items() if own}) for name, p in parts.items()}
    return {
        **state,
        "state": _StateApart({**state["state"], **{key: p for key, p in kept.items() if p}}),
        "param_groups": _GroupsApart(_GroupApart(g, parts) for g in state["param_groups"]),
    }


def _by_own_names(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` from torch under the model's names if parts of it are compiled.

    Raises ValueError for state under any other name.
    """
    managed = (name for part in managed_parameters(model) for name in part.names)
    others = (clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False))
    own = {without_compiled(name): name for name in (*others, *managed)}
    unknown = sorted(str(name) for name in state["state"] if name not in own)
    if unknown:
        raise ValueError(
            f"expected optimizer state under names of the model's parameters, found {unknown[:3]}: "
            "give what get_optimizer_state_dict returned"
        )
    groups = [
        {**group, "params": [own.get(name, name) for name in group["params"]]}
        for group in state["param_groups"]
    ]
    return {"state": {own[n]: held for n, held in state["state"].items()}, "param_groups": groups}
