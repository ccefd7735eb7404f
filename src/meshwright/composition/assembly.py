"""`parallelize`: a plain module, a plan and an optimizer's recipe become a `Trainable`.

The order is fixed: check everything, dtype and device, batch norm, recomputation, the data axes,
the optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from meshwright import comm
from meshwright.axes import DATA_AXES
from meshwright.comm import Communicator
from meshwright.comm.dtensor import mesh_communicators, mesh_over
from meshwright.composition.data_layout import DataLayout, ReplicatedLayout, ShardedLayout
from meshwright.composition.pipelined import SCHEDULES, PipelinedTrainable
from meshwright.composition.pipelined_layout import LoneLayout, PipelinedLayout, StageModules
from meshwright.composition.stages import CutModel, chunks_of, cut_model
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
from meshwright.pipelining import PipelineScheduleSingle, PipelineStage, build_stage
from meshwright.plan import Plan, match_names
from meshwright.schedule.builders import build, stage_ranks
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
    if plan.axes.size("pipeline") > 1:
        return _pipelined(model, plan, optimizer, loss, example, axis)
    _place(model, plan, axis)
    if plan.train.batch_norm == "sync":
        synchronise_batch_norm(model, axis)
    _recompute(model, plan)
    if plan.axes.size("shard") > 1:
        _equalise(model, axis)
        layout: DataLayout = _sharded(model, plan, axis, axis)
    else:
        layout = _replicated(model, plan, axis)
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


def _equalise(model: nn.Module, everyone: Communicator) -> None:
    """Make every rank's parameters and buffers those of rank 0."""
    compare_parameters(everyone, list(model.named_parameters()))
    tensors = [*model.parameters(), *model.buffers()]
    broadcast_tensors(everyone, tensors, label="broadcast parameters")


def _sharded(
    model: nn.Module, plan: Plan, everyone: Communicator, data: Communicator
) -> ShardedLayout:
    """Shard a module that is equal on the ranks of ``data``, unit by unit."""
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
    return ShardedLayout(model, units, data, communicators)


def _pipelined(
    model: nn.Module,
    plan: Plan,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None,
    loss: Loss,
    example: tuple[Any, ...] | None,
    everyone: Communicator,
) -> Trainable:
    """Cut a copy of the model into stages, and lay this rank's stages out over the data axes."""
    if example is None:
        raise PlanError(
            "axis pipeline needs to see how the model runs: give parallelize example=(inputs,), "
            "as one small batch has them"
        )
    model = copy.deepcopy(model)
    _place(model, plan, everyone)
    _equalise(model, everyone)
    names = list(model.state_dict())
    numbers = {name: plan.axes.peers(everyone.rank, name) for name in ("pipeline", "replicate")}
    together = plan.axes.peers(everyone.rank, DATA_AXES)
    pipeline = _peers(everyone, numbers["pipeline"], "pipeline")
    data = _peers(everyone, together, "replicate" if together == numbers["replicate"] else "data")
    example = tree_map(partial(_on, everyone.device), example)
    found = cut_model(model, plan.pipeline, pipeline.size, example)
    _check_traced(plan, found)
    count = len(found.modules)
    style = "v" if plan.pipeline.schedule in ("zbv", "dualpipev") else "loop"
    holders = stage_ranks(pipeline.size, count, style)
    mine = [stage for stage, rank in enumerate(holders) if rank == pipeline.rank]
    layouts: list[DataLayout] = []
    stages: list[PipelineStage] = []
    for stage in mine:
        module = found.modules[stage]
        if plan.train.batch_norm == "sync":
            synchronise_batch_norm(module, data)
        _recompute(module, plan)
        layouts.append(_stage_layout(module, plan, everyone, data))
        stages.append(_stage(found, stage, everyone.device, pipeline))
    modules = StageModules([found.modules[stage] for stage in mine])
    copies = _copies(found)
    layout = PipelinedLayout(
        layouts,
        [found.modules[stage] for stage in mine],
        everyone,
        pipeline,
        lambda parameter: id(parameter) not in copies,
    )
    return PipelinedTrainable(
        modules,
        plan,
        layout=layout,
        stages=stages,
        names=names,
        copies={name: tie.names[0][1] for tie in found.ties for _, name in tie.names[1:]},
        optimizer=None if optimizer is None else optimizer(modules.parameters()),
        loss=loss,
    )


