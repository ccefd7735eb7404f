"""State methods of the class: the kind of state dict, and optimizer state by parameter names."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.errors import warn
from meshwright.fsdp.options import (
    CONFIGS,
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    SharedParts,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    own_config,
    own_member,
)
from meshwright.fsdp.states.optimizer_state import from_first_rank, optimizer_state, state_to_load
from meshwright.fsdp.traversal import clean_name
from meshwright.fsdp.unit_wrapper import UnitWrapper, wrappers_in

Input = Iterable[Any] | None


class StateMethods:
    """The methods of `FullyShardedDataParallel` about state; five of them are deprecated."""

    # ------------------------------------------------------------------ kinds of state dicts

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the kind of ``state_dict`` for wrappers in ``module``; returns the old settings."""
        warn(
            "FSDP.state_dict_type() and FSDP.set_state_dict_type() are being deprecated. "
            "torch.distributed.checkpoint.state_dict works with fully_shard",
            FutureWarning,
        )
        kind = own_member(StateDictType, state_dict_type)
        expected, expected_optim = CONFIGS[kind]
        config = _config_of("state_dict_config", expected, state_dict_config, kind)
        optim_config = _config_of(
            "optim_state_dict_config", expected_optim, optim_state_dict_config, kind
        )
        before = StateMethods.get_state_dict_type(module)
        for wrapper in wrappers_in(module):
            own, own_optim = config, optim_config
            if kind is StateDictType.SHARDED_STATE_DICT:
                has_mesh = wrapper._groups.mesh is not None
                own, own_optim = (replace(each, _use_dtensor=has_mesh) for each in (own, own_optim))
            wrapper._state_dict_settings = StateDictSettings(kind, own, own_optim)
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the settings; raises AssertionError when the wrappers in ``module`` differ."""
        found = [wrapper._state_dict_settings for wrapper in wrappers_in(module)]
        configs = [type(own.state_dict_config) for own in found]
        optim_configs = [type(own.optim_state_dict_config) for own in found]
        for text, values in (
            ("should have the same state_dict_type.", [own.state_dict_type for own in found]),
            ("must have the same type of state_dict_config.", configs),
            ("must have the same type of optim_state_dict_config.", optim_configs),
            ("must have the same state dict settings.", [_without_mesh(own) for own in found]),
        ):
            told = {str(value) for value in values}
            if len(told) > 1:
                raise AssertionError(f"All FSDP modules {text} Found {sorted(told)}")
        return found[0] if found else StateDictSettings()

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Apply `set_state_dict_type` in the block, and restore the settings after it."""
        with _undone_after(module):
            StateMethods.set_state_dict_type(
                module, state_dict_type, state_dict_config, optim_state_dict_config
            )
            yield

    # -------------------------------------------------------------------- optimizer state

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,  # noqa: ANN401 - c10d's types stay in comm
    ) -> dict[str, Any]:
        """State of ``optim`` under parameter names, of the kind that is set for ``model``.

        FULL returns whole tensors and is a collective; SHARDED and LOCAL return this rank's parts.
        ``optim_state_dict``, a result of ``optim.state_dict()``, is converted instead if given.
        With ``rank0_only`` the first rank of ``group``, by default of all ranks, gets the result.
        """
        settings = StateMethods.get_state_dict_type(model)
        return optimizer_state(model, optim, settings, optim_state_dict, group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,  # noqa: ANN401 - c10d's types stay in comm
    ) -> dict[str, Any]:
        """Convert a result of `optim_state_dict` for ``optim.load_state_dict``.

        With ``is_named_optimizer`` its keys are names from ``named_parameters``, not positions.
        With ``load_directly`` it is also loaded. With ``rank0_only`` in force the first rank of
        ``group`` (by default of all ranks) sends its state to the others. If its values are parts,
        it is a collective: they may have been saved with other wrappers.
        """
        settings = StateMethods.get_state_dict_type(model)
        state = state_to_load(
            model, optim.param_groups, optim_state_dict, settings, group, held=optim.state
        )
        if is_named_optimizer:
            state = _by_current_names(model, optim, state)
        if load_directly:
            optim.load_state_dict(state)
        return state

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Input = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Convert keys of an unwrapped module's state from positions to names or back."""
        groups = _parameter_groups(optim_input, optim, model)
        return _rekey(optim_state_dict, optim_state_key_type, model, groups)

    # ------------------------------------------------------------------------- deprecated

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Input = None,
        rank0_only: bool = True,
        group: Any = None,  # noqa: ANN401 - c10d's types stay in comm
    ) -> dict[str, Any]:
        """Deprecated: `optim_state_dict` with FULL_STATE_DICT."""
        _warn("full_optim_state_dict", "optim_state_dict")
        _parameter_groups(optim_input, optim, model)
        config = FullOptimStateDictConfig(rank0_only=rank0_only)
        settings = StateDictSettings(optim_state_dict_config=config)
        return optimizer_state(model, optim, settings, group=group)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        group: Any = None,  # noqa: ANN401 - c10d's types stay in comm
    ) -> dict[str, Any]:
        """Deprecated: `optim_state_dict` with SHARDED_STATE_DICT."""
        _warn("sharded_optim_state_dict", "optim_state_dict")
        return optimizer_state(model, optim, _sharded())

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Input = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Deprecated: `optim_state_dict_to_load`."""
        _warn("shard_full_optim_state_dict", "optim_state_dict_to_load")
        groups = _parameter_groups(optim_input, optim, model)
        return _to_load(model, groups, full_optim_state_dict, optim)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim: torch.optim.Optimizer,
    ) -> dict[str, Any]:
        """Deprecated: `optim_state_dict_to_load`."""
        _warn("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        groups = optim.param_groups
        return _to_load(model, groups, sharded_optim_state_dict, optim, _sharded())

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Input = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any = None,  # noqa: ANN401 - c10d's types stay in comm
    ) -> dict[str, Any]:
        """Deprecated: `optim_state_dict_to_load`. The state is needed on the first rank only."""
        _warn("scatter_full_optim_state_dict", "optim_state_dict_to_load")
        groups = _parameter_groups(optim_input, optim, model)
        whole = from_first_rank(full_optim_state_dict, communicator(group))
        return _to_load(model, groups, whole, optim)


def _config_of(what: str, expected: type[Any], given: Any, kind: StateDictType) -> Any:  # noqa: ANN401
    config = expected() if given is None else own_config(expected, given)
    if type(config) is not expected:
        raise RuntimeError(
            f"Expected {what} of type {expected.__name__} for {kind} but got "
            f"{type(config).__name__}"
        )
    return config


def _without_mesh(settings: StateDictSettings) -> list[tuple[str, object]]:
    configs = (settings.state_dict_config, settings.optim_state_dict_config)
    return [(k, v) for config in configs for k, v in vars(config).items() if k != "_use_dtensor"]


@contextlib.contextmanager
def _undone_after(module: nn.Module) -> Iterator[list[UnitWrapper]]:
    wrappers = wrappers_in(module)
    before = [wrapper._state_dict_settings for wrapper in wrappers]
    try:
        yield wrappers
    finally:
        for wrapper, settings in zip(wrappers, before, strict=True):
            wrapper._state_dict_settings = settings


@contextlib.contextmanager
def giving_parts(module: nn.Module) -> Iterator[None]:
    """Make all wrappers in ``module`` return the parts of this rank in the block, not copied."""
    with _undone_after(module) as wrappers:
        for wrapper in wrappers:
            wrapper._state_dict_settings = SharedParts()
        yield


def _by_current_names(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Rename the result of `state_to_load` for an optimizer that knows parameters by name.

    The names are those that ``model.named_parameters()`` gives now.
    """
    called = {parameter: name for name, parameter in model.named_parameters()}
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    names = [called[parameter] for parameter in listed]
    return _with_keys(state, dict(enumerate(names)))


