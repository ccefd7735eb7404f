"""Compares training on several ranks with one process: losses, gradients and weights must agree.

::

    Sample ──> batches ──┬─> train_reference, here           ──> ReferenceRun ─┐
                         └─> layout on each of n ranks, each                   ├─> first difference
                             with its share of the batches   ──> ReferenceRun ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.comm import communicator
from meshwright.comm.dtensors.gather_dtensor import whole
from meshwright.composition import parallelize
from meshwright.errors import ParityError
from meshwright.gradients import apply_loss, call_module, clip_grad_norm_, cut_batch
from meshwright.plan import Plan
from meshwright.reference import ReferenceRun, Trainee, first_difference, record, train_reference
from meshwright.testing.models import Sample
from meshwright.testing.pool import Ranks
from meshwright.testing.pool import ranks as pool_ranks
from meshwright.torch_internals.trees import tree_map, tree_map_only

Batch = tuple[object, object]


class LaidOut(Trainee, Protocol):
    """A training that reads its share of each global batch, such as `Trainable`."""

    @property
    def data_rank(self) -> int:
        """The share that this rank reads."""

    @property
    def data_size(self) -> int:
        """The number of shares of a batch."""


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Make the default optimizer: linear in the gradient, so it does not amplify rounding."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How to train a model, independent of its layout."""

    loss: Callable[..., torch.Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = momentum
    clip_norm: float | None = None
    example: tuple[Any, ...] | Mapping[str, Any] | None = None
    """Inputs of the model, for layouts that run or trace it."""


Layout = Callable[[nn.Module, Training], LaidOut]
"""Lays a model out over the connected ranks."""


def assert_same_training(
    sample: Sample,
    layout: Plan | Layout,
    *,
    world: int,
    steps: int = 3,
    batch_size: int | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = momentum,
    clip_norm: float | None = None,
    reference_parts: int = 1,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-9,
    seed: int = 0,
    ranks: Ranks | None = None,
) -> None:
    """Train ``sample`` on ``world`` ranks as ``layout`` says and in one process, and compare.

    ``layout`` is a `Plan` for `parallelize`, or a function that lays a model out; `wrapped` makes
    one from a data-parallel function such as ``replicate``. Every rank's losses, gradients, their
    norms and weights must equal those of one process to a relative ``tolerance``. ``batch_size``
    (of the global batch; 4 per rank when None) must be divisible by the number of shares.
    If ``layout`` is a plan, its ``clip_norm`` is used. The reference splits each batch into
    ``reference_parts``, which matters to models that depend on the whole batch.

    Raises ParityError naming rank, step and the first tensor that differs; ValueError for a sample
    that cannot be compared.

    >>> assert_same_training(MODELS["tied"], wrapped(replicate), world=2)
    """
    __tracebackhide__ = True
    if sample.depends_on == "random numbers":
        raise ValueError(
            f"{sample.name!r} draws random numbers in its forward pass, different ones on each "
            "rank: it cannot be compared with one process"
        )
    if isinstance(layout, Plan):
        clip_norm = layout.train.clip_norm
        layout = partial(_from_plan, layout)
    training = Training(loss=sample.loss, optimizer=optimizer, clip_norm=clip_norm)
    generator = torch.Generator().manual_seed(seed)
    size = 4 * world if batch_size is None else batch_size
    batches = [sample.example_batch(size, generator) for _ in range(steps)]
    expected = train_reference(
        _built(sample, seed, dtype),
        batches,
        optimizer=optimizer,
        loss=sample.loss,
        accumulate=reference_parts,
        clip_norm=clip_norm,
        dtype=dtype,
    )
    run = pool_ranks if ranks is None else ranks
    found = run(world, _trained, sample, layout, training, batches, seed, dtype)
    for rank, result in enumerate(found):
        difference = first_difference(result, expected, tolerance)
        if difference is not None:
            raise ParityError(f"{sample.name!r} on {world} ranks: rank {rank}, {difference}")


def _built(sample: Sample, seed: int, dtype: torch.dtype) -> nn.Module:
    """Build the model with the same weights on every rank and in the reference."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return sample.build().to(dtype)


def _trained(
    sample: Sample,
    layout: Layout,
    training: Training,
    batches: list[Batch],
    seed: int,
    dtype: torch.dtype,
) -> ReferenceRun:
    inputs = tree_map(partial(_in_dtype, dtype), batches[0][0])
    example: Any = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    laid_out = layout(_built(sample, seed, dtype), replace(training, example=example))
    shares = [_share(batch, laid_out.data_rank, laid_out.data_size) for batch in batches]
    return record(laid_out, shares, dtype=dtype)


def _share(batch: Batch, rank: int, size: int) -> Batch:
    parts = cut_batch(*batch, size)
    if len({count for _, _, count in parts}) > 1:
        raise ValueError(
            f"batch_size must divide by the {size} shares; "
            f"found shares of {[count for _, _, count in parts]}"
        )
    mine, target, _ = parts[rank]
    return mine, target


def _from_plan(plan: Plan, model: nn.Module, training: Training) -> LaidOut:
    return parallelize(
        model, plan, optimizer=training.optimizer, loss=training.loss, example=training.example
    )


def _in_dtype(dtype: torch.dtype, value: object) -> object:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


def wrapped(wrap: Callable[[nn.Module], nn.Module]) -> Layout:
    """Make a layout from a data-parallel function on modules, with a plain training loop.

    ``wrap`` must make gradients the mean over all ranks; it may return the same module or a new one
    that holds the model as ``module``.
    """
    return partial(_Wrapped, wrap)


class _Wrapped:
    """A plain training loop around a wrapped module."""

    def __init__(
        self, wrap: Callable[[nn.Module], nn.Module], model: nn.Module, training: Training
    ) -> None:
        self._module = model
        self._wrapped = wrap(model)
        self._training = training
        self._optimizer = training.optimizer(self._wrapped.parameters())
        self._world = communicator()
        self.data_rank, self.data_size = self._world.rank, self._world.size
        self._loss = torch.zeros((), dtype=torch.float64, device="cpu")

    def forward_backward(self, batch: object, target: object = None) -> None:
        loss = apply_loss(self._training.loss, call_module(self._wrapped, batch), target)
        if not loss.is_mean:
            raise ValueError("this loop averages gradients, so the loss must return a mean")
        loss.total.backward()
        self._loss = loss.total.detach().to(torch.float64).clone()

    def gradients(self) -> Mapping[str, torch.Tensor]:
        return {
            name: whole(parameter.grad)
            for name, parameter in self._module.named_parameters()
            if parameter.grad is not None
        }

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {name: whole(value) for name, value in self._module.state_dict().items()}

    def optimizer_step(self) -> _Step:
        norm: torch.Tensor | None = None
        if self._training.clip_norm is not None:
            norm = clip_grad_norm_(self._module, self._training.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._world.all_reduce(self._loss, label="loss for the comparison").wait()
        return _Step(loss=self._loss / self._world.size, grad_norm=norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The result of a step of `_Wrapped`."""

    loss: torch.Tensor
    grad_norm: torch.Tensor | None


def masked_microbatches(batch: Any, microbatches: int) -> list[Any]:  # noqa: ANN401
    """Make microbatches with the shapes of the whole ``batch``, a tensor or nested tensors.

    For bitwise comparisons: kernels may sum in another order for fewer rows, so a model's output
    for a slice of a batch may differ in the last bits from the slice of its output. Microbatch k
    has the rows (along dim 0) that `torch.tensor_split` gives it, and zeros elsewhere: a model that
    works row by row then computes the bits of one process.
    Pass them to a schedule that splits nothing itself (``step_microbatches``), and its stage's
    ``output_chunks`` to `unmasked`.
    """

    def masked(tensor: torch.Tensor, microbatch: int) -> torch.Tensor:
        found = torch.zeros_like(tensor)
        own = torch.tensor_split(found, microbatches)[microbatch]
        own.copy_(torch.tensor_split(tensor, microbatches)[microbatch])
        return found

    return [
        tree_map_only(torch.Tensor, partial(masked, microbatch=k), batch)
        for k in range(microbatches)
    ]


def unmasked(outputs: Sequence[Any]) -> Any:  # noqa: ANN401
    """Join the outputs of all microbatches: from each, its own rows.

    Raises ``ValueError`` for tensors without rows, or whose shapes differ between microbatches.
    """

    def joined(*tensors: Any) -> Any:  # noqa: ANN401
        if not isinstance(tensors[0], torch.Tensor):
            return tensors[0]
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if len(shapes) > 1 or not tensors[0].dim():
            raise ValueError(
                f"expected outputs with the rows of the whole batch in every microbatch, found "
                f"shapes {sorted(shapes)}"
            )
        parts = [torch.tensor_split(tensor, len(tensors)) for tensor in tensors]
        return torch.cat([rows[microbatch] for microbatch, rows in enumerate(parts)])

    return tree_map(joined, outputs[0], *outputs[1:])
