"""Optimizer state by position and by the older functions, between wrapped and plain models."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import OptimStateKeyType, StateDictType
from meshwright.testing import Ranks
from support.values import assert_close


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), Inner(), nn.Linear(3, 3)).double()


def groups(model: nn.Module, *, count: int) -> list[dict[str, Any]]:
    """All parameters in one group, or those of ``Inner`` in a first one."""
    if count == 1:
        return [{"params": list(model.parameters())}]
    inside = [p for m in model.modules() if isinstance(m, Inner) for p in m.parameters()]
    known = set(inside)
    return [
        {"params": inside, "lr": 0.3},
        {"params": [p for p in model.parameters() if p not in known]},
    ]


def stepped(model: nn.Module, count: int) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(groups(model, count=count), lr=0.1)
    for scale in (1.0, 2.0):
        optimizer.zero_grad()
        x = torch.arange(6, dtype=torch.float64).view(2, 3) * scale
        model(x).square().sum().backward()
        optimizer.step()
    return optimizer


def wrapped(*, use_orig_params: bool) -> FSDP:
    model = net()
    model[1] = FSDP(model[1], use_orig_params=use_orig_params)
    return FSDP(model, use_orig_params=use_orig_params)


def same_state(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    for own, other in zip(found.param_groups, expected.param_groups, strict=True):
        assert own["lr"] == other["lr"]
        for parameter, one in zip(own["params"], other["params"], strict=True):
            for key, value in expected.state[one].items():
                assert_close(found.state[parameter][key], value)


def body(use_orig_params: bool, count: int) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    optimizer = stepped(model, count)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    plain = net()
    expected = stepped(plain, count)
    # By position, into an optimizer of the plain model, and from there back.
    other = net()
    fresh = torch.optim.Adam(groups(other, count=count), lr=0.1)
    by_position = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, other, optim=fresh)
    fresh.load_state_dict(by_position)
    same_state(fresh, expected)
    reversed_groups = {**full, "param_groups": full["param_groups"][::-1]}
    fresh.load_state_dict(
        FSDP.rekey_optim_state_dict(reversed_groups, OptimStateKeyType.PARAM_ID, other, optim=fresh)
    )
    same_state(fresh, expected)
    named = FSDP.rekey_optim_state_dict(
        expected.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=expected
    )
    again = torch.optim.Adam(groups(model, count=count), lr=0.1)
    again.load_state_dict(FSDP.shard_full_optim_state_dict(named, model, optim=again))
    held = optimizer.state_dict()
    same_state(again, optimizer)
    # Groups of the user are read.
    given = groups(model, count=count)
    before = [dict(group) for group in given]
    by_input = FSDP.shard_full_optim_state_dict(full, model, optim_input=given)
    FSDP.scatter_full_optim_state_dict(full, model, optim_input=given)
    FSDP.full_optim_state_dict(model, optimizer, optim_input=given)
    FSDP.rekey_optim_state_dict(
        full, OptimStateKeyType.PARAM_ID, other, optim_input=groups(other, count=count)
    )
    assert [list(group) for group in given] == [list(group) for group in before]
    again.load_state_dict(by_input)
    assert [g["lr"] for g in again.param_groups] == [g["lr"] for g in optimizer.param_groups]
    # Neither an optimizer nor settings are needed.
    if count == 1:
        assert FSDP.shard_full_optim_state_dict(full, model)["param_groups"][0]["lr"] == 0.1
        found = FSDP.scatter_full_optim_state_dict(full, model)
        assert found["state"].keys() >= held["state"].keys()
    bare = {"state": full["state"]}
    for found in (
        FSDP.shard_full_optim_state_dict(bare, model, optim=again),
        FSDP.flatten_sharded_optim_state_dict(bare, model, optim=again),
        FSDP.scatter_full_optim_state_dict(
            bare if dist.get_rank() == 0 else None, model, optim=again
        ),
        FSDP.optim_state_dict_to_load(model, again, bare),
    ):
        assert list(found) == ["state"]
        for number, own in held["state"].items():
            for key, value in own.items():
                assert_close(found["state"][number][key], value)
    found = FSDP.optim_state_dict(model, optimizer, {"state": held["state"]})
    assert list(found) == ["state"] and list(found["state"]) == list(full["state"])
    assert list(FSDP.optim_state_dict_to_load(model, again, bare, is_named_optimizer=True)) == [
        "state"
    ]


def body_all() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    for use_orig_params in (False, True):
        for count in (1, 2):
            body(use_orig_params, count)


def test_positions_and_older_functions(ranks: Ranks) -> None:
    ranks(2, body_all)


def same_dicts(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["state"].keys() == expected["state"].keys()
    assert found["param_groups"] == expected["param_groups"]
    for number, own in expected["state"].items():
        assert own.keys() == found["state"][number].keys()
        for key, value in own.items():
            assert type(found["state"][number][key]) is type(value)
            assert_close(found["state"][number][key], value)


def body_elsewhere() -> None:
    """Load what was saved into a model that is wrapped in other places, or has more parameters."""
    warnings.simplefilter("ignore", FutureWarning)
    for use_orig_params in (False, True):
        model = wrapped(use_orig_params=use_orig_params)
        optimizer = stepped(model, 1)
        sharded = FSDP.sharded_optim_state_dict(model, optimizer)
        full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        # A round trip leaves an optimizer that has been loaded as one that has trained.
        again = torch.optim.Adam(groups(model, count=1))
        again.load_state_dict(FSDP.optim_state_dict_to_load(model, again, full))
        same_dicts(again.state_dict(), optimizer.state_dict())
        # Here only the last module is wrapped: the others get whole state.
        other = net()
        other[2] = FSDP(other[2], use_orig_params=use_orig_params)
        trained = stepped(other, 1)
        fresh = torch.optim.Adam(groups(other, count=1))
        with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
            loads = [FSDP.optim_state_dict_to_load(other, fresh, sharded)]
        loads.append(FSDP.flatten_sharded_optim_state_dict(sharded, other, optim=fresh))
        loads.append(FSDP.shard_full_optim_state_dict(full, other, optim=fresh))
        for load in loads:
            same_dicts(load, trained.state_dict())
        with pytest.raises(ValueError, match="is a part of it that another wrapping has left"):
            FSDP.optim_state_dict_to_load(other, fresh, sharded)
    # A parameter that was not there is left to the user, or refused where it has to count alike.
    outside, inside = net(), net()
    outside.register_parameter("more", nn.Parameter(torch.zeros(2).double()))
    inside[1].register_parameter("more", nn.Parameter(torch.zeros(2).double()))
    for grown in (outside, inside):
        grown[1] = FSDP(grown[1])
        fresh = torch.optim.Adam(grown.parameters())
        for function, state in (
            (FSDP.shard_full_optim_state_dict, full),
            (FSDP.flatten_sharded_optim_state_dict, sharded),
        ):
            if grown is inside:
                with pytest.raises(ValueError, match="^All unflattened parameters comprising a "):
                    function(state, grown, optim=fresh)
                continue
            load = function(state, grown, optim=fresh)
            assert load["param_groups"][0]["params"] == sorted(load["state"]) == [1, 2, 3, 4, 5]


def test_models_that_are_wrapped_elsewhere(ranks: Ranks) -> None:
    ranks(2, body_elsewhere)
