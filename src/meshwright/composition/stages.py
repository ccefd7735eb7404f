"""A model cut into stages: as a chain of its own modules where it is one, else by tracing it.

Whether it is a chain is seen, not assumed: a copy of the model runs once on the example, and each
module must be called once, with the very tensors that the one before has returned, untouched.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.composition.tensor_rules import ModelCut
from meshwright.composition.tensor_twin import restore, twin_of
from meshwright.errors import PlanError
from meshwright.pipelining import PipeInfo, SplitPoint, Tie, pipeline, stages_by_name
from meshwright.pipelining.balance import balanced
from meshwright.plan import PipelinePlan
from meshwright.randomness import Dropout

__all__ = ["CutModel", "Inputs", "chunks_of", "cut_model"]

Inputs = tuple[Any, ...] | Mapping[str, Any]
"""Of a model: positional arguments, or keyword arguments."""
TWO_A_RANK = ("interleaved1f1b", "loopedbfs", "zbv", "dualpipev")
"""Schedules that are made for several stages a rank; two unless ``split`` says."""


@dataclass(slots=True)
class CutModel:
    """The stages of a model, in their order."""

    modules: list[nn.Module]
    ties: tuple[Tie, ...] = ()
    info: PipeInfo | None = None
    """What the stages of a traced model are built with; None for a chain."""


@dataclass(slots=True)
class _Call:
    """One call of a module."""

    name: str
    inputs: list[tuple[int, int]] = field(default_factory=list)
    """Identity and version of each argument."""
    outputs: list[tuple[int, int]] = field(default_factory=list)
    has_keywords: bool = False


def chunks_of(plan: PipelinePlan, ranks: int) -> int:
    """How many stages each of ``ranks`` holds. Raises ``PlanError`` when ``split`` does not fit."""
    if isinstance(plan.split, str):
        return 2 if plan.schedule in TWO_A_RANK else 1
    stages = len(plan.split) + 1
    if stages % ranks:
        raise PlanError(
            f"[pipeline] split has {len(plan.split)} cuts, which makes {stages} stages: not a "
            f"multiple of the {ranks} ranks on axis pipeline"
        )
    return stages // ranks


def cut_model(
    model: nn.Module,
    plan: PipelinePlan,
    ranks: int,
    example: Inputs,
    *,
    tensor: ModelCut,
) -> CutModel:
    """The stages of ``model``, with its parameters under its names.

    ``split`` names the modules that stages begin with. By default stages are balanced by what they
    multiply by (``auto``: the operations of a traced model; of the modules of a chain parameters of
    two and more dims, but for embedding tables, which are looked up), or by parameters. The stages
    can be cut as ``tensor`` says afterwards. Raises ``PlanError`` where the model cannot be cut so.
    """
    count = chunks_of(plan, ranks) * ranks
    links = _chain(model, example)
    if links is not None:
        starts = _starts(model, plan, links, count)
        bounds = [0, *(links.index(name) for name in starts), len(links)]
        names = [links[a:b] for a, b in itertools.pairwise(bounds)]
        modules = stages_by_name(model, names)
        return CutModel(modules, ties=_ties(modules))
    dropout = [name for name, part in model.named_modules() if isinstance(part, Dropout)]
    if dropout:
        raise PlanError(
            'train.dropout = "global": the model is no chain of modules, so stages are traced '
            f"graphs, which do not ask in which step they run. Set {dropout[0]!r} to p = 0, or "
            'use dropout = "local"'
        )
    named = dict(example) if isinstance(example, Mapping) else {}
    args = () if isinstance(example, Mapping) else example
    # torch.export takes the sizes of named arguments by name, those of others in their order.
    sizes: Any = {name: _free_size(value) for name, value in named.items()}
    sizes = sizes or tuple(map(_free_size, args))
    cuts: dict[str, Any] = {}
    if isinstance(plan.split, str):
        measure = "flops" if plan.split == "auto" else plan.split
        cuts["split_policy"] = balanced(count, measure)
    else:
        names = [name for name, _ in model.named_modules() if name]
        starts = _starts(model, plan, names, count)
        cuts["split_spec"] = dict.fromkeys(starts, SplitPoint.BEGINNING)
    traced = twin_of(model, tensor) if tensor.styles else model
    try:
        pipe = pipeline(traced, args, named, dynamic_shapes=sizes, **cuts)
    except ValueError as error:
        raise PlanError(f"the model cannot be cut into {count} stages: {error}") from error
    if pipe.num_stages != count:
        raise PlanError(
            f"[pipeline] split = {plan.split!r} cuts the model into {pipe.num_stages} stages, "
            f"expected {count}: name other modules"
        )
    info = pipe.info()
    modules = [pipe.get_stage_module(n) for n in range(count)]
    restored: set[str] = set()
    for module in modules if tensor.styles else ():
        restored |= restore(module, model, tensor.styles, restored)
    _keep_unused(model, modules)
    return CutModel(modules, info.ties, info)


def _free_size(value: object) -> dict[int, Any] | None:
    """Microbatches may have another number of rows than the example."""
    has_rows = isinstance(value, torch.Tensor) and value.dim()
    return {0: torch.export.Dim.AUTO} if has_rows else None


def _keep_unused(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Give the first stage what of the state of ``model`` no stage computes with.

    Raises PlanError for another name of a parameter that a stage has.
    """
    held = {name for module in modules for name in module.state_dict()}
    used = {id(p) for n, p in model.named_parameters(remove_duplicate=False) if n in held}
    first = modules[0]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in held:
            continue
        if id(tensor) in used:
            raise PlanError(
                f"parameter {name!r} is tied to one that the model uses, but is not used under "
                "this name itself, which a traced stage cannot keep: remove it from the model"
            )
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        if (
            path
            and not [*owner.children()]
            and not held & {f"{path}.{n}" for n in owner.state_dict()}
        ):
            above, _, last = path.rpartition(".")
            _made(first, above).add_module(last, owner)  # whole, so that it can be cut as others
        elif isinstance(tensor, nn.Parameter):
            _made(first, path).register_parameter(leaf, tensor)
        else:
            _made(first, path).register_buffer(leaf, tensor)


