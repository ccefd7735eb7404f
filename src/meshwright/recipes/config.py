"""The configuration of a run: the plan's tables, [model], [data], [loss], [optimizer], [run].

``meshwright train --help`` lists the keys with the texts below the fields of these dataclasses.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from meshwright.axes import KNOWN_AXES, OTHER_NAMES
from meshwright.plan import Plan
from meshwright.settings import (
    Above,
    AtLeast,
    Inline,
    Origin,
    Problem,
    keys_of,
)
from meshwright.toml_source import adapter, literal, read_file

EXAMPLE = Path(__file__).with_name("example.toml")
"""The configuration that comes with the package: in the repository a link to that of examples/."""
SMALLEST_FLOAT16 = 6e-8
"""Just above the smallest number that float16 distinguishes from zero."""


Options = Mapping[str, Any]
"""A table of keyword arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """``[model]``: the byte-level GPT, a function of yours, or a model of Hugging Face."""

    factory: str = ""
    """package.module:function that builds your model."""
    options: Options = field(default_factory=dict, hash=False)
    """Keyword arguments of factory."""
    hugging_face: str = ""
    """config.json of a transformers model, or a folder with one; its code is never run."""
    weights: str = ""
    """Folder of weights that the hugging_face model starts from; empty means random weights."""
    peft: Options = field(default_factory=dict, hash=False)
    """Fields of PEFT's LoraConfig, such as { r = 8, target_modules = ["q_proj"] }."""
    layers: Annotated[int, AtLeast(1)] = 4
    """Number of blocks."""
    heads: Annotated[int, AtLeast(1)] = 4
    """Attention heads in each block; dim is split into as many equal, even widths."""
    dim: Annotated[int, AtLeast(2)] = 128
    """Width of the residual stream."""
    context: Annotated[int, AtLeast(1)] = 128
    """Bytes or tokens in one window of [data] path or tokens."""
    hidden: Annotated[int, AtLeast(0)] = 0
    """Width of the feed-forward layer; 0 means four times dim."""
    activation: Literal["gelu", "swiglu"] = "gelu"
    """Feed-forward activation."""
    experts: Annotated[int, AtLeast(0)] = 0
    """Feed-forward layers of a block, to which a router sends tokens; 0 means one without."""
    top_k: Annotated[int, AtLeast(1)] = 2
    """Experts of each token."""
    tied: bool = False
    """Use the embedding's weight as the output head."""
    dropout: Annotated[float, AtLeast(0)] = 0.0
    """Fraction of activations set to zero in training; less than 1."""
    rotary_base: Annotated[float, Above(1)] = 10000.0
    """Base of the rotary frequencies."""

    def problems(self) -> Iterator[Problem]:
        """Check rules between several keys of this table."""
        if self.dim % (2 * self.heads):
            yield Problem(
                ("dim",),
                f"[model] dim = {self.dim} cannot be cut into {self.heads} heads of equal, even "
                f"width; choose a multiple of {2 * self.heads}",
                involves=(("heads",),),
            )
        if self.experts and self.top_k > self.experts:
            yield Problem(
                ("top_k",),
                f"[model] top_k = {self.top_k} is more than experts = {self.experts}",
                involves=(("experts",),),
            )
        if self.dropout >= 1:
            yield Problem(
                ("dropout",), f"[model] dropout must be less than 1, found {self.dropout}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """``[data]``: the text and how it is read, tokens, or a data set of yours."""

    factory: str = ""
    """package.module:function that returns a Dataset, or (training, validation)."""
    collate: str = ""
    """package.module:function that makes a batch from a list of items; by default torch's."""
    tokens: str = ""
    """A .npy file with one row of token ids."""
    path: str = ""
    """File or folder; empty means the source of Python's standard library."""
    suffixes: tuple[str, ...] = (".py",)
    """Endings of the files read in a folder; an empty list means every file."""
    exclude: tuple[str, ...] = ("site-packages", "dist-packages", "test", "tests", "__pycache__")
    """Names of folders that are skipped."""
    max_bytes: Annotated[int, AtLeast(1)] = 64 * 2**20
    """Limit of the bytes read from a folder: whole files, chosen by a hash of their paths."""
    validation_every: Annotated[int, AtLeast(2)] = 20
    """Of several files, one in this many is held out for validation."""
    validation_windows: Annotated[int, AtLeast(1)] = 64
    """Held-out windows or items in one validation."""
    batch_size: Annotated[int, AtLeast(1)] = 32
    """Windows or items per optimizer step, over all ranks and accumulated batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """``[loss]``: by default the model's own, or cross entropy."""

    factory: str = ""
    """package.module:function of (output, target) that returns a mean or (sum, count)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """``[optimizer]``: AdamW or one of yours, with a linear warm-up and a cosine decay."""

    factory: str = ""
    """package.module:class, called with the parameters; empty means AdamW."""
    options: Options = field(default_factory=dict, hash=False)
    """Keyword arguments of factory; lr stands for learning_rate."""
    learning_rate: Annotated[float, Above(0)] = 3e-3
    """Highest learning rate, reached at the end of the warm-up."""
    final_fraction: Annotated[float, AtLeast(0)] = 0.1
    """Learning rate at the last step, as a fraction of the highest."""
    warmup_steps: Annotated[int, AtLeast(0)] = 20
    """Steps of linear warm-up."""
    weight_decay: Annotated[float, AtLeast(0)] = 0.1
    """Weight decay of matrices; vectors (norms, biases) are never decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the running means of the gradient and of its square."""
    epsilon: Annotated[float, Above(0)] = 1e-8
    """The term that AdamW adds to the denominator."""

    @property
    def highest_rate(self) -> float:
        """The highest learning rate: ``learning_rate``, or ``lr`` of the options."""
        return self.options.get("lr", self.learning_rate)

    def problems(self) -> Iterator[Problem]:
        """Check rules that a single bound cannot say."""
        rate = self.options.get("lr", 1.0)
        if type(rate) not in (int, float) or not 0 < rate < math.inf:
            yield Problem(
                ("options", "lr"),
                f"[optimizer] lr in options: expected a number above 0, found {literal(rate)}",
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            yield Problem(
                ("betas",),
                "[optimizer] betas must be at least 0 and less than 1, found "
                f"{self.betas[0]} and {self.betas[1]}",
            )
        if self.final_fraction > 1:
            yield Problem(
                ("final_fraction",),
                f"[optimizer] final_fraction must be at most 1, found {self.final_fraction}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """``[run]``: the number of steps, intervals of saving and logging, and the folder."""

    steps: Annotated[int, AtLeast(1)] = 300
    """Optimizer steps of the whole run."""
    folder: str = ""
    """Folder for metrics, checkpoints, timeline and summary; empty means a new one under runs/."""
    resume: str = "auto"
    """auto (the newest complete checkpoint, if any), never, a run's folder, or a checkpoint."""
    accept_changes: bool = False
    """Resume even if plan, text, optimizer or steps differ from those of the checkpoint."""
    save_every: Annotated[int, AtLeast(0)] = 0
    """Steps between checkpoints; 0 means only at the end."""
    save: Literal["background", "foreground"] = "background"
    """background: train on while a checkpoint is written, from a copy of each rank's share of it in
    host memory. foreground: wait, without the copy, as for the last checkpoint."""
    keep_last: Annotated[int, AtLeast(1)] = 3
    """Number of checkpoints to keep."""
    validate_every: Annotated[int, AtLeast(0)] = 0
    """Steps between validations; 0 means only at the end."""
    log_every: Annotated[int, AtLeast(1)] = 1
    """Steps between printed lines (the metrics file has every step)."""
    check_parity: bool = False
    """Before training, compare this layout with one process in float64."""
    parity_steps: Annotated[int, AtLeast(1)] = 20
    """Steps of that comparison."""
    parity_tolerance: Annotated[float, Above(0)] | None = None
    """Largest relative difference allowed in it; by default 1e-9, or 1e-6 where the model itself
    casts to float32."""
    export: str = ""
    """A new folder for the final weights, in the form that ``from_pretrained`` or PEFT reads."""
    trace_steps: Annotated[int, AtLeast(0)] = 5
    """Number of last steps recorded in timeline.json; 0 writes none."""
    trace_tensors: bool = False
    """Write hashes and norms of every step's tensors, for ``meshwright compare``."""
    trace_modules: tuple[str, ...] = ()
    """Names of modules whose outputs are traced, with wildcards; by default the innermost."""
    trace_mb: Annotated[float, Above(0)] = 256.0
    """Size limit of each rank's tensor trace in MiB; the trace ends there."""
    trackers: tuple[str, ...] = ()
    """Where rank 0 sends the numbers of each step: tensorboard, wandb, mlflow, trackio, or a
    package.module:Class of your own."""
    peak_tflops: Annotated[float, Above(0)] | None = None
    """Peak speed of a rank's device in TFLOP/s, for MFU and HFU; by default that of the GPU's data
    sheet, or what ``meshwright plan --calibrate`` measured on this machine."""
    predict: bool = False
    """Predict a step's time and memory, and show them beside the measured ones in the report."""
    timeout: Annotated[float, Above(0)] | None = None
    """Seconds after which any wait for another rank ends; by default ranks wait as long as the
    other one is working."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The full configuration of ``meshwright train``, including the plan's tables."""

    plan: Annotated[Plan, Inline()] = field(default_factory=Plan)
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()
    origin: Origin = field(default_factory=Origin, compare=False, repr=False)
    """Where the values came from; not part of the value."""

    def problems(self) -> Iterator[Problem]:
        """Check rules between several tables."""
        parts = self.plan.data_size * self.plan.train.accumulate
        if parts > 0 and self.data.batch_size % parts:  # dp_shard = -1 is read again with ranks
            yield Problem(
                ("data", "batch_size"),
                f"[data] batch_size = {self.data.batch_size} cannot be shared by "
                f"{self.plan.data_size} data ranks x {self.plan.train.accumulate} accumulated "
                f"batches; choose a multiple of {parts}",
                involves=(("axes",), ("train", "accumulate")),
            )
        yield from self._conflicts()
        if self.run.check_parity and self.plan.expert.bias_rate is not None:
            yield Problem(
                ("run", "check_parity"),
                "[run] check_parity trains one process, which moves no biases of routers: leave "
                "it out, or [expert] bias_rate",
                involves=(("expert", "bias_rate"),),
            )
        # Rounded to zero, it lets AdamW divide zero by zero, and the weights become NaN.
        moments = self.plan.precision.optimizer or self.plan.precision.parameters
        is_adamw = not self.optimizer.factory
        if is_adamw and moments == "float16" and self.optimizer.epsilon < SMALLEST_FLOAT16:
            yield Problem(
                ("optimizer", "epsilon"),
                f"[optimizer] epsilon = {self.optimizer.epsilon:g} is zero in float16, the dtype "
                f"of the optimizer; choose at least {SMALLEST_FLOAT16:g}, or keep [precision] "
                'parameters in float32 with compute = "float16"',
                involves=(("precision",),),
            )

    @property
    def home(self) -> Path:
        """The folder of the configuration file; the current one for a configuration of text."""
        return Path(self.origin.source).absolute().parent

    def find(self, path: str) -> Path:
        """Find a file or folder that a key names: in the current folder, or beside the TOML.

        A path that does not exist is returned as given.
        """
        named = Path(path).expanduser()
        return next((p for p in (named, self.home / named) if p.exists()), named)

    @property
    def is_byte_model(self) -> bool:
        """True for the model that comes with the package."""
        return not self.model.factory and not self.model.hugging_face

    def _conflicts(self) -> Iterator[Problem]:
        """Find keys of which one makes another meaningless."""
        given = {*self.origin.lines, *self.origin.overrides}
        for table, key, others in _EXCLUSIVE:
            for other in others if getattr(getattr(self, table), key) else ():
                if (table, other) in given:
                    yield Problem(
                        (table, other),
                        f"key '{other}' in [{table}] conflicts with '{key}': remove one of them",
                    )
        for table, key, needed in _NEEDED:
            if getattr(getattr(self, table), key) and not getattr(getattr(self, table), needed):
                yield Problem(
                    (table, key), f"key '{key}' in [{table}] is for '{needed}', which is missing"
                )
        if "lr" in self.optimizer.options and ("optimizer", "learning_rate") in given:
            yield Problem(
                ("optimizer", "learning_rate"),
                "key 'learning_rate' in [optimizer] and 'lr' in its options both set the highest "
                "learning rate: remove one of them",
            )
        size = self.plan.axes.size("tensor")
        if self.model.peft and size > 1:
            yield Problem(
                ("model", "peft"),
                f"[model] peft with axis tensor = {size}: LoRA's matrices cannot be split over "
                "tensor ranks; set tensor = 1 in [axes] and use shard or replicate",
            )
        if self.model.peft and self.is_byte_model:
            yield Problem(("model", "peft"), "[model] peft needs hugging_face or factory")


_BYTE_KEYS = (
    *("layers", "heads", "dim", "hidden", "activation", "tied", "dropout"),
    *("experts", "top_k", "rotary_base"),
)
_TEXT_KEYS = ("path", "suffixes", "exclude", "max_bytes")
_EXCLUSIVE = (
    ("model", "factory", ("hugging_face", "weights", *_BYTE_KEYS)),
    ("model", "hugging_face", _BYTE_KEYS),
    ("data", "factory", ("tokens", *_TEXT_KEYS, "validation_every")),
    ("data", "tokens", _TEXT_KEYS),
    ("optimizer", "factory", ("weight_decay", "betas", "epsilon")),
)
"""A table, a key in it, and the keys that have no meaning beside it."""
_NEEDED = (
    ("model", "options", "factory"),
    ("model", "weights", "hugging_face"),
    ("data", "collate", "factory"),
    ("optimizer", "options", "factory"),
)
"""A table, a key in it, and the one that it is for."""


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a configuration file; ``overrides`` such as ``train.seed=3`` win over it.

    The path ``example`` is `EXAMPLE`. Raises one ``PlanError`` with a line for each mistake.
    """
    return read_file(EXAMPLE if path == "example" else path, TrainConfig, overrides=overrides)


def option_lines() -> list[str]:
    """List the keys of the configuration in lines of 80: option, choices, default, text."""
    lines = ["Keys of the configuration, with their defaults:"]

    def tell(option: str, default: str, meaning: str) -> None:
        rest = " " * 6
        for words, first in ((f"{option} ({default})", "  "), (meaning, rest)):
            lines.extend(textwrap.wrap(words, 80, initial_indent=first, subsequent_indent=rest))

    also = f"or, in the names of torchtitan, {', '.join(OTHER_NAMES)}"
    tell("--axes.NAME", "1", f"Ranks along an axis: {', '.join(KNOWN_AXES)}; {also}.")
    kinds = adapter(TrainConfig).json_schema()["$defs"]
    tables = kinds["Plan"]["properties"] | kinds["TrainConfig"]["properties"]
    for table in keys_of(TrainConfig):
        record = kinds.get(tables[table].get("$ref", "").removeprefix("#/$defs/"), {})
        for key, about in record.get("properties", {}).items():
            kind = about.get("anyOf", [about])  # X | None is X, then null
            choices = kind[0].get("enum", ()) if kind[1:] in ([], [{"type": "null"}]) else ()
            option = f"--{table}.{key}" + (f" {{{', '.join(choices)}}}" if choices else "")
            default = "none" if about.get("default") is None else literal(about["default"])
            tell(option, default, " ".join(about["description"].split()).replace("``", ""))
    return lines
