"""One stage of a pipeline: its module, its edges, and its state for each microbatch.

A stage computes and keeps values; it sends nothing. Transfers and other stages of this rank put its
inputs into the state of a microbatch; the caller takes its outputs from there.

::

    put_outputs   -> forward_one_chunk  -> values
    put_gradients -> backward_one_chunk -> take_gradients, for each source
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import fx, nn

from meshwright import comm
from meshwright.errors import PipeliningShapeError
from meshwright.gradients import mark_stage
from meshwright.pipelining.backward import (
    DwBuilder,
    Junction,
    run_backward,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from meshwright.pipelining.edges import Source, StageEdges, Tie, adjacent
from meshwright.pipelining.microbatch import cut_dims
from meshwright.pipelining.signature import (
    Signature,
    TensorMeta,
    Values,
    as_outputs,
    declared,
    shapes,
    tensors_in,
)
from meshwright.schedule.actions import F, Operation, W
from meshwright.torch_internals.modules import compiled_call_of, forward_pre_hooks_of
from meshwright.torch_internals.tensors import any_schema_of, is_view
from meshwright.torch_internals.trees import tree_map_only

__all__ = [
    "BackwardStart",
    "Chunk",
    "PipelineStage",
    "StageBuilder",
    "StepOfStage",
    "build_stage",
    "check_declared",
]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepOfStage:
    """What a stage needs to know about its current step."""

    has_backward: bool
    is_scaled: bool
    """True when each loss is weighted by its microbatch's share before the backward."""
    reduce: Callable[[int], None] | None
    """Starts to sum the gradients of a stage over data-parallel ranks."""
    microbatches: int | None = None
    """The number of microbatches; None when no schedule drives the stage."""


_BY_HAND = StepOfStage(has_backward=False, is_scaled=False, reduce=None)

Gradients = list[torch.Tensor | None]
"""The gradient of each leaf of a stage's outputs."""


@dataclass(slots=True)
class BackwardStart:
    """The loss of one microbatch, and its weight in the gradient."""

    loss: torch.Tensor
    weight: float = 1.0
    seed: torch.Tensor | None = None
    """The weight as the gradient to start with; None where the loss is multiplied instead."""


@dataclass(slots=True)
class Chunk:
    """The values of one microbatch on a stage, each until its use."""

    arrived: dict[int, Values] = field(default_factory=dict)
    """By source stage, outputs that the forward has not read yet."""
    reads: dict[int, list[Any]] = field(default_factory=dict)
    """By source stage, the leaves of this stage's graph that its forward has read of it."""
    values: Values | None = None
    """This stage's outputs, from the forward to the backward."""
    start: BackwardStart | None = None
    """On the last stage, what the backward starts from."""
    returned: dict[int, Gradients] = field(default_factory=dict)
    """By target stage, the gradients of this stage's outputs that it has sent back."""
    gradients: dict[int, Gradients] | None = None
    """By source stage, the gradients of what was read of it; None before the backward."""
    weight_half: Callable[[], object] | None = None
    """The second half of the backward, between the two."""

    def read(self, *, has_backward: bool) -> dict[int, tuple[Any, ...]]:
        """Take all outputs that have arrived, by source stage, as leaves of this stage's graph."""
        nested: dict[int, tuple[Any, ...]] = {}
        for source, values in self.arrived.items():
            leaves = [_fresh(leaf, has_backward) for leaf in values.leaves]
            nested[source] = values.nested_as(leaves)
            if has_backward:
                self.reads[source] = leaves
        self.arrived.clear()
        return nested

    def added(self, count: int) -> Gradients:
        """Sum and remove the gradients of ``count`` outputs, in the order of the sending stages.

        The result does not depend on the order of arrival.
        """
        if len(self.returned) == 1:
            return self.returned.popitem()[1]
        total: Gradients = [None] * count
        for target in sorted(self.returned):
            for number, gradient in enumerate(self.returned[target]):
                before = total[number]
                if gradient is not None:
                    total[number] = gradient if before is None else before + gradient
        self.returned.clear()
        return total

    def keep_gradients(self) -> None:
        """Move the gradients of what the forward has read out of ``.grad``."""
        self.gradients = {}
        for source, leaves in self.reads.items():
            taken: Gradients = []
            for leaf in leaves:
                gradient = leaf.grad if isinstance(leaf, torch.Tensor) else None
                if gradient is not None:
                    # The graph holds the leaf until its weight half: not the gradient, once sent.
                    leaf.grad = None
                taken.append(gradient)
            self.gradients[source] = taken
        self.reads.clear()


