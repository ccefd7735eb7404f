"""Optimizer state dicts: out, in, to another world size, and their errors."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ModuleWrapPolicy,
    OptimStateKeyType,
    StateDictType,
)
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.testing import Ranks
from support.values import assert_close, is_equal

KINDS = {"full": StateDictType.FULL_STATE_DICT, "sharded": StateDictType.SHARDED_STATE_DICT}


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 2)).double()


def wrapped(use_orig_params: bool, seed: int = 0) -> FSDP:
    policy = ModuleWrapPolicy({nn.Linear})
    return FSDP(net(seed), auto_wrap_policy=policy, use_orig_params=use_orig_params)


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 5, dtype=torch.float64, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> torch.Tensor:
    loss = torch.zeros(())
    for step in steps:
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = batch(step).chunk(size)[rank] if isinstance(model, FSDP) else batch(step)
        optimizer.zero_grad()
        loss = model(mine).square().mean()
        loss.backward()
        optimizer.step()
    return loss


def expected() -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, range(3))
    names = [name for name, _ in model.named_parameters()]
    state = {names[k]: copy.deepcopy(v) for k, v in optimizer.state_dict()["state"].items()}
    train(model, optimizer, range(3, 5))
    return model.state_dict(), state


def body_round_trip(kind: str, use_orig_params: bool) -> None:
    warnings.filterwarnings("ignore", message="FSDP.state_dict_type")
    weights, optimizer_state = expected()
    model = wrapped(use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, range(3))
    with FSDP.state_dict_type(model, KINDS[kind]):
        state, saved = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    # As with torch, a rank that holds no element of an original parameter has no state of it.
    has_all = kind == "full" or not use_orig_params
    assert set(saved["state"]) == set(optimizer_state) or not has_all
    assert saved["param_groups"][0]["params"] == list(optimizer_state)
    for name, own in optimizer_state.items():
        for key, value in own.items() if name in saved["state"] else ():
            found = saved["state"][name][key]
            assert found.shape == value.shape
            if kind == "full":
                assert_close(found, value)
    # Full state goes to the other exposure as well.
    other = wrapped(use_orig_params if kind == "sharded" else not use_orig_params, seed=1)
    resumed = torch.optim.AdamW(other.parameters(), lr=0.5)
    with FSDP.state_dict_type(other, KINDS[kind]):
        other.load_state_dict(state)
        FSDP.optim_state_dict_to_load(other, resumed, saved, load_directly=True)
    assert resumed.param_groups[0]["lr"] == 0.1
    train(other, resumed, range(3, 5))
    for name, value in other.state_dict().items():
        assert_close(value, weights[name])


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_optimizer_state_round_trips(ranks: Ranks, kind: str, use_orig_params: bool) -> None:
    ranks(3, body_round_trip, kind, use_orig_params)


def body_rank0() -> None:
    warnings.filterwarnings("ignore", message="FSDP.state_dict_type")
    model = wrapped(False)
    optimizer = torch.optim.Adam(model.parameters())
    assert FSDP.optim_state_dict(model, optimizer)["state"] == {}
    train(model, optimizer, range(1))
    with FSDP.state_dict_type(
        model,
        KINDS["full"],
        FullStateDictConfig(rank0_only=True),
        FullOptimStateDictConfig(rank0_only=True),
    ):
        found = FSDP.optim_state_dict(model, optimizer)
    assert bool(found) == (dist.get_rank() == 0)


def test_only_the_first_rank_may_get_it(ranks: Ranks) -> None:
    ranks(2, body_rank0)


def body_keys() -> None:
    plain = net()
    optimizer = torch.optim.Adam(plain.parameters())
    train(plain, optimizer, range(1))
    state = optimizer.state_dict()
    model = wrapped(False)
    named = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, plain, optim=optimizer)
    assert set(named["state"]) == {name for name, _ in plain.named_parameters()}
    again = FSDP.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, plain, optim=optimizer)
    assert again["param_groups"] == state["param_groups"]
    sharded = torch.optim.Adam(model.parameters())
    FSDP.optim_state_dict_to_load(model, sharded, named, load_directly=True)
    mixed = {"state": {0: {}, "a": {}}, "param_groups": []}
    with pytest.raises(ValueError, match="^Invalid parameter keys:"):
        FSDP.rekey_optim_state_dict(mixed, OptimStateKeyType.PARAM_ID, plain)
    wrong: Any = "names"
    with pytest.raises(AssertionError, match="^Expected optim_state_key_type to be PARAM_NAME"):
        FSDP.rekey_optim_state_dict(state, wrong, plain)
    del named["state"]["0.bias"]["exp_avg"]
    with pytest.raises(ValueError, match="^Differing optimizer state names for the unflattened "):
        FSDP.optim_state_dict_to_load(model, sharded, named)
    named["state"]["0.bias"]["exp_avg"] = 3.0
    with pytest.raises(ValueError, match="^Differing optimizer state types for state"):
        FSDP.optim_state_dict_to_load(model, sharded, named)
    step = named["state"]["0.bias"]["step"]
    named["state"]["0.bias"]["exp_avg"] = torch.zeros_like(named["state"]["0.bias"]["exp_avg_sq"])
    for other in (step + 1, step.double()):
        named["state"]["0.bias"]["step"] = other
        with pytest.raises(ValueError, match="must have scalar state with the same value and dty"):
            FSDP.optim_state_dict_to_load(model, sharded, named)
    named["state"]["0.bias"]["step"] = step
    named["state"]["0.bias"]["exp_avg"] = torch.ones(2)
    with pytest.raises(ValueError, match="^Tensor optimizer state does not have same shape"):
        FSDP.optim_state_dict_to_load(model, sharded, named)
    kept = named["state"].pop("0.bias")
    FSDP.optim_state_dict_to_load(model, sharded, named, load_directly=True)
    found = FSDP.optim_state_dict(model, sharded)["state"]
    assert is_equal(found["0.weight"]["exp_avg"], named["state"]["0.weight"]["exp_avg"])
    assert not found["0.bias"]["exp_avg"].any()
    named["state"]["0.bias"] = {**kept, "exp_avg": kept["exp_avg_sq"], "step": torch.tensor(9.0)}
    with pytest.raises(ValueError, match="^All unflattened parameters comprising a single flat"):
        FSDP.optim_state_dict_to_load(model, sharded, named)


def test_keys_and_errors(ranks: Ranks) -> None:
    ranks(2, body_keys)
