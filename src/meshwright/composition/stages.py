"""Splits a model into stages: a chain by its own modules, any other model by tracing it.

Tracing dissolves modules, and cannot trace communication between ranks, nor experts, whose sizes
depend on values. So where an axis splits modules, a twin of the model is traced, whose layers have
the sizes of sharded ones and whose experts are one operator; afterwards each is put back into its
stage as a module, to be split there::

    model -- twin --> pipeline() --> stages: ... linear(x, up.weight) ...
                                     restored: ... up(x) ...      sharded like any other module
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from meshwright.composition.carried_plans import stage_starts
from meshwright.composition.context_rules import BatchSplit
from meshwright.composition.example_run import Inputs, Observation, copied, observe
from meshwright.composition.tensor_rules import ModelCut
from meshwright.context_parallel.attention import (
    ATTENTION,
    AttentionForm,
    TracedAttention,
    attending,
)
from meshwright.errors import InternalError, PlanError, ScheduleError
from meshwright.losses.chunked import chunked_heads
from meshwright.pipelining import PipeInfo, SplitPoint, Tie, pipeline, stages_by_name
from meshwright.pipelining.splitting.balance import balanced
from meshwright.pipelining.splitting.dropped import key_in_trace, refuse_hooks
from meshwright.pipelining.splitting.splitting import ties_of
from meshwright.plan import PipelinePlan
from meshwright.randomness import Dropout
from meshwright.schedule.actions import Schedule
from meshwright.schedule.builders import TWO_A_RANK, build
from meshwright.schedule.checks import check
from meshwright.schedule.lowering import compute_part
from meshwright.schedule.text import load_csv
from meshwright.tensor_parallel.layers import is_conv1d
from meshwright.torch_internals.trees import tree_leaves, tree_map, tree_map_only


@dataclass(slots=True)
class CutModel:
    """The stages of a model, in their order."""

    modules: list[nn.Module]
    ties: tuple[Tie, ...] = ()
    info: PipeInfo | None = None
    """What stages of a traced model are built with; None for a chain."""


def chunks_of(plan: PipelinePlan, ranks: int) -> int:
    """Return the number of stages on each of ``ranks``.

    Raises ``PlanError`` when ``split`` does not fit.
    """
    if isinstance(plan.split, str):
        if plan.order:
            return max(1, _file_of(plan).stages // ranks)
        return 2 if plan.schedule in TWO_A_RANK else 1
    stages = len(plan.split) + 1
    if stages % ranks:
        raise PlanError(
            f"[pipeline] split has {len(plan.split)} cuts, which makes {stages} stages: not a "
            f"multiple of the {ranks} ranks on axis pipeline"
        )
    return stages // ranks


def order_of(plan: PipelinePlan, ranks: int) -> Schedule:
    """Return the compute actions of all ``ranks``: those of a file, or of a built schedule.

    Raises ``PlanError`` for a file with another order than the plan needs, ``ValueError`` for
    sizes that the schedule does not support.
    """
    chunks = chunks_of(plan, ranks)
    if not plan.order:
        return build(plan.schedule, ranks, plan.microbatches, chunks)
    order = _file_of(plan)
    expected = (ranks, ranks * chunks, plan.microbatches)
    found = (order.ranks, order.stages, order.microbatches)
    if found != expected:
        raise PlanError(
            f"[pipeline] order: expected {expected[0]} ranks, {expected[1]} stages and "
            f"{expected[2]} microbatches, found {found[0]}, {found[1]} and {found[2]} in "
            f"{plan.order}"
        )
    return order


def _file_of(plan: PipelinePlan) -> Schedule:
    try:
        order = compute_part(load_csv(plan.order))
        check(order)
    except (OSError, ValueError, ScheduleError) as error:
        text = " ".join(str(error).split("\n")[0].split())
        raise PlanError(f"[pipeline] order: {plan.order}: {text}") from error
    return order


def cut_model(
    model: nn.Module,
    plan: PipelinePlan,
    ranks: int,
    example: Inputs,
    *,
    tensor: ModelCut,
    experts: Collection[str] = (),
    context: BatchSplit | None = None,
) -> CutModel:
    """Split ``model`` into stages that have its parameters under its names.

    ``plan.split`` lists the modules that begin a stage, from the second stage on, or it names what
    to balance. ``parameters`` balances their number. ``auto`` balances the operations of a traced
    model. A chain is not traced: ``auto`` then balances its parameters, counting 1 for embedding
    tables and parameters of fewer than two dims. ``model`` does so for any model, and splits before
    modules of the plan that it carries. ``tensor`` says how stages may be sharded later,
    ``experts`` which of their modules are split over axis expert, ``context`` how the example is
    split over axis context.

    Raises ``PlanError`` if the model cannot be split like this.
    """
    count = chunks_of(plan, ranks) * ranks
    seen = observe(model, example)
    if seen.links is None:
        found = _traced(model, plan, count, example, seen, tensor, experts, context)
    else:
        starts = _starts(model, plan, seen.links, count)
        bounds = [0, *(seen.links.index(name) for name in starts), len(seen.links)]
        modules = stages_by_name(model, [seen.links[a:b] for a, b in itertools.pairwise(bounds)])
        found = CutModel(modules, ties=ties_of(modules))
    _check_kept(model, found)
    _check_left(model, found, seen)
    return found


def _traced(
    model: nn.Module,
    plan: PipelinePlan,
    count: int,
    example: Inputs,
    seen: Observation,
    tensor: ModelCut,
    experts: Collection[str],
    context: BatchSplit | None,
) -> CutModel:
    """Split the graph of ``model`` into ``count`` stages."""
    if seen.moving:
        raise PlanError(
            f"each forward of the model changes its attribute {seen.moving[0]!r}. The model is no "
            "chain of modules, so stages are traced graphs, in which it would stay as it was: "
            "count outside of forward, or in a buffer"
        )
    dropout = [name for name, part in model.named_modules() if isinstance(part, Dropout)]
    if dropout:
        raise PlanError(
            'train.dropout = "global": the model is no chain of modules, so stages are traced '
            f"graphs, which do not ask in which step they run. Set {dropout[0]!r} to p = 0, or "
            'use dropout = "local"'
        )
    tracing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    forms: list[AttentionForm] = []
    if context is not None:
        length, ranks = context.state.split.length, context.state.axis.size
        if length % ranks:
            raise PlanError(
                f"axis context = {ranks}: the example has {length} positions. The model is no "
                "chain of modules, so stages are traced graphs, of one number of positions on all "
                f"ranks: give a multiple of {ranks}"
            )
        example = context.part(example)
        tracing = attending(replace(context.state, traced=forms))
    example = _of_two_rows(example)
    named = dict(example) if isinstance(example, Mapping) else {}
    args = () if isinstance(example, Mapping) else example
    # torch.export takes the sizes of named arguments by name, those of others in their order.
    sizes: Any = tree_map(_free_size, named or tuple(args))
    cuts: dict[str, Any] = {}
    if isinstance(plan.split, str) and plan.split != "model":
        measure = "flops" if plan.split == "auto" else plan.split
        cuts["split_policy"] = balanced(count, measure)
    else:
        names = [name for name, _ in model.named_modules() if name]
        starts = _starts(model, plan, names, count)
        cuts["split_spec"] = dict.fromkeys(starts, SplitPoint.BEGINNING)
    names = {*tensor.styles, *experts, *chunked_heads(model)}
    traced = twin_of(model, tensor, experts) if names else model
    try:
        with tracing:
            pipe = pipeline(traced, args, named, dynamic_shapes=sizes, **cuts)
    except (ValueError, RuntimeError) as error:  # a RuntimeError where it cannot be traced
        raise PlanError(f"the model cannot be cut into {count} stages: {error}") from error
    if pipe.num_stages != count:
        raise PlanError(
            f"[pipeline] split = {plan.split!r} cuts the model into {pipe.num_stages} stages, "
            f"expected {count}: name other modules"
        )
    info = pipe.info()
    modules = [pipe.get_stage_module(n) for n in range(count)]
    restored: set[str] = set()
    for module in modules if names else ():
        restored |= restore(module, model, names, restored)
    paths = {key_in_trace(part): name for name, part in traced.named_modules()}
    for number, form in enumerate(forms):
        if form.module is not None:
            owner = model.get_submodule(paths[key_in_trace(form.module)])
            forms[number] = replace(form, module=owner)
    for module in modules if forms else ():
        restore_attention(module, forms)
    _keep_unused(model, modules)
    info = replace(info, ties=tuple(_renamed(tie, modules) for tie in info.ties))
    return CutModel(modules, info.ties, info)


def _renamed(tie: Tie, modules: Sequence[nn.Module]) -> Tie:
    """Rename ``tie`` to the first name of the parameter in each stage."""
    names: list[tuple[int, str]] = []
    for stage, name in tie.names:
        own = modules[stage].get_parameter(name)
        firsts = (n for n, p in modules[stage].named_parameters() if p is own)
        names.append((stage, next(firsts)))
    return Tie(tie.owner, tuple(names))


def _check_kept(model: nn.Module, found: CutModel) -> None:
    """Raise PlanError for hooks of modules that no stage calls, and for state in no stage."""
    inside = {part for stage in found.modules for part in stage.modules()}
    apart = [(name, part) for name, part in model.named_modules() if part not in inside]
    why = (
        "A pipeline takes these modules apart; the modules of a chain stay as they are. Put hooks "
        "on those, or what they do into forward"
    )
    try:
        refuse_hooks(apart, why)
    except ValueError as error:
        raise PlanError(str(error)) from error
    held = {name for stage in found.modules for name in stage.state_dict()}
    lost = [name for name in model.state_dict() if name not in held]
    if lost:
        raise PlanError(
            f"{lost[0]!r} of the model's state belongs to a module that a pipeline takes apart, "
            "and no stage has it: let it be a parameter or a buffer"
        )


def _check_left(model: nn.Module, found: CutModel, seen: Observation) -> None:
    """Raise PlanError for values that forward leaves in attributes if a loss would read others."""
    why = "the model is no chain of modules, so stages are traced graphs, which leave none"
    right = set[nn.Module]()
    if found.info is None:
        why = "a pipeline runs it for another microbatch, or on another rank, than the loss"
        right = {*found.modules[-1].modules()}
    for name, key in seen.left:
        if model.get_submodule(name) not in right:
            what = f"module {name!r}" if name else f"the model ({type(model).__name__})"
            raise PlanError(
                f"each forward of {what} leaves a value in the attribute {key!r}, but {why}. "
                "Return it with the model's output, or make it a buffer if only the module reads it"
            )


def _of_two_rows(example: Inputs) -> Inputs:
    """Repeat an ``example`` of one row: a trace treats a size of one as a constant."""
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, torch.Tensor)]
    if any(tensor.dim() and len(tensor) != 1 for tensor in tensors):
        return example
    return tree_map_only(torch.Tensor, _twice, example)


def _twice(row: torch.Tensor) -> torch.Tensor:
    if not row.dim():
        return row
    row = row.detach()
    step, *steps = row.stride()
    within = sum((size - 1) * s for size, s in zip(row.shape[1:], steps, strict=True))
    if step <= within or 0 in steps:
        return torch.cat([row, row])
    both = torch.empty_strided(
        (2, *row.shape[1:]), row.stride(), dtype=row.dtype, device=row.device
    )
    return both.copy_(row)


def _free_size(value: object) -> dict[int, Any] | None:
    """Make dim 0 dynamic: microbatches may have more or fewer rows than the example."""
    has_rows = isinstance(value, torch.Tensor) and value.dim()
    return {0: torch.export.Dim.AUTO} if has_rows else None


def _keep_unused(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Put the state of ``model`` that no stage computes with into stages.

    It goes to the first stage; another name of a used parameter to the first stage that has it.
    """
    held = {name for module in modules for name in module.state_dict()}
    first = modules[0]
    state = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    for name, tensor in state.items():
        if name in held:
            continue
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        used = [other for other in names[id(tensor)] if other in held]
        below = {
            other for each in owner.state_dict(keep_vars=True).values() for other in names[id(each)]
        }
        if used:
            stage, other = next((m, n) for m in modules for n in used if n in m.state_dict())
            _made(stage, path).register_parameter(leaf, stage.get_parameter(other))
            _order_as(stage, model)
        elif path and not [*owner.children()] and not held & below:
            above, _, last = path.rpartition(".")
            _made(first, above).add_module(last, owner)  # whole, so that it can be cut as others
            held |= below
        elif isinstance(tensor, nn.Parameter):
            _made(first, path).register_parameter(leaf, tensor)
        else:
            _made(first, path).register_buffer(leaf, tensor)
        held.add(name)


