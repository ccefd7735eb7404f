"""What modules inside of a unit with one flat parameter list, which have no parameters.

Only the wrapped module registers the flat parameter. A module below it would list nothing, and who
sums over that, freezes it or trains it would not be told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import torch
from torch import nn

__all__ = ["list_below"]


def list_below(module: nn.Module, inside: Collection[nn.Module]) -> None:
    """Let ``module``, one of those ``inside`` of a unit, list what it has as attributes, too.

    At rest those are empty tensors, which refuse gradients, freezing and optimizers.
    """
    if type(module).named_parameters is nn.Module.named_parameters:
        module.__dict__["named_parameters"] = partial(_named, module, inside)


def _named(
    module: nn.Module,
    inside: Collection[nn.Module],
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[tuple[int, ...]] = set()
    parts = module.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)
    for path, part in parts if recurse else [(prefix, module)]:
        for name, registered in part._parameters.items():
            found, key = registered, (id(registered),)
            if found is None and part in inside:
                found = part.__dict__.get(name)
                if found is not None and not found.numel():  # the same one in many places
                    key = (id(found), id(part), hash(name))
            if found is None or (remove_duplicate and key in seen):
                continue
            seen.add(key)
            yield f"{path}.{name}" if path else name, found
