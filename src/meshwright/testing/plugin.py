"""The pytest plugin: the fixture ``ranks``, its backends and devices, and options for both."""

from __future__ import annotations

import functools
import os
from typing import cast

import pytest

from meshwright.launching.pool import shared_pool
from meshwright.testing import pool
from meshwright.testing.pool import SIMULATED, Ranks, on_devices


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for the default backend of the ranks and for their devices."""
    group = parser.getgroup("meshwright")
    group.addoption(
        "--ranks-backend",
        default=None,
        metavar="NAME",
        help="communication backend of the ranks of a test that names none (default: comm's own)",
    )
    group.addoption(
        "--ranks-devices",
        default=SIMULATED if os.environ.get("SIMULATED") == "1" else "host",
        choices=["host", SIMULATED],
        help="simulated: run the tests that use `ranks`, and no others on devices (SIMULATED=1)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        'backends("shm", "gloo", ...): run a test that uses `ranks` once for each of them',
    )
    config.addinivalue_line(
        "markers",
        'devices("host", "simulated"): run a test that uses `ranks` once for each of them; with '
        'one alone it runs there only, reason="..." says why',
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test with each backend and each device that its markers name."""
    if "ranks" not in metafunc.fixturenames:
        return
    backends = metafunc.definition.get_closest_marker("backends")
    devices = metafunc.definition.get_closest_marker("devices")
    named = devices.args if devices is not None else ("host",)
    if metafunc.config.getoption("--ranks-devices") == SIMULATED:
        backends, named = None, (SIMULATED,)
    wanted = list(backends.args if backends is not None else ["host"]) if "host" in named else []
    if SIMULATED in named:
        wanted.append(SIMULATED)
    if wanted != ["host"]:
        metafunc.parametrize("ranks", wanted, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under ``--ranks-devices simulated``, deselect tests without ranks or only for the host."""
    if config.getoption("--ranks-devices") != SIMULATED:
        return
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        devices = item.get_closest_marker("devices")
        has_ranks = "ranks" in getattr(item, "fixturenames", ())
        is_for_host = devices is not None and SIMULATED not in devices.args
        (kept if has_ranks and not is_for_host else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the pool's server, if a test started it."""
    shared_pool().close()


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """`meshwright.testing.ranks`, with the backend of the marker or the command line."""
    backend = getattr(request, "param", None) or request.config.getoption("--ranks-backend")
    if backend == SIMULATED:
        return on_devices(pool.ranks)
    backend = None if backend == "host" else backend
    return cast("Ranks", functools.partial(pool.ranks, backend=backend))
