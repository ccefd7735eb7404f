"""Models that tensor parallelism is tried on, and the plans for them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright import comm
from meshwright.comm import Recorder
from meshwright.mesh import DeviceMesh, init_device_mesh
from meshwright.tensor_parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "Block",
    "DTensorOperators",
    "alike",
    "check_alike",
    "sent",
    "sequence_plan",
    "tensor_mesh",
]

WORDS = 13


class Block(nn.Module):
    """An embedding, a norm, an MLP with a residual, and a head that is tied to the embedding."""

    def __init__(self, width: int = 10, hidden: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=9)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.head = nn.Linear(width, WORDS)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of shape (batch, length, WORDS)."""
        x = self.embed(ids)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return self.head(x)


def sequence_plan() -> dict[str, ParallelStyle]:
    """Every style at once, with activations that are cut along dim 1 between the layers."""
    cut = Shard(1)
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=cut),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=cut),
        "down": RowwiseParallel(output_layouts=cut),
        "head": ColwiseParallel(input_layouts=cut, output_layouts=Replicate()),
    }


def tensor_mesh() -> DeviceMesh:
    """All ranks as the axis ``tensor``."""
    return init_device_mesh("cpu", (comm.communicator().size,), mesh_dim_names=("tensor",))


def alike(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """``module`` in float64 with the weights of rank 0, and a copy of it."""
    module = module.double()
    for parameter in module.parameters():
        comm.communicator().broadcast(parameter.detach()).wait()
    return module, copy.deepcopy(module)


def check_alike(one: nn.Module, other: nn.Module, *, of: str = "grad") -> None:
    """The same parameters by name, with equal gradients or values of both."""
    names = [name for name, _ in one.named_parameters()]
    assert names
    assert names == [name for name, _ in other.named_parameters()]
    for name, whole, spread in zip(names, one.parameters(), other.parameters(), strict=True):
        expected = whole if of == "data" else whole.grad
        found = spread if of == "data" else spread.grad
        assert (expected is None) == (found is None), name
        if expected is not None and found is not None:
            full = found.full_tensor() if hasattr(found, "full_tensor") else found
            torch.testing.assert_close(
                full, expected, msg=lambda text, name=name: f"{name}: {text}"
            )


def sent(recorder: Recorder) -> list[str]:
    """What was recorded, as "all_reduce up backward"."""
    return [f"{found.kind} {found.label}" for found in recorder.collectives]


class DTensorOperators(TorchDispatchMode):
    """Lists the operators that are dispatched on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: object, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        """Note ``func`` when one of ``types`` is DTensor."""
        if any(kind.__name__ == "DTensor" for kind in types):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))
