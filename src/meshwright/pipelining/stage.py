"""One stage of a pipeline: its module, its edges, and what it holds of each microbatch.

A stage computes and keeps; it sends nothing. What it reads lies in its inboxes, put there by a
transfer or by another stage of this rank; what it has made is taken from it by microbatch.

::

    inbox of outputs[microbatch][source]   -> forward_one_chunk  -> outputs
    inbox of gradients[microbatch][target] -> backward_one_chunk -> gradients for each source
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from meshwright import comm
from meshwright.errors import PipeliningShapeError
from meshwright.pipelining.backward import (
    Junction,
    run_backward,
    stage_backward_input,
    stage_backward_weight,
)
from meshwright.pipelining.edges import Source, StageEdges, adjacent, only_source
from meshwright.pipelining.metadata import (
    Signature,
    Values,
    differences,
    shapes,
    signature_of,
    tensors_in,
)
from meshwright.pipelining.ties import Tie

__all__ = ["PipelineStage", "as_outputs"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})
DwRunner = Callable[[], object]
InputGradients = dict[int, list[torch.Tensor | None]]
"""By source stage, the gradient of each leaf of its outputs."""


def as_outputs(value: object) -> tuple[Any, ...]:
    """What a module has returned, as a tuple: each element is an argument of the next stage."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return value
    return tuple(value) if isinstance(value, list) else (value,)


@dataclass(slots=True)
class _Halfway:
    """A microbatch between the two halves of its backward."""

    junctions: list[Junction] | None = None
    runner: DwRunner | None = None
    """What the user's ``dw_builder`` gave."""
    whole: tuple[list[object], list[torch.Tensor | None] | None] | None = None
    """Outputs and gradients of a first stage, whose first half is empty."""


@dataclass(slots=True)
class _Inboxes:
    """What has come for one microbatch."""

    outputs: dict[int, Values] = field(default_factory=dict)
    gradients: InputGradients = field(default_factory=dict)


