"""Models whose head computes their loss in chunks: the numbers of logits, in every layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from meshwright import fully_shard
from meshwright.comm import connect
from meshwright.composition import check_model, parallelize
from meshwright.errors import PlanError
from meshwright.losses import cross_entropy, in_chunks
from meshwright.plan import PipelinePlan, Plan, TensorPlan, TrainPlan
from meshwright.testing import MODELS, Ranks, Sample, TinyTransformer, assert_same_training
from support.internals.axes import Axes

# Dynamo looks at `.grad` of each input of a graph, and hides what torch says of that.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]
Terms = tuple[torch.Tensor, torch.Tensor]


def words(size: int, generator: torch.Generator) -> torch.Tensor:
    """Labels of which each sample ignores another number."""
    found = torch.randint(11, (size, 6), generator=generator)
    for row in range(size):
        found[row, : row % 5] = -100
    return found


def smoothed(output: Any, target: torch.Tensor) -> Terms:
    """The loss of `OPTIONS`, of logits too."""
    if getattr(output, "loss_terms", None) is not None:
        return output.loss_terms
    x, y = output.flatten(0, 1), target.flatten()
    total = functional.cross_entropy(x, y, reduction="sum", label_smoothing=0.1)
    return total + 0.01 * x.logsumexp(-1)[y != -100].square().sum(), (y != -100).sum()


OPTIONS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0}


class Capped(TinyTransformer):
    """A transformer that bounds its logits."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return 5 * torch.tanh(super().forward(words) / 5)


class Tied(TinyTransformer):
    """The head has the weights of the embedding, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embedding.weight


class Chain(nn.Module):
    """A model whose forward does nothing but call its modules in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.tanh, self.head = nn.Tanh(), nn.Linear(8, 11)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.tanh(self.first(self.embedding(words))))


def sample_of(name: str, build: Callable[[], nn.Module] | None = None, **parts: Any) -> Sample:
    made = MODELS[name]
    parts = {"targets": words, "loss": cross_entropy, **parts}
    return replace(made, build=build or made.build, **parts)


# ---------------------------------------------------------------------------------- layouts

CUT = TensorPlan(
    rules={
        "embedding": "embedding",
        "layers.*.widen": "colwise",
        "layers.*.narrow": "rowwise",
        "head": "colwise_gathered",
    }
)
HEAD = TensorPlan(rules={"embedding": "embedding", "head": "colwise_gathered"})
AGAIN = {"recompute": ("layers.*",)}
GRAPHS = {"compile": True}


def plan_of(train: dict[str, Any] | None = None, schedule: str = "", **parts: Any) -> Plan:
    """Numbers are sizes of axes; all else are tables of the plan."""
    axes = {name: part for name, part in parts.items() if isinstance(part, int)}
    tables = {name.rstrip("_"): part for name, part in parts.items() if name not in axes}
    if schedule:
        tables["pipeline"] = PipelinePlan(schedule=schedule, microbatches=2)  # pyrefly: ignore
    options = {"loss_chunk": 5, "clip_norm": 0.5, **(train or {})}
    return Plan(axes=Axes.of(axes), train=TrainPlan(**options), **tables)  # pyrefly: ignore


