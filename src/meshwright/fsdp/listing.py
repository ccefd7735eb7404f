"""Lists of modules inside of a unit with one flat parameter, which have no parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MethodType

import torch
from torch import nn

from meshwright.data_parallel.modules.checkpoint_names import asked_in
from meshwright.data_parallel.shards.unit import Unit

__all__ = ["list_below", "named_parameters"]

NAMES = "_meshwright_names_below"
"""An attribute of modules: which attributes of which modules they list."""


def list_below(modules: Iterable[nn.Module], unit: Unit) -> None:
    """Make ``modules`` of ``unit`` list what they have as attributes, too.

    Only the wrapped module registers the flat parameter. One below it would list nothing, and who
    sums over that, freezes it or trains it would not be told. At rest the attributes are empty
    tensors, which refuse gradients, freezing and optimizers.
    """
    names: dict[nn.Module, list[str]] = {}
    for slot in unit.slots:
        for module, name in slot.places:
            names.setdefault(module, []).append(name)
    for module in modules:
        if type(module).named_parameters is nn.Module.named_parameters:
            module.__dict__[NAMES] = names
            module.__dict__["named_parameters"] = MethodType(named_parameters, module)


# Of the name that it is found under: so is it pickled.
def named_parameters(
    module: nn.Module,
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """List parameters, and what the module has in the place of a flat unit's."""
    names: Mapping[nn.Module, Sequence[str]] = module.__dict__[NAMES]
    if asked_in("_iterate_valid_model_state") is not None:  # the wrapper has told it all names
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
