"""`parallelize`: turns a plain module, a plan and an optimizer factory into a `Trainable`.

The order is fixed: checks, dtype and device, dropout, layers over tensor ranks (after a pipeline
has split the model into stages), batch norm, recomputation, the data axes, the optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from meshwright import comm
from meshwright.composition.checks import check_model
from meshwright.composition.data_layout import DataLayout, LayoutCommunicators
from meshwright.composition.example_run import Inputs
from meshwright.composition.given_parameters import GivenParameters
from meshwright.composition.laying_out import (
    apply_dropout,
    compiled,
    cut_over_tensor,
    equalize,
    is_drawn_in_parts,
    is_on_meta,
    moved_to,
    place,
    recompute_modules,
    replicate_module,
    shard_module,
)
from meshwright.composition.pipelines.loss_sources import check_own_parameters
from meshwright.composition.pipelines.pipeline_assembly import pipelined
from meshwright.composition.tensor_axis.tensor_check import WholeRun
from meshwright.composition.tensor_axis.tensor_rules import ModelCut
from meshwright.composition.trainable import Loss, Trainable, autocast_of
from meshwright.data_parallel import synchronize_batch_norm
from meshwright.errors import PlanError
from meshwright.plan import Plan
from meshwright.torch_internals.modules import require_module


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None,
    loss: Loss,
    example: object = None,
    group: Any = None,  # noqa: ANN401 - c10d's type stays in comm
) -> Trainable:
    """Lay ``model`` out as ``plan`` says, and return its `Trainable`.

    Every rank must call this with an equal model and plan; parameters and buffers become those of
    rank 0. A ``model`` on the meta device gets the values of ``[train] seed``, the same on every
    layout. ``optimizer`` is called with this rank's parameters. ``loss(output, target)`` returns a
    mean, or ``(sum, count)``; either way the gradient is that of the mean over the global batch.
    ``example`` is a small batch of inputs, as for `Trainable.step`; axes pipeline and tensor run
    the model on it. ``group`` is a process group, None for all ranks; a process without one
    connects first.

    ``model`` is changed in place. With axis pipeline it keeps the parameters of this rank's stages,
    which share them; the memory of all others is freed, and reading them, or calling ``model``
    itself, raises an error that names them.

    Raises PlanError with every contradiction between plan, model and ranks.

    >>> trainable = parallelize(
    ...     model,
    ...     Plan.from_file("plan.toml"),
    ...     optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    ...     loss=torch.nn.functional.mse_loss,
    ... )
    >>> trainable.step(inputs, targets).loss
    """
    everyone = comm.connect() if group is None else comm.communicator(group, "replicate")
    require_module(model, "parallelize")
    if isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected optimizer to be a function of this rank's parameters, found an optimizer "
            f"({type(optimizer).__name__}): give parallelize "
            f"optimizer=lambda parameters: {type(optimizer).__name__}(parameters, ...)"
        )
    inputs = _inputs(example)
    check_model(model, plan, everyone.size, None if example is None else inputs)
    _require_example(plan, example)
    is_empty = is_on_meta(model)
    check_own_parameters(loss, model)
    peers = LayoutCommunicators.of(plan, everyone)
    given = GivenParameters(model)
    if plan.axes.size("pipeline") > 1:
        return pipelined(model, plan, optimizer, loss, inputs, peers, given)
    if not (is_empty and is_drawn_in_parts(plan)):
        place(model, plan, everyone)
        given.carry(model)
    draws = apply_dropout(model, plan)
    whole: WholeRun | None = None
    if plan.axes.size("tensor") > 1:
        equalize(model, everyone)
        whole = WholeRun(model, moved_to(inputs, everyone), peers.tensor, draws)
        cut_over_tensor(model, ModelCut.of(model, plan), peers)
        whole.compare(model)
    if plan.train.batch_norm == "sync":
        synchronize_batch_norm(model, peers.data)
    recompute_modules(model, plan)
    traffic = None if whole is None else whole.traffic(model, autocast_of(plan, everyone.device))
    if plan.axes.size("shard") > 1:
        if plan.axes.size("tensor") == 1 and not is_on_meta(model):
            equalize(model, everyone)
        layout: DataLayout = shard_module(model, plan, peers)
    else:
        layout = replicate_module(model, plan, peers)
    given.carry(model)
    return Trainable(
        compiled(model, plan),
        plan,
        peers=peers,
        layout=layout,
        optimizer=given.optimizer(optimizer, model, plan, contextlib.nullcontext()),
        loss=loss,
        draws=draws,
        traffic=traffic,
    )


def _require_example(plan: Plan, example: object) -> None:
    """Raise PlanError if an axis of ``plan`` needs an ``example`` and there is none."""
    for axis, why in (
        ("pipeline", "needs to see how the model runs"),
        ("tensor", "is checked against the whole model"),
    ):
        if plan.axes.size(axis) > 1 and example is None:
            raise PlanError(
                f"axis {axis} {why}: give parallelize example=(inputs,), as one small batch has "
                "them"
            )


def _inputs(example: object) -> Inputs:
    """Return the model's arguments in ``example``, interpreted as `call_module` does a batch."""
    if isinstance(example, Mapping):
        return cast("Inputs", example)
    if isinstance(example, Sequence) and not isinstance(example, str):
        return tuple(example)
    return () if example is None else (example,)
