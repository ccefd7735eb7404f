"""Running the rows, each in processes of its own with a deadline, and what is printed of them."""

from __future__ import annotations

import functools
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

from gpu.places import place_of
from gpu.table import Row, Site
from meshwright import comm
from meshwright.comm.groups.registry import PROCESS
from meshwright.errors import InternalError
from meshwright.testing import Pool, Ranks, RanksFailed, shared_pool

SANITIZER = "TORCH_CUDA_SANITIZER"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of one row."""

    row: Row
    state: Literal["passed", "failed", "skipped"]
    seconds: float = 0.0
    found: str = ""
    details: str = ""


def run_here(
    site: Site, body: Callable[..., str], args: tuple[str, ...], limit: float | None
) -> str:
    """Be one rank of a row."""
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


def perform(rows: Iterable[Row], gpus: int) -> Iterator[Result]:
    """Run the rows, those under the sanitizer in a process tree of their own."""
    with _sanitized_pool() as sanitized:
        for row in rows:
            if row.site.gpus > gpus:
                found = f"needs {row.site.gpus} GPUs, found {gpus}"
                yield Result(row=row, state="skipped", found=found)
                continue
            ranks = sanitized.run if row.is_sanitized else shared_pool().run
            begun = time.monotonic()
            try:
                found, details = found_by(row, ranks), ""
            except (RanksFailed, AssertionError, InternalError) as error:
                found, details = str(error).partition("\n")[0], traceback.format_exc()
            state: Literal["passed", "failed"] = "failed" if details else "passed"
            seconds = time.monotonic() - begun
            yield Result(row=row, state=state, seconds=seconds, found=found, details=details)


@contextmanager
def _sanitized_pool() -> Iterator[Pool]:
    """A pool whose server loads torch with the sanitizer; it starts with its first row."""
    pool = _Sanitized()
    try:
        yield pool
    finally:
        pool.close()


class _Sanitized(Pool):
    """Ranks under the sanitizer, which torch enters when it is loaded."""

    def run(self, *args: object, **kwargs: object) -> list:  # type: ignore[override]
        before = os.environ.get(SANITIZER)
        os.environ[SANITIZER] = "1"
        try:
            return super().run(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            if before is None:
                del os.environ[SANITIZER]
            else:
                os.environ[SANITIZER] = before


def line_of(result: Result) -> str:
    """One row of the printed table."""
    where = str(result.row.site)
    return (
        f"{result.row.name:<40} {where:<10} {result.state:<8} {result.seconds:7.1f}  {result.found}"
    )


def summary(results: Iterable[Result]) -> str:
    """The last line."""
    states = [result.state for result in results]
    return ", ".join(f"{states.count(state)} {state}" for state in ("passed", "failed", "skipped"))
