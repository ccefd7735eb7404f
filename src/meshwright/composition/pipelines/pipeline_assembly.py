"""Assembly of a plan with axis pipeline: splits a model, and lays out this rank's stages."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.composition.data_layout import DataLayout, LayoutCommunicators, LoneLayout
from meshwright.composition.example_run import Inputs, copied
from meshwright.composition.given_parameters import GivenParameters
from meshwright.composition.laying_out import (
    apply_dropout,
    compiled,
    cut_over_tensor,
    equalize,
    moved_to,
    place,
    recompute_modules,
    replicate_module,
    shard_module,
)
from meshwright.composition.pipelines.cut_guard import CutGuard
from meshwright.composition.pipelines.own_tensors import let_go, share, show
from meshwright.composition.pipelines.pipelined import PipelinedTrainable
from meshwright.composition.pipelines.pipelined_layout import PipelinedLayout, StageModules
from meshwright.composition.pipelines.stages import CutModel, cut_model
from meshwright.composition.pipelines.tied_values import TiedValues
from meshwright.composition.tensor_axis.tensor_check import TensorTraffic, WholeRun
from meshwright.composition.tensor_axis.tensor_rules import ModelCut
from meshwright.composition.trainable import Loss, Trainable, autocast_of
from meshwright.data_parallel import synchronize_batch_norm
from meshwright.errors import PlanError
from meshwright.pipelining import PipelineStage, build_stage
from meshwright.pipelining.ties import counted
from meshwright.plan import Plan
from meshwright.randomness import Draws
from meshwright.schedule.builders import stage_ranks


def pipelined(
    model: nn.Module,
    plan: Plan,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None,
    loss: Loss,
    example: Inputs,
    peers: LayoutCommunicators,
    given: GivenParameters,
) -> Trainable:
    """Split the model into stages, and lay this rank's out over the other axes."""
    everyone, pipeline = peers.everyone, peers.pipeline
    place(model, plan, everyone)
    given.carry(model)
    equalize(model, everyone)
    names = list(model.state_dict())
    draws = apply_dropout(model, plan)
    cut = ModelCut.of(model, plan)
    moved = moved_to(example, everyone)
    traffic = _checked(model, plan, moved, cut, peers, draws) if cut.styles else None
    found = _stages_of(model, plan, moved, cut, peers, draws)
    style = "v" if plan.pipeline.schedule in ("zbv", "dualpipev") else "loop"
    holders = stage_ranks(pipeline.size, len(found.modules), style)
    mine = [stage for stage, rank in enumerate(holders) if rank == pipeline.rank]
    own = [found.modules[stage] for stage in mine]
    share(model, own)
    model.zero_grad()  # earlier gradients belong to no step
    layouts, stages = _lay_out(found, mine, plan, cut, peers)
    ranks = [pipeline.ranks[rank] for rank in holders]
    modules, numbered = StageModules(own), dict(zip(mine, own, strict=True))
    counts = {id(parameter) for parameter in counted(numbered, found.ties)}
    copies = {id(parameter) for parameter in modules.parameters()} - counts
    tied = TiedValues(numbered, found.ties, ranks, peers.data.size)
    for module in own:
        given.carry(module)
    show(model, own)
    let_go(model, found.modules, mine, ranks)
    with tied.inside():  # as the modules are in a step
        guard = CutGuard(model, found, own, is_sharded=plan.axes.size("shard") > 1)
    dtypes = (parameter.dtype for parameter in model.parameters())
    widest = functools.reduce(torch.promote_types, dtypes, torch.float32)
    layout = PipelinedLayout(layouts, modules, peers, copies, dtype=widest)
    return PipelinedTrainable(
        modules,
        plan,
        peers=peers,
        layout=layout,
        stages=stages,
        names=names,
        copies={n: t.names[0][1] for t in found.ties for _, n in t.names if n != t.names[0][1]},
        tied=tied,
        guard=guard,
        optimizer=given.optimizer(optimizer, modules, plan, tied.inside()),
        loss=loss,
        draws=draws,
        traffic=None if traffic is None else traffic.inside(modules.stages),
    )


