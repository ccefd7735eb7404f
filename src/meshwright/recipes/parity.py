"""Checks that a layout trains the same model as one process: the same steps twice, in float64.

::

    all ranks   the layout in float64, step by step; keep   then wait, a barrier for each step of
    rank 0      losses, gradients and weights               one process in float64, and compares
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from meshwright.comm import Communicator, phase
from meshwright.composition import parallelize
from meshwright.composition.example_run import evaluating
from meshwright.errors import ParityError
from meshwright.expert_parallel import auxiliary_loss, z_loss
from meshwright.expert_parallel.routing import record_routers
from meshwright.gradients import call_module
from meshwright.gradients.optimizer_list import OptimizerFactory, as_one
from meshwright.plan import ExpertPlan
from meshwright.precision import Precision
from meshwright.recipes.language_model import learning_rate, set_learning_rate
from meshwright.recipes.task import Built, Task, to_device
from meshwright.reference import ReferenceRun, first_difference, record, train_reference
from meshwright.sampling import Sampler
from meshwright.torch_internals.tensors import TorchDispatchMode

TOLERANCE = 1e-9
"""Largest relative difference between the layout and one process, both in float64."""
CASTING_TOLERANCE = 1e-6
"""The same where the model itself casts to float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """The result of the comparison; equal on all ranks."""

    layout: str
    error: float
    """Largest relative difference of all losses, gradients, their norms and weights."""
    place: str
    """Where that difference is."""
    losses: tuple[float, ...]
    """Losses of one process in float64."""
    tolerance: float = TOLERANCE
    casts: bool = False
    """True when the model casts to float32."""

    @property
    def finding(self) -> str:
        """One line about the comparison, without the real run."""
        return (
            f"parity: {self.layout} equals one process over {_steps(len(self.losses))} in float64: "
            f"losses, gradients and weights agree to {self.error:.1e} relative "
            f"(limit {self.tolerance:.0e}{', since the model casts to float32' * self.casts}"
            f"{self.place})"
        )

    def line(self, losses: Sequence[float]) -> str:
        """Format one line; ``losses`` are those of the real run from its first step."""
        count = min(len(losses), len(self.losses))
        pairs = list(zip(losses, self.losses, strict=False))
        worst = max((abs(ours - theirs) / abs(theirs) for ours, theirs in pairs), default=0.0)
        real = (
            f"losses of the real run's first {_steps(count)} differ from them by {worst:.1e}"
            if count
            else "the real run did not begin at step 1, so its losses are not compared"
        )
        return f"{self.finding}; {real}"


def check_parity(task: Task, communicator: Communicator) -> Parity:
    """Train the configured layout and one process in float64 on the run's first batches.

    Both run without dropout, whose masks depend on how a batch is split over ranks. All ranks call
    it together. Raises ``ParityError``, on all ranks, naming the first tensor that differs.
    """
    config = task.config
    steps = min(config.run.parity_steps, config.run.steps)
    plan = replace(
        config.plan,
        precision=Precision(parameters="float64"),
        train=replace(config.plan.train, dropout="local", per_rank=()),
    )
    built = task.build(drops=False)
    # A factory may build its model on a device.
    device = next((p.device for p in built.model.parameters()), torch.device("cpu"))
    example = to_device(task.example(built.model), device, torch.float64)
    casts = _casts(built.model.double(), example)
    trainable = parallelize(
        built.model,
        plan,
        optimizer=_optimizer(task),
        loss=built.loss,
        example=example,
    )
    sampler = trainable.sampler(len(task.data.training), config.data.batch_size)
    batches = _batches(task, built, sampler, steps, communicator)
    usual = CASTING_TOLERANCE if casts else TOLERANCE
    tolerance = config.run.parity_tolerance or usual
    # Every rank records: gathering a sharded layout's gradients and weights needs all of them.
    parallel = record(trainable, batches)
    if communicator.rank:
        for step in range(steps):
            communicator.barrier(label=f"parity: one process, step {step}").wait()
        found = None
    else:
        with phase("parity: one process", limit=math.inf):  # the other ranks wait without a limit
            found = _compare(parallel, task, communicator, tolerance)
    verdicts = communicator.gather_values(found, label="parity: verdict")
    problem, error, place, losses = verdicts[0]
    if problem:
        raise ParityError(problem)
    layout = ", ".join(f"{name}={size}" for name, size in config.plan.axes.mapping().items())
    return Parity(
        layout=layout or "one rank",
        error=error,
        place=place,
        losses=tuple(losses),
        tolerance=tolerance,
        casts=casts and config.run.parity_tolerance is None,
    )