def _order_as(stage: nn.Module, model: nn.Module) -> None:
    """Order the dicts of ``stage`` like those of ``model``, so that first names agree."""
    parts = dict(stage.named_modules(remove_duplicate=False))
    for path, owner in model.named_modules(remove_duplicate=False):
        part = parts.get(path, owner)
        tables: Any = ((part._modules, owner._modules), (part._parameters, owner._parameters))
        for mine, theirs in tables if part is not owner else ():
            known = [key for key in theirs if key in mine]
            for key in [*known, *(key for key in mine if key not in theirs)]:
                mine[key] = mine.pop(key)


def _made(module: nn.Module, path: str) -> nn.Module:
    """Return the submodule at ``path``; missing modules on the way are added."""
    for name in path.split(".") if path else ():
        if not isinstance(getattr(module, name, None), nn.Module):
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module


# ------------------------------------------------------------------------------------ balance


def _starts(
    model: nn.Module, plan: PipelinePlan, links: Sequence[str], count: int
) -> Sequence[str]:
    """The names of the modules that stages begin with, except for the first stage."""
    if not isinstance(plan.split, str):
        unknown = [name for name in plan.split if name not in links]
        if unknown or [*plan.split] != [name for name in links if name in plan.split]:
            raise PlanError(
                f"[pipeline] split names {unknown or list(plan.split)}: expected some of "
                f"{', '.join(links)}, in this order"
            )
        return plan.split
    if plan.split == "model":
        links = [name for name in stage_starts(model) if name in links]
    if len(links) < count:
        raise PlanError(
            f"the model has {len(links)} modules in a row that a stage may begin with, which is "
            f"too few for {count} stages: name others in [pipeline] split, or use fewer ranks"
        )
    costs = [_cost(model.get_submodule(name), by_size=plan.split == "parameters") for name in links]
    return [links[start] for start in _partition(costs, count)[1:]]


