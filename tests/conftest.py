"""Loads the harness where the package is used from its source tree without being installed, draws
the few cases that are quick, and bounds the ranks that tests of several workers run at once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import IO, Any

import pytest

from meshwright.testing import Ranks
from support.internals.launching import modules

if not any(entry.value == "meshwright.testing.plugin" for entry in entry_points(group="pytest11")):
    pytest_plugins = ["meshwright.testing.plugin"]


ON_GPUS = os.environ.get("ON_GPUS") == "1"
"""True where tests that use `ranks` run on GPUs, and no others."""
SLOW = 4
"""Of a test with many cases so many run in `make test-all` beside those that are quick."""


@pytest.hookimpl(tryfirst=True)  # before what is slow is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make all but a ``few`` cases of a test slow: those that `draw` puts first.

    Of these no more than ``slow``, `SLOW` where it says nothing; the rest is for `make soak`.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    if ON_GPUS:
        items[:] = filter(_has_ranks_anywhere, items)
    for those in cases.values():
        few = those[0].get_closest_marker("few")
        assert few is not None
        (quick,), slow = few.args, few.kwargs.get("slow", SLOW)
        drawn = draw(those, quick)
        for item in drawn[quick:]:
            item.add_marker(pytest.mark.slow)
        for item in drawn[quick + slow :]:
            item.add_marker(pytest.mark.soak)


def draw(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """Order ``cases`` by checksums of their names, but for the first ``count``.

    Of these, each has as many values as possible that none before it has.
    """
    left = sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode()))
    values = {item.nodeid: _values_of(item) for item in left}
    first: list[pytest.Item] = []
    seen: set[tuple[str, str]] = set()
    while left and len(first) < count:
        item = max(left, key=lambda item: len(values[item.nodeid] - seen))  # the first of equals
        left.remove(item)
        first.append(item)
        seen |= values[item.nodeid]
    return first + left


def _values_of(item: pytest.Item) -> set[tuple[str, str]]:
    parameters = getattr(item, "callspec", None)
    if parameters is None:
        return set()
    return {(name, repr(value)) for name, value in parameters.params.items()}


def _has_ranks_anywhere(item: pytest.Item) -> bool:
    """Check that ``item`` uses ranks, and is not for one backend or one kind of device."""
    devices = item.get_closest_marker("devices")
    if "ranks" not in getattr(item, "fixturenames", ()) or (devices and len(devices.args) == 1):
        return False
    parameters = getattr(item, "callspec", None)
    named = parameters.params.get("ranks", "host") if parameters is not None else "host"
    return named in ("host", "gloo")


@contextlib.contextmanager
def places(file: IO[str], wanted: int, there: int) -> Iterator[None]:
    """Hold ``wanted`` of the ``there`` places of ``file``: byte locks, which end with a worker."""
    held: set[int] = set()
    try:
        fcntl.lockf(file, fcntl.LOCK_EX, 1, there)  # one gathers at a time: no two with half each
        while len(held) < min(wanted, there):
            for place in set(range(there)) - held:
                with contextlib.suppress(BlockingIOError):
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                    held.add(place)
                    break
            else:
                time.sleep(0.01)
        fcntl.lockf(file, fcntl.LOCK_UN, 1, there)
        yield
    finally:
        for place in (there, *held):
            fcntl.lockf(file, fcntl.LOCK_UN, 1, place)


preloadable = modules.preloadable
modules.preloadable = lambda: [*preloadable(), "support.preloaded"]


@pytest.fixture(scope="session")
def ranks(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Share ``RANK_PLACES`` ranks among the workers of one run of pytest-xdist."""
    if ON_GPUS:
        from gpu.bodies import on_gpus  # begins nothing, but needs a GPU

        ranks = on_gpus(ranks)
    there = os.environ.get("RANK_PLACES")
    if there is None or "PYTEST_XDIST_WORKER" not in os.environ:
        yield ranks
        return
    with (tmp_path_factory.getbasetemp().parent / "places").open("w") as file:

        def bounded(n: int, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            with places(file, n, int(there)):
                return ranks(n, *args, **kwargs)

        yield bounded
