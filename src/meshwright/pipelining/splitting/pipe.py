"""`pipeline`: splits a model into stages by tracing it. The model itself is not changed."""

from __future__ import annotations

import contextlib
import inspect
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from traceback import walk_tb
from types import FunctionType
from typing import Any, Self

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from meshwright.errors import PipeliningShapeError
from meshwright.pipelining.edges import Source, StageEdges, Tie
from meshwright.pipelining.signature import (
    Signature,
    TensorMeta,
    Values,
    as_outputs,
    digest,
    signature_of,
)
from meshwright.pipelining.splitting.dropped import (
    assignments,
    key_in_trace,
    refuse_hooks,
    refuse_remembered,
    refuse_subclasses,
    watched_forward,
)
from meshwright.pipelining.splitting.split_points import SplitPoint, SplitPolicy, marked
from meshwright.pipelining.splitting.splitting import (
    Argument,
    Expected,
    SplitModel,
    Traced,
    cut,
    expected,
)
from meshwright.pipelining.stage import PipelineStage, build_stage
from meshwright.torch_internals.modules import HOOKS
from meshwright.torch_internals.trees import TreeSpec, tree_flatten, tree_leaves, tree_unflatten


class TracedStage(PipelineStage):
    """A stage of a `Pipe`.

    It compares the arguments of the batch and its own outputs with the trace: shapes, dtypes and,
    for arguments, strides and constants.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        device: torch.device,
        group: Any,  # noqa: ANN401
        edges: Sequence[StageEdges],
        arguments: Sequence[Argument],
        outputs: Sequence[Sequence[Expected | None]],
        ties: Sequence[Tie],
        split: int = 0,
    ) -> None:
        super().__init__(
            submodule, stage_index, len(edges), device, group=group, edges=edges, ties=ties
        )
        self._arguments_by_key = {argument.key: argument for argument in arguments}
        self._all_outputs = outputs
        self._outputs = tuple(outputs[stage_index])
        self._passed: Signature | None = None
        """The outputs that passed the comparison last, of a stage that sends them."""
        self.split = split
        """A digest of the operators of each stage, which ranks compare."""

    def takes_of(self, source: int) -> Signature | None:
        """See `PipelineStage`: taken from the trace; None where a size is dynamic."""
        leaves: list[TensorMeta] = []
        for wanted in self._all_outputs[source]:
            if wanted is None or None in wanted.shape:
                return None
            like = torch.empty([size or 0 for size in wanted.shape], device="meta")
            stride = like.stride() if wanted.stride is None else wanted.stride
            leaves.append(TensorMeta(tuple(like.shape), stride, wanted.dtype))
        return Signature(tuple(leaves))

    def check_microbatches(
        self, args: Sequence[tuple[Any, ...]], kwargs: Sequence[Mapping[str, Any]]
    ) -> None:
        """Compare the arguments of this rank's step with the trace, microbatch by microbatch.

        Raises `PipeliningShapeError` for other tensors or constants, ``ValueError`` for arguments
        that are missing or that the model does not have.
        """
        known = self._arguments_by_key
        positions = [key for key in known if isinstance(key, int)]
        named = set(kwargs[0]) if kwargs else set()
        self._check_given(len(args[0]) if args else 0, len(positions), named)
        for k, values in enumerate(args):
            problems: list[str] = []
            if self.is_first:
                for position, value in enumerate(values):
                    problems += self._problems(known[position], value, k)
            for name, value in (kwargs[k] if kwargs else {}).items():
                problems += self._problems(known[name], value, k)
            if problems:
                fixed = (
                    ". The graph has the sizes of the microbatch that it was traced with: batches "
                    "must be a multiple of it, or pipeline() be given dynamic_shapes"
                )
                raise PipeliningShapeError("; ".join(problems) + (fixed if k else ""))

    def _check_given(self, count: int, wanted: int, named: set[str]) -> None:
        if self.is_first and count != wanted:
            raise ValueError(
                f"{self.name} expects {wanted} positional arguments, as the model was traced with, "
                f"but this step got {count}"
            )
        unknown = sorted(named - {str(key) for key in self._arguments_by_key})
        if unknown:
            raise ValueError(
                f"step() got keyword arguments {unknown} that the model was not traced with: trace "
                "it with all of them in mb_kwargs"
            )
        missing = [
            name
            for name, source in self.edges.kwargs
            if source.stage is None
            and name not in named
            and not self._arguments_by_key[name].has_default
        ]
        if missing:
            raise ValueError(
                f"{self.name} reads the keyword arguments {missing} of the batch: give them to "
                f"step() on rank {self.group_rank} of the pipeline as well"
            )

    def _problems(self, argument: Argument, value: object, microbatch: int) -> list[str]:
        what = f"{self.name} argument {argument.name!r}, microbatch {microbatch},"
        leaves, spec = tree_flatten(value)
        if spec != argument.spec:
            return [f"{what} is nested differently: expected {argument.spec} actual {spec}"]
        found: list[str] = []
        for wanted, leaf in zip(argument.leaves, leaves, strict=True):
            found += mismatches(wanted, leaf, what)
        return found

    def _check_outputs(self, microbatch: int, values: Values) -> None:
        is_known = self._passed is not None and self._passed.describes(values)
        if is_known or not self.checks_outputs:
            return
        where = f"{self.name} output of microbatch {microbatch}"
        problems: list[str] = []
        if len(values.leaves) != len(self._outputs):
            problems.append(
                f"{where} has a shape mismatch: expected {len(self._outputs)} values actual "
                f"{len(values.leaves)}"
            )
        for wanted, leaf in zip(self._outputs, values.leaves, strict=False):
            if wanted is not None:
                problems += mismatches(wanted, leaf, where)
        if problems:
            raise PipeliningShapeError("; ".join(problems))
        if not self.is_last:
            self._passed = signature_of(values, where)


def mismatches(wanted: Expected | object, leaf: object, what: str) -> list[str]:
    """List the differences of ``leaf`` from what the trace has fixed."""
    if not isinstance(wanted, Expected):
        is_same = wanted is None or (type(leaf) is type(wanted) and leaf == wanted)
        return [] if is_same else [f"{what} was traced as {wanted!r}, actual {leaf!r}"]
    shape = ["any" if size is None else size for size in wanted.shape]
    if not isinstance(leaf, torch.Tensor):
        return [f"{what} is no tensor: expected shape {shape} actual {leaf!r}"]
    found = []
    is_shaped = len(shape) == leaf.dim() and all(
        want in ("any", got) for want, got in zip(shape, leaf.shape, strict=True)
    )
    if not is_shaped:
        found.append(f"{what} has a shape mismatch: expected {shape} actual {list(leaf.shape)}")
    elif wanted.stride is not None and not _same_stride(wanted.stride, leaf):
        found.append(
            f"{what} has a stride mismatch: expected {wanted.stride} actual {leaf.stride()}"
        )
    if wanted.dtype is not leaf.dtype:
        found.append(f"{what} has a dtype mismatch: expected {wanted.dtype} actual {leaf.dtype}")
    return found


def _same_stride(wanted: tuple[int, ...], leaf: torch.Tensor) -> bool:
    """Whether strides agree along each dim of more than one element."""
    steps = zip(wanted, leaf.stride(), leaf.shape, strict=True)
    return all(want == got or size <= 1 for want, got, size in steps)


_PREFIX = "submod_"
_NAMES_SHOWN = 40


class MultiUseParameterConfig(Enum):
    """What happens to a parameter that several stages use. As in torch, each stage gets a copy."""

    TRANSMIT = 1
    REPLICATE = 2


@dataclass
class PipeInfo:
    """The facts of a `Pipe` that `build_stage` needs, without its parameters."""

    graph: fx.Graph
    num_stages: int
    has_loss_and_backward: bool
    edges: tuple[StageEdges, ...] = ()
    """The sources of the arguments of each stage."""
    ties: tuple[Tie, ...] = ()
    """Parameters that several stages share."""
    arguments: tuple[Argument, ...] = ()
    """The arguments of the model, as it was traced."""
    outputs: tuple[tuple[Expected | None, ...], ...] = ()
    """The outputs of each stage, leaf by leaf; None for what is not a tensor."""
    split: int = 0
    """A digest of the operators of each stage, which must be equal on all ranks."""
    positions: tuple[str, ...] = ()
    """The names of the model's positional arguments."""

    def built(
        self, stage_module: nn.Module, stage_index: int, device: torch.device, group: object
    ) -> TracedStage:
        """Make the stage ``stage_index``, for `build_stage`."""
        calls = [node for node in self.graph.nodes if node.op == "call_module"]
        if len(calls) != self.num_stages:
            raise PipeliningShapeError(
                f"Number of submodules in pipe graph {len(calls)} does not match number of stages "
                f"{self.num_stages}"
            )
        if not 0 <= stage_index < self.num_stages:
            raise ValueError(f"Stage index {stage_index} is out of range of {self.num_stages}")
        return TracedStage(
            _moved(stage_module, device),
            stage_index,
            device,
            group,
            self.edges,
            self.arguments,
            self.outputs,
            self.ties,
            self.split,
        )


