"""The older names of optimizer state dicts, each with the function that replaces it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.fsdp.optimizer_exchange import from_first_rank
from meshwright.fsdp.optimizer_state import optimizer_state, state_to_load
from meshwright.fsdp.options import (
    FullOptimStateDictConfig,
    ShardedOptimStateDictConfig,
    StateDictSettings,
    StateDictType,
)

__all__ = ["LegacyOptimizerState", "optimizer_of"]

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
        optimizer_of(optim_input, optim)
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
        return state_to_load(model, optimizer_of(optim_input, optim), full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim: torch.optim.Optimizer,
    ) -> dict[str, Any]:
        """Deprecated: `optim_state_dict_to_load`."""
        _warn("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        return state_to_load(model, optim, sharded_optim_state_dict)

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
        chosen = optimizer_of(optim_input, optim)
        whole = from_first_rank(full_optim_state_dict, communicator(group))
        return state_to_load(model, chosen, whole)


def _warn(name: str, replacement: str) -> None:
    warnings.warn(
        f"``FullyShardedDataParallel.{name}``is being deprecated and is replaced by "
        f"``FullyShardedDataParallel.{replacement}``.",
        FutureWarning,
        stacklevel=3,
    )


def optimizer_of(optim_input: Input, optim: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    """The optimizer that is meant: ``optim``, or one over what it was built from."""
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated. Pass `optim` instead",
            FutureWarning,
            stacklevel=3,
        )
    if optim is not None:
        return optim
    if optim_input is None:
        raise ValueError("expected the optimizer: pass optim=")
    listed: list[Any] = list(optim_input)
    if not listed:
        raise ValueError("Optimizer input should not be empty: pass the model's parameters")
    if not all(isinstance(entry, torch.Tensor) or type(entry) is dict for entry in listed):
        raise TypeError(
            "Optimizer input should be an iterable of Tensors or dicts, found "
            f"{sorted({type(entry).__name__ for entry in listed})}"
        )
    return torch.optim.SGD(listed, lr=0.0)
