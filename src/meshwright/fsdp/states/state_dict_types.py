"""The kind of state dict that the wrappers of a tree give: set, read, and set for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from meshwright.errors import warn
from meshwright.fsdp.options import (
    CONFIGS,
    OptimStateDictConfig,
    SharedParts,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    own_config,
    own_member,
)
from meshwright.fsdp.unit_wrapper import UnitWrapper, wrappers_in


class StateDictTypes:
    """The three methods of `FullyShardedDataParallel` that choose and tell it."""

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose what ``state_dict`` of all wrappers in ``module`` gives; returns what was set."""
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
        before = StateDictTypes.get_state_dict_type(module)
        for wrapper in wrappers_in(module):
            own, own_optim = config, optim_config
            if kind is StateDictType.SHARDED_STATE_DICT:
                has_mesh = wrapper._groups.mesh is not None
                own, own_optim = (replace(each, _use_dtensor=has_mesh) for each in (own, own_optim))
            wrapper._state_dict_settings = StateDictSettings(kind, own, own_optim)
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Read what is set; AssertionError when the wrappers in ``module`` differ."""
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
        """Do `set_state_dict_type` for the block, and undo it, also after an exception."""
        with _undone_after(module):
            StateDictTypes.set_state_dict_type(
                module, state_dict_type, state_dict_config, optim_state_dict_config
            )
            yield


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
    """Have all wrappers in ``module`` give the parts of this rank in the block, not copied."""
    with _undone_after(module) as wrappers:
        for wrapper in wrappers:
            wrapper._state_dict_settings = SharedParts()
        yield