def _cost(module: nn.Module, *, by_size: bool) -> int:
    if by_size:
        return sum(parameter.numel() for parameter in module.parameters())
    tables = {
        id(p)
        for part in module.modules()
        if isinstance(part, nn.Embedding)
        for p in part.parameters()
    }
    # Cheap parameters count 1, so that no stage is without any parameter.
    return sum(
        1 if parameter.dim() < 2 or id(parameter) in tables else parameter.numel()
        for parameter in module.parameters()
    )


def _partition(costs: Sequence[int], count: int) -> list[int]:
    """Split ``costs`` into ``count`` runs whose largest sum is minimal; returns their starts.

    A run without cost counts as infinite, to be avoided where another split exists.
    """
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for part in range(1, count + 1):
        row: dict[int, tuple[float, int]] = {}
        for end in range(part, len(costs) - (count - part) + 1):
            options = (
                (max(worst, (sums[end] - sums[start]) or math.inf), start)
                for start, (worst, _) in best[-1].items()
                if start < end
            )
            row[end] = min(options, default=(math.inf, end - 1))
        best.append(row)
    starts: list[int] = []
    end = len(costs)
    for row in reversed(best[1:]):
        end = row[end][1]
        starts.append(end)
    return starts[::-1]


_OUTPUTS_CUT = frozenset({"colwise", "colwise_2", "colwise_3"})
_INPUTS_CUT = frozenset({"rowwise"})
_SAME_SIZE = frozenset({"colwise_gathered", "rowwise_scattered", "embedding"})


