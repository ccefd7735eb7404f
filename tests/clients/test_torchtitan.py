"""torchtitan's own functions on ours, by names alone: `parallelize_llama`, `pipeline_llm`.

Its models mask attention by operators for GPUs: the model here has its class for the plain one. Its
kernels for expert parallelism need triton, which a CPU does not have: something stands for these.
"""

from __future__ import annotations

import copy
import sys
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright import pipelining
from meshwright.comm import communicator
from meshwright.testing import Ranks
from support.internals.integrations import torch_names

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS, ROWS, LENGTH, WORDS = 5, 8, 16, 2048


def titan() -> Any:
    """torchtitan, imported with our names; with meshes on CPUs and float64, which it leaves out."""
    sys.modules.setdefault("torchtitan.distributed.minimal_async_ep", MagicMock())
    with torch_names.installed():
        import torchtitan.distributed.fsdp
        import torchtitan.distributed.parallel_dims
        import torchtitan.distributed.pipeline_parallel
        import torchtitan.distributed.utils
        import torchtitan.models.common.attention
        import torchtitan.models.llama3
    torchtitan.distributed.parallel_dims.device_type = "cpu"
    torchtitan.config.TORCH_DTYPE_MAP["float64"] = torch.float64
    assert torchtitan.distributed.fsdp.fully_shard is mw.fully_shard
    assert torchtitan.distributed.pipeline_parallel.PipelineStage is pipelining.PipelineStage
    return torchtitan


def llama(titan: Any) -> tuple[nn.Module, Any]:
    config = titan.models.llama3._debugmodel("flex")
    config.layers = config.layers[:4]
    for layer in config.layers:
        plain = titan.models.common.attention.ScaledDotProductAttention.Config()
        layer.attention.inner_attention = plain
        layer.attention.rope.max_seq_len = LENGTH
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model.double(), config


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=draw)
    return words[:, :-1], words[:, 1:]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """This rank's part of the mean over all tokens: gradients are summed, as torchtitan has it."""
    whole = ROWS * LENGTH
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum") / whole


def adamw(parts: list[nn.Module]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)


def alone(titan: Any) -> list[tuple[float, float]]:
    """Losses and norms of one process."""
    model, _ = llama(titan)
    optimizer = adamw([model])
    found = []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def settings(titan: Any, **degrees: Any) -> dict[str, Any]:
    """What torchtitan's functions are given."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig

    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", **degrees)
    size = communicator().size
    return {
        "parallel_dims": titan.distributed.parallel_dims.ParallelDims.from_config(
            parallelism, size
        ),
        "training": TrainingConfig(
            mixed_precision_param="float64", mixed_precision_reduce="float64", local_batch_size=ROWS
        ),
        "parallelism": parallelism,
        "compile_config": CompileConfig(),
        "ac_config": None,
        "dump_folder": "",
    }


def same(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=0.0)


def body_sharded(degrees: dict[str, int]) -> None:
    theirs, world = titan(), communicator()
    model, _ = llama(theirs)
    given = settings(theirs, **degrees)
    theirs.models.llama3.parallelize_llama(model, **given)
    assert isinstance(model, theirs.distributed.fsdp.FSDPModule)
    optimizer = adamw([model])
    found = []
    for step in range(STEPS):
        x, y = (part.chunk(world.size)[world.rank] for part in batch(step))
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        norm = theirs.distributed.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = world.all_reduce(loss.detach().clone()).wait()
        found.append((float(total), float(norm)))
    same(found, alone(theirs))


@pytest.mark.parametrize(
    "degrees",
    [{"data_parallel_shard_degree": 2}, {"data_parallel_replicate_degree": 2}],
    ids=["sharded", "replicated"],
)
def test_parallelize_llama_trains_as_one_process(ranks: Ranks, degrees: dict[str, int]) -> None:
    ranks(2, body_sharded, degrees, timeout=240)


def body_pipelined(schedule: str) -> None:
    theirs, world = titan(), communicator()
    model, config = llama(theirs)
    given = settings(theirs, pipeline_parallel_degree=2, pipeline_parallel_schedule=schedule)
    made, parts, is_first, is_last = theirs.distributed.pipeline_parallel.pipeline_llm(
        copy.deepcopy(model),
        device=torch.device("cpu"),
        model_config=config,
        parallelize_fn=theirs.models.llama3.parallelize_llama,
        loss_fn=lambda output, target: (loss_of(output, target), None),
        **given,
    )
    assert isinstance(made, pipelining.PipelineSchedule)
    assert set(made.stage_index_to_group_rank.values()) == {0, 1}
    optimizer = adamw(parts)
    found = []
    for step in range(STEPS):
        x, y = batch(step)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        options = {"target": y, "losses": losses} if is_last else {}
        made.step(*((x,) if is_first else ()), **options)
        parameters = [p for part in parts for p in part.parameters()]
        mesh = given["parallel_dims"].get_mesh("pp")
        norm = theirs.distributed.utils.clip_grad_norm_(parameters, 1.0, pp_mesh=mesh)
        optimizer.step()
        total = torch.zeros((), dtype=torch.float64)
        total = total + sum(each.detach() for each in losses)
        found.append((float(world.all_reduce(total).wait()), float(norm)))
    same(found, alone(theirs))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_pipeline_llm_trains_as_one_process(ranks: Ranks, schedule: str) -> None:
    ranks(2, body_pipelined, schedule, timeout=240)
