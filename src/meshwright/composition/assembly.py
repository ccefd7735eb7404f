"""`parallelize`: a plain module, a plan and an optimizer's recipe become a `Trainable`.

The order is fixed: check everything, dtype and device, dropout, layers over tensor ranks (after a
pipeline has cut the model into stages), batch norm, recomputation, the data axes, the optimizer.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from meshwright import comm
from meshwright.comm import Communicator
from meshwright.comm.dtensor import mesh_communicators
from meshwright.comm.whole import held_boxes
from meshwright.composition.checks import check_model, recomputed
from meshwright.composition.compiling import compiled
from meshwright.composition.data_layout import DataLayout, ReplicatedLayout, ShardedLayout
from meshwright.composition.peers import Peers
from meshwright.composition.pipelined import PipelinedTrainable
from meshwright.composition.pipelined_layout import LoneLayout, PipelinedLayout, StageModules
from meshwright.composition.stages import CutModel, Inputs, cut_model
from meshwright.composition.starting_values import draw, is_drawn_in_parts, is_on_meta
from meshwright.composition.tensor_check import WholeRun
from meshwright.composition.tensor_rules import STYLES, ModelCut
from meshwright.composition.tensor_traffic import TensorTraffic
from meshwright.composition.trainable import Loss, Trainable, autocast_of
from meshwright.data_parallel import (
    ReductionSettings,
    ReplicateOptions,
    flat_groups,
    replicate,
    synchronise_batch_norm,
)
from meshwright.data_parallel.driver import driver_of
from meshwright.data_parallel.policies import MixedPrecisionPolicy
from meshwright.data_parallel.sharded import fully_shard
from meshwright.data_parallel.starting_state import broadcast_tensors, compare_parameters
from meshwright.errors import InternalError, PlanError
from meshwright.gradients import check_optimizer
from meshwright.pipelining import PipelineStage, build_stage
from meshwright.plan import Plan, match_names
from meshwright.randomness import DimPart, Draws, Dropout, replace_dropout
from meshwright.schedule.builders import stage_ranks
from meshwright.tensor_parallel.apply import apply_plan

__all__ = ["check_model", "parallelize"]


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None,
    loss: Loss,
    example: Inputs | None = None,
    group: Any = None,  # noqa: ANN401 - c10d's type stays in comm
) -> Trainable:
    """Lay ``model`` out as ``plan`` says, and return what trains it.

    Every rank calls it with an equal model and plan; parameters and buffers become those of rank 0.
    A ``model`` on the meta device gets the values of ``[train] seed``, the same on every layout.
    ``optimizer`` is called with this rank's parameters. ``loss(output, target)`` returns a mean, or
    ``(sum, count)``; either way the gradient is that of the mean over the global batch. ``example``
    inputs, a tuple or a mapping of keyword arguments, are for axes pipeline and tensor, which look
    at how the model runs. ``group`` is a process group, all ranks when None; a process that has
    joined none connects first. A pipeline leaves ``model`` as it is; any other layout changes it in
    place.

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
    check_model(model, plan, everyone.size)
    is_empty = is_on_meta(model)
    _check_example(plan, example)
    peers = Peers.of(plan, everyone)
    if plan.axes.size("pipeline") > 1:
        return _pipelined(model, plan, optimizer, loss, example or (), peers)
    if not (is_empty and is_drawn_in_parts(plan)):
        _place(model, plan, everyone)
    draws = _drawn(model, plan)
    whole: WholeRun | None = None
    if plan.axes.size("tensor") > 1:
        _equalise(model, everyone)
        whole = WholeRun(model, _moved(example or (), everyone), peers.tensor, draws)
        _cut(model, ModelCut.of(model, plan), peers)
        whole.compare(model)
    if plan.train.batch_norm == "sync":
        synchronise_batch_norm(model, peers.data)
    _recompute(model, plan)
    traffic = None if whole is None else whole.traffic(model, autocast_of(plan, everyone.device))
    if plan.axes.size("shard") > 1:
        if plan.axes.size("tensor") == 1 and not is_on_meta(model):
            _equalise(model, everyone)
        layout: DataLayout = _sharded(model, plan, peers)
    else:
        layout = _replicated(model, plan, peers)
    return Trainable(
        compiled(model, plan),
        plan,
        peers=peers,
        layout=layout,
        optimizer=_optimizer(optimizer, model, plan),
        loss=loss,
        draws=draws,
        traffic=traffic,
    )


def _optimizer(
    build: Callable[[Iterable[nn.Parameter]], Optimizer] | None, module: nn.Module, plan: Plan
) -> Optimizer | None:
    """What ``build`` makes of this rank's parameters; TypeError where it may not have them."""
    if build is None:
        return None
    made = build(flat_groups(module) if plan.train.flat else module.parameters())
    check_optimizer(made, has_closure=False)
    return made


