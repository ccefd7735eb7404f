"""A simulated device: CPU tensors that must be used as if they were on a GPU.

Tensors made without a device, or on one with an index (``torch.device("cpu", 0)``, which is also
their ``device``), are on the simulated device; ``"cpu"`` alone is the host. Operators run
immediately on the CPU, in program order. The simulation records what a GPU would do: on which
stream each operator runs, what it is ordered after, and where the host must wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from meshwright.testing.simulated.memory import Fault, Memory, OperationPlace, caller
from meshwright.testing.simulated.operators import calls_a_group, lacks_memory, tensors_in, uses_of
from meshwright.testing.simulated.streams import DeviceTime, Event, Stamp, WorkLine
from meshwright.torch_internals.tensors import OpOverload, schema_of

T = TypeVar("T")
HOST = torch.device("cpu")
DEVICE = torch.device("cpu", 0)
"""The ``device`` of tensors on the simulated device."""
_COPIES = frozenset(
    {"aten::copy_", "aten::_to_copy", "aten::clone", "aten::_copy_from", "aten::_foreach_copy_"}
)


class SimulationError(AssertionError):
    """Faults of a program on the simulated device."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A call in which the host waited for the device."""

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} at {self.where}"


class _Thread(threading.local):
    """The state of one host thread."""

    def __init__(self) -> None:
        self.host = WorkLine(f"thread {threading.current_thread().name}")
        self.stream: WorkLine | None = None
        self.makes_host: bool | None = None
        """Whether results of operators are on the host; None if that depends on their inputs."""
        self.is_second = False
        """True in the thread of a backward pass."""
        self.is_late = False
        """True where a copy between host and device may still run when its call returns."""

    def follow(self, host: WorkLine, stream: WorkLine | None) -> None:
        """Continue from the state of another host thread, which waits for this one."""
        self.stream, self.is_second = stream, True
        self.host.wait_for(host)

    @contextmanager
    def on(self, stream: WorkLine) -> Iterator[None]:
        """Queue on ``stream`` within the block."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def making(self, makes_host: bool, is_late: bool) -> Iterator[None]:
        """Place results of the block on the host (or on the device)."""
        before = self.makes_host, self.is_late
        self.makes_host, self.is_late = makes_host, is_late
        try:
            yield
        finally:
            self.makes_host, self.is_late = before


class SimulatedDevice:
    """One device, its streams, its memory, and its host."""

    def __init__(self, *, lag: int = 8) -> None:
        """``lag``: after how many further host operations the device has done what is queued."""
        self.faults: list[Fault] = []
        """Uses of tensors that would be errors on a GPU."""
        self.stops: list[Stop] = []
        """The calls in which the host waited for the device."""
        self.memory = Memory(self.faults.append, lambda: self.host)
        self._time = DeviceTime(lag)
        self._first = WorkLine("the first stream")
        self._kept: list[tuple[Event, Sequence[torch.Tensor]]] = []
        self._thread = _Thread()

    # ------------------------------------------------------------------------ streams

    @property
    def current(self) -> WorkLine:
        """The stream on which this thread's work runs."""
        return self._thread.stream or self._first

    @property
    def host(self) -> WorkLine:
        """The work of this thread on the host."""
        return self._thread.host

    def use(self, stream: WorkLine) -> contextlib.AbstractContextManager[None]:
        """Run the work issued within the block on ``stream``."""
        return self._thread.on(stream)

    def in_second_thread(self, call: Callable[[], T]) -> T:
        """Run ``call`` in a second host thread on the current stream, and wait for it.

        When called in the second thread, run it there.
        """
        first = self._thread
        if first.is_second:
            return call()
        host, stream = first.host, first.stream
        found: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            mine = self._thread
            mine.follow(host, stream)
            try:
                found.append(call())
            except BaseException as error:
                errors.append(error)
            host.wait_for(mine.host)

        thread = threading.Thread(target=run, name="backward", daemon=True)
        thread.start()
        thread.join()
        if errors:
            raise errors.pop()
        return found.pop()

    def record(self, name: str, stream: WorkLine | None = None) -> Event:
        """Record an event after everything queued on ``stream`` so far."""
        stream = stream or self.current
        stream.wait_for(self.host)
        return Event(name, stream.snapshot(), self._time.arrival())

    def is_passed(self, event: Event) -> bool:
        """Check, without waiting, whether the device has passed ``event``."""
        self._time.now += 1
        if self._time.now < event.passes_at:
            return False
        self.host.wait_until(event.clock)
        return True

    def keep(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        """Keep ``tensors`` alive until the device has passed ``event``.

        Drops tensors kept by earlier calls, in order, up to an event that has not passed. c10d
        does this for an operation's tensors, even if nobody waits or the group is destroyed.
        """
        while self._kept and self.is_passed(self._kept[0][0]):
            self._kept.pop(0)
        self._kept.append((event, tensors))

    def synchronize(self, event: Event | None = None) -> None:
        """Make the host wait for ``event``, or for everything queued on the current stream."""
        where = caller()
        name = self.current.name if event is None else event.name
        self.stops.append(Stop(f"wait for {name}", where))
        self.host.wait_until(self.current.snapshot() if event is None else event.clock)

    # ----------------------------------------------------------------------- launches

    def launch(
        self,
        what: str,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        line: WorkLine | None = None,
    ) -> tuple[Stamp, OperationPlace]:
        """Queue work on ``line`` (default: current stream), after all that this thread knows of."""
        line = line or self.current
        line.wait_for(self.host)
        place = OperationPlace(what, line, caller())
        stamp = line.advance()
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                for part in tensors_in(tensor):
                    self.memory.block(part, self.current)
                    self.memory.access(part, line, stamp, place, writes=is_write)
        self._time.now += 1
        return stamp, place

    def begins(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_view: bool = False,
    ) -> None:
        """Raise `SimulationError` for the use of freed memory, which would crash the process.

        Some views of freed memory are valid; for the others, torch itself raises.
        """
        if lacks_memory(func, args, kwargs, is_view=is_view):
            place = OperationPlace(str(func), self.current, caller())
            fault = Fault("no memory", f"{place} uses memory that was given back")
            self.faults.append(fault)
            raise SimulationError(str(fault))

    def ran(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: object,
    ) -> None:
        """Record a call of an operator that returned ``result``."""
        if any(isinstance(value, torch.UntypedStorage) for value in args):
            for tensor in tensors_in(result):
                if not self.memory.is_known(tensor):
                    self.memory.share(tensor)
        uses = uses_of(func, args, kwargs, result)
        used = [*uses.reads, *uses.writes]
        if not used and not uses.makes:
            return
        name = str(func)
        where = {self.memory.is_host(tensor) for tensor in used}
        makes_host = self._thread.makes_host
        if makes_host is None:
            makes_host = (where or {self.memory.is_host(tensor) for tensor in uses.like}) == {True}
        for tensor in uses.makes:
            if not self.memory.is_known(tensor):
                self.memory.allocate(tensor, self.current, is_host=makes_host)
        if calls_a_group(func):
            return
        if uses.makes:
            where.add(makes_host)
        line = self.host if where == {True} else self.current
        _, place = self.launch(name, uses.reads, [*uses.writes, *uses.makes], line)
        if where == {True}:
            return
        is_copy = schema_of(func).name in _COPIES
        if len(where) == 2 and not is_copy and any(self._is_stray(tensor) for tensor in used):
            self.faults.append(Fault("mixed devices", f"{place} has tensors of host and device"))
        is_late = (
            self._thread.is_late
            or bool(kwargs.get("non_blocking"))
            or any(a is True for a in args[2:3])
        )
        if uses.stops or (is_copy and len(where) == 2 and not (is_late and self._is_pinned(used))):
            self.stop(place)

    def stop(self, place: OperationPlace) -> None:
        """Make the host wait for the work at ``place``, which it just launched."""
        self.stops.append(Stop(place.what, place.where))
        self.host.wait_for(place.line)

    def _is_stray(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0 and self.memory.is_host(tensor)

    def _is_pinned(self, tensors: Sequence[torch.Tensor]) -> bool:
        return all(self.memory.is_pinned(tensor) for tensor in tensors)

    # ------------------------------------------------------------- what tensors are asked

    def making(
        self, *, host: bool, is_late: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Place the results of operators within the block on the host, or on the device."""
        return self._thread.making(host, is_late)

    def take_host(self, value: object, *, is_pinned: bool) -> None:
        """Register tensors that were made on the host."""
        for tensor in tensors_in(value):
            if not self.memory.is_known(tensor):
                self.memory.allocate(tensor, self.current, is_host=True)
            if is_pinned:
                self.memory.pin(tensor)

    def moved(self, tensor: torch.Tensor, *, to_host: bool, is_late: bool) -> torch.Tensor:
        """Copy ``tensor`` to the other memory; its gradient is copied back."""
        with self.making(host=to_host, is_late=is_late):
            found = tensor.clone()
        if found.requires_grad:
            found.register_hook(partial(self.moved, to_host=not to_host, is_late=False))
        return found

    def forbid_stops(self) -> contextlib.AbstractContextManager[None]:
        """Raise `SimulationError` at the end of the block if the host waited in it."""
        return self._without_stops()

    @contextmanager
    def _without_stops(self) -> Iterator[None]:
        first = len(self.stops)
        yield
        if stops := self.stops[first:]:
            raise SimulationError(f"{len(stops)} host stops: " + "; ".join(map(str, stops)))

    def check(self) -> None:
        """Raise `SimulationError` if there was a fault."""
        if self.faults:
            shown = "\n".join(map(str, self.faults[:20]))
            raise SimulationError(f"{len(self.faults)} faults under the simulated device:\n{shown}")
