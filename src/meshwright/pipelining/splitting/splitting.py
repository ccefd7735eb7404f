"""Splits a traced graph into the modules of its stages, with the edges between them.

A graph has the mode in which the model was traced. The operators that differ between training and
evaluation are listed here, so that `train` and `eval` of a stage switch them. Branches that the
model took in Python during the trace are fixed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import fx, nn

from meshwright.pipelining.edges import Source, StageEdges
from meshwright.pipelining.splitting.placement import Placement, assigns, attribute
from meshwright.pipelining.splitting.split_points import is_marker
from meshwright.pipelining.ties import Tie, copy_parameter
from meshwright.torch_internals.autograd import after_hooks_of, backward_hooks_of
from meshwright.torch_internals.modules import non_persistent_buffers_of
from meshwright.torch_internals.tensors import OpOverload, any_schema_of, schema_of
from meshwright.torch_internals.trees import TreeSpec, tree_leaves, tree_unflatten

_MODE_ARGUMENTS: Mapping[str, str] = {
    "aten::dropout": "train",
    "aten::dropout_": "train",
    "aten::alpha_dropout": "train",
    "aten::alpha_dropout_": "train",
    "aten::feature_dropout": "train",
    "aten::feature_dropout_": "train",
    "aten::feature_alpha_dropout": "train",
    "aten::feature_alpha_dropout_": "train",
    "aten::rrelu": "training",
    "aten::rrelu_": "training",
    "aten::batch_norm": "training",
    "aten::instance_norm": "use_input_stats",
    "aten::lstm": "train",
    "aten::gru": "train",
    "aten::rnn_tanh": "train",
    "aten::rnn_relu": "train",
    "aten::scaled_dot_product_attention": "dropout_p",
}
"""By operator, the argument that sets its mode."""
_COUNTER = "num_batches_tracked"
_NEEDS_STATISTICS = ("aten::batch_norm", "aten::instance_norm")


@dataclass(frozen=True, slots=True)
class Expected:
    """The properties of a tensor that the trace has fixed."""

    shape: tuple[int | None, ...]
    """None for a dynamic size."""
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None
    """None where it is not compared."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of the model."""

    key: int | str
    """Its position, or its keyword."""
    leaves: tuple[Expected | Any, ...]
    """`Expected` for tensors; for the rest, the constants of the trace."""
    spec: TreeSpec
    name: str

    def __deepcopy__(self, memo: dict[int, Any]) -> Argument:
        return self

    @property
    def has_default(self) -> bool:
        """True for a constant of the graph, which the caller may omit."""
        return self.spec.is_leaf() and not isinstance(self.leaves[0], Expected)


@dataclass(slots=True)
class Traced:
    """A model as one graph, which takes the flat leaves of its arguments."""

    module: fx.GraphModule
    model: nn.Module
    arguments: tuple[Argument, ...]
    out_spec: TreeSpec


@dataclass(slots=True)
class SplitModel:
    """The stages of a model."""

    stages: list[StageModule]
    edges: tuple[StageEdges, ...]
    outputs: tuple[tuple[Expected | None, ...], ...]
    """By stage, its outputs leaf by leaf; None for what is not a tensor."""
    ties: tuple[Tie, ...]


@dataclass(slots=True)
class _Stage:
    """A stage under construction."""

    index: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    root: nn.Module = field(default_factory=nn.Module)
    env: dict[fx.Node, fx.Node] = field(default_factory=dict)
    outputs: list[fx.Node] = field(default_factory=list)
    """Nodes of the traced graph that later stages read from here."""
    args: list[Source] = field(default_factory=list)
    kwargs: dict[str, Source] = field(default_factory=dict)
    modes: dict[str, tuple[str, Any, Any]] = field(default_factory=dict)
    transient: list[str] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """By name, the tensors of ``root``."""


def cut(traced: Traced) -> SplitModel:
    """Split a graph at its markers. Raises ``ValueError`` where it cannot be split."""
    return _Cutter(traced).run()


