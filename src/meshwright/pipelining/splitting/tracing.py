"""Traces a module with one microbatch, by torch.export. The module is not changed."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from traceback import walk_tb
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from meshwright.pipelining.splitting.dropped import (
    assignments,
    key_in_trace,
    refuse_hooks,
    refuse_remembered,
    refuse_subclasses,
    watched_forward,
)
from meshwright.pipelining.splitting.splitting import Argument, Traced, expected
from meshwright.torch_internals.modules import HOOKS
from meshwright.torch_internals.trees import TreeSpec, tree_leaves, tree_unflatten

SplitPolicy = Callable[[fx.GraphModule], fx.GraphModule]
"""A function that puts split markers into a traced graph."""
_NAMES_SHOWN = 40


def export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any = None,  # noqa: ANN401
) -> ExportedProgram:
    """Export ``module`` for one microbatch.

    Raises ``TypeError`` for DTensors, ``RuntimeError`` when the module cannot be captured, and
    ``ValueError`` for what a graph would drop, by name.
    """
    refuse_hooks(
        module.named_modules(),
        "A traced stage calls no module: put what they do into forward, or cut the model between "
        "its modules, as parallelize cuts a chain and stages_by_name the modules that it is given",
        *HOOKS,
    )
    refuse_subclasses(module)
    for leaf in tree_leaves((args, dict(kwargs or {}))):
        if isinstance(leaf, torch.Tensor) and hasattr(leaf, "placements"):
            raise TypeError(
                "pipeline() cannot trace DTensor inputs; give local tensors, or build the stages "
                "by PipelineStage"
            )
    with _left_as_it_is(module), watched_forward(module), assignments(module) as replaced:
        program = _exported(module, args, kwargs, dynamic_shapes)
    refuse_remembered(replaced, program.constants)
    return program


@contextlib.contextmanager
def _left_as_it_is(module: nn.Module) -> Iterator[None]:
    """Restore attributes that the traced forward has set: they are tensors of the trace."""
    before = [(vars(part), dict(vars(part))) for part in module.modules()]
    try:
        yield
    finally:
        for held, kept in before:
            for key in held.keys() - kept.keys():
                del held[key]
            held.update(kept)


def _exported(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,  # noqa: ANN401
) -> ExportedProgram:
    try:
        with warnings.catch_warnings():
            # Harmful assignments are rejected separately; recurrent layers also trigger this.
            warnings.filterwarnings("ignore", "The tensor attributes? self")
            return torch.export.export(
                module, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
            )
    except Exception as error:
        _refuse_outputs(module, error)
        names = [name for name, _ in module.named_modules() if name]
        shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
        raise RuntimeError(
            "It seems that we cannot capture your model as a full graph: "
            f"{_place(module, error)}{type(error).__name__}: {_first_line(error)}. Typical reasons "
            "are control flow that depends on the values of tensors and calls out of torch. "
            "Without a trace, give the parts of the model by name to stages_by_name, or modules "
            f"of your own to PipelineStage. Modules of the model: {shown}"
        ) from error


def _refuse_outputs(module: nn.Module, error: Exception) -> None:
    """Raise RuntimeError if ``error`` is about an output of the model that no stage can send."""
    found = re.search(r"Found <class '(\S+)'> in output, which is not a known type", str(error))
    if found is not None:
        raise RuntimeError(
            f"expected {type(module).__name__} to return tensors, alone or in tuples, lists and "
            f"dicts, found a {found[1]}, which stages cannot send. If that is the cache of keys "
            "and values of a model of transformers, make or load it with use_cache=False"
        ) from error


def _place(module: nn.Module, error: BaseException) -> str:
    """The innermost module of the model in the traceback of ``error``, and its line."""
    names = {
        key_in_trace(child): name or type(child).__name__ for name, child in module.named_modules()
    }
    found = ""
    for frame, line in walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        file = frame.f_code.co_filename
        name = names.get(key_in_trace(owner)) if isinstance(owner, nn.Module) else None
        if name is not None and "torch/nn/modules/module.py" not in file:
            found = f"in module {name!r} ({file}:{line}), "
    return found


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else "no message"


def traced(model: nn.Module, program: ExportedProgram, policy: SplitPolicy | None) -> Traced:
    """Return the graph of an exported model, with the markers of ``policy`` added."""
    mutated = program.graph_signature.user_inputs_to_mutate
    if mutated:
        raise ValueError(
            f"the model changes its inputs {sorted(set(mutated.values()))} in place, which a "
            "pipeline cannot do for the caller; let it work on copies"
        )
    in_spec, out_spec = program.call_spec.in_spec, program.call_spec.out_spec
    if in_spec is None or out_spec is None:
        raise ValueError("the exported program does not say how its arguments are nested")
    module = program.module(check_guards=False)
    if not isinstance(module, fx.GraphModule):
        raise TypeError(f"expected an exported graph, found {type(module).__name__}")
    if policy is not None:
        module = policy(module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return Traced(module, model, _arguments(placeholders, in_spec), out_spec)


def _arguments(placeholders: Sequence[fx.Node], in_spec: TreeSpec) -> tuple[Argument, ...]:
    args, kwargs = tree_unflatten(placeholders, in_spec)
    args_spec, kwargs_spec = in_spec.children()
    found: list[Argument] = []
    keyed = [*enumerate(args), *kwargs.items()]
    for (key, value), spec in zip(
        keyed, [*args_spec.children(), *kwargs_spec.children()], strict=True
    ):
        nodes = tree_leaves(value)
        name = key if isinstance(key, str) else f"arg_{key}"
        if isinstance(key, int) and spec.is_leaf():
            name = str(nodes[0].target)
        found.append(Argument(key, tuple(map(_leaf, nodes)), spec, name))
    return tuple(found)


def _leaf(node: fx.Node) -> Any:  # noqa: ANN401
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return expected(value, has_stride=True)
    return None if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value
