"""The byte model with experts in one process, its auxiliary loss written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from support.internals.recipes import (
    TrainConfig,
    adamw,
    learning_rate,
    open_task,
    set_learning_rate,
)
from support.internals.sampling import Sampler


class Curve(NamedTuple):
    """What each step of a run has measured."""

    losses: list[float]
    imbalances: list[float]
    """Tokens of the busiest expert, over the mean of its layer."""


def curve_of_metrics(folder: Path) -> Curve:
    """Read what a run has written."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return Curve([row["loss"] for row in rows], [row["imbalance"] for row in rows])


def curve_of_one_process(config: TrainConfig) -> Curve:
    """Train on whole batches, without any plan."""
    task, found = open_task(config), Curve([], [])
    model: Any = task.build().model.to(getattr(torch, config.plan.precision.parameters))
    optimizer, logits = adamw(config.optimizer)(model.parameters()), []
    for layer in model.layers:
        layer.feed_forward.router.register_forward_hook(lambda *call: logits.append(call[2]))
    sampler = Sampler(len(task.data.training), config.data.batch_size, config.plan.train.seed)
    number, k, steps = config.model.experts, config.model.top_k, config.run.steps
    for step in range(1, steps + 1):
        logits.clear()
        set_learning_rate(optimizer, learning_rate(config.optimizer, step, steps))
        x, y = task.data.training.batch(sampler.next_indices())  # pyrefly: ignore
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        counts = [each.topk(k).indices.flatten().bincount(minlength=number) for each in logits]
        every = torch.cat(logits).softmax(-1)  # of all layers at once, as in Hugging Face
        shares = sum(counts) / len(every)
        loss = loss + config.plan.expert.auxiliary * number * (shares * every.mean(0)).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.plan.train.clip_norm or torch.inf)
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(loss.item())
        found.imbalances.append(max((c.max() * number / c.sum()).item() for c in counts))
    return found


def apart(ours: list[float], theirs: list[float]) -> list[float]:
    """The largest relative difference so far, at each step."""
    pairs = zip(ours, theirs, strict=True)
    each = torch.tensor([abs(a - b) / abs(b) for a, b in pairs], dtype=torch.float64)
    return each.cummax(0).values.tolist()
