"""The kind of state dict that the wrappers of a tree give: set, read, and set for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from meshwright.errors import warn
from meshwright.fsdp.options import (
    CONFIGS,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    SharedParts,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    own_config,
    own_member,
)
from meshwright.fsdp.unit_wrapper import UnitWrapper, wrappers_in


def set_settings(
    module: nn.Module,
    kind: StateDictType,
    config: StateDictConfig | None,
    optim_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    """Make all wrappers in ``module`` give state dicts of ``kind``; returns what was before."""
    warn(
        "FSDP.state_dict_type() and FSDP.set_state_dict_type() are being deprecated. "
        "torch.distributed.checkpoint.state_dict works with fully_shard",
        FutureWarning,
    )
    kind = own_member(StateDictType, kind)
    expected, expected_optim = CONFIGS[kind]
    config = expected() if config is None else own_config(expected, config)
    optim_config = (
        expected_optim() if optim_config is None else own_config(expected_optim, optim_config)
    )
    if type(config) is not expected:
        raise RuntimeError(
            f"Expected state_dict_config of type {expected.__name__} for {kind} but got "
            f"{type(config).__name__}"
        )
    if type(optim_config) is not expected_optim:
        raise RuntimeError(
            f"Expected optim_state_dict_config of type {expected_optim.__name__} for {kind} but "
            f"got {type(optim_config).__name__}"
        )
    before = get_settings(module)
    for wrapper in wrappers_in(module):
        own, own_optim = config, optim_config
        has_mesh = wrapper._groups.mesh is not None
        if isinstance(own, ShardedStateDictConfig):
            own = replace(own, _use_dtensor=has_mesh)
        if isinstance(own_optim, ShardedOptimStateDictConfig):
            own_optim = replace(own_optim, _use_dtensor=has_mesh)
        wrapper._keep_settings(StateDictSettings(kind, own, own_optim))
    return before


def get_settings(module: nn.Module) -> StateDictSettings:
    """Return the settings of all wrappers in ``module``; AssertionError when they differ."""
    wrappers = wrappers_in(module)
    if not wrappers:
        return StateDictSettings()
    found = [wrapper._state_dict_settings for wrapper in wrappers]
    first = found[0]
    _check(
        [s.state_dict_type for s in found], "All FSDP modules should have the same state_dict_type."
    )
    _check(
        [type(s.state_dict_config) for s in found],
        "All FSDP modules must have the same type of state_dict_config.",
    )
    _check(
        [type(s.optim_state_dict_config) for s in found],
        "All FSDP modules must have the same type of optim_state_dict_config.",
    )
    if any(_without_mesh(s) != _without_mesh(first) for s in found):
        raise AssertionError("All FSDP modules must have the same state dict settings.")
    return first


def _without_mesh(settings: StateDictSettings) -> tuple[object, ...]:
    configs = (settings.state_dict_config, settings.optim_state_dict_config)
    return tuple(
        tuple((k, v) for k, v in vars(config).items() if k != "_use_dtensor") for config in configs
    )


def _check(found: Sequence[object], text: str) -> None:
    if any(value != found[0] for value in found):
        raise AssertionError(f"{text} Found {sorted({str(value) for value in found})}")


@contextlib.contextmanager
def settings_for_a_while(
    module: nn.Module,
    kind: StateDictType,
    config: StateDictConfig | None,
    optim_config: OptimStateDictConfig | None,
) -> Iterator[None]:
    """Do `set_settings` for the block, and undo it after that, also after an exception."""
    wrappers: list[UnitWrapper] = wrappers_in(module)
    before = [wrapper._state_dict_settings for wrapper in wrappers]
    set_settings(module, kind, config, optim_config)
    try:
        yield
    finally:
        for wrapper, settings in zip(wrappers, before, strict=True):
            wrapper._keep_settings(settings)


@contextlib.contextmanager
def giving_parts(module: nn.Module) -> Iterator[StateDictSettings]:
    """Have all wrappers in ``module`` give the parts of this rank in the block, not copied."""
    wrappers = wrappers_in(module)
    before = [wrapper._state_dict_settings for wrapper in wrappers]
    settings = SharedParts()
    for wrapper in wrappers:
        wrapper._keep_settings(settings)
    try:
        yield settings
    finally:
        for wrapper, own in zip(wrappers, before, strict=True):
            wrapper._keep_settings(own)
