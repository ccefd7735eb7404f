"""A simulated device: tensors of the CPU that must be used as those of a GPU are.

Memory of the device is all that is made without a device, or with one that has an index
(``torch.device("cpu", 0)``, which is what such tensors say of themselves); ``"cpu"`` alone is the
host. Operators run at once, in the order of the program, and give the numbers of a CPU. What a GPU
would make of the program is followed beside them: on which stream each runs, what that comes after,
and where the host has to wait.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint

from meshwright.comm.dtensors import shard_view
from meshwright.comm.dtensors.shard_view import ShardView
from meshwright.torch_internals.tensors import TorchDispatchMode
from simulated.memory import Fault, Memory, Place, caller
from simulated.operators import calls_a_group, tensors_in, uses_of
from simulated.streams import DeviceTime, Event, Stamp, WorkLine

HOST = torch.device("cpu")
DEVICE = torch.device("cpu", 0)
"""The device as tensors name it."""
_COPIES = frozenset({"copy_", "_to_copy", "clone", "_copy_from", "_foreach_copy_"})
_OF_THE_HOST = ("from_numpy", "frombuffer")
"""Functions of torch whose tensors lie where their bytes are; modes are not told of them."""
_SKIPPED = ("/torch/", "contextlib.py", "/simulated/device.py", "/simulated/transport.py")


_MAKERS = frozenset(
    {
        *(torch.tensor, torch.as_tensor, torch.zeros, torch.ones, torch.empty, torch.full),
        *(torch.arange, torch.linspace, torch.eye, torch.rand, torch.randn, torch.randint),
        *(torch.randperm, torch.empty_strided, torch.scalar_tensor),
    }
)
"""Functions that make tensors of the default device. In the library that is the host."""


class SimulationError(AssertionError):
    """The faults of a program under the simulated device."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A call in which the host has waited for the device."""

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} at {self.where}"


class _Thread(threading.local):
    """The state of one thread of the host."""

    stream: WorkLine | None = None
    host: WorkLine | None = None
    makes_host: bool | None = None
    """Where what an operator makes lies, if it was said."""
    is_late: bool = False
    """Whether a copy between host and device need not have ended when the call has."""