@torch.library.custom_op("meshwright::experts", mutates_args=())
def _experts(
    rows: torch.Tensor,
    routing: torch.Tensor,
    weights: torch.Tensor | None,
    parameters: list[torch.Tensor],
) -> torch.Tensor:
    """What a twin has in place of the forward of a module of experts: never run."""
    raise InternalError("a twin of a model is traced, and not run")


@_experts.register_fake
def _(
    rows: torch.Tensor,
    routing: torch.Tensor,
    weights: torch.Tensor | None,
    parameters: list[torch.Tensor],
) -> torch.Tensor:
    return torch.empty_like(rows)


_EXPERTS = torch.ops.meshwright.experts.default
_OPERATORS: Mapping[object, tuple[tuple[int, ...], int]] = {
    torch.ops.aten.linear.default: ((0,), 1),
    torch.ops.aten.embedding.default: ((1,), 0),
    torch.ops.aten.addmm.default: ((1,), 2),
    _EXPERTS: ((0, 1, 2), 3),
}
"""The operators that modules are traced to, with the positions of inputs and of a parameter."""


def twin_of(model: nn.Module, cut: ModelCut, experts: Collection[str] = ()) -> nn.Module:
    """Make a copy of ``model`` with one rank's sizes, and ``experts`` as one operator, for a trace.

    Raises PlanError for styles whose modules cannot be found again in a trace.
    """
    known = _OUTPUTS_CUT | _INPUTS_CUT | _SAME_SIZE
    lost = [f"{name!r} ({style})" for name, style in cut.styles.items() if style not in known]
    lost += [
        f"{name!r} ({type(module).__name__})"
        for name in cut.styles
        if type(module := model.get_submodule(name)) not in (nn.Linear, nn.Embedding)
        and not is_conv1d(module)
    ]
    if lost:
        raise PlanError(
            "the model is no chain of modules, so its stages are traced graphs, in which these "
            f"modules cannot be found again to be cut on axis tensor: {', '.join(lost)}. Leave "
            "them out of [tensor] rules, or use axis tensor without axis pipeline"
        )
    twin = copied(model)
    cut.set_widths(twin)
    for name, style in cut.styles.items():
        if style in _SAME_SIZE:
            continue
        if isinstance(twin.get_submodule(name), nn.Embedding):
            raise PlanError(
                f"{name!r} is an embedding table cut by features ({style}), which a traced stage "
                'cannot have: give it the style "embedding"'
            )
        _shorten(twin.get_submodule(name), cut.ranks, is_by_rows=style in _INPUTS_CUT)
    for name in experts:
        module = twin.get_submodule(name)
        module.forward = partial(_forward_of_experts, module, inspect.signature(module.forward))
    return twin


