"""The schedules as classes, with torch's names and constructors. All run on one `Runtime`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from meshwright.errors import PipeliningShapeError
from meshwright.pipelining.batch import Microbatches
from meshwright.pipelining.custom import PipelineContext, check_custom
from meshwright.pipelining.edges import edges_of
from meshwright.pipelining.metadata import TensorMeta, Values
from meshwright.pipelining.microbatch import (
    TensorChunkSpec,
    chunk_weights,
    is_plain,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from meshwright.pipelining.program import CustomFunction
from meshwright.pipelining.residency import find_residency
from meshwright.pipelining.runtime import Runtime
from meshwright.pipelining.stage import PipelineStage
from meshwright.schedule import builders
from meshwright.schedule.actions import (
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    Action,
    B,
    F,
    I,
    Operation,
    Schedule,
    W,
)
from meshwright.schedule.checks import check, check_lowered
from meshwright.schedule.lowering import forward_part, lower
from meshwright.schedule.text import load_csv

__all__ = [
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "FORWARD",
    "FULL_BACKWARD",
    "OVERLAP_F_B",
    "RECV_B",
    "RECV_F",
    "REDUCE_GRAD",
    "RESHARD",
    "SEND_B",
    "SEND_F",
    "UNSHARD",
    "B",
    "F",
    "I",
    "PipelineContext",
    "PipelineSchedule",
    "PipelineScheduleMulti",
    "PipelineScheduleRuntime",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "W",
    "generate_rank_to_stage_mapping",
    "generate_stage_to_rank_mapping",
    "get_schedule_class",
]


class PipelineSchedule:
    """Runs the stages of this rank, step by step, in the order of a schedule.

    ``loss_fn(output, target)`` returns one microbatch's loss; without it only forwards run.
    ``scale_grads`` weighs each loss by its share of the batch, as mean losses need. Of stages that
    are sharded over ranks at most ``unsharded`` of this rank are gathered at a time.
    """

    builder: ClassVar[Callable[..., Schedule] | None] = None

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: Mapping[str, TensorChunkSpec] | None = None,
        output_merge_spec: object = None,
        scale_grads: bool = True,
        *,
        unsharded: int = 3,
    ) -> None:
        self._stages = {stage.stage_index: stage for stage in stages}
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self._args_chunk_spec = args_chunk_spec
        self._kwargs_chunk_spec = kwargs_chunk_spec
        self._output_merge_spec = output_merge_spec
        self.scale_grads = scale_grads
        self._unsharded = unsharded
        self._first = stages[0]
        self._custom: dict[Operation, CustomFunction] = {}
        self._runtime: Runtime | None = None
        self._use(self._compute())

    # ---------------------------------------------------------------------- schedule

    @property
    def stages(self) -> Mapping[int, PipelineStage]:
        """The stages of this rank, by index."""
        return MappingProxyType(self._stages)

    def _compute(self) -> Schedule:
        """The compute actions of all ranks."""
        builder = type(self).builder
        if builder is None:
            raise TypeError(f"{type(self).__name__} has no schedule of its own; load one from CSV")
        ranks, stages = self._first.group_size, self._first.num_stages
        edges = edges_of(self._first.all_edges)
        return builder(ranks, self._n_microbatches, stages // ranks, edges)

    def _use(self, compute: Schedule, lowered: Schedule | None = None) -> None:
        """Take ``compute`` as the order to run, checked, with transfers added."""
        communicator = self._first.communicator
        number = communicator.number("schedule")
        mine = compute.stages_of(communicator.rank)
        if tuple(sorted(self._stages)) != mine:
            raise ValueError(
                f"{type(self).__name__} puts stages {list(mine)} on rank {communicator.rank}, but "
                f"got stages {sorted(self._stages)}"
            )
        has_backward = any(a.operation is not F for a in compute.actions(communicator.rank))
        check(compute, ranks=communicator.size, forward_only=not has_backward)
        residencies = {i: find_residency(s.submod) for i, s in self._stages.items()}
        if lowered is None:
            lowered = lower(compute, unsharded=self._unsharded)
        evaluation = lower(forward_part(compute), unsharded=self._unsharded, reduce=False)
        check_lowered(lowered)
        check_lowered(evaluation)
        self.schedule = compute
        self.lowered = lowered
        self._runtime = Runtime(
            self._stages,
            lowered,
            evaluation,
            communicator,
            self._loss_fn,
            residencies,
            number,
        )
        self._runtime.register(self._custom)

    def register_custom_function(
        self, computation_type: Operation, custom_function: CustomFunction
    ) -> None:
        """Run ``custom_function(action, ctx)`` in place of an operation's actions on this rank.

        The operations are F, B, I, W, OVERLAP_F_B, UNSHARD, RESHARD and REDUCE_GRAD, ``ctx`` is a
        `PipelineContext`. Receives have come before, and sends follow. A function for OVERLAP_F_B
        is given both parts; without one they run in order. A function for an operation that had
        one takes its place. Raises ``ValueError`` for another operation.
        """
        self._custom[check_custom(computation_type)] = custom_function
        if self._runtime is not None:
            self._runtime.register(self._custom)

    # -------------------------------------------------------------------------- steps

    def step(
        self,
        *args: Any,
        target: object = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:  # noqa: ANN401
        """Run one step on the whole batch and return the merged output on the last stage's rank.

        The first stage's rank gives ``args``, the last stage's ``target``; any rank may give
        keyword arguments. Gradients are added to ``.grad``. ``losses`` is filled by microbatch.
        """
        if self._loss_fn is not None and not torch.is_grad_enabled():
            raise RuntimeError(
                "step() requires gradients to be enabled for backward computation; it was called "
                "under no_grad or inference_mode. Please call eval() instead."
            )
        training = self._loss_fn is not None
        return self._run(training, args, kwargs, target, losses, return_outputs, loss_kwargs)

    def eval(
        self,
        *args: Any,
        target: object = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:  # noqa: ANN401
        """Run the forwards only; gradients stay as they are. A loss needs a ``target``."""
        with torch.no_grad():
            return self._run(False, args, kwargs, target, losses, return_outputs, loss_kwargs)

    def _run(
        self,
        training: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: object,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: Mapping[str, Any] | None,
    ) -> Any:  # noqa: ANN401
        if self._runtime is None:
            raise RuntimeError("this schedule has no order of actions")
        last = self._stages.get(self._first.num_stages - 1)
        try:
            batch = self._split(args, kwargs, target, loss_kwargs)
            if losses is not None and not isinstance(losses, list):
                raise TypeError(f"losses must be a list but got a {type(losses)}")
            if training and last is not None and batch.targets is None:
                raise RuntimeError(
                    "step() with a loss_fn needs a target on the rank of the last stage, but got "
                    "none"
                )
        except Exception as error:
            self._runtime.refused(error)
            raise
        self._runtime.run(batch, training=training)
        if losses is not None and last is not None and batch.targets is not None:
            losses[:] = batch.losses
        if last is None or not return_outputs:
            return None
        return merge_chunks(last.output_chunks, self._output_merge_spec)

    def _split(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: object,
        loss_kwargs: Mapping[str, Any] | None,
    ) -> Microbatches:
        count = self._n_microbatches
        first = self._stages.get(0)
        if first is not None:
            self._check_declared(first, args)
        arg_mbs: Sequence[tuple[Any, ...]] = [()] * count
        kwarg_mbs: Sequence[Mapping[str, Any]] = []
        weights: Sequence[float] = ()
        key = None
        if args or kwargs:
            arg_mbs, kwarg_mbs = split_args_kwargs_into_chunks(
                args, kwargs, count, self._args_chunk_spec, self._kwargs_chunk_spec
            )
            if not kwargs:
                kwarg_mbs = []
                if self._args_chunk_spec is None and is_plain(args, count):
                    key = tuple((a.shape, a.stride(), a.dtype) for a in args)
        for stage in self._stages.values():
            stage.check_microbatches(arg_mbs, kwarg_mbs)
        targets = None
        if target is not None:
            chunks, _ = split_args_kwargs_into_chunks((target,), {}, count)
            targets = [chunk[0] for chunk in chunks]
            if self.scale_grads:
                weights = chunk_weights(targets)
        return Microbatches(
            arg_mbs, kwarg_mbs, targets, weights, loss_kwargs or {}, [], self, self.scale_grads, key
        )

    def _check_declared(self, stage: PipelineStage, args: tuple[Any, ...]) -> None:
        """Compare the first chunk of the batch with the declared inputs, before it is cut."""
        declared = stage.declared_inputs
        if declared is None or not args:
            return
        leaves = Values.of(args).leaves
        problems = []
        for number, (meta, leaf) in enumerate(zip(declared.leaves, leaves, strict=False)):
            if not isinstance(meta, TensorMeta) or not isinstance(leaf, torch.Tensor):
                continue
            what = f"{stage.name} argument {number}"
            rows = -(-leaf.shape[0] // self._n_microbatches) if leaf.dim() else 0
            got = [rows, *leaf.shape[1:]] if leaf.dim() else []
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


class PipelineScheduleSingle(PipelineSchedule):
    """A schedule with one stage a rank."""

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: Mapping[str, TensorChunkSpec] | None = None,
        output_merge_spec: object = None,
        scale_grads: bool = True,
        *,
        unsharded: int = 3,
    ) -> None:
        super().__init__(
            [stage],
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
            unsharded=unsharded,
        )


class PipelineScheduleMulti(PipelineSchedule):
    """A schedule with several stages a rank.

    ``use_full_backward`` is deprecated and has no effect; ``defer_pp_recv`` has none, because
    receives are posted and never block.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: Mapping[str, TensorChunkSpec] | None = None,
        output_merge_spec: object = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        use_full_backward: bool | None = None,
        *,
        unsharded: int = 3,
    ) -> None:
        if use_full_backward is not None:
            warnings.warn(
                "use_full_backward is deprecated: the schedule says which backward it runs",
                FutureWarning,
                stacklevel=2,
            )
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
            unsharded=unsharded,
        )


