"""Compares values that must be equal on all ranks: digests first, then the first difference.

If all are equal it costs one gather of 32 bytes per rank over the control channel. Otherwise the
rows themselves are gathered, and every rank names the first row that differs, with the ranks of
each version. ``docs/checks.md`` lists what is compared, when, and what it costs.
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
"""Sends a text of this rank to all ranks of an axis; returns their texts, in rank order."""

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
        """The ranks of each version, for values that mean nothing to people, such as digests."""
        by_value = sides(self.ranks, self.found)
        return ", others on ".join(f"ranks {ranks}" for ranks in by_value.values())


def sides(ranks: Iterable[int], found: Iterable[_T]) -> dict[_T, list[int]]:
    """Group the ranks by what was ``found`` on them, in order of first appearance."""
    by_value: dict[_T, list[int]] = {}
    for rank, value in zip(ranks, found, strict=True):
        by_value.setdefault(value, []).append(rank)
    return by_value


def told(ranks: Iterable[int], found: Iterable[Hashable]) -> str:
    """Format `sides` as text."""
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
    """List the keys of rows, each with the values of all ranks."""
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
    """List every rank's ``rows``, in rank order; an empty list if all are equal. Collective."""
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
    """Check that all ranks of ``axis`` have equal ``rows``, as JSON values. Collective.

    ``meaning`` says what they are, and ``remedy`` what to do about a difference. Digests go through
    ``exchange`` if it is given.

    Raises ``error`` on every rank, naming the first row that differs and the ranks of each version.
    """
    if axis.is_alone:
        return
    everyone = differing(axis, rows, label=label, exchange=exchange)
    if everyone:
        found = first_difference(axis.ranks, everyone) or "the same rows in another order"
        raise error(refusal(axis, meaning, found, remedy))


def refusal(axis: Communicator, meaning: str, found: RowDifference | str, remedy: str) -> str:
    """Return the text of an error for ranks of ``axis`` that differ, in the common form."""
    return (
        f"axis {axis.axis}: expected {meaning} to be the same on ranks {list(axis.ranks)}, but "
        f"{found}. {remedy}".rstrip()
    )
