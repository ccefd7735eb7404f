"""The bucket as a communication hook sees it, by torch's protocol, and the future that it returns.

A hook is ``hook(state, bucket) -> Future[Tensor]``. The bucket's buffer holds this rank's gradients
not yet divided by the number of ranks; the future's tensor replaces them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch

from meshwright.comm import Communicator, communicator
from meshwright.torch_internals.tensors import Future

T = TypeVar("T")


class CommunicationHook(Protocol):
    """Reduces one bucket; every rank's hook is called for the same buckets in the same order."""

    def __call__(
        self,
        state: Any,  # noqa: ANN401 - whatever the hook was registered with
        bucket: Any,  # noqa: ANN401 - a GradBucket; hooks for torch name torch's
        /,
    ) -> torch.futures.Future[torch.Tensor]:
        """Start the reduction of ``bucket`` and return a future of its result."""
        ...


class BucketPart(NamedTuple):
    """One parameter's gradient, or this rank's part of it, in a bucket's buffer."""

    parameter: torch.nn.Parameter
    offset: int
    shape: tuple[int, ...]


class GradBucket:
    """One bucket of gradients, as hooks that were written for torch's protocol expect it."""

    def __init__(
        self,
        buffer: torch.Tensor,
        parts: Sequence[BucketPart],
        communicator: Communicator,
        *,
        index: int,
        label: str,
        is_last: bool | None = None,
    ) -> None:
        self.communicator = communicator
        """The axis over which the gradients are to be reduced."""
        self.label = label
        """The name of its reduction in records and reports."""
        self._buffer = buffer
        self._parts = tuple(parts)
        self._index = index
        # The backward pass of sharded units ends with the first of the forward.
        self._is_last = index == 0 if is_last is None else is_last

    def index(self) -> int:
        """Return the bucket's position in launch order (in forward order for a sharded unit)."""
        return self._index

    def is_last(self) -> bool:
        """Whether no other bucket follows in this backward pass."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """Return all gradients as a 1-D tensor; a sparse gradient is returned itself."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the bucket's tensor by another one of as many elements."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """List the gradients: contiguous views of the buffer in the parameters' shapes."""
        if self._buffer.is_sparse:
            return [self._buffer]
        return [
            self._buffer[part.offset : part.offset + math.prod(part.shape)].view(part.shape)
            for part in self._parts
        ]

    def parameters(self) -> list[torch.nn.Parameter]:
        """List the parameters of the gradients, in the same order."""
        return [part.parameter for part in self._parts]


class Deferred(torch.futures.Future[T]):
    """A future whose value is computed by the thread that waits for it.

    So a chain of collectives runs in the same order on all ranks, and a wait that does not end
    names the missing ranks.
    """

    def __init__(self, produce: Callable[[], T]) -> None:
        super().__init__()
        self._produce: Callable[[], T] | None = produce
        self._made: list[T] = []

    def wait(self) -> T:
        """Return the value, computed now on the first call."""
        if self._produce is not None:
            produce, self._produce = self._produce, None
            self._made.append(produce())
            self.set_result(self._made[0])
        return self._made[0]

    value = wait

    def done(self) -> bool:
        """Whether the value has been computed."""
        return self._produce is None

    def then(self, callback: Callable[[torch.futures.Future[T]], Any]) -> Deferred[Any]:
        """Chain ``callback``, called with this future when its own value is waited for."""

        def chained() -> object:
            self.wait()
            return callback(self)

        return Deferred(chained)


def reduction_axis(state: object, own: Communicator) -> Communicator:
    """Return the axis of ``state``: a process group, a communicator, or None for ``own``."""
    if state is None:
        return own
    return state if isinstance(state, Communicator) else communicator(cast("Any", state))


def tensor_of(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
    """Wait for the tensor that a future holds; c10d's works return lists."""
    found: object = future.wait()
    return cast("torch.Tensor", found[0] if isinstance(found, list) else found)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredHook:
    """A communication hook with its state."""

    hook: CommunicationHook
    state: Any

    @property
    def is_local(self) -> bool:
        """True when the hook keeps gradients on this rank."""
        return bool(getattr(self.hook, "is_local", False))

    @property
    def parts_copies(self) -> bool:
        """True when ranks may step with different gradients, so that their weights diverge."""
        start: int | None = getattr(self.state, "start_localSGD_iter", None)
        is_apart = start is not None and self.state.iter >= start
        return is_apart or self.is_local or getattr(self.hook, "parts_copies", False)

    def call(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Call the hook. Raises TypeError when it returns anything but a future."""
        future = self.hook(self.state, bucket)
        # c10d's works give the class below torch.futures.Future.
        if not isinstance(future, Future):
            raise TypeError(
                "callback must return a torch.futures.Future object, but got "
                f"{type(future).__name__} from the communication hook {_name(self.hook)}: wrap a "
                "tensor that is ready with torch.futures.Future().set_result"
            )
        return cast("torch.futures.Future[torch.Tensor]", future)


def compressed_dtype(
    registered: RegisteredHook, axis: Communicator, own: torch.dtype
) -> torch.dtype | None:
    """The dtype in which a hook sends gradients of dtype ``own`` over ``axis``.

    None if the hook does more than a plain mean over that axis in some dtype. torch's hooks of the
    same names are recognized too.
    """
    hook = registered.hook
    name, home = getattr(hook, "__name__", ""), getattr(hook, "__module__", "")
    if not home.endswith((".comm_hooks.sums", ".ddp_comm_hooks.default_hooks")):
        return None
    found = {
        "allreduce_hook": own,
        "bf16_compress_hook": torch.bfloat16,
        "fp16_compress_hook": torch.float16,
    }.get(name)
    is_mean = found is not None and reduction_axis(registered.state, axis) == axis
    return found if is_mean else None


def check_hook(hook: object) -> CommunicationHook:
    """Return ``hook`` if it is valid.

    Raises TypeError when it is not callable, ValueError for annotations of another protocol.
    """
    if not callable(hook):
        raise TypeError(
            f"Communication hook must be callable. Found {type(hook).__name__}: pass a function of "
            "(state, bucket)"
        )
    try:
        signature = inspect.signature(hook, eval_str=True)
    except NameError:
        signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is not None and bucket.annotation is not inspect.Parameter.empty:
        name = getattr(bucket.annotation, "__name__", str(bucket.annotation))
        if name.split(".")[-1] != "GradBucket":
            raise ValueError(
                "Communication hook: bucket annotation should be dist.GradBucket. "
                f"Found {bucket.annotation!r} in {_name(hook)}"
            )
    returned = signature.return_annotation
    if returned is not inspect.Signature.empty and not _is_future_of_tensor(returned):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. "
            f"Found {returned!r} in {_name(hook)}"
        )
    return cast("CommunicationHook", hook)


def _is_future_of_tensor(annotation: object) -> bool:
    if isinstance(annotation, str):
        return annotation.replace("torch.futures.", "").replace("torch.", "") == "Future[Tensor]"
    return annotation == torch.futures.Future[torch.Tensor]


def _name(hook: object) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)