def _forward_of_experts(
    module: nn.Module, signature: inspect.Signature, *inputs: Any, **options: Any
) -> torch.Tensor:
    rows, routing, *weights = signature.bind(*inputs, **options).args
    return _EXPERTS(rows, routing, weights[0] if weights else None, [*module.parameters()])


def _shorten(layer: nn.Module, ranks: int, *, is_by_rows: bool) -> None:
    """Reduce ``layer`` to one rank's features: input for ``is_by_rows``, else output."""
    names = ("nf", "nx") if is_conv1d(layer) else ("out_features", "in_features")
    dim = int(is_by_rows) ^ int(is_conv1d(layer))
    name = names[is_by_rows]
    # Use the largest shard's size on every rank: all must split into the same stages.
    size = -(-getattr(layer, name) // ranks)
    setattr(layer, name, size)
    for key, along in (("weight", dim),) if is_by_rows else (("weight", dim), ("bias", 0)):
        given = layer._parameters[key]
        if given is not None:
            # Make a new parameter: the old one may be tied.
            layer._parameters[key] = nn.Parameter(given.detach().narrow(along, 0, size).clone())


def restore(
    stage: nn.Module, model: nn.Module, names: Collection[str], elsewhere: Collection[str]
) -> set[str]:
    """Put the modules of ``model`` with ``names`` back into the traced ``stage``.

    Those that another stage has (``elsewhere``) are copied. Returns the restored names.
    """
    graph_module = next(part for part in stage.modules() if isinstance(part, fx.GraphModule))
    memo: dict[int, Any] = {}
    restored: set[str] = set()
    for node, name in list(_layers(graph_module, names)):
        if name not in restored:
            layer = model.get_submodule(name)
            given = copy.deepcopy(layer, memo) if name in elsewhere else layer
            graph_module.set_submodule(name, given)
            restored.add(name)
        inputs = [node.args[place] for place in _OPERATORS[node.target][0]]
        _call_instead(graph_module.graph, node, name, [x for x in inputs if x is not None])
    graph_module.recompile()
    return restored


def restore_attention(stage: nn.Module, forms: Sequence[AttentionForm]) -> None:
    """Put modules into the traced ``stage`` that compute attention of all ranks."""
    graph_module = next(part for part in stage.modules() if isinstance(part, fx.GraphModule))
    for node in [node for node in graph_module.graph.nodes if node.target is ATTENTION]:
        *inputs, number = node.args
        name = f"meshwright_attention_{number}"
        graph_module.add_submodule(name, TracedAttention(forms[number]))
        _call_instead(graph_module.graph, node, name, inputs)
    graph_module.recompile()


def _call_instead(graph: fx.Graph, node: fx.Node, name: str, inputs: Sequence[Any]) -> None:
    """Replace ``node`` by a call of the module ``name``, with what it alone has read."""
    with graph.inserting_before(node):
        call = graph.call_module(name, tuple(inputs))
    call.meta.update(node.meta)
    node.replace_all_uses_with(call)
    held = [given for given in node.all_input_nodes if given.op == "get_attr"]
    graph.erase_node(node)
    for given in held:
        if not given.users:
            graph.erase_node(given)


def _layers(module: fx.GraphModule, names: Collection[str]) -> Iterator[tuple[fx.Node, str]]:
    """Yield the nodes that call modules with ``names``, each with the module's name."""
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target not in _OPERATORS:
            continue
        given = node.args[_OPERATORS[node.target][1]]
        weight = given if isinstance(given, fx.Node) else given[0]
        if isinstance(weight, fx.Node) and weight.op == "get_attr":
            name = str(weight.target).rpartition(".")[0]
            if name in names:
                yield node, name
