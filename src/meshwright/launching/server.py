"""The clean process that every rank is forked from: torch is loaded, with a single thread.

It is a new interpreter, never forked from the caller, which has threads. It runs nothing itself:
for each call it forks a supervisor, which forks the ranks, hosts their store, watches them, ends
them, and reports. `run_rank` is the life of one rank, from its fork to its end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import io
import math
import os
import pkgutil
import random
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import numpy
import torch

from meshwright import comm
from meshwright.comm import host_store
from meshwright.comm.failures.processes import is_stopped, status_of
from meshwright.environment import LOCAL_NETWORK, torchrun_variables
from meshwright.errors import RankFailedError
from meshwright.launching import modules, wire
from meshwright.launching.outcome import Ending, Outcome
from meshwright.torch_internals.tracing import COMPILER_MODULES

DUMP_SIGNAL = signal.SIGRTMIN + 7
"""Makes a rank dump its stacks; a real-time signal, to leave SIGUSR1 and SIGUSR2 to bodies."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


# ----------------------------------------------------------------------------------- one rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A rank's number, its channel to the supervisor, and its output files."""

    rank: int
    supervisor: int
    """Process id of the supervisor, to detect that it died before PDEATHSIG was set."""
    channel: socket.socket
    output: int
    """File descriptor for stdout and stderr."""
    stack: int
    """File descriptor for dumped stacks."""


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when ``parent`` ends for any reason."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it had ended before the kernel was asked
        os._exit(1)


def run_rank(request: wire.Request, post: Post) -> NoReturn:
    """Run the body on this rank, send the result, and end the process."""
    die_with_parent(post.supervisor)
    os.setsid()  # a group of its own, so that what the body starts can be killed with it
    _redirect(post)
    try:
        value = _body_value(request, post)
        message = wire.RankMessage(kind="returned", time=time.monotonic(), payload=wire.pack(value))
    except BaseException as error:
        message = _message_of(error)
    _flush()
    wire.send(post.channel, message)
    if message.kind == "returned" and request.connected:
        with contextlib.suppress(RankFailedError):  # the report has every rank's failure
            comm.disconnect()
    _leave(0 if message.kind in {"returned", "skipped"} else 1)


def _message_of(error: BaseException) -> wire.RankMessage:
    now = time.monotonic()
    if _is_skip(error):
        # Send the name: pytest's outcomes cannot be unpickled from the module that they name.
        said = wire.pack((type(error).__name__, str(error)))
        return wire.RankMessage(kind="skipped", time=now, payload=said)
    _publish(error)
    return wire.RankMessage(
        kind="raised", time=now, payload=wire.exception_bytes(error), traceback=_trace_of(error)
    )


def _publish(error: BaseException) -> None:
    """Report the failure to the other ranks, as an uncaught exception would."""
    with contextlib.redirect_stderr(io.StringIO()):  # the report shows the traceback
        sys.excepthook(type(error), error, error.__traceback__)