class _SplitGraph(fx.GraphModule):
    """The graph that calls the stages."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise RuntimeError(
            "To run pipeline locally, invoke the Pipe object directly, not `split_gm`"
        )


class _Detached(fx.Interpreter):
    """Runs stage by stage, each on detached inputs."""

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        args, kwargs = fx.node.map_aggregate((args, kwargs), _detached)
        return super().call_module(target, args, kwargs)


def _detached(value: Any) -> Any:  # noqa: ANN401
    if not isinstance(value, torch.Tensor) or not value.requires_grad or value.is_leaf:
        return value
    return value.detach().requires_grad_()


class Pipe(nn.Module):
    """A model as stages. Called, it runs all of them on this process.

    Attributes: ``split_gm`` (the stages as its children ``submod_0``, ...), ``executor``,
    ``num_stages``, ``has_loss_and_backward``, ``loss_spec``, and ``replicated_params``: for each
    parameter that several stages hold, its name in each of them. Every stage but the first has a
    copy of its own; all other parameters and buffers are those of the model that was traced.
    """

    def __init__(
        self,
        split_gm: fx.GraphModule,
        num_stages: int,
        has_loss_and_backward: bool,
        loss_spec: object,
    ) -> None:
        super().__init__()
        self.split_gm = split_gm
        self.executor = _Detached(split_gm)
        self.num_stages = num_stages
        self.has_loss_and_backward = has_loss_and_backward
        self.loss_spec = loss_spec
        graph = fx.Graph()  # that of split_gm would keep this object alive in an info
        graph.output(graph.graph_copy(split_gm.graph, {}))
        facts = split_gm.meta.get("facts", {})
        self._info = PipeInfo(graph, num_stages, has_loss_and_backward, **facts)
        self.replicated_params: list[dict[str, str]] = [
            {f"{_PREFIX}{stage}": name for stage, name in tie.names} for tie in self._info.ties
        ]

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run all stages here, each on detached inputs. Returns a tuple of the model's outputs.

        Arguments may come by position or keyword, as the model takes them, however they were
        traced. Raises `PipeliningShapeError` for constants that differ from those of the trace.
        """
        names, arguments = self._info.positions, self._info.arguments

        def named(key: int | str) -> int | str:
            return names[key] if isinstance(key, int) and key < len(names) else key

        given: list[Any] = []
        known = {named(argument.key): argument for argument in arguments}
        passed = {**{named(position): value for position, value in enumerate(args)}, **kwargs}
        wrong = [key for key in passed if key not in known]
        wrong += [key for key in map(named, range(len(args))) if key in kwargs]
        wrong += [key for key, a in known.items() if key not in passed and not a.has_default]
        if wrong:
            raise TypeError(f"expected the arguments {list(known)} of the trace; see {wrong}")
        for argument in _ordered(arguments):
            key = named(argument.key)
            given.append(passed[key] if key in passed else argument.leaves[0])
            if argument.has_default:
                problems = mismatches(argument.leaves[0], given[-1], f"argument {argument.name!r}")
                if problems:
                    raise PipeliningShapeError(problems[0])
        return as_outputs(self.executor.run(*given))

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """Return the module of one stage. Raises ``ValueError`` for an index outside the stages."""
        if not 0 <= stage_idx < self.num_stages:
            raise ValueError(f"Invalid stage index {stage_idx}!")
        return self.split_gm.get_submodule(f"{_PREFIX}{stage_idx}")

    def info(self) -> PipeInfo:
        """Return what `build_stage` needs, without a reference to this object."""
        return self._info

    def build_stage(
        self,
        stage_index: int,
        device: torch.device,
        group: Any = None,  # noqa: ANN401
    ) -> PipelineStage:
        """Make the stage ``stage_index`` on ``device``, for a schedule."""
        module = self.get_stage_module(stage_index)
        return build_stage(module, stage_index, self.info(), device, group)

    def print_readable(self) -> None:
        """Print the code of all stages."""
        self.split_gm.print_readable()

    @classmethod
    def _from_traced(
        cls,
        mod: nn.Module,
        exported_program: ExportedProgram,
        multi_use_param_spec: object = None,
        output_loss_value_spec: object = None,
        split_policy: SplitPolicy | None = None,
    ) -> Self:
        """Make a pipe of an exported model. Parameters of several stages are copied."""
        found = traced(mod, exported_program, split_policy)
        stages = cut(found)
        modules = {f"{_PREFIX}{index}": module for index, module in enumerate(stages.stages)}
        split_gm = _SplitGraph(modules, _calls(found, stages), "GraphModule")
        targets = [[_named(n.target) for n in stage.graph.nodes] for stage in stages.stages]
        split_gm.meta["facts"] = {
            "edges": stages.edges,
            "ties": stages.ties,
            "arguments": found.arguments,
            "outputs": stages.outputs,
            "split": digest(targets),
            "positions": _positions(found.model),
        }
        has_loss = output_loss_value_spec is not None
        return cls(split_gm, len(stages.stages), has_loss, output_loss_value_spec)

    @classmethod
    def from_tracing(
        cls,
        mod: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: dict[str, Any] | None = None,
        split_policy: SplitPolicy | None = None,
    ) -> Self:
        """Make a pipe of a model, traced with one microbatch."""
        program = export(mod, example_args, example_kwargs)
        return cls._from_traced(mod, program, split_policy=split_policy)


