"""A case: a model, a layout and a way to train it, all drawn from one number.

`draw_case` gives the same case for the same number always, and `simpler` the cases that lack one
thing of a case, by which a finding is made small.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from fuzz.mixtures import MIXTURES
from fuzz.models import ModelSpec, draw_mixture, draw_model, with_experts
from fuzz.sequences import Sequences, draw_sequences, simpler_ones
from support.internals.schedule import BUILDERS

__all__ = ["BY_HAND", "CONTEXT", "EXPERTS", "STEPS", "Case", "draw_case", "simpler", "without"]

EXPERTS = 10**9
"""Cases from this number on have axis expert."""
CONTEXT = 2 * EXPERTS
"""Cases from this number on have axis context."""

STEPS = 4
CHANGED = 2
"""The step before which something of the model is changed, saved or loaded."""

SCHEDULES = tuple(BUILDERS)

BY_HAND: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "replicate": (2, 4),
        "ddp": (2, 4),
        "fully_shard": (2, 4),
        "hybrid": (4,),
        "class": (2, 4),
        "hybrid class": (4,),
        "tensor": (2, 4),
        "tensor, replicate": (4,),
        "tensor, fully_shard": (4,),
        "tensor, class": (4,),
    }
)
"""Layouts that a program makes itself, and for how many ranks."""

EXPERT_BY_HAND: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        2: ("expert", "expert, replicate", "expert, fully_shard"),
        4: (
            *("expert", "expert, replicate", "expert, replicate", "expert, fully_shard"),
            *("expert, fully_shard", "expert, hybrid", "expert, tensor, replicate"),
            "expert, tensor, fully_shard",
        ),
    }
)
EXPERT_AXES: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        2: ("expert=2",),
        4: (
            *("expert=4", "replicate=2,expert=2", "shard=2,expert=2", "expert=2,tensor=2"),
            *("pipeline=2,expert=2", "pipeline=2,expert=2"),
        ),
    }
)

AXES: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        2: ("replicate=2", "shard=2", "tensor=2", "pipeline=2", "pipeline=2"),
        4: (
            *("replicate=4", "shard=4", "tensor=4", "pipeline=4"),
            *("replicate=2,shard=2", "replicate=2,tensor=2", "shard=2,tensor=2"),
            *("pipeline=2,replicate=2", "pipeline=2,shard=2", "pipeline=2,tensor=2"),
        ),
    }
)

OPTIMIZERS = (
    *("sgd", "momentum", "decay", "adam", "adamw", "rmsprop", "adagrad", "nadam", "lion"),
    *("adafactor", "lbfgs", "lamb", "sgd single", "adam foreach", "adamw fused"),
)
STATELESS = ("sgd",)
"""Of which a gradient of zeros and no gradient are the same."""

STATEFUL = frozenset({"Counted", "CountedInPlace", "Remembered", "Alternating", "BatchNormed"})
"""Blocks that remember something of each pass."""

LOOP = (
    *("clip ours", "clip torch", "clip class", "eval", "round trip", "keep zeros", "smaller"),
    *("freeze", "scale weights", "two forwards", "step in backward", "every pass", "join"),
    *("functional call", "new parameter", "late hook", "loss reads weights", "autocast"),
    *("gradient of input", "other start", "own statistics"),
)
"""What a training loop may do; see `fuzz.training`."""

BALANCE = ("auxiliary", "z loss", "bias rate")
"""What a loop with axis expert may add to its losses, and do after a step."""

OF_EXPERTS = ("pairs", "others whole")
OF_CLASS = (*("orig", "SHARD_GRAD_OP", "NO_SHARD", "no prefetch", "forward prefetch", "one unit"),)
OF_DDP = ("find unused", "views", "static graph", "small buckets")
OF_SHARDS = ("keep", "flat groups", "one unit", "block of 2")
OF_PLANS = (
    "flat",
    "small buckets",
    "one unit",
    "keep",
    "recompute",
    "reversed",
    "split parameters",
)
OF_AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "shard": ("one unit", "keep"),
        "replicate": ("small buckets",),
        "pipeline": ("split parameters",),
    }
)
"""Options of plans that have no effect without an axis."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that a case is made from."""

    seed: int
    world: int
    backend: str
    model: ModelSpec
    layout: str
    """A key of `BY_HAND`, or the axes of a plan."""
    schedule: str = ""
    options: tuple[str, ...] = ()
    """Of the layout."""
    optimizer: str = "sgd"
    passes: int = 1
    """Backward passes of a step."""
    loop: tuple[str, ...] = ()
    sequences: Sequences | None = None
    """What a case with axis context has instead of all but ranks and backend."""

    @property
    def is_plan(self) -> bool:
        return "=" in self.layout

    @property
    def axes(self) -> dict[str, int]:
        """Of a plan."""
        pairs = (text.split("=") for text in self.layout.split(",")) if self.is_plan else ()
        return {name: int(size) for name, size in pairs}

    @property
    def expert_ranks(self) -> int:
        """Of a layout with axis expert that is no plan."""
        most = 2 if "hybrid" in self.layout or "tensor" in self.layout else self.world
        return next((n for n in (1, 2) if f"{n} for experts" in self.options), most)

    @property
    def tensor_ranks(self) -> int:
        if self.is_plan:
            return self.axes.get("tensor", 1)
        if "tensor" not in self.layout:
            return 1
        return self.world if self.layout == "tensor" else 2

    @property
    def data_ranks(self) -> int:
        return self.world // self.tensor_ranks // self.axes.get("pipeline", 1)

    @property
    def microbatches(self) -> int:
        return 2 * self.axes["pipeline"] if self.schedule else 1

    @property
    def is_flat(self) -> bool:
        """Whether parameters without a gradient are given zeros beside others."""
        flat = "class" in self.layout and "orig" not in self.options
        return flat or "flat" in self.options or "flat groups" in self.options

    def __str__(self) -> str:
        if self.sequences is not None:
            return f"{self.world} ranks / {self.backend} / {self.layout} | {self.sequences}"
        words = (f"{self.world} ranks", self.backend, self.layout, self.schedule, *self.options)
        loop = (self.optimizer, f"x{self.passes}", *self.loop)
        return f"{' / '.join(w for w in words if w)} | {self.model} | {' / '.join(loop)}"


