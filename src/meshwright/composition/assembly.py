"""`parallelize`: turns a plain module, a plan and an optimizer factory into a `Trainable`.

The order is fixed: checks, dtype and device, dropout, layers over tensor ranks (after a pipeline
has split the model into stages), batch norm, recomputation, the data axes, graphs, the optimizer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright import comm
from meshwright.composition.carried_plans import expert_modules, stage_starts
from meshwright.composition.checks import check_model
from meshwright.composition.context_rules import context_split, split_batch
from meshwright.composition.data_layout import DataLayout, LayoutCommunicators, LoneLayout
from meshwright.composition.example_run import Inputs, copied
from meshwright.composition.expert_rules import expert_split, expert_styles, forget_counts
from meshwright.composition.laying_out import (
    GivenParameters,
    apply_dropout,
    chunk_loss,
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
    split_over_experts,
)
from meshwright.composition.loss_sources import check_own_parameters
from meshwright.composition.own_model import CutGuard, TiedValues, let_go, share, show
from meshwright.composition.pipelined import PipelinedLayout, PipelinedTrainable, StageModules
from meshwright.composition.stages import CutModel, cut_model, order_of
from meshwright.composition.tensor_rules import ModelCut, origin_of_rules, tensor_split
from meshwright.composition.trainable import Loss, Trainable, autocast_of
from meshwright.composition.whole_run import AxisSplit, AxisTraffic, WholeRun
from meshwright.data_parallel import synchronize_batch_norm
from meshwright.errors import InternalError, PlanError
from meshwright.expert_parallel.style import ExpertParallel
from meshwright.gradients import call_module
from meshwright.gradients.optimizer_list import OptimizerFactory
from meshwright.pipelining import PipelineStage, build_stage
from meshwright.pipelining.ties import counted
from meshwright.plan import Plan
from meshwright.randomness import Draws
from meshwright.torch_internals.modules import require_module


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    optimizer: OptimizerFactory | None,
    loss: Loss,
    example: object = None,
    group: Any = None,  # noqa: ANN401 - c10d's type stays in comm
) -> Trainable:
    """Lay ``model`` out as ``plan`` says, and return its `Trainable`.

    Every rank must call this with an equal model and plan; parameters and buffers become those of
    rank 0. A ``model`` on the meta device gets the values of ``[train] seed``, the same on every
    layout. ``optimizer`` is called with this rank's parameters, and returns an optimizer or a list
    of them, stepped in order; those that look at whole parameters step by `own_matrices`.
    ``loss(output, target)`` returns a mean, or ``(sum, count)``; either way the gradient is that of
    the mean over the global batch.
    ``example`` is a small batch of inputs, as for `Trainable.step`; axes pipeline, context,
    expert and tensor run the model on it. ``group`` is a process group, None for all ranks; a
    process without one connects first.

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
            f"({type(optimizer).__name__}): pass "
            f"optimizer=lambda parameters: {type(optimizer).__name__}(parameters, ...)"
        )
    inputs, plan = _inputs(example), plan.over(everyone.size)
    check_model(model, plan, everyone.size, None if example is None else inputs)
    _require_example(plan, example)
    is_empty = is_on_meta(model)
    check_own_parameters(loss, model)
    peers = LayoutCommunicators.of(plan, everyone)
    given = GivenParameters(model)
    origins = tuple(_origins(model, plan))
    chunk_loss(model, plan)
    if plan.axes.size("pipeline") > 1:
        return pipelined(model, plan, optimizer, loss, inputs, peers, given, origins)
    if not (is_empty and is_drawn_in_parts(plan)):
        place(model, plan, everyone)
        given.carry(model)
    draws = apply_dropout(model, plan)
    whole, traffic, styles = None, None, expert_styles(model, plan)
    if plan.axes.size("tensor") > 1 or styles or peers.context is not None:
        equalize(model, everyone)
        whole = WholeRun(model, moved_to(inputs, everyone), draws)
    if whole is not None and plan.axes.size("tensor") > 1:
        cut_over_tensor(model, ModelCut.of(model, plan), peers)
        whole.compare(model, tensor_split(peers.tensor))
    if whole is not None and (styles or peers.context is not None):
        split_over_experts(model, styles, peers)
        whole.compare(model, _parts_split(plan, moved_to(inputs, everyone), peers, draws))
    if plan.train.batch_norm == "sync":
        synchronize_batch_norm(model, peers.sums)
    recompute_modules(model, plan)
    if whole is not None and plan.axes.size("tensor") > 1:
        computing = autocast_of(plan, everyone.device)()
        traffic = whole.traffic(model, tensor_split(peers.tensor), computing)
    forget_counts(model)
    if plan.axes.size("shard") > 1:
        if whole is None and not is_on_meta(model):
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
        origins=origins,
    )