def _named(target: object) -> str:
    """Name the target of a node alike in every process: ``str`` of a function has its address."""
    if isinstance(target, FunctionType):
        return f"{target.__module__}.{target.__qualname__}"
    return str(target)


def _positions(model: nn.Module) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    listed = inspect.signature(model.forward).parameters.values()
    return tuple(each.name for each in listed if each.kind in kinds)


def _ordered(arguments: Iterable[Argument]) -> list[Argument]:
    """Order arguments as in a signature: those with defaults come last."""
    return sorted(arguments, key=lambda argument: argument.has_default)


def _calls(found: Traced, stages: SplitModel) -> fx.Graph:
    """Build the graph that calls the stages in order."""
    graph = fx.Graph()
    batch: dict[int | str | None, fx.Node] = {}
    for argument in _ordered(found.arguments):
        default = argument.leaves if argument.has_default else ()
        batch[argument.key] = graph.placeholder(argument.name, None, *default)
    results: list[fx.Node] = []
    taken: dict[Source, fx.Node] = {}

    def value(source: Source) -> fx.Node:
        if source.stage is None:
            return batch[source.output]
        if source not in taken:
            where = (results[source.stage], source.output)
            taken[source] = graph.call_function(operator.getitem, where)
        return taken[source]

    for index, edges in enumerate(stages.edges):
        args = tuple(value(source) for source in edges.args)
        kwargs: dict[str, fx.node.Argument] = {name: value(source) for name, source in edges.kwargs}
        results.append(graph.call_module(f"{_PREFIX}{index}", args, kwargs))
    graph.output(results[-1])
    return graph


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    *,
    dynamic_shapes: Any = None,  # noqa: ANN401
) -> Pipe:
    """Trace ``module`` with one microbatch, and split it into stages.

    It is split where its forward calls `pipe_split`, before or after the modules that
    ``split_spec`` names, and where ``split_policy`` puts markers. Parameters and buffers of the
    stages keep their names and are those of ``module``; where several stages use a parameter, all
    but the first get a copy. ``dynamic_shapes`` is torch.export's: sizes that may differ from
    those of the microbatch.

    A stage is one graph. Its submodules only carry the names of parameters. Branches that the
    model took in Python while it was traced, by its mode or by constants, are fixed. ``train`` and
    ``eval`` of a stage switch dropout and normalization, even dropout that the model keeps on in
    evaluation.

    Raises ``ValueError`` for ``split_spec`` with ``split_policy``, and for what a graph would drop:
    hooks of modules and of activations, the backward of an `autograd.Function`, recomputation,
    hooks of a parameter that several stages use. Raises ``AttributeError`` for modules that do not
    exist, ``RuntimeError`` if the model cannot be traced, with module, line and an alternative.
    """
    if split_spec is not None and split_policy is not None:
        raise ValueError(
            "Cannot specify both `split_spec` and `split_policy`. Please use only one of them."
        )
    with marked(module, split_spec) if split_spec else contextlib.nullcontext():
        program = export(module, mb_args, mb_kwargs, dynamic_shapes)
    return Pipe._from_traced(module, program, split_policy=split_policy)


