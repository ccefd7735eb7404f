"""A stage of a traced model: a graph, and parameters under their original names.

A graph has the mode in which the model was traced. The operators that differ between training and
evaluation are listed here, so that `train` and `eval` switch them. Branches that the model took in
Python during the trace are fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from torch import fx, nn

from meshwright.torch_internals.modules import non_persistent_buffers_of
from meshwright.torch_internals.tensors import OpOverload, schema_of
from meshwright.torch_internals.trees import TreeSpec, tree_unflatten

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