LAYOUTS: dict[str, tuple[Sample, Plan]] = {
    "one": (sample_of("transformer"), plan_of()),
    "one, one row": (sample_of("transformer"), plan_of({"loss_chunk": 1})),
    "one, tied, recomputed": (sample_of("transformer", Tied), plan_of(AGAIN)),
    "replicate": (sample_of("transformer"), plan_of({"accumulate": 2}, replicate=2)),
    "replicate tied": (sample_of("transformer", Tied), plan_of(AGAIN, replicate=2)),
    "shard": (sample_of("transformer"), plan_of(shard=2)),
    "shard tied": (sample_of("transformer", Tied), plan_of(AGAIN, shard=2)),
    "hybrid": (sample_of("transformer"), plan_of(replicate=2, shard=2)),
    "tensor": (sample_of("transformer"), plan_of(tensor=2, tensor_=CUT)),
    "tensor tied": (sample_of("transformer", Tied), plan_of(tensor=2, tensor_=HEAD)),
    "tensor recomputed": (sample_of("transformer"), plan_of(AGAIN, tensor=2, tensor_=CUT)),
    "tensor replicate": (sample_of("transformer"), plan_of(replicate=2, tensor=2, tensor_=CUT)),
    "tensor shard": (sample_of("transformer", Tied), plan_of(shard=2, tensor=2, tensor_=HEAD)),
    "pipeline": (sample_of("transformer"), plan_of(schedule="1f1b", pipeline=2)),
    "pipeline chain": (sample_of("tied", Chain), plan_of(schedule="gpipe", pipeline=2)),
    "pipeline in halves": (sample_of("transformer"), plan_of(schedule="zbv", pipeline=2)),
    "pipeline chain in halves": (sample_of("tied", Chain), plan_of(schedule="zb1p", pipeline=2)),
    "pipeline shard": (
        sample_of("transformer"),
        plan_of({"accumulate": 2}, "interleaved1f1b", pipeline=2, shard=2),
    ),
    "pipeline replicate": (sample_of("tied"), plan_of(schedule="1f1b", pipeline=2, replicate=2)),
    "pipeline tensor": (
        sample_of("transformer"),
        plan_of(schedule="1f1b", pipeline=2, tensor=2, tensor_=CUT),
    ),
    "compiled": (sample_of("transformer"), plan_of(GRAPHS)),
    "compiled replicate": (sample_of("transformer"), plan_of(GRAPHS, replicate=2)),
    "compiled shard": (sample_of("transformer", Tied), plan_of({**GRAPHS, **AGAIN}, shard=2)),
    "compiled tensor": (sample_of("transformer"), plan_of(GRAPHS, tensor=2, tensor_=CUT)),
    "compiled pipeline": (sample_of("tied", Chain), plan_of(GRAPHS, "1f1b", pipeline=2)),
}


@pytest.mark.few(2, slow=31)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plan_trains_as_one_process_with_all_logits(ranks: Ranks, name: str) -> None:
    sample, plan = LAYOUTS[name]
    assert_same_training(
        sample,
        plan,
        world=plan.axes.world_size,
        batch_size=16,
        tolerance=1e-12,
        ranks=partial(ranks, timeout=300.0),  # pyrefly: ignore
    )


def with_options(plan: Plan, model: nn.Module, training: Any) -> Any:
    in_chunks(model, "head", chunk=7, **OPTIONS)
    return parallelize(
        model, plan, optimizer=training.optimizer, loss=training.loss, example=training.example
    )


@pytest.mark.few(2, slow=4)
@pytest.mark.parametrize("axes", [{"shard": 2, "tensor": 2}, {"tensor": 2}, {"pipeline": 2}])
def test_own_options_hold_in_every_layout(ranks: Ranks, axes: dict[str, int]) -> None:
    tensor = {"tensor_": CUT} if "tensor" in axes else {}
    schedule = "1f1b" if "pipeline" in axes else ""
    plan = plan_of({"loss_chunk": None}, schedule, **axes, **tensor)
    assert_same_training(
        sample_of("transformer", Capped, loss=smoothed),
        partial(with_options, plan),
        world=plan.axes.world_size,
        batch_size=16,
        clip_norm=0.5,
        tolerance=1e-12,
        ranks=ranks,
    )


def test_the_plan_says_what_it_does_and_what_it_cannot(ranks: Ranks) -> None:
    ranks(2, body_described)
    model = sample_of("transformer").build()
    check_model(model, plan_of(), 1)
    with pytest.raises(PlanError, match=r"recompute names '', which has the head 'head'"):
        check_model(model, plan_of({"recompute": ("",)}), 1)
    with pytest.raises(PlanError, match="loss_chunk = 5: Sequential has no layer, or sev"):
        check_model(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), plan_of(), 1)


