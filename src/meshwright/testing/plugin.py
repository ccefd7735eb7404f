"""The pytest plugin: the fixture ``ranks`` and the option ``--ranks-backend``."""

from __future__ import annotations

import functools
from typing import cast

import pytest

from meshwright.testing.pool import Ranks, shared_pool

__all__ = ["pytest_addoption", "pytest_unconfigure", "ranks"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the backend that the ranks connect with where a test does not say."""
    parser.getgroup("meshwright").addoption(
        "--ranks-backend",
        default=None,
        metavar="NAME",
        help="communication backend of the ranks of a test that names none (default: comm's own)",
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the pool's server, if a test has started it."""
    shared_pool().close()


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """`meshwright.testing.ranks` with the backend of the command line."""
    backend = request.config.getoption("--ranks-backend")
    return cast("Ranks", functools.partial(shared_pool().run, backend=backend))
