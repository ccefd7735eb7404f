"""torch's flattening of nested values: lists, tuples, dicts, and registered types."""

from __future__ import annotations

from torch.utils._pytree import (
    TreeSpec,
    is_namedtuple_class,
    is_namedtuple_instance,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

__all__ = [
    "TreeSpec",
    "is_namedtuple_class",
    "is_namedtuple_instance",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
]
