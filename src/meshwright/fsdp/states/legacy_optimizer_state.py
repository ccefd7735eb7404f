"""The older names of optimizer state dicts, each with the function that replaces it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.errors import warn
from meshwright.fsdp.options import (
    FullOptimStateDictConfig,
    ShardedOptimStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from meshwright.fsdp.states.optimizer_exchange import from_first_rank
from meshwright.fsdp.states.optimizer_state import optimizer_state, state_to_load

Input = Iterable[Any] | None


class LegacyOptimizerState:
    """The five deprecated functions of `FullyShardedDataParallel`."""

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
        parameter_groups(optim_input, optim, model)
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
        settings = StateDictSettings(
            state_dict_type=StateDictType.SHARDED_STATE_DICT,
            optim_state_dict_config=ShardedOptimStateDictConfig(),
        )
        return optimizer_state(model, optim, settings)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Input = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Deprecated: `optim_state_dict_to_load`."""
        _warn("shard_full_optim_state_dict", "optim_state_dict_to_load")
        groups = parameter_groups(optim_input, optim, model)
        return _to_load(model, groups, full_optim_state_dict, optim)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim: torch.optim.Optimizer,
    ) -> dict[str, Any]:
        """Deprecated: `optim_state_dict_to_load`."""
        _warn("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        return _to_load(
            model,
            optim.param_groups,
            sharded_optim_state_dict,
            optim,
            StateDictSettings(
                state_dict_type=StateDictType.SHARDED_STATE_DICT,
                optim_state_dict_config=ShardedOptimStateDictConfig(),
            ),
        )

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
        groups = parameter_groups(optim_input, optim, model)
        whole = from_first_rank(full_optim_state_dict, communicator(group))
        return _to_load(model, groups, whole, optim)


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


def parameter_groups(
    optim_input: Input, optim: torch.optim.Optimizer | None, model: nn.Module
) -> list[dict[str, Any]]:
    """List the groups of ``optim``, or those of an optimizer that ``optim_input`` would build.

    Without both it is one over all parameters of ``model``. Groups of the user stay as they are.
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
