"""The caller's side: runs a function on several new processes, and returns the results."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast

from meshwright.environment import LOCAL_NETWORK, is_launched
from meshwright.errors import InternalError, LaunchError
from meshwright.launching import modules, wire
from meshwright.launching.outcome import Ending, Outcome, RanksFailed

T = TypeVar("T")

_MARGIN = 30.0
"""Seconds after the deadline within which the supervisor must report."""

_BOOTSTRAP = "import sys; from meshwright.launching.server import main; main(int(sys.argv[1]))"

_SERVER_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # No pool of compiler processes, and no CUDA context, in a process that is forked.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    **LOCAL_NETWORK,
}
_NOT_FOR_SERVER = ("TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS", "TORCH_SHOW_CPP_STACKTRACES")


class Pool:
    """A server process with torch loaded, and the calls that run through it.

    The server starts with the first call and ends with `close`, or when this process ends for any
    reason. Calls from several threads may run at once.
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
        place: str = "",
        tell: Callable[[int, bytes], None] | None = None,
        **kwargs: object,
    ) -> list[T]:
        """Run one call, as `launch` and `meshwright.testing.ranks` do.

        If given, ``place`` connects the ranks (see `wire.Request`). Output of ranks is passed to
        ``tell`` while they run, or written here at the end.
        """
        __tracebackhide__ = True
        if n < 1:
            raise ValueError(f"expected at least 1 rank, found {n}")
        # For a body that connects itself, set the backend in the environment.
        own = {"MESHWRIGHT_CPU_BACKEND": backend} if backend in ("gloo", "shm") else {}
        request = wire.Request(
            size=n,
            work=wire.pack((body, args, kwargs)),
            timeout=timeout,
            grace=grace,
            backend=backend,
            connected=connected,
            place=place,
            is_told=tell is not None,
            environment={**os.environ, **own},
            directory=os.getcwd(),
            path=tuple(sys.path),
            test_modules=modules.rewritten(),
            warning_filters=_warning_filters(),
        )
        with self._open_call() as call:
            outcomes = self._exchange(call, request, tell)
        return cast("list[T]", _values(outcomes))

    def close(self) -> None:
        """Stop the server. A later call starts another."""
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
            try:
                yield ours
            except BaseException:
                _wait_for_end(ours)
                raise

    def _exchange(
        self,
        call: socket.socket,
        request: wire.Request,
        tell: Callable[[int, bytes], None] | None,
    ) -> Sequence[Outcome]:
        try:
            wire.send(call, request)
            wire.receive(call)  # the supervisor has begun; its server may have had to load torch
            call.settimeout(None if request.timeout == math.inf else request.timeout + _MARGIN)
            while isinstance(message := wire.receive(call), tuple):
                if tell is not None:
                    tell(*cast("tuple[int, bytes]", message))
            return cast("Sequence[Outcome]", message)
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
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        self._control.close()
        self._process.wait()
        self._log.close()


def launch(
    fn: Callable[..., T],
    ranks: int,
    *args: object,
    timeout: float | None = None,
    backend: str | None = None,
    grace: float = 10.0,
    connected: bool = True,
    **kwargs: object,
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` on ``ranks`` processes of this machine; returns the results.

    For scripts and notebooks: ``fn`` may be a function of a notebook, a lambda or a closure. It,
    its arguments and its closure are copied to each rank, and its result is copied back, in the
    order of the ranks; all other changes are lost with the process. The processes are forked from
    one that has only loaded torch, so they start fast from the second call on, and CUDA may be
    initialized in this process.

    A rank has one compute thread and torchrun's environment variables, and its seeds are 0. It is
    connected before ``fn`` starts, with ``backend`` as for `meshwright.comm.connect`, which ``fn``
    may call again for the world; with ``connected=False`` it must. Its output is shown here line
    by line, after its number.

    ``timeout`` is in seconds; None sets no limit. After the first failure the other ranks have
    ``grace`` seconds to end. If this process is interrupted (Ctrl-C, the button of a notebook) or
    ends, the ranks and all processes that they have started are killed at once.

    Raises `RankFailedError`, whose ``rank`` failed first, with the tracebacks of all that failed;
    the stacks of those that still ran at the limit; and the first rank's exception as its cause.
    Raises `TypeError` for values that cannot be copied, and `LaunchError` on a rank of another
    launcher.

    Example::

        def train(steps):
            world = meshwright.comm.connect()
            ...
            return loss.item()

        losses = meshwright.launch(train, 4, steps=100)
    """
    if is_launched():
        raise LaunchError(
            "launch() starts ranks on one machine, and a launcher has started this process as one "
            "(RANK, SLURM_STEP_ID or PET_NODE_RANK is set): call the function itself, or start "
            "the program without a launcher"
        )
    lines = _Lines()
    try:
        return shared_pool().run(
            ranks,
            functools.partial(fn, *args, **kwargs),
            timeout=math.inf if timeout is None else timeout,
            backend=backend,
            grace=grace,
            connected=connected,
            tell=lines.add,
        )
    finally:
        lines.end()


class _Lines:
    """Shows the output of ranks in complete lines."""

    def __init__(self) -> None:
        self._begun: dict[int, bytes] = {}

    def add(self, rank: int, data: bytes) -> None:
        """Show the lines that ``data`` completes."""
        *lines, self._begun[rank] = (self._begun.get(rank, b"") + data).split(b"\n")
        for line in lines:
            sys.stdout.write(f"[rank {rank}] {line.decode(errors='replace')}\n")
        sys.stdout.flush()

    def end(self) -> None:
        """Show incomplete last lines."""
        for rank in [rank for rank, line in self._begun.items() if line]:
            self.add(rank, b"\n")


def _wait_for_end(call: socket.socket) -> None:
    """Close the supervisor's input, so that it kills the ranks, and wait until it has."""
    with contextlib.suppress(OSError):
        call.shutdown(socket.SHUT_WR)
        call.settimeout(_MARGIN)
        while call.recv(1 << 16):
            pass


def shared_pool() -> Pool:
    """Return the pool of this process; a forked child has its own."""
    return _pool_of(os.getpid())


@functools.cache
def _pool_of(process: int) -> Pool:
    pool = Pool()
    atexit.register(pool.close)
    return pool


def _warning_filters() -> tuple[wire.WarningFilter, ...]:
    """The active warning filters, as text for `warnings.filterwarnings`."""

    def text(pattern: re.Pattern[str] | str | None) -> str:
        if pattern is None:
            return ""
        return re.escape(pattern) + r"\Z" if isinstance(pattern, str) else pattern.pattern

    return tuple(
        (action, text(message), cast("type[Warning]", category), text(module), line)
        for action, message, category, module, line in warnings.filters
    )


def _values(outcomes: Sequence[Outcome]) -> list[object]:
    """Return the ranks' values. Raises RanksFailed, or pytest's skip, for other outcomes."""
    __tracebackhide__ = True
    loaded = [_loaded(outcome) for outcome in outcomes]
    unwell = [outcome for outcome in loaded if outcome.ending != Ending.RETURNED]
    # Failures of other ranks after a skip are caused by the rank that left.
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
    """Replace the bytes of value or exception by the object."""
    data = cast("bytes", outcome.value)
    if outcome.ending == Ending.RAISED:
        return dataclasses.replace(outcome, value=None, exception=wire.exception_from(data))
    return dataclasses.replace(outcome, value=wire.unpack(data) if data else None)
