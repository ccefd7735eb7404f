"""Wrapping the modules that a policy chose, and finding where shared parameters go."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.data_parallel.modules.nested import Loan, map_tensors, tensors_in
from meshwright.errors import warn
from meshwright.fsdp.checks import Ignored, check_frozen_mix
from meshwright.fsdp.options import MixedPrecision
from meshwright.fsdp.unit_wrapper import own_modules
from meshwright.fsdp.wrap import Targets, WrapPolicy, find_targets

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
    """Cast what ``module`` is given to the dtype of its parameters, and its output back."""
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
    """List for each target the parameters below it that belong to a unit above: shared ones.

    A shared parameter goes to the lowest unit that holds all its places.
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
    """List for each parameter the units around each of its places, outermost first."""
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
    """Put a wrapper in place of every target, in every module that holds it."""
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
