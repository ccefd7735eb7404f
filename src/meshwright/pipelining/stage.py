"""One stage of a pipeline: its module, its edges, and its state for each microbatch.

A stage computes and keeps values; it sends nothing. Transfers and other stages of this rank put its
inputs into its inbox; the caller takes its outputs by microbatch.

::

    inbox of outputs[microbatch][source]   -> forward_one_chunk  -> outputs
    inbox of gradients[microbatch][target] -> backward_one_chunk -> gradients for each source
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from meshwright import comm
from meshwright.errors import PipeliningShapeError
from meshwright.gradients import mark_stage
from meshwright.pipelining.edges import Source, StageEdges, adjacent, only_source
from meshwright.pipelining.messages.inbox import Inbox
from meshwright.pipelining.messages.metadata import (
    Signature,
    Values,
    as_outputs,
    declared,
    differences,
    shapes,
    tensors_in,
)
from meshwright.pipelining.stepping.arguments import CallCheck, advice, copies, writes_in_place
from meshwright.pipelining.stepping.backward import (
    DwBuilder,
    Halves,
    Junction,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from meshwright.pipelining.stepping.losses import Start
from meshwright.pipelining.stepping.ties import Tie
from meshwright.schedule.actions import F, Operation, W

__all__ = ["PipelineStage", "StageBuilder", "StepOfStage", "build_stage"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepOfStage:
    """What a stage is told about its current step."""

    has_backward: bool
    is_scaled: bool
    """True when each loss is weighted by its microbatch's share before the backward."""
    reduce: Callable[[int], None] | None
    """Starts to sum the gradients of a stage over data-parallel ranks."""
    microbatches: int | None = None
    """The number of microbatches; None when no schedule drives the stage."""


_BY_HAND = StepOfStage(has_backward=False, is_scaled=False, reduce=None)