def draw_case(seed: int) -> Case:
    """The case of number ``seed``."""
    if seed >= CONTEXT:
        return _draw_context(seed, random.Random(seed))
    other = random.Random(f"experts {seed}")
    chance = 0.0 if seed >= EXPERTS else other.random()
    if chance < 0.07:
        return _draw_experts(seed, other)
    case = _draw_any(seed, random.Random(seed))
    if chance < 0.14:
        case = _sensible(replace(case, model=with_experts(other, case.model, 1)))
    return case


def _draw_experts(seed: int, draw: random.Random) -> Case:
    """A case with axis expert, most of which is usual beside it."""
    world, is_plan = draw.choice((2, 4)), draw.random() < 0.6
    layout = draw.choice((EXPERT_AXES if is_plan else EXPERT_BY_HAND)[world])
    is_chain = draw.random() < (0.9 if "pipeline" in layout else 0.5)
    options = _options_of(layout)
    loop = [each for each in LOOP if _fits(each, layout)]
    case = Case(
        seed=seed,
        world=world,
        backend=draw.choice(("shm", "shm", "gloo")),
        model=draw_mixture(draw, is_chain=is_chain),
        layout=layout,
        schedule=draw.choice(SCHEDULES) if "pipeline" in layout else "",
        options=(*_some(draw, options, 0.25), *_some(draw, OF_EXPERTS, 0.25)),
        optimizer=draw.choice(OPTIMIZERS[:9] if draw.random() < 0.85 else OPTIMIZERS),
        passes=draw.choice((1, 1, 2, 3)),
        loop=(*_some(draw, loop, 0.13), *_some(draw, BALANCE, 0.3)),
    )
    return _sensible(case)


def _draw_context(seed: int, draw: random.Random) -> Case:
    """A case with axis context, by a plan or in an own loop."""
    world = draw.choice((2, 2, 4))
    found = draw_sequences(seed, world, draw)
    return _of_sequences(seed, world, draw.choice(("shm", "shm", "gloo")), found)