def _with_keys(state: Mapping[str, Any], change: Mapping[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"state": {change[key]: own for key, own in state["state"].items()}}
    if "param_groups" in state:
        found["param_groups"] = [
            {**group, "params": [change[key] for key in group["params"]]}
            for group in state["param_groups"]
        ]
    return found


def _rekey(
    state: Mapping[str, Any],
    to: OptimStateKeyType,
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Replace positions by names, or back, in ``state`` of a module that is not wrapped."""
    if to not in (OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID):
        raise AssertionError(
            f"Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, found {to!r}"
        )
    listed = (key for group in state.get("param_groups", ()) for key in group["params"])
    keys = [*state["state"], *listed]
    kinds = {type(key) for key in keys}
    if not kinds <= {int} and not kinds <= {str}:
        raise ValueError(f"Invalid parameter keys: {sorted(map(str, keys))}: expected one kind")
    name_of = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    ordered = [name_of[parameter] for group in groups for parameter in group["params"]]
    change: dict[Any, Any]
    if to is OptimStateKeyType.PARAM_NAME:
        change = dict(enumerate(ordered)) if kinds == {int} else {name: name for name in ordered}
    else:
        numbers = {name: number for number, name in enumerate(ordered)}
        change = numbers if kinds == {str} else {number: number for number in range(len(ordered))}
    found = _with_keys(state, change)
    if to is OptimStateKeyType.PARAM_ID and "param_groups" in found:
        # An optimizer takes positions in its own order, whichever they are: what is listed n-th
        # becomes the state of its n-th parameter. A flat parameter stands where its unit does.
        for group in found["param_groups"]:
            group["params"].sort()
        firsts = [min(group["params"], default=math.inf) for group in found["param_groups"]]
        order = sorted(range(len(firsts)), key=firsts.__getitem__)
        found["param_groups"] = [found["param_groups"][n] for n in order]
    return found


def _sharded() -> StateDictSettings:
    config = ShardedOptimStateDictConfig()
    kind = StateDictType.SHARDED_STATE_DICT
    return StateDictSettings(state_dict_type=kind, optim_state_dict_config=config)


def _to_load(
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[str, Any],
    optim: torch.optim.Optimizer | None,
    settings: StateDictSettings | None = None,
) -> dict[str, Any]:
    held = () if optim is None else optim.state
    return state_to_load(model, groups, state, settings, held=held, is_strict=True)


def _warn(name: str, replacement: str) -> None:
    warn(
        f"``FullyShardedDataParallel.{name}``is being deprecated and is replaced by "
        f"``FullyShardedDataParallel.{replacement}``.",
        FutureWarning,
    )


def _parameter_groups(
    optim_input: Input, optim: torch.optim.Optimizer | None, model: nn.Module
) -> list[dict[str, Any]]:
    """List the groups of ``optim``, or those of an optimizer that ``optim_input`` would build.

    Without both: one group over all parameters of ``model``. The user's groups are not changed.
    """
    if optim_input is not None:
        warn("The `optim_input` argument is deprecated. Pass `optim` instead", FutureWarning)
    if optim is not None:
        return optim.param_groups
    listed: list[Any] = list(model.parameters() if optim_input is None else optim_input)
    if not listed:
        raise ValueError("Optimizer input should not be empty: pass the model's parameters")
    kinds = {type(entry) for entry in listed}
    is_plain = all(issubclass(kind, torch.Tensor) for kind in kinds)
    if isinstance(optim_input, torch.Tensor) or not (is_plain or kinds == {dict}):
        raise TypeError(
            "Optimizer input should be an iterable of Tensors or dicts, found "
            f"{sorted(kind.__name__ for kind in kinds)}"
        )
    if is_plain:
        return [{"params": listed}]
    if any("params" not in group for group in listed):
        raise ValueError('expected the parameters of each group as its "params", found none')
    return [{**group, "params": list(group["params"])} for group in listed]
