"""Messages between pool, server, supervisor and ranks, and their bytes.

Every message is a pickle after its length. Both ends are the same user's processes, started by one
another over a private socket, so pickle is safe here.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

_LENGTH = struct.Struct("!Q")

WarningFilter = tuple[str, str, type[Warning], str, int]
"""One row of `warnings.filters`: action, message, category, module, line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of a pool: the work, the number of ranks, and the caller's environment."""

    size: int
    work: bytes
    """The packed tuple ``(body, args, kwargs)``."""
    timeout: float
    """Seconds until ranks that have not ended are killed."""
    grace: float
    """Seconds that the other ranks have after the first failure."""
    backend: str | None
    connected: bool
    """True when the ranks are connected before the body starts."""
    place: str
    """``module:name`` of a context manager that connects the ranks instead; empty for none."""
    is_told: bool
    """True when output of ranks is sent to the caller at once, and not in their outcomes."""
    environment: Mapping[str, str]
    directory: str
    path: tuple[str, ...]
    """The caller's ``sys.path``."""
    test_modules: Mapping[str, str]
    """File of each test module by name, for modules that ``sys.path`` does not find."""
    warning_filters: tuple[WarningFilter, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMessage:
    """The message of a rank at the end of its body."""

    kind: str
    """``returned``, ``raised`` or ``skipped``."""
    time: float
    """Monotonic seconds, the same clock on all ranks."""
    payload: bytes = b""
    """The packed value, or the exception (`exception_bytes`)."""
    traceback: str = ""


def pack(value: object) -> bytes:
    """Pickle ``value``; functions and classes outside of modules (notebooks) are sent by value.

    Raises ``TypeError`` if something inside cannot be pickled.
    """
    import cloudpickle  # imported here, so that checks on a GPU do not need it

    try:
        return cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"cannot be sent between this process and its ranks ({error}); create it inside the "
            "function that they run, or pass what it is made from"
        ) from error


def unpack(data: bytes) -> object:
    return pickle.loads(data)  # noqa: S301 - see the module's docstring


def _rebuild(
    kind: type[BaseException], args: tuple[object, ...], state: Mapping[str, object]
) -> BaseException:
    # Without __init__: an exception whose __init__ takes more than its message pickles but would
    # not unpickle. Of several builtin bases only the one that sets the layout can create it.
    for base in cast("tuple[type[BaseException], ...]", kind.__mro__):
        try:
            error = base.__new__(kind, *args)
        except TypeError:
            continue
        error.args = args
        error.__dict__.update(state)
        return error
    raise TypeError(f"no base of {kind.__name__} can make one")


def exception_bytes(error: BaseException) -> bytes:
    """Pickle ``error`` without its traceback; empty if that fails."""
    try:
        data = pack((type(error), error.args, dict(error.__dict__)))
        exception_from(data)
    except Exception:
        return b""
    return data


def exception_from(data: bytes) -> BaseException | None:
    """Rebuild the exception of `exception_bytes`, or None if it could not be pickled."""
    if not data:
        return None
    try:
        kind, args, state = cast("tuple[Any, tuple[object, ...], dict[str, object]]", unpack(data))
        return _rebuild(kind, args, state)
    except Exception:
        return None


def send(channel: socket.socket, message: object) -> None:
    """Send one message; blocks until it is written."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    channel.sendall(_LENGTH.pack(len(data)) + data)


def receive(channel: socket.socket) -> object:
    """Receive the next message; ``EOFError`` when the other side has closed."""
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    return unpack(_exactly(channel, length))


def _exactly(channel: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        read = channel.recv_into(view)
        if read == 0:
            raise EOFError("the other side closed the channel")
        view = view[read:]
    return bytes(data)


class MessageReader:
    """Assembles messages from bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[object]:
        """Yield the messages that ``data`` completes."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            message = unpack(bytes(self._data[_LENGTH.size : end]))
            del self._data[:end]
            yield message
