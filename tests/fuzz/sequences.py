"""Random models with attention whose sequences are split, in own loops and by plans.

A model is a row of small layers, or one of Hugging Face's with random weights. Lengths divide by
nothing, rows have documents of their own, labels are left out here and there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from matrix.cells import Routed
from meshwright.comm import communicator
from meshwright.context_parallel import context_parallel, global_mean, positions
from meshwright.expert_parallel import experts
from meshwright.plan import ContextPlan, ExpertPlan, Plan, TensorPlan, TrainPlan
from support.expert_parallel.samples import Fused, Own
from support.internals.axes import Axes
from support.internals.context_parallel import ContextSplit

__all__ = ["Sequences", "Step", "draw_sequences", "expected_steps", "over_ranks", "simpler_ones"]

STEPS = 3
WORDS, WIDTH, CLIP, IGNORED = 13, 12, 0.3, -100
USUAL = ("causal", "causal", "full", "scaled", "values", "feed forward", "flat")
ODD = ("masked", "bias", "grouped", "convolution", "few queries", "dropout")
HEADS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (3, 3), (6, 2))
LOOPS = ("summed", "replicate", "ddp", "fully_shard")
AXES: Mapping[int, tuple[str, ...]] = {
    2: ("context=2",),
    4: (
        *("context=4", "replicate=2,context=2", "shard=2,context=2"),
        *("context=2,expert=2", "context=2,tensor=2"),
    ),
}
DENSE = ("llama", "qwen3", "mistral", "gemma3")
MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """A model, its rows, and how they are split and trained on."""

    seed: int
    layers: tuple[tuple[str, int, int], ...] = ()
    """Kinds, with the heads of queries and of keys."""
    folder: str = ""
    """Of Hugging Face, instead of layers."""
    config: tuple[tuple[str, int], ...] = ()
    axes: str = ""
    """Of a plan; without one the program does it itself."""
    loop: str = "summed"
    method: str = "auto"
    split: str = "auto"
    length: int = 8
    rows: int = 2
    """Of a share."""
    documents: str = ""
    """"", "alike" in all rows, or "others" in each."""
    traits: tuple[str, ...] = ()
    """counted, ignores, padded, recomputed, adamw, clipped, accumulated, own positions."""

    def __str__(self) -> str:
        layers = "+".join(f"{kind}({q}/{k})" for kind, q, k in self.layers)
        config = " ".join(f"{key}={n}" for key, n in self.config)
        docs = f"documents {self.documents}" if self.documents else ""
        size = f"{self.rows} x {self.length}"
        words = (self.folder or layers, config, self.method, self.split, size, docs, *self.traits)
        return " ".join(word for word in words if word)

    @property
    def shares(self) -> int:
        sizes = Axes.of(self.sizes)
        return sizes.world_size // sizes.size("context") // sizes.size("tensor")

    @property
    def sizes(self) -> dict[str, int]:
        pairs = (text.split("=") for text in self.axes.split(",")) if self.axes else ()
        return {name: int(size) for name, size in pairs}


def draw_sequences(seed: int, world: int, draw: random.Random) -> Sequences:
    """All of a case but its ranks."""
    axes = draw.choice(AXES[world]) if draw.random() < 0.6 else ""
    found = Sequences(
        seed=seed,
        axes=axes,
        loop=draw.choice(LOOPS),
        method=draw.choice(("auto", "auto", "all-to-all", "ring", "ring")),
        split=draw.choice(("auto", "auto", "contiguous", "zigzag", "documents")),
        length=draw.choice((draw.randint(1, 9), draw.randint(4, 24), 8 * draw.randint(1, 4))),
        rows=draw.randint(1, 3),
    )
    if draw.random() < 0.5:
        found = replace(found, length=4 * draw.randint(1, 8))
    traits = {each for each in ("recomputed", "adamw", "clipped") if draw.random() < 0.3}
    if draw.random() < 0.6:
        traits.add("counted")
        traits |= {each for each in ("ignores",) if draw.random() < 0.5}
    else:
        traits |= {each for each in ("ignores",) if draw.random() < 0.08}
        if draw.random() < 0.85:  # of parts that are equal
            found = replace(found, length=world * draw.randint(1, 8))
    if axes and draw.random() < 0.3:
        traits.add("accumulated")
        found = replace(found, rows=2)
    is_of_others = axes and draw.random() < 0.4
    documents = draw.choice(("", "alike", "others")) if is_of_others or not axes else ""
    if is_of_others:
        heads = draw.choice(((4, 2), (4, 4), (8, 2), (2, 1), (6, 3)))
        config = [("num_attention_heads", heads[0]), ("num_key_value_heads", heads[1])]
        config += [("sliding_window", draw.randint(1, 9))] * (draw.random() < 0.5)
        folder = draw.choice(MIXTURES if "expert" in axes else (*DENSE, *DENSE, *MIXTURES))
        is_mixture = folder in MIXTURES
        traits -= {"recomputed"}  # a backward sees no modes, nor that which computes in float64
        if "counted" in traits and draw.random() < 0.35:
            traits.add("padded")
        found = replace(found, folder=folder, config=() if is_mixture else tuple(config))
    else:
        # What only the comparison of a plan with the whole model can see.
        odd = ODD if axes else tuple(kind for kind in ODD if kind != "convolution")
        if found.length < 2 * world:  # the last of one query is all of them
            odd = tuple(kind for kind in odd if kind != "few queries")
        kinds = [
            draw.choice(odd if draw.random() < 0.05 else USUAL) for _ in range(draw.randint(1, 3))
        ]
        heads = [draw.choice(HEADS) for _ in kinds]
        if not axes and {*kinds} == {"feed forward"}:  # a block without attention trains nothing
            kinds[0] = "causal"
        layers = [(kind, *each) for kind, each in zip(kinds, heads, strict=True)]
        if "expert" in axes or draw.random() < 0.15:
            layers.insert(draw.randint(0, len(layers)), ("mixture", 1, 1))
        if axes and draw.random() < 0.05:
            traits.add("own positions")
        found = replace(found, layers=tuple(layers))
    return replace(found, documents=documents, traits=tuple(sorted(traits)))


def simpler_ones(case: Sequences) -> Iterator[tuple[str, Sequences]]:
    """What may be taken out, and the case without it."""
    for number in range(len(case.layers)):
        if len(case.layers) > 1:
            left = case.layers[:number] + case.layers[number + 1 :]
            yield f"layer{number}", replace(case, layers=left)
    for trait in case.traits:
        left = tuple(each for each in case.traits if each != trait)
        yield trait.replace(" ", "_"), replace(case, traits=left)
    if case.config:
        yield "config", replace(case, config=())
    for word, plain in (
        *(("documents", ""), ("method", "auto"), ("split", "auto"), ("loop", "summed")),
    ):
        if getattr(case, word) != plain:
            yield word, replace(case, **{word: plain})
    if case.rows > 1 and "accumulated" not in case.traits:
        yield "rows", replace(case, rows=1)


# ------------------------------------------------------------------------------------- models


class Mixing(nn.Module):
    """A layer between positions, beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        return x + torch.tanh(self.mix(x.transpose(1, 2)).transpose(1, 2))


