"""Replicas that compute in a narrower dtype; parameters and gradients keep theirs.

During a module's forward pass its parameters are replaced by casts; autograd carries gradients back
through the casts. Recomputation inside a backward pass casts again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from meshwright.data_parallel.distributed_parameters import (
    LocalParameter,
    computing,
    local_parameters,
)
from meshwright.data_parallel.modules.module_tensors import ModuleBuffers, ModuleParameters
from meshwright.data_parallel.modules.nested import Loan


class LowPrecision(Protocol):
    """The dtypes of a ``mixed_precision`` argument."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPrecision:
    """Dtypes of computation, gradient reduction and buffers; None changes nothing.

    They apply to floating-point tensors: complex ones keep their own.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


MixedPrecision = ReplicaPrecision
"""The name in `meshwright.data_parallel`, as torch's classes have it."""


Place = tuple[nn.Module, str, nn.Parameter]


def compute_in(
    module: nn.Module,
    precision: LowPrecision,
    ignored: Collection[nn.Module],
    names: Collection[str],
) -> None:
    """Make ``module`` compute in ``precision``, except ``ignored`` modules and ``names``."""
    if precision.buffer_dtype is not None:
        for buffer in ModuleBuffers(module, ignored, names).named.values():
            if buffer.is_floating_point():
                buffer.data = buffer.to(precision.buffer_dtype)
    if precision.param_dtype is not None:
        casts = _Casts(ModuleParameters(module, ignored, names), precision.param_dtype)
        module.register_forward_pre_hook(casts.follow, prepend=True)


class _Casts:
    """Swaps parameters for casts during the forward of each module that has some below it."""

    def __init__(self, held: ModuleParameters, dtype: torch.dtype) -> None:
        self._held = held
        self._dtype = dtype
        self._swaps: dict[nn.Module, _Swap] = {}
        self._install()

    def follow(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook of the outermost module: follows parameters that were replaced."""
        before = self._held.named
        if self._held.look() is not before:
            self._install()

    def _install(self) -> None:
        module = self._held.module
        wanted = {id(p) for _, p in self._held.named if p.is_floating_point()}
        local = local_parameters(module)
        for swap in self._swaps.values():
            swap.follow([], local)
        for part in module.modules():
            places = [
                (owner, name, parameter)
                for owner in part.modules()
                for name, parameter in owner._parameters.items()
                if parameter is not None and id(parameter) in wanted
            ]
            if places and part not in self._swaps:
                self._swaps[part] = swap = _Swap(self._dtype)
                part.register_forward_pre_hook(swap.before, prepend=True, with_kwargs=True)
                part.register_forward_hook(swap.after, always_call=True)
            if places:
                self._swaps[part].follow(places, local)


class _Swap:
    """The parameters below one module, and which of them are casts in each running forward."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.places: list[Place] = []
        self.local: Mapping[int, LocalParameter] = {}
        self._dtype = dtype
        self._running: list[tuple[list[Place], Loan]] = []

    def follow(self, places: list[Place], local: Mapping[int, LocalParameter]) -> None:
        """Use the parameters at ``places`` from now on; ``local`` holds tensors that compute."""
        self.places, self.local = places, local

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Below a module that is running, what it has replaced is in place already.
        swapped = [p for p in self.places if p[0]._parameters.get(p[1]) is p[2]]
        casts: dict[int, torch.Tensor] = {}
        for owner, name, parameter in swapped:
            if id(parameter) not in casts:
                casts[id(parameter)] = computing(parameter, self.local).to(self._dtype)
            # A cast is no leaf, so it is no Parameter, and `setattr` would refuse it.
            owner._parameters.__setitem__(name, casts[id(parameter)])  # pyrefly: ignore
        loan = Loan(partial(_cast, self._dtype))
        self._running.append((swapped, loan))
        return loan.give(args), {key: loan.give(value) for key, value in kwargs.items()}

    def after(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        swapped, loan = self._running.pop()
        loan.hand_back()
        for owner, name, parameter in swapped:
            owner._parameters[name] = parameter


def _cast(dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value
