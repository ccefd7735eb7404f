"""`dcp.async_save` of the facade, and meshes of which another axis is not data."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from meshwright.comm import communicator
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import ModuleWrapPolicy, ShardingStrategy
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.checkpoint.interchange import differences, sorted_groups

FULL = StateDictOptions(full_state_dict=True)


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def layouts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{}, {"use_orig_params": True}]
    if communicator().size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "shard"))
        found += [
            {"use_orig_params": True, "device_mesh": mesh["shard"]},
            {"device_mesh": mesh["shard"]},
            {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD},
        ]
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 5, dtype=torch.float64)).square().mean().backward()
    optimizer.step()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    weights, moments = get_state_dict(model, optimizer, options=FULL)
    return [weights, sorted_groups(moments)]


def body_saved_while_it_trains(folder: Path) -> None:
    warnings.filterwarnings("ignore")
    one = net(0)
    theirs = torch.optim.AdamW(one.parameters())
    step(one, theirs)
    expected = whole(one, theirs)
    for number, options in enumerate(layouts()):
        model = FSDP(net(0), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **options)
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        future: Any = dcp.async_save(state, checkpoint_id=folder / str(number))
        getattr(future, "upload_completion", future).result()
        step(model, optimizer)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=folder / str(number))
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        assert differences(whole(model, optimizer), expected) == [], options


@pytest.mark.backends("gloo")
@pytest.mark.devices("host", reason="torch asks for a CPU backend, which simulated is not")
def test_saved_while_it_trains(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, body_saved_while_it_trains, tmp_path)
