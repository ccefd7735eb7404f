"""Stages of a traced model whose layers are cut over ranks of axis tensor.

Tracing takes modules apart, and knows no communication between ranks. So a twin of the model is
traced, whose layers have the sizes that the cut ones show to their surroundings, and afterwards
each of them is put back into its stage as the module it was, there to be cut::

    model -- twin --> pipeline() --> stages: ... linear(x, up.weight) ...
                                     restored: ... up(x) ...      cut like any other module
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from meshwright.errors import PlanError

__all__ = ["restore", "twin_of"]

_OUTPUTS_CUT = frozenset({"colwise"})
_INPUTS_CUT = frozenset({"rowwise"})
_SAME_SIZE = frozenset({"colwise_gathered", "rowwise_scattered", "embedding"})


def twin_of(model: nn.Module, styles: Mapping[str, str], ranks: int) -> nn.Module:
    """A copy of ``model`` that computes on one rank's sizes, to be traced and never to be run.

    Raises PlanError for styles whose modules cannot be found again in a trace.
    """
    known = _OUTPUTS_CUT | _INPUTS_CUT | _SAME_SIZE
    lost = [f"{name!r} ({style})" for name, style in styles.items() if style not in known]
    lost += [
        f"{name!r} ({type(model.get_submodule(name)).__name__})"
        for name in styles
        if type(model.get_submodule(name)) not in (nn.Linear, nn.Embedding)
    ]
    if lost:
        raise PlanError(
            "the model is no chain of modules, so its stages are traced graphs, in which these "
            f"modules cannot be found again to be cut on axis tensor: {', '.join(lost)}. Leave "
            "them out of [tensor] rules, or use axis tensor without axis pipeline"
        )
    twin = copy.deepcopy(model)
    for name, style in styles.items():
        module = twin.get_submodule(name)
        if style in _SAME_SIZE:
            continue
        if not isinstance(module, nn.Linear):
            raise PlanError(
                f"{name!r} is an embedding table cut by features ({style}), which a traced stage "
                'cannot have: give it the style "embedding"'
            )
        out, width = module.out_features, module.in_features
        # The largest part, on every rank: all must cut the model into the same stages.
        if style in _OUTPUTS_CUT:
            out = -(-out // ranks)
        else:
            width = -(-width // ranks)
        like = module.weight
        twin.set_submodule(
            name,
            nn.Linear(
                width, out, module.bias is not None, device=like.device, dtype=like.dtype
            ).train(module.training),
        )
    return twin


def restore(stage: nn.Module, model: nn.Module, styles: Mapping[str, str]) -> None:
    """Put the modules of ``model`` that ``styles`` name back into the traced ``stage``."""
    graph_module = _graph_of(stage)
    memo: dict[int, Any] = {}
    for node, name in list(_layers(graph_module, styles)):
        if not isinstance(_held(graph_module, name), nn.Linear | nn.Embedding):
            graph_module.set_submodule(name, copy.deepcopy(model.get_submodule(name), memo))
        x = node.args[1] if node.target is torch.ops.aten.embedding.default else node.args[0]
        with graph_module.graph.inserting_before(node):
            call = graph_module.graph.call_module(name, (x,))
        call.meta = copy.copy(node.meta)
        node.replace_all_uses_with(call)
        held = [given for given in node.all_input_nodes if given.op == "get_attr"]
        graph_module.graph.erase_node(node)
        for given in held:
            if not given.users:
                graph_module.graph.erase_node(given)
    graph_module.recompile()


def _graph_of(stage: nn.Module) -> fx.GraphModule:
    if isinstance(stage, fx.GraphModule):
        return stage
    return next(part for part in stage.modules() if isinstance(part, fx.GraphModule))


def _held(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def _layers(module: fx.GraphModule, styles: Mapping[str, str]) -> Iterator[tuple[fx.Node, str]]:
    """The calls of layers that are to be cut, each with its name."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten.linear.default:
            weight = node.args[1]
        elif node.target is torch.ops.aten.embedding.default:
            weight = node.args[0]
        else:
            continue
        if isinstance(weight, fx.Node) and weight.op == "get_attr":
            name = str(weight.target).rpartition(".")[0]
            if name in styles:
                yield node, name
