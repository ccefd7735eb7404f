"""A plan with axis context trains a model to the numbers of one process, or refuses it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from context_parallel.test_own_loop import Model, V
from meshwright.comm import settle
from meshwright.composition import parallelize
from meshwright.context_parallel import positions
from meshwright.errors import PlanError
from meshwright.gradients import read_loss
from meshwright.plan import ContextPlan, Plan, TrainPlan
from meshwright.testing import Ranks
from support.internals.axes import Axes
from support.internals.reference import first_difference, record, train_reference
from support.late import raises_by_now

ROWS = 8
Batch = tuple[torch.Tensor, torch.Tensor]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return Model().double()


def batches(length: int, parts: int, part: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(V, (3, ROWS, length + 1), generator=generator)
    mine = [each.chunk(parts)[part] for each in ids]
    return [(each[:, :-1].clone(), each[:, 1:].clone()) for each in mine]


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Over more of the words in some places than in others."""
    rows = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    counts = target.flatten() % 3 > 0
    return (rows * counts).sum(), counts.sum()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def laid_out(
    model: nn.Module,
    axes: dict[str, int],
    loss: Any,
    length: int,
    context: Any,
    train: Any,
    name: str = "",
) -> Any:
    """Lay out ``model``, whose batch is a tensor, or a dict that has it by ``name``."""
    plan = Plan(
        axes=Axes.of(axes),
        context=ContextPlan(**context),
        train=TrainPlan(clip_norm=0.5, **train),
    )
    example = batches(length, 1, 0)[0][0][:2]
    given: Any = {name: example} if name else (example,)
    return parallelize(model, plan, optimizer=adamw, loss=loss, example=given)


def body(axes: dict[str, int], loss: Any, length: int, context: Any, train: Any) -> Any:
    laid = laid_out(model_of(), axes, loss, length, context, train)
    batch, target = batches(length, laid.data_size, laid.data_rank)[0]
    whole = read_loss(loss(model_of()(batch), target))
    before = laid.eval(batch, target).loss
    torch.testing.assert_close(before.double(), whole.total / whole.count, rtol=1e-6, atol=0)
    return record(laid, batches(length, laid.data_size, laid.data_rank))


@pytest.mark.parametrize(
    ("axes", "loss", "length", "context", "train"),
    [
        ({"context": 2}, mean, 12, {"method": "ring"}, {"recompute": ("layers.*",)}),
        ({"context": 2}, counted, 13, {"method": "all-to-all"}, {"accumulate": 2}),
        ({"context": 4}, counted, 13, {}, {}),
        pytest.param(
            *({"replicate": 2, "context": 2}, mean, 12, {"split": "contiguous"}, {}),
            marks=pytest.mark.slow,
        ),
        ({"shard": 2, "context": 2}, counted, 9, {"method": "ring"}, {"accumulate": 2}),
        pytest.param({"context": 2}, mean, 12, {}, {"compile": True}, marks=pytest.mark.slow),
    ],
    ids=["ring", "heads", "four", "replicate", "shard", "compile"],
)
def test_trains_as_one_process(
    ranks: Ranks, axes: dict[str, int], loss: Any, length: int, context: Any, train: Any
) -> None:
    expected = train_reference(
        model_of(), batches(length, 1, 0), optimizer=adamw, loss=loss, clip_norm=0.5
    )
    size = Axes.of(axes).world_size
    for found in ranks(size, partial(body, axes, loss, length, context, train)):
        difference = first_difference(found, expected, 1e-9)
        assert difference is None, difference


def dropped() -> nn.Module:
    """With dropout behind each layer, which draws in the recomputation again, and on ids."""
    model = model_of()
    for number, layer in enumerate(model.layers):
        model.layers[number] = nn.Sequential(layer, nn.Dropout(0.3))
    return model


def dropping(axes: dict[str, int], context: Any, train: Any) -> Any:
    plan = Plan(
        axes=Axes.of(axes),
        context=ContextPlan(**context),
        train=TrainPlan(clip_norm=0.5, dropout="global", **train),
    )
    example = batches(13, 1, 0)[0][0][:2]
    laid = parallelize(dropped(), plan, optimizer=adamw, loss=counted, example=(example,))
    return record(laid, batches(13, laid.data_size, laid.data_rank))


@pytest.mark.parametrize(
    ("axes", "context", "train"),
    [
        ({"context": 2}, {"method": "ring"}, {"recompute": ("layers.*",)}),
        pytest.param(
            *({"context": 2, "replicate": 2}, {"method": "all-to-all"}, {"accumulate": 2}),
            marks=pytest.mark.slow,
        ),
        ({"context": 2, "shard": 2}, {"split": "documents"}, {}),
    ],
    ids=["recompute", "replicate", "shard"],
)
def test_dropout_draws_what_one_process_draws(
    ranks: Ranks, axes: dict[str, int], context: Any, train: Any
) -> None:
    """Parts of activations get their parts of the masks, by the positions that a rank has."""
    (expected,) = ranks(1, partial(dropping, {}, {}, {}))
    for found in ranks(Axes.of(axes).world_size, partial(dropping, axes, context, train)):
        difference = first_difference(found, expected, 1e-9)
        assert difference is None, difference


