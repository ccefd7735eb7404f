"""Errors that a check raises at once on a host, and on a device when it has looked; deadlines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from meshwright.comm import communicator, settle
from support.internals.testing import SLOWER


@contextmanager
def raises_by_now(
    kind: type[Exception], *, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of the block, or of what looks late at what the block has done."""
    with pytest.raises(kind, match=match) as raised:  # noqa: PT012 - what looks late is one of two
        yield raised
        settle()


def as_on_a_host(seconds: float) -> float:
    """Divide what a rank has taken by what a simulated device takes longer than a host."""
    return seconds if communicator().is_on_host else seconds / SLOWER
