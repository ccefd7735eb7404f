"""The pytest plugin: the fixture ``ranks``, its backends, and the option ``--ranks-backend``."""

from __future__ import annotations

import functools
from typing import cast

import pytest

from meshwright.testing.pool import Ranks, shared_pool


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the backend that the ranks connect with where a test does not say."""
    parser.getgroup("meshwright").addoption(
        "--ranks-backend",
        default=None,
        metavar="NAME",
        help="communication backend of the ranks of a test that names none (default: comm's own)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers",
        'backends("shm", "gloo", ...): run a test that uses `ranks` once for each of them',
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test one parameter for each backend that its marker names."""
    marker = metafunc.definition.get_closest_marker("backends")
    if marker is not None and "ranks" in metafunc.fixturenames:
        metafunc.parametrize("ranks", marker.args, indirect=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the pool's server, if a test has started it."""
    shared_pool().close()


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Make `meshwright.testing.ranks` with the backend of the marker or the command line."""
    backend = getattr(request, "param", None) or request.config.getoption("--ranks-backend")
    return cast("Ranks", functools.partial(shared_pool().run, backend=backend))
