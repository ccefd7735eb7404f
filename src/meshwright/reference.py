"""A reference run in one process, and the first place where another run differs from it.

Used by ``--check-parity`` and by `meshwright.testing`. The reference takes whole global batches,
keeps the graphs of all microbatches and differentiates the one global mean, so it shares neither
buckets nor scaling with the layouts that it judges.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from meshwright.comm.dtensors.gather_dtensor import whole
from meshwright.gradients import apply_loss, call_module, clip_grad_norm_, cut_batch
from meshwright.gradients.optimizer_list import OptimizerFactory, as_one
from meshwright.torch_internals.trees import tree_map

FLOOR = 1e-6
"""Values below this fraction of the largest in their step count as zero: they are rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRun:
    """The numbers of a run, on one process or on several."""

    losses: tuple[float, ...]
    """Global mean loss of each step."""
    gradients: tuple[Mapping[str, torch.Tensor], ...]
    """Gradients of each step before clipping, by original name, without those that are None."""
    norms: tuple[float | None, ...]
    """2-norm of all gradients of each step, tied ones once; None if it was not computed."""
    weights: Mapping[str, torch.Tensor]
    """Parameters and buffers after the last step, by original name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
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
            f"step {self.step + 1}: {what} differs from one process by {self.error:.2e} relative, "
            f"expected at most {self.tolerance:.0e}{note}"
        )


class Result(Protocol):
    """The result of the second half of a step."""

    @property
    def loss(self) -> torch.Tensor:
        """Global mean loss of the step."""

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """2-norm of all gradients before clipping; None if it was not computed."""


class Trainee(Protocol):
    """A training step in two halves, such as `meshwright.composition.Trainable`."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return full parameters and buffers by original name."""

    def forward_backward(self, batch: object, target: object = None) -> None:
        """Run forward and backward on this rank's share of a batch, and reduce the gradients."""

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Return the reduced gradients by original name."""

    def optimizer_step(self) -> Result:
        """Clip the gradients, update the parameters, zero the gradients."""


Batches = Iterable[tuple[object, object]]
"""Pairs of batch and target; the target is None for a loss that takes the output alone."""


def train_reference(
    model: nn.Module,
    batches: Batches,
    *,
    optimizer: OptimizerFactory,
    loss: Callable[..., object],
    accumulate: int = 1,
    clip_norm: float | None = None,
    dtype: torch.dtype | None = torch.float64,
    balance: Callable[[nn.Module], torch.Tensor] | None = None,
) -> ReferenceRun:
    """Train a copy of ``model`` on global ``batches``, one optimizer step each.

    ``accumulate`` splits each batch into that many microbatches. This matters only to modules that
    see the whole batch: for BatchNorm with local statistics on n ranks, it is n times the plan's.
    Model and floating-point inputs are converted to ``dtype``, unless it is None. ``balance``
    returns what is added to the mean loss of each microbatch, after its forward.
    """
    trained = copy.deepcopy(model)
    if dtype is not None:
        trained.to(dtype)
    stepper = as_one(optimizer(trained.parameters()))
    trained.train()
    losses: list[float] = []
    gradients: list[dict[str, torch.Tensor]] = []
    norms: list[float] = []
    for batch, target in batches:
        parts = cut_batch(*_cast((batch, target), dtype), accumulate)
        told = []
        for x, y, _ in parts:
            each = apply_loss(loss, call_module(trained, x), y)
            added = 0.0 if balance is None else balance(trained) * each.count
            told.append((each.total + added, each.count))
        mean = torch.stack([total for total, _ in told]).sum() / sum(count for _, count in told)
        mean.backward()
        losses.append(mean.item())
        own = ((name, parameter.grad) for name, parameter in trained.named_parameters())
        gradients.append({name: grad.detach().clone() for name, grad in own if grad is not None})
        norms.append(_norm(gradients[-1].values()))
        if clip_norm is not None:
            clip_grad_norm_(trained, clip_norm)
        stepper.step()
        stepper.zero_grad(set_to_none=True)
    return ReferenceRun(
        losses=tuple(losses),
        gradients=tuple(gradients),
        norms=tuple(norms),
        weights={n: whole(tensor.detach()).clone() for n, tensor in trained.state_dict().items()},
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
) -> RunDifference | None:
    """Find the first loss, gradient, norm or weight whose relative error exceeds ``tolerance``.

    Compared in order: for each step the loss, the gradients and the norm of all of them; at the
    end the weights. A relative error is the largest difference over the largest value of the
    tensor (or over a millionth of the largest among the step's gradients, or all weights, if more).
    """
    found = _differences(parallel, reference, tolerance)
    return next((each for each in found if not each.error <= tolerance), None)


def _differences(
    parallel: ReferenceRun, reference: ReferenceRun, tolerance: float
) -> Iterator[RunDifference]:
    steps = len(reference.losses)
    number = partial(RunDifference, name="", tolerance=tolerance)
    if len(parallel.losses) != steps:
        note = f"{len(parallel.losses)} steps against {steps}"
        yield number(kind="loss", step=0, error=math.inf, note=note)
    both = (parallel, reference)
    for step in range(steps):
        loss, expected = (run.losses[step] for run in both)
        yield number(kind="loss", step=step, error=_number_error(loss, expected))
        make = partial(RunDifference, kind="gradient", step=step, tolerance=tolerance)
        yield from _tensor_differences(make, *(run.gradients[step] for run in both))
        norm, expected = (run.norms[step] for run in both)
        if norm is not None and expected is not None:
            yield number(kind="norm", step=step, error=_number_error(norm, expected))
    make = partial(RunDifference, kind="weight", step=max(steps - 1, 0), tolerance=tolerance)
    yield from _tensor_differences(make, parallel.weights, reference.weights)


def _tensor_differences(
    make: Callable[..., RunDifference],
    found: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
) -> Iterator[RunDifference]:
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
        yield make(name=name, error=error, note=note)


def _number_error(found: float, wanted: float) -> float:
    pair = torch.tensor((found, wanted), dtype=torch.float64, device="cpu")
    return _relative(pair[0], pair[1], 0.0)


def _relative(found: torch.Tensor, wanted: torch.Tensor, floor: float) -> float:
    """Largest difference over largest value; infinite where only one of the two has NaN."""
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    a, b = found.detach().cpu().to(wide), wanted.detach().cpu().to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    error = (a - b).abs().masked_fill(same, 0.0)
    if not error.numel():
        return 0.0
    largest = error.max().item() if not bool(error.isnan().any()) else math.inf
    return 0.0 if largest == 0.0 else largest / max(_largest(b), floor, 1e-300)


def _largest(tensor: torch.Tensor) -> float:
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def _cast(pair: tuple[object, object], dtype: torch.dtype | None) -> tuple[object, object]:
    def convert(leaf: object) -> object:
        is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_float else leaf

    return pair if dtype is None else tree_map(convert, pair)


def _norm(gradients: Iterable[torch.Tensor]) -> float:
    """Compute the norm of all gradients; shares no code with the norm over ranks that it checks."""
    norms = [gradient.norm().double() for gradient in gradients]
    return torch.stack(norms).norm().item() if norms else 0.0