class _Cutter:
    """Makes the graphs of all stages from that of the model."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.graph = traced.module.graph
        self.placement = Placement(traced.module)
        self.stages = [_Stage(index) for index in range(self.placement.stages)]
        self.names = _names(traced.model)
        self.persistent = set(traced.model.state_dict(keep_vars=True))
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        self.leaf: dict[fx.Node, tuple[Argument, int]] = {}
        for argument in traced.arguments:
            for number in range(len(argument.leaves)):
                self.leaf[placeholders[len(self.leaf)]] = (argument, number)
        (self.output,) = (n for n in self.graph.nodes if n.op == "output")

    def run(self) -> SplitModel:
        self._read_across()
        for stage in self.stages:
            self._begin(stage)
        for stage in self.stages:
            self._fill(stage)
        modules = [self._finish(stage) for stage in self.stages]
        return SplitModel(
            modules,
            tuple(StageEdges(tuple(s.args), tuple(s.kwargs.items())) for s in self.stages),
            tuple(self._expected(stage) for stage in self.stages),
            self._tie(modules),
        )

    # ------------------------------------------------------------------------- edges

    def _reads(self, stage: _Stage) -> list[fx.Node]:
        """List what the nodes of a stage read, including nodes that run everywhere, in order."""
        place = self.placement
        mine = [n for n in place.nodes if place.stage.get(n) == stage.index]
        mine = [n for n in mine if n.op != "placeholder" and not self._is_check(n, stage)]
        if stage.index == len(self.stages) - 1:
            mine.append(self.output)
        return list(dict.fromkeys(a for n in mine for a in n.all_input_nodes))

    def _is_check(self, node: fx.Node, stage: _Stage) -> bool:
        """Whether a node marks a split, or only asserts something of another stage's values."""
        if is_marker(node):
            return True
        place = self.placement
        schema = any_schema_of(node.target)
        if schema is None or schema.returns or node in place.writes:
            return False
        return any(place.stage.get(a, stage.index) != stage.index for a in node.all_input_nodes)

    def _read_across(self) -> None:
        """Make each stage output what later stages read of it, and note keyword arguments."""
        for stage in self.stages:
            for value in self._reads(stage):
                made = self.placement.stage.get(value)
                if made is None or made == stage.index or self._keyword(value):
                    if self._keyword(value):
                        key = self.leaf[value][0].key
                        stage.kwargs.setdefault(str(key), Source(None, key))
                    continue
                outputs = self.stages[self.placement.home(value, stage.index)].outputs
                if value not in outputs:
                    outputs.append(value)
        for argument in self.traced.arguments:
            if isinstance(argument.key, str):
                is_used = any(argument.key in stage.kwargs for stage in self.stages)
                if not is_used:
                    self.stages[0].kwargs[argument.key] = Source(None, argument.key)

    def _keyword(self, value: fx.Node) -> bool:
        return value in self.leaf and isinstance(self.leaf[value][0].key, str)

    # ------------------------------------------------------------------------- graphs

    def _begin(self, stage: _Stage) -> None:
        """Make the placeholders of a stage, and the nodes that unpack them."""
        taken = {a.key for a in self.traced.arguments}
        if stage.index == 0:
            for argument in self.traced.arguments:
                if isinstance(argument.key, int):
                    stage.args.append(Source(None, argument.key))
                    self._take(stage, argument, stage.graph.placeholder(argument.name))
        clones: list[tuple[fx.Node, fx.Node]] = []
        for value in self._across(stage):
            home = self.placement.home(value, stage.index)
            stage.args.append(Source(home, self.stages[home].outputs.index(value)))
            name = value.name if value.name not in taken else f"{value.name}_"
            given = stage.graph.placeholder(name)
            given.meta.update(value.meta)
            stage.env[value] = given
            if stage.index in self.placement.changed_in(value):
                clones.append((value, given))
        named = [a for a in self.traced.arguments if a.key in stage.kwargs]
        for argument in sorted(named, key=lambda a: a.has_default):
            default = argument.leaves if argument.has_default else ()
            given = stage.graph.placeholder(str(argument.key), None, *default)
            self._take(stage, argument, given)
        for value, given in clones:
            stage.env[value] = stage.graph.call_function(torch.ops.aten.clone.default, (given,))

    def _across(self, stage: _Stage) -> list[fx.Node]:
        """List what a stage gets from earlier stages: values it reads, and values it passes on."""
        found = [v for v in [*self._reads(stage), *stage.outputs] if not self._keyword(v)]
        return [v for v in dict.fromkeys(found) if self.placement.stage.get(v, 9**9) < stage.index]

    def _take(self, stage: _Stage, argument: Argument, given: fx.Node) -> None:
        """Map the leaves of an argument to nodes that extract them from ``given``."""
        nodes = [node for node, (owner, _) in self.leaf.items() if owner is argument]
        if argument.spec.is_leaf():
            stage.env[nodes[0]] = given
            given.meta.update(nodes[0].meta)
            return
        leaves = stage.graph.call_function(tree_leaves, (given,))
        for number, node in enumerate(nodes):
            stage.env[node] = stage.graph.call_function(operator.getitem, (leaves, number))

    def _fill(self, stage: _Stage) -> None:
        place = self.placement
        for node in place.nodes:
            is_here = place.stage.get(node) == stage.index and node.op != "placeholder"
            if is_here and not self._is_check(node, stage):
                self._copy(stage, node)
        if stage.index == len(self.stages) - 1:
            flat = fx.node.map_arg(self.output.args[0], lambda n: self._local(stage, n))
            stage.graph.output(self._nested(stage, flat))
        else:
            stage.graph.output(tuple(self._local(stage, value) for value in stage.outputs))

    def _local(self, stage: _Stage, node: fx.Node) -> fx.Node:
        """Return a stage's copy of a node of the model, made on first use."""
        if node not in stage.env:
            self._copy(stage, node)
        return stage.env[node]

    def _copy(self, stage: _Stage, node: fx.Node) -> None:
        if node.op == "get_attr":
            stage.env[node] = self._held(stage, node, None)
            return

        def local(value: fx.Node) -> fx.Node:
            if value.op == "get_attr":
                return self._held(stage, value, node)
            return self._local(stage, value)

        copied = stage.graph.node_copy(node, local)
        stage.env[node] = copied
        modes = follow_mode(copied, is_training=self.traced.model.training)
        if modes is not None:
            stage.modes[copied.name] = modes

    def _nested(self, stage: _Stage, flat: Any) -> Any:  # noqa: ANN401
        """Nest the leaves as the model's output."""
        spec = self.traced.out_spec
        leaves = _listed(flat)
        if spec.is_leaf():
            return leaves[0]
        if spec.type is tuple and all(child.is_leaf() for child in spec.children()):
            return tuple(leaves)
        setattr(stage.root, "nesting", Nesting(spec))  # noqa: B010
        return stage.graph.call_function(nested, (stage.graph.get_attr("nesting"), leaves))

    # --------------------------------------------------------------------- attributes

    def _held(self, stage: _Stage, node: fx.Node, user: fx.Node | None) -> fx.Node:
        """Make a ``get_attr`` node for a tensor or graph, named as in the module of ``user``."""
        value = attribute(self.traced.module, node)
        name = str(node.target)
        if isinstance(value, torch.Tensor):
            name = _best_name(self.names.get(id(value), ()), name, user)
        self._put(stage, name, value)
        held = stage.graph.get_attr(name)
        held.meta.update(node.meta)
        return held

    def _put(self, stage: _Stage, name: str, value: object) -> None:
        path, _, leaf = name.rpartition(".")
        owner = stage.root
        for part in path.split(".") if path else ():
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if not isinstance(value, torch.Tensor):
            setattr(owner, leaf, value)
            return
        if name in stage.tensors:
            return
        stage.tensors[name] = value
        if isinstance(value, nn.Parameter):
            owner.register_parameter(leaf, value)
            return
        is_persistent = name in self.persistent
        owner.register_buffer(leaf, value, persistent=is_persistent)
        if not is_persistent:
            stage.transient.append(name)

    # ------------------------------------------------------------------------- result

    def _finish(self, stage: _Stage) -> StageModule:
        is_training = self.traced.model.training
        _read_copies(stage.graph)
        stage.graph.lint()
        module = StageModule(stage.root, stage.graph)
        module.keep(tuple(stage.transient), stage.modes, is_training=is_training)
        return module

    def _expected(self, stage: _Stage) -> tuple[Expected | None, ...]:
        if stage.index < len(self.stages) - 1:
            nodes: Iterable[Any] = stage.outputs
        else:
            nodes = _listed(self.output.args[0])
        found = []
        for node in nodes:
            value = node.meta.get("val") if isinstance(node, fx.Node) else None
            found.append(expected(value) if isinstance(value, torch.Tensor) else None)
        return tuple(found)

    def _tie(self, modules: list[StageModule]) -> tuple[Tie, ...]:
        """Give every stage but the first its own copy of a parameter that several stages use."""
        ties = ties_of(modules)
        for tie in ties:
            _refuse_hooks(tie, modules[tie.owner].get_parameter(tie.names[0][1]))
            for index, name in tie.names[1:]:
                _replace(modules[index], name)
        return ties