class FeedForward(nn.Module):
    """Two layers, beside their input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Layer(nn.Module):
    """Attention of one kind, beside its input."""

    def __init__(self, kind: str, heads: int, keys: int, length: int) -> None:
        super().__init__()
        if kind == "flat":  # rows of one head each, without a dim for it
            heads = keys = 1
        self.kind, self.d = kind, 2 if heads % 4 == 0 else 3
        self.wide = self.d + 3 * (kind == "values")
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, heads * self.d)
        self.k = nn.Linear(WIDTH, keys * self.d, bias=False)
        self.v, self.out = nn.Linear(WIDTH, keys * self.wide), nn.Linear(heads * self.wide, WIDTH)
        away = torch.arange(length).unsqueeze(1) - torch.arange(length)
        if kind == "masked":
            self.register_buffer("mask", (away >= 0) & (away < 4), persistent=False)
        if kind == "bias":
            slopes = torch.linspace(0.1, 1.0, heads).view(-1, 1, 1)
            bias = (-slopes * away.abs()).masked_fill(away < 0, -torch.inf)
            self.register_buffer("mask", bias, persistent=False)

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        if self.kind != "flat":
            q, k = (z.unflatten(-1, (-1, self.d)).transpose(1, 2) for z in (q, k))
            v = v.unflatten(-1, (-1, self.wide)).transpose(1, 2)
            if q.shape[1] != k.shape[1] and self.kind == "scaled":
                k, v = (z.repeat_interleave(q.shape[1] // z.shape[1], 1) for z in (k, v))
        if self.kind == "few queries":
            q = q[..., -1:, :]
        if self.kind == "grouped":
            q, k, v = (z.unsqueeze(1) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, **self._options(q, k, seen))
        if self.kind == "grouped":
            y = y.squeeze(1)
        y = y if self.kind == "flat" else y.transpose(1, 2).flatten(2)
        return x + torch.tanh(self.out(y))

    def _options(
        self, q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor | None
    ) -> dict[str, Any]:
        options: dict[str, Any] = {"is_causal": self.kind != "full"}
        if self.kind in ("masked", "bias"):
            options = {"attn_mask": self.mask}
        elif seen is not None:
            causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
            mask = seen & causal if options["is_causal"] else seen
            mask = mask.unsqueeze(1) if self.kind == "grouped" else mask
            options = {"attn_mask": mask.squeeze(1) if self.kind == "flat" else mask}
        options |= {"scale": 0.7} if self.kind == "scaled" else {}
        options |= {"dropout_p": 0.1} if self.kind == "dropout" else {}
        return options | ({"enable_gqa": True} if q.shape[-3] != k.shape[-3] else {})


class Mixture(nn.Module):
    """A router and its experts."""

    def __init__(self, number: int) -> None:
        super().__init__()
        inside = experts(Own(3, WIDTH)) if number % 2 else Fused(4, d=WIDTH)
        self.routed = Routed(inside, 2, WIDTH)

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        return self.routed(x)


class Net(nn.Module):
    """Embeddings, layers, and a head."""

    def __init__(self, case: Sequences) -> None:
        super().__init__()
        self.case = case
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        made = {
            "mixture": lambda: Mixture(case.seed),
            "convolution": Mixing,
            "feed forward": FeedForward,
        }
        self.layers = nn.ModuleList(
            made.get(kind, lambda k=kind, h=heads: Layer(k, *h, case.length))()
            for kind, *heads in case.layers
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        seen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        length = input_ids.shape[1]
        if position_ids is None:
            is_own = "own positions" in self.case.traits
            position_ids = torch.arange(length) if is_own else positions(length)
        x = self.words(input_ids) + self.places(position_ids)
        for layer in self.layers:
            if "recomputed" in self.case.traits and not self.case.axes:
                x = checkpoint(layer, x, seen, use_reentrant=False)
            else:
                x = layer(x, seen)
        return self.head(x)


def model_of(case: Sequences) -> nn.Module:
    """In float64, with the same values every time."""
    if case.folder:
        from support.context_parallel.hugging_face import DENSE as KNOWN
        from support.context_parallel.hugging_face import dense
        from support.expert_parallel.hugging_face import tiny

        if case.folder in KNOWN:
            return dense(case.folder, **dict(case.config))
        model = tiny(case.folder)
        model.set_experts_implementation("batched_mm")
        return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        return Net(case).double()


# --------------------------------------------------------------------------------------- data


def documents_of(case: Sequences) -> list[list[int]]:
    """The lengths of the documents of each row of a share, the same in all shares and steps."""
    draw = random.Random(case.seed)
    rows: list[list[int]] = []
    for _ in range(case.rows):
        left, row = case.length, list[int]()
        while left:
            row.append(min(left, draw.choice((1, 2, draw.randint(1, case.length), case.length))))
            left -= row[-1]
        rows.append(row if case.documents else [case.length])
    return [rows[0]] * case.rows if case.documents == "alike" else rows


class Batch(NamedTuple):
    words: torch.Tensor
    labels: torch.Tensor
    places: torch.Tensor
    padding: torch.Tensor


def batch_of(case: Sequences, step: int) -> Batch:
    """The global batch of a step: the rows of all shares."""
    draw = torch.Generator().manual_seed(7 * case.seed + step)
    always = torch.Generator().manual_seed(case.seed)
    size = (case.shares * case.rows, case.length)
    words, labels = (torch.randint(3, WORDS, size, generator=draw) for _ in range(2))
    if "ignores" in case.traits:
        ignored = torch.rand(size, generator=always) < 0.3
        ignored[:, -1] = False
        labels = labels.masked_fill(ignored, IGNORED)
    places = ContextSplit.of(documents_of(case), 1).places().repeat(case.shares, 1)
    padding = torch.ones(size, dtype=torch.long)
    if "padded" in case.traits:
        padding[::2, case.length - case.length // 3 :] = 0
        labels = labels.masked_fill(padding == 0, IGNORED)
    return Batch(words, labels, places, padding)


def inputs_of(case: Sequences, batch: Batch) -> dict[str, torch.Tensor]:
    """What the model is called with."""
    given = {"input_ids": batch.words}
    if case.folder or case.documents:
        given["position_ids"] = batch.places
    if "padded" in case.traits:
        given["attention_mask"] = batch.padding
    return given


def seen_in(case: Sequences) -> torch.Tensor | None:
    """Which keys are of a query's own document, where that is to be told in one process."""
    if not case.documents or case.folder:
        return None
    numbers = ContextSplit.of(documents_of(case), 1).documents().repeat(case.shares, 1)
    return (numbers.unsqueeze(2) == numbers.unsqueeze(1)).unsqueeze(1)


