"""The life of one rank between its fork and its end."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import io
import os
import pkgutil
import random
import signal
import socket
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn, cast

import numpy
import torch

from meshwright import comm
from meshwright.environment import LOCAL_NETWORK, torchrun_variables
from meshwright.errors import RankFailedError
from meshwright.launching import modules, wire

DUMP_SIGNAL = signal.SIGRTMIN + 7
"""Makes a rank dump its stacks; a real-time signal, to leave SIGUSR1 and SIGUSR2 to bodies."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


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
    if os.getppid() != parent:
        os._exit(1)


def run(request: wire.Request, post: Post) -> NoReturn:
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