def _lay_out(
    found: CutModel, mine: Sequence[int], plan: Plan, cut: ModelCut, peers: LayoutCommunicators
) -> tuple[list[DataLayout], list[PipelineStage]]:
    """Lay the stages that are ``mine`` out over the other axes."""
    layouts: list[DataLayout] = []
    stages: list[PipelineStage] = []
    device, group, count = peers.everyone.device, peers.pipeline.group, len(found.modules)
    for number in mine:
        module = found.modules[number]
        cut_over_tensor(module, cut, peers)
        if plan.train.batch_norm == "sync":
            synchronize_batch_norm(module, peers.data)
        recompute_modules(module, plan)
        layouts.append(_stage_layout(module, plan, peers))
        if found.info is None:
            stage = PipelineStage(module, number, count, device, group=group, ties=found.ties)
        else:
            stage = build_stage(module, number, found.info, device, group)
        stages.append(stage)
        compiled(module, plan)
    return layouts, stages


def _checked(
    model: nn.Module,
    plan: Plan,
    example: Inputs,
    cut: ModelCut,
    peers: LayoutCommunicators,
    draws: Draws | None,
) -> TensorTraffic:
    """Check that ``model`` computes the same when sharded as ``cut``; returns its traffic."""
    whole, trial = WholeRun(model, example, peers.tensor, draws), copied(model)
    cut_over_tensor(trial, cut, peers)
    whole.compare(trial)
    recompute_modules(trial, plan)
    return whole.traffic(trial, autocast_of(plan, peers.everyone.device, keeps_casts=False))


def _stages_of(
    model: nn.Module,
    plan: Plan,
    example: Inputs,
    cut: ModelCut,
    peers: LayoutCommunicators,
    draws: Draws | None,
) -> CutModel:
    """Split ``model``, which has been checked against its sharding ``cut``, into all stages."""
    rehearsal = contextlib.nullcontext() if draws is None else draws.rehearsal()
    # A trace fixes the dtypes of what stages send, so run it under autocast.
    computing = autocast_of(plan, peers.everyone.device, keeps_casts=False)
    with rehearsal, computing:
        found = cut_model(model, plan.pipeline, peers.pipeline.size, example, tensor=cut)
    _check(plan, found)
    return found


def _stage_layout(module: nn.Module, plan: Plan, peers: LayoutCommunicators) -> DataLayout:
    if plan.axes.size("shard") > 1:
        return shard_module(module, plan, peers)
    if not peers.data.is_alone and any(p.requires_grad for p in module.parameters()):
        return replicate_module(module, plan, peers)
    return LoneLayout(module, peers)


def _check(plan: Plan, found: CutModel) -> None:
    """Raise PlanError for settings that the stages in ``found`` do not support."""
    problems = []
    if found.info is not None and plan.train.recompute:
        problems.append("train.recompute: its modules are gone from the stages")
    if found.info is not None and plan.train.batch_norm == "sync":
        problems.append('train.batch_norm = "sync": a graph has each rank\'s own statistics')
    if problems:
        traced = "the model is no chain of modules, so stages are traced graphs, without"
        raise PlanError([f"{traced} {each}" for each in problems])
    reduce, held = plan.precision.reduce, plan.precision.parameters
    if found.ties and plan.axes.size("shard") > 1 and reduce not in (None, held):
        # Checked here on every rank: only the holders of the parameter would fail.
        raise PlanError(
            f"reduce = {reduce!r} in [precision]: stages hold parameter "
            f"{found.ties[0].names[0][1]!r} together, whose gradient is summed over them in "
            f"{held!r}, so axis shard cannot reduce it in another dtype. "
            "Remove it, or untie the parameter"
        )
