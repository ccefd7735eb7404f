"""Stages of a traced model with layers sharded over axis tensor.

Tracing dissolves modules, and cannot trace communication between ranks. So a twin of the model is
traced whose layers have the sizes of sharded ones; afterwards each layer is put back into its stage
as a module, to be sharded there::

    model -- twin --> pipeline() --> stages: ... linear(x, up.weight) ...
                                     restored: ... up(x) ...      sharded like any other module
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from meshwright.composition.example_run import copied
from meshwright.composition.tensor_axis.tensor_rules import ModelCut
from meshwright.errors import PlanError
from meshwright.tensor_parallel.layers.linear import is_conv1d

_OUTPUTS_CUT = frozenset({"colwise", "colwise_2", "colwise_3"})
_INPUTS_CUT = frozenset({"rowwise"})
_SAME_SIZE = frozenset({"colwise_gathered", "rowwise_scattered", "embedding"})

_OPERATORS: Mapping[object, tuple[int, int]] = {
    torch.ops.aten.linear.default: (0, 1),
    torch.ops.aten.embedding.default: (1, 0),
    torch.ops.aten.addmm.default: (1, 2),
}
"""The operators that layers are traced to, with the positions of input and weight."""


def twin_of(model: nn.Module, cut: ModelCut) -> nn.Module:
    """Make a copy of ``model`` with one rank's sizes, to be traced only.

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
    return twin


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
    stage: nn.Module, model: nn.Module, styles: Mapping[str, str], elsewhere: Collection[str]
) -> set[str]:
    """Put the modules of ``model`` that ``styles`` name back into the traced ``stage``.

    Those that another stage has (``elsewhere``) are copied. Returns the restored names.
    """
    graph_module = next(part for part in stage.modules() if isinstance(part, fx.GraphModule))
    memo: dict[int, Any] = {}
    restored: set[str] = set()
    for node, name in list(_layers(graph_module, styles)):
        if name not in restored:
            layer = model.get_submodule(name)
            given = copy.deepcopy(layer, memo) if name in elsewhere else layer
            graph_module.set_submodule(name, given)
            restored.add(name)
        x = node.args[_OPERATORS[node.target][0]]
        with graph_module.graph.inserting_before(node):
            call = graph_module.graph.call_module(name, (x,))
        call.meta.update(node.meta)
        node.replace_all_uses_with(call)
        held = [given for given in node.all_input_nodes if given.op == "get_attr"]
        graph_module.graph.erase_node(node)
        for given in held:
            if not given.users:
                graph_module.graph.erase_node(given)
    graph_module.recompile()
    return restored


def _layers(module: fx.GraphModule, styles: Mapping[str, str]) -> Iterator[tuple[fx.Node, str]]:
    """Yield the nodes that call styled layers, each with the layer's name."""
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target not in _OPERATORS:
            continue
        weight = node.args[_OPERATORS[node.target][1]]
        if isinstance(weight, fx.Node) and weight.op == "get_attr":
            name = str(weight.target).rpartition(".")[0]
            if name in styles:
                yield node, name
