"""A store in memory that counts what each of its clients asks of it, by key and not by call.

It has no lock: its clients run one at a time, as those of `SimulatedClock` do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta


class Server:
    """The keys of a run, and those who wait for them."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._waiting: dict[str, list[Callable[[], None]]] = defaultdict(list)

    def put(self, key: str, value: bytes) -> None:
        """Leave ``value``, and tell those who wait for ``key``."""
        self.values[key] = value
        for tell in self._waiting.pop(key, ()):
            tell()

    def tell(self, key: str, ring: Callable[[], None]) -> None:
        """Call ``ring`` when ``key`` is there, at once where it is."""
        if key in self.values:
            ring()
        else:
            self._waiting[key].append(ring)


class CountingStore:
    """One client of a `Server`, as c10d's stores are used."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.operations: Counter[str] = Counter()
        """The requests by kind; one for several keys counts once for each."""
        self.bytes_read = 0
        """Bytes of values that came back."""

    def clone(self) -> CountingStore:
        """Return this client: its threads are never two at a time."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Leave ``value``."""
        self.operations["set"] += 1
        self._server.put(key, _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all ``keys`` are there."""
        self.operations["check"] += len(keys)
        return all(key in self._server.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a number; returns the sum."""
        self.operations["add"] += 1
        total = int(self._server.values.get(key, b"0")) + amount
        self._server.put(key, str(total).encode())
        return total

    def append(self, key: str, value: str | bytes) -> None:
        """Put ``value`` behind what is there."""
        self.operations["append"] += 1
        self._server.put(key, self._server.values.get(key, b"") + _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Leave ``value`` where ``expected`` stands, "" for nothing; returns what stands then."""
        self.operations["compare_set"] += 1
        now = self._server.values.get(key)
        if now is None and expected:
            return self._read(_bytes(expected))
        if now is None or now == _bytes(expected):
            self._server.put(key, _bytes(value))
        return self._read(self._server.values[key])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of ``keys``, all of which are there."""
        self.operations["multi_get"] += len(keys)
        return [self._read(self._server.values[key]) for key in keys]

    def delete_key(self, key: str) -> bool:
        """Remove a key; tells whether it was there."""
        self.operations["delete_key"] += 1
        return self._server.values.pop(key, None) is not None

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Refuse to block the only thread that runs: see `tell`."""
        raise NotImplementedError(f"a wait for {list(keys)} outside of the simulated clock")

    def tell(self, key: str, ring: Callable[[], None]) -> None:
        """Wait in the server: ``ring`` is called when ``key`` is there."""
        self.operations["wait"] += 1
        self._server.tell(key, ring)

    def _read(self, value: bytes) -> bytes:
        self.bytes_read += len(value)
        return value


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