def _of_sequences(seed: int, world: int, backend: str, found: Sequences) -> Case:
    return Case(
        seed=seed,
        world=world,
        backend=backend,
        model=ModelSpec(seed=seed, blocks=(), is_chain=True),
        layout=found.axes or f"context by hand, {found.loop}",
        sequences=found,
    )


def _draw_any(seed: int, draw: random.Random) -> Case:
    world = draw.choice((2, 2, 4))
    is_plan = draw.random() < 0.4
    if is_plan:
        layout = draw.choice(AXES[world])
    else:
        layout = draw.choice([name for name, sizes in BY_HAND.items() if world in sizes])
    case = Case(
        seed=seed,
        world=world,
        backend=draw.choice(("shm", "shm", "gloo")),
        model=draw_model(draw),
        layout=layout,
        schedule=draw.choice(SCHEDULES) if "pipeline" in layout else "",
        options=_some(draw, _options_of(layout), 0.3),
        optimizer=draw.choice(("sgd", "sgd", *OPTIMIZERS)),
        passes=draw.choice((1, 1, 2, 3)),
        loop=_some(draw, [each for each in LOOP if _fits(each, layout)], 0.15),
    )
    return _sensible(case)


def _options_of(layout: str) -> Sequence[str]:
    if "=" in layout:
        lacking = {each for axis, some in OF_AXES.items() if axis not in layout for each in some}
        return [each for each in OF_PLANS if each not in lacking]
    if "class" in layout:
        return OF_CLASS
    if layout == "ddp":
        return OF_DDP
    if layout.startswith("expert, "):
        fewer = ("1 for experts", "2 for experts")
        return fewer if layout.endswith("replicate") else (*fewer, *OF_SHARDS)
    return OF_SHARDS if layout in ("fully_shard", "hybrid", "tensor, fully_shard") else ()


def _some(draw: random.Random, names: Sequence[str], chance: float) -> tuple[str, ...]:
    return tuple(name for name in names if draw.random() < chance)


def _fits(name: str, layout: str) -> bool:
    """Whether a loop with that layout can do it at all."""
    is_plan, is_class = "=" in layout, "class" in layout
    is_sharded = "shard" in layout or is_class or layout == "hybrid"
    if name in ("functional call", "new parameter"):
        return not is_plan and not is_class
    if name in ("two forwards", "every pass", "keep zeros", "clip torch", "autocast"):
        return not is_plan
    if name in ("gradient of input", "own statistics"):
        return not is_plan
    if name == "clip class":
        return "class" in layout
    if name == "join":
        return layout in ("ddp", "class")
    return not (name == "step in backward" and (is_plan or not is_sharded))


def _sensible(case: Case) -> Case:
    """``case`` without what would make it another model in one process, too."""
    if case.sequences is not None:
        return case
    names = {name for name, _ in case.model.blocks}
    loop = set(case.loop)
    if len([each for each in loop if each.startswith("clip")]) > 1 or "step in backward" in loop:
        loop -= {"clip ours", "clip torch", "clip class"}
    if "step in backward" in loop:
        loop -= {"keep zeros", "every pass", "round trip"}
    if case.optimizer == "lbfgs":
        loop -= {"clip ours", "clip torch", "clip class", "step in backward", "join", "keep zeros"}
    if "LookedSparse" in names:
        loop -= {"clip ours", "clip torch", "clip class"}  # torch has no norm of sparse gradients
    if "BatchNormed" in names:
        loop -= {"smaller", "two forwards"}
    else:
        loop -= {"own statistics"}
    if case.is_flat:
        loop -= {"freeze"}
    if case.is_flat and "class" in case.layout:
        loop -= {"late hook"}  # there is no parameter of that name
    if "join" in loop:
        loop -= {"two forwards", "eval", "round trip"}
    if case.schedule and names & STATEFUL:
        loop -= {"eval"}  # stages evaluate in microbatches, one process at once
    options, optimizer = set(case.options), case.optimizer
    if "hybrid" in case.layout or "tensor" in case.layout:
        options -= {"NO_SHARD", "SHARD_GRAD_OP", "block of 2"}
    if "class" in case.layout and "orig" not in options:
        loop -= {"late hook"}  # the parameter is in a flat one, which has no hooks of its own
    if "static graph" in options:
        loop -= {"freeze"}
    if "flat groups" in options:
        loop -= {"round trip"}  # torch's functions know no flat parameters
    if "TwoNames" in names and "class" not in case.layout and not case.is_plan:
        loop -= {"round trip"}  # nor whole values for a second name of a DTensor
    if "fully_shard" in case.layout and not case.is_plan and 1 < case.tensor_ranks < case.world:
        loop -= {"round trip"}  # nor rows that two axes do not divide, of torch's own fully_shard
    if "expert" in case.layout:
        options, loop = _sensible_with_experts(case, options, loop)
    if "Alternating" in names:
        options -= {"recompute"}  # its attribute, no buffer, would be written twice
    # A flat gradient has zeros where one process has none.
    if case.is_flat and names & {"Unused", "Alternating", "Borrowed", "Recomputed"}:
        optimizer = "sgd"
    if "LookedSparse" in names and optimizer != "sgd single":
        optimizer = "sgd"
    keeps = [each for each in case.loop if each in loop]
    kept = [each for each in case.options if each in options]
    return replace(case, loop=tuple(keeps), options=tuple(kept), optimizer=optimizer)