def _compare(
    parallel: ReferenceRun,
    task: Task,
    communicator: Communicator,
    tolerance: float,
) -> tuple[str, float, str, tuple[float, ...]]:
    """Return, on rank 0, the problem (or ""), the largest error, where it is, and the losses."""
    config, plan, built = task.config, task.config.plan, task.build(drops=False)
    sampler = Sampler(len(task.data.training), config.data.batch_size, plan.train.seed)
    batches = _batches(task, built, sampler, len(parallel.losses), communicator)
    threads = torch.get_num_threads()
    # The other ranks wait: their cores are free.
    torch.set_num_threads(min(len(os.sched_getaffinity(0)), threads * communicator.size))
    try:
        reference = train_reference(
            built.model.to(communicator.device),
            _with_barriers(batches, communicator),
            optimizer=_optimizer(task),
            loss=built.loss,
            clip_norm=plan.train.clip_norm,
            balance=_balance(built.model, plan.expert),
        )
    finally:
        torch.set_num_threads(threads)
    found = first_difference(parallel, reference, tolerance)
    if found is not None:
        return str(found), found.error, "", reference.losses
    error, place = _largest(parallel, reference)
    return "", error, place, reference.losses


def _balance(model: nn.Module, expert: ExpertPlan) -> Callable[[nn.Module], Tensor] | None:
    """Return what adds to a loss of one process that which keeps experts evenly used."""
    if not expert.auxiliary and not expert.z_loss:
        return None
    record_routers(model)

    def terms(trained: nn.Module) -> Tensor:
        # A coefficient of 0 needs no formula, which some models do not have.
        kinds = ((auxiliary_loss, expert.auxiliary), (z_loss, expert.z_loss))
        return torch.stack([make(trained, factor) for make, factor in kinds if factor]).sum()

    return terms


def _largest(parallel: ReferenceRun, reference: ReferenceRun) -> tuple[float, str]:
    """Find the largest difference and where it is, by repeated searches for a larger one."""
    error, place = 0.0, ""
    while (found := first_difference(parallel, reference, error)) is not None:
        what = found.kind if not found.name else f"{found.kind} of {found.name}"
        error, place = found.error, f"; the largest is the {what} at step {found.step + 1}"
    return error, place


class _CastWatch(TorchDispatchMode):
    """Dispatch mode: notes whether an operator turns float64 into float32."""

    found = False

    def __torch_dispatch__(  # noqa: PLW3201, RUF100
        self,
        func: Any,  # noqa: ANN401 - an operator
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what the operator returns
        made = func(*args, **(kwargs or {}))
        narrow = isinstance(made, Tensor) and made.dtype == torch.float32
        self.found |= narrow and any(
            isinstance(given, Tensor) and given.dtype == torch.float64 for given in args
        )
        return made


@torch.no_grad()
def _casts(model: nn.Module, example: object) -> bool:
    """Check whether ``model``, which is in float64, computes a part of its forward in float32."""
    with evaluating(model), _CastWatch() as watch:
        call_module(model, example)
    return watch.found


def _optimizer(task: Task) -> OptimizerFactory:
    """Make the run's optimizer, which sets its own learning rate before each step."""
    config = task.config

    def build(parameters: Iterable[Parameter]) -> Optimizer:
        optimizer = as_one(task.optimizer(parameters))
        steps = iter(range(1, config.run.steps + 1))

        def set_rate(*_: object) -> None:
            rate = learning_rate(config.optimizer, next(steps), config.run.steps)
            set_learning_rate(optimizer, rate)

        optimizer.register_step_pre_hook(set_rate)
        return optimizer

    return build


def _batches(
    task: Task, built: Built, sampler: Sampler, steps: int, communicator: Communicator
) -> Iterator[tuple[object, object]]:
    for _ in range(steps):
        batch = built.read(task.data.training.batch(sampler.next_indices()))
        yield to_device(batch, communicator.device, torch.float64)


def _with_barriers(
    batches: Iterator[tuple[object, object]], communicator: Communicator
) -> Iterator[tuple[object, object]]:
    """Yield each batch, and after its step meet the waiting ranks in a barrier."""
    for step, batch in enumerate(batches):
        yield batch
        communicator.barrier(label=f"parity: one process, step {step}").wait()


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
