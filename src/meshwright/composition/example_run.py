"""Runs a copy of a model on its example, and observes it.

The run shows whether a model is a chain: each module must be called once, with the unmodified
tensors that the previous one has returned, and the model's own forward must do nothing else: no
operator, no hook, no block of autocast or ``no_grad``, no attribute. Tensors that modules store in
attributes are observed too, because a forward that runs in stages, or as a graph, stores other
tensors there, or none.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.comm.dtensors.unreadable import name_of
from meshwright.gradients import call_module
from meshwright.pipelining.splitting.dropped import (
    HOOKING,
    drop_hooks,
    hooks_of,
    saved_tensor_hooks,
)
from meshwright.pipelining.ties import own_copies
from meshwright.torch_internals.modules import forward_pre_hooks_of
from meshwright.torch_internals.tensors import dispatch_depth, function_depth, writes_to
from meshwright.torch_internals.trees import tree_leaves

Inputs = tuple[Any, ...] | Mapping[str, Any]
"""A model's positional arguments, or its keyword arguments."""
_OF_ALL = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_OURS = "_meshwright"
"""The prefix of this library's attributes."""
_PLAIN = (int, float, complex, str, bytes, type(None))
_LISTS = (list, tuple, set, frozenset, deque)
_DEVICES = ("cpu", "cuda")
_CHANGING = HOOKING | {"__set__", "backward", "detach_", "requires_grad_"}
"""Names of functions that change a tensor, or what its backward does, and make no new tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The result of observing one run of a model."""

    links: list[str] | None
    """If the model is a chain, its modules in call order; else None."""
    left: tuple[tuple[str, str], ...]
    """(module, attribute) of tensors, or in a chain floats, that each run leaves there."""
    moving: tuple[str, ...]
    """Attributes that change in each run and are no tensors, such as counters."""


@dataclass(slots=True)
class _Call:
    """One call of a module."""

    name: str
    inputs: list[tuple[int, int]] = field(default_factory=list)
    """The identity and version of each argument."""
    outputs: list[tuple[int, int]] = field(default_factory=list)
    has_keywords: bool = False


def copied(model: nn.Module) -> nn.Module:
    """Copy a model. Attributes that are non-leaf tensors lose their graph."""
    memo = own_copies([*model.parameters(), *model.buffers()])
    for part in model.modules():
        for value in tree_leaves([vars(part)[key] for key in vars(part).keys() - _OF_ALL]):
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def same_numbers() -> Iterator[None]:
    """Restore the state of Python's ``random`` after the block."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


@contextlib.contextmanager
def evaluating(model: nn.Module, *, trains: bool = False) -> Iterator[None]:
    """Set all modules of ``model`` to one mode, and restore each module's own afterwards."""
    modes = {part: part.training for part in model.modules()}
    model.train(trains)
    try:
        yield
    finally:
        for part, mode in modes.items():
            if isinstance(part, torch.fx.GraphModule):  # whose graph has the mode written in it
                part.train(mode)
            else:
                part.training = mode


@contextlib.contextmanager
def left_as_it_is(model: nn.Module) -> Iterator[None]:
    """Replace buffers and attributes by copies in the block, so that runs do not change them."""
    memo: dict[int, torch.Tensor] = {}
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for part in model.modules():
        own = {k: v for k, v in vars(part).items() if k not in _OF_ALL and not k.startswith(_OURS)}
        for held, before in ((vars(part), own), (part._buffers, dict(part._buffers))):
            kept.append((held, before))
            held.update({key: _apart(value, memo) for key, value in before.items()})
    try:
        yield
    finally:
        for held, before in kept:
            for key in held.keys() - before.keys() - _OF_ALL:
                if not key.startswith(_OURS):
                    del held[key]
            held.update(before)


def _apart(value: Any, memo: dict[int, torch.Tensor]) -> Any:  # noqa: ANN401
    """Copy values that a run may write into: untrained tensors, and containers of anything."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad or isinstance(value, nn.Parameter):
            return value
        return memo.setdefault(id(value), value.clone())
    if type(value) in (list, set, deque):
        return type(value)(_apart(item, memo) for item in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _apart(item, memo)) for key, item in value.items())
    return value


def observe(model: nn.Module, example: Inputs) -> Observation:
    """Run a copy of ``model`` on ``example``; the model and random states are not changed.

    Hooks on its modules do not run.
    """
    observed = copied(model)
    for part in observed.modules():
        drop_hooks(part)
    devices = {t.device for t in observed.parameters() if t.device.type == "cuda"}
    with same_numbers(), torch.random.fork_rng(devices=[device.index for device in devices]):
        return _observe(model, observed, example)


def _observe(model: nn.Module, observed: nn.Module, example: Inputs) -> Observation:
    before = _attributes(observed)
    run = _Run(observed, [*_links(model)])
    result = run(example)
    first = _attributes(observed)
    written = _changed(before, first, "mark")
    is_chain = run.is_chain(example, result) and not _has_own(
        model, run.names, {name for name, _ in written}
    )
    left: list[tuple[str, str]] = []
    moving: list[str] = []
    if written:  # once, such as a mask that is kept, or in each run
        call_module(observed, example)
        again = _attributes(observed)
        anew = {*_changed(first, again, "mark")}
        left = [
            (name, key)
            for name, key in written
            if key not in _computed(model.get_submodule(name))
            and (
                ((name, key) in anew and first[name, key].has(torch.Tensor))
                or (is_chain and first[name, key].has(float))  # no graph has such a number
            )
        ]
        moving = [f"{name}.{key}".lstrip(".") for name, key in _changed(first, again, "plain")]
    return Observation(
        links=run.names if is_chain else None, left=tuple(left), moving=tuple(moving)
    )


def _has_own(model: nn.Module, links: Sequence[str], writing: Collection[str]) -> bool:
    """Whether the root has tensors, or modules outside ``links`` have hooks or are ``writing``."""
    if model._parameters or model._buffers:
        return True
    inside = {part for link in links for part in model.get_submodule(link).modules()}
    apart = [(name, part) for name, part in model.named_modules() if part not in inside]
    return any(name in writing or hooks_of(part) for name, part in apart)


def _computed(module: nn.Module) -> set[str]:
    """The attributes that pre-hooks of torch compute from parameters, such as `weight_norm`'s."""
    return {getattr(hook, "name", "") for hook in forward_pre_hooks_of(module).values()}


