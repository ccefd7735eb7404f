"""Self-distillation: a student learns from a teacher that is a moving average of it.

As DINO and V-JEPA have it: several crops through one student, the teacher's outputs centered over
all ranks, the last layer frozen at first by leaving its gradients out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from meshwright import DistributedDataParallel as DDP  # noqa: N817
from meshwright.comm import communicator
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import fully_shard
from meshwright.testing import Ranks
from support.clients import assert_same, whole

pytestmark = [pytest.mark.slow]

WIDTH, OUT, ROWS, STEPS = 8, 5, 8, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 12),
            nn.Linear(12, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Student(nn.Module):
    """A backbone and a head, for a list of crops of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 10), nn.GELU(), nn.Linear(10, 6))
        self.last_layer = nn.Linear(6, OUT, bias=False)

    def backbone(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(1)

    def forward(self, crops: list[torch.Tensor]) -> torch.Tensor:
        sizes = sorted({crop.shape[1] for crop in crops}, reverse=True)
        groups = [[crop for crop in crops if crop.shape[1] == size] for size in sizes]
        found = [self.backbone(torch.cat(group)) for group in groups]
        return self.last_layer(F.normalize(self.mlp(torch.cat(found)), dim=-1))


class DINOLoss(nn.Module):
    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, OUT, dtype=torch.float64))

    def forward(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        students = (student / 0.3).chunk(4)
        targets = F.softmax((teacher - self.center) / 0.1, dim=-1).detach().chunk(2)
        losses = [
            -(target * F.log_softmax(view, dim=-1)).sum(-1).mean()
            for at, target in enumerate(targets)
            for number, view in enumerate(students)
            if number != at
        ]
        self.update_center(teacher)
        return torch.stack(losses).mean()

    @torch.no_grad()
    def update_center(self, teacher: torch.Tensor) -> None:
        center, size = teacher.mean(0, keepdim=True), 1
        if dist.is_initialized():
            dist.all_reduce(center)
            size = dist.get_world_size()
        self.center.lerp_(center / size, 0.1)


def shard(model: Any) -> Any:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def wrap(model: nn.Module) -> FSDP:
    policy: Any = ModuleWrapPolicy({Block})
    return FSDP(model, auto_wrap_policy=policy, use_orig_params=True)


@torch.no_grad()
def update(student: nn.Module, teacher: nn.Module, momentum: float) -> None:
    for q, k in zip(student.parameters(), teacher.parameters(), strict=True):
        k.data.mul_(momentum).add_((1 - momentum) * q.detach().data)


@torch.no_grad()
def update_lists(student: nn.Module, teacher: nn.Module, momentum: float) -> None:
    kept = [parameter.data for parameter in teacher.parameters()]
    torch._foreach_mul_(kept, momentum)
    torch._foreach_add_(kept, [p.data for p in student.parameters()], alpha=1 - momentum)


@torch.no_grad()
def update_whole(student: Any, teacher: nn.Module, momentum: float) -> None:
    for q, k in zip(student.parameters(), teacher.parameters(), strict=True):
        k.lerp_(q.full_tensor(), 1 - momentum)


def update_average(student: nn.Module, teacher: Any, momentum: float) -> None:
    if not teacher.n_averaged:
        teacher.n_averaged += 1  # it starts from a copy
    teacher.multi_avg_fn = get_ema_multi_avg_fn(momentum)
    teacher.update_parameters(student)


Update = Callable[[Any, Any, float], None]


def pair(kind: str, model: nn.Module) -> tuple[Any, Any, Update]:
    """A student, its teacher and how the teacher follows."""
    if kind == "alone":
        return model, copy.deepcopy(model), update
    if kind == "a plain teacher":
        return DDP(model), copy.deepcopy(model), update
    if kind == "replicas":  # static graph, the teacher frozen after it is wrapped
        teacher = copy.deepcopy(model)
        return DDP(model, static_graph=True), DDP(teacher), update
    if kind == "shards":
        student, teacher = shard(Student().double()), shard(model)
        student.load_state_dict(teacher.state_dict())
        return student, teacher, update_lists
    if kind == "a whole teacher":
        teacher = copy.deepcopy(model)
        return shard(model), teacher, update_whole
    if kind == "AveragedModel":
        teacher = AveragedModel(model)
        shard(teacher.module)
        return shard(model), teacher, update_average
    teacher = wrap(copy.deepcopy(model))
    return wrap(model), teacher, update


def crops_of(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    sizes = (6, 6, 3, 3)
    return [torch.randn(ROWS, n, 3, generator=draw, dtype=torch.float64) for n in sizes]


def train(kind: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    rank, size = (0, 1) if kind == "alone" else (communicator().rank, communicator().size)
    torch.manual_seed(0)
    student, teacher, follow = pair(kind, Student().double())
    for parameter in teacher.parameters():
        parameter.requires_grad = False
    loss_of = DINOLoss()
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.02)
    losses = []
    for step in range(STEPS):
        crops = [crop.chunk(size)[rank] for crop in crops_of(step)]
        optimizer.zero_grad()
        loss = loss_of(student(crops), teacher(crops[:2]))
        loss.backward()
        if isinstance(student, FSDP):
            student.clip_grad_norm_(0.3)
        else:
            nn.utils.clip_grad_norm_(student.parameters(), 0.3)
        if step < 2:
            for name, parameter in student.named_parameters():
                if "last_layer" in name:
                    parameter.grad = None
        optimizer.step()
        follow(student, teacher, 0.8 + 0.02 * step)
        losses.append(loss.item())
    return losses, whole(student), whole(teacher)


KINDS = ["a plain teacher", "replicas", "shards", "a whole teacher", "AveragedModel", "the class"]


def body(kind: str) -> Any:
    losses, *states = train(kind)
    total = communicator().all_reduce(torch.tensor(losses, dtype=torch.float64)).wait()
    return (total / communicator().size).tolist(), *states


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_that_follows_is_that_of_one_process(ranks: Ranks, kind: str) -> None:
    losses, *states = train("alone")
    for found, *weights in ranks(2, body, kind, timeout=240):
        torch.testing.assert_close(found, losses, rtol=1e-9, atol=0.0)
        for one, state in zip(weights, states, strict=True):
            one.pop("n_averaged", None)
            assert_same([one], state)
