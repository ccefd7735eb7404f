"""Named axes of a layout of ranks, and the arithmetic between a rank and its coordinate.

::

    Axes.of({"replicate": 2, "shard": 3})

    rank          0  1  2  3  4  5
    replicate     0  0  0  1  1  1      the first axis varies slowest, as in a DeviceMesh
    shard         0  1  2  0  1  2

An axis that is not named has size 1, so callers need not test whether it exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshwright.errors import LayoutError

KNOWN_AXES = ("pipeline", "replicate", "shard", "context", "expert", "tensor")
"""The axes a plan may name, in the order from the slowest links to the fastest."""

DATA_AXES = ("replicate", "shard", "expert")
"""Axes whose ranks read different shares of a batch."""

SUM_AXES = (*DATA_AXES, "context")
"""Axes over which gradients of dense parameters are summed. Ranks of axis context read the same
share, and each computes a part of every sequence."""


OTHER_NAMES = {
    "pp": "pipeline",
    "dp_replicate": "replicate",
    "dp_shard": "shard",
    "cp": "context",
    "ep": "expert",
    "tp": "tensor",
}
"""Names of the axes in torchtitan and Accelerate, which a plan translates."""

LEFT = -1
"""The size of an axis shard that takes the ranks which other axes leave."""


@dataclass(frozen=True, slots=True)
class Axes:
    """Ordered axes and their sizes; the product of the sizes is the number of ranks.

    ``Axes()`` is one process. Any name is valid here; a plan accepts only ``KNOWN_AXES``.
    """

    names: tuple[str, ...] = ()
    """Names in order; the first varies slowest over the ranks."""
    sizes: tuple[int, ...] = ()
    """Number of coordinates along each axis, in the same order."""

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes):
            raise LayoutError(
                f"expected one size for each axis, found {len(self.names)} names {self.names} "
                f"and {len(self.sizes)} sizes {self.sizes}"
            )
        if len(set(self.names)) != len(self.names):
            raise LayoutError(f"expected each axis once, found {self.names}")
        for name, size in zip(self.names, self.sizes, strict=True):
            if not name:
                raise LayoutError(f"expected a name for each axis, found {self.names}")
            if size < 1 and (size != LEFT or name not in ("shard", "dp_shard")):
                raise LayoutError(f"expected a size of at least 1 for axis {name!r}, found {size}")

    @classmethod
    def __get_pydantic_core_schema__(cls, kind: object, schema: object) -> dict[str, object]:
        sizes = {"type": "int", "ge": 1}
        either = {"type": "typed-dict-field", "schema": {"type": "int", "ge": LEFT}}
        table = {
            "type": "typed-dict",
            "fields": {"dp_shard": {**either, "required": False}},
            "extra_behavior": "allow",
            "extras_schema": sizes,
        }
        function = {"type": "no-info", "function": cls.of}
        return {"type": "function-after", "function": function, "schema": table}

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Axes:
        """Make axes from a mapping of name to size, in its order."""
        return cls(tuple(sizes), tuple(sizes.values()))

    def mapping(self) -> dict[str, int]:
        """Return the sizes by name, in order: the inverse of ``of``."""
        return dict(zip(self.names, self.sizes, strict=True))

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of all sizes."""
        return math.prod(self.sizes)

    def size(self, name: str) -> int:
        """Return the size of one axis; 1 if it is absent."""
        return self.sizes[self.names.index(name)] if name in self.names else 1

    def coordinate(self, rank: int) -> dict[str, int]:
        """Compute the position of ``rank`` along every axis, in the order of the axes.

        Raises ``LayoutError`` when the rank lies outside ``range(world_size)``.
        """
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"expected a rank from 0 to {self.world_size - 1} for axes {self}, found {rank}"
            )
        position: list[int] = []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            position.append(index)
        return dict(zip(self.names, reversed(position), strict=True))

    def rank(self, position: Mapping[str, int] | None = None, /, **coordinate: int) -> int:
        """Return the rank at a coordinate, a mapping or keywords; an unnamed axis counts as 0.

        An absent axis may be given as 0: it counts as an axis of size 1.
        """
        wanted = {**(position or {}), **coordinate}
        for name, index in wanted.items():
            if not 0 <= index < self.size(name):
                raise LayoutError(
                    f"expected a coordinate from 0 to {self.size(name) - 1} on axis {name!r} of "
                    f"axes {self}, found {index}"
                )
        rank = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            rank = rank * size + wanted.get(name, 0)
        return rank

    def groups(self, names: str | Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """List all sets of ranks that differ only along ``names``, each in ascending order.

        Every rank is in exactly one group. ``Axes.of({"replicate": 2, "shard": 2})`` has the
        groups ``(0, 1), (2, 3)`` along ``"shard"`` and one group of four along both axes.
        """
        varying = {names} if isinstance(names, str) else set(names)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            fixed = tuple(i for name, i in self.coordinate(rank).items() if name not in varying)
            groups.setdefault(fixed, []).append(rank)
        return tuple(tuple(group) for group in groups.values())

    def peers(self, rank: int, names: str | Iterable[str]) -> tuple[int, ...]:
        """List the group of ``rank`` along ``names``, itself included, in ascending order."""
        varying = (names,) if isinstance(names, str) else tuple(names)
        group = [self.coordinate(rank)]
        for name in dict.fromkeys(varying):
            group = [{**here, name: i} for here in group for i in range(self.size(name))]
        return tuple(sorted(self.rank(here) for here in group))

    def __str__(self) -> str:
        sizes = zip(self.names, self.sizes, strict=True)
        return " x ".join(f"{name} = {size}" for name, size in sizes) or "of one process"
