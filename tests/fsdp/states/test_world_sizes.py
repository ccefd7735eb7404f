"""Training that goes on from 2 ranks to 3 to 4, through torch, and shards of another size."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard as peer_fully_shard

from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import ModuleWrapPolicy, StateDictType
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 1)).double()


def adam(model: nn.Module, lr: float = 0.1) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        if isinstance(model, FSDP) or hasattr(model, "set_requires_gradient_sync"):
            x = x.chunk(dist.get_world_size())[dist.get_rank()]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def one_process(steps: int) -> dict[str, torch.Tensor]:
    model = net()
    train(model, adam(model), range(steps))
    return model.state_dict()


def wrapped(use_orig_params: bool, seed: int = 0) -> FSDP:
    policy = ModuleWrapPolicy({nn.Linear})
    return FSDP(net(seed), auto_wrap_policy=policy, use_orig_params=use_orig_params)


def states(model: FSDP, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    found = FSDP.optim_state_dict(model, optimizer)
    return {"model": model.state_dict(), "optimizer": found["state"]}, found


def save(folder: Path, kind: str, model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    with FSDP.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"]):
        state, _ = states(model, optimizer)
        if kind != "FULL":
            dcp.save(state, checkpoint_id=folder)
        elif dist.get_rank() == 0:
            folder.mkdir(parents=True)
            torch.save(state, folder / "whole.pt")
    dist.barrier()


def load(folder: Path, kind: str, model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    # A step gives the optimizer state of every kind and shape that is to be loaded.
    train(model, optimizer, range(1))
    with FSDP.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"]):
        state, found = states(model, optimizer)
        if kind == "FULL":
            state = torch.load(folder / "whole.pt")
        else:
            dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        found["state"] = state["optimizer"]
        FSDP.optim_state_dict_to_load(model, optimizer, found, load_directly=True)


def body_other_size(folder: Path) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    model = wrapped(False)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        name = folder / f"{dist.get_rank()}.pt"
        if dist.get_world_size() == 2:
            torch.save({k: v.local.clone() for k, v in model.state_dict().items()}, name)
            return
        if dist.get_rank() < 2:
            with pytest.raises(RuntimeError, match="A LOCAL state dict belongs to as many ranks"):
                model.load_state_dict(torch.load(name))


def test_local_shards_of_another_size_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, body_other_size, tmp_path)
    ranks(3, body_other_size, tmp_path)


def peer_of(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    peer = net(seed)
    peer_fully_shard(peer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return peer, adam(peer)


def peer_states(peer: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": peer.state_dict(),
        "optimizer": get_optimizer_state_dict(peer, optimizer)["state"],
    }


def body_to_torch(folder: Path, use_orig_params: bool) -> None:
    """Ours trains 2 steps, torch's FSDP2 one more, ours the last."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    size = dist.get_world_size()
    if size == 2:
        model = wrapped(use_orig_params)
        optimizer = adam(model)
        train(model, optimizer, range(2))
        save(folder / "ours", "SHARDED", model, optimizer)
        return
    if size == 3:
        peer, optimizer = peer_of(seed=5)
        train(peer, optimizer, range(1))
        state = peer_states(peer, optimizer)
        dcp.load(state, checkpoint_id=folder / "ours")
        peer.load_state_dict(state["model"])
        whole = get_optimizer_state_dict(peer, optimizer)
        set_optimizer_state_dict(peer, optimizer, {**whole, "state": state["optimizer"]})
        train(peer, optimizer, range(2, 3))
        for name, value in one_process(3).items():
            torch.testing.assert_close(peer.state_dict()[name].full_tensor(), value, msg=name)
        dcp.save(peer_states(peer, optimizer), checkpoint_id=folder / "theirs")
        return
    model = wrapped(use_orig_params, seed=7)
    optimizer = adam(model)
    load(folder / "theirs", "SHARDED", model, optimizer)
    train(model, optimizer, range(3, 4))
    for name, value in one_process(4).items():
        torch.testing.assert_close(model.state_dict()[name], value, msg=name)


@pytest.mark.few(1)
@pytest.mark.devices("host", reason="torch's FSDP keeps memory by record_stream, on no CPU")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_training_goes_to_torch_and_back(
    ranks: Ranks, tmp_path: Path, use_orig_params: bool
) -> None:
    for size in (2, 3, 4):
        ranks(size, body_to_torch, tmp_path, use_orig_params)
