"""The units of one tree of wrappers: who is the root, in which order they run, and their names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from meshwright.comm.c10d.lookup import checks_in_detail
from meshwright.data_parallel.checks.starting_state import StartingBuffer
from meshwright.data_parallel.sharded_modules.iteration import Iteration
from meshwright.data_parallel.sharded_modules.module_hooks import Driver, driver_of
from meshwright.data_parallel.sharded_modules.module_tree import PlacesIn
from meshwright.data_parallel.shards.unit import Phase, Unit
from meshwright.fsdp.exposures.exposure import exposed_of
from meshwright.torch_internals.modules import CHECKPOINTED, WRAPPED, asked

PREFIXES = (f"{WRAPPED}.", f"{CHECKPOINTED}.")
"""Parts of names that come from wrappers and not from the user's model."""


def clean_name(name: str) -> str:
    """Return ``name`` as it was before wrapping."""
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
        if name == prefix[:-1] or name.endswith(f".{prefix[:-1]}"):
            name = name[: -len(prefix[:-1])].rstrip(".")
    return name


class UnitDriver(Driver):
    """The driver of one wrapper."""

    def __init__(
        self,
        unit: Unit | None,
        strategy: object,
        *,
        sends_use_counts: bool,
        ignored: PlacesIn = (),
        leaves_out: Collection[nn.Module] = (),
        buffers: Sequence[StartingBuffer] = (),
    ) -> None:
        in_detail = checks_in_detail()
        super().__init__(unit, in_detail=in_detail, ignored=ignored, buffers=buffers)
        # What a root frees after its forward is gathered at once for its backward.
        self.keeps_as_root = unit is not None and not unit.settings.keep_full_after_forward
        self.leaves_out = leaves_out
        """The modules below that nobody manages, which may be others on other ranks."""
        self.strategy = strategy
        """The name of the strategy in messages."""
        self._version = -1
        self._sends_use_counts = sends_use_counts
        self._alike: Mapping[str, str] = {}
        self.own_names = [] if unit is None else [tuple(slot.names) for slot in unit.slots]
        """The names of each parameter, seen from this wrapper."""

    def start(self, module: nn.Module) -> Iteration:
        """See `Driver`. Wrappers below that have run as roots join this root."""
        if self.iteration is not None:
            return self.iteration
        alike = paths_alike(module, self.leaves_out)
        for part in module.modules():
            driver = driver_of(part)
            if isinstance(driver, UnitDriver):
                driver.leave_root(alike)
        iteration = super().start(module)
        if not self._sends_use_counts:
            iteration.sends_use_counts = False
        return iteration

    def leave_root(self, alike: Mapping[str, str]) -> None:
        """Leave the root, whatever has run before; ``alike`` are names that ranks may share."""
        if self.is_root:
            self.name = ""
        if self.is_root and self.keeps_as_root and self.unit is not None:
            self.unit.change(keep_full_after_forward=False)
        self.iteration, self.is_root, self._alike = None, False, alike

    def prepare(self, module: nn.Module) -> None:
        module.prepare()  # pyrefly: ignore[not-callable]

    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found = super().before_forward(module, args, kwargs)
        if self.unit is not None:
            exposed_of(self.unit).list_full(self.unit)
            if torch.is_grad_enabled():
                self._version = exposed_of(self.unit).version(self.unit)
        return found

    def finish_backward(self, iteration: Iteration) -> None:
        """See `Driver`. Afterwards modules list the parameters that optimizers hold."""
        super().finish_backward(iteration)
        if self.unit is not None and self.unit.phase is Phase.FULL:
            exposed_of(self.unit).list_at_rest(self.unit)

    def before_backward(self, gradient: object = None) -> None:
        """See `Driver`. Raises AssertionError if parameters have changed since the forward."""
        unit = self.unit
        if unit is not None and self.has_run:
            exposure = exposed_of(unit)
            is_written = self._version != exposure.version(unit)
            if unit.phase is Phase.FULL:
                for group in unit.groups:
                    is_written = bool(group.take_written()) or is_written
            if is_written or unit.changes != self._changes or exposure.is_replaced(unit):
                raise AssertionError(
                    "FSDP does not support changing the parameters between forward and backward "
                    f"for {self.strategy}: those of {self.name!r} are not what its forward has "
                    "used. Run backward first, then step, load or write"
                )
        super().before_backward(gradient)
        if unit is not None and unit.phase is Phase.FULL:
            # A pass before has listed what optimizers hold: modules may be run again for this one.
            exposed_of(unit).list_full(unit)

    def clean(self, name: str) -> str:
        return clean_name(name)

    def alike(self, name: str) -> str:
        return name_alike(name, self._alike)

    def adopt_names(self, modules: Mapping[nn.Module, str]) -> None:
        self.name = clean_name(self.name)
        if self.unit is not None:
            cleaned = {module: clean_name(name) for module, name in modules.items()}
            self.unit.rename(self.name, cleaned)


