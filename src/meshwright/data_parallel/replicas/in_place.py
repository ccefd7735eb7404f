"""One large gradient, reduced in its own memory: neither copied into a bucket nor out of it.

A ``.grad`` that a backward pass began with stays the tensor that it is. One that the pass has made
is scaled into memory that is kept from pass to pass, and that becomes ``.grad``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import torch

from meshwright.comm import Communicator, Pending
from meshwright.data_parallel.replicas.slots import (
    ARRIVED,
    BucketLayout,
    Reduction,
    lost_gradient,
    sparse_gradient,
)
from meshwright.errors import InternalError
from meshwright.gradients import NonFiniteValues
from meshwright.torch_internals.tensors import storage_id, storage_users


class KeptMemory:
    """Memory in which tensors of ``numel`` elements lie, one after the other."""

    def __init__(
        self, numel: int, dtype: torch.dtype, allocate: Callable[[int, torch.dtype], torch.Tensor]
    ) -> None:
        self._numel, self._dtype = numel, dtype
        self._allocate = allocate
        # Now and not in the first backward pass, where it would lie among what autograd frees.
        self._kept, self._offset = self._fresh()
        """The memory, and the element of it at which tensors begin."""

    def tensor(
        self, shape: Sequence[int], stride: Sequence[int], device: torch.device
    ) -> torch.Tensor | None:
        """Make an uninitialised tensor, unless somebody holds also what was allocated just now.

        It is no view of another tensor: the user may detach it in place.
        """
        if not _is_ours_alone(self._kept):
            self._kept, self._offset = self._fresh()
        if not _is_ours_alone(self._kept):
            return None
        tensor = torch.empty(0, dtype=self._dtype, device=device)
        return tensor.set_(self._kept, self._offset, tuple(shape), tuple(stride))

    def _fresh(self) -> tuple[torch.UntypedStorage, int]:
        base = self._allocate(self._numel, self._dtype)
        return base.untyped_storage(), int(base.storage_offset())


def _is_ours_alone(storage: torch.UntypedStorage) -> bool:
    """Check that no tensor and no other name uses ``storage``."""
    # References: the attribute, the name here, the argument of the call.
    return storage_users(storage_id(storage)) == 1 and sys.getrefcount(storage) <= 3


class InPlaceGradient(Reduction):
    """The reduction of one gradient where it lies; the same steps as a `Bucket`.

    Whether any rank had a gradient is known when the bucket that carries its use count has
    finished, which then calls `adopt`.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameter: torch.nn.Parameter,
        allocate: Callable[[int, torch.dtype], torch.Tensor],
    ) -> None:
        super().__init__(layout, (parameter,))
        self.is_absent = False
        """Whether this rank had no gradient in this backward pass."""
        self._tensor: torch.Tensor | None = None
        self._pending: Pending | None = None
        self._memory = KeptMemory(layout.numel, layout.dtype, allocate)
        self._began_without = False
        self._taken = False
        self._references = _fewest_references()

    def begin(self) -> None:
        """A backward pass begins."""
        self._began_without = self.parameters[0].grad is None

    def reset(self) -> None:
        """Forget the gradient of the last backward pass."""
        self.arrived = bytearray(1)
        self._tensor = None
        self._began_without = self._taken = False

    def takes(self, slot: int) -> bool:
        """Check that the gradient was made by this pass, so that `take` may move it."""
        return self._began_without

    def is_taken(self, slot: int) -> bool:
        """Check that the gradient lies in the memory that is kept."""
        return self._taken

    def take(self, slot: int, scale: float) -> None:
        """Move the gradient, times ``scale``, unless somebody else holds either memory."""
        (parameter,) = self.parameters
        gradient = parameter.grad
        if gradient is None or not _is_alike(gradient, parameter):
            return
        if _references(parameter) > self._references + 1:  # the name in this function
            return
        tensor = self._memory.tensor(parameter.shape, parameter.stride(), parameter.device)
        if tensor is None:
            return
        self._tensor = torch.mul(gradient, scale, out=tensor)
        parameter.grad = tensor
        self._taken = True

    def fill(self, scale: float) -> None:
        """Scale this rank's gradient, or stand in with zeros."""
        (parameter,) = self.parameters
        gradient = parameter.grad
        self.is_absent = gradient is None
        if gradient is None and self.arrived[0] == ARRIVED:
            raise lost_gradient(self.layout.slots[0])
        if self._taken:
            return
        if gradient is None:
            self._tensor = torch.zeros_like(parameter)
        elif gradient.layout is not torch.strided:
            raise sparse_gradient(self.layout.slots[0], gradient)
        elif _is_alike(gradient, parameter):
            self._tensor = gradient.mul_(scale) if scale != 1.0 else gradient
        else:
            self._tensor = torch.empty_like(parameter)
            torch.mul(gradient, scale, out=self._tensor)

    def fill_absent(self) -> None:
        """Take part without a gradient."""
        self.is_absent = True
        self._tensor = torch.zeros_like(self.parameters[0])

    def fill_void(self) -> None:
        """Make the reduction visibly void: this rank gave up its backward pass."""
        self.is_absent = False
        self._tensor = torch.full_like(self.parameters[0], math.nan)

    def launch(self, communicator: Communicator) -> None:
        """Start the reduction; `finish` waits for it."""
        if self._tensor is None:
            raise InternalError(f"{self.layout.label} was not filled")
        flat = self._tensor.as_strided((self._tensor.numel(),), (1,))
        self._pending = communicator.all_reduce(flat, label=self.layout.label)

    def drop(self) -> None:
        """Wait for a reduction whose result nobody wants.

        A ``.grad`` that was reduced meanwhile is neither this rank's nor a mean, and may have been
        zeroed while it was written: it is given up.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.wait()
        (parameter,) = self.parameters
        if parameter.grad is self._tensor:
            parameter.grad = None

    def finish(self) -> None:
        """Wait for the mean. A gradient of another form than the parameter's gets it copied."""
        pending, self._pending = self._pending, None
        if pending is None or self._tensor is None:
            raise InternalError(f"{self.layout.label} was not launched")
        pending.wait()
        gradient = self.parameters[0].grad
        if gradient is None and self.arrived[0] == ARRIVED:
            raise lost_gradient(self.layout.slots[0])
        if gradient is not None and gradient is not self._tensor:
            gradient.copy_(self._tensor)

    def adopt(self, count: float) -> None:
        """Take the mean as ``.grad`` where this rank had none, unless no rank had one."""
        if self.is_absent and count != 0:
            self.parameters[0].grad = self._tensor

    def look(self, values: NonFiniteValues) -> None:
        """Have ``values`` note whether this rank's gradient is not finite, once it is filled."""
        tensor = self._tensor
        if tensor is not None:
            values.look(tensor, lambda: [(self.layout.slots[0].name, tensor)])


def is_dense(tensor: torch.Tensor) -> bool:
    """Check that the strides cover ``tensor.numel()`` elements in a row, without holes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _is_alike(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Check that the gradient's memory can be reduced as it is, and written to."""
    return (
        gradient.stride() == parameter.stride()
        and gradient.dtype == parameter.dtype
        and not gradient.requires_grad
    )


def _references(parameter: torch.Tensor) -> int:
    """Count Python's references to the gradient; torch's own differ with its version."""
    gradient = parameter.grad
    return sys.getrefcount(gradient)


def _fewest_references() -> int:
    """`_references` of a gradient that nobody else holds."""
    probe = torch.empty(0, requires_grad=True)
    probe.grad = torch.empty(0)
    return _references(probe)