class PipelineStage:
    """A part of a model on this rank, with torch's constructor and methods.

    ``submodule`` is called unchanged, hooks included. ``input_args`` and ``output_args`` declare
    (with one microbatch's tensors, or a single one) its inputs and outputs; anything undeclared is
    learned from the first microbatch. ``dw_builder`` is called after the backward of each
    microbatch and returns a function that computes its weight gradients. ``output_grads``,
    ``input_grads`` and ``get_mesh`` are accepted as in torch but have no effect: gradients have the
    metadata of their values. ``edges`` give the sources of every stage's arguments; by default
    these are all outputs of the previous stage. ``ties``, equal on all ranks, name parameters that
    several stages share.

    Raises ``ValueError`` for an index outside the stages or another number of ``edges``,
    ``RuntimeError`` for a group with more ranks than stages.
    """

    checks_outputs = True
    """False for a last stage whose outputs no one reads, as its module computes the loss."""
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
        self.device = torch.device(device)
        self.communicator = comm.communicator(group, axis="pipeline")
        self.group = self.communicator.group  # which a communicator does not keep alive
        if self.group_size > num_stages:
            raise RuntimeError(
                f"Pipeline group size {self.group_size} cannot be larger than number of stages "
                f"{num_stages}"
            )
        mark_stage(submodule.parameters(), self.communicator)
        self.dw_builder = dw_builder
        self.all_edges = tuple(edges or map(adjacent, range(num_stages)))
        """The arguments of every stage of the model."""
        if len(self.all_edges) != num_stages:
            raise ValueError(
                f"expected the edges of all {num_stages} stages, found {len(self.all_edges)}"
            )
        self.edges = self.all_edges[stage_index]
        self.ties = tuple(ties)
        """Parameters that several stages of the model share."""
        self.takes_batch = self.is_first or bool(self.edges.positions())
        """True when it reads positional arguments of the batch."""
        self.takes_any_keyword = not edges
        self._writes = _writes_in_place(submodule)
        self.has_backward = False
        """True when a forward keeps what its backward needs. The schedule sets it."""
        self.declared_inputs = declared(input_args, stage_index, "input_args")
        self.declared_outputs = declared(output_args, stage_index, "output_args")
        self.fwd_cache: dict[int, tuple[tuple[Any, ...], list[Any]]] = {}
        """By microbatch, outputs and flat inputs, from the forward to the backward."""
        self.results: dict[int, Any] = {}
        """On the last stage, what the module has returned for each microbatch of this step."""
        self.chunks: defaultdict[int, Chunk] = defaultdict(Chunk)
        """By microbatch, its state in this step."""
        self._checked: object = None
        """The number and names of the arguments that were checked last."""

    @property
    def num_stages(self) -> int:
        """The number of stages of the model."""
        return len(self.all_edges)

    @property
    def group_rank(self) -> int:
        """The rank of this process in `group`."""
        return self.communicator.rank

    @property
    def group_size(self) -> int:
        """The number of ranks in `group`."""
        return self.communicator.size

    @property
    def is_first(self) -> bool:
        """True for the first stage, which takes the batch."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """True for the last stage, whose outputs are the model's."""
        return self.stage_index == len(self.all_edges) - 1

    @property
    def output_chunks(self) -> list[Any]:
        """The ``results`` in the order of microbatches."""
        return [self.results[microbatch] for microbatch in sorted(self.results)]

    @property
    def name(self) -> str:
        """The name of this stage in messages."""
        return f"[Stage {self.stage_index}]"

    def clear_runtime_states(self) -> None:
        """Drop the state of all microbatches, at the start of a step."""
        self.fwd_cache.clear()
        self.results.clear()
        self.chunks.clear()

    def check_microbatches(
        self, args: Sequence[tuple[Any, ...]], kwargs: Sequence[Mapping[str, Any]]
    ) -> None:
        """Raise ``ValueError`` for arguments with which this stage cannot be called.

        With ``edges`` also for arguments that no stage takes: they would be dropped silently.
        """
        # Binding arguments to a signature is slow, and depends on their number and names only.
        called = ({*map(len, args)}, {*map(tuple, kwargs)})
        if called != self._checked:
            (_check_call if self.takes_any_keyword else _check_edges)(self, args, kwargs)
            self._checked = called

    # ------------------------------------------------------------------- microbatches

    def takes_of(self, source: int) -> Signature | None:
        """Return the signature of its inputs from stage ``source``; None where not declared."""
        return self.declared_inputs if self.edges.only == source else None

    def put_outputs(self, microbatch: int, source: int, values: Values) -> None:
        """Take outputs of stage ``source``."""
        self.chunks[microbatch].arrived[source] = values

    def put_gradients(self, microbatch: int, target: int, gradients: Gradients) -> None:
        """Take the gradients that stage ``target`` has for the outputs of this stage, by leaf."""
        self.chunks[microbatch].returned[target] = gradients

    def take_gradients(self, microbatch: int, source: int) -> Gradients:
        """Return the gradients that go to stage ``source``, after the backward."""
        gradients = self.chunks[microbatch].gradients
        if gradients is None:
            raise RuntimeError(
                "Attempted to access chunk_id before chunks have been configured. "
                f"{self.name} has run no backward of chunk {microbatch}"
            )
        return gradients[source]

    def has_left(self, operation: Operation, microbatch: int) -> bool:
        """Whether a microbatch still lacks the compute action ``operation``."""
        if operation is F:
            return self.chunks[microbatch].values is None
        if operation is W:
            return self.chunks[microbatch].weight_half is not None
        return microbatch in self.fwd_cache

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
        self.put_outputs(mb_index, self.stage_index - 1, Values.of(prev_stage_outputs))

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients for the previous stage, which is on this rank, by reference."""
        if self.is_first:
            raise AssertionError("can't get bwd output if this stage is first")
        self._check_chunk(mb_index)
        return tuple(self.take_gradients(mb_index, self.stage_index - 1))

    def set_local_bwd_input(self, next_stage_bwd_outputs: object, mb_index: int) -> None:
        """Take the gradients from the next stage, which is on this rank, by reference."""
        if self.is_last:
            raise AssertionError("can't set bwd input if this stage is last")
        if not isinstance(next_stage_bwd_outputs, tuple):
            raise AssertionError(f"Expected tuple, got {type(next_stage_bwd_outputs)}")
        self.put_gradients(mb_index, self.stage_index + 1, list(next_stage_bwd_outputs))

    # ------------------------------------------------------------------------ forward

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> object:
        """Run the module on one microbatch and keep what its backward needs.

        ``args`` are the batch's, used only by a stage that takes them; values of other stages have
        come by `put_outputs`. Returns what the module returned. Raises ``RuntimeError`` from an
        error of the module, ``PipeliningShapeError`` when the outputs are not as declared.
        """
        self._check_chunk(fwd_chunk_id)
        given, named = _arguments(self, fwd_chunk_id, args, kwargs or _NOTHING)
        # The leaves themselves, also where the module gets copies of them: gradients arrive there.
        inputs = tensors_in(given, named) if self.has_backward else []
        if self._writes and self.has_backward:
            # torch refuses in-place writes to a leaf that requires grad.
            given, named = tree_map_only(torch.Tensor, _copy, (given, named))
        try:
            result = self.submod(*given, **named) if named else self.submod(*given)
        except PipeliningShapeError:
            raise
        except Exception as error:
            wrong = _other_dtypes(self, given) if self.is_first else ""
            if wrong:
                raise PipeliningShapeError(f"{wrong}: {error}") from error
            raise RuntimeError(
                f"{self.name} failed to run forward: args: {shapes(given)} kwargs: "
                f"{shapes(named)}: {error}{_advice(error)}"
            ) from error
        outputs = as_outputs(result)
        values = Values.of(outputs)
        self._check_outputs(fwd_chunk_id, values)
        self.chunks[fwd_chunk_id].values = values
        if self.has_backward:
            self.fwd_cache[fwd_chunk_id] = (outputs, inputs)
        if self.is_last and save_forward_output:
            self.results[fwd_chunk_id] = result
        return result

    def _check_outputs(self, microbatch: int, values: Values) -> None:
        if self.declared_outputs is not None:
            self.declared_outputs.check_outputs(
                values, self.stage_index, microbatch, gradients=False
            )

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
        step both have the microbatch's weight. Raises ``AssertionError`` for an input half with
        neither a forward nor a ``dw_builder``, ``RuntimeError`` from an error of the backward.
        """
        self._check_chunk(bwd_chunk_id)
        # Both errors come before any early return: they hold for a stage that no schedule has
        # driven.
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
        chunk = self.chunks[bwd_chunk_id]
        outputs, gradients = self._roots(bwd_chunk_id, chunk, loss)
        what = "stage backward" if full_backward else "stage backward input"
        try:
            if full_backward or self.dw_builder is not None:
                run_backward(outputs, gradients)
                if self.dw_builder is not None:
                    run_weight_half = self.dw_builder()
                    if full_backward:
                        run_weight_half()
                    else:
                        chunk.weight_half = run_weight_half
            else:
                read = [leaf for leaves in chunk.reads.values() for leaf in leaves]
                if read:
                    _, junctions = stage_backward_input(outputs, gradients, read, None)
                    chunk.weight_half = partial(stage_backward_weight, (), junctions)
                else:  # without inputs all of it is the second half
                    chunk.weight_half = partial(run_backward, outputs, gradients)
            chunk.keep_gradients()
        except Exception as error:
            raise RuntimeError(
                f"Failed to run {what}: {self.name} microbatch {bwd_chunk_id}, outputs "
                f"{shapes(outputs)}, gradients {shapes(gradients or [])}: {error}"
            ) from error

    def _roots(
        self, microbatch: int, chunk: Chunk, loss: torch.Tensor | None
    ) -> tuple[list[Any], Gradients | None]:
        """Return the roots of the backward and their gradients; None for a loss's gradient of 1."""
        values, start = chunk.values, chunk.start
        # The chunk lives until the next step, and must not keep the graph of its outputs that long.
        chunk.values = chunk.start = None
        if start is None and loss is not None:
            start = BackwardStart(loss)
        if start is not None:
            if start.seed is not None and (loss is None or loss is start.loss):
                return [start.loss], [start.seed]
            # Another loss than the schedule's, such as a scaled one, has the same weight.
            root = start.loss if loss is None else loss
            return [root if start.weight == 1.0 else root * start.weight], None
        if self.is_last or values is None:
            raise RuntimeError(
                f"Loss for microbatch {microbatch} is not available: {self.name} is the last and "
                "starts from a loss; give it, or run the forward under a schedule with a target"
            )
        if not chunk.returned and any(self.stage_index in e.sources() for e in self.all_edges):
            raise RuntimeError(
                f"{self.name} has no gradients for chunk {microbatch}: they come by the schedule, "
                "or by set_local_bwd_input()"
            )
        return values.leaves, chunk.added(len(values.leaves))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the weight half of one microbatch, after its input half.

        Raises ``AssertionError`` when that has not run.
        """
        self._check_chunk(bwd_chunk_id)
        chunk = self.chunks[bwd_chunk_id]
        half, chunk.weight_half = chunk.weight_half, None
        if half is None:
            raise AssertionError(
                f"{self.name} Attempted to run backward_weight_one_chunk for chunk {bwd_chunk_id} "
                "without first calling `backward_one_chunk(full_backward=False)`"
            )
        try:
            half()
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


# --------------------------------------------------------------------------------- arguments


def _fresh(leaf: object, has_backward: bool) -> object:
    """Detach another stage's output: its gradient ends here and is sent back."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    fresh = leaf.detach()
    if has_backward and leaf.requires_grad:
        fresh.requires_grad_()
    return fresh