def ties_of(modules: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """List the parameters that several of ``modules`` share, by their first name in each."""
    holders: dict[nn.Parameter, list[tuple[int, str]]] = {}
    for stage, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            holders.setdefault(parameter, []).append((stage, name))
    return tuple(Tie(names[0][0], tuple(names)) for names in holders.values() if len(names) > 1)


def _read_copies(graph: fx.Graph) -> None:
    """Make ``graph`` read buffers that it assigns from copies: the backward may have saved them."""
    assigned = {str(node.args[0].target) for node in graph.nodes if assigns(node)}
    for node in list(graph.nodes):
        if node.op != "get_attr" or str(node.target) not in assigned:
            continue
        readers = [user for user in node.users if not (assigns(user) and user.args[0] is node)]
        if readers:
            with graph.inserting_after(node):
                copied = graph.call_function(torch.ops.aten.clone.default, (node,))
            copied.meta.update(node.meta)
            for reader in readers:
                reader.replace_input_with(node, copied)


def _replace(module: nn.Module, name: str) -> None:
    """Give ``module`` its own copy of a parameter, under all its names there."""
    old = module.get_parameter(name)
    new = copy_parameter(old)
    for owner in module.modules():
        for leaf, parameter in list(owner._parameters.items()):
            if parameter is old:
                owner._parameters[leaf] = new


def _refuse_hooks(tie: Tie, parameter: nn.Parameter) -> None:
    """Raise ValueError for hooks of a parameter that is about to be copied."""
    if backward_hooks_of(parameter) or after_hooks_of(parameter):
        raise ValueError(
            f"parameter {tie.names[0][1]!r} has hooks for its gradient, and stages "
            f"{[stage for stage, _ in tie.names]} use it: each has a part of the gradient, which "
            "the hooks would take for the whole: remove the hooks, or untie it"
        )


def expected(value: torch.Tensor, *, has_stride: bool = False) -> Expected:
    """Describe the properties of a tensor that the trace has fixed."""
    shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    stride = value.stride()
    if not has_stride or not all(isinstance(step, int) for step in stride):
        return Expected(shape, value.dtype)
    return Expected(shape, value.dtype, stride)


def _listed(flat: Any) -> list[Any]:  # noqa: ANN401
    return list(flat) if isinstance(flat, Sequence) else [flat]


def _names(model: nn.Module) -> Mapping[int, list[str]]:
    """Map the ``id`` of each parameter and buffer of the model to all its names."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        found.setdefault(id(buffer), []).append(name)
    return found


def _best_name(names: Iterable[str], default: str, user: fx.Node | None) -> str:
    """Choose the name of a tensor in the innermost module that uses it."""
    stack = (user.meta.get("nn_module_stack") or {}) if user is not None else {}
    paths = [entry[0] for entry in stack.values()]
    for path in reversed(paths):
        for name in names:
            if name.rpartition(".")[0] == path:
                return name
    return default


# ----------------------------------------------------------------------------- stage modules


class Nesting:
    """The nesting of the model's outputs. It never changes, and copies of a stage share it."""

    def __init__(self, spec: TreeSpec) -> None:
        self.spec = spec

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def nested(nesting: Nesting, leaves: list[Any]) -> Any:  # noqa: ANN401
    """Nest the leaves as the model's output."""
    return tree_unflatten(leaves, nesting.spec)


class StageModule(fx.GraphModule):
    """The graph of one stage.

    ``meta["transient"]`` names the buffers that are not part of the state, ``meta["modes"]`` the
    arguments that follow the mode, ``meta["training"]`` the mode in which the model was traced.
    """

    def keep(
        self,
        transient: tuple[str, ...],
        modes: Mapping[str, tuple[str, Any, Any]],
        *,
        is_training: bool,
    ) -> None:
        """Store what the trace knows besides the graph, and set the mode of the trace."""
        self.meta.update(transient=transient, modes=modes, training=is_training)
        self._mark_transient()
        nn.Module.train(self, is_training)

    def __deepcopy__(self, memo: dict[int, Any]) -> fx.GraphModule:
        copied = super().__deepcopy__(memo)
        if isinstance(copied, StageModule):
            copied._mark_transient()
            nn.Module.train(copied, self.training)
        return copied

    def _mark_transient(self) -> None:
        """Keep transient buffers out of the state dict."""
        for name in self.meta.get("transient", ()):
            path, _, leaf = name.rpartition(".")
            non_persistent_buffers_of(self.get_submodule(path)).add(leaf)

    def train(self, mode: bool = True) -> Self:
        """Switch between training and evaluation.

        Raises ``RuntimeError`` for training when the model was traced in evaluation: its graph
        lacks what training does.
        """
        super().train(mode)
        traced, modes = self.meta.get("training", True), self.meta.get("modes", {})
        if mode and not traced:
            super().train(False)
            raise RuntimeError(
                "this stage was traced in evaluation mode and cannot train: call train() on the "
                "model before pipeline()"
            )
        if modes and mode is not self.meta.get("mode", traced):
            self.meta["mode"] = mode
            for node in self.graph.nodes:
                if node.name in modes:
                    name, value, neutral = modes[node.name]
                    node.update_kwarg(name, value if mode else neutral)
            self.recompile()
        return self


def follow_mode(node: fx.Node, *, is_training: bool) -> tuple[str, Any, Any] | None:
    """Return the argument of a traced ``node`` that depends on the mode, with both values.

    None where there is none, or where the model has fixed it. The node then passes that argument
    by keyword.
    """
    target = node.target
    if not isinstance(target, OpOverload) or not is_training:
        return None
    operator = schema_of(target).name
    if operator == "aten::add_" and str(getattr(node.args[0], "target", "")).endswith(_COUNTER):
        return _by_keyword(node, "other", 0)
    name = _MODE_ARGUMENTS.get(operator)
    if name is None:
        return None
    names = [argument.name for argument in schema_of(target).arguments]
    if operator in _NEEDS_STATISTICS and _argument(node, names, "running_mean") is None:
        return None
    value = _argument(node, names, name)
    if not value:
        return None
    return _by_keyword(node, name, 0.0 if name == "dropout_p" else False)


def _argument(node: fx.Node, names: list[str], name: str) -> Any:  # noqa: ANN401
    position = names.index(name)
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _by_keyword(node: fx.Node, name: str, neutral: object) -> tuple[str, Any, Any]:
    """Make ``node`` pass argument ``name`` and all after it by keyword."""
    target = node.target
    names = [argument.name for argument in schema_of(target).arguments]
    position = names.index(name)
    moved = dict(zip(names[position:], node.args[position:], strict=False))
    node.args = node.args[:position]
    node.kwargs = {**moved, **node.kwargs}
    return name, node.kwargs[name], neutral
