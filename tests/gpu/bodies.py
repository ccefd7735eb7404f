"""The bodies of the rank tests on GPUs: ``ON_GPUS=1 pytest tests/...``.

They are written for a CPU. What they make, and say of a device, means the rank's GPU here; the
library's own host stays the host. ``ON_PLACE=gloo`` takes another of `place_of`; ``host`` tries
this file.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map_only

import meshwright
from gpu.places import place_of
from meshwright import comm
from meshwright.errors import RankFailedError
from meshwright.pipelining import PipelineStage
from meshwright.testing import Ranks
from support.internals.launching import shared_pool

T = TypeVar("T")
HOST = torch.device("cpu")
LIBRARY = meshwright.__path__[0]
TORCH = torch.__path__[0]
SLOWER = 4
"""The factor by which a body may take longer: ranks that share a GPU take turns on it."""


def on_gpus(ranks: Ranks) -> Ranks:
    """Give the ranks of ``ranks`` that are connected for their body a GPU each, or one to share."""

    @functools.wraps(ranks)
    def run(
        n: int,
        body: Callable[..., T],
        *args: object,
        timeout: float = 60.0,
        backend: str | None = None,
        grace: float = 2.0,
        connected: bool = True,
        **kwargs: object,
    ) -> list[T]:
        __tracebackhide__ = True
        if not connected:
            return ranks(
                n, body, *args, timeout=timeout, backend=backend, grace=grace, connected=False,
                **kwargs,
            )  # fmt: skip
        work = functools.partial(_moved, body, args, kwargs)
        place = f"{__name__}:connected_gpu"
        return shared_pool().run(
            n, work, timeout=SLOWER * timeout, grace=SLOWER * grace, place=place
        )

    return cast("Ranks", run)


def _moved(body: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object]) -> T:
    """Give a body tensors of its GPU, also in its module and closure, and its caller the host's."""
    device = comm.communicator().device

    def there(given: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda tensor: _at(tensor, device), given)

    function = body
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__globals__", {})
    for name, value in module.items():
        if isinstance(value, torch.Tensor | list | tuple | dict) and not name.startswith("__"):
            module[name] = there(value)
    for cell in getattr(function, "__closure__", None) or ():
        cell.cell_contents = there(cell.cell_contents)
    found = body(*there(args), **there(kwargs))
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), found)


def _at(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a leaf; what others share stays shared only within a tree."""
    return tensor.detach().to(device).requires_grad_(tensor.requires_grad)


@contextmanager
def connected_gpu() -> Iterator[None]:
    """Connect this rank over NCCL; within the block the host is its GPU."""
    with place_of(os.environ.get("ON_PLACE", "nccl")) as place:
        place.connect()
        device = place.device
        # Said by a thread that has not used the GPU yet.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA")
        torch.testing.assert_close.__kwdefaults__["check_device"] = False
        with _Functions(device):
            for owner, position in ((DeviceMesh, 1), (torch.autocast, 1), (PipelineStage, 4)):
                owner.__init__ = _meaning(owner.__init__, device, position)
            yield
        with suppress(RankFailedError):
            comm.disconnect()


def _meaning(init: Any, device: torch.device, position: int) -> Any:
    """Make a constructor take the host, at ``position`` or by a name, for ``device``."""

    @functools.wraps(init)
    def made(*args: Any, **kwargs: Any) -> None:
        args = tuple(
            _translated(arg, device) if at == position else arg for at, arg in enumerate(args)
        )
        for name in {"device", "device_type"} & {*kwargs}:
            kwargs[name] = _translated(kwargs[name], device)
        init(*args, **kwargs)

    return made


def _translated(asked: Any, device: torch.device) -> Any:
    if isinstance(asked, str) and asked == "cpu":
        return device.type
    return device if asked == HOST else asked


class _Functions(TorchFunctionMode):
    """Makes on ``device`` what a body makes, with the numbers that generators of the host draw."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        likes = (torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like)
        self._makers = {*_device_constructors(), *likes, torch.rand_like, torch.randn_like}
        self._likes = {*likes, torch.rand_like, torch.randn_like}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        draws = isinstance(kwargs.get("generator"), torch.Generator)
        if func in self._makers:
            asked = kwargs.get("device")
            is_like = asked is None and func in self._likes
            if (
                not is_like
                and (asked is None or torch.device(asked) == HOST)
                and not _is_of_library()
            ):
                if draws and kwargs["generator"].device == HOST:
                    kwargs["device"] = HOST
                    requires = kwargs.pop("requires_grad", False)
                    return func(*args, **kwargs).to(self._device).requires_grad_(requires)
                kwargs["device"] = self._device
        elif draws and kwargs["generator"].device == HOST and args[0].is_cuda:
            target = args[0]
            drawn = torch.empty(target.shape, dtype=target.dtype, device="cpu")
            return target.copy_(func(drawn, *args[1:], **kwargs))
        elif func is torch.equal and args[0].device != args[1].device:
            args = (args[0].cpu(), args[1].cpu())
        return func(*args, **kwargs)


def _is_of_library() -> bool:
    """Check that what is made is the library's, torch's optimizers' or `torch.distributed`'s."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith((f"{TORCH}/distributed", f"{TORCH}/optim")):
            return True
        if not name.startswith(TORCH):
            return name.startswith(LIBRARY) and not name.startswith(f"{LIBRARY}/testing")
        frame = frame.f_back
    return False