def _leave(code: int) -> NoReturn:
    """End the process as Python would, except for the interpreter's finalization.

    That takes 0.4 s for four ranks on two cores, mostly to copy pages shared with the server, only
    to free them.
    """
    if code == 0:
        threading._shutdown()  # pyrefly: ignore[missing-attribute] # waits for threads
        atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def _redirect(post: Post) -> None:
    os.dup2(post.output, 1)
    os.dup2(post.output, 2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    faulthandler.enable(file=post.stack, all_threads=True)
    faulthandler.register(DUMP_SIGNAL, file=post.stack, all_threads=True)


def _body_value(request: wire.Request, post: Post) -> object:
    port = cast("int", wire.receive(post.channel))
    os.environ.clear()
    os.environ.update({**LOCAL_NETWORK, **request.environment})
    os.environ.update(torchrun_variables(post.rank, request.size, port))
    os.chdir(request.directory)
    sys.path[:] = request.path
    modules.install(request.test_modules)
    _replace_filters(request.warning_filters)
    _seed()
    body, args, kwargs = cast(
        "tuple[Callable[..., object], tuple[object, ...], dict[str, object]]",
        wire.unpack(request.work),
    )
    with contextlib.ExitStack() as stack:
        if request.place:
            stack.enter_context(pkgutil.resolve_name(request.place)())
        elif request.connected:
            comm.connect(request.backend)
        _seed()
        return body(*args, **kwargs)


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def _replace_filters(filters: Iterable[wire.WarningFilter]) -> None:
    warnings.resetwarnings()
    for action, message, category, module, line in filters:
        warnings.filterwarnings(
            action,  # pyrefly: ignore[bad-argument-type]
            message=message,
            category=category,
            module=module,
            lineno=line,
            append=True,
        )


def _is_skip(error: BaseException) -> bool:
    outcomes = sys.modules.get("_pytest.outcomes")
    return outcomes is not None and isinstance(error, (outcomes.Skipped, outcomes.XFailed))


def _trace_of(error: BaseException) -> str:
    """Format the traceback from the body on, without the harness's own frames."""
    trace: types.TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    # An error of the harness itself has no frame of the body: show all frames.
    lines = traceback.format_exception(type(error), error, trace or error.__traceback__)
    return "".join(lines)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


# ----------------------------------------------------------------------------------- the server

CONTROL_BYTES = 1 << 16
"""Limit on the bytes of the list of modules that comes with a call."""

_MADV_COLLAPSE = 25
_HUGE_PAGE = 1 << 21
_PR_SET_CHILD_SUBREAPER = 36
_FREE_PAGES = 3
"""The mode of fallocate that frees pages of a file and keeps its size."""
_OUTPUT_SHOWN = 32 * 1024
_DUMP_SECONDS = 1.0
_SKIP_GRACE = 0.1
_TELL_EVERY = 0.1

Step = Callable[[], Any]
"""A process's next work, which returns another or a status, so that a fork leaves all frames."""


def main(control: int) -> None:
    """Serve calls until the other end of the socket ``control`` is closed."""
    step: Step | int = functools.partial(_serve, socket.socket(fileno=control))
    while not isinstance(step, int):
        step = step()
    sys.exit(step)


def _serve(control: socket.socket) -> Step | int:
    pending = list(reversed(COMPILER_MODULES))
    while True:
        while pending and not select.select([control], [], [], 0)[0]:
            _load([pending.pop()])
        data, descriptors, _, _ = socket.recv_fds(control, CONTROL_BYTES, 1)
        if not descriptors:
            return 0
        _reap()
        _load(cast("list[str]", wire.unpack(data)))
        call = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            control.close()
            return functools.partial(supervise, call)
        call.close()


def _load(names: Iterable[str]) -> None:
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        try:
            importlib.import_module(name)
        except Exception:
            continue  # a rank that needs it raises the error again, where it is reported
    if missing:
        _freeze()


def _freeze() -> None:
    """Freeze loaded objects: a rank would have to copy each page that it touches."""
    for finalizer in list(weakref.finalize._registry):  # pyrefly: ignore[missing-attribute]
        finalizer.atexit = False  # torch would unload its libraries, 30 ms per rank
    gc.collect()
    gc.freeze()
    _collapse_heap()


def _collapse_heap() -> None:
    """Move loaded data to huge pages if the kernel can: a fork then takes a third of the time."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps") as maps:
        rows = [line.split() for line in maps]
    for span, rights, _, _, inode, *name in rows:
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in span.split("-"))
            # One at a time: the kernel stops at the first that it cannot move.
            first = -(-start // _HUGE_PAGE) * _HUGE_PAGE
            for page in range(first, end - _HUGE_PAGE + 1, _HUGE_PAGE):
                madvise(page, _HUGE_PAGE, _MADV_COLLAPSE)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


# ------------------------------------------------------------------------------- the supervisor


@dataclass(slots=True)
class _Child:
    """A rank as its supervisor sees it."""

    rank: int
    pid: int
    handle: int
    """Readable when the process has ended."""
    channel: socket.socket
    output: int
    stack: int
    inbox: wire.MessageReader = field(default_factory=wire.MessageReader)
    message: wire.RankMessage | None = None
    exit_code: int | None = None
    end: float = 0.0
    well_until: float = 0.0
    killed_for: Ending | None = None
    stopped: bool = False
    told: int = 0
    """Bytes of its output that have been sent to the caller."""

    @property
    def running(self) -> bool:
        return self.exit_code is None

    def say(self, message: wire.RankMessage) -> None:
        self.message = message
        self.end = self.well_until = message.time

    def exit(self, code: int, well_until: float) -> None:
        """Record that the process exited with ``code``, some time after ``well_until``."""
        self.exit_code = code
        if self.message is None:
            self.end, self.well_until = time.monotonic(), well_until

    def news(self) -> bytes:
        """Return the rank's output since the last call, and free its pages."""
        data = os.pread(self.output, os.fstat(self.output).st_size - self.told, self.told)
        self.told += len(data)
        if data:
            _LIBC.fallocate(self.output, _FREE_PAGES, ctypes.c_long(0), ctypes.c_long(self.told))
        return data

    def outstay(self, ending: Ending, now: float) -> None:
        """Record at ``now`` that the rank exceeded its time and will be killed for ``ending``."""
        self.killed_for = ending
        self.stopped = is_stopped(self.pid)
        if self.message is None:
            self.end = self.well_until = now


def supervise(call: socket.socket) -> Step | int:
    """Serve the one request on ``call``; in a forked rank, return the rank's work."""
    start = time.monotonic()
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    request = cast("wire.Request", wire.receive(call))
    wire.send(call, "begun")
    children: list[_Child] = []
    supervisor = os.getpid()
    for rank in range(request.size):
        ours, theirs = socket.socketpair()
        output, stack = os.memfd_create("output"), os.memfd_create("stack")
        pid = os.fork()
        if pid == 0:
            for resource in (call, ours, *(child.channel for child in children)):
                resource.close()
            post = Post(
                rank=rank, supervisor=supervisor, channel=theirs, output=output, stack=stack
            )
            return functools.partial(run_rank, request, post)
        theirs.close()
        children.append(_Child(rank, pid, os.pidfd_open(pid), ours, output, stack))
    # Start the store after the forks: it has a thread, and a forking process should have one.
    store = host_store()
    for child in children:
        wire.send(child.channel, store.port)
    outcomes = _RankWatch(request, call, children, start).run()
    wire.send(call, outcomes)
    os._exit(0)


class _RankWatch:
    """Watches the ranks of one call until they end."""

    def __init__(
        self,
        request: wire.Request,
        call: socket.socket,
        children: list[_Child],
        start: float,
    ) -> None:
        self._request = request
        self._call = call
        self._children = children
        self._start = start
        self._limit = self._start + request.timeout
        self._killed_for = Ending.HUNG
        self._selector = selectors.DefaultSelector()
        self._selector.register(call, selectors.EVENT_READ)
        for child in children:
            self._selector.register(child.handle, selectors.EVENT_READ, child)
            self._selector.register(child.channel, selectors.EVENT_READ, child)

    def run(self) -> list[Outcome]:
        """Wait for all ranks; kill those that exceed their time."""
        last = self._start
        while any(child.running for child in self._children):
            events = self._selector.select(self._patience())
            for key, _ in events:
                if key.fileobj is self._call:
                    self._caller_is_gone()
                elif isinstance(key.fileobj, int):
                    self._collect(key.data, last)
                elif key.fd in self._selector.get_map():  # not read to its end already
                    self._read(key.data)
            last = time.monotonic()
            if last >= self._limit:
                self._kill_late()
            self._tell()
        _kill_descendants()
        self._tell()
        return [self._outcome(child) for child in self._children]

    def _patience(self) -> float | None:
        """Seconds until the next timed action; None for none."""
        left = max(0.0, self._limit - time.monotonic())
        if self._request.is_told:
            left = min(left, _TELL_EVERY)
        return None if left == math.inf else left

    def _tell(self) -> None:
        if not self._request.is_told:
            return
        for child in self._children:
            if data := child.news():
                try:
                    wire.send(self._call, (child.rank, data))
                except OSError:
                    self._caller_is_gone()

    def _caller_is_gone(self) -> None:
        for child in self._children:
            _kill(child)
        _kill_descendants()
        os._exit(1)

    def _read(self, child: _Child) -> None:
        data = _available(child.channel)
        if not data:
            self._selector.unregister(child.channel)
            return
        if child.killed_for is not None:
            return  # it is being killed, and was only continued to dump its stacks
        for message in child.inbox.feed(data):
            said = cast("wire.RankMessage", message)
            child.say(said)
            if said.kind == "raised":
                self._shorten(self._request.grace)
            elif said.kind == "skipped":
                self._shorten(_SKIP_GRACE)

    def _collect(self, child: _Child, well_until: float) -> None:
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.handle)
        if child.channel.fileno() in self._selector.get_map():
            child.channel.setblocking(False)
            self._read(child)  # what it said before it ended
        child.exit(os.waitstatus_to_exitcode(status), well_until)
        said_its_end = child.message is not None and child.message.kind != "returned"
        if child.exit_code != 0 and not said_its_end:
            self._shorten(self._request.grace)

    def _shorten(self, grace: float) -> None:
        limit = time.monotonic() + grace
        if limit < self._limit:
            self._limit = limit
            self._killed_for = Ending.ENDED

    def _kill_late(self) -> None:
        late = [child for child in self._children if child.running]
        now = time.monotonic()
        for child in late:
            child.outstay(self._killed_for, now)
            _signal(child.pid, DUMP_SIGNAL)
            _signal(child.pid, signal.SIGCONT)  # a stopped process dumps no stacks
        _wait_for_stacks(late)
        for child in late:
            _kill(child)
        self._limit = time.monotonic() + _DUMP_SECONDS

    def _outcome(self, child: _Child) -> Outcome:
        message = child.message
        ending = _ending(child)
        loads = message is not None and ending not in {Ending.RETURNED, Ending.TEARDOWN}
        return Outcome(
            rank=child.rank,
            ending=ending,
            seconds=child.end - self._start,
            order=child.well_until,
            exit_code=child.exit_code,
            value=message.payload if message is not None else b"",
            traceback=message.traceback if message is not None and loads else "",
            stack=_content(child.stack),
            output="" if self._request.is_told else _content(child.output),
            killed=child.killed_for is not None,
            stopped=child.stopped,
        )


