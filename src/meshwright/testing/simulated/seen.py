"""The hooks into torch through which a simulated device observes a program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode

import meshwright
from meshwright.comm.dtensors import shard_view
from meshwright.comm.dtensors.shard_view import ShardView
from meshwright.testing.simulated.device import DEVICE, HOST, SimulatedDevice
from meshwright.testing.simulated.memory import caller
from meshwright.testing.simulated.operators import is_uninitialized, is_unversioned
from meshwright.testing.simulated.streams import Event, WorkLine
from meshwright.torch_internals.simulation import (
    having_modes,
    operator_modes,
    recomputing_on_any_device,
    replaced,
    running_backward_by,
    without_functions,
    wrapping_by,
)
from meshwright.torch_internals.tensors import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    function_modes,
)

Call = Callable[..., Any]
"""A function of torch, or an operator."""
_LIBRARY = f"{Path(meshwright.__file__).parent}/"
_HARNESS = f"{_LIBRARY}testing/"
_OF_THE_HOST = ("from_numpy", "frombuffer")
"""Functions of torch that wrap host memory; modes do not see them."""
_MAKERS = frozenset(
    {
        *(torch.tensor, torch.as_tensor, torch.zeros, torch.ones, torch.empty, torch.full),
        *(torch.arange, torch.linspace, torch.eye, torch.rand, torch.randn, torch.randint),
        *(torch.randperm, torch.empty_strided, torch.scalar_tensor),
    }
)
"""Functions that make tensors on the default device. In the library, that is the host."""
_COPIERS = frozenset({torch.tensor, torch.as_tensor})
"""The makers that copy values from the host."""


_MODULES = ("/torch/nn/modules/", "/meshwright/recipes/language_model.py")


def _is_of_library(frame: FrameType | None) -> bool:
    """Check whether ``frame`` is in `torch.distributed`, `torch.optim`, or ours but for testing."""
    if frame is not None and any(file in frame.f_code.co_filename for file in _MODULES):
        return False  # a user moves a module
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/distributed/" in name or "/torch/optim/" in name:
            return True
        if "/torch/" not in name:
            return name.startswith(_LIBRARY) and not name.startswith(_HARNESS)
        frame = frame.f_back
    return False


def inner_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first inner tensor of ``tensor``, a wrapper subclass."""
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    found: torch.Tensor = getattr(tensor, names[0])
    return found


def _is_plain(kind: type) -> bool:
    """Check whether tensors of ``kind`` have memory of their own, unlike wrapper subclasses."""
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


