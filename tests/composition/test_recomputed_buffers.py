"""Modules whose forward writes buffers train as without `[train] recompute`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.composition import parallelize
from meshwright.plan import PipelinePlan, Plan, TensorPlan, TrainPlan
from meshwright.testing import Ranks
from support.internals.axes import Axes

CUT = TensorPlan(rules={"c": "colwise", "d": "rowwise"})
STEPS = 3
ROWS = 8


class Counting(nn.Linear):
    """Counts its forwards, in place and in a new tensor."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("again", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.again = self.again + 1
        return torch.tanh(super().forward(x) * (1 + self.count + self.again))


class Moving(nn.Linear):
    """Divides by a running mean, which is the same with all shares of a batch."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(self.weight.detach().abs().mean(1), 0.3)
        return torch.tanh(super().forward(x) / self.mean)


class Own(Counting):
    """Recomputes itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "own": Own,
    "counting": Counting,
    "moving": Moving,
    "norm": lambda: nn.BatchNorm1d(4),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "replicate": {"replicate": 2},
    "shard": {"shard": 2},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
}


class Block(nn.Module):
    """One link of the chain."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.middle = middle
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out(self.middle(x)))


class Net(nn.Module):
    """A chain around ``b``."""

    def __init__(self, middle: str) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = Block(MIDDLES[middle]())
        self.c = nn.Linear(4, 6)
        self.d = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.c(self.b(self.a(x))))


def build(middle: str) -> nn.Module:
    torch.manual_seed(3)
    return Net(middle).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    return x, torch.randn(ROWS, 2, generator=generator, dtype=torch.float64)


def in_one_process(model: nn.Module, parts: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer, losses = sgd(model.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = 0.0
        for x, y in zip(*(each.chunk(parts) for each in batch(step)), strict=True):
            found = F.mse_loss(model(x), y) / parts
            found.backward()
            loss += found.item()
        optimizer.step()
        losses.append(loss)
    return losses, {key: value.detach() for key, value in model.state_dict().items()}


def laid_out(
    model: nn.Module, sizes: dict[str, int], **train: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    plan = Plan(
        axes=Axes.of(sizes or {"replicate": 1}),
        train=TrainPlan(**train),
        tensor=CUT if "tensor" in sizes else TensorPlan(),
        pipeline=PipelinePlan(microbatches=2) if "pipeline" in sizes else PipelinePlan(),
    )
    trainable = parallelize(model, plan, optimizer=sgd, loss=F.mse_loss, example=batch(0)[:1])
    count, rank = trainable.data_size, trainable.data_rank
    losses = [
        float(trainable.step(*(part.chunk(count)[rank] for part in batch(step))).loss)
        for step in range(STEPS)
    ]
    return losses, trainable.weights()


def compare(found: Any, expected: Any) -> None:
    """Compare losses, and the values of parameters and buffers that ``found`` has."""
    torch.testing.assert_close(found[0], expected[0])
    assert found[1]
    torch.testing.assert_close(found[1], {key: expected[1][key] for key in found[1]})


def body(middle: str, sizes: dict[str, int], batch_norm: str | None, **more: Any) -> None:
    model, train = build(middle), more
    if sizes and "tensor" not in sizes:  # else the setting has no effect
        train["batch_norm"] = batch_norm
    if train.get("batch_norm") == "local":
        expected = laid_out(copy.deepcopy(model), sizes, **train)
    else:
        expected = in_one_process(copy.deepcopy(model), 2 if "pipeline" in sizes else 1)
    compare(laid_out(model, sizes, recompute=("b",), **train), expected)


@pytest.mark.few(6, slow=14)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("middle", "batch_norm"),
    [("counting", None), ("moving", None), ("norm", "local"), ("norm", "sync")],
)
def test_a_recomputed_forward_leaves_buffers(
    ranks: Ranks, middle: str, batch_norm: str | None, layout: str
) -> None:
    sizes = LAYOUTS[layout]
    ranks(2 if sizes else 1, body, middle, sizes, batch_norm)


@pytest.mark.slow
@pytest.mark.parametrize("middle", ["counting", "moving"])
@pytest.mark.parametrize("layout", ["alone", "replicate", "shard"])
@pytest.mark.devices("host", reason="nothing is compiled under a dispatch mode")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_too(ranks: Ranks, middle: str, layout: str) -> None:
    sizes = LAYOUTS[layout]
    ranks(2 if sizes else 1, body, middle, sizes, None, compile=True)


def body_example() -> None:
    model = build("own")
    plan = Plan(axes=Axes.of({"tensor": 2}), tensor=CUT)
    parallelize(model, plan, optimizer=sgd, loss=F.mse_loss, example=batch(0)[:1])
    assert [model.get_buffer(f"b.middle.{name}").item() for name in ("count", "again")] == [0, 0]


@pytest.mark.slow
def test_the_example_run_of_what_recomputes_itself_leaves_nothing(ranks: Ranks) -> None:
    ranks(2, body_example)


class Listed(nn.Module):
    """A chain of a layer, a sequence and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.Sequential(Counting(), Counting())
        self.c = nn.ModuleList([Counting(), Counting()])
        self.d = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x))
        for layer in self.c:
            x = layer(x)
        return self.d(x)


def body_listed(sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    model = Listed().double()
    calls: list[torch.Tensor] = []
    forward = Counting.forward

    def counted(self: Counting, x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return forward(self, x)

    monkeypatch.setattr(Counting, "forward", counted)
    parts = 2 if "pipeline" in sizes else 1
    expected = in_one_process(copy.deepcopy(model), parts)
    counts = []
    for names in ((), ("b", "c", "c.*")):
        given = copy.deepcopy(model)
        plan = Plan(
            axes=Axes.of(sizes),
            train=TrainPlan(recompute=names),
            pipeline=PipelinePlan(microbatches=2) if parts == 2 else PipelinePlan(),
        )
        trained = parallelize(given, plan, optimizer=sgd, loss=F.mse_loss, example=batch(0)[:1])
        count, rank = trained.data_size, trained.data_rank
        calls.clear()
        losses = [
            float(trained.step(*(part.chunk(count)[rank] for part in batch(step))).loss)
            for step in range(STEPS)
        ]
        counts.append(len(calls))
        compare((losses, trained.weights()), expected)
    assert counts[0] and counts[1] == 2 * counts[0]


@pytest.mark.parametrize("layout", ["replicate", "shard", "pipeline"])
def test_what_is_never_called_itself_recomputes_what_it_holds(ranks: Ranks, layout: str) -> None:
    """A list, and a sequence that a pipeline takes apart."""

    def body() -> None:
        with pytest.MonkeyPatch.context() as patch:
            body_listed(LAYOUTS[layout], patch)

    ranks(2, body)
