"""One wrapper as a module: what it tells about itself, its forward, conversion and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_map

from meshwright.data_parallel.unit import Phase, Unit
from meshwright.fsdp import checks
from meshwright.fsdp.full_parameters import SummonOptions, exposed_of, summon_own
from meshwright.fsdp.groups import Groups
from meshwright.fsdp.options import MixedPrecision, ShardingStrategy, TrainingState
from meshwright.fsdp.traversal import WRAPPED, UnitDriver, clean_name
from meshwright.gradients import SpreadGradients

__all__ = ["UnitWrapper", "check_homogeneous", "fsdp_units", "spread_gradients", "wrappers_in"]


class UnitWrapper(nn.Module):
    """A module and the unit of those parameters below it that no wrapper further down owns."""

    limit_all_gathers: bool
    _device: Any
    _groups: Groups
    _precision: MixedPrecision
    _use_orig_params: bool
    _unit: Unit | None
    _driver: UnitDriver
    _ignored: checks.Ignored
    _is_inner: bool
    _is_summoned: bool
    _has_cast_buffers: bool

    # ------------------------------------------------------------------------ attributes

    @property
    def module(self) -> nn.Module:
        """The wrapped module, below wrappers for activation checkpointing."""
        inner: nn.Module = getattr(self, WRAPPED)
        return getattr(inner, "_checkpoint_wrapped_module", inner)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - an attribute of any module
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            return getattr(super().__getattr__(WRAPPED), name)

    def __getitem__(self, key: int) -> Any:  # noqa: ANN401 - an item of any module
        return self.module[key]  # pyrefly: ignore[bad-index]

    @property
    def compute_device(self) -> torch.device:
        """Where the module computes."""
        return self._device

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy in force; `NO_SHARD` where one rank holds everything."""
        return self._groups.strategy

    @property
    def process_group(self) -> Any:  # noqa: ANN401 - c10d's types stay in comm
        """The group whose ranks hold different shards."""
        return self._groups.shard.group

    @property
    def _inter_node_pg(self) -> Any:  # noqa: ANN401 - c10d's types stay in comm
        """The group whose ranks hold the same shard; None where the strategy is not hybrid."""
        replicate = self._groups.replicate
        return None if replicate is None else replicate.group

    @property
    def rank(self) -> int:
        """This rank's number in `process_group`."""
        return self._groups.shard.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in `process_group`."""
        return self._groups.shard.size

    @property
    def training_state(self) -> TrainingState:
        """What the unit is doing."""
        if self._is_summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        iteration = self._driver.iteration
        if iteration is not None and (iteration.is_in_forward or iteration.is_in_backward):
            return TrainingState.FORWARD_BACKWARD
        return TrainingState.IDLE

    def check_is_root(self) -> bool:
        """Whether no other wrapper is around this one."""
        return not self._is_inner

    # --------------------------------------------------------------------------- forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - of any module
        """Gather, run the module, free."""
        driver, unit = self._driver, self._unit
        self._prepare(driver)
        args, kwargs = self._prepare_inputs(args, kwargs)
        if unit is not None and unit.phase is Phase.SHARDED:
            exposed_of(unit).refresh(unit)
        args, kwargs = driver.before_forward(self, args, kwargs)
        output = getattr(self, WRAPPED)(*args, **kwargs)
        return driver.after_forward(self, args, output)

    def _prepare(self, driver: UnitDriver) -> None:
        if driver.iteration is None:
            check_homogeneous(wrappers_in(self))
            driver.start(self)
        if self._precision.buffer_dtype is not None and not self._has_cast_buffers:
            self._has_cast_buffers = True
            dtype = self._precision.buffer_dtype
            for module in _own_modules(self):
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.is_floating_point():
                        module._buffers[name] = buffer.to(dtype)

    def _prepare_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        precision, device = self._precision, self.compute_device
        casts = precision.cast_forward_inputs
        if self._driver.is_root:
            casts = casts or precision.cast_root_forward_inputs
        dtype = precision.param_dtype if casts else None
        moves = self._driver.is_root and device.type != "cpu"
        if dtype is None and not moves:
            return args, kwargs

        def prepare(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            if moves and value.device != device:
                value = value.to(device)
            if dtype is not None and value.is_floating_point():
                return value.to(dtype)
            return value

        return tree_map(prepare, (args, kwargs))

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call ``fn`` on every module below, each with its whole parameters; changes are kept."""
        with summon_own(self, SummonOptions()):
            super().apply(fn)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # pyrefly: ignore[bad-override]
        """Not supported yet."""
        raise NotImplementedError("state dicts of FullyShardedDataParallel are not supported yet")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as of any module
        """Not supported yet."""
        raise NotImplementedError("state dicts of FullyShardedDataParallel are not supported yet")

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Convert the shards, and with them everything that is gathered from them."""
        wrappers = wrappers_in(self)
        for wrapper in wrappers:
            if wrapper._unit is not None:
                wrapper._unit.reshard()
        super()._apply(fn, recurse)
        for wrapper in wrappers:
            unit = wrapper._unit
            if unit is not None:
                exposed_of(unit).convert(unit)
                wrapper._device = unit.groups[0].buffer.shard.device
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; while parameters are summoned, under the names before wrapping."""
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield clean_name(name) if self._is_summoned else name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As of any module; while parameters are summoned, under the names before wrapping."""
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield clean_name(name) if self._is_summoned else name, buffer

    # --------------------------------------------------------------------------- private

    def _units(self) -> list[Unit]:
        return [w._unit for w in wrappers_in(self) if w._unit is not None]

    def _only_root(self, text: str, kind: type[Exception]) -> None:
        if not self.check_is_root():
            raise kind(text)
        self._driver.start(self)


def wrappers_in(module: nn.Module) -> list[UnitWrapper]:
    """All wrappers in ``module``, itself included."""
    return [part for part in module.modules() if isinstance(part, UnitWrapper)]


def check_homogeneous(wrappers: Iterable[UnitWrapper]) -> None:
    """Raise ValueError when wrappers of one tree were given arguments that must be equal."""
    listed = list(wrappers)
    for name in ("_use_orig_params", "limit_all_gathers"):
        found = {getattr(wrapper, name) for wrapper in listed}
        if len(found) > 1:
            raise ValueError(
                f"Expects one homogeneous value for {name} but got {sorted(found)}: give all "
                "wrappers of one tree the same"
            )


def _own_modules(wrapper: UnitWrapper) -> Iterator[nn.Module]:
    """The modules below ``wrapper`` down to the next wrappers."""
    waiting: list[nn.Module] = [getattr(wrapper, WRAPPED)]
    while waiting:
        module = waiting.pop()
        if not isinstance(module, UnitWrapper):
            yield module
            waiting += module.children()


def spread_gradients(root: UnitWrapper) -> tuple[list[SpreadGradients], list[torch.Tensor]]:
    """Gradients by the ranks over which they are spread: every rank has the same groups."""
    by_shard: dict[tuple[int, ...], tuple[Any, list[torch.Tensor]]] = {}
    whole: list[torch.Tensor] = []
    managed: set[nn.Parameter] = set()
    for wrapper in wrappers_in(root):
        unit = wrapper._unit
        if unit is None:
            continue
        exposed = exposed_of(unit).parameters(unit)
        managed.update(exposed)
        found = [p.grad for p in exposed if p.grad is not None]
        shard = unit.groups[0].axes.shard
        if shard is None:
            whole += found
        else:
            by_shard.setdefault(shard.ranks, (shard, []))[1].extend(found)
    others = (p for p in root.parameters() if p not in managed)
    whole += [p.grad for p in others if p.grad is not None]
    spread = [
        SpreadGradients(gradients=tuple(found), communicators=(shard,))
        for shard, found in by_shard.values()
    ]
    spread.append(SpreadGradients(gradients=tuple(whole)))
    return spread, [gradient for part in spread for gradient in part.gradients]


def fsdp_units(module: nn.Module) -> list[Unit]:
    """The units of all wrappers in ``module`` that own parameters."""
    wrappers = wrappers_in(module)
    return [wrapper._unit for wrapper in wrappers if wrapper._unit is not None]
