"""Collectives that autograd and the compiler understand.

Each function takes a tensor and returns a new one. Its backward is the adjoint operation, so that
the gradient is that of the sum of all ranks' losses:

=================  =================
forward            backward
=================  =================
all_reduce (sum)   all_reduce (sum)
all_gather         reduce_scatter
reduce_scatter     all_gather
all_to_all         all_to_all, with the splits exchanged
=================  =================

In eager mode they call the `Communicator`. While a graph is traced they emit the functional
operators of c10d, which the compiler can move and fuse; these bypass the `Communicator` at run
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.autograd.function import FunctionCtx

from meshwright.comm.collectives import Communicator
from meshwright.torch_internals.distributed import graph_operators
from meshwright.torch_internals.tensors import FakeTensor


def is_traced(tensor: torch.Tensor) -> bool:
    """Check whether a graph is being traced through ``tensor``: then no collective may run."""
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor)


def all_reduce(
    tensor: torch.Tensor, communicator: Communicator, *, label: str = ""
) -> torch.Tensor:
    """Sum every rank's ``tensor``, of the same shape on every rank."""
    return _Linear.apply(tensor, _Operation("all_reduce", communicator, label))


def all_gather(
    tensor: torch.Tensor, communicator: Communicator, *, dim: int = 0, label: str = ""
) -> torch.Tensor:
    """Join every rank's ``tensor``, all of one shape, along ``dim``, in rank order."""
    moved = tensor.movedim(dim, 0).contiguous()
    gathered = _Linear.apply(moved, _Operation("all_gather", communicator, label))
    return gathered.movedim(0, dim)


def reduce_scatter(
    tensor: torch.Tensor, communicator: Communicator, *, dim: int = 0, label: str = ""
) -> torch.Tensor:
    """Compute this rank's part along ``dim`` of the sum of every rank's ``tensor``.

    Raises ValueError when ``dim`` does not divide by the number of ranks.
    """
    if tensor.shape[dim] % communicator.size:
        raise ValueError(
            f"reduce_scatter on axis {communicator.axis}: expected dim {dim} to divide by "
            f"{communicator.size} ranks, found shape {tuple(tensor.shape)}"
        )
    moved = tensor.movedim(dim, 0).contiguous()
    part = _Linear.apply(moved, _Operation("reduce_scatter", communicator, label))
    return part.movedim(0, dim)


def all_to_all(
    tensor: torch.Tensor,
    communicator: Communicator,
    *,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    label: str = "",
) -> torch.Tensor:
    """Send part ``i`` of ``tensor`` along dim 0 to rank ``i``; join received parts in rank order.

    The splits count rows of dim 0; without both the parts are equal. Raises ValueError for one of
    the two alone, and without them if dim 0 does not divide by the number of ranks.
    """
    size = communicator.size
    if input_splits is None or output_splits is None:
        if input_splits is not output_splits or tensor.shape[0] % size:
            raise ValueError(
                f"all_to_all on axis {communicator.axis}: expected both splits, or none and "
                f"a dim 0 that divides by {size} ranks, found shape {tuple(tensor.shape)}, output "
                f"splits {output_splits} and input splits {input_splits}"
            )
        input_splits = output_splits = [tensor.shape[0] // size] * size
    splits = tuple(output_splits), tuple(input_splits)
    return _Linear.apply(
        tensor.contiguous(), _Operation("all_to_all", communicator, label, *splits)
    )


# ------------------------------------------------- in a graph, without a backward of their own


def traced_all_reduce(x: torch.Tensor, axis: Communicator) -> torch.Tensor:
    return graph_operators.wait_tensor(graph_operators.all_reduce(x.contiguous(), "sum", axis.name))


def traced_all_gather(x: torch.Tensor, axis: Communicator) -> torch.Tensor:
    """Join every rank's ``x`` along dim 0, in the graph that is being traced."""
    found = graph_operators.all_gather_into_tensor(x.contiguous(), axis.size, axis.name)
    return graph_operators.wait_tensor(found)


def traced_reduce_scatter(x: torch.Tensor, axis: Communicator) -> torch.Tensor:
    """Compute this rank's part along dim 0 of the sum of every ``x``, in the traced graph."""
    found = graph_operators.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.name)
    return graph_operators.wait_tensor(found)


def traced_all_to_all(
    x: torch.Tensor, axis: Communicator, to_come: Sequence[int], to_go: Sequence[int]
) -> torch.Tensor:
    """Send part ``i`` of ``x`` along dim 0 to rank ``i``, in the graph that is being traced."""
    found = graph_operators.all_to_all_single(x.contiguous(), list(to_come), list(to_go), axis.name)
    return graph_operators.wait_tensor(found)


@torch.no_grad()
def broadcast_traced(communicator: Communicator, tensors: Sequence[torch.Tensor]) -> None:
    """Overwrite ``tensors`` with rank 0's values, in place, in the graph being traced.

    Tensors of one dtype travel together.
    """
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        members = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in members])
        everyones = graph_operators.wait_tensor(
            graph_operators.broadcast(flat, 0, communicator.name)
        )
        parts = everyones.split([tensor.numel() for tensor in members])
        for tensor, part in zip(members, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


_ADJOINT = MappingProxyType(
    {
        "all_reduce": "all_reduce",
        "all_gather": "reduce_scatter",
        "reduce_scatter": "all_gather",
        "all_to_all": "all_to_all",
    }
)


@dataclass(frozen=True)
class _Operation:
    """A collective along dim 0, with the rows to send to and receive from each rank, if uneven."""

    kind: str
    axis: Communicator
    label: str
    to_come: tuple[int, ...] = ()
    to_go: tuple[int, ...] = ()

    def adjoint(self) -> _Operation:
        return _Operation(_ADJOINT[self.kind], self.axis, self.label, self.to_go, self.to_come)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        axis, label = self.axis, self.label
        if is_traced(x):
            return self._in_graph(x)
        if self.kind == "all_reduce":
            result = x.detach().clone(memory_format=torch.contiguous_format)
            axis.all_reduce(result, label=label).wait()
            return result
        given, others = x.detach().contiguous(), x.shape[1:]
        if self.kind == "all_gather":
            result = x.new_empty((x.shape[0] * axis.size, *others))
            axis.all_gather(result, given, label=label).wait()
        elif self.kind == "reduce_scatter":
            result = x.new_empty((x.shape[0] // axis.size, *others))
            axis.reduce_scatter(result, given, label=label).wait()
        else:
            come, go = list(self.to_come), list(self.to_go)
            result = x.new_empty((sum(come), *others))
            pending = axis.all_to_all(
                result, given, output_splits=come, input_splits=go, label=label
            )
            pending.wait()
        return result

    def _in_graph(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "all_reduce":
            return traced_all_reduce(x, self.axis)
        if self.kind == "all_gather":
            return traced_all_gather(x, self.axis)
        if self.kind == "reduce_scatter":
            return traced_reduce_scatter(x, self.axis)
        return traced_all_to_all(x, self.axis, self.to_come, self.to_go)


class _Linear(torch.autograd.Function):
    """A linear map over all ranks; its backward is the adjoint map, and so on."""

    # The compiler reads these signatures, so they cannot be autograd's general ones.
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx, x: torch.Tensor, operation: _Operation
    ) -> torch.Tensor:
        ctx.operation = operation  # pyrefly: ignore[missing-attribute]
        return operation.run(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyrefly: ignore[bad-override]
        adjoint = ctx.operation.adjoint()  # pyrefly: ignore[missing-attribute]
        return _Linear.apply(grad, adjoint), None
