"""`fully_shard`: parameters live in parts on the ranks and are whole only while a module runs.

The module keeps its parameter names. At rest parameters are DTensors, each with this rank's chunk
along dim 0; while the module computes they are plain tensors. Its class becomes a subclass of its
own that adds the methods of `FSDPModule`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from meshwright import comm
from meshwright.comm.dtensor import is_dtensor, mesh_communicators
from meshwright.data_parallel.buffer import ALONE, DataAxes
from meshwright.data_parallel.driver import CastSettings, Driver, attach, driver_of
from meshwright.data_parallel.exposed_tensors import ExposedTensors
from meshwright.data_parallel.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from meshwright.data_parallel.sharded_module import FSDPModule, rebuild
from meshwright.data_parallel.shared_parameters import check_settled, remember, settle
from meshwright.data_parallel.unit import (
    ParameterGroup,
    Slot,
    Unit,
    UnitSettings,
    collect_slots,
    group_slots,
)
from meshwright.layout import FlatLayout
from meshwright.mesh import DeviceMesh, init_device_mesh

__all__ = [
    "FullyShard",
    "ShardOptions",
    "ShardedState",
    "fully_shard",
    "register_fsdp_forward_method",
]

STATES = "_meshwright_states"
NAME = "fully_shard"
MUCH_PADDING = 0.10
"""Elements of padding for each element, from which a unit's shape is worth a warning."""

