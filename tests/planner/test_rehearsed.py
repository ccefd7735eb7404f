"""The bytes of a rank, rehearsed in one process, against those of real ranks.

Parameters, gradients, optimizer state and buffers of communication are exact. So is nearly always
the most of all tensors at a time; it is within 5 % where routers send tokens as they like.
"""

from __future__ import annotations

import os
import resource
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from matrix.cells import ROWS, Cell, loss_of, optimizer_of, plan_of
from matrix.training import built, dtype_of
from meshwright import Plan, PlanError, comm
from meshwright.planner import RankBytes, rehearse
from meshwright.testing import Ranks
from support.internals.planner import rank_bytes

EXACT = ("parameters", "gradients", "optimizer", "communication")
QUICK = ("shard=2",)
LAYOUTS = (
    *("replicate=2", "tensor=2", "context=2", "expert=2", "pipeline=2", "shard=3"),
    *("replicate=2,shard=2", "replicate=2,tensor=2", "shard=2,tensor=2", "pipeline=2,shard=2"),
    *("shard=2,context=2", "shard=2,expert=2", "pipeline=2,tensor=2", "pipeline=4"),
    *("shard=8", "replicate=2,shard=2,tensor=2", "pipeline=2,shard=2,tensor=2"),
)
SAMPLES = 192
"""Of a rank's share: what is made of them is larger than what checks compute with."""


def cell_of(axes: str, schedule: str = "1f1b", **how: Any) -> Cell:
    model = "language model"
    for axis, other in (("context", "attention"), ("expert", "mixture")):
        model = other if axis in axes else model
    schedule = schedule if "pipeline" in axes else ""
    return Cell(axes=axes, model=model, schedule=schedule, optimizer="adamw", **how)


def share_of(cell: Cell) -> tuple[Any, Any]:
    """One share of a batch, which all ranks train on here."""
    batch, target = ROWS[cell.model].sample.example_batch(SAMPLES, torch.Generator().manual_seed(5))
    return in_dtype(cell, batch), target


def in_dtype(cell: Cell, batch: Any) -> Any:
    return batch.to(dtype_of(cell)) if batch.is_floating_point() else batch


def rehearsed(cell: Cell, rank: int) -> RankBytes:
    how = {"loss": loss_of(cell), "optimizer": optimizer_of(cell)}
    return rehearse(rank, partial(built, cell), plan_of(cell), *share_of(cell), **how)


def measured(cell: Cell) -> tuple[RankBytes, dict[str, int]]:
    """What a rank counts in its run, and what it counts by its tensors alone."""
    made: list[torch.optim.Optimizer] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(optimizer_of(cell)(parameters))
        return made[0]

    example, _ = ROWS[cell.model].sample.example_batch(4, torch.Generator().manual_seed(1))
    found = rank_bytes(
        partial(built, cell),
        plan_of(cell),
        *share_of(cell),
        loss=loss_of(cell),
        optimizer=optimizer,
        example=(in_dtype(cell, example),),
    )
    held = [parameter for group in made[0].param_groups for parameter in group["params"]]
    states = [t for state in made[0].state.values() for t in state.values()]
    alone = {"parameters": sum(map(local_bytes, held)), "optimizer": sum(map(local_bytes, states))}
    return found, alone


def local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def check(ranks: Ranks, cell: Cell) -> None:
    for rank, (found, alone) in enumerate(ranks(cell.world, measured, cell, timeout=240)):
        expected = rehearsed(cell, rank)
        for name in EXACT:
            wanted, got = getattr(expected, name), getattr(found, name)
            assert wanted == got, (name, str(cell), rank, expected, found)
        is_near = abs(expected.peak - found.peak) <= 0.05 * found.peak
        assert is_near, (str(cell), rank, expected, found)
        assert alone["parameters"] == found.parameters, (str(cell), rank)
        assert alone["optimizer"] == found.optimizer, (str(cell), rank)


@pytest.mark.parametrize("axes", QUICK)
def test_a_rehearsal_has_the_bytes_of_the_run(ranks: Ranks, axes: str) -> None:
    check(ranks, cell_of(axes))


@pytest.mark.slow
@pytest.mark.parametrize("axes", LAYOUTS)
def test_a_rehearsal_has_the_bytes_of_every_run(ranks: Ranks, axes: str) -> None:
    check(ranks, cell_of(axes))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved1f1b", "zb1p", "dualpipev"])
def test_schedules_are_rehearsed(ranks: Ranks, schedule: str) -> None:
    check(ranks, cell_of("pipeline=2", schedule))


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"option": "recompute"},
        {"option": "other units"},
        {"accumulate": 2},
        {"precision": "bfloat16"},
    ],
)
@pytest.mark.parametrize("axes", ["replicate=2", "shard=2"])
def test_options_of_a_plan_are_rehearsed(ranks: Ranks, axes: str, how: dict[str, Any]) -> None:
    check(ranks, cell_of(axes, **how))


def test_a_process_trains_after_a_rehearsal(ranks: Ranks) -> None:
    """With what torch keeps of meshes, and this library of its groups."""
    cell = cell_of("expert=2")

    def body() -> tuple[RankBytes, RankBytes]:
        expected = rehearsed(cell, int(os.environ["RANK"]))
        comm.connect()
        return expected, measured(cell)[0]

    for expected, found in ranks(2, body, connected=False):
        assert expected.parameters == found.parameters


def test_a_rank_of_many_needs_no_others() -> None:
    cell = cell_of("shard=64")
    found = rehearsed(cell, 5)
    whole = sum(p.numel() for p in built(cell).parameters()) * 8
    # The first dim of a shard is rounded up.
    assert whole / 64 <= found.parameters < whole / 8
    assert found.gradients == found.parameters


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))


def resident_of_a_run() -> tuple[RankBytes, int]:
    found = rank_bytes(
        wide,
        Plan.from_toml("[axes]\nshard = 2"),
        torch.ones(4, 1024),
        torch.ones(4, 1024),
        loss=functional.mse_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
    )
    return found, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_resident_memory_has_named_parts(ranks: Ranks) -> None:
    for found, most in ranks(2, resident_of_a_run):
        parts = found.resident
        assert set(parts) == {"files", "started", "shared", "tensors", "free", "other"}
        # The kernel adds pages to ru_maxrss in batches, so that it may lag by some.
        assert 0.97 * most <= sum(parts.values()) <= most + 2**20
        # A half of each weight with its two moments; whole ones lie in shared memory, with sums.
        assert 3 * 8 << 20 <= parts["tensors"] <= found.peak
        assert parts["shared"] >= 4 << 20
        assert abs(parts["other"]) <= 0.1 * sum(parts.values())


def test_a_rank_that_the_plan_has_not_is_refused() -> None:
    cell = cell_of("shard=2")
    with pytest.raises(PlanError, match="rank: expected 0 to 1") as caught:
        rehearse(2, partial(built, cell), plan_of(cell), None, loss=print, optimizer=print)  # pyrefly: ignore
    assert "shard" in str(caught.value)
