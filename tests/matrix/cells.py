"""The columns of the matrix of layouts, and the plan and the model of one of its cells."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.context_parallel import positions
from meshwright.expert_parallel import experts
from meshwright.plan import (
    BucketPlan,
    ContextPlan,
    ExpertPlan,
    PipelinePlan,
    Plan,
    ShardPlan,
    TensorPlan,
    TrainPlan,
)
from meshwright.testing import MODELS, Sample
from support.expert_parallel.samples import D, Fused, Own
from support.internals.axes import Axes
from support.internals.precision import FloatName, Precision
from support.internals.recipes import LanguageModel, ModelConfig
from support.pairwise import pairwise

SCHEDULES = (
    *("gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "zb1p", "zb2p"),
    *("zbv", "vhalf", "vmin", "dualpipev"),
)
HALVES = ("zb1p", "zb2p", "zbv", "vhalf", "vmin", "dualpipev")
LOSSES = ("mean", "counted")
PRECISIONS = ("double", "bfloat16", "float16", "narrow")
ACCUMULATED = (1, 2)
CLIPPED = (False, True)
OPTIMIZERS = ("momentum", "adamw")
OPTIONS = ("", "recompute", "other units")
EXPERT_OPTIONS = (*OPTIONS, "pairs", "compile")

SINGLE_AXES = (
    *("replicate=2", "shard=2", "tensor=2", "pipeline=2"),
    *("replicate=3", "shard=3", "tensor=3", "replicate=4", "shard=4", "tensor=4"),
)
PAIRS_OF_AXES = (
    *("replicate=2,shard=2", "replicate=2,tensor=2", "shard=2,tensor=2"),
    *("pipeline=2,replicate=2", "pipeline=2,shard=2", "pipeline=2,tensor=2"),
)
EXPERT_AXES = (
    *("expert=2", "expert=3", "expert=4"),
    *("replicate=2,expert=2", "shard=2,expert=2", "expert=2,tensor=2", "pipeline=2,expert=2"),
    *("expert=2,shard=2", "expert=2,pipeline=2"),
)
THREE_WITH_EXPERTS = (
    *("replicate=2,shard=2,expert=2", "shard=2,expert=2,tensor=2", "shard=2,expert=4"),
    *("pipeline=2,shard=2,expert=2", "pipeline=2,replicate=2,expert=2"),
)
CONTEXT_AXES = (
    *("context=2", "context=4", "replicate=2,context=2", "shard=2,context=2"),
    *("context=2,expert=2", "context=2,tensor=2", "pipeline=2,context=2"),
)
EIGHT_WITH_CONTEXT = (
    *("replicate=2,shard=2,context=2", "replicate=2,context=4", "shard=2,context=4"),
    *("context=4,tensor=2", "replicate=2,context=2,expert=2", "shard=2,context=2,expert=2"),
    *("context=2,expert=2,tensor=2", "context=4,expert=2", "pipeline=2,context=2,expert=2"),
)
"""Layouts of 8 ranks."""
METHODS = ("ring", "all-to-all")
WAYS: tuple[Mapping[str, Any], ...] = (
    *({"accumulate": 2}, {"option": "recompute"}, {"precision": "bfloat16"}),
    {"option": "compile"},
)
"""What cells with axis context do beside their layout."""
REVERSED = tuple(",".join(reversed(axes.split(","))) for axes in PAIRS_OF_AXES)
"""The first axis varies slowest over the ranks."""
THREE_AXES = (
    *("replicate=2,shard=2,tensor=2", "pipeline=2,shard=2,tensor=2"),
    *("pipeline=2,replicate=2,tensor=2", "pipeline=2,replicate=2,shard=2"),
)
THREE_SCHEDULES = ("", "1f1b", "zb1p", "dualpipev")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A model, and a way to train it; its fields are the columns."""

    axes: str
    model: str
    schedule: str = ""
    loss: str = "mean"
    precision: str = "double"
    accumulate: int = 1
    is_clipped: bool = False
    optimizer: str = "momentum"
    option: str = ""
    method: str = ""
    """Of axis context."""
    steps: int = 3

    def __str__(self) -> str:
        clipped = "clipped" if self.is_clipped else ""
        words = (self.axes, self.schedule, self.model, self.loss, self.precision)
        more = (f"x{self.accumulate}", clipped, self.optimizer, self.option, self.method)
        return " / ".join(word for word in (*words, *more) if word)

    @property
    def sizes(self) -> dict[str, int]:
        pairs = (text.split("=") for text in self.axes.split(","))
        return {name: int(size) for name, size in pairs}

    def size(self, *names: str) -> int:
        """How many ranks the axes ``names`` have together."""
        return Axes.of({n: s for n, s in self.sizes.items() if n in names}).world_size

    @property
    def world(self) -> int:
        return self.size(*self.sizes)

    @property
    def shares(self) -> int:
        return self.size("replicate", "shard", "expert")

    @property
    def microbatches(self) -> int:
        return 2 * self.size("pipeline") if self.schedule else 1

    @property
    def batch_norm(self) -> Literal["local", "sync"] | None:
        if "batch norm" not in self.model:
            return None
        return "sync" if self.model.endswith("of all ranks") else "local"