PlacementChoice = Callable[[nn.Parameter], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """What was asked for in the call of `fully_shard`."""

    mesh: DeviceMesh
    reshard_after_forward: bool | int | None = None
    placement_of: PlacementChoice | None = None
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    ignored: frozenset[int] = frozenset()


class _ShardedDriver(Driver):
    """Its unit is called by the names that the root knows."""

    def adopt_names(self, modules: Mapping[nn.Module, str]) -> None:
        if self.unit is not None:
            self.unit.rename(self.name, modules)
            check_settled(self.unit)


class ShardedState:
    """What `fully_shard` knows about one module."""

    def __init__(self, driver: Driver, options: ShardOptions) -> None:
        self.driver = driver
        self.options = options

    @property
    def unit(self) -> Unit | None:
        """The parameters that were sharded together; None when the module had none left."""
        return self.driver.unit


class FullyShard:
    """The composable function behind `fully_shard`; call it, or ask it for a module's state."""

    def __call__(
        self,
        module: nn.Module | Sequence[nn.Module],
        *,
        mesh: DeviceMesh | None = None,
        reshard_after_forward: bool | int | None = None,
        shard_placement_fn: PlacementChoice | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
        ignored_params: Collection[nn.Parameter] | None = None,
    ) -> Any:  # noqa: ANN401 - returns what it was given
        """Shard the parameters of ``module`` that no earlier call has taken; returns it.

        Apply it to inner modules first. One call is one unit: its parameters are gathered in one
        collective before the forward pass and again before the backward pass, and their gradients
        are reduced in one. A list of modules is one unit too.

        ``mesh`` has one dim, or two with names: ranks along the first then hold the same shards.
        ``reshard_after_forward=False`` keeps whole parameters until the backward pass; None does so
        for the root only. ``shard_placement_fn`` gives for a parameter a placement with the ``dim``
        it is cut along, or None for dim 0.

        Raises ValueError for a container without forward, a scalar parameter or another kind of
        mesh, AssertionError when the module is sharded already.

        >>> for layer in model.layers:
        ...     fully_shard(layer)
        >>> fully_shard(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        """
        modules = [module] if isinstance(module, nn.Module) else list(module)
        _check_modules(modules)
        options = ShardOptions(
            mesh=_mesh(mesh),
            reshard_after_forward=reshard_after_forward,
            placement_of=shard_placement_fn,
            precision=mp_policy or MixedPrecisionPolicy(),
            offload=offload_policy or OffloadPolicy(),
            ignored=frozenset(id(parameter) for parameter in ignored_params or ()),
        )
        _check_reshard(options)
        driver = _ShardedDriver(
            _unit(modules, options),
            cast=_cast(options.precision),
            parts=modules if len(modules) > 1 else (),
        )
        remember(driver)
        driver.keeps_as_root = reshard_after_forward is None
        for part in modules:
            _install(part, driver, options)
        return module

    def state(self, module: nn.Module) -> ShardedState:
        """What fully_shard knows about ``module``. Raises ValueError when it was not applied."""
        state = module.__dict__.get(STATES, {}).get(NAME)
        if not isinstance(state, ShardedState):
            raise ValueError(
                f"expected a module that fully_shard was applied to, found a "
                f"{type(module).__name__} that it was not applied to"
            )
        return state


fully_shard = FullyShard()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let the method ``method_name`` gather and free parameters as ``forward`` does.

    Does nothing to a module that is not sharded. Raises ValueError when it has no such method.
    """
    driver = driver_of(module)
    if driver is None:
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ValueError(f"{type(module).__name__} does not have a method {method_name!r}")

    def around(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        args, kwargs = driver.before_forward(module, args, kwargs)
        return driver.after_forward(module, args, method(*args, **kwargs))

    setattr(module, method_name, around)


# ------------------------------------------------------------------------------------ set-up


def _unit(modules: Sequence[nn.Module], options: ShardOptions) -> Unit | None:
    ignored = options.ignored
    slots = [
        slot for slot in collect_slots(_own_modules(modules)) if id(slot.original) not in ignored
    ]
    slots = [slot for slot in slots if not is_dtensor(slot.original)]
    _check_parameters(slots, options)
    slots, moved = settle(modules, slots)
    slots += moved
    if not slots:
        return None
    communicators = mesh_communicators(options.mesh)
    axes = DataAxes(
        shard=communicators[-1], replicate=communicators[0] if len(communicators) == 2 else None
    )
    groups = [_group(members, axes, options) for members in group_slots(slots)]
    after = options.reshard_after_forward
    settings = UnitSettings(
        keep_full_after_forward=after is False or (after == 1 and after is not True),
        forward_prefetch=True,
    )
    name = slots[0].names[0].rpartition(".")[0] or type(modules[0]).__name__
    return Unit(name, groups, ExposedTensors(options.mesh), settings)


def _group(slots: Sequence[Slot], axes: DataAxes, options: ShardOptions) -> ParameterGroup:
    # Large ones last: these are gathered by themselves.
    slots = sorted(slots, key=lambda slot: slot.original.numel() * slot.original.itemsize >= ALONE)
    dtype = slots[0].original.dtype
    layout = FlatLayout.chunked(
        [slot.name for slot in slots],
        [tuple(slot.original.shape) for slot in slots],
        str(dtype).removeprefix("torch."),
        axes.parts,
        dims=[_dim(slot, axes.parts, options) for slot in slots],
    )
    if layout.padding > MUCH_PADDING and layout.numel * dtype.itemsize > 2**20:
        warnings.warn(
            f"sharding {slots[0].name!r} and {len(slots) - 1} more over {axes.parts} ranks along "
            f"their dims adds {layout.padding:.0%} padding. Give fully_shard a shard_placement_fn "
            "that chooses a dim which the number of ranks divides",
            stacklevel=5,
        )
    device = slots[0].original.device
    return ParameterGroup(slots, layout, axes, options.precision.types_for(dtype), device)


def _dim(slot: Slot, parts: int, options: ShardOptions) -> int:
    choice = None if options.placement_of is None else options.placement_of(slot.original)
    if choice is None:
        return 0
    shape = slot.original.shape
    dim = int(choice.dim)
    dim += len(shape) if dim < 0 else 0
    if not 0 <= dim < len(shape):
        raise AssertionError(
            f"Shard dim {choice.dim} is invalid for {slot.name!r} of shape {tuple(shape)}"
        )
    if dim and shape[dim] % parts:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {dim}: {slot.name!r} of shape "
            f"{tuple(shape)} over {parts} ranks. Choose dim 0, or a dim that {parts} divides"
        )
    return dim


def _own_modules(modules: Sequence[nn.Module]) -> Iterable[tuple[str, nn.Module]]:
    """The modules below that no other call has taken, each once."""
    seen: set[int] = set()
    for number, root in enumerate(modules):
        # Names become those in the whole model when it runs for the first time.
        stack = [(str(number) if len(modules) > 1 else "", root)]
        while stack:
            name, module = stack.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            yield name, module
            children = [
                (f"{name}.{child_name}" if name else child_name, child)
                for child_name, child in module.named_children()
                if not _is_taken(child)
            ]
            stack.extend(reversed(children))


def _is_taken(module: nn.Module) -> bool:
    """Whether a composable function has been applied to ``module``."""
    return bool(module.__dict__.get(STATES))


def _install(module: nn.Module, driver: Driver, options: ShardOptions) -> None:
    module.__dict__.setdefault(STATES, {})[NAME] = ShardedState(driver, options)
    attach(module, driver)
    cls = type(module)
    module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    module.register_forward_pre_hook(driver.before_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(driver.after_forward)
    module.register_load_state_dict_post_hook(partial(_loaded, driver))


def _loaded(driver: Driver, module: nn.Module, keys: object) -> None:
    if driver.unit is not None:
        rebuild(driver.unit)


def _mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is None:
        world = comm.connect()
        return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError(
            "Please init the 2D mesh for HSDP with mesh_dim_names specified, for example "
            'init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))'
        )
    return mesh


def _cast(precision: MixedPrecisionPolicy) -> CastSettings:
    inputs = precision.param_dtype if precision.cast_forward_inputs else None
    return CastSettings(inputs=inputs, outputs=precision.output_dtype)


# ------------------------------------------------------------------------------------ checks


def _check_modules(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise ValueError(
                "fully_shard does not support containers that do not implement forward: "
                f"{type(module).__name__}. Apply it to the modules inside"
            )
        states = module.__dict__.get(STATES, {})
        if NAME in states:
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. "
                f"fully_shard has been applied to this {type(module).__name__} before"
            )
        if states:
            raise RuntimeError(
                "Cannot apply `fully_shard()` on a Module already managed by "
                f"`{', '.join(states)}`. Apply it to the modules beside it"
            )


def _check_reshard(options: ShardOptions) -> None:
    after = options.reshard_after_forward
    if after is not None and not isinstance(after, bool | int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, got {type(after).__name__}"
        )
    size = options.mesh.size(-1)
    if isinstance(after, int) and not isinstance(after, bool) and (after < 1 or size % after):
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {size}, the "
            f"number of ranks that a parameter is sharded over; got {after}"
        )


def _check_parameters(slots: Iterable[Slot], options: ShardOptions) -> None:
    for slot in slots:
        parameter = slot.original
        if parameter.ndim == 0:
            raise ValueError(
                "fully_shard doesn't support scalar parameters. Change "
                f"{slot.name} to a 1D tensor with numel equal to 1."
            )
        if not parameter.is_contiguous():
            raise NotImplementedError(
                f"fully_shard does not support non-contiguous parameters: {slot.name} has shape "
                f"{tuple(parameter.shape)} and strides {parameter.stride()}. Make it contiguous"
            )
        if isinstance(options.offload, CPUOffloadPolicy) and parameter.device.type not in (
            "cpu",
            "meta",
        ):
            raise RuntimeError(
                "FSDP parameters should be materialized on CPU when enabling CPU offloading. "
                f"Found {slot.name} on {parameter.device}: build the model on the CPU"
            )