def _made(module: nn.Module, path: str) -> nn.Module:
    """The submodule at ``path``, with all above it."""
    for name in path.split(".") if path else ():
        if not isinstance(getattr(module, name, None), nn.Module):
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module


# ------------------------------------------------------------------------------------- chains


def _links(model: nn.Module, prefix: str = "") -> Iterator[str]:
    """The modules that the forward of ``model`` can call: its children, lists by their items."""
    for name, child in model.named_children():
        full = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict) or type(child) is nn.Sequential:
            yield from _links(child, f"{full}.")
        else:
            yield full


def _chain(model: nn.Module, example: Inputs) -> list[str] | None:
    """The modules of ``model`` in the order of their calls, where it is a chain of them."""
    names = list(_links(model))
    has_hooks = bool(model._forward_hooks or model._forward_pre_hooks)
    if len(names) < 2 or has_hooks or model._parameters or model._buffers:
        return None
    if isinstance(example, Mapping):
        return None
    observed = copy.deepcopy(model)
    calls: list[_Call] = []
    kept: list[object] = []  # an identity means something only while its object lives
    for name in names:
        part = observed.get_submodule(name)
        part.register_forward_pre_hook(_opens(name, calls, kept), with_kwargs=True)
        part.register_forward_hook(_closes(calls, kept))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        result = observed(*example)
    if [call.name for call in calls] != list(dict.fromkeys(call.name for call in calls)):
        return None
    if {call.name for call in calls} != set(names) or any(call.has_keywords for call in calls):
        return None
    passed = _marks(example)
    for call in calls:
        if call.inputs != passed:
            return None
        passed = call.outputs
    return [call.name for call in calls] if _marks(result) == passed else None


def _opens(name: str, calls: list[_Call], kept: list[object]) -> Any:  # noqa: ANN401 - a hook
    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept.append(args)
        calls.append(_Call(name, _marks(args), has_keywords=bool(kwargs)))

    return note


def _closes(calls: list[_Call], kept: list[object]) -> Any:  # noqa: ANN401 - a hook
    def note(_: nn.Module, __: object, output: object) -> None:
        kept.append(output)
        calls[-1].outputs = _marks(output)

    return note


def _marks(values: object) -> list[tuple[int, int]]:
    """Which objects ``values`` are, and how often they have been written to."""
    listed = values if isinstance(values, tuple) else (values,)
    return [(id(value), getattr(value, "_version", 0)) for value in listed]


def _ties(modules: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """Parameters that several stages hold, by their first name in each."""
    holders: dict[nn.Parameter, list[tuple[int, str]]] = {}
    for stage, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            holders.setdefault(parameter, []).append((stage, name))
    return tuple(Tie(names[0][0], tuple(names)) for names in holders.values() if len(names) > 1)


# ------------------------------------------------------------------------------------ balance


def _starts(
    model: nn.Module, plan: PipelinePlan, links: Sequence[str], count: int
) -> Sequence[str]:
    """The names of the modules that stages begin with, but for the first stage."""
    if not isinstance(plan.split, str):
        unknown = [name for name in plan.split if name not in links]
        if unknown or [*plan.split] != [name for name in links if name in plan.split]:
            raise PlanError(
                f"[pipeline] split names {unknown or list(plan.split)}: expected some of "
                f"{', '.join(links)}, in this order"
            )
        return plan.split
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
    # One each for what costs little, so that no stage is without any parameter.
    return sum(
        1 if parameter.dim() < 2 or id(parameter) in tables else parameter.numel()
        for parameter in module.parameters()
    )


def _partition(costs: Sequence[int], count: int) -> list[int]:
    """Where ``count`` runs of ``costs`` begin whose largest sum is as small as it can be.

    A run without any cost counts as endless, so none is made where another cut is possible.
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
