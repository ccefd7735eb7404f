"""Checks of a module that becomes a unit, and of its ignored parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.comm.dtensors.after_hooks import has_hooks
from meshwright.comm.streams import is_host
from meshwright.data_parallel.checks.starting_state import is_of_one_rank
from meshwright.errors import warn


@dataclass(frozen=True, slots=True)
class Ignored:
    """The modules and tensors that a unit and those below it do not manage."""

    modules: frozenset[nn.Module] = frozenset()
    """With everything below them."""
    parameters: frozenset[nn.Parameter] = frozenset()
    """Those of the modules included."""

    def left_out(self, root: nn.Module) -> frozenset[nn.Module]:
        """List the modules below ``root`` that are ignored entirely."""
        left_out = {id(parameter) for parameter in self.parameters}
        if not left_out:
            return self.modules
        return self.modules | {part for part in root.modules() if is_of_one_rank(part, left_out)}


def find_ignored(
    root: nn.Module,
    modules: Iterable[nn.Module] | None,
    states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
    wrapper: type[nn.Module],
    known: Iterable[Ignored],
) -> Ignored:
    """Check the arguments ``ignored_modules`` and ``ignored_states``, and return what they name.

    ``known`` is added: what wrappers around ``root`` and below it ignore already.
    """
    if modules is not None and states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time. Pass "
            "ignored_states alone"
        )
    parameters: list[nn.Parameter] = []
    if states is not None:
        listed: list[Any] = list(states)
        if all(isinstance(state, nn.Parameter) for state in listed):
            parameters = listed
        elif all(isinstance(state, nn.Module) for state in listed):
            modules = listed
        else:
            raise ValueError(
                "ignored_states expects all nn.Parameter or all nn.Module list elements but got "
                f"types {_types(listed)}"
            )
    tops = _ignored_modules(root, modules, wrapper)
    everything = {part for module in tops for part in module.modules()}
    inside = {parameter for module in tops for parameter in module.parameters()}
    for others in known:
        everything |= others.modules
        inside |= others.parameters
    return Ignored(frozenset(everything), frozenset([*parameters, *inside]))


def _types(listed: Iterable[object]) -> list[type]:
    return sorted({type(each) for each in listed}, key=repr)


def _ignored_modules(
    root: nn.Module, modules: Iterable[nn.Module] | None, wrapper: type[nn.Module]
) -> list[nn.Module]:
    if modules is None:
        return []
    try:
        listed = list(modules)
    except TypeError:
        raise TypeError(
            "`ignored_modules` should be an iterable of `torch.nn.Module`s but got "
            f"{type(modules).__name__}"
        ) from None
    for module in listed:
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"ignored_modules expects nn.Module list elements but got types {_types(listed)}"
            )
        if isinstance(module, wrapper):
            raise ValueError(
                "`ignored_modules` should not include FSDP modules. Leave a module out before it "
                "is wrapped"
            )
    if root in listed:
        warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will "
            "result in all parameters being ignored and is not well-supported: "
            f"{type(root).__name__}"
        )
    return listed


def check_containers(module: nn.Module) -> None:
    """Warn about a container that is never called itself, so that its unit is never gathered."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        warn(
            "FSDP will not all-gather parameters for containers that do not implement forward: "
            f"{type(module).__name__}. Wrap what it holds instead"
        )


