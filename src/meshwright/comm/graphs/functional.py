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

In eager mode they pass the door of `collectives`. While a graph is traced they emit the functional
operators of c10d, which the compiler can move and fuse; the door is not passed at run time then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx

from meshwright.comm.collectives import Communicator
from meshwright.torch_internals.distributed import graph_operators
from meshwright.torch_internals.tensors import FakeTensor

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast_traced",
    "is_traced",
    "reduce_scatter",
    "traced_all_gather",
    "traced_all_reduce",
    "traced_all_to_all",
    "traced_reduce_scatter",
]

_OPERATORS = graph_operators


def is_traced(tensor: torch.Tensor) -> bool:
    """Check for a graph that is traced through ``tensor``: then no collective may run."""
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor)


def all_reduce(
    tensor: torch.Tensor, communicator: Communicator, *, label: str = ""
) -> torch.Tensor:
    """Compute the sum of every rank's ``tensor``, same shape on every rank."""
    return _apply(tensor, _AllReduce(communicator, label))


def all_gather(
    tensor: torch.Tensor, communicator: Communicator, *, dim: int = 0, label: str = ""
) -> torch.Tensor:
    """Compute every rank's ``tensor`` concatenated along ``dim``, in rank order; shapes are
    equal.
    """
    moved = tensor.movedim(dim, 0).contiguous()
    return _apply(moved, _AllGather(communicator, label)).movedim(0, dim)


def reduce_scatter(
    tensor: torch.Tensor, communicator: Communicator, *, dim: int = 0, label: str = ""
) -> torch.Tensor:
    """This rank's part along ``dim`` of the sum of every rank's ``tensor``.

    Raises ValueError when ``dim`` does not divide by the number of ranks.
    """
    if tensor.shape[dim] % communicator.size:
        raise ValueError(
            f"reduce_scatter on axis {communicator.axis}: expected dim {dim} to divide by "
            f"{communicator.size} ranks, found shape {tuple(tensor.shape)}"
        )
    moved = tensor.movedim(dim, 0).contiguous()
    return _apply(moved, _ReduceScatter(communicator, label)).movedim(0, dim)


def all_to_all(
    tensor: torch.Tensor,
    communicator: Communicator,
    *,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    label: str = "",
) -> torch.Tensor:
    """Part ``i`` of every rank's ``tensor`` along dim 0, in rank order, on rank ``i``.

    The splits count rows of dim 0; equal parts when both are None.
    """
    size = communicator.size
    if input_splits is None or output_splits is None:
        if tensor.shape[0] % size:
            raise ValueError(
                f"all_to_all on axis {communicator.axis}: expected dim 0 to divide by {size} "
                f"ranks, found shape {tuple(tensor.shape)}: give the splits"
            )
        input_splits = output_splits = [tensor.shape[0] // size] * size
    exchange = _AllToAll(communicator, label, tuple(output_splits), tuple(input_splits))
    return _apply(tensor.contiguous(), exchange)


# ------------------------------------------------- in a graph, without a backward of their own


def traced_all_reduce(x: torch.Tensor, axis: Communicator) -> torch.Tensor:
    """Compute the sum of every rank's ``x``, in the graph that is being traced."""
    return _OPERATORS.wait_tensor(_OPERATORS.all_reduce(x.contiguous(), "sum", axis.name))


def traced_all_gather(x: torch.Tensor, axis: Communicator) -> torch.Tensor:
    """Compute every rank's ``x`` one after another along dim 0, in the graph that is being
    traced.
    """
    found = _OPERATORS.all_gather_into_tensor(x.contiguous(), axis.size, axis.name)
    return _OPERATORS.wait_tensor(found)


def traced_reduce_scatter(x: torch.Tensor, axis: Communicator) -> torch.Tensor:
    """This rank's part along dim 0 of the sum of every ``x``, in the graph being traced."""
    found = _OPERATORS.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.name)
    return _OPERATORS.wait_tensor(found)


def traced_all_to_all(
    x: torch.Tensor, axis: Communicator, to_come: Sequence[int], to_go: Sequence[int]
) -> torch.Tensor:
    """Part ``i`` of every ``x`` along dim 0 on rank ``i``, in the graph that is being traced."""
    found = _OPERATORS.all_to_all_single(x.contiguous(), list(to_come), list(to_go), axis.name)
    return _OPERATORS.wait_tensor(found)


@torch.no_grad()
def broadcast_traced(communicator: Communicator, tensors: Sequence[torch.Tensor]) -> None:
    """Give every rank the values that rank 0 has, in place, in the graph that is being traced.

    Tensors of one dtype travel together.
    """
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        members = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in members])
        everyones = _OPERATORS.wait_tensor(_OPERATORS.broadcast(flat, 0, communicator.name))
        parts = everyones.split([tensor.numel() for tensor in members])
        for tensor, part in zip(members, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


@dataclass(frozen=True)
class _AllReduce:
    communicator: Communicator
    label: str

    def run(self, x: torch.Tensor) -> torch.Tensor:
        if is_traced(x):
            return traced_all_reduce(x, self.communicator)
        result = x.detach().clone(memory_format=torch.contiguous_format)
        self.communicator.all_reduce(result, label=self.label).wait()
        return result

    def adjoint(self) -> _AllReduce:
        return self


@dataclass(frozen=True)
class _AllGather:
    communicator: Communicator
    label: str

    def run(self, x: torch.Tensor) -> torch.Tensor:
        size = self.communicator.size
        if is_traced(x):
            return traced_all_gather(x, self.communicator)
        output = x.new_empty((x.shape[0] * size, *x.shape[1:]))
        self.communicator.all_gather(output, x.detach().contiguous(), label=self.label).wait()
        return output

    def adjoint(self) -> _ReduceScatter:
        return _ReduceScatter(self.communicator, self.label)


@dataclass(frozen=True)
class _ReduceScatter:
    communicator: Communicator
    label: str

    def run(self, x: torch.Tensor) -> torch.Tensor:
        size = self.communicator.size
        if is_traced(x):
            return traced_reduce_scatter(x, self.communicator)
        output = x.new_empty((x.shape[0] // size, *x.shape[1:]))
        self.communicator.reduce_scatter(output, x.detach().contiguous(), label=self.label).wait()
        return output

    def adjoint(self) -> _AllGather:
        return _AllGather(self.communicator, self.label)


@dataclass(frozen=True)
class _AllToAll:
    communicator: Communicator
    label: str
    to_come: tuple[int, ...]
    to_go: tuple[int, ...]

    def run(self, x: torch.Tensor) -> torch.Tensor:
        to_come, to_go = list(self.to_come), list(self.to_go)
        if is_traced(x):
            return traced_all_to_all(x, self.communicator, to_come, to_go)
        output = x.new_empty((sum(to_come), *x.shape[1:]))
        self.communicator.all_to_all(
            output,
            x.detach().contiguous(),
            output_splits=to_come,
            input_splits=to_go,
            label=self.label,
        ).wait()
        return output

    def adjoint(self) -> _AllToAll:
        return _AllToAll(self.communicator, self.label, self.to_go, self.to_come)


_Operation = _AllReduce | _AllGather | _ReduceScatter | _AllToAll


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


def _apply(x: torch.Tensor, operation: _Operation) -> torch.Tensor:
    return _Linear.apply(x, operation)
