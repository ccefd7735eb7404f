"""`FullyShardedDataParallel`: a module whose parameters are whole only while they compute."""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshwright.comm import settle
from meshwright.data_parallel.checks.starting_state import starting_buffers
from meshwright.data_parallel.comm_hooks.shard_hooks import register_bucket_hook
from meshwright.data_parallel.residency import ShardedResidency, sharded_residency
from meshwright.data_parallel.sharded_modules.module_hooks import attach
from meshwright.data_parallel.sharded_modules.module_tree import places_in
from meshwright.data_parallel.sharded_modules.sharded_join import JoinsUnevenInputs
from meshwright.data_parallel.shards.parameter_group import UnitSettings
from meshwright.data_parallel.shards.unit import Unit
from meshwright.errors import warn
from meshwright.fsdp import building, checks
from meshwright.fsdp.exposures.tensor_axes import tensor_mesh
from meshwright.fsdp.groups import find_groups
from meshwright.fsdp.options import (
    PREFETCHES,
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    PrecisionMode,
    ShardingStrategy,
    StateDictSettings,
    own_config,
    row_of,
)
from meshwright.fsdp.states.checkpoint_functions import CheckpointNames, prepare_optimizers
from meshwright.fsdp.states.full_parameters import SummonOptions, summon_all
from meshwright.fsdp.states.methods import StateMethods
from meshwright.fsdp.states.state_dicts import clean_reported_names
from meshwright.fsdp.traversal import UnitDriver, list_below
from meshwright.fsdp.unit_wrapper import (
    UnitWrapper,
    WrapperResidency,
    check_reached,
    fsdp_units,
    own_modules,
    spread_gradients,
    wrappers_in,
)
from meshwright.fsdp.wrap import WrapPolicy
from meshwright.gradients import global_norm, refuse_stages, scale_to_norm
from meshwright.mesh import DeviceMesh
from meshwright.torch_internals.modules import WRAPPED, require_module

FULL_PRECISION_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"
"""The environment variable that, set to 1, switches mixed precision off in eval mode."""