# ------------------------------------------------------------------------------------ chains


def _links(model: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the names of modules that ``model`` can call: children, and items of containers."""
    for name, child in model.named_children():
        full = f"{prefix}{name}"
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if is_list or (type(child) is nn.Sequential and not hooks_of(child)):
            yield from _links(child, f"{full}.")
        else:
            yield full


class _Run(TorchFunctionMode):
    """A run of a model that records the calls of modules ``names`` and what happens between."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.names: list[str] = [*names]
        """In call order once `is_chain` has been True."""
        self._model = model
        self._calls: list[_Call] = []
        self._kept: list[object] = []  # keeps objects alive, so that no ``id`` is reused
        self._depth = 0
        self._is_plain = True
        """True while the model's own forward has only called its modules."""
        self._around: object = None
        for name in names:
            part = model.get_submodule(name)
            part.register_forward_pre_hook(self._opens(name), prepend=True, with_kwargs=True)
            part.register_forward_hook(self._closes)

    def __call__(self, example: Inputs) -> object:
        """Run the model as it will train, forward only."""
        with torch.enable_grad(), self:
            self._around = _around()
            return call_module(self._model, example)

    def is_chain(self, example: Inputs, result: object) -> bool:
        """Whether each module was called once, on the output of the previous one."""
        called = [call.name for call in self._calls]
        is_once = len(called) == len({*called}) > 1 and {*called} == {*self.names}
        if not (self._is_plain and is_once) or any(call.has_keywords for call in self._calls):
            return False
        self.names = called
        passed = _marks(example)
        for call in self._calls:
            if call.inputs != passed:
                return False
            passed = call.outputs
        return not isinstance(example, Mapping) and _marks(result) == passed

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Detect operators of the model's own forward, and calls that change a tensor."""
        found = func(*args, **(kwargs or {}))
        if self._depth == 0 and self._is_plain:
            given = {id(leaf) for leaf in tree_leaves((args, dict(kwargs or {})))}
            made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
            is_changing = {getattr(func, "__name__", ""), name_of(func)} & _CHANGING
            self._is_plain = not is_changing and all(id(leaf) in given for leaf in made)
        return found

    def _opens(self, name: str) -> Any:  # noqa: ANN401 - a hook
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._is_plain &= _around() == self._around
            self._depth += 1
            self._kept.append(args)
            self._calls.append(_Call(name, _marks(args), has_keywords=bool(kwargs)))

        return note

    def _closes(self, _: nn.Module, __: object, output: object) -> None:
        self._depth -= 1
        self._kept.append(output)
        self._calls[-1].outputs = _marks(output)


def _marks(values: object) -> list[tuple[int, int]]:
    """The ``id`` and write count of each of ``values``."""
    listed = values if isinstance(values, tuple) else (values,)
    return [(id(value), writes_to(value)) for value in listed]


def _around() -> object:
    """The global modes that change what a call computes, or what its backward does."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES],
        saved_tensor_hooks(),
        function_depth(),
        dispatch_depth(),
    )


# -------------------------------------------------------------------------------- attributes


class _Attribute(NamedTuple):
    """The value of an attribute at one time."""

    mark: object
    """Equal as long as it is the same object and nothing in it has changed."""
    plain: object
    """The same, but only for plain values: numbers, strings and lengths."""
    held: Sequence[object]
    """The value and its leaves, kept alive so that no ``id`` is reused."""

    def has(self, kind: type) -> bool:
        """Whether it is or contains a ``kind``."""
        return any(isinstance(leaf, kind) for leaf in self.held)


_Attributes = Mapping[tuple[str, str], _Attribute]
"""By module and attribute."""


def _attributes(model: nn.Module) -> _Attributes:
    """The attributes of the modules of ``model``, except those that every module has."""
    return {
        (name, key): _Attribute(
            _mark(value, plain=False), _mark(value, plain=True), (value, *tree_leaves(value))
        )
        for name, part in model.named_modules()
        for key, value in vars(part).items()
        if key not in _OF_ALL
    }


def _mark(value: object, *, plain: bool) -> object:
    """Reduce ``value`` to something that can be compared later."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, _LISTS):
        return [_mark(item, plain=plain) for item in value]
    if isinstance(value, dict):
        return [(_mark(k, plain=plain), _mark(item, plain=plain)) for k, item in value.items()]
    if plain:
        return None
    return id(value), writes_to(value)


def _changed(before: _Attributes, after: _Attributes, of: str) -> list[tuple[str, str]]:
    """List (module, attribute) whose ``of`` differs."""
    return [
        at
        for at, now in after.items()
        if at not in before or getattr(now, of) != getattr(before[at], of)
    ]