class PipelineScheduleRuntime(PipelineScheduleMulti):
    """Runs the order of a CSV file, once it has been loaded."""

    def _compute(self) -> Schedule:
        ranks, stages = self._first.group_size, self._first.num_stages
        return builders.looped_bfs(
            ranks, self._n_microbatches, stages // ranks, edges_of(self._first.all_edges)
        )

    def _load_csv(self, filename: str | Path, format: str = "compute_only") -> None:
        """Take the order from a file of compute actions, or of all actions."""
        if format not in ("compute_only", "compute_comms"):
            raise NotImplementedError(f"format={format!r} is not supported")
        loaded = load_csv(filename)
        if format == "compute_only":
            self._use(loaded)
        else:
            self._use(loaded, loaded)


class _ScheduleForwardOnly(PipelineScheduleSingle):
    """Forwards only."""

    builder = staticmethod(builders.forward_only)


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards."""

    builder = staticmethod(builders.gpipe)


class Schedule1F1B(PipelineScheduleSingle):
    """One forward, one backward in turn, after as few forwards as fill the pipeline."""

    builder = staticmethod(builders.one_f_one_b)


class ScheduleInterleaved1F1B(PipelineScheduleMulti):
    """1F1B over several stages a rank."""

    builder = staticmethod(builders.interleaved_1f1b)


class ScheduleLoopedBFS(PipelineScheduleMulti):
    """Breadth first: stage by stage all forwards, then all backwards."""

    builder = staticmethod(builders.looped_bfs)


class ScheduleInterleavedZeroBubble(PipelineScheduleMulti):
    """ZB1P: weight halves of the backward fill the bubble."""

    builder = staticmethod(builders.zb1p)


class ScheduleZBVZeroBubble(PipelineScheduleMulti):
    """ZBV: zero bubble on a V of two stages a rank."""

    builder = staticmethod(builders.zbv)


class ScheduleDualPipeV(PipelineScheduleMulti):
    """DualPipeV: both halves of a V at once."""

    builder = staticmethod(builders.dualpipev)


_CLASSES: Mapping[str, type[PipelineSchedule]] = MappingProxyType(
    {
        "1F1B": Schedule1F1B,
        "Interleaved1F1B": ScheduleInterleaved1F1B,
        "GPipe": ScheduleGPipe,
        "LoopedBFS": ScheduleLoopedBFS,
        "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
        "PipelineScheduleSingle": PipelineScheduleSingle,
        "PipelineScheduleMulti": PipelineScheduleMulti,
        "ZBVZeroBubble": ScheduleZBVZeroBubble,
        "DualPipeV": ScheduleDualPipeV,
    }
)


def get_schedule_class(schedule_name: str) -> type[PipelineSchedule]:
    """The class called ``schedule_name``, in any case. Raises ``ValueError`` for another name."""
    lowered = {name.lower(): found for name, found in _CLASSES.items()}
    if schedule_name.lower() not in lowered:
        raise ValueError(
            f"Unknown schedule name '{schedule_name}'. The valid options are {list(_CLASSES)}"
        )
    return lowered[schedule_name.lower()]


def generate_stage_to_rank_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, int]:
    """By stage its rank: round and round (``loop``) or back and forth (``v``).

    Raises ``ValueError`` for another style, or for stages that do not divide among the ranks.
    """
    return dict(enumerate(builders.stage_ranks(pp_size, num_stages, style)))


def generate_rank_to_stage_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, list[int]]:
    """By rank its stages, the inverse of `generate_stage_to_rank_mapping`."""
    ranks = builders.stage_ranks(pp_size, num_stages, style)
    return {rank: [s for s, r in enumerate(ranks) if r == rank] for rank in range(pp_size)}


# torch's names, which programs import.
_PipelineSchedule, _PipelineScheduleRuntime = PipelineSchedule, PipelineScheduleRuntime
_PipelineContext = PipelineContext
_Action, _ComputationType = Action, Operation
FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FULL_BACKWARD = F, I, W, B
OVERLAP_F_B = Operation.OVERLAP_F_B
