"""`parallelize`: a plain module, a plan and an optimizer's recipe become a `Trainable`.

The order is fixed: check everything, dtype and device, batch norm, recomputation, the data axes,
the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from meshwright import comm
from meshwright.axes import DATA_AXES
from meshwright.comm import Communicator
from meshwright.comm.dtensor import mesh_communicators, mesh_over
from meshwright.composition.data_layout import ReplicatedLayout, ShardedLayout
from meshwright.composition.trainable import Loss, Trainable
from meshwright.data_parallel import (
    ReductionSettings,
    ReplicateOptions,
    batch_norms,
    replicate,
    synchronise_batch_norm,
)
from meshwright.data_parallel.driver import driver_of
from meshwright.data_parallel.policies import MixedPrecisionPolicy
from meshwright.data_parallel.sharded import fully_shard
from meshwright.data_parallel.starting_state import broadcast_tensors, compare_parameters
from meshwright.errors import PlanError
from meshwright.plan import Plan, match_names
from meshwright.settings import Problem

__all__ = ["check_model", "parallelize"]

AUTOCAST = ("bfloat16", "float16")
"""The dtypes that torch can compute in while parameters have another."""


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None,
    loss: Loss,
    example: tuple[Any, ...] | None = None,
    group: Any = None,  # noqa: ANN401 - c10d's type stays in comm
) -> Trainable:
    """Lay ``model`` out as ``plan`` says, and return what trains it.

    Every rank calls it with an equal model and plan; parameters and buffers become those of rank 0.
    ``optimizer`` is called with this rank's parameters. ``loss(output, target)`` returns a mean, or
    ``(sum, count)``; either way the gradient is that of the mean over the global batch. ``example``
    inputs are for layouts that trace the model. ``group`` is a process group, all ranks when None;
    a process that has joined none connects first.

    Raises PlanError with every contradiction between plan, model and ranks.

    >>> trainable = parallelize(
    ...     model,
    ...     Plan.from_file("plan.toml"),
    ...     optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    ...     loss=torch.nn.functional.mse_loss,
    ... )
    >>> trainable.step(inputs, targets).loss
    """
    axis = comm.connect() if group is None else comm.communicator(group, "replicate")
    check_model(model, plan, axis.size)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise PlanError("the model is on the meta device: build it on a device")
    _place(model, plan, axis)
    if plan.train.batch_norm == "sync":
        synchronise_batch_norm(model, axis)
    _recompute(model, plan)
    layout = (
        _sharded(model, plan, axis)
        if plan.axes.size("shard") > 1
        else _replicated(model, plan, axis)
    )
    return Trainable(
        model,
        plan,
        layout=layout,
        optimizer=None if optimizer is None else optimizer(model.parameters()),
        loss=loss,
    )


def _replicated(model: nn.Module, plan: Plan, axis: Communicator) -> ReplicatedLayout:
    options = ReplicateOptions(
        process_group=axis.group,
        axis="replicate",
        # The Trainable broadcasts them once a step, so that `eval` needs no other rank.
        broadcast_buffers=False,
        reduction=_reduction(plan),
    )
    replicate.apply(model, options)
    return ReplicatedLayout(replicate.state(model).replica)


def _sharded(model: nn.Module, plan: Plan, everyone: Communicator) -> ShardedLayout:
    """Make every rank's parameters those of rank 0, then shard them unit by unit."""
    compare_parameters(everyone, list(model.named_parameters()))
    tensors = [*model.parameters(), *model.buffers()]
    broadcast_tensors(everyone, tensors, label="broadcast parameters")
    # What is cut last lies innermost, whatever the order of the ranks.
    names = [name for name in ("replicate", "shard") if plan.axes.size(name) > 1]
    mesh = mesh_over(everyone, plan.axes, names)
    reduce = plan.precision.reduce
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            reduce_dtype=None if reduce is None else getattr(torch, reduce)
        ),
    }
    after = plan.shard.reshard_after_forward
    for name in _unit_names(model, plan):
        if name:
            fully_shard(model.get_submodule(name), reshard_after_forward=after, **options)
    fully_shard(model, reshard_after_forward=None if after else False, **options)
    units = [
        unit
        for part in model.modules()
        if (driver := driver_of(part)) is not None and (unit := driver.unit) is not None
    ]
    communicators = dict(zip(names, mesh_communicators(mesh), strict=True))
    return ShardedLayout(model, units, everyone, communicators)


