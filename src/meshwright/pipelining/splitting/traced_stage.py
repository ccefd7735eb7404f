"""A stage of a traced model, which rejects values that differ from those of the trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.errors import PipeliningShapeError
from meshwright.pipelining.edges import StageEdges, Tie
from meshwright.pipelining.signature import Signature, TensorMeta, Values, signature_of
from meshwright.pipelining.splitting.splitting import Argument, Expected
from meshwright.pipelining.stage import PipelineStage
from meshwright.torch_internals.trees import tree_flatten


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
        if self._passed is not None and self._passed.describes(values):
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
