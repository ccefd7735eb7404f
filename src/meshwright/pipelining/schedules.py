"""The schedules as classes, with torch's names and constructors. All run on one `Runtime`.

The class of all schedules splits a batch, runs it, and merges its outputs. `clip_grad_norm_` takes
one norm over all stages after a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from meshwright.errors import warn
from meshwright.gradients import (
    SpreadGradients,
    global_norm,
    group_by_spread,
    require_finite_norm,
    scale_to_norm,
)
from meshwright.pipelining.edges import edges_of
from meshwright.pipelining.microbatch import (
    Microbatches,
    TensorChunkSpec,
    check_cut,
    check_target,
    chunk_weights,
    cut_plain,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from meshwright.pipelining.residency import find_residencies
from meshwright.pipelining.runtime import CustomFunction, PipelineContext, Runtime, check_custom
from meshwright.pipelining.stage import PipelineStage, check_declared
from meshwright.pipelining.ties import counted
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
from meshwright.schedule.lowering import forward_part, lower, with_residency
from meshwright.schedule.text import load_csv
from meshwright.torch_internals.modules import compiled_call_of, is_forward_compiled

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
    "SCHEDULE_NAMES",
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
    "ScheduleVHalf",
    "ScheduleVMin",
    "ScheduleZB2P",
    "ScheduleZBVZeroBubble",
    "W",
    "clip_grad_norm_",
    "generate_rank_to_stage_mapping",
    "generate_stage_to_rank_mapping",
    "get_schedule_class",
]


def _check_arguments(stages: object, microbatches: object, loss_fn: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` for arguments that fit no schedule."""
    listed = list(stages) if isinstance(stages, Sequence) else [stages]
    wrong = [stage for stage in listed if not isinstance(stage, PipelineStage)]
    if wrong or not isinstance(stages, Sequence):
        raise TypeError(
            "expected one PipelineStage for a schedule of single stages and a list of them for "
            f"others, found {type(wrong[0] if wrong else stages).__name__}"
        )
    if not isinstance(microbatches, int) or isinstance(microbatches, bool):
        raise TypeError(f"expected n_microbatches to be an int, found {microbatches!r}")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"expected loss_fn(output, target) or None, found {loss_fn!r}")
    indices = [stage.stage_index for stage in listed]
    if not listed or len(set(indices)) < len(indices):
        raise ValueError(f"expected different stages, one or more, found {indices}")
    ranks, count = listed[0].group_size, listed[0].num_stages
    if count % ranks:
        raise ValueError(
            f"expected as many stages on each rank, found {count} stages for {ranks} ranks"
        )