def _unit_names(model: nn.Module, plan: Plan) -> list[str]:
    """The modules that are one unit each, inner ones first; the root takes what is left."""
    names = [name for name, _ in model.named_modules()]
    if isinstance(plan.shard.units, str):
        found = _blocks(model)
    else:
        found = [name for pattern in plan.shard.units for name in match_names(pattern, names)]
    return sorted(dict.fromkeys(found), key=lambda name: -name.count("."))


def _blocks(model: nn.Module) -> list[str]:
    """The modules in lists of modules of one class: the layers of a transformer."""
    return [
        f"{name}.{number}" if name else number
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential)
        and len(part) > 1
        and len({type(child) for child in part}) == 1
        for number, child in part.named_children()
        if any(True for _ in child.parameters())
    ]


def _reduction(plan: Plan) -> ReductionSettings:
    cap_bytes = int(plan.buckets.cap_mb * 2**20)
    reduce = plan.precision.reduce
    return ReductionSettings(
        first_bytes=min(2**20, cap_bytes),
        cap_bytes=cap_bytes,
        is_gradient_view=True,
        reduce_dtype=None if reduce is None else getattr(torch, reduce),
        is_watched=True,
    )


# ------------------------------------------------------------------------------------ checks


def check_model(model: nn.Module, plan: Plan, ranks: int) -> None:
    """Raise one PlanError with all that ``plan``, ``model`` and the number of ranks contradict.

    It needs no rank and no data: the model may be on the meta device.
    """
    problems: list[str] = []
    names = [name for name, _ in model.named_modules()]
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    try:
        plan.check(ranks, shapes, modules=names)
    except PlanError as error:
        problems.extend(error.problems)
    ours = [*_axis_problems(plan), *_train_problems(model, plan), *_precision_problems(plan)]
    if ours:
        problems.extend(plan.origin.error(ours).problems)
    if problems:
        raise PlanError(problems, plan.origin.source)


def _axis_problems(plan: Plan) -> Iterator[Problem]:
    for name in plan.axes.names:
        if name not in DATA_AXES and plan.axes.size(name) > 1:
            yield Problem(
                ("axes", name),
                f"axis {name} = {plan.axes.size(name)} is not available in this version: only "
                "replicate and shard may be larger than 1",
            )


def _train_problems(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    train = plan.train
    if train.compile:
        yield Problem(
            ("train", "compile"),
            "compile = true is not available in this version: remove it",
        )
    normalised = list(batch_norms(model))
    if normalised and train.batch_norm is None and plan.data_size > 1:
        yield Problem(
            ("train", "batch_norm"),
            f"the model has BatchNorm ({normalised[0]!r}): say in [train] whether its statistics "
            'are those of each rank\'s share, batch_norm = "local", or of all ranks, "sync"',
        )
    if not normalised and train.batch_norm is not None:
        yield Problem(
            ("train", "batch_norm"),
            f"batch_norm = {train.batch_norm!r} has no effect: the model has no BatchNorm",
        )
    again = [name for name in _recomputed(model, plan) if batch_norms(model.get_submodule(name))]
    if again:
        yield Problem(
            ("train", "recompute"),
            f"recompute matches {again[0]!r}, which has BatchNorm: its running statistics would "
            "move twice a step; leave it out",
        )


def _precision_problems(plan: Plan) -> Iterator[Problem]:
    precision = plan.precision
    if precision.is_mixed and precision.compute not in AUTOCAST:
        yield Problem(
            ("precision", "compute"),
            f"compute = {precision.compute!r} differs from parameters = "
            f"{precision.parameters!r}: only {' and '.join(AUTOCAST)} can differ",
        )
    if precision.optimizer not in (None, precision.parameters):
        yield Problem(
            ("precision", "optimizer"),
            f"optimizer = {precision.optimizer!r} needs a second copy of the parameters, which is "
            "not available in this version: remove it",
        )


# ----------------------------------------------------------------------------------- actions


def _place(model: nn.Module, plan: Plan, axis: Communicator) -> None:
    """Move the model to this rank's device, and to the plan's dtype unless that was left out."""
    model.to(axis.device)
    if plan.precision.parameters != Plan().precision.parameters:
        model.to(getattr(torch, plan.precision.parameters))


def _recomputed(model: nn.Module, plan: Plan) -> list[str]:
    """Names of the modules whose activations are computed again, each once."""
    names = [name for name, _ in model.named_modules()]
    matches = [match_names(pattern, names) for pattern in plan.train.recompute]
    return list(dict.fromkeys(name for found in matches for name in found))


def _recompute(model: nn.Module, plan: Plan) -> None:
    """Compute the activations of the matching modules again in the backward pass."""
    for name in _recomputed(model, plan):
        module = model.get_submodule(name)
        # An attribute of the instance: names, state dict and class stay as they are.
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
