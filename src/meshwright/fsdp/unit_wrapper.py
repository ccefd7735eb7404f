"""One wrapper as a module: its attributes, forward, conversion and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.profiler import record_function

from meshwright.comm import Communicator, settle
from meshwright.comm.dtensors.after_hooks import is_stepped
from meshwright.comm.graphs.untraced import apart, untraced
from meshwright.comm.streams import is_host
from meshwright.data_parallel.modules.checkpoint_names import (
    Inside,
    SteppedOver,
    place_of,
    rename,
)
from meshwright.data_parallel.modules.nested import Loan
from meshwright.data_parallel.modules.of_this_process import OfThisProcess
from meshwright.data_parallel.residency import ShardedResidency
from meshwright.data_parallel.sharded_modules.module_hooks import Driver
from meshwright.data_parallel.sharded_modules.sharded_module import show_gradients
from meshwright.data_parallel.shards.unit import Phase, Unit, zero_kept
from meshwright.errors import warn
from meshwright.fsdp import checks
from meshwright.fsdp.exposures.exposure import exposed_of
from meshwright.fsdp.exposures.tensor_axes import gradients_by_axes
from meshwright.fsdp.groups import Groups
from meshwright.fsdp.options import (
    PREFETCHES,
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    PrecisionMode,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
    TrainingState,
    own_member,
)
from meshwright.fsdp.states.full_parameters import SummonOptions, summon_own
from meshwright.fsdp.states.state_dicts import (
    load_entries,
    parts_in_state,
    put_entries,
    rename_for_load,
    shown_names,
    unit_entries,
)
from meshwright.fsdp.traversal import UnitDriver, clean_name
from meshwright.gradients import SpreadGradients
from meshwright.torch_internals.autograd import is_profiled
from meshwright.torch_internals.modules import CHECKPOINTED, FLAT, WRAPPED, asked, lent_now


class UnitWrapper(OfThisProcess, SteppedOver):
    """A module with the unit of all parameters below it that no inner wrapper owns."""

    _wrapped_as = WRAPPED
    limit_all_gathers: bool
    _device: Any
    _groups: Groups
    _precision: MixedPrecision
    _use_orig_params: bool
    _unit: Unit | None = None
    _backward_prefetch: BackwardPrefetch | None
    _forward_prefetch: bool
    _driver: UnitDriver
    _ignored: checks.Ignored
    _is_inner: bool
    _is_summoned: bool
    """True while full parameters are shown: no forward with a backward runs meanwhile."""
    _shows_whole = False
    _offloads: bool
    _use_full_prec_in_eval: bool
    _is_checked: bool
    _mode: PrecisionMode
    _state_dict_settings: StateDictSettings

    # ------------------------------------------------------------------------ attributes

    @property
    def module(self) -> nn.Module:
        """The wrapped module, below wrappers for activation checkpointing."""
        inner: nn.Module = getattr(self, WRAPPED)
        return getattr(inner, CHECKPOINTED, inner)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - an attribute of any module
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            return getattr(super().__getattr__(WRAPPED), name)

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401 - of any module
        """Set tensors on the module that attributes are read from: `functional_call` sets some."""
        inner = self.module if WRAPPED in self.__dict__.get("_modules", ()) else None
        if not isinstance(value, torch.Tensor) or inner is None or not hasattr(inner, name):
            super().__setattr__(name, value)
        elif lent_now() is None:
            setattr(inner, name, value)
        elif name in inner._parameters:  # which the next look at it rejects
            inner._parameters[name] = value  # pyrefly: ignore[unsupported-operation]
        else:
            inner.__dict__[name] = value

    def __getitem__(self, key: int) -> Any:  # noqa: ANN401 - an item of any module
        return self.module[key]  # pyrefly: ignore[bad-index]

    @property
    def compute_device(self) -> torch.device:
        """The device on which the module computes."""
        return self._device

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy in force; `NO_SHARD` where one rank holds everything."""
        return self._groups.strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The dtypes that were requested."""
        return self._precision

    @property
    def cpu_offload(self) -> CPUOffload:
        """The option for shards, gradients and optimizer state on the CPU."""
        return CPUOffload(self._offloads)

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When the backward prefetches; may be set between iterations."""
        return self._backward_prefetch

    @backward_prefetch.setter
    def backward_prefetch(self, value: BackwardPrefetch | None) -> None:
        self._backward_prefetch = value and own_member(BackwardPrefetch, value)
        if self._unit is not None:
            when = PREFETCHES[self._backward_prefetch]
            self._unit.change(backward_prefetch=when)

    @property
    def forward_prefetch(self) -> bool:
        """True if the forward prefetches; may be set between iterations."""
        return self._forward_prefetch

    @forward_prefetch.setter
    def forward_prefetch(self, value: bool) -> None:
        self._forward_prefetch = value
        if self._unit is not None:
            self._unit.change(forward_prefetch=value)

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of this wrapper's own unit, as an optimizer holds them."""
        return [] if self._unit is None else exposed_of(self._unit).parameters(self._unit)

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
        """The state of the unit."""
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
        """Gather, run the module, free. `torch.compile` traces the module alone."""
        if not torch.compiler.is_compiling() and is_profiled():
            with record_function("FullyShardedDataParallel.forward"):
                return self._run(args, kwargs)
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        if self._shows_whole and not torch.is_grad_enabled():
            return getattr(self, WRAPPED)(*args, **kwargs)
        args, kwargs, loan = self._enter(args, kwargs)
        output = getattr(self, WRAPPED)(*args, **kwargs)
        return self._leave(args, output, loan)

    @apart
    def _enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Loan | None]:
        if torch.compiler.is_compiling():
            return untraced(self._enter, args, kwargs)
        self._driver.refuse_transforms(self)
        self.prepare()
        args, kwargs, loan = self._prepare_inputs(args, kwargs)
        return *self._driver.before_forward(self, args, kwargs), loan

    @apart
    def _leave(self, args: tuple[Any, ...], output: Any, loan: Loan | None) -> Any:  # noqa: ANN401
        if torch.compiler.is_compiling():
            return untraced(self._leave, args, output, loan)
        output = self._driver.after_forward(self, args, output)
        if loan is not None:
            loan.hand_back()
        return output

    def prepare(self) -> None:
        """Prepare for a forward pass: root, dtypes, and writes since the last one."""
        driver = self._driver
        if self._is_summoned:
            raise RuntimeError(
                f"the forward of {clean_name(driver.name) or type(self.module).__name__} was "
                "called inside summon_full_params, which shows copies of its parameters: leave "
                "the block first, or call it under torch.no_grad() on a rank that has them whole"
            )
        if driver.iteration is None:
            check_homogeneous(wrappers_in(self))
            check_reached(self.modules())
            _check_stepped(self)
            driver.start(self)
        if not self._is_checked:
            self._check_device()
        mode = self._mode
        if mode.is_mixed:
            is_full = self._use_full_prec_in_eval and not self.training
            inside = own_modules(getattr(self, WRAPPED))
            mode.enter((m for m in inside if m not in self._ignored.modules), is_full=is_full)
        unit = self._unit
        if unit is None:
            return
        # The next gather sends what the user or an optimizer has written.
        if unit.phase is Phase.FULL and exposed_of(unit).is_stale(unit):
            unit.reshard()
        if unit.phase is Phase.SHARDED:
            exposed_of(unit).refresh(unit)

    def _check_device(self) -> None:
        """Raise RuntimeError when parameters were moved to a device where they cannot be used."""
        self._is_checked = True
        if self._unit is None:
            return
        found = exposed_of(self._unit).registered(self._unit)[0].device
        if self._offloads:
            if found.type != "cpu":
                raise RuntimeError(
                    "An FSDP-managed module with parameter CPU offloading enabled has parameters "
                    f"on {found}: {clean_name(self._driver.name)}. Leave the module on the CPU: "
                    "its parameters are moved while they compute"
                )
        elif found != self.compute_device:
            raise RuntimeError(
                f"An FSDP-managed module unexpectedly has parameters on {found}: "
                f"{clean_name(self._driver.name)}. Move it to {self.compute_device} before training"
            )

    def _prepare_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Loan | None]:
        precision, device = self._mode.now, self.compute_device
        casts = precision.cast_forward_inputs
        if self._driver.is_root:
            casts = casts or precision.cast_root_forward_inputs
        dtype = precision.param_dtype if casts else None
        moves = self._driver.is_root and not is_host(device)

        def prepare(value: torch.Tensor) -> torch.Tensor:
            if moves and value.device != device:
                value = value.to(device)
            return value.to(dtype) if dtype is not None and value.is_floating_point() else value

        if dtype is None and not moves:
            return args, kwargs, None
        loan = Loan(prepare)
        return loan.give(args), {key: loan.give(value) for key, value in kwargs.items()}, loan

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero gradients as any module, also while full parameters are registered."""
        root = self._driver.iteration if self._driver.is_root else None
        zero_kept(self._units() if root is None else root.units, set_to_none=set_to_none)
        super().zero_grad(set_to_none)  # without gradients, what is whole stays so

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call ``fn`` on every module below, each with its whole parameters; changes are kept."""
        self._only_idle()
        with summon_own(self, SummonOptions()):
            super().apply(fn)
        return self

    def state_dict(  # pyrefly: ignore[bad-override] # torch overloads it by arguments
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return the state by names before wrapping, of the kind that is set; all ranks call it."""
        settle()
        info = (asked("model state") or (None,))[0] if self._is_asked() else None
        settings = self._settings_in_force() if info is None else self._asked_for(info)
        unit = self._unit
        entries: dict[str, torch.Tensor] = {}
        if unit is not None:
            if not self._is_summoned:
                exposed_of(unit).refresh(unit)
            parts = parts_in_state(unit, self._driver, self.module, self._groups)
            entries = unit_entries(unit, parts, settings)
        with shown_names(unit), self._mode.saving():
            if destination is None:
                found = super().state_dict(prefix=prefix, keep_vars=keep_vars)
            else:
                found = super().state_dict(
                    destination=destination, prefix=prefix, keep_vars=keep_vars
                )
        put_entries(found, prefix, entries, settings, rank=self.rank)
        if self._is_asked():
            rename(found, prefix + self._compiled, prefix)
            if info is not None and info.ignore_frozen_params:
                self._leave_frozen_out(found, prefix)
        return found

    @property
    def _compiled(self) -> str:
        """The name components between this wrapper, which adds none, and the module it wraps."""
        return ".".join((*place_of(self, WRAPPED)[1:], ""))

    def _flat_names(self) -> dict[str, nn.Parameter]:
        """List the flat parameter under all names of its parameters, for torch's functions."""
        unit = self._unit
        flat = None if unit is None else unit.exposure.one_flat
        if flat is None:
            return {}
        names = (name for own in self._driver.own_names for name in own)
        return {name.removeprefix(self._compiled): flat for name in names}

    def _leave_frozen_out(self, state: dict[str, Any], prefix: str) -> None:
        """Leave a frozen flat parameter's names to torch, which looks for the flat one itself."""
        for name, flat in self._flat_names().items():
            if not flat.requires_grad:
                state.pop(prefix + name, None)
                state[prefix + FLAT] = flat

    @property
    def _inside(self) -> Inside:
        return Inside(super()._inside._module, FLAT)

    def _asked_for(self, info: Any) -> StateDictSettings:  # noqa: ANN401 - torch's
        """The settings for torch's state-dict functions: from ``info``, not the user's own.

        Sharded values, unless ``info`` requests whole ones or nothing is sharded.
        """
        offloads = info.cpu_offload
        if info.full_state_dict or self._groups.strategy is ShardingStrategy.NO_SHARD:
            return StateDictSettings(state_dict_config=FullStateDictConfig(offload_to_cpu=offloads))
        config = ShardedStateDictConfig(offload_to_cpu=offloads)
        return StateDictSettings(StateDictType.SHARDED_STATE_DICT, config)

    def _settings_in_force(self) -> StateDictSettings:
        settings = self._state_dict_settings
        kind = settings.state_dict_type
        if kind is StateDictType.LOCAL_STATE_DICT and self._groups.mesh is not None:
            raise RuntimeError(
                f"Found state_dict_type {kind.name}. DeviceMesh is not compatible with "
                "LOCAL_STATE_DICT. Use SHARDED_STATE_DICT"
            )
        is_whole = self._groups.strategy is ShardingStrategy.NO_SHARD
        if kind is StateDictType.FULL_STATE_DICT or settings.shares or not is_whole:
            return settings
        if self.check_is_root():
            warn(
                "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be "
                "returned."
            )
        config = FullStateDictConfig(offload_to_cpu=settings.state_dict_config.offload_to_cpu)
        return StateDictSettings(state_dict_config=config)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load this rank's part of the unit's values; modules below load the rest."""
        if self._is_asked():
            rename(state_dict, prefix, prefix + self._compiled)
        rename_for_load(state_dict, prefix)
        if self._unit is not None:
            parts = parts_in_state(self._unit, self._driver, self.module, self._groups)
            load_entries(self._unit, parts, state_dict, prefix, (missing_keys, error_msgs))
            self._unit.has_changed()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Convert the shards, and with them all parameters gathered from them."""
        wrappers = wrappers_in(self)
        for wrapper in wrappers:
            if wrapper._unit is not None:
                wrapper._unit.reshard()
        super()._apply(fn, recurse)
        for wrapper in wrappers:
            unit = wrapper._unit
            if unit is not None:
                exposed_of(unit).convert(unit)
                wrapper._follow_device(unit.groups[0].buffer.shard.device)
        return self

    def _follow_device(self, device: torch.device) -> None:
        """Have the next forward check the conversion to ``device``."""
        self._is_checked = False
        if not self._offloads and device.type != "meta":
            self._device = device

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """List as any module; while parameters are summoned, under the names before wrapping.

        torch's checkpoint functions find a flat parameter under all names of its parameters.
        """
        show_gradients(self)
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield clean_name(name) if self._is_summoned else name, parameter
        if not recurse and asked("tensors") is not None:
            yield from self._flat_names().items()

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """List as any module; while parameters are summoned, under the names before wrapping."""
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield clean_name(name) if self._is_summoned else name, buffer

    # --------------------------------------------------------------------------- private

    def _units(self) -> list[Unit]:
        return [w._unit for w in wrappers_in(self) if w._unit is not None]

    def _only_idle(self) -> None:
        state = self.training_state
        if state is not TrainingState.IDLE:
            raise ValueError(
                f"expected to be in states {[TrainingState.IDLE]} but current state is {state}: "
                "call this outside of forward, backward and summon_full_params"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise AssertionError(
            "FSDP does not support deepcopy. Please use state dict for serialization. Copy the "
            "module before it is wrapped, and wrap the copy"
        )

    def _only_root(self, text: str, kind: type[Exception]) -> None:
        if not self.check_is_root():
            raise kind(text)
        self._only_idle()
        self._driver.start(self)


def wrappers_in(module: nn.Module) -> list[UnitWrapper]:
    """List all wrappers in ``module``, itself included."""
    return [part for part in module.modules() if isinstance(part, UnitWrapper)]


def check_homogeneous(wrappers: Iterable[UnitWrapper]) -> None:
    """Raise ValueError when wrappers of one tree have different values of shared arguments."""
    listed = list(wrappers)
    for name in ("_use_orig_params", "limit_all_gathers", "_use_full_prec_in_eval"):
        found = {getattr(wrapper, name) for wrapper in listed}
        if len(found) > 1:
            raise ValueError(
                f"Expects one homogeneous value for {name} but got {sorted(found)}: give all "
                "wrappers of one tree the same"
            )


def check_reached(modules: Iterable[nn.Module]) -> None:
    """Raise ValueError when one of ``modules`` is also used outside of its wrapper."""
    parts = list(modules)
    wrappers = [part for part in parts if isinstance(part, UnitWrapper)]
    inside = {id(getattr(wrapper, WRAPPED)): wrapper for wrapper in wrappers}
    for holder in parts:
        for name, child in holder._modules.items():
            if id(child) in inside and inside[id(child)] is not holder:
                raise ValueError(
                    f"{name!r} of a {type(holder).__name__} is a {type(child).__name__} that was "
                    "wrapped in another place, and here it is not: its parameters would be this "
                    "rank's parts. Put the wrapper in both places, or use auto_wrap_policy"
                )


def _check_stepped(root: nn.Module) -> None:
    """Raise RuntimeError for a flat parameter to which torch has attached an optimizer."""
    for unit in fsdp_units(root):
        flat = unit.exposure.one_flat
        if flat is not None and is_stepped(flat):
            raise RuntimeError(
                "FSDP optimizer in backward only supported with use_orig_params=True! It was "
                f"applied to the flat parameter of unit {unit.name!r}. A hook of the user's own "
                "(register_post_accumulate_grad_hook) may step that, too"
            )


def own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """List the modules below ``module`` down to the next wrappers."""
    waiting = [module]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, UnitWrapper):
            yield part
            waiting += reversed([child for child in part._modules.values() if child is not None])


def spread_gradients(root: UnitWrapper) -> tuple[list[SpreadGradients], list[torch.Tensor]]:
    """Group gradients by the ranks that shard them; the groups are equal on all ranks."""
    by_axes: dict[tuple[Communicator, ...], list[torch.Tensor]] = {}
    managed: set[nn.Parameter] = set()
    for unit in fsdp_units(root):
        managed.update(exposed_of(unit).parameters(unit))
        for axes, found in gradients_by_axes(unit):
            by_axes.setdefault(axes, []).extend(found)
    others = (p for p in root.parameters() if p not in managed)
    by_axes.setdefault((), []).extend(p.grad for p in others if p.grad is not None)
    spread = [
        SpreadGradients(gradients=tuple(found), communicators=axes)
        for axes, found in by_axes.items()
    ]
    return spread, [gradient for part in spread for gradient in part.gradients]


def fsdp_units(module: nn.Module) -> list[Unit]:
    """List the units of all wrappers in ``module`` that own parameters."""
    wrappers = wrappers_in(module)
    return [wrapper._unit for wrapper in wrappers if wrapper._unit is not None]


class WrapperResidency(ShardedResidency):
    """Drives all wrappers of one root for a pipeline's schedule."""

    def prepare(self, module: nn.Module, driver: Driver) -> None:
        """Set the root up, choose dtypes, and take over writes since the last step."""
        for wrapper in wrappers_in(module):
            wrapper.prepare()
