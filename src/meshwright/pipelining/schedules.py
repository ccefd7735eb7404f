"""The schedules as classes, with torch's names and constructors. All run on one `Runtime`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.errors import warn
from meshwright.pipelining.edges import edges_of
from meshwright.pipelining.microbatch import (
    TensorChunkSpec,
)
from meshwright.pipelining.stage import PipelineStage
from meshwright.pipelining.stepping.custom import PipelineContext
from meshwright.pipelining.stepping.stepping import PipelineSchedule
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
from meshwright.schedule.lowering import with_residency
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
    "ScheduleZBVZeroBubble",
    "W",
    "generate_rank_to_stage_mapping",
    "generate_stage_to_rank_mapping",
    "get_schedule_class",
]


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

    ``use_full_backward`` is deprecated. It has no effect, and neither has
    ``backward_requires_autograd`` nor ``defer_pp_recv``: posting a receive never blocks.
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
        target_chunk_spec: object = None,
        unsharded: int = 3,
    ) -> None:
        if use_full_backward is not None:
            warn(
                "use_full_backward is deprecated: the schedule says which backward it runs",
                FutureWarning,
            )
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
            target_chunk_spec=target_chunk_spec,
            unsharded=unsharded,
        )

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
    """Runs the order of a CSV file, once it has been loaded."""

    def _compute(self) -> Schedule:
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


SCHEDULE_NAMES = tuple(name for name, kind in _CLASSES.items() if kind.builder is not None)
"""The names of the schedules that have an order of their own."""


def get_schedule_class(schedule_name: str) -> type[PipelineSchedule]:
    """Return the class called ``schedule_name``, ignoring case. Raises ``ValueError`` for none."""
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

    Raises ``ValueError`` for another style, or for stages that do not divide among the ranks.
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
