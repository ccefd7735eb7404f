"""Loads the harness where the package is used from its source tree without being installed, and
bounds the ranks that tests of several workers run at once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import IO, Any

import pytest

from meshwright.testing import Ranks

if not any(entry.value == "meshwright.testing.plugin" for entry in entry_points(group="pytest11")):
    pytest_plugins = ["meshwright.testing.plugin"]


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


@pytest.fixture(scope="session")
def ranks(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Share ``RANK_PLACES`` ranks among the workers of one run of pytest-xdist."""
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