def _origins(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Say where the rules of this plan come from."""
    yield from origin_of_rules(model, plan)
    for setting, kind, axis, listed in (
        ("pipeline.split", "pp_plan", "pipeline", stage_starts),
        ("expert.modules", "ep_plan", "expert", expert_modules),
    ):
        table, key = setting.split(".")
        if plan.axes.size(axis) > 1 and getattr(getattr(plan, table), key) == "model":
            names = listed(model)
            yield (
                f"{setting}: from the {kind} of {type(model).__name__}: {len(names)} modules, "
                f"{names[0]} to {names[-1]}"
            )


def _parts_split(
    plan: Plan, example: Inputs, peers: LayoutCommunicators, draws: Draws | None
) -> AxisSplit:
    """How axes expert and context split a model."""
    experts = None if peers.expert is None else expert_split(peers)
    if peers.context is not None:
        batch = split_batch(example, plan.context, peers.context)
        return context_split(peers.context, peers.passes, batch, draws, experts)
    if experts is None:
        raise InternalError("a plan without axes expert and context has no parts")
    return experts


def _require_example(plan: Plan, example: object) -> None:
    """Raise PlanError if an axis of ``plan`` needs an ``example`` and there is none."""
    for axis, why in (
        ("pipeline", "needs to see how the model runs"),
        ("context", "is checked against the whole model"),
        ("expert", "is checked against the whole model"),
        ("tensor", "is checked against the whole model"),
    ):
        if plan.axes.size(axis) > 1 and example is None:
            raise PlanError(
                f"axis {axis} {why}: give parallelize example=(inputs,), as one small batch has "
                "them"
            )


def _inputs(example: object) -> Inputs:
    """Return the model's arguments in ``example``, which is read as `call_module` reads a batch."""
    if isinstance(example, Mapping):
        return cast("Inputs", example)
    if isinstance(example, Sequence) and not isinstance(example, str):
        return tuple(example)
    return () if example is None else (example,)


def pipelined(
    model: nn.Module,
    plan: Plan,
    optimizer: OptimizerFactory | None,
    loss: Loss,
    example: Inputs,
    peers: LayoutCommunicators,
    given: GivenParameters,
    origins: Collection[str] = (),
) -> Trainable:
    """Split the model into stages, and lay this rank's out over the other axes."""
    everyone, pipeline = peers.everyone, peers.pipeline
    place(model, plan, everyone)
    given.carry(model)
    equalize(model, everyone)
    # A list of experts is saved under other names than its parameters have.
    trained = (name for name, _ in model.named_parameters())
    names = list(dict.fromkeys([*model.state_dict(), *trained]))
    draws = apply_dropout(model, plan)
    cut, experts = ModelCut.of(model, plan), expert_styles(model, plan)
    moved = moved_to(example, everyone)
    traffic = _checked(model, plan, moved, cut, experts, peers, draws)
    found = _stages_of(model, plan, moved, cut, experts, peers, draws)
    holders = order_of(plan.pipeline, pipeline.size).stage_ranks
    mine = [stage for stage, rank in enumerate(holders) if rank == pipeline.rank]
    own = [found.modules[stage] for stage in mine]
    share(model, own)
    model.zero_grad()  # earlier gradients belong to no step
    entering = _stage_inputs(found, plan, moved, peers) if everyone.is_rehearsed else {}
    layouts, stages = _lay_out(found, mine, plan, cut, experts, peers, entering)
    ranks = [pipeline.ranks[rank] for rank in holders]
    modules, numbered = StageModules(own), dict(zip(mine, own, strict=True))
    counts = {id(parameter) for parameter in counted(numbered, found.ties)}
    copies = {id(parameter) for parameter in modules.parameters()} - counts
    tied = TiedValues(numbered, found.ties, ranks, peers.sums.size)
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
        origins=origins,
    )


