"""torch's distributed checkpoint with the facade, in both directions; older function names."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as Peer
from torch.distributed.fsdp import StateDictType as PeerType
from torch.distributed.fsdp import fully_shard as peer_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as PeerPolicy

from meshwright.comm import Recorder, observe
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import ModuleWrapPolicy, StateDictType
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.internals.comm import ShardView
from support.values import assert_close, is_equal


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def wrapped(use_orig_params: bool, seed: int = 0) -> FSDP:
    policy = ModuleWrapPolicy({nn.Linear})
    return FSDP(net(seed), auto_wrap_policy=policy, use_orig_params=use_orig_params)


def quiet() -> None:
    warnings.filterwarnings("ignore", message="FSDP.state_dict_type")
    warnings.filterwarnings("ignore", message="`_get_pg_default_device`")
    warnings.filterwarnings("ignore", message="Multiple backends are registered")
    warnings.filterwarnings("ignore", message=".*deprecat", category=FutureWarning)


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    return optimizer


def body_save(folder: str, use_orig_params: bool) -> None:
    quiet()
    model = wrapped(use_orig_params)
    optimizer = trained(model)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        recorder = Recorder()
        with observe(recorder):
            state = {"model": model.state_dict(), "optimizer": optimizer_of(model, optimizer)}
        assert recorder.collectives == []
    dcp.save(state, checkpoint_id=folder)


def optimizer_of(model: FSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return FSDP.optim_state_dict(model, optimizer)["state"]


def body_load(folder: str, use_orig_params: bool) -> None:
    quiet()
    plain = net()
    plain_optimizer = trained(plain)
    model = wrapped(use_orig_params, seed=1)
    optimizer = trained(model)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    for name, value in plain.state_dict().items():
        assert_close(model.state_dict()[name], value)
    if not use_orig_params:
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            named = FSDP.optim_state_dict(model, optimizer)
            state = {"optimizer": named["state"]}
            dcp.load(state, checkpoint_id=folder)
            named["state"] = state["optimizer"]
            FSDP.optim_state_dict_to_load(model, optimizer, named, load_directly=True)
        found = FSDP.optim_state_dict(model, optimizer)["state"]
        expected = plain_optimizer.state_dict()["state"]
        for index, (name, _) in enumerate(plain.named_parameters()):
            assert_close(found[name]["exp_avg"], expected[index]["exp_avg"])
    peer = net(seed=2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    peer_fully_shard(peer, mesh=mesh)
    state = {"model": peer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    peer.load_state_dict(state["model"])
    for name, value in plain.state_dict().items():
        assert_close(peer.state_dict()[name].full_tensor(), value)


@pytest.mark.few(1)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_checkpoints_go_to_other_world_sizes_and_to_torch(
    ranks: Ranks, tmp_path: Path, use_orig_params: bool
) -> None:
    ranks(2, body_save, str(tmp_path), use_orig_params)
    ranks(3, body_load, str(tmp_path), use_orig_params)


def body_from_torch(folder: str) -> None:
    quiet()
    peer = net()
    peer_fully_shard(peer, mesh=init_device_mesh("cpu", (2,)))
    dcp.save({"model": peer.state_dict()}, checkpoint_id=folder)
    model = wrapped(False, seed=1)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    for name, value in net().state_dict().items():
        assert is_equal(model.state_dict()[name], value)


def test_checkpoints_come_from_torch(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, body_from_torch, str(tmp_path))


def body_save_all(folder: str) -> None:
    quiet()
    model = wrapped(False)
    optimizer = trained(model)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {
            "model": model.state_dict(),
            "optimizer": FSDP.optim_state_dict(model, optimizer),
        }
    dcp.save(state, checkpoint_id=folder)


def body_resume_by_loader(folder: str, use_orig_params: bool) -> None:
    quiet()
    plain = net()
    expected = trained(plain).state_dict()["state"]
    model = wrapped(use_orig_params, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        loaded = load_sharded_optimizer_state_dict(
            model.state_dict(), "optimizer", dcp.FileSystemReader(folder)
        )
        own = FSDP.optim_state_dict_to_load(model, optimizer, loaded["optimizer"])
    optimizer.load_state_dict(own)
    found = FSDP.optim_state_dict(model, optimizer)["state"]
    for index, (name, _) in enumerate(plain.named_parameters()):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert_close(found[name][key], expected[index][key])


@pytest.mark.few(1)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])  # of 4 ranks one has no part of the last layer
def test_torchs_loader_of_sharded_optimizers(
    ranks: Ranks, tmp_path: Path, use_orig_params: bool, size: int
) -> None:
    ranks(2, body_save_all, str(tmp_path))
    ranks(size, body_resume_by_loader, str(tmp_path), use_orig_params)


def body_from_peer(use_orig_params: bool) -> None:
    quiet()
    policy = PeerPolicy({nn.Linear})
    cpu = torch.device("cpu")
    peer: Any = Peer(net(), auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=cpu)
    theirs = trained(peer)
    model = wrapped(use_orig_params, seed=1)
    ours = torch.optim.AdamW(model.parameters(), lr=0.1)
    with (
        Peer.state_dict_type(peer, PeerType.SHARDED_STATE_DICT),
        FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT),
    ):
        model.load_state_dict(peer.state_dict())
        given = Peer.optim_state_dict(peer, theirs)
        ours.load_state_dict(FSDP.optim_state_dict_to_load(model, ours, given))
    plain = net()
    expected = trained(plain).state_dict()["state"]
    for name, value in plain.state_dict().items():
        assert_close(model.state_dict()[name], value)
    found = FSDP.optim_state_dict(model, ours)["state"]
    for index, (name, _) in enumerate(plain.named_parameters()):
        for key, value in expected[index].items():
            assert_close(found[name][key], value)


@pytest.mark.backends("gloo")
@pytest.mark.filterwarnings("ignore:FSDP will not all-gather", "ignore:Please use DTensor")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.devices("host", reason="torch's class compares the indexes of devices")
def test_sharded_states_of_torchs_class(ranks: Ranks, use_orig_params: bool) -> None:
    ranks(2, body_from_peer, use_orig_params)


def body_functions() -> None:
    quiet()
    plain = net().state_dict()
    for use_orig_params in (False, True):
        model = wrapped(use_orig_params)
        recorder = Recorder()
        with observe(recorder):
            found = get_model_state_dict(model)
        assert recorder.collectives == []
        assert list(found) == list(plain)
        assert all(is_equal(found[name], plain[name]) for name in plain)
        parts = [value for value in found.values() if isinstance(value, ShardView)]
        assert len(parts) == len(plain)
        assert sum(part.local.numel() for part in parts) < sum(part.numel() for part in parts)
        for options in (
            StateDictOptions(cpu_offload=True),
            StateDictOptions(full_state_dict=True),
            StateDictOptions(full_state_dict=True, cpu_offload=True),
        ):
            given = get_model_state_dict(model, options=options)
            if given or not options.full_state_dict:  # torch keeps what it offloads on rank 0
                assert all(is_equal(given[name], plain[name]) for name in plain)
            is_part = [isinstance(value, ShardView) for value in given.values()]
            assert is_part == [not options.full_state_dict] * len(given)
        other = wrapped(use_orig_params, seed=1)
        set_model_state_dict(other, found)
        assert all(is_equal(other.state_dict()[name], plain[name]) for name in plain)
        # The optimizer of what is beside it is loaded.
        one = net()
        _, moments = get_state_dict(one, trained(one))
        beside = nn.ModuleDict({"sharded": model, "plain": one})
        only = torch.optim.Adam(one.parameters())
        named = {"state": {f"plain.{k}": v for k, v in moments["state"].items()}}
        groups = [
            {**g, "params": [f"plain.{k}" for k in g["params"]]} for g in moments["param_groups"]
        ]
        set_optimizer_state_dict(beside, only, {**named, "param_groups": groups})
        assert only.state


def test_functions_of_torch_for_models(ranks: Ranks) -> None:
    ranks(2, body_functions)


def body_legacy() -> None:
    model = wrapped(False)
    optimizer = trained(model)
    with pytest.warns(FutureWarning, match="^``FullyShardedDataParallel.full_optim_state_dict``is"):
        whole = FSDP.full_optim_state_dict(model, optimizer)
    assert bool(whole) == (dist.get_rank() == 0)
    text = "^``FullyShardedDataParallel.scatter_full_optim_state_dict``is being deprecated"
    with pytest.warns(FutureWarning, match=text):
        mine = FSDP.scatter_full_optim_state_dict(whole or None, model, optim=optimizer)
    with pytest.warns(FutureWarning, match="^``FullyShardedDataParallel.sharded_optim_state_dict"):
        sharded = FSDP.sharded_optim_state_dict(model, optimizer)
    with pytest.warns(FutureWarning, match="flatten_sharded_optim_state_dict``is being deprecated"):
        flat = FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer)
    with pytest.warns(FutureWarning, match="full_optim_state_dict"):
        whole = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    with pytest.warns(FutureWarning) as caught:
        again = FSDP.shard_full_optim_state_dict(whole, model, list(model.parameters()))
    assert any(str(w.message).startswith("The `optim_input` argument is") for w in caught)
    for found in (mine, flat, again):
        assert found["state"].keys() == optimizer.state_dict()["state"].keys()
        for key, own in optimizer.state_dict()["state"].items():
            for name, value in own.items():
                assert_close(found["state"][key][name], value)


def test_older_names(ranks: Ranks) -> None:
    ranks(2, body_legacy)


def body_resume_before_a_step(folder: str, use_orig_params: bool) -> None:
    quiet()
    plain = net()
    plain_optimizer = trained(plain)
    model = wrapped(use_orig_params, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    assert FSDP.optim_state_dict(model, optimizer)["state"] == {}
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"optimizer": FSDP.optim_state_dict(model, optimizer)}
        assert set(state["optimizer"]["state"]) == set(dict(plain.named_parameters())) or (
            use_orig_params
        )
        assert not any(optimizer.state.values())
        dcp.load(state, checkpoint_id=folder)
        own = FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"])
    optimizer.load_state_dict(own)
    found = FSDP.optim_state_dict(model, optimizer)["state"]
    expected = plain_optimizer.state_dict()["state"]
    for index, (name, _) in enumerate(plain.named_parameters()):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert_close(found[name][key], expected[index][key])
    for parameter, kept in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, kept)


@pytest.mark.few(1)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_an_optimizer_that_has_not_stepped_resumes(
    ranks: Ranks, tmp_path: Path, use_orig_params: bool, size: int
) -> None:
    ranks(2, body_save_all, str(tmp_path))
    ranks(size, body_resume_before_a_step, str(tmp_path), use_orig_params)
