"""The tensors in the inputs and outputs of a module."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from meshwright.torch_internals.trees import tree_leaves, tree_map


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """List the tensors in nested Python containers, dataclasses, and registered pytree nodes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif value is None or isinstance(value, int | float | str | bytes):
        return
    elif isinstance(value, Sequence) or isinstance(value, Set):  # noqa: SIM101 - generic in a union
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for member in fields(value):
            yield from tensors_in(getattr(value, member.name))
    else:
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:  # noqa: ANN401
    """Return ``value`` with ``function`` applied to each of its tensors.

    Registered containers (sequences and mappings among them) and sets are rebuilt; unregistered
    dataclasses are copied if ``function``, then called twice, changes one of their tensors.
    """
    return tree_map(partial(_mapped, function), value)


def cloned(
    value: Any,  # noqa: ANN401
    *,
    where: Callable[[torch.Tensor], bool],
    clone: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone,
) -> Any:  # noqa: ANN401
    """Return ``value`` with tensors for which ``where`` is true replaced by ``clone`` of them."""
    if isinstance(value, torch.Tensor):
        return clone(value) if where(value) else value
    if not any(map(where, tensors_in(value))):
        return value
    return map_tensors(lambda tensor: clone(tensor) if where(tensor) else tensor, value)


def cast(value: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401
    """Cast ``value`` to ``dtype`` if it is a floating-point tensor; return others unchanged."""
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype:
        return value.to(dtype)
    return value


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], leaf: Any) -> Any:  # noqa: ANN401
    if isinstance(leaf, torch.Tensor):
        return function(leaf)
    if type(leaf) in (set, frozenset):
        return type(leaf)(map_tensors(function, item) for item in leaf)
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    held = {member.name: getattr(leaf, member.name) for member in fields(leaf)}
    changed = {
        name: map_tensors(function, item)
        for name, item in held.items()
        if any(function(tensor) is not tensor for tensor in tensors_in(item))
    }
    if changed:
        leaf = copy.copy(leaf)
        for name, item in changed.items():
            object.__setattr__(leaf, name, item)  # some are frozen
    return leaf


class Loan:
    """Copies of the caller's lists and dicts, with other tensors, that a module gets instead.

    A module may write to its inputs, such as a cache that its blocks fill. Changes of the copies
    are applied to the caller's containers in `hand_back`::

        theirs [a, b]   ->   given [a', b']   -> module ->   given [a', b', c]
        theirs [a, b, c]   <-   hand back
    """

    def __init__(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        rest: Callable[[Any], Any] | None = None,
    ) -> None:
        """``function`` maps tensors, ``rest`` all values that are no tuple, list, deque or dict.

        Without ``rest``, ``function`` also maps the tensors inside of such values.
        """
        self._function = function
        self._rest = rest
        self.lent: list[tuple[Any, Any, list[Any]]] = []
        """The caller's containers, the module's, and what these held."""
        self._pairs: list[tuple[Any, Any]] = []
        """All that the module was given, beside the caller's."""
        self._given: dict[int, Any] = {}
        """The same by the ``id`` of the caller's: what is one object there is one here, as modules
        that ask ``key is query`` expect."""

    def give(self, value: Any) -> Any:  # noqa: ANN401 - whatever a module is given
        """Return what the module gets for ``value``: ``value`` itself if no tensor changes."""
        if id(value) in self._given:
            return self._given[id(value)]
        if isinstance(value, torch.Tensor):
            tensor = self._function(value)
            if tensor is not value:
                self._lend(tensor, value)
            return tensor
        kind = type(value)
        if kind is tuple or kind in _SEQUENCES:
            held = list(value)
        elif kind in _MAPPINGS:
            held = list(value.values())
        else:
            return self._given_whole(value)
        given = [self.give(item) for item in held]
        if _are_same(given, held):
            if kind is not tuple:
                self.lent.append((value, value, held))
                self._given[id(value)] = value
            return value
        if kind is tuple:
            return tuple(given)
        own = given[:] if kind is list else dict(zip(value, given, strict=True))
        if kind is not list and kind is not dict:
            own = copy.copy(value)
            _fill(own, given, list(value))
        self.lent.append((value, own, given))
        self._lend(own, value)
        return own

    def _lend(self, own: Any, theirs: Any) -> None:  # noqa: ANN401 - whatever a module is given
        self._pairs.append((own, theirs))
        self._given[id(theirs)] = own

    def hand_back(self) -> list[Any]:
        """Apply the module's changes of the copies to the caller's lists and dicts.

        Returns the values in them that were not there before.
        """
        new: list[Any] = []
        for theirs, own, given in self.lent:
            now = list(own.values()) if type(own) in _MAPPINGS else list(own)
            keys = list(own)
            if _are_same(now, given) and (type(own) in _SEQUENCES or keys == list(theirs)):
                continue
            new += [item for item in now if all(item is not each for each in given)]
            if own is not theirs:
                _fill(theirs, [self._before(item) for item in now], keys)
        return new

    def has_given(self, value: Any) -> bool:  # noqa: ANN401
        """Whether ``value`` was given to the module in place of another one."""
        return any(given is value for given, _ in self._pairs)

    def _before(self, item: Any) -> Any:  # noqa: ANN401
        return next((value for given, value in self._pairs if given is item), item)

    def _given_whole(self, value: Any) -> Any:  # noqa: ANN401
        if self._rest is not None:
            return self._rest(value)
        changes = any(self.give(tensor) is not tensor for tensor in tensors_in(value))
        return map_tensors(self.give, value) if changes else value


_SEQUENCES = (list, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict)


def tensors_kept_by(modules: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """List tensors with a graph that ``modules`` keep in attributes or lists; mostly losses."""
    for module in modules:
        values = module.__dict__.values()
        for value in values if any(map(_is_looked_at, {*map(type, values)})) else ():
            if isinstance(value, torch.Tensor):
                if value.grad_fn is not None:
                    yield value
            elif type(value) is list:
                yield from (v for v in value if isinstance(v, torch.Tensor) and v.grad_fn)


@lru_cache
def _is_looked_at(kind: type) -> bool:  # most modules have nothing of such a class
    return kind is list or issubclass(kind, torch.Tensor)


def _are_same(these: Sequence[Any], others: Sequence[Any]) -> bool:
    pairs = zip(these, others, strict=False)
    return len(these) == len(others) and all(one is other for one, other in pairs)


def _fill(container: Any, items: Sequence[Any], keys: Sequence[Any]) -> None:  # noqa: ANN401
    container.clear()
    if type(container) in _MAPPINGS:
        container.update(zip(keys, items, strict=True))
    else:
        container.extend(items)
