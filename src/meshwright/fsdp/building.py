"""Builds units from a module: chosen by a policy, materialized, moved, made equal, and sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.comm.dtensors.dtensor import check_ties, is_dtensor
from meshwright.comm.dtensors.exchanging import exchanged_over
from meshwright.comm.streams import is_host
from meshwright.data_parallel.checks.forward_writes import refuse_frequencies, refuse_max_norm
from meshwright.data_parallel.checks.starting_state import synchronize
from meshwright.data_parallel.distributed_parameters import local_parameters
from meshwright.data_parallel.modules.nested import Loan, map_tensors, tensors_in
from meshwright.data_parallel.shards.buffer import BufferTypes, DataAxes
from meshwright.data_parallel.shards.parameter_group import ParameterGroup, UnitSettings
from meshwright.data_parallel.shards.replaced_parameters import (
    is_ours_alone,
    refuse_views,
    retire_sharded,
)
from meshwright.data_parallel.shards.slot import Slot, collect_slots, group_slots
from meshwright.data_parallel.shards.tensor_extensions import check_class, whole_parameter
from meshwright.data_parallel.shards.unit import Unit
from meshwright.errors import warn
from meshwright.fsdp.checks import Ignored, check_frozen_mix
from meshwright.fsdp.exposures.exposure import FlatExposure, FlatParameter
from meshwright.fsdp.exposures.original_exposure import TAKEN, OriginalExposure
from meshwright.fsdp.exposures.tensor_axes import take_part
from meshwright.fsdp.groups import Groups
from meshwright.fsdp.options import MixedPrecision
from meshwright.fsdp.traversal import clean_name, name_alike, paths_alike
from meshwright.fsdp.unit_wrapper import own_modules
from meshwright.fsdp.wrap import Targets, WrapPolicy, find_targets
from meshwright.layout import FlatLayout
from meshwright.torch_internals.modules import CHECKPOINTED

REFUSED = "FullyShardedDataParallel gathers as a part of one line"
ALIGNMENT = 16
"""Bytes that original parameters are aligned to, as in torch."""
SYNCHRONIZED = "_meshwright_is_synchronized"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """All options for building one unit."""

    groups: Groups
    precision: MixedPrecision
    settings: UnitSettings
    device: torch.device
    use_orig_params: bool
    offloads: bool = False
    """True when shards and gradients stay on the CPU."""
    is_synchronized: bool = False
    """True where all ranks have just been given the same values."""


@dataclass(frozen=True, slots=True)
class Below:
    """A module that becomes a unit, and the modules below it."""

    root: nn.Module
    ignored: Ignored
    deferred: frozenset[nn.Parameter]
    """Parameters that belong to a unit above."""
    named: Sequence[tuple[str, nn.Module]]
    """All modules, with their names."""

    def unmanaged(self) -> list[tuple[str, nn.Parameter]]:
        """List the parameters that are neither ignored, taken nor deferred, each once."""
        seen = self.skipped()
        found: list[tuple[str, nn.Parameter]] = []
        for path, module in self.named:
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                if not hasattr(parameter, TAKEN):
                    found.append((clean_name(f"{path}.{name}" if path else name), parameter))
        return found

    def skipped(self) -> set[int]:
        """The ``id`` of parameters that are ignored or belong to a unit above."""
        return {*map(id, self.ignored.parameters), *map(id, self.deferred)}

    def slots(self) -> list[Slot]:
        """Make slots for the parameters that no unit has."""
        modules = [
            (clean_name(name), module)
            for name, module in self.named
            if module._parameters and module not in self.ignored.modules
        ]
        slots = collect_slots(modules, self.skipped())
        return [slot for slot in slots if not hasattr(slot.original, TAKEN)]


def check_shared(below: Below, units: Iterable[Unit | None]) -> None:
    """Raise ValueError for a parameter of another unit that is still used here."""
    places: set[tuple[int, str]] | None = None
    for prefix, module in below.named:
        for name, parameter in module._parameters.items():
            if isinstance(parameter, FlatParameter) or not hasattr(parameter, TAKEN):
                continue
            if places is None:
                slots = (slot for unit in units if unit is not None for slot in unit.slots)
                places = {(id(part), key) for slot in slots for part, key in slot.places}
            if (id(module), name) not in places:
                raise ValueError(
                    f"Parameter {clean_name(f'{prefix}.{name}').lstrip('.')!r} is shared with a "
                    "module that was wrapped before. Wrap with auto_wrap_policy, which gives it "
                    "to the lowest common unit, or wrap one module that holds both"
                )


def resolve_device_id(device_id: int | str | torch.device | None) -> torch.device | None:
    """Return ``device_id`` as a device; CUDA without an index is the current one, and warns."""
    if device_id is None:
        return None
    device = (
        torch.device("cuda", device_id) if isinstance(device_id, int) else torch.device(device_id)
    )
    if device.type == "cpu":
        return torch.empty(0, device=device).device
    if device.index is None:
        current = torch.device(device.type, torch.cuda.current_device())
        warn(
            f"FSDP got the argument `device_id` {device}, which has no index, and uses {current}. "
            "Call torch.cuda.set_device before, or pass the number"
        )
        return current
    return device


def materialize(
    modules: Collection[nn.Module],
    named: Sequence[tuple[str, nn.Parameter]],
    device: torch.device,
    init: Callable[[nn.Module], object] | None,
) -> bool:
    """Allocate and initialize meta parameters in ``named``, and meta buffers, if any.

    ``init`` is called for each of ``modules``, parents first, that holds meta tensors or none.
    """
    if init is not None and not callable(init):
        raise ValueError(f"Expected {init} to be callable but got {type(init).__name__}")
    own = {id(p) for _, p in named if p.is_meta}
    held = (b for module in modules for b in module._buffers.values())
    own |= {id(b) for b in held if b is not None and b.is_meta}
    if not own:
        return False
    for module in modules:
        held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        is_meta = any(id(tensor) in own for tensor in held)
        if init is not None and (is_meta or not held):
            init(module)
        if init is not None or not is_meta:
            continue
        module.to_empty(device=device, recurse=False)
        reset = getattr(module, "reset_parameters", None)
        try:
            with torch.no_grad():
                reset()  # pyrefly: ignore[not-callable]
        except BaseException as error:
            warn(
                "Unable to call `reset_parameters()` for module on meta device with error "
                f"{error}. Please ensure that your module of type {type(module).__name__} "
                "implements a `reset_parameters()` method, or pass param_init_fn"
            )
            raise
    return True


def send_states(
    root: nn.Module, named: Sequence[tuple[str, nn.Parameter]], ignored: Ignored, axes: DataAxes
) -> None:
    """Broadcast rank 0's parameters ``named``, and its buffers, except ignored ones."""
    apart = {id(buffer) for module in ignored.modules for buffer in module.buffers()}
    buffers = [
        (name, buffer)
        for name, buffer in root.named_buffers()
        if id(buffer) not in apart and not hasattr(buffer, SYNCHRONIZED)
    ]
    paths = paths_alike(root, ignored.left_out(root))
    alike = [(name_alike(name, paths), tensor) for name, tensor in [*named, *buffers]]
    synchronize(alike, axes.shard, axes.replicate)
    for _, buffer in buffers:
        setattr(buffer, SYNCHRONIZED, True)


