"""A model that tensor parallelism cuts in every way, its plans, and what it is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.mesh import DeviceMesh
from meshwright.tensor_parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from support.internals.layout import Replicate, Shard

WORDS = 11
"""A prime: tensor ranks hold parts of other sizes."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 12)
        self.down = nn.Linear(12, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    """Tied embeddings, norms on parts of the sequence, a module that nobody uses."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.idle = nn.Linear(width, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    model = Net().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def plan(*, sequence: bool) -> dict[str, ParallelStyle]:
    """Of `Net`; with ``sequence`` the norms, and biases of rows, have partial gradients."""
    part = Shard(1) if sequence else Replicate()
    found: dict[str, ParallelStyle] = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=part),
        "blocks.*.up": ColwiseParallel(input_layouts=part),
        "blocks.*.down": RowwiseParallel(output_layouts=part),
        "head": ColwiseParallel(input_layouts=part, output_layouts=Replicate()),
        "idle": ColwiseParallel(),
    }
    if sequence:
        found["blocks.*.norm"] = SequenceParallel(use_local_output=True)
        found["norm"] = SequenceParallel(use_local_output=True)
    return found


def cut(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = True) -> nn.Module:
    """A copy of ``model`` over the ranks of ``mesh``."""
    return parallelize_module(copy.deepcopy(model), mesh, plan(sequence=sequence))


def batch(step: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets of four words a row."""
    drawn = torch.Generator().manual_seed(100 + step)
    return tuple(torch.randint(0, WORDS, (rows, 4), generator=drawn) for _ in range(2))  # pyrefly: ignore


def share(tensors: Sequence[torch.Tensor], index: int, count: int) -> list[torch.Tensor]:
    return [tensor.chunk(count)[index] for tensor in tensors]


def loss_of(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(model: nn.Module, one: nn.Module, *, tolerance: float = 1e-9) -> None:
    """Names, weights and gradients are those of one process."""
    mine, theirs = list(model.named_parameters()), list(one.named_parameters())
    assert [name for name, _ in mine] == [name for name, _ in theirs]
    for (name, parameter), (_, expected) in zip(mine, theirs, strict=True):
        pairs = [(parameter.detach(), expected.detach())]
        assert (parameter.grad is None) is (expected.grad is None), name
        if parameter.grad is not None and expected.grad is not None:
            pairs.append((parameter.grad, expected.grad))
        for found, wanted in pairs:
            torch.testing.assert_close(
                whole(found),
                wanted,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def train(
    model: nn.Module,
    one: nn.Module,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    place: tuple[int, int],
    *,
    steps: int = 5,
    clip: Callable[[nn.Module], torch.Tensor] | None = None,
    tolerance: float = 1e-9,
) -> None:
    """Train both; losses, gradients and weights agree after each step, and norms with ``clip``."""
    ours, theirs = optimizer(model.parameters()), optimizer(one.parameters())
    index, count = place
    for step in range(steps):
        given = batch(step)
        loss_of(model, *share(given, index, count)).backward()
        loss_of(one, *given).backward()
        same(model, one, tolerance=tolerance)
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            torch.testing.assert_close(whole(clip(model)), norm, rtol=1e-9, atol=1e-9)
            same(model, one, tolerance=tolerance)
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
    same(model, one, tolerance=tolerance)


class CountDTensorOperators(TorchDispatchMode):
    """Which operators were called on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))