def _drawn(model: nn.Module, plan: Plan) -> Draws | None:
    """Let dropout draw the masks of one process, if the plan says so."""
    if plan.train.dropout == "local":
        return None
    draws = Draws(plan.train.seed)
    try:
        replace_dropout(model, draws, per_rank=plan.train.per_rank)
    except ValueError as error:
        raise PlanError(f'[train] dropout = "global": {error}') from error
    return draws


def _check_example(plan: Plan, example: Inputs | None) -> None:
    for axis, why in (
        ("pipeline", "needs to see how the model runs"),
        ("tensor", "is checked against the whole model"),
    ):
        if plan.axes.size(axis) > 1 and example is None:
            raise PlanError(
                f"axis {axis} {why}: give parallelize example=(inputs,), as one small batch has "
                "them"
            )


def _cut(module: nn.Module, cut: ModelCut, peers: Peers) -> None:
    """Cut modules of a model, or of a stage of it, over the ranks of axis tensor, in place."""
    mesh = peers.mesh_of("tensor")
    here = {name for name, _ in module.named_modules()}
    styles = {name: STYLES[style]() for name, style in cut.styles.items() if name in here}
    if mesh is None or not styles:
        return
    cut.set_widths(module)
    try:
        # All ranks have equal parameters by now, so each keeps its part of its own.
        apply_plan(module, mesh, styles, src_data_rank=None)
    except ValueError as error:
        raise PlanError(f"[tensor] rules: {error}") from error
    axis = peers.tensor
    for name in styles:
        part = module.get_submodule(name)
        if isinstance(part, Dropout):
            # Between layers that are cut it is given a part of the features.
            part.parts = (DimPart(dim=-1, index=axis.rank, parts=axis.size),)


def _replicated(model: nn.Module, plan: Plan, peers: Peers) -> ReplicatedLayout:
    options = ReplicateOptions(
        process_group=peers.data.group,
        axis="replicate",
        # The Trainable broadcasts them once a step, so that `eval` needs no other rank.
        broadcast_buffers=False,
        reduction=_reduction(plan),
    )
    replicate.apply(model, options)
    is_cut = plan.axes.size("tensor") > 1
    return ReplicatedLayout(replicate.state(model).replica, model, is_cut=is_cut)


def _equalise(model: nn.Module, everyone: Communicator) -> None:
    """Make every rank's parameters and buffers those of rank 0."""
    compare_parameters(everyone, list(model.named_parameters()))
    tensors = [*model.parameters(), *model.buffers()]
    broadcast_tensors(everyone, tensors, label="broadcast parameters")


def _sharded(model: nn.Module, plan: Plan, peers: Peers) -> ShardedLayout:
    """Shard a module that is equal on the ranks that hold it, unit by unit."""
    mesh = peers.mesh_of("replicate", "shard")
    if mesh is None:
        raise InternalError("a plan with axis shard has no mesh of it")
    reduce = plan.precision.reduce
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            reduce_dtype=None if reduce is None else getattr(torch, reduce)
        ),
    }
    after = plan.shard.reshard_after_forward
    try:
        for name in _unit_names(model, plan):
            if name:
                fully_shard(model.get_submodule(name), reshard_after_forward=after, **options)
        fully_shard(model, reshard_after_forward=None if after else False, **options)
    except NotImplementedError as error:
        raise PlanError(
            f"axis shard over what axis tensor has cut: {error}. Leave its module out of [tensor] "
            "rules, or use other numbers of ranks"
        ) from error
    if is_on_meta(model):
        draw(model, plan, peers.everyone.device, held_boxes)
    units = [
        unit
        for part in model.modules()
        if (driver := driver_of(part)) is not None and (unit := driver.unit) is not None
    ]
    communicators = {each.axis: each for each in mesh_communicators(mesh)}
    return ShardedLayout(model, units, peers.data, communicators)


def _pipelined(
    model: nn.Module,
    plan: Plan,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None,
    loss: Loss,
    example: Inputs,
    peers: Peers,
) -> Trainable:
    """Cut a copy of the model into stages, and lay this rank's stages out over the other axes."""
    everyone, pipeline = peers.everyone, peers.pipeline
    _place(model := copy.deepcopy(model), plan, everyone)
    _equalise(model, everyone)
    names = list(model.state_dict())
    draws = _drawn(model, plan)
    cut = ModelCut.of(model, plan)
    moved = _moved(example, everyone)
    traffic = _checked(model, plan, moved, cut, peers, draws) if cut.styles else None
    found = _stages_of(model, plan, moved, cut, peers, draws)
    count = len(found.modules)
    style = "v" if plan.pipeline.schedule in ("zbv", "dualpipev") else "loop"
    holders = stage_ranks(pipeline.size, count, style)
    mine = [stage for stage, rank in enumerate(holders) if rank == pipeline.rank]
    layouts: list[DataLayout] = []
    stages: list[PipelineStage] = []
    for stage in mine:
        module = found.modules[stage]
        _cut(module, cut, peers)
        if plan.train.batch_norm == "sync":
            synchronise_batch_norm(module, peers.data)
        _recompute(module, plan)
        layouts.append(_stage_layout(module, plan, peers))
        stages.append(_stage(found, stage, everyone.device, pipeline))
        compiled(module, plan)
    modules = StageModules([found.modules[stage] for stage in mine])
    copies = _copies(found)
    layout = PipelinedLayout(
        layouts,
        [found.modules[stage] for stage in mine],
        peers,
        lambda parameter: id(parameter) not in copies,
        dtype=functools.reduce(
            torch.promote_types, (p.dtype for p in model.parameters()), torch.float32
        ),
    )
    return PipelinedTrainable(
        modules,
        plan,
        peers=peers,
        layout=layout,
        stages=stages,
        names=names,
        copies=_other_names(found),
        optimizer=_optimizer(optimizer, modules, plan),
        loss=loss,
        draws=draws,
        traffic=None if traffic is None else traffic.inside(_names_in(modules)),
    )


