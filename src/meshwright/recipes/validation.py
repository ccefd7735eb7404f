"""The loss on held-out text: always the same windows, shared out over the data ranks."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.axes import DATA_AXES
from meshwright.comm import Communicator
from meshwright.composition import Trainable
from meshwright.recipes.text import ByteText

__all__ = ["validation_loss"]


def validation_loss(
    trainable: Trainable, text: ByteText, communicator: Communicator, *, windows: int, batch: int
) -> float:
    """Mean loss in nats a byte over ``windows`` fixed windows, ``batch`` of them at a time.

    Every rank fills the places of its own windows and the ranks add what they have, so the sum is
    taken in one order whatever their number. All ranks call it together and get the same value:
    each runs the model as often as any other, since layouts may need all of them for it.
    """
    sample = text.validation_sample(windows)
    losses = torch.zeros(len(sample), dtype=torch.float64)
    speaks = _speaks_for_its_share(trainable, communicator.rank)
    places = range(len(sample))[trainable.data_rank :: trainable.data_size]
    most = -(-len(sample) // trainable.data_size)
    for start in range(0, most, batch):
        mine = places[start : start + batch]
        inputs, targets = text.validation.batch([sample[place] for place in mine or (0,)])
        inputs, targets = inputs.to(communicator.device), targets.to(communicator.device)
        output = cast(Tensor, trainable.eval(inputs, targets).output)
        if speaks and mine:
            losses[list(mine)] = _window_means(output, targets)
    total = communicator.all_reduce(losses.to(communicator.device), label="validation").wait()
    return losses.mean().item() if total is None else total.mean().item()


def _window_means(logits_BTV: Tensor, target_BT: Tensor) -> Tensor:
    losses_BVT = logits_BTV.double().transpose(1, 2)
    return functional.cross_entropy(losses_BVT, target_BT, reduction="none").mean(1).cpu()


def _speaks_for_its_share(trainable: Trainable, rank: int) -> bool:
    """Check that this rank is the first of those that read the same share of the data."""
    coordinate = trainable.plan.axes.coordinate(rank)
    return not any(coordinate[axis] for axis in coordinate if axis not in DATA_AXES)