class _Operators(TorchDispatchMode):
    """Dispatch mode: reports each operator on plain tensors to the device."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if FakeTensor in types:
            return func(*args, **(kwargs or {}))  # no memory is used
        if not all(map(_is_plain, types)):
            return NotImplemented  # its inner operators arrive here one by one
        self._device.begins(func, args, kwargs or {})
        try:
            with without_functions():
                result = func(*args, **(kwargs or {}))
        except RuntimeError:
            self._device.begins(func, args, kwargs or {}, is_view=True)
            raise
        if is_unversioned(func):
            increment_version(args[0])
        self._device.ran(func, args, kwargs or {}, result)
        return result


class _Functions(TorchFunctionMode):
    """Function mode: handles devices, before torch treats all of it as one CPU."""

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
            torch.Tensor.__repr__: self._read,
            torch.Tensor.__deepcopy__: self._copy,
            torch.Tensor.pin_memory: self._pin,
            torch.Tensor.is_pinned: self._is_pinned,
            torch.Tensor.__setitem__: self._set_item,
        }

    def __torch_function__(
        self,
        func: Call,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        handler = self._handlers.get(func)
        if handler is not None and (_is_plain(type(args[0])) or handler == self._where):
            return handler(func, args, kwargs)
        if isinstance(func, OpOverload):
            return func(*args, **kwargs)  # here torch's own device, the one CPU, is right
        asked = kwargs.get("device")
        if asked is None and func in _MAKERS and _is_of_library(sys._getframe(1)):
            asked = HOST
        if asked is None or torch.device(asked).type != "cpu":
            return func(*args, **kwargs)
        is_host = self._is_host(torch.device(asked), sys._getframe(1))
        kwargs["device"] = HOST
        is_pinned = bool(kwargs.pop("pin_memory", False))  # torch has none to give without a GPU
        with self._device.making(host=is_host):
            result = func(*args, **kwargs)
        if is_host:
            # No operator fills some of these, so they are registered here.
            self._device.take_host(result, is_pinned=is_pinned)
        elif func in _COPIERS:
            self._stop_in(func, result)
        return result

    def _is_host(self, asked: torch.device, frame: FrameType) -> bool:
        """Check whether ``asked``, requested in ``frame``, means the host."""
        return asked.index is None and (not self._is_written_for_a_cpu or _is_of_library(frame))

    def _where(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        tensor = args[0]
        found: torch.device = func(tensor)
        if found.type != "cpu":
            return found
        if is_uninitialized(tensor):
            return found
        while not _is_plain(type(tensor)):
            tensor = tensor.local if isinstance(tensor, ShardView) else inner_of(tensor)
        return found if self._device.memory.is_host(tensor) else DEVICE

    def _cpu(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        tensor = args[0]
        if self._device.memory.is_host(tensor) or tensor.device.type != "cpu":
            return func(*args, **kwargs)
        return self._device.moved(tensor, to_host=True, is_late=False)

    def _to(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Move a tensor to the device or the host, and convert its dtype."""
        tensor, *rest = args
        given, named = list(rest), dict(kwargs)
        if isinstance(named.get("other"), torch.Tensor):
            given, other = [named.pop("other"), *given], None
        if given and isinstance(given[0], torch.Tensor):
            other = given.pop(0)
            target = self._where(torch.Tensor.device.__get__, (other,), {})
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
        is_host = self._device.memory.is_host(tensor)
        to_host = self._is_host(target, sys._getframe(2))
        dtype = given[0] if given else named.get("dtype")
        copies = bool(named.get("copy")) or True in given[2:3]
        found = tensor if dtype is None or dtype is tensor.dtype else func(tensor, dtype)
        if is_host != to_host:
            return self._device.moved(found, to_host=to_host, is_late=is_late)
        return found.clone() if copies and found is tensor else found

    def _read(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        device, tensor = self._device, args[0].detach()
        if device.memory.is_host(tensor):
            device.launch(func.__name__, [tensor], line=device.host)
        elif tensor.device.type == "cpu":
            _, place = device.launch(func.__name__, [tensor])
            device.stop(place)
        return func(*args, **kwargs)

    def _set_item(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Write to a part of a tensor; a single number is copied from the host."""
        tensor, key, value = args
        place = key if isinstance(key, tuple) else (key,)
        is_one = len(place) == tensor.dim() and all(type(index) is int for index in place)
        result = func(*args, **kwargs)
        if (
            is_one
            and not isinstance(value, torch.Tensor)
            and not self._device.memory.is_host(tensor)
        ):
            self._stop_in(func, tensor)
        return result

    def _stop_in(self, func: Call, tensor: torch.Tensor) -> None:
        """Make the host wait for a copy from unpinned host memory to ``tensor``."""
        _, place = self._device.launch(func.__name__, [tensor.detach()])
        self._device.stop(place)

    def _copy(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Copy a tensor within its memory; torch's deep copy of a host tensor runs no operator."""
        tensor = args[0]
        if not self._device.memory.is_host(tensor):
            return func(*args, **kwargs)
        with self._device.making(host=True):
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    def _pin(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        with self._device.making(host=True):
            found = args[0].clone()
        self._device.memory.pin(found)
        return found

    def _is_pinned(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return self._device.memory.is_host(args[0]) and self._device.memory.is_pinned(args[0])


@contextmanager
def simulated(*, lag: int = 8, is_written_for_a_cpu: bool = False) -> Iterator[SimulatedDevice]:
    """Run the block on a simulated device. Raises `SimulationError` at its end if it had a fault.

    ``lag`` is the number of host operations by which the device is behind. If the block
    ``is_written_for_a_cpu``, tensors that it makes on ``"cpu"``, or moves there by ``to``, are on
    the device too.
    """
    device = SimulatedDevice(lag=lag)
    functions = _Functions(device, is_written_for_a_cpu=is_written_for_a_cpu)
    with ExitStack() as stack:
        for seen in (
            _seen_storages(device),
            _seen_events(device),
            _seen_backward(functions, device),
        ):
            stack.enter_context(seen)
        stack.enter_context(functions)
        stack.enter_context(_Operators(device))
        yield device
    device.check()


@contextmanager
def _seen_backward(functions: _Functions, device: SimulatedDevice) -> Iterator[None]:
    """Run backward passes in a second thread, as autograd does for a GPU, and observe them.

    That thread gets the modes of the first, and our function mode again, which torch removes from
    the stack while it handles a call.
    """

    def seen(run: Call, roots: Sequence[Any], *args: object, **kwargs: object) -> object:
        modes = function_modes()
        if functions not in modes:
            modes = [*modes, functions]

        def backward() -> object:
            with having_modes(operators, modes):
                return run(roots, *args, **kwargs)

        operators = operator_modes()
        return device.in_second_thread(backward)

    with running_backward_by(seen), recomputing_on_any_device():
        yield


@contextmanager
def _seen_storages(device: SimulatedDevice) -> Iterator[None]:
    """Observe what no mode sees: memory that is resized, and tensors that wrap host bytes."""

    def resized(
        resize: Callable[..., object], storage: torch.UntypedStorage, nbytes: int
    ) -> object:
        before = storage.nbytes()
        if nbytes < before:
            device.memory.free(storage, caller())
        result = resize(storage, nbytes)
        if nbytes != before:
            device.memory.restore(storage, nbytes, device.current)
        return result

    def made(maker: Callable[..., torch.Tensor], *args: object, **kwargs: object) -> torch.Tensor:
        found = maker(*args, **kwargs)
        device.take_host(found, is_pinned=False)
        return found

    def wrapper(wrap: Callable[..., torch.Tensor], *args: object, **kwargs: Any) -> torch.Tensor:
        asked = kwargs.pop("device", None)
        is_ours = asked is not None and torch.device(asked) == DEVICE
        return wrap(*args, device=HOST if is_ours else asked, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(replaced(torch.UntypedStorage, "resize_", resized))
        stack.enter_context(wrapping_by(wrapper))
        stack.enter_context(replaced(shard_view, "make_wrapper_subclass", wrapper))
        for name in _OF_THE_HOST:
            stack.enter_context(replaced(torch, name, made))
        yield


@contextmanager
def _seen_events(device: SimulatedDevice) -> Iterator[None]:
    """Replace torch's events, streams and current device by those of ``device``.

    Random numbers come from the host's generator.
    """

    def event(_: object) -> _MarkedPoint:
        return _MarkedPoint(device)

    def stream(_: object, __: object = None) -> WorkLine:
        return device.current

    def side(_: object, __: object = None, *, priority: int = 0) -> WorkLine:
        return WorkLine("a side stream")

    def used(_: object, line: WorkLine) -> AbstractContextManager[None]:
        return device.use(line)

    def current(_: object) -> str:
        return str(DEVICE)

    def none(_: object) -> bool:
        return False

    def most(_: object, __: object = None) -> int:
        return device.memory.peak

    def get_state(_: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, _: object = None) -> None:
        torch.set_rng_state(state)

    with ExitStack() as stack:
        for name, ours in (
            ("Event", event),
            ("current_stream", stream),
            ("Stream", side),
            ("stream", used),
            ("current_device", current),
        ):
            stack.enter_context(replaced(torch.cpu, name, ours))
        stack.enter_context(replaced(torch.accelerator, "max_memory_allocated", most))
        # Otherwise c10d would make a mesh's groups on a real GPU of the machine.
        stack.enter_context(replaced(torch.accelerator, "is_available", none))
        stack.enter_context(replaced(torch.cuda, "is_available", none))
        for name, host in (("get_rng_state", get_state), ("set_rng_state", set_state)):
            stack.enter_context(patch.object(torch.cpu, name, host, create=True))
        yield


class _MarkedPoint:
    """The replacement of `torch.cpu.Event`."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._event: Event | None = None

    def record(self, stream: WorkLine | None = None) -> None:
        """Record the work queued so far on ``stream`` (default: the current one)."""
        self._event = self._device.record("an event", stream)

    def wait(self) -> None:
        if self._event is not None:
            self._device.current.wait_until(self._event.clock)

    def query(self) -> bool:
        return self._event is None or self._device.is_passed(self._event)

    def synchronize(self) -> None:
        if self._event is not None:
            self._device.synchronize(self._event)