def _is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` or a part of it is compiled, without importing torch's class."""
    return any(
        type(part).__name__ == "OptimizedModule"
        or compiled_call_of(part) is not None
        or is_forward_compiled(part)
        for part in module.modules()
    )


class PipelineSchedule:
    """Runs the stages of this rank, step by step, in the order of a schedule.

    ``loss_fn(output, target)`` returns one microbatch's loss; without it only forwards run.
    ``scale_grads`` weights each loss by its share of the batch, as mean losses need. Chunk specs
    say how arguments and target are split if not along dim 0; specs of arguments that this rank's
    step does not get are ignored. At most ``unsharded`` sharded stages of this rank are gathered
    at a time.
    """

    builder: ClassVar[Callable[..., Schedule] | None] = None
    computes_losses: ClassVar[bool] = True

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
        target_chunk_spec: object = None,
        unsharded: int = 3,
    ) -> None:
        if use_full_backward is not None:
            warn(
                "use_full_backward is deprecated: the schedule says which backward it runs",
                FutureWarning,
            )
        _check_arguments(stages, n_microbatches, loss_fn)
        self._stages = {stage.stage_index: stage for stage in stages}
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self._args_chunk_spec = args_chunk_spec
        self._kwargs_chunk_spec = kwargs_chunk_spec
        self._target_chunk_spec = target_chunk_spec
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
        """Build the compute actions of all ranks."""
        builder = type(self).builder
        if builder is None:
            raise TypeError(
                f"{type(self).__name__} has no order of its own; PipelineScheduleRuntime "
                "loads one from CSV"
            )
        ranks, stages = self._first.group_size, self._first.num_stages
        edges = edges_of(self._first.all_edges)
        return builder(ranks, self._n_microbatches, stages // ranks, edges)

    def _use(self, compute: Schedule, lowered: Schedule | None = None) -> None:
        """Check ``compute``, lower it, and make it the order to run."""
        communicator = self._first.communicator
        # Counted before any check raises: a schedule has one number on all ranks.
        number = communicator.number("schedule")
        mine = compute.stages_of(communicator.rank)
        if tuple(sorted(self._stages)) != mine:
            raise ValueError(
                f"{type(self).__name__} puts stages {list(mine)} on rank {communicator.rank}, but "
                f"got stages {sorted(self._stages)}"
            )
        has_backward = any(a.operation is not F for a in compute.actions(communicator.rank))
        check(compute, ranks=communicator.size, forward_only=not has_backward)
        if compute.split_backward and any(_is_compiled(s.submod) for s in self._stages.values()):
            raise RuntimeError(
                f"The {type(self).__name__} schedule is not supported with stage modules that have "
                "used torch.compile. Take one with whole backwards, such as 1F1B"
            )
        residencies = {i: find_residencies(s.submod) for i, s in self._stages.items()}
        if lowered is None:
            lowered = lower(compute, unsharded=self._unsharded)
        # Made ahead: `eval` after `step` sets up nothing and agrees on nothing.
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
            self._custom,
        )

    @property
    def pipeline_order(self) -> dict[int, list[Action | None]]:
        """The compute actions of each rank, in order; None is an idle time slot."""
        return dict(enumerate(map(list, self.schedule.rows)))

    @property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        """The pipeline rank of each stage."""
        return dict(enumerate(self.schedule.stage_ranks))

    def register_custom_function(
        self, computation_type: Operation, custom_function: CustomFunction
    ) -> None:
        """Run ``custom_function(action, ctx)`` in place of an operation's actions on this rank.

        The operations are F, B, I, W, OVERLAP_F_B, UNSHARD, RESHARD and REDUCE_GRAD, ``ctx`` is a
        `PipelineContext`. Receives have completed before, and sends follow. A function for
        OVERLAP_F_B gets both parts; without one they run in order. A later function for an
        operation replaces the earlier one. Raises ``ValueError`` for another operation.
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
        """Run one step on the full batch and return the merged output on the last stage's rank.

        The first stage's rank gives ``args``, the last stage's ``target``; any rank may give
        keyword arguments. Gradients are added to ``.grad``. ``losses`` is filled by microbatch.

        If all ranks reject a step for its arguments before anything was sent, the schedule stays
        usable: a loop may skip such a batch, on all ranks. If a step fails after some rank has
        begun it, the schedule ends, and all ranks raise, naming the first that failed.
        """
        cut = partial(self._split, args, kwargs, target, loss_kwargs)
        return self._run(cut, self._loss_fn is not None, losses, return_outputs)

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
            cut = partial(self._split, args, kwargs, target, loss_kwargs)
            return self._run(cut, False, losses, return_outputs)

    def step_microbatches(
        self,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
    ) -> Any:  # noqa: ANN401
        """Run `step` with a batch that is split already, in any way.

        ``arg_mbs`` has a tuple of positional arguments for each microbatch, ``kwarg_mbs`` a dict.
        With ``scale_grads`` a microbatch counts as many rows as its target has.
        """
        cut = partial(self._take_cut, arg_mbs, kwarg_mbs, target_mbs)
        return self._run(cut, self._loss_fn is not None, losses, return_outputs)

    def eval_microbatches(
        self,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
    ) -> Any:  # noqa: ANN401
        """Run `eval` with a batch that is split already, as for `step_microbatches`."""
        with torch.no_grad():
            cut = partial(self._take_cut, arg_mbs, kwarg_mbs, target_mbs)
            return self._run(cut, False, losses, return_outputs)

    _step_microbatches = step_microbatches  # torch's name

    def _run(
        self,
        cut: Callable[[], Microbatches],
        training: bool,
        losses: list[Any] | None,
        return_outputs: bool,
    ) -> Any:  # noqa: ANN401
        if self._runtime is None:
            raise RuntimeError("this schedule has no order of actions")
        last = self._stages.get(len(self._first.all_edges) - 1)
        try:
            if training and not torch.is_grad_enabled():
                raise RuntimeError(
                    "step() requires gradients to be enabled for backward computation; it was "
                    "called under no_grad or inference_mode. Please call eval() instead."
                )
            batch = cut()
            if losses is not None and not isinstance(losses, list):
                raise TypeError(f"losses must be a list but got a {type(losses)}")
            if not self.computes_losses and (batch.targets is not None or losses is not None):
                raise RuntimeError("Forward-only schedule does not support loss computation")
            if training and last is not None and batch.targets is None:
                given = len(batch.args[0])
                raise RuntimeError(
                    "step() with a loss_fn needs a target on the rank of the last stage, but got "
                    f"none{f' and {given} positional arguments: name it target=' if given else ''}"
                )
        except Exception as error:
            self._runtime.refused(error)
            raise
        self._runtime.run(batch, training=training)
        found = batch.all_losses()
        if losses is not None and last is not None and batch.targets is not None:
            losses[:] = found
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
        args_spec = self._args_chunk_spec if args else None
        first = self._stages.get(0)
        if first is not None and first.declared_inputs is not None:
            check_declared(first, args, args_spec, count)
        specs = self._kwargs_chunk_spec
        if specs and isinstance(specs, Mapping):  # other ranks may get more keyword arguments
            specs = {name: spec for name, spec in specs.items() if name in kwargs}
        arg_mbs: Sequence[tuple[Any, ...]] | None = None
        kwarg_mbs: Sequence[Mapping[str, Any]] = []
        key = None
        if not kwargs and not specs and args_spec is None:
            arg_mbs = cut_plain(args, count)
        if arg_mbs is not None:
            key = tuple([(each.shape, each.stride(), each.dtype) for each in args])
        elif args or kwargs:
            arg_mbs, kwarg_mbs = split_args_kwargs_into_chunks(
                args, kwargs, count, args_spec, specs
            )
        targets = None
        if target is not None:
            target_spec = self._target_chunk_spec
            if target_spec is None:
                check_target(target, (self._args_chunk_spec, self._kwargs_chunk_spec))
            only = None if target_spec is None else (target_spec,)
            chunks, _ = split_args_kwargs_into_chunks((target,), {}, count, only)
            targets = [chunk[0] for chunk in chunks]
        return self._batch(arg_mbs, kwarg_mbs if kwargs else [], targets, loss_kwargs or {}, key)

    def _take_cut(
        self,
        arg_mbs: list[tuple[Any, ...]] | None,
        kwarg_mbs: list[dict[str, Any]] | None,
        target_mbs: list[Any] | None,
    ) -> Microbatches:
        given = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
        check_cut(given, self._n_microbatches)
        return self._batch(arg_mbs, kwarg_mbs, target_mbs, {}, None)

    def _batch(
        self,
        arg_mbs: Sequence[tuple[Any, ...]] | None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None,
        targets: Sequence[Any] | None,
        loss_kwargs: Mapping[str, Any],
        key: object,
    ) -> Microbatches:
        args = arg_mbs or [()] * self._n_microbatches
        kwargs = kwarg_mbs or []
        for stage in self._stages.values():
            stage.check_microbatches(args, kwargs)
        weights: Sequence[float] = ()
        if targets is not None and self.scale_grads:
            weights = chunk_weights(targets, self._target_chunk_spec)
        return Microbatches(
            args, kwargs, targets, weights, loss_kwargs, [], self, self.scale_grads, key
        )


class PipelineScheduleSingle(PipelineSchedule):
    """A schedule with one stage per rank."""

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
        target_chunk_spec: object = None,
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
            target_chunk_spec=target_chunk_spec,
            unsharded=unsharded,
        )


class PipelineScheduleMulti(PipelineSchedule):
    """A schedule with several stages per rank.

    ``use_full_backward`` is deprecated. It has no effect, nor have ``backward_requires_autograd``
    and ``defer_pp_recv``: posting a receive never blocks.
    """

    def _load_csv(self, filename: str | Path, format: str = "compute_only") -> None:
        """Load the order from a file of compute actions.

        Raises ``AssertionError`` for another format.
        """
        if format != "compute_only":
            raise AssertionError(
                f'format must be "compute_only", found {format!r}: a file of all actions is for '
                "PipelineScheduleRuntime"
            )
        self._use(load_csv(filename))


class PipelineScheduleRuntime(PipelineScheduleMulti):
    """Runs ``order``, the compute actions of all ranks, or that of a CSV file, once loaded.

    ``order`` is the same on all ranks, such as what `meshwright.schedule.find_schedule` finds.
    Other arguments are those of `PipelineScheduleMulti`. Raises ``ValueError`` for an order of
    another number of stages or microbatches.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        *args: Any,
        order: Schedule | None = None,
        **kwargs: Any,
    ) -> None:
        self._order = order
        super().__init__(stages, n_microbatches, loss_fn, *args, **kwargs)

    def _compute(self) -> Schedule:
        if self._order is not None:
            expected = (self._first.num_stages, self._n_microbatches)
            found = (self._order.stages, self._order.microbatches)
            if found != expected:
                raise ValueError(
                    f"order has {found[0]} stages and {found[1]} microbatches, expected "
                    f"{expected[0]} and {expected[1]}, as the stages and n_microbatches say"
                )
            return replace(self._order, edges=edges_of(self._first.all_edges))
        ranks, stages = self._first.group_size, self._first.num_stages
        return builders.looped_bfs(
            ranks, self._n_microbatches, stages // ranks, edges_of(self._first.all_edges)
        )

    def _load_csv(self, filename: str | Path, format: str = "compute_only") -> None:
        """Load the order from a file of compute actions, or (``compute_comms``) of all actions.

        Raises ``NotImplementedError`` for another format.
        """
        if format not in ("compute_only", "compute_comms"):
            raise NotImplementedError(f"format={format!r} is not supported")
        loaded = load_csv(filename)
        self._use(loaded, loaded if format == "compute_comms" else None)


class _ScheduleForwardOnly(PipelineScheduleSingle):
    """Forwards only."""

    computes_losses = False
    builder = staticmethod(builders.forward_only)


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards."""

    builder = staticmethod(builders.gpipe)


class Schedule1F1B(PipelineScheduleSingle):
    """One forward and one backward in turn, after just enough forwards to fill the pipeline."""

    builder = staticmethod(builders.one_f_one_b)


class ScheduleInterleaved1F1B(PipelineScheduleMulti):
    """1F1B over several stages per rank."""

    builder = staticmethod(builders.interleaved_1f1b)


class ScheduleLoopedBFS(PipelineScheduleMulti):
    """Breadth first: all forwards stage by stage, then all backwards."""

    builder = staticmethod(builders.looped_bfs)


class ScheduleInterleavedZeroBubble(PipelineScheduleMulti):
    """ZB1P: weight halves of the backward fill the bubble."""

    builder = staticmethod(builders.zb1p)


class ScheduleZBVZeroBubble(PipelineScheduleMulti):
    """ZBV: zero bubble on a V of two stages per rank."""

    builder = staticmethod(builders.zbv)


class ScheduleZB2P(PipelineScheduleSingle):
    """ZB2P: zero bubble with twice the activations of 1F1B, and one stage per rank."""

    builder = staticmethod(builders.zb2p)


class ScheduleVHalf(PipelineScheduleMulti):
    """V-Half: half the activations of 1F1B, on a V of two stages per rank."""

    builder = staticmethod(builders.vhalf)


class ScheduleVMin(PipelineScheduleMulti):
    """V-Min: a third of the activations of 1F1B, on a V of two stages per rank."""

    builder = staticmethod(builders.vmin)


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
        "ZB2P": ScheduleZB2P,
        "VHalf": ScheduleVHalf,
        "VMin": ScheduleVMin,
    }
)


SCHEDULE_NAMES = tuple(name for name, kind in _CLASSES.items() if kind.builder is not None)
"""The names of the schedules that have an order of their own."""


def get_schedule_class(schedule_name: str) -> type[PipelineSchedule]:
    """Return the class called ``schedule_name``, ignoring case; ``ValueError`` if there is none."""
    lowered = {name.lower(): found for name, found in _CLASSES.items()}
    if schedule_name.lower() not in lowered:
        raise ValueError(
            f"Unknown schedule name '{schedule_name}'. The valid options are {list(_CLASSES)}"
        )
    return lowered[schedule_name.lower()]


def generate_stage_to_rank_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, int]:
    """Map each stage to its rank: round and round (``loop``) or back and forth (``v``).

    Raises ``ValueError`` for another style, or if ``num_stages`` is not a multiple of ``pp_size``.
    """
    return dict(enumerate(builders.stage_ranks(pp_size, num_stages, style)))


def generate_rank_to_stage_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, list[int]]:
    """Map each rank to its stages, the inverse of `generate_stage_to_rank_mapping`."""
    ranks = builders.stage_ranks(pp_size, num_stages, style)
    return {rank: [s for s, r in enumerate(ranks) if r == rank] for rank in range(pp_size)}


# torch's names, which user code imports.
_PipelineSchedule, _PipelineScheduleRuntime = PipelineSchedule, PipelineScheduleRuntime
_PipelineContext = PipelineContext
_Action, _ComputationType = Action, Operation
_add_unshard_reshard = with_residency
FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FULL_BACKWARD = F, I, W, B
OVERLAP_F_B = Operation.OVERLAP_F_B


def clip_grad_norm_(
    stages: PipelineStage | Sequence[PipelineStage],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients of all stages so that their joint norm is at most ``max_norm``.

    Returns the norm that one process would find, as a 0-dim tensor: over all stages on all ranks,
    over the axes on which a stage's parameters are sharded, with tied parameters counted once.
    Every rank of the pipeline calls it with all of its stages, after a step.

    Raises ``ValueError`` for a negative ``max_norm``, ``RuntimeError`` when the norm is not finite
    and ``error_if_nonfinite`` is set, naming the first rank, stage and parameter.
    """
    if max_norm < 0:
        raise ValueError(f"expected max_norm >= 0, found {max_norm}")
    listed = [stages] if isinstance(stages, PipelineStage) else list(stages)
    modules = {stage.stage_index: stage.submod for stage in listed}
    communicator = listed[0].communicator
    own = global_norm(group_by_spread(counted(modules, listed[0].ties)), norm_type)
    both = SpreadGradients(
        gradients=(own.to(communicator.device).reshape(1),),
        communicators=(communicator,),
        dtype=own.dtype,
    )
    norm = global_norm([both], norm_type)
    named = [
        (f"stage {index}: {name}", parameter)
        for index, module in modules.items()
        for name, parameter in module.named_parameters()
    ]
    if error_if_nonfinite:
        require_finite_norm(norm, norm_type, named, communicator)
    spread = group_by_spread(parameter for _, parameter in named)
    scale_to_norm([gradient for group in spread for gradient in group.gradients], norm, max_norm)
    return norm
