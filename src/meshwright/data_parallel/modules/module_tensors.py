"""The parameters and buffers that a module holds now; each may be replaced at any time.

The tensors found at first cannot be cached for good: ``module.weight = nn.Parameter(...)``,
``load_state_dict(assign=True)`` or a new submodule put other objects into the dicts of modules, and
a forward that assigns a buffer (``self.mean = ...``) does so each time it runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from itertools import chain
from operator import is_
from typing import cast

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.data_parallel.checks.starting_state import broadcast_tensors, compare_parameters
from meshwright.torch_internals.modules import lent_now

_END = object()


class _HeldTensors:
    """The tensors of one kind in a module and its submodules, except ignored ones.

    Checking that nothing has changed needs no Python call per tensor or module.
    """

    def __init__(
        self,
        module: nn.Module,
        kind: str,
        ignored: Collection[nn.Module] = (),
        names: Collection[str] = (),
    ) -> None:
        """``kind`` is the attribute with the dict. ``ignored`` modules are left out with all below
        them, and so are the tensors in ``names``.
        """
        # What the module holds may hold this, so a strong reference back would be a cycle.
        self._module = weakref.ref(module)
        self._kind = kind
        self._ignored = frozenset(ignored)
        self._names = frozenset(names)
        self._walk()

    @property
    def module(self) -> nn.Module:
        """The module. Raises RuntimeError when it was garbage-collected."""
        module = self._module()
        if module is None:
            raise RuntimeError("the replicated module is gone")
        return module

    def _walk(self) -> None:
        module = self.module
        apart = {below for part in self._ignored for below in part.modules()}
        named = [(path, part) for path, part in module.named_modules() if part not in apart]
        self._paths = [f"{path}." if path else "" for path, _ in named]
        self._places: list[Mapping[str, object]] = [getattr(p, self._kind) for _, p in named]
        self._apart: list[Mapping[str, object]] = [getattr(p, self._kind) for p in apart]
        # Views of dicts show what these hold later, too.
        self._tensors = [place.values() for place in self._places]
        modules = [part._modules.values() for _, part in named]
        self._known_modules = [*chain.from_iterable(modules), _END]
        self._modules = [*modules, (_END,)]

    @property
    def _has_changed(self) -> bool:
        """True when any tensor or module was replaced since the last look."""
        found = chain(chain.from_iterable(self._tensors), (_END,), *self._modules)
        # Each list ends with `_END`, so that none is a mere part of the other.
        return not all(map(is_, found, chain(self._known, self._known_modules)))

    def _collect(self) -> dict[str, torch.Tensor]:
        """Find the tensors by name, each once, in the order of registration."""
        if not all(map(is_, chain.from_iterable(self._modules), self._known_modules)):
            self._walk()
        self._known = [*chain.from_iterable(self._tensors), _END]
        seen = {id(tensor) for place in self._apart for tensor in place.values()}
        found: dict[str, torch.Tensor] = {}
        for path, place in zip(self._paths, self._places, strict=True):
            for key, tensor in place.items():
                if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    if path + key not in self._names:
                        found[path + key] = tensor
        return found


class ModuleParameters(_HeldTensors):
    """The parameters of a module."""

    named: tuple[tuple[str, nn.Parameter], ...] = ()
    """Names and parameters; the same object until one of them is another one. Empty as long as the
    module has shown only what a call lends it."""
    is_lent: bool
    """True where the last look found what a call lends: the module's own are out of sight then."""

    def __init__(
        self, module: nn.Module, ignored: Collection[nn.Module], names: Collection[str]
    ) -> None:
        super().__init__(module, "_parameters", ignored, names)
        self._known = [_END]
        self.is_lent = lent_now() is not None
        if not self.is_lent:
            self._follow()

    def look(self) -> tuple[tuple[str, nn.Parameter], ...]:
        """Find what the module holds now; returns `named`."""
        has_changed = self._has_changed
        self.is_lent = has_changed and self._runs_with_others()
        if has_changed and not self.is_lent:
            self._follow()
        return self.named

    def _follow(self) -> None:
        found = cast("dict[str, nn.Parameter]", self._collect())
        before = [(name, id(parameter)) for name, parameter in self.named]
        if before != [(name, id(parameter)) for name, parameter in found.items()]:
            self.named = tuple(found.items())

    def _runs_with_others(self) -> bool:
        """Whether the module runs with substituted tensors in this call (`functional_call`)."""
        held = chain.from_iterable(self._tensors)
        is_own = all(isinstance(each, nn.Parameter | None) for each in held)
        return not is_own or lent_now() is not None


class ModuleBuffers(_HeldTensors):
    """The buffers of a module."""

    named: Mapping[str, torch.Tensor]
    """Buffers by name; the same object until one of them is another one."""

    def __init__(
        self,
        module: nn.Module,
        ignored: Collection[nn.Module] = (),
        names: Collection[str] = (),
    ) -> None:
        super().__init__(module, "_buffers", ignored, names)
        self.named = self._collect()

    def look(self) -> Mapping[str, torch.Tensor]:
        """Find what the module holds now; returns `named`."""
        if self._has_changed:
            self.named = self._collect()
        return self.named


class EqualBuffers(ModuleBuffers):
    """Gives the ranks of ``communicator`` the buffers of one of them.

    Buffers of ``ignored`` modules, and those listed in ``names``, are left alone. Number, shapes
    and dtypes are equal on all ranks at first; they are compared again after a change.
    """

    def __init__(
        self,
        module: nn.Module,
        communicator: Communicator,
        ignored: Collection[nn.Module] = (),
        names: Collection[str] = (),
    ) -> None:
        super().__init__(module, ignored, names)
        self._communicator = communicator
        self._alike = self.named
        """Those that were last known to be alike on all ranks."""

    def follow(self) -> Mapping[str, torch.Tensor]:
        """Return `look()`; a collective if buffers were added, removed or changed in kind.

        Raises CollectiveMismatchError on every rank, naming the buffer, where they differ.
        """
        buffers = self.look()
        if buffers is not self._alike:
            before, now = _kinds(self._alike), _kinds(buffers)
            changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
            if changed:
                reason = f": buffer {changed[0]!r} is of another kind"
                compare_parameters(self._communicator, (), buffers=buffers, reason=reason)
            self._alike = buffers
        return buffers

    def synchronize(self, source: int = 0) -> None:
        """Give every rank the buffers of rank ``source`` of the axis; a collective.

        Raises CollectiveMismatchError as `follow` does.
        """
        self.follow()
        self.broadcast(source)

    def broadcast(self, source: int) -> None:
        """Broadcast as `synchronize` does, right after `follow` was called."""
        found = self._alike.values()
        broadcast_tensors(self._communicator, found, label="broadcast buffers", source=source)


def _kinds(buffers: Mapping[str, torch.Tensor]) -> dict[str, object]:
    return {name: (b.shape, b.dtype, b.stride()) for name, b in buffers.items()}