def name_alike(name: str, paths: Mapping[str, str]) -> str:
    """The name of a module, or of a tensor in one, by which ranks compare it; see `paths_alike`."""
    path, _, last = name.rpartition(".")
    return paths.get(name) or f"{paths.get(path, path)}.{last}".lstrip(".")


def paths_alike(root: nn.Module, left_out: Collection[nn.Module]) -> Mapping[str, str]:
    """List module paths for comparison across ranks, not counting children that are ``left_out``.

    Ranks may leave out different ones: ``layers.3`` is ``layers.2`` if one before it is out.
    """
    found: dict[str, str] = {}
    waiting = [("", "", root)] if left_out else []
    while waiting:
        path, alike, module = waiting.pop()
        if path != alike:
            found[clean_name(path)] = clean_name(alike)
        before = 0
        for key, child in module._modules.items():
            if child is None:
                continue
            is_number = key.isdigit()
            own = str(int(key) - before) if is_number else key
            waiting.append((f"{path}.{key}".lstrip("."), f"{alike}.{own}".lstrip("."), child))
            before += is_number and child in left_out
    return found


NAMES = "_meshwright_names_below"
"""An attribute of modules: which attributes of which modules they list."""


def list_below(modules: Iterable[nn.Module], unit: Unit) -> None:
    """Have `named_parameters` of ``modules`` list their parameters of ``unit``.

    Only the wrapped module registers the flat parameter. Modules below would list nothing, and code
    that sums, freezes or trains their parameters would silently do nothing. At rest they list empty
    tensors, which reject gradients, freezing and optimizers.
    """
    names: dict[nn.Module, list[str]] = {}
    for slot in unit.slots:
        for module, name in slot.places:
            names.setdefault(module, []).append(name)
    for module in modules:
        if type(module).named_parameters is nn.Module.named_parameters:
            module.__dict__[NAMES] = names
            module.__dict__["named_parameters"] = MethodType(named_parameters, module)


# Named like the attribute: pickle finds a bound method by its function's name.
def named_parameters(
    module: nn.Module,
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """List parameters, and what the module has in place of a flat unit's."""
    names: Mapping[nn.Module, Sequence[str]] = module.__dict__[NAMES]
    if asked("tensors") is not None:  # the wrapper has told it all names
        names = {}
    seen: set[object] = set()
    parts = module.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)
    for path, part in parts if recurse else [(prefix, module)]:
        attributes = {name: part.__dict__.get(name) for name in names.get(part, ())}
        for name, found in {**attributes, **part._parameters}.items():
            if not isinstance(found, torch.Tensor):
                continue
            # Of the empty tensor there is one, in the place of all.
            key = id(found) if found.numel() else (id(part), name)
            if not remove_duplicate or key not in seen:
                seen.add(key)
                yield f"{path}.{name}" if path else name, found
