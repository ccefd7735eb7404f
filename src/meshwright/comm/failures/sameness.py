"""The one answer to "do all ranks have the same?": digests first, then the first difference.

Where all is equal it costs one gather of 32 bytes a rank over the control channel. Where it is not,
the rows themselves are gathered, and every rank names the first that differs, with the ranks on all
sides. ``docs/checks.md`` lists who asks, when, and what it costs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

from meshwright.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from meshwright.comm.collectives import Communicator

_T = TypeVar("_T", bound=Hashable)

Exchange = Callable[[str], Sequence[str]]
"""Gives what each rank of an axis says, in rank order."""

NOTHING = "nothing"
"""Stands for a row that a rank does not have."""


@dataclass(frozen=True, slots=True)
class RowDifference:
    """The first row in which ranks differ: a number, or a dotted key."""

    place: int | str
    ranks: Sequence[int]
    found: Sequence[str]
    """The finding on each rank there, in words or as JSON."""

    def __str__(self) -> str:
        place = f"number {self.place}" if isinstance(self.place, int) else self.place
        return f"{place} is {told(self.ranks, self.found)}"

    @property
    def sides(self) -> str:
        """The ranks on all sides, for values that say nothing themselves, such as digests."""
        by_value = sides(self.ranks, self.found)
        return ", others on ".join(f"ranks {ranks}" for ranks in by_value.values())


def sides(ranks: Iterable[int], found: Iterable[_T]) -> dict[_T, list[int]]:
    """List the ranks by what was ``found`` on them, in the order of the first of each."""
    by_value: dict[_T, list[int]] = {}
    for rank, value in zip(ranks, found, strict=True):
        by_value.setdefault(value, []).append(rank)
    return by_value


def told(ranks: Iterable[int], found: Iterable[Hashable]) -> str:
    """Write `sides` in words."""
    return "; ".join(f"{value} on ranks {on}" for value, on in sides(ranks, found).items())


def first_difference(
    ranks: Sequence[int], everyone: Sequence[Any], *, of_all: bool = False
) -> RowDifference | None:
    """Find the first row in which ``ranks`` differ; ``everyone`` has the rows of each, as JSON.

    With ``of_all`` rows that a rank lacks, or has as None, are not compared.
    """
    for place, values in _rows(everyone):
        found = [NOTHING if value is NOTHING else json.dumps(value) for value in values]
        is_known = NOTHING not in found and "null" not in found
        if len(set(found)) > 1 and (is_known or not of_all):
            return RowDifference(place, ranks, found)
    return None


def _rows(everyone: Sequence[Any]) -> Iterable[tuple[int | str, Sequence[Any]]]:
    """List the places of rows, each with what all ranks have there."""
    if not all(isinstance(each, Mapping) for each in everyone):
        yield from enumerate(zip_longest(*everyone, fillvalue=NOTHING))
        return
    for key in dict.fromkeys(key for each in everyone for key in each):
        values = [each.get(key, NOTHING) for each in everyone]
        is_inner = [type(value) in (dict, list, tuple) for value in values]
        if all(is_inner) and len({isinstance(value, Mapping) for value in values}) == 1:
            yield from ((f"{key}.{place}", row) for place, row in _rows(values))
        else:
            yield key, values


def differing(
    axis: Communicator, rows: object, *, label: str, exchange: Exchange | None = None
) -> list[Any]:
    """List every rank's ``rows``, in rank order, unless all are equal: then none. Collective."""
    digest = hashlib.sha256(json.dumps(rows).encode()).digest()
    if exchange is None:
        is_equal = axis.start_equal(digest, label)() == digest * axis.size
    else:
        is_equal = len(set(exchange(digest.hex()))) == 1
    if is_equal:
        return []
    return axis.gather_values(rows, label=f"{label}: what differs")


def require_equal(
    axis: Communicator,
    rows: Sequence[object] | Mapping[str, object],
    meaning: str,
    *,
    label: str,
    error: Callable[[str], Exception] = CollectiveMismatchError,
    remedy: str = "",
    exchange: Exchange | None = None,
) -> None:
    """Check that all ranks of ``axis`` have the same ``rows``, which JSON can hold. Collective.

    ``meaning`` says what they are, and ``remedy`` what to do about a difference. Digests go through
    ``exchange`` where there is one.

    Raises ``error`` on every rank, naming the first row that differs and the ranks on all sides.
    """
    if axis.is_alone:
        return
    everyone = differing(axis, rows, label=label, exchange=exchange)
    if everyone:
        found = first_difference(axis.ranks, everyone) or "the same rows in another order"
        raise error(refusal(axis, meaning, found, remedy))


def refusal(axis: Communicator, meaning: str, found: RowDifference | str, remedy: str) -> str:
    """Return the text of an error for ranks of ``axis`` that differ, in the form that all have."""
    return (
        f"axis {axis.axis}: expected {meaning} to be the same on ranks {list(axis.ranks)}, but "
        f"{found}. {remedy}".rstrip()
    )