# ----------------------------------------------------------------------------------- tracing


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


# ------------------------------------------------------------------------------------ devices


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """Move ``module`` and devices in its graphs to ``device``; parameters stay the same objects."""
    held = [*module.parameters(), *module.buffers()]
    if not any(tensor.is_meta for tensor in held):
        module.to(device)
    for graph_module in [m for m in module.modules() if isinstance(m, fx.GraphModule)]:
        nodes = _devices(graph_module, device)
        for node in nodes:
            for number, given in enumerate(node.args):
                node.update_arg(number, fx.node.map_aggregate(given, lambda a: _on(a, device)))
            for name, given in list(node.kwargs.items()):
                node.update_kwarg(name, fx.node.map_aggregate(given, lambda a: _on(a, device)))
        if nodes:
            graph_module.recompile()
    return module


def _devices(module: fx.GraphModule, device: torch.device) -> list[fx.Node]:
    """List nodes with a device argument of another type than ``device``."""
    found: list[fx.Node] = []
    for node in module.graph.nodes:
        named: list[Any] = []
        fx.node.map_aggregate((node.args, node.kwargs), named.append)
        if any(isinstance(value, torch.device) and value.type != device.type for value in named):
            found.append(node)
    return found


def _on(value: Any, device: torch.device) -> Any:  # noqa: ANN401
    return device if isinstance(value, torch.device) else value
