"""Running the rows, each in processes of its own with a deadline, and what is printed of them."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

from torch.cuda._sanitizer import enable_cuda_sanitizer

from gpu.places import place_of
from gpu.table import Row, Site
from meshwright import comm
from meshwright.errors import InternalError
from meshwright.testing import Ranks, RanksFailed, shared_pool
from support.internals.comm import PROCESS


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of one row."""

    row: Row
    state: Literal["passed", "failed"]
    seconds: float = 0.0
    found: str = ""
    details: str = ""


def run_here(
    site: Site, body: Callable[..., str], args: tuple[str, ...], limit: float | None
) -> str:
    """Be one rank of a row."""
    if site.is_sanitized:
        enable_cuda_sanitizer()
    many = PROCESS.size_one_as_many() if site.as_many else nullcontext()
    with place_of(site.kind) as place, many:
        world = place.connect(timeout=limit)
        found = body(place, world, *args)
        comm.disconnect()
    return found


def found_by(row: Row, ranks: Ranks) -> str:
    """Run ``row`` and say what was found. Raises where it is not as it should be."""
    started = functools.partial(
        ranks, row.site.size, run_here, row.site, row.body, row.args, row.limit
    )
    if row.judge is None:
        return started(connected=False, timeout=row.deadline)[0]
    try:
        started(connected=False, timeout=row.deadline, grace=row.deadline / 2)
    except RanksFailed as error:
        return row.judge(error)
    raise AssertionError("expected a rank to be lost, found that all have returned")


def perform(rows: Iterable[Row]) -> Iterator[Result]:
    """Run the rows."""
    for row in rows:
        begun = time.monotonic()
        try:
            found, details = found_by(row, shared_pool().run), ""
        except (RanksFailed, AssertionError, InternalError) as error:
            found, details = str(error).partition("\n")[0], traceback.format_exc()
        state: Literal["passed", "failed"] = "failed" if details else "passed"
        seconds = time.monotonic() - begun
        yield Result(row=row, state=state, seconds=seconds, found=found, details=details)


def line_of(result: Result) -> str:
    """One row of the printed table."""
    where = str(result.row.site)
    return (
        f"{result.row.name:<40} {where:<10} {result.state:<8} {result.seconds:7.1f}  {result.found}"
    )


def summary(results: Iterable[Result]) -> str:
    """The last line."""
    states = [result.state for result in results]
    return ", ".join(f"{states.count(state)} {state}" for state in ("passed", "failed"))