class FullyShardedDataParallel(StateMethods, JoinsUnevenInputs, UnitWrapper):
    """Shards the parameters, gradients and optimizer state of ``module`` over the ranks.

    One wrapper is one unit: it gathers its parameters before its forward and its backward, frees
    them after, and reduces its gradients. It owns all parameters below it that no inner wrapper
    owns. ``auto_wrap_policy`` wraps submodules first. The arguments are those of torch's class of
    this name; build the optimizer after wrapping.

    A module of tensor parallelism takes the data axes of its mesh, ``device_mesh=mesh["shard"]``.
    ``stop_on_non_finite`` raises `NonFiniteError` on every rank at the end of a backward pass in
    which a gradient was not finite; not with a `ShardedGradScaler`, which skips such passes.
    Gradients are the mean over all ranks. A flat parameter's ``.grad`` holds zeros where some of
    its parameters were not used, and a warning names those that no rank has used; in `no_sync` it
    is this rank's sum so far. Hooks of ``register_post_accumulate_grad_hook`` run when ``.grad`` is
    the mean. Hooks of `Tensor.register_hook` would see a piece of it and are refused.
    `torch.autograd.grad` of inputs returns this rank's gradient; for parameters it raises.

    >>> model = FullyShardedDataParallel(net, auto_wrap_policy=ModuleWrapPolicy({Block}))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    """

    _deferred: frozenset[nn.Parameter]

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,  # noqa: ANN401 - c10d's types stay in comm
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: WrapPolicy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], object] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        stop_on_non_finite: bool = False,
    ) -> None:
        super().__init__()
        require_module(module, "FullyShardedDataParallel")
        checks.check_containers(module)
        self._deferred, around = module.__dict__.pop(FROM_ABOVE, (frozenset(), checks.Ignored()))
        known = [around, *(wrapper._ignored for wrapper in wrappers_in(module))]
        ignored = checks.find_ignored(
            module, ignored_modules, ignored_states, FullyShardedDataParallel, known
        )
        self._groups = find_groups(
            sharding_strategy, process_group, device_mesh, has_policy=auto_wrap_policy is not None
        )
        self._precision = own_config(MixedPrecision, mixed_precision or MixedPrecision())
        self.backward_prefetch, self.forward_prefetch = backward_prefetch, forward_prefetch
        self._offloads = cpu_offload is not None and cpu_offload.offload_params
        self._use_full_prec_in_eval = os.environ.get(FULL_PRECISION_IN_EVAL) == "1"
        self.limit_all_gathers, self._use_orig_params = limit_all_gathers, use_orig_params
        device = building.resolve_device_id(device_id)
        if auto_wrap_policy is not None:
            shared: dict[str, Any] = {
                "process_group": None if device_mesh is not None else self._groups.process_group,
                "sharding_strategy": self._groups.strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "param_init_fn": param_init_fn,
                "device_id": device,
                "sync_module_states": sync_module_states,
                "forward_prefetch": forward_prefetch,
                "limit_all_gathers": limit_all_gathers,
                "use_orig_params": use_orig_params,
                "device_mesh": device_mesh,
            }
            self._wrap_submodules(module, auto_wrap_policy, ignored, shared)
        settings = UnitSettings(
            keep_full_after_forward=row_of(self._groups.strategy).keeps_full,
            backward_prefetch=PREFETCHES[self.backward_prefetch],
            forward_prefetch=forward_prefetch,
        )
        self._build(module, ignored, settings, (device, param_init_fn, sync_module_states))
        self._driver.stops_on_non_finite = stop_on_non_finite

    # ---------------------------------------------------------------------- construction

    def _wrap_submodules(
        self,
        module: nn.Module,
        policy: WrapPolicy,
        ignored: checks.Ignored,
        shared: dict[str, Any],
    ) -> None:
        precision: MixedPrecision | None = shared["mixed_precision"]
        cls = type(self)
        targets = building.choose_targets(
            module, policy, ignored, precision, FullyShardedDataParallel
        )

        def build(
            target: nn.Module, own: dict[str, Any], deferred: frozenset[nn.Parameter]
        ) -> nn.Module:
            # Arguments are those of torch's class, so what is shared goes along on the module.
            target.__dict__[FROM_ABOVE] = (deferred, ignored)
            with warnings.catch_warnings():
                # The outermost wrapper has warned for the whole tree.
                warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy")
                warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
                return cls(target, **{**shared, **own})

        building.wrap_targets(
            module, targets, ignored, build, allows_frozen_mix=shared["use_orig_params"]
        )

    def _build(
        self,
        module: nn.Module,
        ignored: checks.Ignored,
        settings: UnitSettings,
        start: tuple[torch.device | None, Callable[[nn.Module], object] | None, bool],
    ) -> None:
        device_id, init, synchronizes = start
        below, inside = self._look_below(module, ignored)
        named = below.unmanaged()
        devices = {parameter.device for _, parameter in named}
        checks.check_devices(devices, device_id)
        self._device = checks.choose_device(
            devices, device_id, self._groups.shard.device, self._groups.shard.rank
        )
        if building.materialize(inside, named, self.compute_device, init):
            below, inside = self._look_below(module, ignored)
            named = below.unmanaged()
        _move(named, self.compute_device, device_id)
        checks.check_parameters(named, use_orig_params=self._use_orig_params)
        plan = building.UnitPlan(
            groups=self._groups,
            precision=self._precision,
            settings=settings,
            device=self.compute_device,
            offloads=self._offloads,
            use_orig_params=self._use_orig_params,
            is_synchronized=synchronizes,
        )
        axes = self._groups.axes
        if synchronizes:
            building.send_states(module, named, ignored, axes)
        del named  # `build_unit` counts who else holds them
        self._unit = building.build_unit(below, plan)
        inner = [part for _, part in below.named if isinstance(part, UnitWrapper)]
        building.check_shared(below, [self._unit, *(each._unit for each in inner)])
        self._ignored = ignored
        left_out = set(map(id, ignored.parameters))
        if self._unit is not None and not self._use_orig_params:
            list_below([part for part in inside if part is not module], self._unit)
        self._driver = UnitDriver(
            self._unit,
            self._groups.strategy,
            sends_use_counts=self._use_orig_params,
            ignored=places_in((part for _, part in below.named), left_out) if left_out else (),
            leaves_out=ignored.left_out(module),
            buffers=() if synchronizes else starting_buffers(inside, left_out, axes.communicators),
        )
        self._is_inner = self._is_summoned = self._is_checked = False
        self._mode = PrecisionMode(self._precision, self._unit)
        self._state_dict_settings = StateDictSettings()
        self._hook: object = None
        setattr(self, WRAPPED, module)
        self._share_tensor_mesh([self, *inner])
        check_reached([self, *(part for _, part in below.named)])
        attach(self, self._driver)
        self.register_load_state_dict_post_hook(clean_reported_names)
        for each in inner:
            each._is_inner = True

    def _look_below(
        self, module: nn.Module, ignored: checks.Ignored
    ) -> tuple[building.Below, list[nn.Module]]:
        """List all modules below ``module``, and those that no inner wrapper has."""
        own = [m for m in dict.fromkeys(own_modules(module)) if m not in ignored.modules]
        return building.Below(module, ignored, self._deferred, [*module.named_modules()]), own

    @staticmethod
    def _share_tensor_mesh(wrappers: Sequence[UnitWrapper]) -> None:
        """Give all wrappers the mesh of the DTensors that any of them has had."""
        units = [each._unit for each in wrappers if each._unit is not None]
        groups = [group for unit in units for group in unit.groups if group.has_outer]
        tensor = tensor_mesh(slot for group in groups for slot in group.slots)
        for wrapper in wrappers if tensor is not None else ():
            wrapper._groups = replace(wrapper._groups, tensor=tensor)

    # --------------------------------------------------------------------------- methods

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """List all wrappers in ``module`` and itself; with ``root_only`` the outermost ones."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        return [m for m in found if m.check_is_root()] if root_only else found

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank, without a reduction, in backwards of the block.

        The first backward after it reduces the sum. Only for the root.
        """
        self._only_root("`no_sync()` on inner FSDP instances is not supported.", RuntimeError)
        with contextlib.ExitStack() as settings:
            for unit in fsdp_units(self):
                keeps = unit.settings.keep_full_after_forward
                settings.enter_context(
                    unit.changed(synchronize=False, keep_full_after_backward=keeps)
                )
            yield

    def pipeline_residency(self) -> ShardedResidency:
        """The object by which a pipeline's schedule drives all wrappers of the root."""
        return sharded_residency(self, WrapperResidency)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most ``max_norm``.

        Returns the norm before scaling. Every rank calls it, on the root. Raises `LayoutError` for
        a stage of a pipeline.
        """
        self._only_root(
            "`clip_grad_norm_()` should only be called on the root FSDP instance", RuntimeError
        )
        refuse_stages(self.parameters())
        max_norm, norm_type = float(max_norm), float(norm_type)
        iteration = self._driver.start(self)
        if iteration.showing:
            raise RuntimeError(
                "clip_grad_norm_ was called while gradients of passes in no_sync wait for their "
                "reduction: run the last backward pass of a step outside of it, then clip"
            )
        if iteration.announce_clip is not None:
            iteration.announce_clip(max_norm, norm_type)
        spread, gradients = spread_gradients(self)
        if not gradients:
            warn(f"Called FSDP.clip_grad_norm_() on rank {self.rank} with no gradients")
        norm = global_norm(spread, norm_type)
        scale_to_norm(gradients, norm, max_norm)
        dtypes = {gradient.dtype for gradient in gradients}
        dtype = dtypes.pop() if len(dtypes) == 1 else norm.dtype
        return norm.to(dtype if gradients else torch.float32)

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Reduce gradients by ``hook(state, whole, out)``; ``hook(state, whole)`` if not sharded.

        In a hybrid strategy it reduces over the shards, and the copies are averaged afterwards. A
        hook with a parameter ``bucket`` is one of `meshwright.data_parallel.comm_hooks`: called as
        ``hook(state, bucket)``, in a hybrid strategy on this rank's part over the copies.
        """
        if not self.check_is_root():
            raise AssertionError("register_comm_hook can only be called on a root instance.")
        if not callable(hook):
            raise ValueError(f"The communication hook must be callable but got {hook!r}")
        wrappers = self.fsdp_modules(self)
        if any(wrapper._hook is not None for wrapper in wrappers):
            raise AssertionError("A communication hook is already registered")
        takes_bucket = "bucket" in inspect.signature(hook).parameters
        if takes_bucket:
            register_bucket_hook(fsdp_units(self), state, hook)
        for wrapper in wrappers:
            wrapper._hook = hook
            unit = wrapper._unit
            if unit is not None and not takes_bucket:
                unit.change(reduce_hook=_engine_hook(unit, state, hook))

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Show whole parameters under their names; with ``writeback`` changes to them are kept.

        ``module`` need not be a wrapper itself. Every rank enters the block. Without gradients, as
        in ``generate()``, modules that show them may be called there, in the parameters' dtype.
        Raises NotImplementedError for arguments that exclude each other, AssertionError in a pass.
        """
        options = SummonOptions(
            writes_back=writeback,
            rank0_only=rank0_only,
            offloads=offload_to_cpu,
            with_gradients=with_grads,
        )
        wrappers = FullyShardedDataParallel.fsdp_modules(module)
        if not recurse:
            wrappers = [w for w in wrappers if w is module]
        settle()
        with summon_all(wrappers, options):
            yield

    # --------------------------------------------------------- torch's checkpoint functions

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell torch's checkpoint functions which name components to leave out."""
        super()._fqn_modifiers()
        prepare_optimizers(self)
        return CheckpointNames(WRAPPED, self._inside)


FROM_ABOVE = "_meshwright_from_above"
"""On a module that a policy wraps: parameters of units above, and what is ignored."""


def _move(
    named: Iterable[tuple[str, nn.Parameter]], device: torch.device, asked: torch.device | None
) -> None:
    if asked is None:
        return
    for _, parameter in named:
        if parameter.device != device:
            parameter.data = parameter.data.to(device)


def _engine_hook(
    unit: Unit, state: object, hook: Callable[..., object]
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Convert ``hook`` to the engine's form, which also averages the copies of a shard."""
    axes = unit.groups[0].axes

    def reduce(whole: torch.Tensor, out: torch.Tensor) -> None:
        if axes.shard is None:
            hook(state, whole)
            return
        hook(state, whole, out)
        if axes.replicate is not None:
            axes.replicate.all_reduce(out, label=f"replicate {unit.name}").wait()
            out.div_(axes.replicate.size)

    return reduce
