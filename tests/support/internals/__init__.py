"""Names of the library that tests use and that no `__all__` has, room by room.

A name that moves changes its row here, and no test. They are looked up when they are imported, so
that a test of pure code does not load torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

__all__ = ["names_inside"]


def names_inside(names: Mapping[str, str]) -> Callable[[str], object]:
    """Make the ``__getattr__`` of a room: by module, its names, "name as other" where two meet."""
    places = {}
    for module, listed in names.items():
        for entry in listed.split(", "):
            name, _, other = entry.partition(" as ")
            places[other or name] = module, name

    def find(name: str) -> object:
        if name not in places:
            raise AttributeError(f"no row has {name!r}")
        module, own = places[name]
        if hasattr(found := importlib.import_module(module), own):
            return getattr(found, own)
        return importlib.import_module(f"{module}.{own}")

    return find
