"""Choice of the submodules that become units: by policies, or while a model is built.

A policy is an object with `targets`, or any callable ``(module, recurse, nonwrapped_numel)``. It
returns first whether to look into ``module`` (``recurse=True``), then whether to wrap it;
``nonwrapped_numel`` counts its parameters that no submodule has taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from torch import nn

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "Targets",
    "WrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "find_targets",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

Targets = dict[nn.Module, dict[str, Any]]
"""Modules to be wrapped, children before parents, with their own constructor arguments."""


class ModuleWrapPolicy:
    """Wraps every module of one of the classes.

    >>> FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._classes = tuple(module_classes)

    def __call__(
        self, module: nn.Module, recurse: bool, nonwrapped_numel: int = -1, **ignored: object
    ) -> bool:
        """Work as a plain policy, so that it can be part of another one."""
        return recurse or isinstance(module, self._classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({sorted(cls.__name__ for cls in self._classes)})"

    def targets(self, modules: Sequence[nn.Module]) -> Targets:
        """Return the ``modules`` to wrap."""
        return {module: {} for module in modules if isinstance(module, self._classes)}


class CustomPolicy:
    """Wraps where ``lambda_fn(module)`` is true, or a dict of constructor arguments."""

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._choose = lambda_fn

    def targets(self, modules: Sequence[nn.Module]) -> Targets:
        """Return the ``modules`` to wrap. Raises ValueError for other results of ``lambda_fn``."""
        found: Targets = {}
        for module in modules:
            answer = self._choose(module)
            if not (answer is True or answer is False or type(answer) is dict):
                raise ValueError(
                    "The lambda_fn passed to CustomPolicy should return False/True or a kwarg "
                    f"dict, but it returned {answer!r} for a {type(module).__name__}"
                )
            if answer is not False:
                found[module] = {} if answer is True else answer
        return found


WrapPolicy = ModuleWrapPolicy | CustomPolicy | Callable[..., bool]
"""The types of ``auto_wrap_policy``."""


def always_wrap_policy(*args: object, **kwargs: object) -> bool:
    """Wrap every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Wrap where ``lambda_fn(module)`` is true; pass it by `functools.partial`."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: Collection[type[nn.Module]],
) -> bool:
    """Wrap modules of ``transformer_layer_cls``; pass it by `functools.partial`."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Collection[type[nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
) -> bool:
    """Wrap modules with at least ``min_num_params`` parameters that no submodule has taken.

    Submodules of ``force_leaf_modules`` are not split, and ``exclude_wrap_modules`` are never
    wrapped themselves; the defaults are this function's ``FORCE_LEAF_MODULES`` and
    ``EXCLUDE_WRAP_MODULES``.
    """
    defaults = vars(size_based_auto_wrap_policy)
    leaves = defaults["FORCE_LEAF_MODULES"] if force_leaf_modules is None else force_leaf_modules
    excluded = (
        defaults["EXCLUDE_WRAP_MODULES"] if exclude_wrap_modules is None else exclude_wrap_modules
    )
    is_large = nonwrapped_numel >= min_num_params
    if recurse:
        return is_large and not isinstance(module, tuple(leaves))
    return is_large and not isinstance(module, tuple(excluded))


vars(size_based_auto_wrap_policy).update(
    FORCE_LEAF_MODULES={nn.MultiheadAttention},
    EXCLUDE_WRAP_MODULES={nn.ModuleList, nn.ModuleDict},
)


def _or_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    policies: Iterable[Callable[..., bool]],
) -> bool:
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        for policy in policies
    )


def find_targets(
    root: nn.Module,
    policy: WrapPolicy,
    ignored_modules: Collection[nn.Module] = (),
    ignored_parameters: Collection[nn.Parameter] = (),
) -> Targets:
    """List the modules below ``root`` that ``policy`` wraps, children before parents."""
    ordered = [m for m in _bottom_up(root, set(ignored_modules)) if m is not root]
    if isinstance(policy, ModuleWrapPolicy | CustomPolicy):
        found = policy.targets([*ordered, root])
        found.pop(root, None)
        return found
    targets: Targets = {}
    skipped = {id(parameter) for parameter in ignored_parameters}
    _ask(root, policy, (targets, skipped, set(ignored_modules)), is_root=True)
    return targets


def _bottom_up(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """List modules, each once and after those below it, except those in ``seen``."""
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from _bottom_up(child, seen)
    yield module


def _ask(
    module: nn.Module,
    policy: Callable[..., bool],
    found: tuple[Targets, set[int], set[nn.Module]],
    *,
    is_root: bool = False,
) -> int:
    """Call a plain policy on ``module`` and what is below; returns how many parameters it took."""
    targets, skipped, seen = found
    seen.add(module)
    numel = sum(p.numel() for p in module.parameters() if id(p) not in skipped)
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    taken = sum(_ask(child, policy, found) for child in module.children() if child not in seen)
    left = numel - taken
    if not is_root and policy(module=module, recurse=False, nonwrapped_numel=left):
        targets[module] = {}
        return numel
    return taken


# A context variable and not an object: `wrap` is called in constructors that know of no context.
_CONTEXT: ContextVar[tuple[Callable[..., nn.Module], Mapping[str, Any]] | None] = ContextVar(
    "meshwright.fsdp.wrap", default=None
)


@contextlib.contextmanager
def enable_wrap(
    *,
    wrapper_cls: Callable[..., nn.Module],
    **wrapper_kwargs: Any,
) -> Iterator[None]:
    """Make `wrap` apply ``wrapper_cls`` with ``wrapper_kwargs`` inside the block.

    >>> with enable_wrap(wrapper_cls=FullyShardedDataParallel, device_id=0):
    ...     layer = wrap(nn.Linear(5, 5))
    """
    if _CONTEXT.get() is not None:
        raise NotImplementedError(
            "You are already within an autowrap context, and contexts cannot be nested: leave "
            "that `enable_wrap` block first"
        )
    token = _CONTEXT.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def wrap(
    module: nn.Module,
    **wrap_overrides: Any,
) -> nn.Module:
    """Wrap ``module`` as `enable_wrap` says; return it unchanged outside of such a block."""
    context = _CONTEXT.get()
    if context is None:
        return module
    wrapper, kwargs = context
    return wrapper(module, **{**kwargs, **wrap_overrides})