def terms(output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = output if isinstance(output, torch.Tensor) else output["logits"]
    total = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return total, (labels != IGNORED).sum()


def mean(output: Any, labels: torch.Tensor) -> torch.Tensor:
    total, count = terms(output, labels)
    return total / count


def optimizer_of(case: Sequences) -> Any:
    if "adamw" in case.traits:
        return partial(torch.optim.AdamW, lr=0.01, eps=1e-3)
    return partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def computing(case: Sequences) -> AbstractContextManager[None]:
    """Models of Hugging Face cast to float32 themselves."""
    if not case.folder:
        return nullcontext()
    from support.expert_parallel.wide import wide

    return wide()


# ---------------------------------------------------------------------------------- both sides


class Step(NamedTuple):
    loss: float
    gradients: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]


def expected_steps(case: Sequences) -> list[Step]:
    """Train in one process."""
    with computing(case):
        model = model_of(case)
        optimizer = optimizer_of(case)(model.parameters())
        found = []
        for step in range(STEPS):
            batch, seen = batch_of(case, step), seen_in(case)
            more = {} if seen is None else {"seen": seen}
            loss = mean(model(**inputs_of(case, batch), **more), batch.labels)
            loss.backward()
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            if "clipped" in case.traits:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            found.append(Step(loss.item(), grads, _copied(model.state_dict())))
        return found


