"""Plan: the only configuration of a parallel run, as TOML, as JSON and as a frozen value.

::

    [axes]                 # ordered; the product is the number of ranks
    replicate = 2
    shard = 2

    [train]
    clip_norm = 1.0

``Plan()`` is one process, and every key left out means what one process does. Reading
reports every unknown key and wrong value at once; ``check``, which also needs the number of ranks
and the model's names, reports every contradiction at once. Both name the line.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Self

from meshwright.axes import DATA_AXES, KNOWN_AXES, LEFT, OTHER_NAMES, SUM_AXES, Axes
from meshwright.errors import PlanError
from meshwright.precision import Precision
from meshwright.settings import (
    Above,
    AtLeast,
    Origin,
    Problem,
    fields_of,
    nearest,
    unmarked,
)
from meshwright.toml_source import dump, plain, read, read_file, read_tree, review

__all__ = [
    "BucketPlan",
    "ContextPlan",
    "ExpertPlan",
    "PipelinePlan",
    "Plan",
    "ScheduleName",
    "ShardPlan",
    "TensorPlan",
    "TrainPlan",
    "match_names",
    "module_names",
]

ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "interleaved1f1b",
    "loopedbfs",
    "zb1p",
    "zb2p",
    "zbv",
    "vhalf",
    "vmin",
    "dualpipev",
]
"""The schedules a plan may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """``[pipeline]``: how the model is split into stages, and in which order they run."""

    schedule: ScheduleName = "1f1b"
    """gpipe, 1f1b, interleaved1f1b, loopedbfs, zb1p, zb2p, zbv, vhalf, vmin or dualpipev."""
    order: str = ""
    """A CSV file with an order to run instead of the schedule's, as `meshwright simulate --find`
    writes it; relative to the folder in which the ranks start."""
    microbatches: Annotated[int, AtLeast(1)] = 1
    """Equal parts of each rank's batch, which pass through the stages one after another."""
    split: Literal["auto", "parameters", "model"] | tuple[str, ...] = "auto"
    """auto balances by cost, parameters by number, model between the modules of the plan that the
    model carries; or name the first modules of later stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """``[shard]``: what is gathered together, and for how long."""

    units: Literal["transformer-blocks"] | tuple[str, ...] = "transformer-blocks"
    """Patterns of module names; each module that matches is one unit."""
    reshard_after_forward: bool = True
    """Free the gathered parameters between forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """``[tensor]``: which modules are split within a layer."""

    rules: str | Mapping[str, str] | None = field(default=None, hash=False)
    """Name of a rule set, or a table of styles by pattern of module names; model reads the plan
    that the model carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPlan:
    """``[context]``: how sequences are split over ranks, and how attention sees all of them."""

    method: Literal["auto", "all-to-all", "ring"] = "auto"
    """all-to-all computes whole sequences of some heads, ring all heads of a part; auto: the first
    where heads divide."""
    split: Literal["auto", "documents", "zigzag", "contiguous"] = "auto"
    """Which positions a rank holds; auto: contiguous for all-to-all, else what balances."""
    documents: str = "position_ids"
    """Key of a batch that says where documents begin, at 0 or a fall; without it a row is one."""
    sequence: Mapping[str, int] | None = field(default=None, hash=False)
    """Dims to split, by key of a batch; None: dim 1 of what is as long as the first tensor's."""
    max_share: Annotated[float, AtLeast(0)] = 0.05
    """Work of a document, in a rank's mean, above which it is split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """``[expert]``: which modules hold experts, and how their load is balanced."""

    modules: Literal["auto", "model"] | tuple[str, ...] = "auto"
    """auto finds modules of known kinds, model reads the plan that the model carries; or patterns
    of module names."""
    balance: Literal["global", "rank", "none"] | None = None
    """Statistics of the auxiliary loss: of all ranks, as in one process, or each rank's own; none
    adds no auxiliary loss. Required where the model has one."""
    auxiliary: Annotated[float, AtLeast(0)] = 0.0
    """Coefficient of the auxiliary loss, which the library adds; 0 adds none."""
    z_loss: Annotated[float, AtLeast(0)] = 0.0
    """Coefficient of the routers' z-loss; 0 adds none."""
    bias_rate: Annotated[float, Above(0)] | None = None
    """Step of the routers' selection bias after each optimizer step; ``None`` never moves it."""
    exchange: Literal["tokens", "pairs"] = "tokens"
    """tokens: each token travels once to a rank; pairs: once for each of its experts there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """``[train]``: what a step does, apart from the layout."""

    accumulate: Annotated[int, AtLeast(1)] = 1
    """Batches whose gradients are summed before the optimizer steps."""
    clip_norm: Annotated[float, Above(0)] | None = None
    """Largest norm of all gradients together; ``None`` does not clip."""
    recompute: tuple[str, ...] = ()
    """Patterns of modules whose activations are recomputed in backward."""
    compile: bool = False
    """Compile the model, its stages, or each unit of axis shard with `torch.compile`."""
    batch_norm: Literal["local", "sync"] | None = None
    """Statistics of each rank's share (local) or of all; required for BatchNorm on data axes."""
    dropout: Literal["local", "global"] = "local"
    """local: each rank draws its own masks; global: every layout draws those of one process."""
    per_rank: tuple[str, ...] = ()
    """Patterns of modules that draw on each rank although dropout is global."""
    seed: Annotated[int, AtLeast(0)] = 0
    """Seed of weights, dropout masks and the order of samples."""
    flat: bool = False
    """Give the optimizer, which must be element-wise, `flat_groups` of the parameters."""
    loss_chunk: Annotated[int, AtLeast(1)] | None = None
    """Rows of logits that exist at once, where the head computes cross entropy; ``None``: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """``[buckets]``: gradients that are reduced together."""

    cap_mb: Annotated[float, Above(0)] = 25.0
    """Size in MiB at which a bucket is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The layout of a model over ranks, and its training; ``Plan()`` is one process."""

    axes: Axes = Axes()  # noqa: RUF009
    pipeline: PipelinePlan = PipelinePlan()
    shard: ShardPlan = ShardPlan()
    context: ContextPlan = ContextPlan()
    expert: ExpertPlan = ExpertPlan()
    tensor: TensorPlan = TensorPlan()
    precision: Precision = Precision()  # noqa: RUF009
    train: TrainPlan = TrainPlan()
    buckets: BucketPlan = BucketPlan()
    origin: Origin = field(default_factory=Origin, compare=False, repr=False)
    """Where the values came from; not part of the value."""

    def __post_init__(self) -> None:
        for item, hint in fields_of(type(self)):
            kind, found = unmarked(hint), getattr(self, item.name)
            if isinstance(kind, type) and not isinstance(found, kind):
                raise TypeError(_table_of_another_type(item.name, kind, found))
        object.__setattr__(self, "axes", _in_our_names(self.axes))

    def problems(self) -> Iterator[Problem]:
        """Find axes that are not known, and names that cannot be translated."""
        others = [name for name in self.axes.names if name in OTHER_NAMES]
        if others and len(others) == len(self.axes.names):
            size, experts = self.axes.size("dp_shard"), self.axes.size("ep")
            yield Problem(
                ("axes", "ep"),
                f"dp_shard = {size} is not divisible by ep = {experts}: ranks of ep are among "
                "those of dp_shard",
            )
        elif others:
            meant = (f"{n} is {OTHER_NAMES[n]}" + " x expert" * (n == "dp_shard") for n in others)
            yield Problem(
                ("axes", others[0]),
                f"[axes] mixes {', '.join(others)} with other names; use one family: "
                f"{', '.join(meant)}",
            )
        for name in self.axes.names:
            if name not in KNOWN_AXES and name not in others:
                close = nearest(name, KNOWN_AXES)
                known = f"known axes: {', '.join(KNOWN_AXES)}"
                hint = f"did you mean '{close}'?" if close else known
                yield Problem(("axes", name), f"unknown axis '{name}' in [axes]; {hint}")

    @classmethod
    def from_toml(cls, text: str, source: str = "", overrides: Sequence[str] = ()) -> Self:
        """Read TOML text, called ``source`` in messages; ``overrides`` such as ``train.seed=3``.

        Raises ``PlanError`` with one line for each mistake.
        """
        return read(text, cls, source=source, overrides=overrides)

    @classmethod
    def from_file(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Read a TOML file; raises ``PlanError`` as ``from_toml``, and if it cannot be read."""
        return read_file(path, cls, overrides=overrides)

    def to_toml(self, *, every_key: bool = False) -> str:
        """Write the keys that differ from one process, or every key that has a value, as TOML."""
        return dump(self, every_key=every_key)

    @classmethod
    def from_json(cls, text: str, source: str = "") -> Self:
        """Read what ``to_json`` wrote; raises ``PlanError`` as ``from_toml``."""
        try:
            tree = json.loads(text, object_pairs_hook=partial(_once, source))
        except PlanError:
            raise
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, too
            raise PlanError(f"not valid JSON: {error}", source) from error
        if not isinstance(tree, dict):
            raise PlanError(f"expected a JSON object, found {type(tree).__name__}", source)
        return read_tree(tree, cls, source=source)

    def to_json(self) -> str:
        """Write one line of JSON with every key; ``from_json`` gives an equal plan."""
        return json.dumps(plain(self))

    def over(self, world_size: int) -> Self:
        """Return this plan with the ranks of ``dp_shard = -1``, those that other axes leave.

        Raises ``PlanError`` where other axes do not divide ``world_size``.
        """
        sizes = self.axes.mapping()
        if sizes.get("shard") != LEFT:
            return self
        others = -self.axes.world_size
        if world_size % others:
            text = f"dp_shard = -1: other axes have {_ranks(others)}, which do not divide the "
            raise self.origin.error([Problem(("axes", "dp_shard"), f"{text}{_ranks(world_size)}")])
        return replace(self, axes=Axes.of({**sizes, "shard": world_size // others}))

    @property
    def data_size(self) -> int:
        """Number of ranks that read different shares of a batch."""
        return math.prod(map(self.axes.size, DATA_AXES))

    @property
    def is_summed(self) -> bool:
        """Whether several ranks compute different parts of one batch, and sum their gradients."""
        return any(self.axes.size(axis) > 1 for axis in SUM_AXES)

    def check(
        self,
        world_size: int,
        names_and_shapes: Mapping[str, Sequence[int]] | None = None,
        *,
        modules: Iterable[str] | None = None,
    ) -> None:
        """Raise one ``PlanError`` with every problem of this plan on ``world_size`` ranks.

        ``names_and_shapes`` has the model's parameters; patterns are matched against the modules
        that hold them, or against ``modules`` where names of modules without parameters count.
        """
        found = review(self, self.origin)
        found += [*_idle_problems(self), *_lacking_problems(self)]
        found += _expert_problems(self.expert)
        if self.axes.world_size != world_size:
            found.append(Problem(("axes",), _world_problem(self.axes, world_size)))
        if names_and_shapes is not None or modules is not None:
            known = tuple(modules) if modules is not None else module_names(names_and_shapes or ())
            found += _pattern_problems(self, known)
        if found:
            raise self.origin.error(found)


def _in_our_names(axes: Axes) -> Axes:
    """Translate names of torchtitan, if all are, to ours in our order; others stay.

    Its dp_shard counts the ranks that share experts, too.
    """
    size, experts = axes.size("dp_shard"), axes.size("ep")
    shared = size != LEFT and size % experts
    if not axes.names or not {*axes.names} <= {*OTHER_NAMES} or shared:
        return axes
    sizes = {ours: axes.size(name) for name, ours in OTHER_NAMES.items() if name in axes.names}
    if "shard" in sizes:
        sizes["shard"] = LEFT if size == LEFT else size // experts
    return Axes.of(sizes)


def _table_of_another_type(name: str, kind: type, found: object) -> str:
    written = f"{kind.__name__}(...)"
    if isinstance(found, Mapping):
        inner = ", ".join(f"{key}={value!r}" for key, value in found.items())
        written = f"Axes.of({found!r})" if kind is Axes else f"{kind.__name__}({inner})"
    return (
        f"expected {name} of a Plan to be of {kind.__module__}.{kind.__name__}, found "
        f"{type(found).__name__}; write Plan({name}={written}), or read all of it as TOML or JSON"
    )


def _once(source: str, pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make a JSON object whose keys are all different."""
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise PlanError(f"key '{twice}' is given twice in one JSON object", source)
    return table


def match_names(pattern: str, names: Iterable[str]) -> tuple[str, ...]:
    """List the dotted names that a pattern matches, in their order.

    ``*`` alone stands for exactly one component, ``**`` for any number of them, none included;
    within a component ``*`` stands for any characters. The root module is the empty name.

    >>> match_names("layers.*", ["layers", "layers.0", "layers.1", "layers.1.norm"])
    ('layers.0', 'layers.1')
    >>> match_names("**.w*", ["wq", "layers.0.wk", "layers.0.norm"])
    ('wq', 'layers.0.wk')
    """
    # Each component is matched with its dot, so that "**" can stand for no component at all.
    whole = {"**": r"(?:[^.]+\.)*", "*": r"[^.]+\."}
    parts = (
        whole.get(part) or "[^.]*".join(map(re.escape, part.split("*"))) + r"\."
        for part in (pattern.split(".") if pattern else ())
    )
    expression = re.compile("".join(parts), re.DOTALL)
    return tuple(n for n in names if expression.fullmatch(n + "." if n else ""))


def module_names(parameters: Iterable[str]) -> tuple[str, ...]:
    """List the modules that hold parameters, parents first, the root (``""``) included."""
    names: dict[str, None] = {"": None}
    for parameter in parameters:
        components = parameter.split(".")[:-1]
        names |= dict.fromkeys(".".join(components[:n]) for n in range(1, len(components) + 1))
    return tuple(names)


_NEEDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("pipeline", "", ("pipeline",)),
    ("shard", "", ("shard",)),
    ("context", "", ("context",)),
    ("expert", "", ("expert",)),
    ("tensor", "", ("tensor",)),
    ("buckets", "", SUM_AXES),
    ("train", "batch_norm", ("pipeline", *SUM_AXES)),
)
"""Table, key (every key if empty), and the axes of which one must be larger than 1."""


def _idle_problems(plan: Plan) -> Iterator[Problem]:
    """Find settings without effect. Those left at their default were not asked for."""
    for table, only, needed in _NEEDS:
        if any(plan.axes.size(axis) > 1 for axis in needed):
            continue
        record = getattr(plan, table)
        for item in fields(record):
            if only in ("", item.name) and getattr(record, item.name) != item.default:
                sizes = " and ".join(f"{axis} = 1" for axis in needed)
                yield Problem(
                    (table, item.name),
                    f"key '{item.name}' in [{table}] has no effect with {sizes}; remove it, or "
                    f"give {' or '.join(needed)} more than 1 rank in [axes]",
                )


def _lacking_problems(plan: Plan) -> Iterator[Problem]:
    size = plan.axes.size("tensor")
    if size > 1 and not plan.tensor.rules:
        yield Problem(
            ("axes", "tensor"),
            f"axis tensor = {size} has nothing to cut: give [tensor] rules, a named set or a "
            'table such as "layers.*.attention.wq" = "colwise"',
        )


def _expert_problems(expert: ExpertPlan) -> Iterator[Problem]:
    if expert.auxiliary and expert.balance is None:
        yield Problem(
            ("expert", "auxiliary"),
            'axis expert: [expert] balance is not set: "global" is the loss of one process, "rank" '
            'uses each rank\'s own statistics, "none" adds no auxiliary loss',
        )
    if expert.auxiliary and expert.balance == "none":
        yield Problem(
            ("expert", "auxiliary"),
            "key 'auxiliary' in [expert] has no effect with balance = \"none\"; remove it, or set "
            'balance = "global"',
        )


def _world_problem(axes: Axes, world_size: int) -> str:
    product = axes.world_size
    given = f"axes multiply to {product} ({axes})" if axes.names else "no [axes] means 1 rank"
    there = f"there {'is' if world_size == 1 else 'are'} {_ranks(world_size)}"
    message = f"{given}, but {there}; start {_ranks(product)}"
    for name in DATA_AXES:
        others = product // axes.size(name)
        if world_size % others == 0:
            return f"{message}, or set {name} = {world_size // others} in [axes]"
    return f"{message}, or choose sizes in [axes] whose product is {world_size}"


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _pattern_problems(plan: Plan, modules: Sequence[str]) -> Iterator[Problem]:
    for key, patterns in _patterns(plan):
        for pattern in patterns:
            if not match_names(pattern, modules):
                inner = (*key, pattern) if key == ("tensor", "rules") else key
                shapes = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in modules if name)
                close = nearest(pattern, [*modules, *shapes])
                hint = f"did you mean '{close}'?" if close else _some(list(shapes))
                where = f"'{pattern}' in [{key[0]}] {key[1]}"
                yield Problem(inner, f"{where} matches no module; {hint}")


_PATTERNS = (
    *(("pipeline", "split"), ("shard", "units"), ("expert", "modules"), ("tensor", "rules")),
    *(("train", "recompute"), ("train", "per_rank")),
)
"""Tables and keys that hold patterns of module names, or a name (text) in their place."""


def _patterns(plan: Plan) -> Iterator[tuple[tuple[str, str], Iterable[str]]]:
    for table, key in _PATTERNS:
        value = getattr(getattr(plan, table), key)
        if value is not None and not isinstance(value, str):
            yield (table, key), value


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"modules: {', '.join(names[:8])}{more}" if names else "the model has no named modules"