def _stage(
    found: CutModel, index: int, device: torch.device, pipeline: Communicator
) -> PipelineStage:
    module, group = found.modules[index], pipeline.group
    if found.info is not None:
        return build_stage(module, index, found.info, device, group)
    count = len(found.modules)
    return PipelineStage(module, index, count, device, group=group, ties=found.ties)


def _stage_layout(
    module: nn.Module, plan: Plan, everyone: Communicator, data: Communicator
) -> DataLayout:
    if plan.axes.size("shard") > 1:
        return _sharded(module, plan, everyone, data)
    if data.size > 1 and any(parameter.requires_grad for parameter in module.parameters()):
        return _replicated(module, plan, data)
    return LoneLayout(module, data)


def _copies(found: CutModel) -> frozenset[int]:
    """The parameters that are copies of those of another stage, and do not count."""
    return frozenset(
        id(parameter)
        for tie in found.ties
        for stage, name in tie.names
        if stage != tie.owner
        for known, parameter in found.modules[stage].named_parameters()
        if known == name
    )


def _check_traced(plan: Plan, found: CutModel) -> None:
    if found.info is None:
        return
    problems = []
    if plan.train.recompute:
        problems.append("train.recompute: its modules are gone from the stages")
    if plan.train.batch_norm == "sync":
        problems.append('train.batch_norm = "sync": a graph has each rank\'s own statistics')
    if problems:
        raise PlanError(
            [
                f"the model is no chain of modules, so stages are traced graphs, without {each}"
                for each in problems
            ]
        )


def _peers(everyone: Communicator, numbers: Sequence[int], axis: str) -> Communicator:
    return comm.peers(everyone, [everyone.ranks[number] for number in numbers], axis)


def _on(device: torch.device, value: object) -> object:
    return value.to(device) if isinstance(value, torch.Tensor) else value


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
    ours = [
        *_axis_problems(plan),
        *_pipeline_problems(plan),
        *_train_problems(model, plan),
        *_precision_problems(plan),
    ]
    if ours:
        problems.extend(plan.origin.error(ours).problems)
    if problems:
        raise PlanError(problems, plan.origin.source)


def _axis_problems(plan: Plan) -> Iterator[Problem]:
    for name in plan.axes.names:
        if name not in (*DATA_AXES, "pipeline") and plan.axes.size(name) > 1:
            yield Problem(
                ("axes", name),
                f"axis {name} = {plan.axes.size(name)} is not available in this version: only "
                "pipeline, replicate and shard may be larger than 1",
            )


def _pipeline_problems(plan: Plan) -> Iterator[Problem]:
    ranks, pipeline = plan.axes.size("pipeline"), plan.pipeline
    if ranks == 1:
        return
    try:
        chunks = chunks_of(pipeline, ranks)
        if issubclass(SCHEDULES[pipeline.schedule], PipelineScheduleSingle) and chunks > 1:
            raise ValueError(f"{pipeline.schedule} has one stage a rank, but split makes {chunks}")
        build(pipeline.schedule, ranks, pipeline.microbatches, chunks)
    except PlanError as error:
        yield Problem(("pipeline", "split"), str(error))
    except ValueError as error:
        yield Problem(("pipeline", "microbatches"), f"[pipeline] {error}")


def _train_problems(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    train = plan.train
    if train.compile:
        yield Problem(
            ("train", "compile"),
            "compile = true is not available in this version: remove it",
        )
    normalised = list(batch_norms(model))
    is_cut = plan.data_size > 1 or plan.pipeline.microbatches > 1
    if normalised and train.batch_norm is None and is_cut:
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