def _copied(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in state.items()
    }


def over_ranks(case: Sequences) -> Iterator[Step]:
    """Train over the ranks, step by step."""
    with computing(case):
        yield from _planned(case) if case.axes else _looped(case)


def _planned(case: Sequences) -> Iterator[Step]:
    sizes = case.sizes
    documents = "none" if case.folder == "gpt_oss" else "position_ids"
    model = model_of(case)
    rules = {"words": "embedding", "head": "colwise_gathered"}
    if case.folder:
        rules = {"model.embed_tokens": "embedding", "lm_head": "colwise_gathered"}
    again = ("model.layers.0",) if case.folder else ("layers.0",)
    example = inputs_of(case, batch_of(case, 77))
    laid = mw.parallelize(
        model,
        Plan(
            axes=Axes.of(sizes),
            context=ContextPlan(
                method=case.method,  # pyrefly: ignore
                split=case.split,  # pyrefly: ignore
                documents=documents,
            ),
            expert=ExpertPlan(balance="none" if case.folder and "expert" in sizes else None),
            tensor=TensorPlan(rules=rules if "tensor" in sizes else None),
            train=TrainPlan(
                accumulate=2 if "accumulated" in case.traits else 1,
                clip_norm=CLIP if "clipped" in case.traits else None,
                recompute=again if "recomputed" in case.traits else (),
            ),
        ),
        optimizer=optimizer_of(case),
        loss=terms if "counted" in case.traits else mean,
        example=example,
    )
    for step in range(STEPS):
        batch = Batch(*(x.chunk(laid.data_size)[laid.data_rank] for x in batch_of(case, step)))
        laid.forward_backward(inputs_of(case, batch), batch.labels)
        grads = _copied(laid.gradients())
        yield Step(laid.optimizer_step().loss.item(), grads, _copied(laid.weights()))


def _looped(case: Sequences) -> Iterator[Step]:
    world = communicator()
    mesh = mw.init_device_mesh("cpu", (world.size,), mesh_dim_names=("cp",))
    model: Any = model_of(case)
    if case.loop == "fully_shard":
        for layer in model.layers:
            mw.fully_shard(layer)
    make = {"replicate": mw.replicate, "ddp": mw.DistributedDataParallel}
    make |= {"fully_shard": mw.fully_shard}
    model = make.get(case.loop, lambda model: model)(model)
    optimizer = optimizer_of(case)(model.parameters())
    chosen = {
        key: getattr(case, key) for key in ("method", "split") if getattr(case, key) != "auto"
    }
    for step in range(STEPS):
        batch = batch_of(case, step)
        buffers = [batch.words, batch.labels, batch.places]
        with context_parallel(
            mesh,
            buffers=buffers,
            buffer_seq_dims=[1] * 3,
            documents=batch.places.clone() if case.documents else None,
            **chosen,
        ):
            output = model(**inputs_of(case, batch))
            if "counted" in case.traits:
                loss = global_mean(*terms(output, batch.labels), mesh)
            else:
                loss = mean(output, batch.labels)
            loss.backward()
            shown = loss.detach().clone()
        world.all_reduce(shown, label="loss").wait()
        named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
        if case.loop == "summed":
            for parameter in named.values():
                if parameter.grad is not None:
                    world.all_reduce(parameter.grad, label="gradients").wait()
                    parameter.grad /= world.size
        grads = _copied({n: p.grad for n, p in named.items() if p.grad is not None})
        if "clipped" in case.traits:
            mw.clip_grad_norm_(list(named.values()), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        weights = _copied(model.state_dict())
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
        yield Step((shown / world.size).item(), grads, weights)
