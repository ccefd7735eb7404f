"""Losses that count their tokens: the global mean, however the tokens fall on ranks and parts."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.comm import communicator
from meshwright.composition import Trainable, parallelize
from meshwright.plan import PipelinePlan, Plan, TrainPlan
from meshwright.testing import Ranks
from support.internals.axes import Axes
from support.internals.reference import first_difference, record, train_reference
from support.late import raises_by_now

WORDS, LENGTH, STEPS, IGNORED = 11, 6, 2, -100


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Embedding(WORDS, 7), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, WORDS)]
    return nn.Sequential(*layers).double()


def batches(samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each sample counts another number of tokens, and some none at all."""
    torch.manual_seed(1)
    found = []
    for _ in range(STEPS):
        x, y = (torch.randint(WORDS, (samples, LENGTH)) for _ in range(2))
        for row in range(samples):
            y[row, row % (LENGTH + 1) :] = IGNORED
        found.append((x, y))
    return found


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = F.cross_entropy(
        output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (target != IGNORED).sum()


def averaged(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.5, momentum=0.9)  # pyrefly: ignore[bad-argument-type]


def laid_out(axes: dict[str, int], microbatches: int, accumulate: int, loss: object) -> Trainable:
    pipeline = PipelinePlan(schedule="1f1b", microbatches=microbatches)
    train = TrainPlan(accumulate=accumulate, clip_norm=0.1)
    plan = Plan(axes=Axes.of(axes), pipeline=pipeline, train=train)
    example = (torch.zeros(2, LENGTH, dtype=torch.int64),)
    return parallelize(model(), plan, optimizer=sgd, loss=loss, example=example)  # pyrefly: ignore


def body_tokens(axes: dict[str, int], microbatches: int, accumulate: int) -> None:
    trainable = laid_out(axes, microbatches, accumulate, counted)
    ranks, number = trainable.data_size, trainable.data_rank
    parts = microbatches * accumulate
    # The last rank has one sample more for each part: counts of samples differ too.
    share = [parts] * (ranks - 1) + [2 * parts]
    begin = sum(share[:number])
    data = batches(sum(share))
    expected = train_reference(model(), data, optimizer=sgd, loss=counted, clip_norm=0.1)
    rows = slice(begin, begin + share[number])
    run = record(trainable, [(x[rows], y[rows]) for x, y in data])
    assert first_difference(run, expected, 1e-10) is None
    if ranks == 1:
        return
    before = {name: value.clone() for name, value in trainable.weights().items()}
    mean = laid_out(axes, microbatches, accumulate, averaged)
    x, y = data[0][0][rows], data[0][1][rows].clamp(min=0)
    with raises_by_now(ValueError, match=r"equally many samples; found .* return \(sum, count\)"):
        mean.step(x, y)
    fresh = model().state_dict()
    is_late = not communicator().is_on_host  # then one update has happened
    assert all(torch.equal(v, fresh[name]) or is_late for name, v in mean.weights().items())
    assert not any(torch.equal(value, fresh[name]) for name, value in before.items())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("axes", "microbatches", "accumulate"),
    [
        ({"replicate": 2}, 1, 3),
        ({"shard": 2}, 1, 3),
        ({"pipeline": 2}, 3, 2),
        ({"pipeline": 2, "replicate": 2}, 2, 2),
        pytest.param({"pipeline": 2, "shard": 2}, 2, 3, marks=pytest.mark.slow),
        pytest.param({"replicate": 2, "shard": 2}, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_tokens_count_once_wherever_they_fall(
    ranks: Ranks, axes: dict[str, int], microbatches: int, accumulate: int
) -> None:
    ranks(math.prod(axes.values()), body_tokens, axes, microbatches, accumulate)


class WithLoss(nn.Module):
    """Computes its own loss where labels are in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return averaged(self.layers(ids), labels)


def body_means(axes: dict[str, int], microbatches: int, accumulate: int, is_own: bool) -> None:
    x, y = (torch.randint(WORDS, (8, LENGTH), generator=torch.manual_seed(3)) for _ in range(2))
    alike = y.clone()
    alike[:, :2] = IGNORED
    y[1, 2:] = IGNORED

    def step(labels: torch.Tensor) -> float:
        if is_own:
            plan = Plan(axes=Axes.of(axes), train=TrainPlan(accumulate=accumulate))
            trained = parallelize(WithLoss(), plan, optimizer=sgd, loss=lambda loss: loss)
        else:
            trained = laid_out(axes, microbatches, accumulate, averaged)
        rows = [t.chunk(trained.data_size)[trained.data_rank] for t in (x, labels)]
        given = [dict(zip(("ids", "labels"), rows, strict=True))] if is_own else rows
        return trained.step(*given).loss.item()

    assert step(alike) == pytest.approx(averaged(model()(x), alike).item(), abs=1e-12)
    with raises_by_now(ValueError, match=r"equally many elements of the target \(not counting"):
        step(y)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("axes", "microbatches", "accumulate", "is_own"),
    [
        ({"replicate": 2}, 1, 1, False),
        ({"replicate": 2}, 1, 1, True),
        ({"shard": 2}, 1, 2, True),
        ({"tensor": 1}, 1, 4, False),
        ({"context": 2}, 1, 4, False),
        ({"pipeline": 2}, 4, 1, False),
    ],
    ids=str,
)
def test_means_over_unlike_numbers_of_labels_are_refused(
    ranks: Ranks, axes: dict[str, int], microbatches: int, accumulate: int, is_own: bool
) -> None:
    """Also where the model computes the loss from labels in the batch."""
    ranks(math.prod(axes.values()), body_means, axes, microbatches, accumulate, is_own)
