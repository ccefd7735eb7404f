"""Pipelines: stages of a model on different ranks, run in the order of any schedule.

Bottom-up:

    edges       the source of each argument of a stage, and tied parameters
    microbatch  splitting a batch, and merging outputs
    signature   the metadata of values that cross stages
    backward    the backward of a stage and microbatch, full or in halves
    stage       one stage, and its state for each microbatch
    p2p         the messages between stages of different ranks
    residency   parameters and gradients of a stage that are replicated or sharded
    ties        parameters that several stages share
    failures    a step that fails on one rank, and ranks in different steps
    runtime     one step: a rank's row with all lookups done, and its interpreter
    schedules   the classes that users call, and the norm over all stages
    splitting   from a model to its stages
"""

from meshwright.errors import PipelinePeerError, PipeliningShapeError
from meshwright.pipelining.backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from meshwright.pipelining.edges import Source, StageEdges, Tie
from meshwright.pipelining.microbatch import (
    Replicated,
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
    sum_reducer,
)
from meshwright.pipelining.microbatch import _CustomReducer as _CustomReducer
from meshwright.pipelining.microbatch import _LossReducer as _LossReducer
from meshwright.pipelining.microbatch import _Replicate as _Replicate
from meshwright.pipelining.residency import Residency
from meshwright.pipelining.runtime import PipelineContext
from meshwright.pipelining.schedules import (
    PipelineSchedule,
    PipelineScheduleMulti,
    PipelineScheduleRuntime,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleVHalf,
    ScheduleVMin,
    ScheduleZB2P,
    ScheduleZBVZeroBubble,
    clip_grad_norm_,
    generate_rank_to_stage_mapping,
    generate_stage_to_rank_mapping,
    get_schedule_class,
)
from meshwright.pipelining.schedules import _PipelineSchedule as _PipelineSchedule
from meshwright.pipelining.schedules import _PipelineScheduleRuntime as _PipelineScheduleRuntime
from meshwright.pipelining.schedules import _ScheduleForwardOnly as _ScheduleForwardOnly
from meshwright.pipelining.splitting.balance import balanced
from meshwright.pipelining.splitting.pipe import (
    MultiUseParameterConfig,
    Pipe,
    PipeInfo,
    pipeline,
)
from meshwright.pipelining.splitting.split_points import (
    LossWrapper,
    PipeSequential,
    SplitPoint,
    TrivialLossWrapper,
    annotate_split_points,
    pipe_split,
    stages_by_name,
)
from meshwright.pipelining.stage import PipelineStage, build_stage

PipeliningMetadataError = PipeliningShapeError

__all__ = [
    "LossWrapper",
    "MultiUseParameterConfig",
    "Pipe",
    "PipeInfo",
    "PipeSequential",
    "PipelineContext",
    "PipelinePeerError",
    "PipelineSchedule",
    "PipelineScheduleMulti",
    "PipelineScheduleRuntime",
    "PipelineScheduleSingle",
    "PipelineStage",
    "PipeliningMetadataError",
    "PipeliningShapeError",
    "Replicated",
    "Residency",
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
    "Source",
    "SplitPoint",
    "StageEdges",
    "TensorChunkSpec",
    "Tie",
    "TrivialLossWrapper",
    "annotate_split_points",
    "balanced",
    "build_stage",
    "clip_grad_norm_",
    "generate_rank_to_stage_mapping",
    "generate_stage_to_rank_mapping",
    "get_schedule_class",
    "merge_chunks",
    "pipe_split",
    "pipeline",
    "split_args_kwargs_into_chunks",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
    "stages_by_name",
    "sum_reducer",
]