def _names_in(modules: StageModules) -> frozenset[str]:
    """The modules of this rank's stages, by their names in the model."""
    return frozenset(name for stage in modules.stages for name, _ in stage.named_modules())


def _checked(
    model: nn.Module,
    plan: Plan,
    example: Inputs,
    cut: ModelCut,
    peers: Peers,
    draws: Draws | None,
) -> TensorTraffic:
    """See that ``model`` computes the same when it is ``cut``, and what that sends."""
    whole, trial = WholeRun(model, example, peers.tensor, draws), copy.deepcopy(model)
    _cut(trial, cut, peers)
    whole.compare(trial)
    _recompute(trial, plan)
    return whole.traffic(trial, autocast_of(plan, peers.everyone.device, keeps_casts=False))


def _stages_of(
    model: nn.Module,
    plan: Plan,
    example: Inputs,
    cut: ModelCut,
    peers: Peers,
    draws: Draws | None,
) -> CutModel:
    """All stages of ``model``, which has been seen to compute the same when it is ``cut``."""
    rehearsal = contextlib.nullcontext() if draws is None else draws.rehearsal()
    # A trace knows the dtypes of what stages hand on.
    with rehearsal, autocast_of(plan, peers.everyone.device, keeps_casts=False):
        found = cut_model(model, plan.pipeline, peers.pipeline.size, example, tensor=cut)
    _check_traced(plan, found)
    _check_ties(plan, found)
    return found


def _stage(
    found: CutModel, index: int, device: torch.device, pipeline: Communicator
) -> PipelineStage:
    module, group = found.modules[index], pipeline.group
    if found.info is not None:
        return build_stage(module, index, found.info, device, group)
    count = len(found.modules)
    return PipelineStage(module, index, count, device, group=group, ties=found.ties)


def _stage_layout(module: nn.Module, plan: Plan, peers: Peers) -> DataLayout:
    if plan.axes.size("shard") > 1:
        return _sharded(module, plan, peers)
    if peers.data.size > 1 and any(parameter.requires_grad for parameter in module.parameters()):
        return _replicated(module, plan, peers)
    return LoneLayout(module, peers.everyone.rank)


def _other_names(found: CutModel) -> dict[str, str]:
    """For each name of a tied parameter that is not its first, that one."""
    names = ((tie.names[0][1], name) for tie in found.ties for _, name in tie.names)
    return {name: first for first, name in names if name != first}


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


def _check_ties(plan: Plan, found: CutModel) -> None:
    reduce = plan.precision.reduce
    if not found.ties or plan.axes.size("shard") == 1:
        return
    if reduce not in (None, plan.precision.parameters):
        # Only the ranks that hold it would find out.
        raise PlanError(
            f"reduce = {reduce!r} in [precision]: stages hold parameter "
            f"{found.ties[0].names[0][1]!r} together, whose gradient is summed over them in "
            f"{plan.precision.parameters!r}, so axis shard cannot reduce it in another dtype. "
            "Remove it, or untie the parameter"
        )


def _moved(example: Inputs, everyone: Communicator) -> Inputs:
    """``example`` on the device of the ranks."""
    return tree_map(partial(_on, everyone.device), example)


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


# ----------------------------------------------------------------------------------- actions


def _place(model: nn.Module, plan: Plan, axis: Communicator) -> None:
    """Move the model to this rank's device, and to the plan's dtype unless that was left out."""
    if is_on_meta(model):
        draw(model, plan, axis.device)
    model.to(axis.device)
    if plan.precision.parameters != Plan().precision.parameters:
        model.to(getattr(torch, plan.precision.parameters))


def _recompute(model: nn.Module, plan: Plan) -> None:
    """Compute the activations of the matching modules again in the backward pass."""
    for name in recomputed(model, plan):
        module = model.get_submodule(name)
        # An attribute of the instance: names, state dict and class stay as they are.
        module.forward = partial(_checkpointed, module.forward)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    # A frame of ours, which a compiler traces: torch's own it runs uncompiled.
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
