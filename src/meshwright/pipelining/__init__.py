"""Pipelines: stages of a model on different ranks, run in the order of any schedule.

Bottom-up: `edges` (where a stage's arguments come from), `metadata` (what values look like),
`microbatch` (cutting and merging), `weight_rules` and `backward` (the two halves of a backward),
`residency` (parameters that are spread or copied over ranks), `stage`, `transfers` (what ranks tell
each other in a step), `runtime` (the one interpreter), `schedules` (the classes that users call).
"""

from meshwright.errors import PipelinePeerError, PipeliningShapeError
from meshwright.pipelining.backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from meshwright.pipelining.edges import Source, StageEdges
from meshwright.pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from meshwright.pipelining.residency import Residency
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
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from meshwright.pipelining.stage import PipelineStage

PipeliningMetadataError = PipeliningShapeError

__all__ = [
    "PipelinePeerError",
    "PipelineSchedule",
    "PipelineScheduleMulti",
    "PipelineScheduleRuntime",
    "PipelineScheduleSingle",
    "PipelineStage",
    "PipeliningMetadataError",
    "PipeliningShapeError",
    "Residency",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "Source",
    "StageEdges",
    "TensorChunkSpec",
    "get_schedule_class",
    "merge_chunks",
    "split_args_kwargs_into_chunks",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
]