def check_parameters(named: Sequence[tuple[str, nn.Parameter]], *, use_orig_params: bool) -> None:
    """Raise ValueError for parameters that cannot share one flat buffer."""
    for name, parameter in named:
        if parameter.ndim == 0:
            raise ValueError(
                f"FSDP doesn't support scalar parameters. Change {name} to a 1D tensor with numel "
                "equal to 1."
            )
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise ValueError(
                f"Cannot flatten integer dtype tensors: {name} is {parameter.dtype}. Make it a "
                "buffer, or ignore it"
            )
        if not use_orig_params and has_hooks(parameter):
            raise ValueError(
                f"parameter {name} has hooks for its gradient, or an optimizer in the backward, "
                "and becomes a part of one flat parameter that has none: set use_orig_params=True, "
                "use fully_shard, or apply the optimizer to parameters of the wrapped model"
            )
    if not named:
        return
    (first_name, first), *others = named
    for name, parameter in others:
        if parameter.device != first.device:
            raise ValueError(
                f"Must flatten tensors on the same device but got both {first.device} "
                f"({first_name}) and {parameter.device} ({name})"
            )
        if use_orig_params:
            continue
        if parameter.dtype != first.dtype:
            raise ValueError(
                f"Must flatten tensors with uniform dtype but got {first.dtype} ({first_name}) and "
                f"{parameter.dtype} ({name}). Wrap them apart, or set use_orig_params=True"
            )
        if parameter.requires_grad != first.requires_grad:
            raise ValueError(
                "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`: "
                f"{first_name} has {first.requires_grad} and {name} {parameter.requires_grad}. "
                "Wrap them apart, or set use_orig_params=True"
            )


def check_frozen_mix(
    module: nn.Module, own: Iterable[nn.Module], name: str, ignored: Ignored, *, is_allowed: bool
) -> None:
    """Refuse, or warn about, wrapping a module in which only some parameters are frozen.

    Only its ``own`` modules count, not those in other units: adapters inside of a frozen block.
    """
    parts = {*own}
    named = [
        (f"{path}.{key}".lstrip("."), parameter)
        for path, part in module.named_modules()
        for key, parameter in part._parameters.items()
        if part in parts and parameter is not None and parameter not in ignored.parameters
    ]
    if len({parameter.requires_grad for _, parameter in named}) < 2:
        return
    frozen = [n for n, parameter in named if not parameter.requires_grad]
    text = f"{name} has both parameters with requires_grad=True and False. "
    why = (
        f"frozen parameters ({', '.join(frozen[:3])}, {len(frozen)} in all) lie in one buffer with "
        "the others, and gradients of all are reduced"
    )
    if not is_allowed:
        raise ValueError(
            f"{text}FSDP does not support wrapping such modules when use_orig_params=False: {why}. "
            "Wrap the frozen modules apart, or set use_orig_params=True"
        )
    warn(f"{text}We do not recommend wrapping such modules: {why}")


def check_devices(devices: Iterable[torch.device], device_id: torch.device | None) -> None:
    """Raise RuntimeError if a module's parameters are on devices that one unit cannot span."""
    found = {device for device in devices if device.type != "meta"}
    types = {device.type for device in found}
    drawn = ", ".join(sorted(map(str, found)))
    if len(types) > 1:
        if types == {"cpu", "cuda"}:
            if device_id is None:
                raise RuntimeError(
                    "To support a module with both CPU and GPU params, please pass in device_id "
                    f"argument. Found parameters on {drawn}"
                )
            return
        raise RuntimeError(
            f"FSDP does not support modules with different device types but got params on {drawn}"
        )
    if len(found) > 1:
        raise RuntimeError(f"FSDP only supports single device modules but got params on {drawn}")


def choose_device(
    devices: Iterable[torch.device], device_id: torch.device | None, group: torch.device, rank: int
) -> torch.device:
    """Choose the device of a unit. ``group`` is the device that its process group uses."""
    listed = set(devices)
    found = {device for device in listed if device.type != "meta" and not is_host(device)}
    if device_id is not None:
        other = next((device for device in found if device != device_id), None)
        if other is not None:
            raise ValueError(
                f"Inconsistent compute device and `device_id` on rank {rank}: {other} vs "
                f"{device_id}. Move the module to {device_id}, or leave device_id out"
            )
        return device_id
    if found:
        return next(iter(found))
    if not is_host(group) and any(is_host(device) for device in listed):
        warn(
            "The passed-in `module` is on CPU and will thus have FSDP's sharding initialization "
            f"run on CPU. Pass device_id={group} to move it first"
        )
    return group
