"""Axis context beside axis pipeline: the numbers of one process, whatever the schedule."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional

from context_parallel.test_own_loop import D, Layer, Model, V
from context_parallel.test_trainable import adamw, batches, counted, mean
from meshwright.composition import parallelize
from meshwright.context_parallel import positions
from meshwright.errors import PlanError
from meshwright.gradients import read_loss
from meshwright.plan import ContextPlan, PipelinePlan, Plan, TrainPlan
from meshwright.testing import Ranks
from support.internals.axes import Axes
from support.internals.reference import first_difference, record, train_reference
from support.late import raises_by_now

AXES = {"pipeline": 2, "context": 2}


class Placed(nn.Module):
    """Embeddings of tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(64, D)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids) + self.places(positions(ids.shape[1], ids.device))


def chain() -> nn.Module:
    """Four modules in a row: a stage each, where a rank has two."""
    torch.manual_seed(0)
    layers = [Layer(is_named=False), Layer(is_named=True)]
    return nn.Sequential(Placed(), *layers, nn.Linear(D, V)).double()


def laid_out(
    model: nn.Module, loss: Any, length: int, schedule: str, context: Any, **more: Any
) -> Any:
    plan = Plan(
        axes=Axes.of(AXES),
        context=ContextPlan(**context),
        pipeline=PipelinePlan(schedule=schedule, microbatches=4),
        train=TrainPlan(clip_norm=0.5, **more),
    )
    example = batches(length, 1, 0)[0][0][:2]
    return parallelize(model, plan, optimizer=adamw, loss=loss, example=(example,))


def body(loss: Any, length: int, schedule: str, context: Any, train: Any) -> Any:
    laid = laid_out(chain(), loss, length, schedule, context, **train)
    batch, target = batches(length, 1, 0)[0]
    for rows in (8, 2):  # fewer than microbatches: not split
        whole = read_loss(loss(chain()(batch[:rows]), target[:rows]))
        found = laid.eval(batch[:rows], target[:rows]).loss
        expected = (whole.total / whole.count).detach()
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    return record(laid, batches(length, 1, 0))


def dropping(axes: dict[str, int]) -> Any:
    model = cast("nn.Sequential", chain())
    for place in (1, 2):
        model[place] = nn.Sequential(model[place], nn.Dropout(0.3))
    plan = Plan(
        axes=Axes.of(axes),
        pipeline=PipelinePlan(schedule="zbv", microbatches=4) if axes else PipelinePlan(),
        train=TrainPlan(clip_norm=0.5, dropout="global", recompute=("1",)),
    )
    example = batches(13, 1, 0)[0][0][:2]
    laid = parallelize(model, plan, optimizer=adamw, loss=counted, example=(example,))
    return record(laid, batches(13, 1, 0))


def test_dropout_draws_what_one_process_draws(ranks: Ranks) -> None:
    """In each microbatch by the numbers of its rows, and by the positions that a rank has."""
    (expected,) = ranks(1, partial(dropping, {}))
    for found in ranks(4, partial(dropping, AXES)):
        difference = first_difference(found, expected, 1e-9)
        assert difference is None, difference


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("schedule", "loss", "length", "context", "train"),
    [
        ("gpipe", mean, 12, {"method": "all-to-all"}, {}),
        ("1f1b", counted, 13, {"method": "ring"}, {"recompute": ("1", "2")}),
        ("interleaved1f1b", counted, 13, {}, {"accumulate": 2}),
        ("zbv", counted, 13, {"method": "ring"}, {}),
        ("zbv", mean, 12, {"split": "contiguous"}, {}),
    ],
    ids=["gpipe", "1f1b", "interleaved", "zbv-ring", "zbv-heads"],
)
def test_trains_as_one_process(
    ranks: Ranks, schedule: str, loss: Any, length: int, context: Any, train: Any
) -> None:
    expected = train_reference(
        chain(), batches(length, 1, 0), optimizer=adamw, loss=loss, clip_norm=0.5
    )
    for found in ranks(4, partial(body, loss, length, schedule, context, train)):
        difference = first_difference(found, expected, 1e-9)
        assert difference is None, difference


class Given(Model):
    """No chain: a graph of which attention is no part; positions are in the batch."""

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def given() -> nn.Module:
    torch.manual_seed(0)
    return Given().double()


PACKED = [[7, 5], [12], [1, 4, 7], [2, 2, 8], [12], [9, 3], [6, 6], [1, 11]]
"""The lengths of documents, of which each microbatch has others."""


def packed() -> list[Any]:
    rows = [torch.cat([torch.arange(n) for n in row]) for row in PACKED]
    return [
        ({"ids": ids, "position_ids": torch.stack(rows)}, target)
        for ids, target in batches(12, 1, 0)
    ]


def blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, rows: list[list[int]]
) -> torch.Tensor:
    """Attention of one process in the rows of a batch, each with its documents."""
    found = []
    for row, lengths in enumerate(rows):
        parts = [x[row : row + 1].split(lengths, -2) for x in (q, k, v)]
        each = [ATTEND(*three, is_causal=is_causal) for three in zip(*parts, strict=True)]
        found.append(torch.cat(each, -2))
    return torch.cat(found)


ATTEND = functional.scaled_dot_product_attention


def body_of_graphs(schedule: str, method: str) -> Any:
    plan = Plan(
        axes=Axes.of(AXES),
        context=ContextPlan(method=method),  # pyrefly: ignore[bad-argument-type]
        pipeline=PipelinePlan(schedule=schedule, microbatches=4),  # pyrefly: ignore
        train=TrainPlan(clip_norm=0.5),
    )
    example = {
        key: value[1:2].clone() for key, value in packed()[0][0].items()
    }  # one document, with or without which torch's attention computes the same
    laid = parallelize(given(), plan, optimizer=adamw, loss=counted, example=example)
    return record(laid, packed())


@pytest.mark.few(1)
@pytest.mark.parametrize(("schedule", "method"), [("1f1b", "ring"), ("zbv", "all-to-all")])
def test_graphs_train_as_one_process(ranks: Ranks, schedule: str, method: str) -> None:
    one = given()
    for layer in cast("Any", one).layers:
        layer.attend = partial(blocks, rows=PACKED)
    expected = train_reference(one, packed(), optimizer=adamw, loss=counted, clip_norm=0.5)
    for found in ranks(4, partial(body_of_graphs, schedule, method)):
        difference = first_difference(found, expected, 1e-9)
        assert difference is None, difference


def test_evaluates_without_a_target(ranks: Ranks) -> None:
    def squared(output: torch.Tensor, target: object = None) -> torch.Tensor:
        return output.square().mean()

    def run() -> None:
        ids, _ = batches(12, 1, 0)[0]
        found = laid_out(chain(), squared, 12, "1f1b", {}).eval(ids).loss.item()
        assert found == pytest.approx(squared(chain()(ids)).item(), rel=1e-6)

    ranks(4, run)


def test_what_stages_cannot_have_is_refused(ranks: Ranks) -> None:
    def run() -> None:
        with pytest.raises(PlanError, match="the example has 13 positions.*a multiple of 2"):
            laid_out(Model().double(), mean, 13, "1f1b", {})
        with pytest.raises(PlanError, match=r"positions\(\) in a stage that is traced"):
            laid_out(Model().double(), mean, 12, "1f1b", {})
        laid = laid_out(chain(), mean, 12, "1f1b", {})
        ids, target = batches(12, 1, 0)[0]
        target[5, 2:5] = -100  # in one microbatch, all of them on one rank
        with raises_by_now(ValueError, match="the loss is a mean, so all microb"):
            laid.step(ids, target)

    ranks(4, run)
