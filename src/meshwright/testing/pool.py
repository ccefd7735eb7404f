"""The function `ranks`: a test's body on several fresh processes, on simulated devices too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

from meshwright.launching.pool import shared_pool

T = TypeVar("T")

SIMULATED = "simulated"
"""The backend of ranks that have simulated devices."""
_DEVICES = "meshwright.testing.simulated.backend:connected_device"
SLOWER = 4
"""Factor by which a body may take longer on a simulated device than on the host."""


class Ranks(Protocol):
    """The type of the fixture ``ranks``: the signature of `ranks`."""

    def __call__(
        self,
        n: int,
        body: Callable[..., T],
        *args: object,
        timeout: float = ...,
        backend: str | None = ...,
        grace: float = ...,
        connected: bool = ...,
        **kwargs: object,
    ) -> list[T]:
        """Run ``body`` on ``n`` ranks."""


def ranks(
    n: int,
    body: Callable[..., T],
    *args: object,
    timeout: float = 60.0,
    backend: str | None = None,
    grace: float = 2.0,
    connected: bool = True,
    **kwargs: object,
) -> list[T]:
    """Run ``body(*args, **kwargs)`` on ``n`` fresh processes; return their values in rank order.

    ``body`` is an ordinary function; it may be nested in a test and close over its variables, of
    which each rank gets a copy. The ranks are connected before it starts: the world is
    ``meshwright.comm.communicator()``. Every call starts from the same state on all ranks: seeds 0,
    torch's defaults, the caller's environment, directory and warning filters.

    ``timeout`` is the deadline in seconds; ranks that still run then have their Python stacks
    printed and are killed. After the first failure, the others have ``grace`` seconds to end.
    ``backend`` is passed to ``comm.connect``; with ``"simulated"``, ranks have simulated devices
    (`meshwright.testing.simulated`), whose faults fail them. With ``connected=False``, the body
    connects itself, by torchrun's variables, and ``MESHWRIGHT_CPU_BACKEND`` for gloo or shm.

    Raises `RanksFailed` when any rank raised, died, hung or did not end cleanly; skips the test
    when a body called ``pytest.skip``.

    Example::

        def test_sum(ranks):
            def body(start: float) -> float:
                world = communicator()
                return world.all_reduce(torch.tensor(start + world.rank)).wait().item()

            assert ranks(4, body, 1.0) == [10.0] * 4
    """
    __tracebackhide__ = True
    return shared_pool().run(
        n,
        functools.partial(body, *args, **kwargs),
        timeout=timeout,
        backend=backend,
        grace=grace,
        connected=connected,
        place=_DEVICES if connected and backend == SIMULATED else "",
    )


def on_devices(ranks: Ranks) -> Ranks:
    """Make a ``ranks`` function whose connected ranks have a simulated device each.

    Faults of a device fail its rank. Deadlines are longer by `SLOWER`.
    """

    @functools.wraps(ranks)
    def run(
        n: int,
        body: Callable[..., T],
        *args: object,
        timeout: float = 60.0,
        backend: str | None = None,
        connected: bool = True,
        **kwargs: object,
    ) -> list[T]:
        __tracebackhide__ = True
        if connected:
            timeout, backend = SLOWER * timeout, SIMULATED
        given = {"timeout": timeout, "backend": backend, "connected": connected}
        return cast("Callable[..., list[T]]", ranks)(n, body, *args, **given, **kwargs)

    return cast("Ranks", run)