class SimulatedDevice:
    """One device, its streams, its memory, and the host beside it."""

    def __init__(self, *, lag: int = 8) -> None:
        """``lag``: how many things the host does until the device has done what is queued."""
        self.faults: list[Fault] = []
        self.stops: list[Stop] = []
        self.memory = Memory(self.faults.append, lambda: self.host)
        self._time = DeviceTime(lag)
        self._first = WorkLine("the first stream")
        self._thread = _Thread()

    # ------------------------------------------------------------------------ streams

    @property
    def current(self) -> WorkLine:
        """The stream on which this thread's work runs."""
        return self._thread.stream or self._first

    @property
    def host(self) -> WorkLine:
        """The work of this thread itself."""
        if self._thread.host is None:
            self._thread.host = WorkLine(f"thread {threading.current_thread().name}")
        return self._thread.host

    @contextmanager
    def use(self, stream: WorkLine) -> Iterator[None]:
        """Work issued inside runs on ``stream``."""
        before, self._thread.stream = self._thread.stream, stream
        try:
            yield
        finally:
            self._thread.stream = before

    def record(self, name: str, stream: WorkLine | None = None) -> Event:
        """Mark what is queued on ``stream`` by now."""
        stream = stream or self.current
        stream.wait_for(self.host)
        return Event(name, stream.snapshot(), self._time.arrival())

    def is_passed(self, event: Event) -> bool:
        """Ask, without waiting, whether the device has passed ``event``."""
        self._time.go_on()
        if self._time.now < event.passes_at:
            return False
        self.host.wait_until(event.clock)
        return True

    def synchronize(self, event: Event | None = None) -> None:
        """Let the host wait for ``event``, or for all that its stream was given."""
        where = caller(_SKIPPED)
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
    ) -> tuple[Stamp, Place]:
        """Queue work on ``line``, the current stream when None, behind what this thread knows."""
        line = line or self.current
        line.wait_for(self.host)
        place = Place(what, line, caller(_SKIPPED))
        stamp = line.advance()
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                for part in tensors_in(tensor):
                    if not self.memory.is_known(part):
                        self.memory.allocate(part.untyped_storage(), self.current, is_host=False)
                    self.memory.access(part, line, stamp, place, writes=is_write)
        self._time.go_on()
        return stamp, place

    def ran(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: object,
    ) -> None:
        """Take in a call of an operator, which has given ``result``."""
        uses = uses_of(func, args, kwargs, result)
        used = [*uses.reads, *uses.writes]
        if not used and not uses.makes:
            return
        name = str(func)
        where = {self.memory.is_host(tensor) for tensor in used}
        makes_host = self._thread.makes_host
        if makes_host is None:
            makes_host = where == {True}
        for tensor in uses.makes:
            if not self.memory.is_known(tensor):
                self.memory.allocate(tensor.untyped_storage(), self.current, is_host=makes_host)
        if calls_a_group(func):
            return
        if uses.makes:
            where.add(makes_host)
        line = self.host if where == {True} else self.current
        _, place = self.launch(name, uses.reads, [*uses.writes, *uses.makes], line)
        if where == {True}:
            return
        is_copy = func._schema.name.split("::")[-1] in _COPIES
        if len(where) == 2 and not is_copy and any(self._is_stray(tensor) for tensor in used):
            self.faults.append(Fault("mixed devices", f"{place} has tensors of host and device"))
        is_late = (
            self._thread.is_late
            or bool(kwargs.get("non_blocking"))
            or any(a is True for a in args[2:3])
        )
        if uses.stops or (is_copy and len(where) == 2 and not (is_late and self._is_pinned(used))):
            self.stop(place)

    def stop(self, place: Place) -> None:
        """Let the host wait for what it has just launched."""
        self.stops.append(Stop(place.what, place.where))
        self.host.wait_for(place.line)

    def _is_stray(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0 and self.memory.is_host(tensor)

    def _is_pinned(self, tensors: Sequence[torch.Tensor]) -> bool:
        return all(self.memory.is_pinned(tensor) for tensor in tensors)

    # ------------------------------------------------------------- what tensors are asked

    @contextmanager
    def making(self, *, host: bool, is_late: bool = False) -> Iterator[None]:
        """What operators make inside lies on the host, or on the device."""
        thread = self._thread
        before = thread.makes_host, thread.is_late
        thread.makes_host, thread.is_late = host, is_late
        try:
            yield
        finally:
            thread.makes_host, thread.is_late = before

    def take_host(self, value: object, *, is_pinned: bool) -> None:
        """Know tensors that were made for the host."""
        for tensor in tensors_in(value):
            if not self.memory.is_known(tensor):
                storage = tensor.untyped_storage()
                self.memory.allocate(storage, self.current, is_host=True)
            if is_pinned:
                self.memory.pin(tensor)

    def moved(self, tensor: torch.Tensor, *, to_host: bool, is_late: bool) -> torch.Tensor:
        """Copy ``tensor`` to the other memory, for autograd, too."""
        return _Moved.apply(tensor, self, to_host, is_late)

    def forbid_stops(self) -> contextlib.AbstractContextManager[None]:
        """Raise `SimulationError` at the end of the block where the host has waited in it."""
        return self._without_stops()

    @contextmanager
    def _without_stops(self) -> Iterator[None]:
        first = len(self.stops)
        yield
        if stops := self.stops[first:]:
            raise SimulationError(f"{len(stops)} host stops: " + "; ".join(map(str, stops)))

    def check(self) -> None:
        """Raise `SimulationError` where there was a fault."""
        if self.faults:
            shown = "\n".join(map(str, self.faults[:20]))
            raise SimulationError(f"{len(self.faults)} faults under the simulated device:\n{shown}")


class _Moved(torch.autograd.Function):
    """A copy between host and device; its gradient goes the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        device: SimulatedDevice,
        to_host: bool,
        is_late: bool,
    ) -> torch.Tensor:
        ctx.device, ctx.to_host = device, to_host
        with device.making(host=to_host, is_late=is_late):
            return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        with ctx.device.making(host=not ctx.to_host):
            return gradient.clone(), None, None, None


def _is_of_library(frame: FrameType | None) -> bool:
    """Check that `torch.distributed` calls from ``frame``, or ours, its harness aside."""
    if frame is not None and "/torch/nn/modules/" in frame.f_code.co_filename:
        return False  # somebody moves a module
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/distributed/" in name:
            return True
        if "/torch/" not in name:
            return "/src/meshwright/" in name and "/meshwright/testing/" not in name
        frame = frame.f_back
    return False


def inner_of(tensor: torch.Tensor) -> torch.Tensor:
    """Find the first of the tensors that ``tensor``, of a class of its own, is made of."""
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    found: torch.Tensor = getattr(tensor, names[0])
    return found


def _is_plain(kind: type) -> bool:
    """Check that tensors of ``kind`` have memory of their own."""
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


class _Operators(TorchDispatchMode):
    """Sees each operator that runs on plain tensors."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if FakeTensor in types:
            return func(*args, **(kwargs or {}))  # there is nothing behind it
        if not all(map(_is_plain, types)):
            return NotImplemented  # its own operators come here one by one
        with torch._C.DisableTorchFunction():
            result = func(*args, **(kwargs or {}))
        self._device.ran(func, args, kwargs or {}, result)
        return result


class _Functions(TorchFunctionMode):
    """Sees what is said of devices, before torch takes all that is here for one CPU."""

    def __init__(self, device: SimulatedDevice, *, is_written_for_a_cpu: bool) -> None:
        super().__init__()
        self._device = device
        self._is_written_for_a_cpu = is_written_for_a_cpu
        self._handlers: dict[Any, Any] = {
            torch.Tensor.device.__get__: self._where,
            torch.Tensor.cpu: self._cpu,
            torch.Tensor.to: self._to,
            torch.Tensor.tolist: self._read,
            torch.Tensor.numpy: self._read,
            torch.Tensor.pin_memory: self._pin,
            torch.Tensor.is_pinned: self._is_pinned,
        }

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        handler = self._handlers.get(func)
        if handler is not None and (_is_plain(type(args[0])) or handler == self._where):
            return handler(func, args, kwargs)
        if isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)  # its device is what torch takes for one CPU
        asked = kwargs.get("device")
        if asked is None and func in _MAKERS and _is_of_library(sys._getframe(1)):
            asked = HOST
        if asked is None or torch.device(asked).type != "cpu":
            return func(*args, **kwargs)
        is_host = torch.device(asked).index is None
        if is_host and self._is_written_for_a_cpu:
            is_host = _is_of_library(sys._getframe(1))
        kwargs["device"] = HOST
        with self._device.making(host=is_host):
            result = func(*args, **kwargs)
        if is_host:
            # Some are filled by no operator.
            self._device.take_host(result, is_pinned=bool(kwargs.get("pin_memory")))
        return result

    def _where(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Name the device of a tensor."""
        found, tensor = func(*args), args[0]
        if found.type != "cpu":
            return found
        if isinstance(tensor, UninitializedTensorMixin):
            return found
        while not _is_plain(type(tensor)):
            tensor = tensor.local if isinstance(tensor, ShardView) else inner_of(tensor)
        return found if self._device.memory.is_host(tensor) else DEVICE

    def _cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Move a tensor to the host."""
        tensor = args[0]
        if self._device.memory.is_host(tensor) or tensor.device.type != "cpu":
            return func(*args, **kwargs)
        return self._device.moved(tensor, to_host=True, is_late=False)

    def _to(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Move a tensor to the device, or to the host, and give it another dtype."""
        tensor, *rest = args
        given, named = list(rest), dict(kwargs)
        target: torch.device | None = None
        if isinstance(named.get("other"), torch.Tensor):
            given, other = [named.pop("other"), *given], None
        if given and isinstance(given[0], torch.Tensor):
            other = given.pop(0)
            target = self._where(torch.Tensor.device.__get__, (other,), {})  # type: ignore[attr-defined]
            given.insert(0, other.dtype)
        elif given and isinstance(given[0], (str, torch.device)):
            target = torch.device(given.pop(0))
        elif named.get("device") is not None:
            target = torch.device(named.pop("device"))
        else:
            return func(*args, **kwargs)
        if target.type != "cpu" or tensor.device.type != "cpu":
            return func(*args, **kwargs)
        is_late = bool(named.pop("non_blocking", False)) or True in given[1:2]
        is_host, to_host = self._device.memory.is_host(tensor), target.index is None
        dtype = given[0] if given else named.get("dtype")
        copies = bool(named.get("copy")) or True in given[2:3]
        found = tensor if dtype is None or dtype is tensor.dtype else func(tensor, dtype)
        if is_host != to_host:
            return self._device.moved(found, to_host=to_host, is_late=is_late)
        return found.clone() if copies and found is tensor else found

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Let the host read a tensor."""
        device, tensor = self._device, args[0].detach()
        if device.memory.is_host(tensor):
            device.launch(func.__name__, [tensor], line=device.host)
        elif tensor.device.type == "cpu":
            _, place = device.launch(func.__name__, [tensor])
            device.stop(place)
        return func(*args, **kwargs)

    def _pin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Copy a tensor of the host to memory that the device reaches by itself."""
        with self._device.making(host=True):
            found = args[0].clone()
        self._device.memory.pin(found)
        return found

    def _is_pinned(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Tell whether the device reaches a tensor of the host by itself."""
        return self._device.memory.is_host(args[0]) and self._device.memory.is_pinned(args[0])


@contextmanager
def simulated(*, lag: int = 8, is_written_for_a_cpu: bool = False) -> Iterator[SimulatedDevice]:
    """Run the block on a simulated device. Raises `SimulationError` at its end, after a fault.

    Where the block ``is_written_for_a_cpu``, what it makes on ``"cpu"`` is the device's, too.
    """
    device = SimulatedDevice(lag=lag)
    functions = _Functions(device, is_written_for_a_cpu=is_written_for_a_cpu)
    with _seen_storages(device), _seen_backward(functions), functions, _Operators(device):
        yield device
    device.check()


@contextmanager
def _seen_backward(functions: _Functions) -> Iterator[None]:
    """See what hooks call in a backward pass: a mode that has handled a call is not told more."""
    engine: Any = torch.autograd
    run = engine._engine_run_backward
    checks: Any = checkpoint._allowed_determinism_checks_to_fns
    look = checks["default"]

    def looked(tensor: torch.Tensor) -> dict[str, Any]:
        # Modes are not there in the hooks of every call, so its device is not always ours.
        return {name: value for name, value in look(tensor).items() if name != "device"}

    def seen(*args: Any, **kwargs: Any) -> Any:
        if functions in _get_current_function_mode_stack():
            return run(*args, **kwargs)
        with functions:
            return run(*args, **kwargs)

    engine._engine_run_backward = seen
    checks["default"] = looked
    try:
        yield
    finally:
        checks["default"] = look
        engine._engine_run_backward = run


@contextmanager
def _seen_storages(device: SimulatedDevice) -> Iterator[None]:
    """See what no mode is told of: memory that comes and goes, and tensors of bytes."""
    kind: Any = torch.UntypedStorage
    resize = kind.resize_
    makers = {name: getattr(torch, name) for name in _OF_THE_HOST}

    def resized(storage: Any, nbytes: int) -> Any:
        before = storage.nbytes()
        if nbytes < before:
            device.memory.free(storage, caller(_SKIPPED))
        result = resize(storage, nbytes)
        if nbytes != before:
            device.memory.restore(storage, nbytes, device.current)
        return result

    def made(maker: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        found = maker(*args, **kwargs)
        device.take_host(found, is_pinned=False)
        return found

    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked = kwargs.pop("device", None)
        is_ours = asked is not None and torch.device(asked) == DEVICE
        return wrap(*args, device=HOST if is_ours else asked, **kwargs)

    class MarkedPoint:
        """What `torch.cpu.Event` is here."""

        def record(self, stream: WorkLine) -> None:
            self._event = device.record("an event", stream)

        def query(self) -> bool:
            return device.is_passed(self._event)

        def synchronize(self) -> None:
            device.synchronize(self._event)

    module: Any = torch.cpu
    marks = module.Event, module.current_stream
    module.Event, module.current_stream = MarkedPoint, lambda _: device.current
    tensors: Any = torch.Tensor
    wrap = tensors._make_wrapper_subclass
    tensors._make_wrapper_subclass = staticmethod(wrapper)
    views: Any = shard_view
    views.make_wrapper_subclass = wrapper
    kind.resize_ = resized
    for name, maker in makers.items():
        setattr(torch, name, partial(made, maker))
    try:
        yield
    finally:
        module.Event, module.current_stream = marks
        kind.resize_ = resize
        tensors._make_wrapper_subclass = staticmethod(wrap)
        views.make_wrapper_subclass = wrap
        for name, maker in makers.items():
            setattr(torch, name, maker)