def _lay_out(
    found: CutModel,
    mine: Sequence[int],
    plan: Plan,
    cut: ModelCut,
    experts: Mapping[str, ExpertParallel],
    peers: LayoutCommunicators,
    entering: Mapping[int, object],
) -> tuple[list[DataLayout], list[PipelineStage]]:
    """Lay the stages that are ``mine`` out over the other axes; ``entering``: inputs of stages."""
    layouts: list[DataLayout] = []
    stages: list[PipelineStage] = []
    device, group, count = peers.everyone.device, peers.pipeline.group, len(found.modules)
    for number in mine:
        module = found.modules[number]
        # A copy has been followed, see `_checked`; a compiler would trace what follows a stage.
        cut_over_tensor(module, cut, peers, follows=False)
        split_over_experts(module, experts, peers, follows=False)
        if plan.train.batch_norm == "sync":
            synchronize_batch_norm(module, peers.sums)
        recompute_modules(module, plan)
        layouts.append(_stage_layout(module, plan, peers))
        if found.info is None:
            args = entering.get(number)
            stage = PipelineStage(module, number, count, device, args, group=group, ties=found.ties)
        else:
            stage = build_stage(module, number, found.info, device, group)
        stages.append(stage)
        compiled(module, plan)
    return layouts, stages


def _stage_inputs(
    found: CutModel, plan: Plan, example: Inputs, peers: LayoutCommunicators
) -> dict[int, object]:
    """What stages get of ``example``, one microbatch, where those that send it are missing."""
    inputs: dict[int, object] = {}
    if found.info is None:
        passed: Any = example
        with torch.no_grad(), autocast_of(plan, peers.everyone.device, keeps_casts=False)():
            for number, module in enumerate(found.modules):
                inputs[number] = passed
                output = call_module(module, passed)
                passed = output if isinstance(output, tuple) else (output,)
    return inputs


def _checked(
    model: nn.Module,
    plan: Plan,
    example: Inputs,
    cut: ModelCut,
    experts: Mapping[str, ExpertParallel],
    peers: LayoutCommunicators,
    draws: Draws | None,
) -> AxisTraffic | None:
    """Check that ``model`` computes the same when split; returns its traffic over axis tensor."""
    if not (cut.styles or experts or peers.context is not None):
        return None
    whole, trial = WholeRun(model, example, draws), copied(model)
    split = tensor_split(peers.tensor)
    if cut.styles:
        cut_over_tensor(trial, cut, peers)
        whole.compare(trial, split)
    if experts or peers.context is not None:
        split_over_experts(trial, experts, peers)
        whole.compare(trial, _parts_split(plan, example, peers, draws))
    if not cut.styles:
        return None
    recompute_modules(trial, plan)
    computing = autocast_of(plan, peers.everyone.device, keeps_casts=False)()
    return whole.traffic(trial, split, computing)


def _stages_of(
    model: nn.Module,
    plan: Plan,
    example: Inputs,
    cut: ModelCut,
    experts: Collection[str],
    peers: LayoutCommunicators,
    draws: Draws | None,
) -> CutModel:
    """Split ``model``, which has been checked against its sharding ``cut``, into all stages."""
    rehearsal = contextlib.nullcontext() if draws is None else draws.rehearsal()
    # A trace fixes the dtypes of what stages send, so run it under autocast.
    computing = autocast_of(plan, peers.everyone.device, keeps_casts=False)()
    axis = peers.context
    context = None if axis is None else split_batch(example, plan.context, axis)
    ranks = peers.pipeline.size
    with rehearsal, computing:
        found = cut_model(
            model, plan.pipeline, ranks, example, tensor=cut, experts=experts, context=context
        )
    _check(plan, found)
    return found


def _stage_layout(module: nn.Module, plan: Plan, peers: LayoutCommunicators) -> DataLayout:
    if plan.axes.size("shard") > 1:
        return shard_module(module, plan, peers)
    if not peers.sums.is_alone and any(p.requires_grad for p in module.parameters()):
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
