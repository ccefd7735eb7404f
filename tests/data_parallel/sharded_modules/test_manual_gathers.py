"""Gathers after calls of unshard, reshard and their settings by hand: no more than torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as peer

from meshwright.comm import Recorder, observe
from meshwright.data_parallel import fully_shard
from meshwright.testing import Ranks

X = torch.ones(2, 4)


def build(shard: Any, after: bool | None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in (model[1], model[2]):
        shard(layer, reshard_after_forward=after)
    shard(model, reshard_after_forward=after)
    return model


def between(model: Any, *called: int | None) -> None:
    y = model(X).sum()
    for number in called:
        (model if number is None else model[number]).reshard()
    y.backward()


def unshard_all(model: Any) -> None:
    for part in (model, model[1], model[2]):
        part.unshard()
    between(model)


def settings(model: Any, *, after: bool) -> None:
    model.set_reshard_after_forward(after)
    between(model)
    between(model)


PROGRAMS: dict[str, Callable[[Any], None]] = {
    "nothing": lambda model: between(model),
    "root": lambda model: between(model, None),
    "unit": lambda model: between(model, 2),
    "all": lambda model: between(model, None, 1, 2, 2),
    "unshard": unshard_all,
    "kept": lambda model: settings(model, after=False),
    "freed": lambda model: settings(model, after=True),
}


def gathers(after: bool | None, program: Callable[[Any], None]) -> tuple[int, int]:
    """Of ours and of torch's, in the second iteration: the first sets up."""
    ours, theirs = build(fully_shard, after), build(peer, after)
    for model in (ours, theirs):
        between(model)
    recorder = Recorder()
    with observe(recorder):
        program(ours)
    found = sum(1 for each in recorder.collectives if each.label.startswith("unshard"))
    # Which of its names torch's calls depends on its version.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    with mock.patch.object(dist, name, side_effect=getattr(dist, name)) as counted:
        program(theirs)
    return found, counted.call_count


def body() -> None:
    found: dict[tuple[str, bool | None], tuple[int, int]] = {}
    for after in (None, True, False):
        for name, program in PROGRAMS.items():
            ours, theirs = gathers(after, program)
            found[name, after] = ours, theirs
    assert {key: pair for key, pair in found.items() if not 0 < pair[0] <= pair[1]} == {}


@pytest.mark.slow
def test_no_more_gathers_than_torch(ranks: Ranks) -> None:
    ranks(2, body)