def body_described() -> None:
    torch.manual_seed(0)
    trainable = parallelize(
        sample_of("transformer").build(),
        plan_of(tensor=2, tensor_=CUT),
        optimizer=None,
        loss=cross_entropy,
        example=(torch.zeros(2, 6, dtype=torch.int64),),
    )
    described = trainable.describe()
    assert any("train.loss_chunk = 5" in each for each in described.settings)
    assert not [c for c in described.collectives if c.label.startswith("head ")]


# -------------------------------------------------------------------------- models of one's own


def built() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = TinyTransformer().double()
    draw = torch.Generator().manual_seed(1)
    return model, torch.randint(11, (4, 6), generator=draw), words(4, draw)


def gradients(model: nn.Module, terms: Terms) -> list[torch.Tensor]:
    total, count = terms
    return list(torch.autograd.grad(total / count, [*model.parameters()]))


def test_a_model_takes_labels_and_returns_their_loss() -> None:
    model, x, y = built()
    expected = gradients(model, cross_entropy(model(x), y))  # pyrefly: ignore
    names, before = list(model.state_dict()), model(x)
    assert in_chunks(model, "head", chunk=5) is model
    assert list(model.state_dict()) == names
    twin = copy.deepcopy(model)
    for each in (model, twin, model):
        output = each(x, shift_labels=y)
        assert output.logits is None
        torch.testing.assert_close(
            gradients(each, output.loss_terms), expected, rtol=1e-12, atol=1e-15
        )
    assert torch.equal(model(x), before)
    assert torch.equal(model.eval()(x, shift_labels=y), before)
    again = checkpoint(twin, x, shift_labels=y, use_reentrant=False)
    torch.testing.assert_close(gradients(twin, again.loss_terms), expected, rtol=1e-12, atol=1e-15)


class Doubled(TinyTransformer):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return super().forward(words) * 2


class Twice(TinyTransformer):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(words))) + super().forward(words)


class Bypassed(TinyTransformer):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.embedding(words), self.head.weight)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (Doubled, ValueError, "changes its logits by more than scale = 1"),
        (Capped, ValueError, "softcap = None, which a loss in chunks would miss"),
        (Twice, RuntimeError, "was called twice in one forward"),
        (Bypassed, TypeError, "its head was not called"),
    ],
)
def test_a_model_that_does_more_with_its_logits_is_refused(
    kind: type[nn.Module], error: type[Exception], text: str
) -> None:
    _, x, y = built()
    model = in_chunks(kind(), "head")
    for _ in range(2):
        with pytest.raises(error, match=text):
            model(x, shift_labels=y)


def test_a_head_is_a_linear_layer_and_in_chunks_once() -> None:
    model, _, _ = built()
    with pytest.raises(ValueError, match="head='lm_head' to name a torch.nn.Linear, found no mod"):
        in_chunks(model)
    with pytest.raises(ValueError, match=r"found a Embedding; the model has 'head'"):
        in_chunks(model, "embedding")
    in_chunks(model, "head")
    with pytest.raises(ValueError, match="'head' is in chunks: call it once"):
        in_chunks(model, "head")


def body_own_unit() -> list[torch.Tensor]:
    """A head that is a unit of its own is gathered once, and its gradient reduced with others."""
    world = connect()
    model, x, y = built()
    in_chunks(model, "head", chunk=5)
    for part in (*model.layers, model.head, model):  # pyrefly: ignore
        fully_shard(part)  # pyrefly: ignore
    mine = slice(world.rank, None, world.size)
    for _ in range(2):
        model.zero_grad()
        total, _ = model(x[mine], shift_labels=y[mine]).loss_terms
        total.backward()
    return [p.grad.full_tensor() * world.size for p in model.parameters()]  # pyrefly: ignore


def test_a_head_may_be_a_unit_of_its_own(ranks: Ranks) -> None:
    model, x, y = built()
    total, _ = cross_entropy(model(x), y)  # pyrefly: ignore
    expected = torch.autograd.grad(total, [*model.parameters()])
    for found in ranks(2, body_own_unit):
        torch.testing.assert_close(found, list(expected), rtol=1e-12, atol=1e-14)
