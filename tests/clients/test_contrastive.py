"""A contrastive loss over the features of all ranks, its logit scale learned and clamped.

As open_clip has it: features are gathered with their gradients, the loss is local or global, and a
large batch may be made of several passes whose features are kept.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch import nn

from meshwright import DistributedDataParallel as DDP  # noqa: N817
from meshwright.comm import communicator
from meshwright.fsdp import fully_shard
from meshwright.testing import Ranks
from support.clients import assert_same, whole

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning"),
]

WIDTH, EMBED, WORDS, ROWS, STEPS = 8, 6, 11, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.fc, self.proj = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 12),
            nn.Linear(12, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(F.gelu(self.fc(self.ln(x))))


class CLIP(nn.Module):
    def __init__(self, scale_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.visual = nn.ModuleList(Block() for _ in range(2))
        self.words = nn.Embedding(WORDS, WIDTH)
        self.text = nn.ModuleList(Block() for _ in range(2))
        self.image_projection = nn.Parameter(torch.randn(WIDTH, EMBED) * WIDTH**-0.5)
        self.text_projection = nn.Parameter(torch.randn(WIDTH, EMBED) * WIDTH**-0.5)
        # Close to the bound, so that the clamp has something to do.
        self.logit_scale = nn.Parameter(torch.full(scale_shape, 0.005))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, y = self.patches(image).flatten(2).transpose(1, 2), self.words(text)
        for one, other in zip(self.visual, self.text, strict=True):
            x, y = one(x), other(y)
        images = F.normalize(x.mean(1) @ self.image_projection, dim=-1)
        texts = F.normalize(y.mean(1) @ self.text_projection, dim=-1)
        return images, texts, self.logit_scale.exp()


class Setting(NamedTuple):
    wrapper: str
    is_local: bool
    passes: int = 1

    @property
    def scale_shape(self) -> tuple[int, ...]:
        return (1,) if self.wrapper == "fully_shard" else ()  # which takes no scalars


def gathered(features: torch.Tensor) -> torch.Tensor:
    if not dist.is_initialized():
        return features
    return torch.cat(torch.distributed.nn.functional.all_gather(features))


def clip_loss(
    images: torch.Tensor, texts: torch.Tensor, scale: torch.Tensor, *, is_local: bool, rank: int
) -> torch.Tensor:
    all_images, all_texts = gathered(images), gathered(texts)
    if is_local:
        per_image, per_text = scale * images @ all_texts.T, scale * texts @ all_images.T
    else:
        per_image = scale * all_images @ all_texts.T
        per_text = per_image.T
    count = len(per_image)
    labels = torch.arange(count) + (count * rank if is_local else 0)
    return (F.cross_entropy(per_image, labels) + F.cross_entropy(per_text, labels)) / 2


def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    image = torch.randn(ROWS, 3, 4, 4, generator=draw, dtype=torch.float64)
    text = torch.randint(WORDS, (ROWS, 5), generator=draw)
    return image.chunk(size)[rank], text.chunk(size)[rank]


def losses_of(model: Any, batch: tuple[torch.Tensor, ...], setting: Setting, rank: int) -> float:
    """Run a step's passes; gradients are added up. New features take the place of kept ones.

    The logit scale gets the gradient of the whole loss in each pass, here and in one process.
    """
    parts = [*zip(*(each.chunk(setting.passes) for each in batch), strict=True)]
    if setting.passes == 1:
        images, texts, scale = model(*batch)
        loss = clip_loss(images, texts, scale, is_local=setting.is_local, rank=rank)
        loss.backward()
        return loss.item()
    with torch.no_grad():
        kept = [model(*part)[:2] for part in parts]
    for number, part in enumerate(parts):
        images, texts, scale = model(*part)
        found = [
            torch.cat([new if at == number else old[kind] for at, old in enumerate(kept)])
            for kind, new in enumerate((images, texts))
        ]
        loss = clip_loss(*found, scale, is_local=setting.is_local, rank=rank)
        loss.backward()
    return loss.item()


def train(setting: Setting, rank: int = 0, size: int = 1) -> tuple[list[float], Any, int]:
    torch.manual_seed(0)
    plain: Any = CLIP(setting.scale_shape).double()
    model = plain
    if size > 1 and setting.wrapper == "fully_shard":
        for block in (*model.visual, *model.text):
            fully_shard(block)
        fully_shard(model)
    elif size > 1:
        model = DDP(model)
    named = [*model.named_parameters()]
    bare = [p for name, p in named if p.ndim < 2 or "ln" in name or "logit_scale" in name]
    rest = [p for name, p in named if not any(p is one for one in bare)]
    groups = [{"params": bare, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.2}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.98), eps=1e-6)
    losses, clamped = [], 0
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(losses_of(model, batch(step, rank, size), setting, rank))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            plain.logit_scale.clamp_(0, math.log(100))
        clamped += int(whole(plain)["logit_scale"].item() in (0.0, math.log(100)))
    return losses, plain, clamped


def body(setting: Setting) -> tuple[list[float], dict[str, torch.Tensor]]:
    world = communicator()
    losses, model, _ = train(setting, world.rank, world.size)
    total = world.all_reduce(torch.tensor(losses, dtype=torch.float64)).wait()
    return (total / world.size).tolist(), whole(model)


@pytest.mark.parametrize(
    ("size", "setting"),
    [
        (2, Setting("DDP", is_local=True)),
        (4, Setting("DDP", is_local=False)),
        (2, Setting("fully_shard", is_local=False)),
        (4, Setting("fully_shard", is_local=True)),
        (2, Setting("DDP", is_local=True, passes=2)),
        (2, Setting("fully_shard", is_local=True, passes=2)),
    ],
    ids=str,
)
def test_a_loss_over_all_ranks_features(ranks: Ranks, size: int, setting: Setting) -> None:
    losses, model, clamped = train(setting)
    assert clamped > 0
    for found, weights in ranks(size, body, setting, timeout=240):
        torch.testing.assert_close(found, losses, rtol=1e-9, atol=0.0)
        assert_same([weights], whole(model))