def build_unit(below: Below, plan: UnitPlan) -> Unit | None:
    """Make the unit of all parameters ``below`` that no other unit has; None if there are none."""
    for path, part in below.named:
        if (over := exchanged_over(part)) is not None:
            raise ValueError(
                f"FullyShardedDataParallel: module {clean_name(path)!r} exchanges samples over "
                f"{over}, so gradients of its parameters are sums over that already. Use "
                "fully_shard, which knows them"
            )
    root, parts, slots = below.root, [part for _, part in below.named], below.slots()
    originals = [slot.original for slot in slots]
    check_ties(root, originals)
    if not slots:
        return None
    local = local_parameters(root) if any(map(is_dtensor, originals)) else {}
    if plan.groups.axes.shard is None and plan.groups.axes.size > 1:
        refuse_max_norm(root, [(slot.name, slot.original) for slot in slots])
    refuse_views(parts, slots)
    if plan.groups.axes.size > 1:
        refuse_frequencies(parts, [(slot.name, slot.original) for slot in slots])
    for slot in slots:
        check_class(slot.name, slot.original, why=REFUSED)
        if any(getattr(module, "renames_state", False) for module, _ in slot.places):
            raise ValueError(
                f"parameter {slot.name!r} has other names in state dicts, by experts_of, which "
                "FullyShardedDataParallel does not know: use fully_shard, or put it into "
                "ignored_states"
            )
        take_part(slot, plan.groups, local)
    name = type(root).__name__
    cut = [slots] if not plan.use_orig_params else group_slots(slots, by_training=False)
    groups = [_group(members, plan) for members in cut]
    for group in () if plan.is_synchronized else groups:
        group.note_starts(group.slots)
    precision = plan.precision
    kept = precision.param_dtype if precision.keep_low_precision_grads else None
    owner = root
    while (inner := owner._modules.get(CHECKPOINTED)) is not None:
        owner = inner  # wrappers for recomputation have hooks that rename what lies in them
    exposure = OriginalExposure(kept) if plan.use_orig_params else FlatExposure(owner, kept)
    for slot in slots:
        setattr(slot.original, TAKEN, name)
    unit = Unit(name, groups, exposure, plan.settings)
    if not plan.use_orig_params:
        originals.clear()  # `is_ours_alone` counts references
        for slot in slots:
            before, slot.original = slot.original, _stand_in(slot.original)
            if not is_ours_alone(before):
                retire_sharded(before, slot.name)
            del before  # or `forget_gone` would find it held
            slot.forget_gone()
    return unit


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Make a parameter with the metadata of ``parameter``, without values."""
    made = whole_parameter(torch.empty_like(parameter, device="meta"), parameter)
    made.__dict__.update(parameter.__dict__)
    return made


def _group(slots: Sequence[Slot], plan: UnitPlan) -> ParameterGroup:
    master = slots[0].original.dtype
    axes = plan.groups.axes
    layout = FlatLayout.pack(
        [slot.name for slot in slots],
        [slot.original.shape for slot in slots],
        str(master).removeprefix("torch."),
        axes.parts,
        tensor_alignment=ALIGNMENT // master.itemsize if plan.use_orig_params else 1,
    )
    types = BufferTypes.of(master, plan.precision.param_dtype, plan.precision.reduce_dtype)
    home = torch.device("cpu") if plan.offloads and not is_host(plan.device) else None
    marks_use = not plan.use_orig_params
    return ParameterGroup(slots, layout, axes, types, plan.device, home, marks_use=marks_use)


# -------------------------------------------------------------------- what a policy has chosen


Wrapper = Callable[[nn.Module, dict[str, Any], frozenset[nn.Parameter]], nn.Module]


def choose_targets(
    root: nn.Module,
    policy: WrapPolicy,
    ignored: Ignored,
    precision: MixedPrecision | None,
    wrapper: type[nn.Module],
) -> Targets:
    """Return the modules below ``root`` that become units, with their own arguments."""
    for name, module in root.named_modules():
        if isinstance(module, wrapper):
            raise ValueError(
                "FSDP auto wrapping requires modules to not already have FSDP applied but found "
                f"{name or 'the module itself'} in {type(root).__name__}. Wrap by hand or by "
                "policy, not both"
            )
    targets = find_targets(root, policy, ignored.modules, ignored.parameters)
    if precision is None:
        return targets
    classes = tuple(precision._module_classes_to_ignore)
    plain = [m for m in root.modules() if isinstance(m, classes) and m not in ignored.modules]
    if not plain:
        return targets
    warn(
        "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the wrapped "
        f"module has submodules of type: {sorted({type(m).__name__ for m in plain})}. These "
        "modules will be wrapped as separate FSDP units, without mixed precision"
    )
    ordered: Targets = {}
    for module in plain:
        if module is not root:
            _compute_in_own_dtype(module)
    for module in _post_order(root, set()):
        if module in plain:
            ordered[module] = {**targets.get(module, {}), "mixed_precision": None}
        elif module in targets:
            ordered[module] = targets[module]
    ordered.pop(root, None)
    return ordered


def _compute_in_own_dtype(module: nn.Module) -> None:
    """Cast inputs of ``module`` to the dtype of its parameters, and its output back."""
    parameter = next(module.parameters(), None)
    own = torch.float32 if parameter is None else parameter.dtype
    found: list[torch.dtype] = []
    loans: list[Loan] = []

    def cast(dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - of any module
        others = [v.dtype for v in tensors_in((args, kwargs)) if cast(own, v) is not v]
        found[:], loans[:] = others[-1:], [Loan(partial(cast, own))]
        return loans[0].give(args), {key: loans[0].give(value) for key, value in kwargs.items()}

    def leave(_: nn.Module, __: Any, output: Any) -> Any:  # noqa: ANN401 - of any module
        loans.pop().hand_back()
        return map_tensors(partial(cast, found[0]), output) if found else output

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)


def _post_order(module: nn.Module, seen: set[nn.Module]) -> list[nn.Module]:
    if module in seen:
        return []
    seen.add(module)
    below = [m for child in module.children() for m in _post_order(child, seen)]
    return [*below, module]


def deferred_parameters(
    root: nn.Module, targets: Collection[nn.Module]
) -> dict[nn.Module, frozenset[nn.Parameter]]:
    """List for each target the shared parameters below it that belong to a unit above.

    A shared parameter goes to the lowest unit that contains all its uses.
    """
    chains: dict[nn.Parameter, list[tuple[nn.Module, ...]]] = {}
    _collect_chains(root, (root,), set(targets), chains)
    deferred: dict[nn.Module, set[nn.Parameter]] = {target: set() for target in targets}
    for parameter, found in chains.items():
        for chain in found:
            for depth, target in enumerate(chain):
                is_common = all(other[: depth + 1] == chain[: depth + 1] for other in found)
                if not is_common and target in deferred:
                    deferred[target].add(parameter)
    return {target: frozenset(parameters) for target, parameters in deferred.items()}


def _collect_chains(
    module: nn.Module,
    chain: tuple[nn.Module, ...],
    targets: set[nn.Module],
    chains: dict[nn.Parameter, list[tuple[nn.Module, ...]]],
) -> None:
    """List for each parameter the units around each of its uses, outermost first."""
    for parameter in module._parameters.values():
        if parameter is not None:
            chains.setdefault(parameter, []).append(chain)
    for child in module._modules.values():
        if child is not None:
            below = (*chain, child) if child in targets else chain
            _collect_chains(child, below, targets, chains)


def wrap_targets(
    root: nn.Module,
    targets: Targets,
    ignored: Ignored,
    wrapper: Wrapper,
    *,
    allows_frozen_mix: bool,
) -> None:
    """Replace every target by its wrapper, in every module that holds it."""
    deferred = deferred_parameters(root, targets)
    names = {module: name for name, module in root.named_modules()}
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {module: [] for module in targets}
    for parent in names:
        for name, child in parent._modules.items():
            if child in places:
                places[child].append((parent, name))
    for module, own in targets.items():
        if "use_orig_params" not in own:
            parts, name = own_modules(module), names[module]
            check_frozen_mix(module, parts, name, ignored, is_allowed=allows_frozen_mix)
        wrapped = wrapper(module, own, deferred[module])
        for parent, name in places[module]:
            parent._modules[name] = wrapped
