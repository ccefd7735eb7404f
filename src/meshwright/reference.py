"""The same training in one process, and the first place where another run differs from it.

Used by ``--check-parity`` and by `meshwright.testing`. The reference takes whole global batches,
keeps the graphs of all microbatches and differentiates the one global mean, so it shares neither
buckets nor scaling with the layouts that it judges.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.comm.dtensors.gather_dtensor import whole
from meshwright.gradients import LocalLoss, apply_loss, call_module, clip_grad_norm_, cut_batch
from meshwright.torch_internals.trees import tree_map

__all__ = [
    "Difference",
    "ReferenceRun",
    "Result",
    "Trainee",
    "first_difference",
    "record",
    "train_reference",
]

FLOOR = 1e-6
"""Values so much smaller than the largest of their step count as zero: they are rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRun:
    """The numbers of a run, on one process or on several."""

    losses: tuple[float, ...]
    """Global mean loss of each step."""
    gradients: tuple[Mapping[str, torch.Tensor], ...]
    """Gradients of each step before clipping, by original name, without those that are None."""
    norms: tuple[float | None, ...]
    """2-norm of all gradients of each step together, tied ones once; None if it was not taken."""
    weights: Mapping[str, torch.Tensor]
    """Parameters and buffers after the last step, by original name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first tensor in which two runs differ by more than was allowed."""

    kind: str
    """``loss``, ``gradient``, ``norm`` (of all gradients) or ``weight``."""
    name: str
    step: int
    error: float
    """Largest difference over the largest value; infinite when one run lacks the tensor."""
    tolerance: float
    note: str = ""

    def __str__(self) -> str:
        named = {"loss": "the loss", "norm": "the norm of all gradients"}
        what = named.get(self.kind, f"the {self.kind} of {self.name!r}")
        note = f" ({self.note})" if self.note else ""
        return (
            f"step {self.step}: {what} differs from one process by {self.error:.2e} relative, "
            f"expected at most {self.tolerance:.0e}{note}"
        )


class Result(Protocol):
    """The result of the second half of a step."""

    @property
    def loss(self) -> torch.Tensor:
        """Global mean of the step."""
        ...

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """2-norm of all gradients before clipping, where it was taken."""
        ...