def _check_call(
    stage: PipelineStage, args: Sequence[tuple[Any, ...]], kwargs: Sequence[Mapping[str, Any]]
) -> None:
    """Raise ``ValueError`` for arguments of a batch that the module cannot be called with.

    Positional ones are those of the first stage. Modules with a ``__call__`` of their own, forward
    pre-hooks or a compiled call are not checked: their arguments are unknown.
    """
    module = stage.submod
    is_own = type(module).__call__ is not nn.Module.__call__
    if is_own or forward_pre_hooks_of(module) or compiled_call_of(module) is not None:
        return
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # of C, or of a script
        return
    for positional, named in zip(args, kwargs or [{}] * len(args), strict=True):
        try:
            if stage.is_first:
                signature.bind(*positional, **named)
            else:
                signature.bind_partial(**named)
        except TypeError as error:
            taken = ", ".join(signature.parameters)
            given = [f"{len(positional)} positional arguments"] if stage.is_first else []
            given += [f"the keywords {list(named)}"] if named else []
            raise ValueError(
                f"{stage.name} expects the arguments ({taken}) of {type(module).__name__}, but "
                f"this step got {' and '.join(given)}: {error}. The target of the last stage goes "
                "by target="
            ) from error


def _check_edges(
    stage: PipelineStage, args: Sequence[tuple[Any, ...]], kwargs: Sequence[Mapping[str, Any]]
) -> None:
    """Raise ``ValueError`` for arguments of a batch that the edges of no stage name.

    They would be dropped silently.
    """
    keywords = {name for edges in stage.all_edges for name in edges.keywords()}
    unknown = sorted({name for named in kwargs for name in named} - keywords)
    if unknown:
        raise ValueError(
            f"step() got the keyword arguments {unknown}, which the edges of no stage name: "
            f"expected some of {sorted(keywords)}; add each to the edges of its stages, as "
            "Source(None, keyword)"
        )
    most = max((at + 1 for edges in stage.all_edges for at in edges.positions()), default=0)
    count = max(map(len, args), default=0)
    if stage.takes_batch and count > most:
        raise ValueError(
            f"step() got {count} positional arguments, and the edges of all stages name only the "
            f"first {most}: add the others to the edges of their stages, as Source(None, position)"
        )