class PipelineStage:
    """A part of a model on this rank, with torch's constructor and methods.

    ``submodule`` is called as it is, hooks included. ``input_args`` and ``output_args`` declare
    (with one microbatch's tensors, or a single one) its inputs and outputs; what is not declared
    is learned from the first microbatch. ``dw_builder`` is called after the backward of each
    microbatch and returns a function that computes its weight gradients. Gradients have the
    metadata of their values, so ``output_grads`` and ``input_grads`` are accepted and not needed;
    ``get_mesh`` is only stored. ``edges`` give the sources of every stage's arguments; by default
    these are all outputs of the previous stage. ``ties``, equal on all ranks, name parameters that
    several stages have.

    Raises ``ValueError`` for an index outside the stages, ``RuntimeError`` for a group with more
    ranks than stages.
    """

    _step = _BY_HAND

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
        dw_builder: DwBuilder | None = None,
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
        self.group_rank, self.group_size = self.communicator.rank, self.communicator.size
        if self.group_size > num_stages:
            raise RuntimeError(
                f"Pipeline group size {self.group_size} cannot be larger than number of stages "
                f"{num_stages}"
            )
        mark_stage(submodule.parameters(), self.communicator)
        self.dw_builder = dw_builder
        self.get_mesh = get_mesh
        self.all_edges = tuple(edges or map(adjacent, range(num_stages)))
        """The arguments of every stage of the model."""
        self.edges = self.all_edges[stage_index]
        self.ties = tuple(ties)
        """Parameters that several stages of the model have."""
        self.takes_batch = self.is_first or bool(self.edges.positions())
        """True when it reads positional arguments of the batch."""
        self.takes_any_keyword = not edges
        self._writes = writes_in_place(submodule)
        self._only_source = only_source(self.edges)
        self._reads_from = frozenset(self.edges.sources())
        self.has_backward = False
        """True when a forward keeps what its backward needs. The schedule sets it."""
        self.declared_inputs = declared(input_args, stage_index, "input_args")
        self.declared_outputs = declared(output_args, stage_index, "output_args")
        self.fwd_cache: dict[int, tuple[tuple[Any, ...], list[Any]]] = {}
        """By microbatch, outputs and flat inputs, from the forward to the backward."""
        self.results: dict[int, Any] = {}
        """On the last stage, what the module has returned for each microbatch of this step."""
        self.expected: dict[int, Signature] = {}
        """By microbatch, the signature that its outputs must have, where it is known."""
        self.inbox = Inbox()
        """Values that have arrived from other stages."""
        self._starts: dict[int, Start] = {}
        self._values: dict[int, Values] = {}
        self._halves, self._calls = Halves(), CallCheck()

    @property
    def is_first(self) -> bool:
        """True when it takes the batch."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """True when its outputs are the model's."""
        return self.stage_index == self.num_stages - 1

    @property
    def output_chunks(self) -> list[Any]:
        """``results`` in the order of microbatches."""
        return [self.results[microbatch] for microbatch in sorted(self.results)]

    @property
    def name(self) -> str:
        """The name of this stage in messages."""
        return f"[Stage {self.stage_index}]"

    def clear_runtime_states(self) -> None:
        """Drop the state of all microbatches, at the start of a step."""
        for kept in (
            self.fwd_cache,
            self.expected,
            self.inbox,
            self._starts,
            self._values,
            self._halves,
            self.results,
        ):
            kept.clear()

    def check_microbatches(
        self, args: Sequence[tuple[Any, ...]], kwargs: Sequence[Mapping[str, Any]]
    ) -> None:
        """Raise ``ValueError`` for arguments with which this stage cannot be called.

        With ``edges`` also for arguments that no stage takes: they would be dropped silently.
        """
        if self.takes_any_keyword:
            self._calls.look(self.submod, self.name, args, kwargs, takes_args=self.is_first)
            return
        keywords = {name for edges in self.all_edges for name in edges.keywords()}
        unknown = sorted({name for named in kwargs for name in named} - keywords)
        if unknown:
            raise ValueError(
                f"step() got the keyword arguments {unknown}, which the edges of no stage name: "
                f"expected some of {sorted(keywords)}; add each to the edges of its stages, as "
                "Source(None, keyword)"
            )
        most = max((at + 1 for edges in self.all_edges for at in edges.positions()), default=0)
        count = max(map(len, args), default=0)
        if self.takes_batch and count > most:
            raise ValueError(
                f"step() got {count} positional arguments, and the edges of all stages name only "
                f"the first {most}: add the others to the edges of their stages, as "
                f"Source(None, position)"
            )

    # -------------------------------------------------------------------------- inbox

    def takes_of(self, source: int) -> Signature | None:
        """Return the signature of its inputs from stage ``source``; None where not declared."""
        return self.declared_inputs if self._only_source == source else None

    def put_start(self, microbatch: int, start: Start) -> None:
        """Set the loss from which a microbatch's backward starts, on the last stage."""
        self._starts[microbatch] = start

    def take_outputs(self, microbatch: int) -> Values:
        """Return the outputs of a microbatch, flat, after its forward; its backward drops them."""
        return self._values[microbatch]

    def has_left(self, operation: Operation, microbatch: int) -> bool:
        """Whether a microbatch still lacks the compute action ``operation``."""
        if operation is F:
            return microbatch not in self._values
        return microbatch in (self._halves if operation is W else self.fwd_cache)

    def _check_chunk(self, microbatch: int) -> None:
        count = self._step.microbatches
        if count is not None and not 0 <= microbatch < count:
            raise RuntimeError(
                f"Chunk id {microbatch} is out of range [0, {count}) of this step on {self.name}"
            )

    def set_local_fwd_input(self, prev_stage_outputs: object, mb_index: int) -> None:
        """Take the outputs of the previous stage, which is on this rank, by reference."""
        if self.is_first:
            raise AssertionError("can't set fwd input if this stage is first")
        if not isinstance(prev_stage_outputs, tuple):
            raise AssertionError(f"Expected tuple, got {type(prev_stage_outputs)}")
        self.inbox.put_outputs(mb_index, self.stage_index - 1, Values.of(prev_stage_outputs))

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients for the previous stage, which is on this rank, by reference."""
        if self.is_first:
            raise AssertionError("can't get bwd output if this stage is first")
        self._check_chunk(mb_index)
        if not self.inbox.has_gradients(mb_index):
            raise RuntimeError(
                "Attempted to access chunk_id before chunks have been configured. "
                f"{self.name} has run no backward of chunk {mb_index}"
            )
        return tuple(self.inbox.take_gradients(mb_index, self.stage_index - 1))

    def set_local_bwd_input(self, next_stage_bwd_outputs: object, mb_index: int) -> None:
        """Take the gradients from the next stage, which is on this rank, by reference."""
        if self.is_last:
            raise AssertionError("can't set bwd input if this stage is last")
        if not isinstance(next_stage_bwd_outputs, tuple):
            raise AssertionError(f"Expected tuple, got {type(next_stage_bwd_outputs)}")
        self.inbox.put_gradients(mb_index, self.stage_index + 1, list(next_stage_bwd_outputs))

    # ------------------------------------------------------------------------ forward

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> object:
        """Run the module on one microbatch and keep what its backward needs.

        ``args`` are the batch's, used only by a stage that takes them; values of other stages come
        from the inbox. Returns what the module returned. Raises ``RuntimeError`` from an error of
        the module, ``PipeliningShapeError`` when the outputs are not as expected.
        """
        self._check_chunk(fwd_chunk_id)
        given, named = self._arguments(fwd_chunk_id, args, kwargs or _NOTHING)
        inputs = tensors_in(given, named) if self.has_backward else []
        if self._writes and self.has_backward:
            given, named = copies((given, named))
        try:
            result = self.submod(*given, **named) if named else self.submod(*given)
        except PipeliningShapeError:
            raise
        except Exception as error:
            wrong = self._other_dtypes(given) if self.is_first else ""
            if wrong:
                raise PipeliningShapeError(f"{wrong}: {error}") from error
            raise RuntimeError(
                f"{self.name} failed to run forward: args: {shapes(given)} kwargs: "
                f"{shapes(named)}: {error}{advice(error)}"
            ) from error
        outputs = as_outputs(result)
        values = Values.of(outputs)
        self._check_outputs(fwd_chunk_id, values)
        self._values[fwd_chunk_id] = values
        if self.has_backward:
            self.fwd_cache[fwd_chunk_id] = (outputs, inputs)
        if self.is_last and save_forward_output:
            self.results[fwd_chunk_id] = result
        return result

    def _other_dtypes(self, given: Sequence[Any]) -> str:
        """Name floating-point arguments of other dtypes than the parameters; "" if there are none.

        A stage that declares its inputs checks them before they are used.
        """
        own = {p.dtype for p in self.submod.parameters() if p.is_floating_point()}
        return "; ".join(
            f"{self.name} argument {number} has a dtype mismatch: expected {dtype} actual {x.dtype}"
            for number, x in enumerate(given)
            for dtype in sorted(own, key=str)[:1]
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype not in own
        )

    def _arguments(
        self, microbatch: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of the module, those from other stages as new leaves."""
        if self.is_first and self.takes_any_keyword:
            return list(args), dict(kwargs)
        nested = self.inbox.read(microbatch, has_backward=self.has_backward)
        missing = self._reads_from.difference(nested)
        if missing:
            raise RuntimeError(
                f"{self.name} has no outputs of stages {sorted(missing)} for chunk {microbatch}: "
                "they come by the schedule, or by set_local_fwd_input()"
            )
        if self._only_source is not None and not kwargs:
            return list(nested[self._only_source]), {}
        given: list[Any] = []
        for source in self.edges.args:
            found = self._find(source, nested, args, kwargs)
            given += found if source.stage is not None and source.output is None else (found,)
        named = dict(kwargs) if self.takes_any_keyword else {}
        for name, source in self.edges.kwargs:
            if source.keyword is None or source.keyword in kwargs:
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
            if source.keyword is not None:
                if source.keyword not in kwargs:
                    raise ValueError(
                        f"{self.name} takes the keyword argument {source.keyword!r} of the batch: "
                        f"give it to step() on rank {self.group_rank} of the pipeline as well"
                    )
                return kwargs[source.keyword]
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
    ) -> None:
        """Run the backward of one microbatch, or its input half.

        On the last stage it starts from ``loss``, by default that of the schedule's step; within a
        step both have the microbatch's weight. Raises ``AssertionError`` for a half without a
        forward or a ``dw_builder``, ``RuntimeError`` from an error of the backward.
        """
        self._check_chunk(bwd_chunk_id)
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
        outputs, gradients = self._roots(bwd_chunk_id, loss)
        what = "stage backward" if full_backward else "stage backward input"
        try:
            if full_backward:
                self._halves.whole(outputs, gradients, self.dw_builder)
            else:
                read = self.inbox.leaves(bwd_chunk_id)
                self._halves.first(bwd_chunk_id, outputs, gradients, read or None, self.dw_builder)
            self.inbox.keep_gradients(bwd_chunk_id)
        except Exception as error:
            raise RuntimeError(
                f"Failed to run {what}: {self.name} microbatch {bwd_chunk_id}, outputs "
                f"{shapes(outputs)}, gradients {shapes(gradients or [])}: {error}"
            ) from error

    def _roots(
        self, microbatch: int, loss: torch.Tensor | None
    ) -> tuple[list[object], list[torch.Tensor | None] | None]:
        """Return the roots of the backward and their gradients; None for a loss's gradient of 1."""
        values = self._values.pop(microbatch)
        start = self._starts.pop(microbatch, None)
        if start is None and loss is not None:
            start = Start(loss)
        if start is not None:
            root, seed = start.of(loss)
            return [root], None if seed is None else [seed]
        if self.is_last:
            raise RuntimeError(
                f"Loss for microbatch {microbatch} is not available: {self.name} is the last and "
                "starts from a loss; give it, or run the forward under a schedule with a target"
            )
        gradients = self.inbox.added(microbatch, len(values.leaves))
        if gradients is not None:
            return values.leaves, gradients
        if any(self.stage_index in other.sources() for other in self.all_edges):
            raise RuntimeError(
                f"{self.name} has no gradients for chunk {microbatch}: they come by the schedule, "
                "or by set_local_bwd_input()"
            )
        return values.leaves, [None] * len(values.leaves)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the weight half of one microbatch, after its input half.

        Raises ``AssertionError`` when that has not run.
        """
        self._check_chunk(bwd_chunk_id)
        if bwd_chunk_id not in self._halves:
            raise AssertionError(
                f"{self.name} Attempted to run backward_weight_one_chunk for chunk {bwd_chunk_id} "
                "without first calling `backward_one_chunk(full_backward=False)`"
            )
        try:
            self._halves.second(bwd_chunk_id)
        except Exception as error:
            raise RuntimeError(
                f"Failed to run stage backward weight: {self.name} microbatch {bwd_chunk_id}: "
                f"{error}"
            ) from error

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: Mapping[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[Junction] | None]:
        """Run a backward of kind ``full``, ``input`` or ``weight`` on the values in ``bwd_kwargs``.

        These are ``stage_output``, ``output_grads`` and ``input_values``, or for ``weight`` the
        ``param_groups`` of the input half. Returns the gradients of the inputs, and these groups.
        Hooks of the module or `perform_reduce_grad` sum gradients over ranks, with the result of a
        single sum. Raises ``RuntimeError`` for another kind.
        """
        if backward_type == "weight":
            stage_backward_weight(self.submod.parameters(), bwd_kwargs["param_groups"])
            return (), None
        if backward_type not in ("full", "input"):
            raise RuntimeError(
                f"Unknown backward type: {backward_type}; expected full, input or weight"
            )
        output, gradients = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
        if backward_type == "full":
            return stage_backward(output, gradients, bwd_kwargs["input_values"]), None
        return stage_backward_input(output, gradients, bwd_kwargs["input_values"], None)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the ``.grad`` of all parameters by ``grad_scale_factor``, in place.

        Within the step of a schedule with ``scale_grads=True`` there is nothing left to divide.
        """
        if self._step.is_scaled or grad_scale_factor == 1:
            return
        for parameter in self.submod.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Sum the gradients over data-parallel ranks, and scale them as `scale_grads` does.

        REDUCE_GRAD does this in a step. Outside of one the module's own hooks have reduced in each
        backward, and the gradients are only scaled.
        """
        if self._step.reduce is not None:
            self._step.reduce(self.stage_index)
        self.scale_grads(grad_scale_factor)

    def begin_step(self, step: StepOfStage) -> None:
        """Begin a step of a schedule on this stage."""
        self.clear_runtime_states()
        self.has_backward = step.has_backward
        self._step = step

    def end_step(self) -> None:
        """End the step, whether it succeeded or failed."""
        self._step = _BY_HAND


# torch's name for the base of its stages, which user code imports.
_PipelineStageBase = PipelineStage


class StageBuilder(Protocol):
    """The part of a `PipeInfo` that `build_stage` uses."""

    def built(
        self, stage_module: nn.Module, stage_index: int, device: torch.device, group: object
    ) -> PipelineStage:
        """Make the stage ``stage_index``."""


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: StageBuilder,
    device: torch.device,
    group: Any = None,  # noqa: ANN401
) -> PipelineStage:
    """Make a stage from a module of a `Pipe`, wrapped or not, on ``device``.

    Raises ``ValueError`` for an index outside the stages, `PipeliningShapeError` for an info of
    another pipe.
    """
    return pipe_info.built(stage_module, stage_index, torch.device(device), group)
