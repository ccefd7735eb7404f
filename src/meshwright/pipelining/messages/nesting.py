"""The nesting of a value as JSON, NamedTuples and all.

::

    text                                        what torch writes of tuples, lists, dicts and
                                                classes that are registered under a name
    [text, [null, [module, class, nesting]]]    where some are NamedTuples, as leaves of the rest
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from meshwright.errors import PipeliningShapeError
from meshwright.torch_internals.trees import (
    TreeSpec,
    is_namedtuple_instance,
    tree_flatten,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)


def write_spec(spec: TreeSpec) -> Any:  # noqa: ANN401 - JSON
    """Convert ``spec`` to JSON.

    Raises `PipeliningShapeError` for classes that another process cannot look up.
    """
    cause = None
    try:
        written = _written(tree_unflatten([0] * spec.num_leaves, spec))
        if read_spec(written) == spec:
            return written
    except (NotImplementedError, TypeError) as error:
        cause = error
    raise PipeliningShapeError(
        f"values nested as {spec} cannot go to another rank: expected tuples, lists, NamedTuples "
        "that are defined at the top of a module, dicts with keys that JSON has, or classes "
        "registered with torch.utils._pytree under a serialized name"
    ) from cause


def read_spec(written: Any) -> TreeSpec:  # noqa: ANN401 - JSON
    """Rebuild a spec that `write_spec` wrote. Raises `PipeliningShapeError` for unknown classes."""
    if isinstance(written, str):
        return treespec_loads(written)
    return tree_flatten(_example(written))[1]


def _written(value: object) -> Any:  # noqa: ANN401 - JSON
    leaves, outer = tree_flatten(value, is_leaf=is_namedtuple_instance)
    text = treespec_dumps(outer)
    inner = [_named(leaf) if is_namedtuple_instance(leaf) else None for leaf in leaves]
    return [text, inner] if any(inner) else text


def _named(leaf: Sequence[object]) -> list[Any]:
    kind = type(leaf)
    return [kind.__module__, kind.__qualname__, _written(tuple(leaf))]


def _example(written: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(written, str):
        spec = treespec_loads(written)
        return tree_unflatten([0] * spec.num_leaves, spec)
    text, inner = written
    leaves = [0 if each is None else _found(*each[:2])(*_example(each[2])) for each in inner]
    return tree_unflatten(leaves, treespec_loads(text))


def _found(module: str, name: str) -> Any:  # noqa: ANN401 - a class
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    # The names come from another rank's message: call nothing but NamedTuple classes.
    if isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields"):
        return found
    raise PipeliningShapeError(
        f"no NamedTuple {name} is found in {module} on this rank, of which a stage gives a "
        "value: define it at the top of a module that all ranks import"
    )
