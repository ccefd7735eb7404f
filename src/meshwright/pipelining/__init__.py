"""Pipelines: stages of a model on different ranks, run in the order of any schedule.

Bottom-up: `edges` (where a stage's arguments come from), `constants` (what is no tensor),
`metadata` (what values look like), `microbatch` (cutting and merging), `weight_rules` and
`backward` (the two halves of a backward), `halves` (what lies between them), `residency`
(parameters that are spread or copied over ranks), `ties` (parameters that several stages hold),
`inbox` (what has come to a stage), `in_place`, `losses`, `stage`, `program` (a rank's row with its
stages and messages), `custom` (functions of the user in place of actions), `batch` (what a step was
given), `agreed` (what ranks need not tell again), `transfers` (what they tell each other in a
step), `unanswered` (the same where ranks are no processes), `failures`, `turns` (who waits in
another schedule), `listener` (who is told of it), `runtime` (the one interpreter), `stage_checks`,
`stepping` (what schedules have in common), `schedules` (the classes that users call), `clipping`
(the norm over all stages).

From a model to stages: `split_points` (where it is cut), `front` (other ways to say so),
`stage_module` (the graph of a stage), `placement` (what runs in which stage), `splitting` (the
graphs and edges of all stages), `tracing` (from a module to a graph), `measuring` and
`balance` (stages of equal cost), `traced_stage`, `pipe` (`pipeline` and `build_stage`).
"""

from meshwright.errors import PipelinePeerError, PipeliningShapeError
from meshwright.pipelining.backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from meshwright.pipelining.balance import balanced
from meshwright.pipelining.clipping import clip_grad_norm_
from meshwright.pipelining.edges import Source, StageEdges
from meshwright.pipelining.front import (
    LossWrapper,
    PipeSequential,
    TrivialLossWrapper,
    stages_by_name,
)
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
from meshwright.pipelining.pipe import (
    MultiUseParameterConfig,
    Pipe,
    PipeInfo,
    pipeline,
)
from meshwright.pipelining.residency import Residency
from meshwright.pipelining.schedules import (
    PipelineContext,
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
    ScheduleZBVZeroBubble,
    generate_rank_to_stage_mapping,
    generate_stage_to_rank_mapping,
    get_schedule_class,
)
from meshwright.pipelining.schedules import _PipelineSchedule as _PipelineSchedule
from meshwright.pipelining.schedules import _PipelineScheduleRuntime as _PipelineScheduleRuntime
from meshwright.pipelining.schedules import _ScheduleForwardOnly as _ScheduleForwardOnly
from meshwright.pipelining.split_points import SplitPoint, annotate_split_points, pipe_split
from meshwright.pipelining.stage import PipelineStage, build_stage
from meshwright.pipelining.ties import Tie

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
