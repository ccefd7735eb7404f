"""The caller's side: `ranks` runs a function on several fresh processes and returns the results."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar, cast

from meshwright.environment import LOCAL_NETWORK
from meshwright.errors import InternalError
from meshwright.testing import modules, wire
from meshwright.testing.outcome import Ending, Outcome, RanksFailed

T = TypeVar("T")

_MARGIN = 30.0
"""Seconds past the deadline in which the supervisor must have reported."""

_BOOTSTRAP = "import sys; from meshwright.testing.server import main; main(int(sys.argv[1]))"

_SERVER_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # No pool of compiler processes, and no CUDA context, in a process that is forked.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    **LOCAL_NETWORK,
}
_NOT_FOR_SERVER = ("TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS", "TORCH_SHOW_CPP_STACKTRACES")


SIMULATED = "simulated"
"""The backend of ranks that have simulated devices."""
SLOWER = 4
"""How many times longer than on the host a body may take on one."""


class Ranks(Protocol):
    """The type of the fixture ``ranks``: that of `ranks`."""

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


class Pool:
    """A server process with torch loaded, and the calls that run through it.

    The server starts with the first call and ends with `close`, or when this process ends, however
    it ends. Calls from several threads may run at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: _Server | None = None

    def run(
        self,
        n: int,
        body: Callable[..., T],
        *args: object,
        timeout: float = 60.0,
        backend: str | None = None,
        grace: float = 2.0,
        connected: bool = True,
        **kwargs: object,
    ) -> list[T]:
        """Run one call, as `ranks` does."""
        __tracebackhide__ = True
        if n < 1:
            raise ValueError(f"ranks() needs at least 1 rank, got n={n}")
        # A body that connects by itself finds the backend in the environment.
        own = {"MESHWRIGHT_CPU_BACKEND": backend} if backend in ("gloo", "shm") else {}
        request = wire.Request(
            size=n,
            work=wire.pack((body, args, kwargs)),
            timeout=timeout,
            grace=grace,
            backend=backend,
            connected=connected,
            environment={**os.environ, **own},
            directory=os.getcwd(),
            path=tuple(sys.path),
            test_modules=modules.rewritten(),
            warning_filters=_warning_filters(),
        )
        with self._open_call() as call:
            outcomes = self._exchange(call, request)
        return cast("list[T]", _values(outcomes))

    def close(self) -> None:
        """End the server. A later call starts another."""
        with self._lock:
            if self._server is not None:
                self._server.close()
            self._server = None

    @contextlib.contextmanager
    def _open_call(self) -> Iterator[socket.socket]:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                if self._server is None or not self._server.alive:
                    self._server = _Server()
                server = self._server
                try:
                    server.hand_over(theirs)
                except OSError as error:
                    raise InternalError(
                        f"the server of ranks has ended\n{server.said()}"
                    ) from error
            yield ours

    def _exchange(self, call: socket.socket, request: wire.Request) -> Sequence[Outcome]:
        call.settimeout(request.timeout + _MARGIN)
        try:
            wire.send(call, request)
            return cast("Sequence[Outcome]", wire.receive(call))
        except (EOFError, OSError) as error:
            server = self._server
            said = "" if server is None else server.said()
            raise InternalError(
                f"the supervisor of {request.size} ranks ended without a report ({error!r})\n{said}"
            ) from error


class _Server:
    """The server process, seen from the caller."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            name: value for name, value in os.environ.items() if name not in _NOT_FOR_SERVER
        }
        environment |= _SERVER_VARIABLES
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server
        self._sent: set[str] = set()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # an interrupt from the terminal is for the caller
            )
        self._control = ours

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def hand_over(self, call: socket.socket) -> None:
        """Give the server its end of a new call, and the names of modules loaded here since."""
        fresh = [name for name in modules.preloadable() if name not in self._sent]
        self._sent.update(fresh)
        socket.send_fds(self._control, [wire.pack(fresh)], [call.fileno()])

    def said(self) -> str:
        """Read the output of the server, for errors."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        self._control.close()
        self._process.wait()
        self._log.close()


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

    ``body`` is an ordinary function; it may be nested in a test and close over its variables, which
    each rank gets a copy of. The ranks are connected before it starts: the world is
    ``meshwright.comm.communicator()``. Every call starts from the same state on all ranks: seeds 0,
    torch's defaults, the caller's environment, directory and warning filters.

    ``timeout`` is the deadline in seconds; ranks that are still running then have their Python
    stacks shown and are killed. After the first failure the others have ``grace`` seconds to end.
    ``backend`` goes to ``comm.connect``; with ``connected=False`` the body connects by itself, from
    torchrun's variables, and ``MESHWRIGHT_CPU_BACKEND`` where ``backend`` is gloo or shm. Backend
    ``simulated`` gives each rank a device (`meshwright.testing.simulated`), whose faults fail it.

    Raises `RanksFailed` when any rank raised, died, hung or did not end well; skips the test when a
    body called ``pytest.skip``.

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
        body,
        *args,
        timeout=timeout,
        backend=backend,
        grace=grace,
        connected=connected,
        **kwargs,
    )


def on_devices(ranks: Ranks) -> Ranks:
    """Give the ranks of ``ranks`` that are connected for their body a simulated device each.

    Faults of a device fail its rank. Deadlines are longer.
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


def shared_pool() -> Pool:
    """Find the pool of this process; a forked child has its own."""
    return _pool_of(os.getpid())


@functools.cache
def _pool_of(process: int) -> Pool:
    pool = Pool()
    atexit.register(pool.close)
    return pool


def _warning_filters() -> tuple[wire.WarningFilter, ...]:
    """List the filters in force, as text that `warnings.filterwarnings` takes."""

    def text(pattern: re.Pattern[str] | str | None) -> str:
        if pattern is None:
            return ""
        return re.escape(pattern) + r"\Z" if isinstance(pattern, str) else pattern.pattern

    return tuple(
        (action, text(message), cast("type[Warning]", category), text(module), line)
        for action, message, category, module, line in warnings.filters
    )


def _values(outcomes: Sequence[Outcome]) -> list[object]:
    """List the returned values. Raises the error that the outcomes make."""
    __tracebackhide__ = True
    loaded = [_loaded(outcome) for outcome in outcomes]
    unwell = [outcome for outcome in loaded if outcome.ending != Ending.RETURNED]
    # What other ranks say after one has skipped the test comes of its having left.
    first = min(unwell, key=lambda outcome: outcome.order, default=None)
    if first is not None and first.ending == Ending.SKIPPED:
        kind, reason = cast("tuple[str, str]", first.value)
        raise getattr(sys.modules["_pytest.outcomes"], kind)(reason)
    if unwell:
        error = RanksFailed(loaded)
        raise error from error.first.exception
    for outcome in loaded:
        for line in outcome.output.splitlines():
            sys.stdout.write(f"[rank {outcome.rank}] {line}\n")
    return [outcome.value for outcome in loaded]


def _loaded(outcome: Outcome) -> Outcome:
    """Put value or exception in the place of their bytes."""
    data = cast("bytes", outcome.value)
    if outcome.ending == Ending.RAISED:
        return dataclasses.replace(outcome, value=None, exception=wire.exception_from(data))
    return dataclasses.replace(outcome, value=wire.unpack(data) if data else None)
