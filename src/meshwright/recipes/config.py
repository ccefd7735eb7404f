"""The configuration of a run: the tables of the plan plus [model], [data], [optimizer], [run]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["DataConfig", "ModelConfig", "OptimizerConfig", "RunConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The byte-level GPT."""

    layers: int = 4
    """Number of blocks."""
    heads: int = 4
    """Attention heads in each block; must divide dim into even widths."""
    dim: int = 128
    """Width of the residual stream."""
    context: int = 128
    """Bytes the model sees at once."""
    hidden: int = 0
    """Width of the feed-forward layer; 0 means four times dim."""
    activation: Literal["gelu", "swiglu"] = "gelu"
    """Feed-forward activation: gelu or swiglu."""
    tied: bool = False
    """Use the embedding's weight as the output head."""
    dropout: float = 0.0
    """Share of activations set to zero in training."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The text and how it is read."""

    path: str = ""
    """File or folder; empty means the source of Python's standard library."""
    suffixes: tuple[str, ...] = (".py",)
    """Endings of the files read in a folder; an empty list means every file."""
    exclude: tuple[str, ...] = ("site-packages", "dist-packages", "test", "tests", "__pycache__")
    """Names of folders that are skipped."""
    max_bytes: int = 64 * 2**20
    """At most so many bytes of a folder are read."""
    validation_every: int = 20
    """One file in so many is held out for validation."""
    validation_windows: int = 64
    """Windows of held-out text in one validation."""
    batch_size: int = 32
    """Windows in one global batch, over all ranks and accumulated parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a linear warm-up and a cosine decay."""

    learning_rate: float = 3e-3
    """Highest learning rate, reached at the end of the warm-up."""
    final_fraction: float = 0.1
    """Learning rate at the last step, as a share of the highest."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Decay of matrices; vectors (norms, biases) are never decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    epsilon: float = 1e-8
    """Added to the denominator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How long, how often, and where to."""

    steps: int = 300
    """Optimizer steps of the whole run."""
    folder: str = "runs/latest"
    """Where metrics, checkpoints, timeline and summary are written."""
    resume: str = "auto"
    """auto (newest complete checkpoint of the folder), never, or a checkpoint's path."""
    save_every: int = 0
    """Save a checkpoint every so many steps; 0 means only at the end."""
    validate_every: int = 0
    """Validate every so many steps; 0 means only at the start and at the end."""
    log_every: int = 1
    """Print a line every so many steps (the metrics file has every step)."""
    check_parity: bool = False
    """First compare this layout with one process in float64."""
    parity_steps: int = 20
    """Steps of that comparison."""
    trace_steps: int = 5
    """Last steps that go into timeline.json; 0 writes none."""
    timeout: float = 60.0
    """Seconds that a rank waits for another before it gives up."""