# ------------------------------------------------------------------------------------ models


class Odd(nn.Module):
    """All that has broken a layout somewhere, in one: see the names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.twice = nn.Linear(7, 7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.uneven = nn.Linear(7, 13)
        self.back = nn.Linear(13, 7, bias=False)
        self.unused = nn.Linear(3, 2)
        self.head = nn.Linear(7, 11)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        y = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        z = self.back(torch.tanh(self.uneven(self.frozen(y))))
        return self.head(x + z)


class Gated(nn.Module):
    """A norm between layers that are cut: its gradient is a sum over ranks of axis tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 16)
        self.norm = nn.LayerNorm(2)
        self.down = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).unflatten(-1, (-1, 2))
        return self.down(self.norm(hidden).flatten(-2))


class Routed(nn.Module):
    """A router and its experts, behind a norm."""

    def __init__(self, inside: nn.Module, k: int, width: int = D) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, inside.num_experts)
        self.experts, self.k = inside, k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).flatten(0, -2)
        weights, indices = self.router(rows).softmax(-1).topk(self.k)
        return x + self.experts(rows, indices, weights).view_as(x)


class Placed(nn.Module):
    """Embeddings of words and of their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, WIDTH), nn.Embedding(16, WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.words(words) + self.places(positions(words.shape[1], words.device))


class Attention(nn.Module):
    """Causal, with half as many heads of keys; those of a rank follow from the layers' width."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.v, self.out = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (
            each(y).unflatten(-1, (-1, 2)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + torch.tanh(self.out(y.transpose(1, 2).flatten(2)))


WIDTH = 16


def _attention(*between: nn.Module) -> nn.Module:
    first, second = between or (nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(Placed(), Attention(), first, Attention(), second, nn.Linear(WIDTH, 11))


def _attention_mixture() -> nn.Module:
    first = Routed(experts(Own(3, WIDTH)), 2, WIDTH)
    return _attention(first, Routed(Fused(4, d=WIDTH), 1, WIDTH))


def _words_of(length: int) -> Callable[[int, torch.Generator], torch.Tensor]:
    return lambda rows, generator: torch.randint(11, (rows, length), generator=generator)


def _mixture() -> nn.Module:
    layers = (Routed(experts(Own(3)), 2), nn.Linear(D, D), Routed(Fused(4), 1))
    return nn.Sequential(nn.Embedding(11, D), *layers, nn.Linear(D, 11))


def _deep() -> nn.Module:
    layers = [(nn.Linear(7, 7), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*itertools.chain(*layers), nn.Linear(7, 5))


def _dropout() -> nn.Module:
    more = (nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 5))
    return nn.Sequential(nn.Linear(7, 8), nn.Dropout(0.5), nn.Linear(8, 8), *more)


def _language_model(**options: Any) -> Callable[[], nn.Module]:
    return lambda: LanguageModel(ModelConfig(dim=16, heads=4, hidden=20, **options))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model of the matrix."""

    sample: Sample
    rules: Any = None
    """Of axis tensor."""
    recompute: tuple[str, ...] = ()
    """What the option of that name computes again."""


def _of_words(name: str, build: Callable[[], nn.Module]) -> Sample:
    return replace(MODELS["transformer"], name=name, build=build)


_BATCH_NORM = Row(
    sample=MODELS["batch_norm"], rules={"0": "colwise_gathered", "3": "rowwise_scattered"}
)
_ROWS: dict[str, Row] = {
    "sequential": Row(
        sample=MODELS["sequential"], rules={"0": "colwise", "2": "rowwise"}, recompute=("0",)
    ),
    "frozen": Row(
        sample=MODELS["frozen"],
        rules={"0": "colwise", "2": "rowwise", "4": "colwise_gathered"},
        recompute=("2",),
    ),
    "uneven": Row(
        sample=MODELS["uneven"],
        rules={"0": "colwise", "2": "rowwise", "3": "rowwise_scattered"},
        recompute=("2",),
    ),
    "unused": Row(sample=MODELS["unused"], rules={"used": "colwise_gathered"}, recompute=("used",)),
    "skip": Row(
        sample=MODELS["skip"],
        rules={"first": "colwise_gathered", "head": "rowwise_scattered"},
        recompute=("third",),
    ),
    "reused": Row(
        sample=MODELS["reused"],
        rules={"layer": "colwise_gathered", "head": "rowwise_scattered"},
        recompute=("layer",),
    ),
    "tied": Row(
        sample=MODELS["tied"],
        rules={"embedding": "embedding", "hidden": "colwise_gathered", "head": "colwise_gathered"},
        recompute=("hidden",),
    ),
    "transformer": Row(
        sample=MODELS["transformer"],
        rules={
            "embedding": "embedding",
            "layers.*.widen": "colwise",
            "layers.*.narrow": "rowwise",
            "head": "colwise_gathered",
        },
        recompute=("layers.*",),
    ),
    "keywords": Row(
        sample=MODELS["keywords"], rules={"left": "colwise_gathered", "right": "rowwise_scattered"}
    ),
    "batch norm": _BATCH_NORM,
    "batch norm of all ranks": _BATCH_NORM,
    "dropout": Row(
        sample=replace(MODELS["dropout"], build=_dropout),
        rules={"0": "colwise", "1": "replicated", "2": "rowwise"},
        recompute=("1",),
    ),
    "odd": Row(
        sample=_of_words("odd", Odd),
        rules={
            "embedding": "embedding",
            "twice": "colwise_gathered",
            "uneven": "colwise",
            "back": "rowwise",
            "head": "colwise_gathered",
        },
        recompute=("uneven",),
    ),
    "gated": Row(
        sample=replace(MODELS["sequential"], name="gated", build=Gated),
        rules={"up": "colwise", "norm": "replicated", "down": "rowwise"},
        recompute=("norm",),
    ),
    "deep": Row(
        sample=replace(MODELS["sequential"], name="deep", build=_deep),
        rules={f"{n}": "colwise_gathered" for n in range(0, 17, 4)},
        recompute=("4",),
    ),
    "language model": Row(
        sample=_of_words("language model", _language_model(layers=2)),
        rules="language-model",
        recompute=("layers.*",),
    ),
    "tied language model": Row(
        sample=_of_words("tied language model", _language_model(layers=2, tied=True)),
        rules="language-model",
        recompute=("layers.1",),
    ),
}

_EXPERTS: dict[str, Row] = {
    "mixture": Row(
        sample=_of_words("mixture", _mixture),
        rules={"0": "embedding", "2": "colwise_gathered", "4": "colwise_gathered"},
        recompute=("1", "3"),
    ),
}
"""Models with experts, which other rules of axis expert would refuse to be without."""


def _attention_row(length: int, build: Callable[[], nn.Module], recompute: str) -> Row:
    words = _words_of(length)
    halves = {f"{n}.{name}": "colwise" for n in (1, 3) for name in "qkv"}
    return Row(
        sample=replace(_of_words("attention", build), inputs=words, targets=words),
        rules={**halves, "1.out": "rowwise", "3.out": "rowwise", "5": "colwise_gathered"},
        recompute=("1", recompute),
    )


_CONTEXT: dict[str, Row] = {
    "attention": _attention_row(8, _attention, "3"),
    "attention of odd length": _attention_row(9, _attention, "3"),
    "attention mixture": _attention_row(8, _attention_mixture, "2"),
    "attention mixture of odd length": _attention_row(9, _attention_mixture, "2"),
}
"""Models whose sequences may be split."""

ROWS: Mapping[str, Row] = MappingProxyType({**_ROWS, **_EXPERTS, **_CONTEXT})


# ------------------------------------------------------------------------------------- plans


def is_legal(cell: Cell) -> bool:
    """Whether the columns of ``cell`` mean something together."""
    if ("pipeline" in cell.axes) is not bool(cell.schedule):
        return False
    if cell.option == "recompute" and not ROWS[cell.model].recompute:
        return False
    if cell.option == "compile" and cell.schedule in HALVES:
        return False  # which run a backward in two halves
    if cell.option == "other units" and "replicate" not in cell.axes and "shard" not in cell.axes:
        return False
    if cell.model == "deep" and cell.precision in ("bfloat16", "narrow"):
        return False  # sixteen layers of rounding
    if "mixture" in cell.model and cell.precision != "double":
        # Rounding sends tokens to other experts, which few terms of a loss do not average out.
        return cell.precision != "narrow" and cell.loss == "mean"
    # Means of shares of unequal size are refused; statistics of a batch need its parts known.
    return not (cell.batch_norm and cell.loss == "counted")


def plan_of(cell: Cell) -> Plan:
    row = ROWS[cell.model]
    mixed: dict[str, tuple[FloatName | None, FloatName | None]] = {
        "bfloat16": ("bfloat16", None),
        "float16": ("float16", None),
        "narrow": ("bfloat16", "bfloat16"),
    }
    compute, reduce = mixed.get(cell.precision, (None, None))
    is_data = cell.shares > 1
    others = cell.option == "other units"
    is_sharded = cell.size("shard") > 1
    return Plan(
        axes=Axes.of(cell.sizes),
        pipeline=PipelinePlan(
            schedule=cell.schedule or "1f1b",  # pyrefly: ignore
            microbatches=cell.microbatches,
            split="auto",
        ),
        context=ContextPlan(method=cell.method or "auto"),  # pyrefly: ignore
        expert=ExpertPlan(exchange="pairs") if cell.option == "pairs" else ExpertPlan(),
        tensor=TensorPlan(rules=row.rules if cell.size("tensor") > 1 else None),
        shard=ShardPlan(units=("",), reshard_after_forward=False)
        if others and is_sharded
        else ShardPlan(),
        buckets=BucketPlan(cap_mb=1e-4) if others else BucketPlan(),
        precision=Precision(compute=compute, reduce=reduce if is_data else None),
        train=TrainPlan(
            accumulate=cell.accumulate,
            clip_norm=0.05 if cell.is_clipped else None,
            recompute=row.recompute if cell.option == "recompute" else (),
            batch_norm=cell.batch_norm if is_data or cell.schedule else None,
            compile=cell.option == "compile",
            dropout="global" if cell.model == "dropout" else "local",
        ),
    )


def counted(output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over the targets that count, and their number."""
    logits = output["left"] + output["right"] if isinstance(output, Mapping) else output
    total = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum")
    return total, (target >= 0).sum()


def loss_of(cell: Cell) -> Callable[..., Any]:
    return counted if cell.loss == "counted" else ROWS[cell.model].sample.loss


def optimizer_of(cell: Cell) -> Callable[..., torch.optim.Optimizer]:
    if cell.optimizer == "momentum":
        return partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    # Of a gradient that is rounding and nothing else AdamW must not make a full step.
    eps = 1e-3 if cell.precision == "double" else 1e-1
    return partial(torch.optim.AdamW, lr=0.01, eps=eps)


# ----------------------------------------------------------------------------------- choices


def layouts(axes: Sequence[str]) -> list[tuple[str, str]]:
    """Each of ``axes``, with each schedule where it has a pipeline."""
    return [(a, s) for a in axes for s in (SCHEDULES if "pipeline" in a else ("",))]


DETAILS = (LOSSES, PRECISIONS, ACCUMULATED, CLIPPED, OPTIMIZERS, OPTIONS)
NAMES = tuple(field.name for field in fields(Cell))


def cell_of(row: Sequence[Any]) -> Cell:
    return Cell(**dict(zip(NAMES, row, strict=False)))


def pairs(axes: Sequence[str], models: Sequence[str]) -> list[Cell]:
    """Few cells in which every two values of different columns meet."""
    columns = (axes, models, ("", *SCHEDULES), *DETAILS)
    return [cell_of(row) for row in pairwise(columns, lambda row: is_legal(cell_of(row)))]


def whole(axes: Sequence[str], models: Sequence[str]) -> list[Cell]:
    """Every layout with every model, and with the next of few rows of pairs of all the rest."""
    details = pairwise(DETAILS)
    made = []
    for (i, (a, schedule)), (j, model) in itertools.product(
        enumerate(layouts(axes)), enumerate(models)
    ):
        turned = (details[(7 * i + 3 * j + k) % len(details)] for k in range(len(details)))
        options = (cell_of((a, model, schedule, *detail)) for detail in turned)
        made.append(next(cell for cell in options if is_legal(cell)))
    return made


def quick() -> list[Cell]:
    """Pairs over few axes, and models that have many properties each."""
    chains = ("tied language model", "batch norm of all ranks", "dropout")
    data = ("replicate=2,shard=2", "replicate=2,tensor=2", "tensor=2,shard=2")
    # Tracing takes long, so this one stands for all traced stages.
    traced = Cell(
        axes="pipeline=2,tensor=2", model="odd", schedule="dualpipev", precision="bfloat16"
    )
    return [
        *pairs(data, (*chains, "odd")),
        *pairs(("pipeline=2", "pipeline=2,tensor=2"), chains),
        traced,
    ]


def over_experts() -> list[Cell]:
    """Every layout with axis expert, three times in float64, and pairs in half precision."""
    details = pairwise((LOSSES, ("double",), ACCUMULATED, CLIPPED, OPTIMIZERS, EXPERT_OPTIONS))
    every = [*layouts(EXPERT_AXES), *layouts(THREE_WITH_EXPERTS)]
    some = [(a, s) for a, s in every if a not in THREE_WITH_EXPERTS or s in THREE_SCHEDULES]
    found = []
    for number, (axes, schedule) in enumerate(some):
        turned = (details[(3 * number + k) % len(details)] for k in range(len(details)))
        cells = (cell_of((axes, "mixture", schedule, *detail)) for detail in turned)
        found += itertools.islice(filter(is_legal, cells), 3)
    plain = [each for each in EXPERT_AXES if "pipeline" not in each]
    return found + [cell for cell in pairs(plain, ["mixture"]) if cell.precision != "double"]


def over_context() -> list[Cell]:
    """Every layout with axis context, both methods and losses, and each of `WAYS` alone."""
    found = []
    for axes, schedule in layouts((*CONTEXT_AXES, *EIGHT_WITH_CONTEXT)):
        if schedule:
            few = axes in CONTEXT_AXES or schedule in THREE_SCHEDULES
            for loss, method in itertools.product(LOSSES, METHODS) if few else ():
                found.append(_of_context(axes, {"schedule": schedule}, loss, method))
            continue
        plain = "replicate" not in axes and "shard" not in axes and "tensor" not in axes
        for way, loss, method in itertools.product(({}, *(WAYS if plain else ())), LOSSES, METHODS):
            found.append(_of_context(axes, way, loss, method))
    return list(filter(is_legal, found))


def quick_over_context() -> list[Cell]:
    """Fourteen on up to 4 ranks: every layout with each loss, and both methods with both."""
    rows = pairwise((CONTEXT_AXES, LOSSES, METHODS))
    ways = itertools.cycle(({}, *WAYS[:-1]))
    found = []
    for axes, loss, method in rows:
        staged = {"schedule": "1f1b" if method == "ring" else "zbv"} if "pipeline" in axes else {}
        cells = (_of_context(axes, {**way, **staged}, loss, method) for way in ways)
        found.append(next(filter(is_legal, cells)))
    return found


def _of_context(axes: Any, way: Mapping[str, Any], loss: Any, method: Any) -> Cell:
    """Five steps of AdamW with clipping. Parts of unequal length where a loss counts its terms."""
    model = "attention mixture" if "expert" in axes else "attention"
    return Cell(
        axes=axes,
        model=f"{model}{' of odd length' if loss == 'counted' else ''}",
        loss=loss,
        method=method,
        is_clipped=True,
        optimizer="adamw",
        steps=5,
        **way,
    )


def full() -> list[Cell]:
    """Every layout of up to 4 ranks with every model, and of 8 ranks with some."""
    found = [*whole(SINGLE_AXES, [*_ROWS]), *whole(PAIRS_OF_AXES, [*_ROWS])]
    found += [
        cell
        for number, cell in enumerate(whole(REVERSED, [*_ROWS]))
        if number % 3 == 0 or not cell.schedule
    ]
    found += whole(("pipeline=4",), ("deep",))
    some = ("odd", "tied language model", "batch norm of all ranks", "dropout", "transformer")
    return found + [cell for cell in whole(THREE_AXES, some) if cell.schedule in THREE_SCHEDULES]