class Trainee(Protocol):
    """A training in two halves, such as `meshwright.composition.Trainable`."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Parameters and buffers, whole, by original name."""
        ...

    def forward_backward(self, batch: object, target: object = None) -> None:
        """Leave the reduced gradients of this rank's share of a batch."""
        ...

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Them, by original name."""
        ...

    def optimizer_step(self) -> Result:
        """Clip, update, zero."""
        ...


Batches = Iterable[tuple[object, object]]
"""Pairs of batch and target; the target is None for a loss that takes the output alone."""


def train_reference(
    model: nn.Module,
    batches: Batches,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    loss: Callable[..., object],
    accumulate: int = 1,
    clip_norm: float | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> ReferenceRun:
    """Train a copy of ``model`` on global ``batches``, one optimizer step each; ``model`` is kept.

    ``accumulate`` cuts each batch into that many microbatches. That matters only to modules that
    look at a whole batch: for BatchNorm with local statistics on n ranks it is n times the plan's.
    Model and floating-point inputs are converted to ``dtype``, unless it is None.
    """
    trained = copy.deepcopy(model)
    if dtype is not None:
        trained.to(dtype)
    stepper = optimizer(trained.parameters())
    trained.train()
    losses: list[float] = []
    gradients: list[dict[str, torch.Tensor]] = []
    norms: list[float] = []
    for batch, target in batches:
        parts = cut_batch(*_cast((batch, target), dtype), accumulate)
        mean = _global_mean([apply_loss(loss, call_module(trained, x), y) for x, y, _ in parts])
        mean.backward()
        losses.append(mean.item())
        gradients.append(_gradients(trained))
        norms.append(_norm(gradients[-1].values()))
        if clip_norm is not None:
            clip_grad_norm_(trained, clip_norm)
        stepper.step()
        stepper.zero_grad(set_to_none=True)
    return ReferenceRun(
        losses=tuple(losses),
        gradients=tuple(gradients),
        norms=tuple(norms),
        weights=_weights(trained),
    )


def record(trainee: Trainee, batches: Batches, *, dtype: torch.dtype | None = None) -> ReferenceRun:
    """Train on this rank's share of each batch and keep what `train_reference` keeps.

    Floating-point inputs are converted to ``dtype``, unless it is None.
    """
    losses: list[float] = []
    gradients: list[dict[str, torch.Tensor]] = []
    norms: list[float | None] = []
    for pair in batches:
        batch, target = _cast(pair, dtype)
        trainee.forward_backward(batch, target)
        gradients.append({name: g.detach().clone() for name, g in trainee.gradients().items()})
        result = trainee.optimizer_step()
        losses.append(result.loss.item())
        norms.append(None if result.grad_norm is None else result.grad_norm.item())
    return ReferenceRun(
        losses=tuple(losses),
        gradients=tuple(gradients),
        norms=tuple(norms),
        weights={name: tensor.detach().clone() for name, tensor in trainee.weights().items()},
    )


def first_difference(
    parallel: ReferenceRun, reference: ReferenceRun, tolerance: float
) -> Difference | None:
    """Find the first loss, gradient, norm or weight that differs by more than ``tolerance``,
    relative.

    Steps in their order, in each the loss before the gradients and the norm of all of them, and
    weights at the end. A relative
    error is the largest difference over the largest value of the tensor (or over a millionth of
    the largest value among all gradients of the step, if that is more).
    """
    for difference in _differences(parallel, reference, tolerance):
        if not difference.error <= tolerance:
            return difference
    return None


def _differences(
    parallel: ReferenceRun, reference: ReferenceRun, tolerance: float
) -> Iterator[Difference]:
    steps = len(reference.losses)
    if len(parallel.losses) != steps:
        note = f"{len(parallel.losses)} steps against {steps}"
        yield Difference(
            kind="loss", name="", step=0, error=math.inf, tolerance=tolerance, note=note
        )
    rows = zip(
        parallel.losses,
        reference.losses,
        parallel.gradients,
        reference.gradients,
        parallel.norms,
        reference.norms,
        strict=True,
    )
    for step, (loss, expected, gradients, wanted, norm, expected_norm) in enumerate(rows):
        error = _number_error(loss, expected)
        yield Difference(kind="loss", name="", step=step, error=error, tolerance=tolerance)
        yield from _tensor_differences("gradient", step, gradients, wanted, tolerance)
        if norm is not None and expected_norm is not None:
            error = _number_error(norm, expected_norm)
            yield Difference(kind="norm", name="", step=step, error=error, tolerance=tolerance)
    last = max(steps - 1, 0)
    yield from _tensor_differences("weight", last, parallel.weights, reference.weights, tolerance)


def _tensor_differences(
    kind: str,
    step: int,
    found: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    tolerance: float,
) -> Iterator[Difference]:
    floor = FLOOR * max((_largest(tensor) for tensor in wanted.values()), default=0.0)
    for name in [*wanted, *(name for name in found if name not in wanted)]:
        error, note = math.inf, ""
        if name not in found:
            note = "it exists only in one process"
        elif name not in wanted:
            note = "it does not exist in one process"
        elif found[name].shape != wanted[name].shape:
            note = f"shape {tuple(found[name].shape)} against {tuple(wanted[name].shape)}"
        else:
            error = _relative(found[name], wanted[name], floor)
        yield Difference(
            kind=kind, name=name, step=step, error=error, tolerance=tolerance, note=note
        )


def _number_error(found: float, wanted: float) -> float:
    wide = torch.float64
    return _relative(torch.tensor(found, dtype=wide), torch.tensor(wanted, dtype=wide), 0.0)


def _relative(found: torch.Tensor, wanted: torch.Tensor, floor: float) -> float:
    """Largest difference over largest value; NaN where only one has it counts as infinite."""
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    a, b = found.detach().cpu().to(wide), wanted.detach().cpu().to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, 0.0, (a - b).abs())
    if not error.numel():
        return 0.0
    largest = error.max().item() if not bool(error.isnan().any()) else math.inf
    return 0.0 if largest == 0.0 else largest / max(_largest(b), floor, 1e-300)


def _largest(tensor: torch.Tensor) -> float:
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def _global_mean(losses: list[LocalLoss]) -> torch.Tensor:
    total = torch.stack([loss.total for loss in losses]).sum()
    return total / sum(loss.count for loss in losses)


def _cast(pair: tuple[object, object], dtype: torch.dtype | None) -> tuple[object, object]:
    def convert(leaf: object) -> object:
        is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_float else leaf

    return pair if dtype is None else tree_map(convert, pair)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _norm(gradients: Iterable[torch.Tensor]) -> float:
    """Of all of them together; shares nothing with the norm over ranks that it judges."""
    norms = [gradient.norm().double() for gradient in gradients]
    return torch.stack(norms).norm().item() if norms else 0.0


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = model.state_dict()
    return {name: whole(tensor.detach()).clone() for name, tensor in state.items()}
