"""Contradictions between a plan and a model, found before anything is laid out."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from meshwright.comm.dtensors.after_hooks import has_hooks
from meshwright.comm.dtensors.dtensor import is_dtensor
from meshwright.composition.carried_plans import carries, stage_starts
from meshwright.composition.context_rules import context_problems
from meshwright.composition.example_run import Inputs, evaluating, left_as_it_is, same_numbers
from meshwright.composition.expert_rules import expert_problems
from meshwright.composition.own_model import hooked
from meshwright.composition.pipelined import schedule_of
from meshwright.composition.stages import chunks_of, order_of
from meshwright.composition.tensor_rules import rule_problems
from meshwright.data_parallel import batch_norms
from meshwright.data_parallel.modules.batch_norm import running_instance_norms
from meshwright.errors import PlanError
from meshwright.gradients import call_module
from meshwright.losses.chunked import head_of
from meshwright.pipelining import PipelineScheduleSingle
from meshwright.plan import Plan, match_names
from meshwright.randomness import Draws, RandomOperators
from meshwright.randomness.refusals import let_draw
from meshwright.settings import Problem
from meshwright.torch_internals.trees import tree_leaves

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
"""The modules that `replace_dropout` replaces."""
AUTOCAST = ("bfloat16", "float16")
"""The dtypes that torch can compute in while parameters have another one."""


def check_model(model: nn.Module, plan: Plan, ranks: int, example: Inputs | None = None) -> None:
    """Raise one PlanError with all contradictions of ``plan``, ``model`` and the number of ranks.

    No process group and no data are needed: the model, and the ``example`` of its inputs, may be on
    the meta device. With an example, modules that draw their own random numbers are found, too.
    """
    problems: list[str] = []
    names = [name for name, _ in model.named_modules()]
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    try:
        plan.check(ranks, shapes, modules=names)
    except PlanError as error:
        problems.extend(error.problems)
    ours = [
        *_pipeline_problems(model, plan),
        *rule_problems(model, plan),
        *expert_problems(model, plan),
        *context_problems(model, plan),
        *_train_problems(model, plan),
        *_head_problems(model, plan),
        *_precision_problems(plan),
        *(() if example is None else _draw_problems(model, plan, example)),
    ]
    problems.extend(
        f"parameter {name!r} is a DTensor already: pass parallelize a model of plain tensors"
        for name, parameter in model.named_parameters()
        if is_dtensor(parameter)
    )
    if ours:
        problems.extend(plan.origin.error(ours).problems)
    if problems:
        raise PlanError(problems, plan.origin.source)


def _pipeline_problems(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    ranks, pipeline = plan.axes.size("pipeline"), plan.pipeline
    if ranks == 1:
        return
    if names := [name for name, parameter in model.named_parameters() if has_hooks(parameter)]:
        yield Problem(("axes", "pipeline"), hooked(names[0]))
    if pipeline.split == "model" and not stage_starts(model):
        yield Problem(
            ("pipeline", "split"),
            f'[pipeline] split = "model": {carries(model)}, and no pp_plan that names a module of '
            'it. Name the first modules of later stages, or set split = "auto"',
        )
    try:
        chunks = chunks_of(pipeline, ranks)
        if issubclass(schedule_of(pipeline), PipelineScheduleSingle) and chunks > 1:
            raise ValueError(f"{pipeline.schedule} has one stage a rank, but split makes {chunks}")
        schedule = order_of(pipeline, ranks)
        if plan.train.compile and schedule.split_backward:
            yield Problem(
                ("train", "compile"),
                f"compile = true: schedule = {schedule.name!r} in [pipeline] runs a backward "
                "in two halves, and the graph of a compiled stage has one: take a schedule with "
                'whole backwards, such as "1f1b" or "interleaved1f1b", or remove compile',
            )
    except PlanError as error:
        yield Problem(("pipeline", "order" if pipeline.order else "split"), str(error))
    except ValueError as error:
        yield Problem(("pipeline", "microbatches"), f"[pipeline] {error}")


def _train_problems(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    train = plan.train
    normalized = list(batch_norms(model))
    is_cut = plan.is_summed or plan.pipeline.microbatches > 1
    if normalized and train.batch_norm is None and is_cut:
        yield Problem(
            ("train", "batch_norm"),
            f"the model has BatchNorm ({normalized[0]!r}): say in [train] whether its statistics "
            'are those of each rank\'s share, batch_norm = "local", or of all ranks, "sync"',
        )
    running = list(running_instance_norms(model))
    if running and train.batch_norm != "local" and is_cut:
        yield Problem(
            ("train", "batch_norm"),
            f"the model has an InstanceNorm with running statistics ({running[0]!r}), which are "
            'those of each rank\'s share: say batch_norm = "local" in [train] if these are meant, '
            "or leave its track_running_stats out",
        )
    scaled = [n for n, p in model.named_modules() if getattr(p, "scale_grad_by_freq", False)]
    if scaled and is_cut:
        yield Problem(
            ("train",),
            f"{scaled[0]!r} has scale_grad_by_freq=True: its gradient would be divided by how "
            "often each row is looked up in one share of the batch, and not in all; leave it out",
        )
    if not normalized and not running and train.batch_norm is not None:
        yield Problem(
            ("train", "batch_norm"),
            f"batch_norm = {train.batch_norm!r} has no effect: the model has no BatchNorm",
        )
    dropping = [n for n, part in model.named_modules() if isinstance(part, DROPOUTS) and part.p > 0]
    if dropping and train.dropout == "local" and plan.axes.size("tensor") > 1:
        yield Problem(
            ("train", "dropout"),
            f"{dropping[0]!r} would drop other activations on each rank of axis tensor, which hold "
            'the same ones: set dropout = "global" in [train], or its p to 0',
        )
    if train.dropout == "global" and not dropping:
        yield Problem(
            ("train", "dropout"),
            'dropout = "global" has no effect: no module of the model is a dropout with p > 0',
        )
    if train.per_rank and train.dropout == "local":
        yield Problem(
            ("train", "per_rank"),
            'per_rank has no effect with dropout = "local": each rank draws for itself everywhere',
        )


def _head_problems(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    key, rows = ("train", "loss_chunk"), plan.train.loss_chunk
    if rows is None:
        return
    head = head_of(model)
    if head is None:
        yield Problem(
            key,
            f"loss_chunk = {rows}: {type(model).__name__} has no layer, or several, that may "
            "compute its logits (its output embeddings, or one called lm_head, head or "
            "embed_out): call meshwright.losses.in_chunks(model, head=...) instead",
        )
        return
    for name in recomputed(model, plan):
        if f"{head}.".startswith(f"{name}." if name else ""):
            yield Problem(
                key,
                f"loss_chunk = {rows}: [train] recompute names {name!r}, which has the head "
                f"{head!r}, whose loss would be computed twice: name the layers before it",
            )


def _draw_problems(model: nn.Module, plan: Plan, example: Inputs) -> Iterator[Problem]:
    """Run ``model`` on ``example`` to find operators whose random masks depend on the layout."""
    held = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    given = {leaf.device for leaf in tree_leaves(example) if isinstance(leaf, torch.Tensor)}
    if plan.train.dropout == "local" or held != given:
        return
    ours = [name for name, part in model.named_modules() if type(part) in DROPOUTS]
    found: list[str] = []
    watch = RandomOperators(model, Draws(0), per_rank=[*plan.train.per_rank, *ours], found=found)
    devices = [device for device in held if device.type == "cuda"]
    with (
        left_as_it_is(model),
        evaluating(model, trains=True),
        same_numbers(),
        torch.random.fork_rng(devices=devices),
        torch.no_grad(),
        watch,
    ):
        call_module(model, example)
    if found:
        yield Problem(
            ("train", "dropout"),
            f"{found[0]!r} draws random numbers that depend on the layout, inside of attention or "
            f"by a function: set its dropout to 0, or {let_draw(found)}",
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


def recomputed(model: nn.Module, plan: Plan) -> list[str]:
    """List the names of modules whose activations are recomputed, each once."""
    names = [name for name, _ in model.named_modules()]
    matches = [match_names(pattern, names) for pattern in plan.train.recompute]
    return list(dict.fromkeys(name for found in matches for name in found))