def check_declared(
    stage: PipelineStage, args: tuple[Any, ...], specs: object, microbatches: int
) -> None:
    """Compare the first chunk of the batch with the declared inputs, before it is cut."""
    if stage.declared_inputs is None or not args:
        return
    leaves, dims = Values.of(args).leaves, cut_dims(args, specs)
    problems = []
    for number, (meta, leaf, dim) in enumerate(
        zip(stage.declared_inputs.leaves, leaves, dims, strict=False)
    ):
        if not isinstance(meta, TensorMeta) or not isinstance(leaf, torch.Tensor):
            continue
        what = f"{stage.name} argument {number}"
        got = list(leaf.shape)
        if dim is not None:
            got[dim] = -(-got[dim] // microbatches)
        if list(meta.shape) != got:
            problems.append(
                f"{what} has a shape mismatch: expected {list(meta.shape)} actual {got}"
            )
        if meta.dtype is not leaf.dtype:
            problems.append(
                f"{what} has a dtype mismatch: expected {meta.dtype} actual {leaf.dtype}"
            )
    if problems:
        raise PipeliningShapeError("; ".join(problems))


def _arguments(
    stage: PipelineStage, microbatch: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of the module, those from other stages as new leaves."""
    if stage.is_first and stage.takes_any_keyword:
        return list(args), dict(kwargs)
    nested = stage.chunks[microbatch].read(has_backward=stage.has_backward)
    only = stage.edges.only
    if only is not None and only in nested and not kwargs:
        return list(nested[only]), {}
    missing = {index for index in stage.edges.sources() if index not in nested}
    if missing:
        raise RuntimeError(
            f"{stage.name} has no outputs of stages {sorted(missing)} for chunk {microbatch}: "
            "they come by the schedule, or by set_local_fwd_input()"
        )
    given: list[Any] = []
    for source in stage.edges.args:
        found = _found(stage, source, nested, args, kwargs)
        given += found if source.stage is not None and source.output is None else (found,)
    named = dict(kwargs) if stage.takes_any_keyword else {}
    for name, source in stage.edges.kwargs:
        if source.keyword is None or source.keyword in kwargs:
            named[name] = _found(stage, source, nested, args, kwargs)
    return given, named


def _found(
    stage: PipelineStage,
    source: Source,
    nested: Mapping[int, tuple[Any, ...]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:  # noqa: ANN401
    if source.stage is None:
        if source.keyword is not None:
            if source.keyword not in kwargs:
                raise ValueError(
                    f"{stage.name} takes the keyword argument {source.keyword!r} of the batch: "
                    f"give it to step() on rank {stage.group_rank} of the pipeline as well"
                )
            return kwargs[source.keyword]
        position = int(source.output or 0)
        if position >= len(args):
            raise ValueError(
                f"{stage.name} takes argument {position} of the batch, and this rank's step got "
                f"{len(args)} positional arguments"
            )
        return args[position]
    outputs = nested[source.stage]
    return outputs if source.output is None else outputs[int(source.output)]


def _other_dtypes(stage: PipelineStage, given: Sequence[Any]) -> str:
    """Name floating-point arguments of other dtypes than the parameters; "" if there are none.

    A stage that declares its inputs checks them before they are used.
    """
    own = {p.dtype for p in stage.submod.parameters() if p.is_floating_point()}
    return "; ".join(
        f"{stage.name} argument {number} has a dtype mismatch: expected {dtype} actual {x.dtype}"
        for number, x in enumerate(given)
        for dtype in sorted(own, key=str)[:1]
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype not in own
    )


def _writes_in_place(module: nn.Module) -> bool:
    """Whether a part of ``module`` has ``inplace`` set, or a graph that writes in place."""
    return any(
        getattr(part, "inplace", False)
        or (isinstance(part, fx.GraphModule) and any(map(_is_mutable, part.graph.nodes)))
        for part in module.modules()
    )


def _is_mutable(node: fx.Node) -> bool:
    """Whether ``node`` writes to a value other than a buffer."""
    schema = any_schema_of(node.target)
    if node.op != "call_function" or not getattr(schema, "is_mutable", False) or not node.args:
        return False
    written = node.args[0]
    return isinstance(written, fx.Node) and written.op != "get_attr"


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a view, or a tensor that requires gradients."""
    return tensor.clone() if tensor.requires_grad or is_view(tensor) else tensor


def _advice(error: Exception) -> str:
    """Advice for an ``error`` about an in-place write to a received value; empty for others."""
    text = str(error)
    if "leaf Variable that requires grad" not in text or "in-place operation" not in text:
        return ""
    return (
        "; the stage writes in place to what it has received from another stage: let its first "
        "operation make a new tensor (y = x + 1 for x += 1, relu for relu_), or clone its input"
    )