class Mixing(Model):
    """A convolution over time after the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Conv1d(16, 16, 3, padding=1)
        self.layers[0] = nn.Sequential(self.layers[0], Turned(self.mixer))


class Again(Mixing):
    """One module is called before each layer, on other values."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Tanh()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(positions(ids.shape[1], ids.device))
        for layer in self.layers:
            x = layer(self.before(x))
        return self.head(x)


class Turned(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x.transpose(1, 2)).transpose(1, 2)


class Eager(Model):
    """Attention as a product of its own."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.attend = product


class Counting(Model):
    """Counts positions from 0 itself."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Losing(Model):
    """Returns a loss of its own, too."""

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = super().forward(ids)
        return output, output.square().mean()


def product(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object) -> torch.Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (Mixing, r"axis context: split over 2 ranks.*'layers\.0\.1.*relative error.*set axis"),
        (Again, r"first in 'layers\.0\.1"),
        (Eager, r"first in 'layers\.0\.out' \(Linear; relative error"),
        (Counting, r"axis context: split over 2 ranks.*first in 'layers\.0\.qkv'"),
        (Losing, r"though those of its modules agree \(Losing; .* Does it compute a loss\?"),
    ],
    ids=["convolution", "called twice", "product", "positions", "own loss"],
)
def test_layers_that_mix_positions_are_refused_by_name(
    ranks: Ranks, make: Callable[[], nn.Module], match: str
) -> None:
    def run() -> None:
        torch.manual_seed(0)
        with pytest.raises(PlanError, match=match):
            laid_out(make().double(), {"context": 2}, mean, 12, {}, {})

    ranks(2, run)


def named(output: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target["labels"].flatten())


def shifting(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return counted(output[:, :-1], target[:, 1:])


def padding_aside(
    output: torch.Tensor, target: torch.Tensor, padding: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    losses = functional.cross_entropy(
        output.flatten(0, 1), target.flatten(), ignore_index=padding, reduction="sum"
    )
    return losses, (target != padding).sum()


def test_losses_that_shift_labels_are_refused(ranks: Ranks) -> None:
    """But none that ignores a label of its own at the end of all rows."""

    def run() -> None:
        ids, target = batches(12, 1, 0)[0]
        with raises_by_now(ValueError, match="as if it shifted labels itself"):
            laid_out(model_of(), {"context": 2}, shifting, 12, {}, {}).step(ids, target)
        target[:, 4:] = 0
        laid_out(model_of(), {"context": 2}, padding_aside, 12, {}, {}).step(ids, target)
        settle()

    ranks(2, run)


def test_parts_without_labels_count_nothing(ranks: Ranks) -> None:
    def run() -> None:
        ids, target = batches(12, 1, 0)[0]
        target[:, :-1] = -100
        for loss in (partial(padding_aside, padding=-100), mean):
            expected = mean(model_of()(ids), target).item()
            laid = laid_out(model_of(), {"context": 2}, loss, 12, {"split": "contiguous"}, {})
            assert laid.eval(ids, target).loss.item() == pytest.approx(expected, rel=1e-6)

    ranks(2, run)


def test_a_target_by_name_is_split_beside_a_batch_by_name(ranks: Ranks) -> None:
    def run() -> None:
        ids, target = batches(12, 1, 0)[0]
        laid = laid_out(model_of(), {"context": 2}, named, 12, {"sequence": {"ids": 1}}, {}, "ids")
        found = laid.step({"ids": ids}, {"labels": target}).loss.item()
        assert found == pytest.approx(mean(model_of()(ids), target).item(), rel=1e-12)

    ranks(2, run)


def test_batches_that_cannot_be_split_are_refused(ranks: Ranks) -> None:
    def run() -> None:
        laid = laid_out(model_of(), {"context": 2}, mean, 12, {}, {})
        ids, target = batches(12, 1, 0)[0]
        with pytest.raises(ValueError, match="batch key 'labels' goes to a model that shifts it"):
            laid.step({"ids": ids, "labels": target})
        with pytest.raises(ValueError, match="a row has 1 tokens for 2 ranks"):
            laid.step(ids[:, :1], target[:, :1])
        with pytest.raises(ValueError, match=r"shape \(1, 12, 12\), has .* in several dims"):
            laid.step({"ids": ids, "bias": torch.zeros(1, 12, 12)}, target)
        with pytest.raises(ValueError, match="one length of the sequences, in dim 1"):
            laid.step(ids[:, 0], target[:, 0])
        with raises_by_now(ValueError, match=r"labels of -100\); found 48 on ranks \[0\]; 40 on"):
            laid.step(ids[:, :11], target[:, :11])  # a mean over 6 and 5 positions
        ignoring = target.clone()
        ignoring[:, :3] = -100
        with raises_by_now(ValueError, match=r"labels of -100\); found \d+ on ranks \[0\]; \d+"):
            laid.step(ids, ignoring)
        with raises_by_now(ValueError, match="the loss is a mean, so all microbatches of a step"):
            laid_out(model_of(), {"context": 2}, named, 12, {}, {}).step(ids, {"labels": ignoring})
        laid.step(ids, target)
        narrow = copy.deepcopy(model_of())
        with pytest.raises(PlanError, match="pipeline"):
            laid_out(narrow, {"pipeline": 2, "context": 1}, mean, 12, {"split": "zigzag"}, {})

    ranks(2, run)
