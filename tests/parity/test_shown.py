"""Names of torch's that no other test needs: options, classes that others are made of, printing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.pipelining.schedules as torch_schedules
from torch import nn

import meshwright.fsdp as our_fsdp
import meshwright.pipelining as our_pipelining
from meshwright.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from meshwright.pipelining import PipelineScheduleSingle, SplitPoint, pipeline
from meshwright.testing import Ranks

OPTIONS = (
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "StateDictConfig",
)
SCHEDULES = (
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
)


def fields_of(options: Any) -> dict[str, Any]:
    """The fields of a class of options with their defaults, as long as they are plain values."""
    return {
        field.name: str(getattr(made, field.name))
        for made in [options()]
        for field in dataclasses.fields(options)
        if field.name != "_module_classes_to_ignore"
    }


@pytest.mark.parametrize("name", OPTIONS)
def test_options_have_the_fields_and_defaults_of_torch(name: str) -> None:
    theirs, ours = fields_of(getattr(torch_fsdp, name)), fields_of(getattr(our_fsdp, name))
    assert ours.items() >= theirs.items()


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_found_by_name_and_of_the_kind_of_torch(name: str) -> None:
    ours, theirs = getattr(our_pipelining, name), getattr(torch_schedules, name)
    assert our_pipelining.get_schedule_class(name.removeprefix("Schedule")) is ours
    assert issubclass(ours, PipelineScheduleSingle) == issubclass(
        theirs, torch_schedules.PipelineScheduleSingle
    )


def dtypes_of_outputs() -> tuple[torch.dtype, str]:
    """The dtype of an output that is cast, and the error of inputs that are not."""
    narrow = torch.bfloat16
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=narrow, output_dtype=torch.half))
    output = model(torch.ones(2, 4))
    precision = MixedPrecision(
        param_dtype=narrow, cast_forward_inputs=False, cast_root_forward_inputs=False
    )
    with pytest.raises(RuntimeError, match="dtype") as raised:
        FullyShardedDataParallel(nn.Linear(4, 4), mixed_precision=precision)(torch.ones(2, 4))
    return output.dtype, str(raised.value)


def test_outputs_are_cast_and_inputs_are_not_where_options_say_so(ranks: Ranks) -> None:
    for dtype, _ in ranks(2, dtypes_of_outputs):
        assert dtype == torch.half


def test_the_code_of_stages_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    pipe = pipeline(model, (torch.ones(2, 2),), split_spec={"1": SplitPoint.BEGINNING})
    pipe.print_readable()
    assert "submod_1" in capsys.readouterr().out