class PipelineStage:
    """A part of a model on this rank, with torch's constructor and methods.

    ``submodule`` is called as it is, hooks included. ``input_args`` and ``output_args`` declare
    (with one microbatch's tensors, or a single one) what it takes and gives; what is not declared
    is learned from the first microbatch. ``dw_builder`` is called after the backward of each
    microbatch and returns what computes its weight gradients. Gradients look as the values they
    belong to, so ``output_grads`` and ``input_grads`` are accepted and not needed; ``get_mesh`` is
    only kept. ``edges`` say for every stage where its arguments come from; by default they are all
    outputs of the stage before. ``ties``, equal on all ranks, name parameters that several hold.

    Raises ``ValueError`` for an index outside the stages, ``RuntimeError`` for a group with more
    ranks than stages.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: object = None,
        output_args: object = None,
        output_grads: object = None,
        input_grads: object = None,
        group: Any = None,  # noqa: ANN401 - c10d's type stays in comm
        dw_builder: Callable[[], DwRunner] | None = None,
        get_mesh: Callable[..., object] | None = None,
        *,
        edges: Sequence[StageEdges] | None = None,
        ties: Sequence[Tie] = (),
    ) -> None:
        if not 0 <= stage_index < num_stages:
            raise ValueError(f"Stage index {stage_index} is out of range of {num_stages}")
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = torch.device(device)
        self.communicator = comm.communicator(group, axis="pipeline")
        self.group = self.communicator.group
        self.group_rank = self.communicator.rank
        self.group_size = self.communicator.size
        if self.group_size > num_stages:
            raise RuntimeError(
                f"Pipeline group size {self.group_size} cannot be larger than number of stages "
                f"{num_stages}"
            )
        self.dw_builder = dw_builder
        self.get_mesh = get_mesh
        self.all_edges = tuple(edges or map(adjacent, range(num_stages)))
        """The arguments of every stage of the model."""
        self.edges = self.all_edges[stage_index]
        self.ties = tuple(ties)
        """Parameters that several stages of the model hold."""
        self.takes_batch = self.is_first or any(s.stage is None for s in self.edges.args)
        """Whether it reads positional arguments of the batch."""
        self.takes_any_keyword = edges is None
        self._only_source = only_source(self.edges)
        self.has_backward = False
        """Whether forwards keep what a backward needs. Set by the schedule."""
        self.declared_inputs = _declared(input_args, f"[Stage {stage_index}] input_args")
        self.declared_outputs = _declared(output_args, f"[Stage {stage_index}] output_args")
        self.fwd_cache: dict[int, tuple[tuple[Any, ...], list[Any]]] = {}
        """By microbatch, outputs and flat inputs, from the forward to the backward."""
        self.output_chunks: list[Any] = []
        """Of a last stage, what the module has returned for each microbatch of this step."""
        self.expected: dict[int, Signature] = {}
        """By microbatch, what its outputs must be, where that is known."""
        self._inboxes: dict[int, _Inboxes] = {}
        self._values: dict[int, Values] = {}
        self._reads: dict[int, dict[int, list[Any]]] = {}
        self._input_gradients: dict[int, InputGradients] = {}
        self._halfway: dict[int, _Halfway] = {}

    @property
    def is_first(self) -> bool:
        """Whether it takes the batch."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether its outputs are the model's."""
        return self.stage_index == self.num_stages - 1

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"[Stage {self.stage_index}]"

    def clear_runtime_states(self) -> None:
        """Forget all microbatches: the start of a step."""
        for kept in (
            self.fwd_cache,
            self.expected,
            self._inboxes,
            self._values,
            self._reads,
            self._input_gradients,
            self._halfway,
        ):
            kept.clear()
        self.output_chunks.clear()

    def check_microbatches(
        self, args: Sequence[tuple[Any, ...]], kwargs: Sequence[Mapping[str, Any]]
    ) -> None:
        """Raise for arguments of the batch that this stage cannot take, before anything runs."""

    # ------------------------------------------------------------------------ inboxes

    def put_outputs(self, microbatch: int, source: int, values: Values) -> None:
        """Outputs of stage ``source`` have come."""
        self._inbox(microbatch).outputs[source] = values

    def put_gradients(
        self, microbatch: int, target: int, gradients: list[torch.Tensor | None]
    ) -> None:
        """Stage ``target`` has sent the gradients of this stage's outputs, leaf by leaf."""
        self._inbox(microbatch).gradients[target] = gradients

    def take_outputs(self, microbatch: int) -> Values:
        """The outputs of a microbatch, flat, after its forward."""
        return self._values[microbatch]

    def take_gradients(self, microbatch: int, source: int) -> list[torch.Tensor | None]:
        """The gradients that go to stage ``source``, after the backward."""
        return self._input_gradients[microbatch][source]

    def set_local_fwd_input(self, prev_stage_outputs: object, mb_index: int) -> None:
        """Take the outputs of the stage before, which is on this rank, by reference."""
        if self.is_first:
            raise AssertionError("can't set fwd input if this stage is first")
        if not isinstance(prev_stage_outputs, tuple):
            raise AssertionError(f"Expected tuple, got {type(prev_stage_outputs)}")
        self.put_outputs(mb_index, self.stage_index - 1, Values.of(prev_stage_outputs))

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        """The gradients for the stage before, which is on this rank."""
        if self.is_first:
            raise AssertionError("can't get bwd output if this stage is first")
        return tuple(self.take_gradients(mb_index, self.stage_index - 1))

    def set_local_bwd_input(self, next_stage_bwd_outputs: object, mb_index: int) -> None:
        """Take the gradients of the stage behind, which is on this rank, by reference."""
        if self.is_last:
            raise AssertionError("can't set bwd input if this stage is last")
        if not isinstance(next_stage_bwd_outputs, tuple):
            raise AssertionError(f"Expected tuple, got {type(next_stage_bwd_outputs)}")
        self.put_gradients(mb_index, self.stage_index + 1, list(next_stage_bwd_outputs))

    def _inbox(self, microbatch: int) -> _Inboxes:
        found = self._inboxes.get(microbatch)
        if found is None:
            found = self._inboxes[microbatch] = _Inboxes()
        return found

    # ------------------------------------------------------------------------ forward

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> object:
        """Run the module on one microbatch and keep what its backward needs.

        ``args`` are the batch's, used by the stage that takes them; the rest has come to the inbox.
        Returns what the module returned. Raises ``RuntimeError`` around what the module raises,
        ``PipeliningShapeError`` when the outputs are not as expected.
        """
        given, named = self._arguments(fwd_chunk_id, args, kwargs or _NOTHING)
        try:
            result = self.submod(*given, **named) if named else self.submod(*given)
        except PipeliningShapeError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"{self.name} failed to run forward: args: {shapes(given)} kwargs: "
                f"{shapes(named)}: {error}"
            ) from error
        outputs = as_outputs(result)
        values = Values.of(outputs)
        self._check_outputs(fwd_chunk_id, values)
        self._values[fwd_chunk_id] = values
        if self.has_backward:
            self.fwd_cache[fwd_chunk_id] = (outputs, tensors_in(given, named))
        if self.is_last and save_forward_output:
            self.output_chunks.append(result)
        return result

    def _arguments(
        self, microbatch: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of the module, those from other stages as fresh leaves."""
        if self.is_first and self.takes_any_keyword:
            return list(args), dict(kwargs)
        inbox = self._inbox(microbatch).outputs
        if self._only_source is not None and not kwargs:
            values = inbox.pop(self._only_source)
            leaves = [_fresh(leaf, self.has_backward) for leaf in values.leaves]
            if self.has_backward:
                self._reads[microbatch] = {self._only_source: leaves}
            return (leaves if values.spec is None else list(values.nested_as(leaves))), {}
        nested: dict[int, tuple[Any, ...]] = {}
        reads: dict[int, list[Any]] = {}
        for source, values in inbox.items():
            fresh = [_fresh(leaf, self.has_backward) for leaf in values.leaves]
            reads[source] = fresh
            nested[source] = values.nested_as(fresh)
        inbox.clear()
        if self.has_backward:
            self._reads[microbatch] = reads
        given: list[Any] = []
        for source in self.edges.args:
            found = self._find(source, nested, args, kwargs)
            given += found if source.stage is not None and source.output is None else (found,)
        named = dict(kwargs) if self.takes_any_keyword else {}
        for name, source in self.edges.kwargs:
            if source.stage is not None or name in kwargs:
                named[name] = self._find(source, nested, args, kwargs)
        return given, named

    def _find(
        self,
        source: Source,
        nested: Mapping[int, tuple[Any, ...]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:  # noqa: ANN401
        if source.stage is None:
            if isinstance(source.output, str):
                return kwargs[source.output]
            position = source.output or 0
            if position >= len(args):
                raise ValueError(
                    f"{self.name} takes argument {position} of the batch, and this rank's step got "
                    f"{len(args)} positional arguments"
                )
            return args[position]
        outputs = nested[source.stage]
        return outputs if source.output is None else outputs[int(source.output)]

    def _check_outputs(self, microbatch: int, values: Values) -> None:
        expected = self.expected.get(microbatch) or self.declared_outputs
        if expected is not None and not expected.describes(values):
            where = f"{self.name} output of microbatch {microbatch}"
            text = differences(expected, values, where)
            if text:
                raise PipeliningShapeError(text)

    # ----------------------------------------------------------------------- backward

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
        *,
        seed: torch.Tensor | None = None,
    ) -> None:
        """Run the backward of one microbatch, or its input half.

        ``loss`` starts it on a last stage, with the gradient ``seed`` (1 when None). Raises
        ``AssertionError`` for a half without a forward or a ``dw_builder``, ``RuntimeError``
        around what the backward raises.
        """
        cached = self.fwd_cache.pop(bwd_chunk_id, None)
        if cached is None:
            if not full_backward and self.dw_builder is None:
                raise AssertionError(
                    f"{self.name} cannot run a partial backward for chunk {bwd_chunk_id}: no "
                    "forward was recorded and no dw_builder was given; run it under a schedule or "
                    "pass dw_builder"
                )
            if not self.has_backward:
                return
            raise RuntimeError(
                f"{self.name} has no forward of chunk {bwd_chunk_id} to run the backward of"
            )
        _, inputs = cached
        outputs, gradients = self._starts(bwd_chunk_id, loss, seed)
        what = "stage backward" if full_backward else "stage backward input"
        try:
            if full_backward or self.dw_builder is not None:
                self._run_whole(bwd_chunk_id, outputs, gradients, full_backward)
            else:
                self._run_input_half(bwd_chunk_id, outputs, gradients, inputs)
        except Exception as error:
            raise RuntimeError(
                f"Failed to run {what}: {self.name} microbatch {bwd_chunk_id}, outputs "
                f"{shapes(outputs)}, gradients {shapes(gradients or [])}: {error}"
            ) from error

    def _starts(
        self, microbatch: int, loss: torch.Tensor | None, seed: torch.Tensor | None
    ) -> tuple[list[object], list[torch.Tensor | None] | None]:
        """What the backward starts from, with gradients; None where that of a loss is 1."""
        values = self._values.pop(microbatch)
        if loss is not None:
            return [loss], None if seed is None else [seed]
        arrived = self._inbox(microbatch).gradients
        if len(arrived) == 1:
            return values.leaves, arrived.popitem()[1]
        summed: list[torch.Tensor | None] = [None] * len(values.leaves)
        for target in sorted(arrived):
            for number, gradient in enumerate(arrived[target]):
                if gradient is not None:
                    before = summed[number]
                    summed[number] = gradient if before is None else before + gradient
        arrived.clear()
        return values.leaves, summed

    def _run_whole(
        self,
        microbatch: int,
        outputs: list[object],
        gradients: list[torch.Tensor | None] | None,
        full_backward: bool,
    ) -> None:
        run_backward(outputs, gradients)
        self._keep_input_gradients(microbatch)
        if self.dw_builder is not None:
            runner = self.dw_builder()
            if full_backward:
                runner()
            else:
                self._halfway[microbatch] = _Halfway(runner=runner)

    def _run_input_half(
        self,
        microbatch: int,
        outputs: list[object],
        gradients: list[torch.Tensor | None] | None,
        inputs: list[object],
    ) -> None:
        if not self._reads.get(microbatch):
            self._halfway[microbatch] = _Halfway(whole=(outputs, gradients))
            return
        _, junctions = stage_backward_input(outputs, gradients, inputs, None)
        self._halfway[microbatch] = _Halfway(junctions=junctions)
        self._keep_input_gradients(microbatch)

    def _keep_input_gradients(self, microbatch: int) -> None:
        """Move the gradients of what was read from other stages to where they are sent from."""
        found: InputGradients = {}
        for source, leaves in self._reads.pop(microbatch, {}).items():
            taken: list[torch.Tensor | None] = []
            for leaf in leaves:
                gradient = leaf.grad if isinstance(leaf, torch.Tensor) else None
                if gradient is not None:
                    leaf.grad = None
                taken.append(gradient)
            found[source] = taken
        self._input_gradients[microbatch] = found

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the weight half of one microbatch, after its input half.

        Raises ``AssertionError`` when there was none.
        """
        half = self._halfway.pop(bwd_chunk_id, None)
        if half is None:
            raise AssertionError(
                f"{self.name} Attempted to run backward_weight_one_chunk for chunk {bwd_chunk_id} "
                "without first calling `backward_one_chunk(full_backward=False)`"
            )
        try:
            if half.runner is not None:
                half.runner()
            elif half.whole is not None:
                outputs, gradients = half.whole
                run_backward(outputs, gradients)
            elif half.junctions is not None:
                stage_backward_weight((), half.junctions)
        except Exception as error:
            raise RuntimeError(
                f"Failed to run stage backward weight: {self.name} microbatch {bwd_chunk_id}: "
                f"{error}"
            ) from error

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: Mapping[str, Any], last_backward: bool = False
    ) -> None:
        """Run the backward of kind ``full``, ``input`` or ``weight`` with the given arguments.

        Gradients are never reduced in it: that is an action of its own. Raises ``RuntimeError``
        for another kind.
        """
        if backward_type == "full":
            self.backward_one_chunk(**bwd_kwargs, full_backward=True, last_backward=last_backward)
        elif backward_type == "input":
            self.backward_one_chunk(**bwd_kwargs, full_backward=False, last_backward=last_backward)
        elif backward_type == "weight":
            self.backward_weight_one_chunk(**bwd_kwargs, last_backward=last_backward)
        else:
            raise RuntimeError(
                f"Unknown backward type: {backward_type}; expected full, input or weight"
            )

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the ``.grad`` of all parameters, in place. Schedules of ours do not need it."""
        for parameter in self.submod.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(grad_scale_factor)


def _fresh(leaf: object, has_backward: bool) -> object:
    """A leaf of the graph of this stage for what another stage has made."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    fresh = leaf.detach()
    if has_backward and leaf.requires_grad:
        fresh.requires_grad_()
    return fresh


def _declared(values: object, where: str) -> Signature | None:
    if values is None:
        return None
    return signature_of(Values.of(as_outputs(values)), where)
