"""`fully_shard`: parameters are sharded over the ranks and whole only while a module runs.

The module keeps its parameter names. At rest parameters are DTensors, each with this rank's chunk
along dim 0; while the module computes they are plain tensors. The module's class becomes a subclass
of its former class with the methods of `FSDPModule` added.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from types import FunctionType, MappingProxyType
from typing import Any, TypeVar

from torch import nn

from meshwright import comm
from meshwright.comm import settle
from meshwright.comm.dtensors.exchanging import exchanged_over
from meshwright.comm.dtensors.operators.mixed_lists import explain_reads, take_lists_apart
from meshwright.comm.dtensors.operators.written_parts import write_through
from meshwright.data_parallel.checks.starting_state import StartingBuffer, starting_buffers
from meshwright.data_parallel.modules.nested import tensors_in
from meshwright.data_parallel.modules.of_this_process import home_of
from meshwright.data_parallel.sharded_modules.module_hooks import (
    CastSettings,
    Driver,
    attach,
    driver_of,
)
from meshwright.data_parallel.sharded_modules.module_tree import STATES, places_in
from meshwright.data_parallel.sharded_modules.sharded_module import FSDPModule
from meshwright.data_parallel.sharded_modules.traced_units import TracedDriver
from meshwright.data_parallel.shards.placement import PlacementChoice, check_exchange, target_of
from meshwright.data_parallel.shards.policies import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from meshwright.data_parallel.shards.replaced_parameters import mixed
from meshwright.data_parallel.shards.sharding import (
    ShardOptions,
    below,
    build_unit,
    check_settled,
    experts_axes,
    on_one_mesh,
    remember,
)
from meshwright.data_parallel.shards.unit import Unit
from meshwright.environment import is_launched
from meshwright.errors import CommunicationError, warn
from meshwright.gradients import look_at_optimizers
from meshwright.mesh import DeviceMesh, init_device_mesh
from meshwright.torch_internals.modules import require_module

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])

NAME = "fully_shard"
EXCHANGE_AXES = ("ep", "expert")
"""Names of mesh dims whose ranks hold different experts."""


class _ShardedDriver(TracedDriver):
    """A driver that uses the root's names for its unit's parameters."""

    def adopt_names(self, modules: Mapping[nn.Module, str]) -> None:
        if self.unit is not None:
            self.unit.rename(self.name, modules)
            check_settled(self.unit)

    def check_materialized(self) -> None:
        if self.unit is not None:
            _check_offloaded(self.unit)


class ShardedState:
    """The state of one module that `fully_shard` was applied to."""

    def __init__(self, driver: Driver, options: ShardOptions) -> None:
        self.driver = driver
        self.options = options

    @property
    def unit(self) -> Unit | None:
        """The unit of parameters that were sharded together; None when the module had none left."""
        return self.driver.unit

    @property
    def padding(self) -> float:
        """Padding elements per element of this module's unit; 0.0 without a unit."""
        groups = () if self.unit is None else self.unit.groups
        layouts = [group.buffer.layout.chunked_layout() for group in groups]
        elements = sum(layout.numel for layout in layouts)
        padding = sum(layout.padding * layout.numel for layout in layouts)
        return padding / elements if elements else 0.0

    @property
    def without_effect(self) -> Mapping[str, object]:
        """Settings accepted for compatibility with torch that have no effect, with values."""
        return MappingProxyType(self.driver.without_effect)


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementChoice | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Collection[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    stop_on_non_finite: bool = False,
    sync_module_states: bool = False,
) -> M:
    """Shard the parameters of ``module`` that no earlier call has taken; returns it.

    Apply it to inner modules first. One call is one unit: its parameters are gathered in one
    collective before the forward pass and again before the backward pass, and their gradients are
    reduced in one. Each module's class gets the methods of `FSDPModule`; check ``isinstance(model,
    FSDPModule)`` to tell a type checker.

    :param module: a module, or several that form one unit.
    :param mesh: one dim, or two with names: ranks along the first then hold the same shards. All
        ranks when None.
    :param reshard_after_forward: True frees full parameters after the forward pass, False keeps
        them until the backward pass, None keeps them for the root only; a number shards them over
        that many neighboring ranks until then. Call `FSDPModule.reshard` where something writes to
        parameters in between.
    :param shard_placement_fn: returns for a parameter a placement with the ``dim`` to shard along,
        a `ShardPlacementResult` to give it its own mesh, or None for dim 0.
    :param mp_policy: the dtypes of computation, reduction and outputs.
    :param offload_policy: `CPUOffloadPolicy()` keeps shards in the memory of the CPU.
    :param ignored_params: parameters that stay as they are.
    :param dp_mesh_dims: the axes of ``mesh`` for data, where parameters are DTensors on all of it.
    :param stop_on_non_finite: for the root and all below it: every rank raises `NonFiniteError` at
        the end of a backward pass in which a gradient was not finite. Not with a gradient scaler,
        which skips such passes.
    :param sync_module_states: broadcast parameters and buffers from rank 0 of the mesh before they
        are sharded.

    Parameters of a module that exchanges samples over an axis, such as experts, are DTensors on it,
    and are sharded over the ranks of ``mesh`` beside it: pass the mesh of dense parameters,
    ``mesh["shard", "ep"]._flatten("dense")``. All gradients are divided by its size.

    Parameters may already be DTensors of tensor parallelism: their local parts are sharded. They
    compute as local tensors in modules of this library, and as DTensors elsewhere. Their axes
    differ from those of ``mesh``, or, with ``dp_mesh_dims``, are all axes of ``mesh``. Parameters
    below ``module`` that tensor parallelism has not sharded are replicated over its axes, on the
    same mesh.

    A tensor subclass with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` is gathered by these
    as in torch, except that inputs without padding are padded. Its values must be in one plain
    tensor of its shape and dtype.

    Ranks must start from the same values: the sharded values are compared when the root runs for
    the first time, except for those written or loaded since.

    Hooks of parameters run when gradients have been reduced: those of `Tensor.register_hook` on the
    mean, a DTensor, those of ``register_post_accumulate_grad_hook`` when ``.grad`` is set.
    `torch.autograd.grad` of inputs returns this rank's gradient; for parameters it raises, as the
    graph has full tensors in their place.

    Use ``p.full_tensor()`` outside of the module only in terms of parameters alone, which are equal
    on all ranks. In a term with this rank's data the gradient would not be averaged over ranks;
    ``p.full_tensor(grad_placements=[Partial("avg")])`` averages it, as in torch.

    Raises ValueError for a container without forward, a scalar parameter or another kind of mesh,
    TypeError for another tensor subclass with operators of its own, AssertionError when the module
    is sharded already.

    >>> for layer in model.layers:
    ...     fully_shard(layer)
    >>> fully_shard(model)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    is_one = isinstance(module, nn.Module) or not isinstance(module, Iterable)
    modules = [module] if is_one else list(module)
    _check_modules(modules)
    look_at_optimizers()
    write_through()
    take_lists_apart()
    explain_reads(mixed)
    options = ShardOptions(
        target=target_of(_mesh(mesh), dp_mesh_dims),
        reshard_after_forward=reshard_after_forward,
        placement_of=shard_placement_fn,
        precision=MixedPrecisionPolicy.of(mp_policy),
        offload=OffloadPolicy.of(offload_policy),
        ignored=frozenset(id(parameter) for parameter in ignored_params or ()),
    )
    _check_reshard(options)
    axes = options.target.axes.communicators
    found = below(modules)
    _check_exchanges(modules, options, found.drivers)
    inside = [part for _, part in found.own]
    unit = build_unit(modules, found, options, synchronizes=sync_module_states)
    experts = experts_axes(() if unit is None else unit.slots)
    others = {part: own.communicators for part, own in experts.items()}
    buffers: Sequence[StartingBuffer] = ()
    if not sync_module_states:
        buffers = starting_buffers(inside, options.ignored, axes, others)
    driver = _ShardedDriver(
        unit,
        cast=_cast(options.precision),
        parts=modules if len(modules) > 1 else (),
        ignored=places_in(inside, options.ignored),
        buffers=buffers,
        keeps_as_root=reshard_after_forward is None,
        stops_on_non_finite=stop_on_non_finite,
    )
    remember(driver)
    for part in modules:
        _install(part, driver, options)
    on_one_mesh([driver, *found.drivers])
    return module


def sharded_state(module: nn.Module) -> ShardedState:
    """Return the state of the sharded ``module``. Raises ValueError when it is not sharded."""
    state = module.__dict__.get(STATES, {}).get(NAME)
    if not isinstance(state, ShardedState):
        raise ValueError(
            f"expected a module that fully_shard was applied to, found a "
            f"{type(module).__name__} that it was not applied to"
        )
    return state


# As torch's has it; type checkers know no attributes of functions.
setattr(fully_shard, "state", sharded_state)  # noqa: B010


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make the method ``method_name`` gather and free parameters as ``forward`` does.

    The method may call the module itself, as ``generate`` does; that is part of the pass. Does
    nothing for a module that is not sharded. Raises ValueError when the module lacks the method.
    """
    driver = driver_of(module)
    if driver is None:
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ValueError(f"{type(module).__name__} does not have a method {method_name!r}")

    def around(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        driver.prepare(module)
        args, kwargs = driver.before_forward(module, args, kwargs)
        is_driven = driver.is_driven
        driver.is_driven = True
        try:
            output = method(*args, **kwargs)
        finally:
            driver.is_driven = is_driven
        if not (is_driven or any(tensor.requires_grad for tensor in tensors_in(output))):
            return driver.end_without_graph(module, output)
        return driver.after_forward(module, args, output)

    setattr(module, method_name, around)


# ------------------------------------------------------------------------------------ set-up


def _install(module: nn.Module, driver: Driver, options: ShardOptions) -> None:
    module.__dict__.setdefault(STATES, {})[NAME] = ShardedState(driver, options)
    attach(module, driver)
    module.__class__ = _sharded_class(type(module))
    module.register_forward_pre_hook(driver.before_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(driver.after_forward)
    module.register_load_state_dict_post_hook(partial(_loaded, driver))
    holders, put_away = () if driver.unit is None else driver.unit.slots, partial(_put_away, driver)
    for part in dict.fromkeys(where for slot in holders for where, _ in slot.places):
        part.register_state_dict_pre_hook(put_away)
        part.register_load_state_dict_pre_hook(put_away)


def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Make a subclass of ``cls`` with the members of `FSDPModule`.

    All modules of ``cls`` share it, so code compiled for one block serves the others. It has the
    name of torch's class and ``__module__`` of ``cls``, where other programs look for it.
    """
    bases = (FSDPModule, cls)
    made = (each for each in type.__subclasses__(cls) if each.__bases__ == bases)
    members = {**home_of(cls), **_framed(cls)}
    return next(made, None) or type(f"FSDP{cls.__name__}", bases, members)


def _framed(cls: type[nn.Module]) -> dict[str, object]:
    """Run a forward of torch's in a frame of ours: compilers begin no graph in torch's frames."""
    theirs = cls.forward
    if not (theirs.__module__ or "").startswith("torch."):  # None for what torch.fx has written
        return {}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> object:
        return theirs(self, *args, **kwargs)

    # Graphs belong to the code of a frame, and there are only so many to one.
    code = forward.__code__.replace(co_name=theirs.__qualname__)
    framed = FunctionType(code, forward.__globals__, closure=forward.__closure__)
    return {"forward": functools.wraps(theirs)(framed)}


def _put_away(driver: Driver, *_: object) -> None:
    """State-dict hook: frees full parameters, so that state dicts hold the shards."""
    settle()
    if driver.unit is not None:
        driver.unit.reshard()


def _loaded(driver: Driver, module: nn.Module, keys: object) -> None:
    unit = driver.unit
    if unit is not None and driver.has_parts:  # its other modules may still be loaded
        unit.has_changed()
    elif unit is not None:
        unit.exposure.take_over(unit)


def _mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is not None:
        return mesh
    is_meant = is_launched()
    with contextlib.suppress(CommunicationError):
        is_meant = comm.communicator().size > 0
    world = comm.connect()
    if world.size == 1 and not is_meant:
        warn(
            "fully_shard found no launcher, and no run that this process has joined: nothing is "
            "sharded. Start the script with torchrun --nproc-per-node N, or call "
            "meshwright.comm.connect() first where one process is meant"
        )
    # Without a name, as torch's: so that its DTensors meet those of a mesh that users make.
    return init_device_mesh(world.device.type, (world.size,))


def _cast(precision: MixedPrecisionPolicy) -> CastSettings:
    inputs = precision.param_dtype if precision.cast_forward_inputs else None
    return CastSettings(inputs=inputs, outputs=precision.output_dtype)


# ------------------------------------------------------------------------------------ checks


def _check_modules(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        require_module(module, "fully_shard")
        has_forward = type(module).forward is not nn.Module.forward
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and not has_forward:
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
    size = options.target.axes.parts
    if isinstance(after, int) and not isinstance(after, bool) and (after < 1 or size % after):
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {size}, the "
            f"number of ranks that a parameter is sharded over; got {after}"
        )


def _check_exchanges(
    modules: Sequence[nn.Module], options: ShardOptions, drivers: Iterable[Driver]
) -> None:
    """Raise ValueError where gradients leave out samples of ranks that hold other experts."""
    replicate = options.target.axes.replicate
    if replicate is not None and replicate.axis in EXCHANGE_AXES:
        raise ValueError(
            f"fully_shard: the replicate dim of the mesh is {replicate.axis!r}, whose ranks hold "
            f'other experts, not copies. Pass mesh["shard", {replicate.axis!r}]._flatten("dense"), '
            "alone or beside a replicate dim of another name"
        )
    found = {
        over: path
        for module in modules
        for path, part in module.named_modules()
        if (over := exchanged_over(part)) is not None
    }
    units = [driver.unit for driver in drivers if driver.unit is not None] if found else []
    inner = [group.axes for unit in units for group in unit.groups]
    for over, path in found.items():
        for axes in dict.fromkeys((options.target.axes, *inner)):
            check_exchange(path, over, axes)


def _check_offloaded(unit: Unit) -> None:
    """Raise RuntimeError when shards that should be on the CPU are not."""
    for group in unit.groups:
        found = group.buffer.shard.device
        if group.home is not None and found.type != "cpu":
            raise RuntimeError(
                "FSDP parameters should be materialized on CPU when enabling CPU offloading. "
                f"Found {group.slots[0].name!r} on {found}: load a state dict on the CPU, or call "
                'module.to_empty(device="cpu") and initialize the parameters'
            )