def _ending(child: _Child) -> Ending:
    if child.message is None:
        return child.killed_for or Ending.DIED
    ending = Ending(child.message.kind)
    return Ending.TEARDOWN if ending == Ending.RETURNED and child.exit_code else ending


def _available(channel: socket.socket) -> bytes:
    data = b""
    channel.setblocking(False)
    with contextlib.suppress(BlockingIOError, ConnectionResetError):
        while part := channel.recv(1 << 20):
            data += part
    return data


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill(child: _Child) -> None:
    """Kill the rank and its process group, with all that its body started."""
    if not child.running:
        return
    # Both: a rank that was forked just now has no group of its own yet.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(child.pid, signal.SIGKILL)


def _kill_descendants() -> None:
    """Kill processes that ranks left behind, which this process, a subreaper, inherits."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                for pid in _own_children():
                    _signal(pid, signal.SIGKILL)
                time.sleep(0.005)
        except ChildProcessError:
            return


def _own_children() -> list[int]:
    me = os.getpid()
    return [
        int(name)
        for name in os.listdir("/proc")
        if name.isdigit() and (fields := status_of(int(name))) and int(fields[1]) == me
    ]


def _wait_for_stacks(children: list[_Child]) -> None:
    """Wait until every rank has dumped its stacks: no file is empty or growing."""
    end = time.monotonic() + _DUMP_SECONDS
    before: list[int] = []
    while time.monotonic() < end:
        time.sleep(0.03)
        sizes = [os.fstat(child.stack).st_size for child in children]
        if sizes == before and all(sizes):
            return
        before = sizes


def _content(file: int) -> str:
    size = os.fstat(file).st_size
    start = max(0, size - _OUTPUT_SHOWN)
    text = os.pread(file, size - start, start).decode("utf-8", errors="replace")
    return f"[{start} bytes before this are left out]\n{text}" if start else text