def _sensible_with_experts(
    case: Case, options: set[str], loop: set[str]
) -> tuple[set[str], set[str]]:
    kinds = [name for name, _ in case.model.blocks if name in MIXTURES]
    options -= {"block of 2"}
    if len(kinds) < 2:
        options -= {"others whole"}
    if case.schedule:
        loop -= {*BALANCE}  # are refused: a stage has some of the layers
    if "DeepSeek" not in kinds or "step in backward" in loop or case.optimizer == "lbfgs":
        loop -= {"bias rate"}  # a step of an optimizer ends what it counts
    if "ListOfExperts" in kinds and not case.is_plan:
        loop -= {"round trip"}  # torch's functions find no module for the names of the list
    if case.layout == "expert":
        # The program sums gradients itself, at the end, and nothing sees what it normalizes by.
        loop -= {"other start", "every pass", "own statistics"}
    return options, loop


# --------------------------------------------------------------------------------- making small


def parts_of(case: Case) -> Iterator[tuple[str, Case]]:
    """What may be taken out of ``case``, and the case without it."""
    if case.sequences is not None:
        for word, left in simpler_ones(case.sequences):
            yield word, _of_sequences(case.seed, case.world, case.backend, left)
        if case.backend != "shm":
            yield "gloo", replace(case, backend="shm")
        return
    for number in range(len(case.model.blocks)):
        if len(case.model.blocks) > 1:
            left = case.model.blocks[:number] + case.model.blocks[number + 1 :]
            yield f"block{number}", replace(case, model=replace(case.model, blocks=left))
    for trait in case.model.traits:
        left = tuple(each for each in case.model.traits if each != trait)
        yield trait.replace(" ", "_"), replace(case, model=replace(case.model, traits=left))
    for each in case.loop:
        yield each.replace(" ", "_"), replace(case, loop=tuple(e for e in case.loop if e != each))
    for each in case.options:
        left = tuple(e for e in case.options if e != each)
        yield each.replace(" ", "_"), replace(case, options=left)
    if case.passes > 1:
        yield "passes", replace(case, passes=1)
    if case.optimizer != "sgd":
        yield "optimizer", replace(case, optimizer="sgd")
    if case.backend != "shm":
        yield "gloo", replace(case, backend="shm")


def simpler(case: Case) -> list[tuple[str, Case]]:
    """Each case that lacks one thing of ``case``, with the word for it."""
    return [(word, left) for word, left in parts_of(case) if _sensible(left) == left]


def without(case: Case, words: Sequence[str]) -> Case:
    """``case`` without what ``words`` name, one after the other."""
    for word in words:
        found = dict(parts_of(case))
        if word not in found:
            raise ValueError(f"expected one of {sorted(found)} to leave out, found {word!r}")
        case = found[word]
    return case
