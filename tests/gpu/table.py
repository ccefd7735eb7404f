"""The rows of the check: which body runs where. The same bodies run in the tests of this folder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpu import failures, values
from gpu.ways import WAYS
from meshwright.pipelining.schedules import SCHEDULE_NAMES
from meshwright.testing import RanksFailed

FAULTS = ("kill", "raise", "stop")


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a row runs: the kind of place, and how many ranks.

    Ranks over NCCL for which there are not enough GPUs share them, as hosts of their own.
    """

    kind: str
    size: int
    as_many: bool = False
    """Whether axes of one rank send as larger ones do."""
    is_sanitized: bool = False
    """Whether its ranks run under torch's CUDA sanitizer."""

    def __str__(self) -> str:
        return f"{self.kind} x {self.size}{' as many' if self.as_many else ''}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One check."""

    name: str
    site: Site
    body: Callable[..., str]
    args: tuple[str, ...] = ()
    deadline: float = 180.0
    """Seconds after which its ranks are killed."""
    limit: float | None = None
    """The ``timeout`` of `connect`."""
    judge: Callable[[RanksFailed], str] | None = None
    """Judges the failure that is expected; where None, none is."""


def rows_alone(site: Site) -> Iterator[Row]:
    """What one rank shows."""
    yield Row(name="collectives", site=site, body=values.collectives)
    yield Row(name="transfers to oneself", site=site, body=values.transfers)
    yield Row(name="marks", site=site, body=values.marks)
    yield Row(name="not finite", site=site, body=values.names_of_what_is_not_finite)
    for name in WAYS:
        yield Row(name=f"values: {name}", site=site, body=values.trains, args=(name,))
    for name in ("replicate", "fully_shard", "class, flat", "tensor parallel"):
        body = values.trains_under_a_default_device
        yield Row(name=f"default device: {name}", site=site, body=body, args=(name,))
    yield from rows_of_products(site)
    for name in SCHEDULE_NAMES:
        yield Row(name=f"pipeline: {name}", site=site, body=values.pipeline, args=(name,))
    yield from rows_of_streams(site)


def rows_of_products(site: Site) -> Iterator[Row]:
    """List what plans, checkpoints and seeds show."""
    for axis in ("replicate", "shard"):
        for train in ("", "compile = true", 'dropout = "global"'):
            name = f"plan: {axis}{train and f', {train}'}"
            yield Row(name=name, site=site, body=values.plan, args=(axis, train))
    for name in ("replicate", "fully_shard", "fully_shard, offload", "class, flat"):
        yield Row(name=f"checkpoint: {name}", site=site, body=values.goes_on, args=(name,))
    yield Row(name="weights from a seed", site=site, body=values.weights_from_a_seed)


def rows_as_many(site: Site) -> Iterator[Row]:
    """What one rank shows that sends to itself what it would send to others."""
    for name in WAYS:
        yield Row(name=f"values: {name}", site=site, body=values.trains, args=(name,))
    yield from rows_of_streams(site)


def rows_of_streams(site: Site) -> Iterator[Row]:
    """What shows a missing wait, and a wait too many."""
    for name in values.WAYS_OF_STREAMS:
        yield Row(
            name=f"slow collectives: {name}",
            site=site,
            body=values.trains_with_slow_collectives,
            args=(name,),
        )
    for name in values.WAYS_WITHOUT_STOPS:
        yield Row(name=f"no host stop: {name}", site=site, body=values.steady, args=(name,))
    for name in SCHEDULE_NAMES:
        row = f"no host stop in a pipeline: {name}"
        yield Row(name=row, site=site, body=values.steady_pipeline, args=(name,))


def rows_sanitized(site: Site) -> Iterator[Row]:
    """What torch's sanitizer sees; graphs are not compiled under it."""
    for name in values.WAYS_OF_STREAMS:
        body = values.trains
        yield Row(name=f"sanitizer: {name}", site=site, body=body, args=(name,))


def rows_together(site: Site) -> Iterator[Row]:
    """What several ranks show."""
    yield Row(name="collectives", site=site, body=values.collectives)
    yield Row(name="transfers", site=site, body=values.transfers)
    for name in WAYS:
        yield Row(name=f"values: {name}", site=site, body=values.trains, args=(name,))
    yield from rows_of_products(site)
    for name in SCHEDULE_NAMES:
        yield Row(name=f"pipeline: {name}", site=site, body=values.pipeline, args=(name,))
    for kind in FAULTS:
        yield Row(
            name=f"failure: {kind}",
            site=site,
            body=failures.loses_a_rank,
            args=(kind,),
            limit=failures.LIMIT if kind == "stop" else None,
            judge=functools.partial(failures.judge_loss, kind=kind),
        )


def all_rows() -> list[Row]:
    """List all rows."""
    alone = Site(kind="nccl", size=1)
    pair, four = Site(kind="nccl", size=2), Site(kind="nccl", size=4)
    return [
        *rows_alone(alone),
        *rows_as_many(Site(kind="nccl", size=1, as_many=True)),
        *rows_sanitized(Site(kind="nccl", size=1, is_sanitized=True)),
        *rows_together(Site(kind="gloo", size=2)),
        *rows_together(pair),
        *rows_of_streams(pair),
        *rows_together(four),
    ]
