"""Steady steps under a simulated device: the host never waits for the device in any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import clip_grad_norm_
from meshwright.comm import communicator
from meshwright.composition import parallelize
from meshwright.data_parallel import fully_shard, replicate
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.fsdp.wrap import ModuleWrapPolicy
from meshwright.mesh import init_device_mesh
from meshwright.plan import Plan
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from meshwright.testing import Ranks, RanksFailed, on_devices
from meshwright.testing.simulated import device_of

WARM, STEADY = 3, 6
"""Steps before the host may not wait any more, and those in which it may not: number 4 and 8 of a
model are among them, at which more is compared than at others."""


class Block(nn.Module):
    """A layer with a shortcut, and one that nobody uses."""

    def __init__(self, *, has_unused: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8) if has_unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Net(nn.Module):
    """Three blocks and what is read from them."""

    def __init__(self, *, has_unused: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(has_unused=has_unused) for _ in range(3)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


Step = Callable[[], object]


def training(
    model: nn.Module, *, parts: int = 1, clip: Callable[[nn.Module], object] | None = None
) -> Step:
    """Make a step of SGD; of several ``parts``, all but the last are not reduced."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, target = torch.randn(8, 8), torch.randn(8, 4)

    def step() -> None:
        for part in range(parts):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(part == parts - 1)
            nn.functional.mse_loss(model(x), target).backward()
        if clip is not None:
            clip(model)
        optimizer.step()
        optimizer.zero_grad()

    return step


def replicated(*, has_unused: bool = False, **options: Any) -> nn.Module:
    return replicate(Net(has_unused=has_unused), bucket_cap_mb=0.0005, **options)


def sharded(*, mesh: Any = None, has_unused: bool = False) -> nn.Module:
    model = Net(has_unused=has_unused)
    options = {} if mesh is None else {"mesh": mesh}
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def wrapped() -> nn.Module:
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(Net(), auto_wrap_policy=policy, use_orig_params=True)


def cut() -> nn.Module:
    mesh = init_device_mesh("cpu", (communicator().size,))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8))
    model.append(nn.Linear(8, 4))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def clip(model: nn.Module) -> object:
    return clip_grad_norm_(model, 0.01, error_if_nonfinite=True)


def trainable(axes: str, settings: str = "") -> Step:
    made = parallelize(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        Plan.from_toml(f"[axes]\n{axes}\n{settings}\n"),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=nn.functional.mse_loss,
        example=(torch.randn(8, 8),),
    )
    x, target = torch.randn(8, 8), torch.randn(8, 4)
    return lambda: made.step(x, target)


TENSOR = '[tensor.rules]\n"0" = "colwise"\n"2" = "rowwise"\n'

KINDS: dict[str, Callable[[], Step]] = {
    "replicate": lambda: training(replicated()),
    "replicate, views": lambda: training(replicated(gradient_as_bucket_view=True)),
    "replicate, unused layers": lambda: training(
        replicated(has_unused=True, find_unused_parameters=True)
    ),
    "replicate, static graph": lambda: training(replicated(static_graph=True)),
    "replicate, clipping": lambda: training(replicated(), clip=clip),
    "replicate, 4 parts": lambda: training(replicated(), parts=4),
    "replicate, non-finite": lambda: training(replicated(stop_on_non_finite=True)),
    "fully_shard": lambda: training(sharded()),
    "fully_shard, unused layers": lambda: training(sharded(has_unused=True)),
    "fully_shard, clipping": lambda: training(sharded(), clip=clip),
    "fully_shard, 4 parts": lambda: training(sharded(), parts=4),
    "class": lambda: training(wrapped()),
    "tensor": lambda: training(cut()),
    "Trainable, replicate": lambda: trainable("replicate = 2"),
    "Trainable, shard": lambda: trainable("shard = 2", "[train]\nclip_norm = 0.01"),
    "Trainable, 4 parts": lambda: trainable("shard = 2", "[train]\naccumulate = 4"),
    "Trainable, tensor": lambda: trainable("tensor = 2", TENSOR),
}


ASKED = frozenset({"replicate, non-finite"})
"""Kinds that are to stop before an optimizer steps, and so wait for the device."""


def steady(kind: str) -> None:
    step = KINDS[kind]()
    for _ in range(WARM):
        step()
    with device_of(communicator()).forbid_stops():
        for _ in range(STEADY):
            step()


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - ASKED))
def test_the_host_does_not_wait_in_a_steady_step(ranks: Ranks, kind: str) -> None:
    on_devices(ranks)(2, steady, kind)


@pytest.mark.parametrize("kind", ASKED)
def test_a_stop_that_was_asked_for_is_one_a_step(ranks: Ranks, kind: str) -> None:
    with pytest.raises(RanksFailed, match=rf"{STEADY} host stops: .* at checks/alignment.py"):
        on_devices(ranks)(2, steady, kind)


def stopping() -> None:
    model = replicated()
    step = training(model)
    with device_of(communicator()).forbid_stops():
        step()
        next(model.parameters()).sum().item()


def test_a_host_stop_is_named(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"1 host stops: .*_local_scalar_dense.* at .*py:\d+"):
        on_devices(ranks)(2, stopping)
