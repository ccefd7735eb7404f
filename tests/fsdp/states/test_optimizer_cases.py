"""Optimizer state that is not the plain case: partly there, of other kinds, named, for one rank."""

from __future__ import annotations

import copy
import importlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Peer
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as PeerPolicy

from meshwright.comm import communicator
from meshwright.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    ModuleWrapPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    hybrid_process_groups,
)
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.testing import Ranks
from support.values import assert_close, is_equal

FULL, LOCAL, SHARDED = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
)
FIRST_ONLY = (FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True))


class Net(nn.Module):
    """The first parameter is never used; one is ignored, deep inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a_unused = nn.Linear(2, 2)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def wrapped(
    *, use_orig_params: bool, ignores: bool = False, policy: Any = None
) -> tuple[FSDP, Peer]:
    models = [Net(), Net()]
    ignored = [[m.body[1][0].weight] if ignores else None for m in models]
    ours = FSDP(
        models[0],
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
        ignored_states=ignored[0],
    )
    theirs = Peer(
        models[1],
        auto_wrap_policy=PeerPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
        ignored_states=ignored[1],
        device_id=communicator().device,
    )
    return ours, theirs


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # The same on every rank, so that what is ignored stays equal too.
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def full_names(found: dict[str, Any]) -> dict[str, list[str]]:
    return {name: sorted(state) for name, state in found["state"].items()}


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert full_names(found) == full_names(expected)
    for name, state in expected["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert_close(found["state"][name][key], value)
            else:
                assert found["state"][name][key] == value
    groups = [sorted(group["params"]) for group in found["param_groups"]]
    assert groups == [sorted(group["params"]) for group in expected["param_groups"]]


def quiet() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)


def body_first_rank() -> None:
    quiet()
    shard, replicate = hybrid_process_groups(communicator().group, 2)
    model = FSDP(
        Net(),
        process_group=(shard, replicate),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    expected = optimizer.state_dict()["state"]
    whole = FSDP.optim_state_dict(model, optimizer)
    with FSDP.state_dict_type(model, FULL, *FIRST_ONLY):
        of_world = FSDP.optim_state_dict(model, optimizer)
        of_node = FSDP.optim_state_dict(model, optimizer, group=shard)
        assert bool(of_world) == (dist.get_rank() == 0)
        assert bool(of_node) == (dist.get_rank() in (0, 2))
        for group, held in ((None, of_world), (shard, of_node)):
            if held:
                compare(held, whole)
            other = torch.optim.AdamW(model.parameters(), lr=0.5)
            state = held or None
            FSDP.optim_state_dict_to_load(model, other, state, load_directly=True, group=group)
            assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
            assert_close(other.state_dict()["state"], expected)
    other = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="^expected what optim_state_dict returned"):
        FSDP.optim_state_dict_to_load(model, other, None)
    with (
        FSDP.state_dict_type(model, FULL, *FIRST_ONLY),
        pytest.raises(ValueError, match="^expected the optimizer's state on the first rank"),
    ):
        FSDP.optim_state_dict_to_load(model, other, None)


def test_one_rank_of_a_group_has_it_and_gives_it_to_the_others(ranks: Ranks) -> None:
    ranks(4, body_first_rank)


def body_named() -> None:
    quiet()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    # Imported here: its package warns when it is loaded.
    named_optimizer = importlib.import_module("torch.distributed.optim.named_optimizer")
    for use_orig_params in (False, True):
        for kind in (FULL, SHARDED, LOCAL):
            model, _ = wrapped(use_orig_params=use_orig_params)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("unused" not in name)

            def named(model: FSDP = model) -> Any:
                listed = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
                return named_optimizer._NamedOptimizer(listed, torch.optim.AdamW, lr=0.1)

            optimizer = named()
            step(model, optimizer)
            if use_orig_params:
                for parameter in model.parameters():
                    if parameter.grad is None and parameter.requires_grad:
                        parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
            with FSDP.state_dict_type(model, kind):
                found = FSDP.optim_state_dict(model, optimizer)
                assert "body.1.0.weight" in found["state"] or kind is not FULL
                other = named()
                other.init_state()
                state = FSDP.optim_state_dict_to_load(
                    model, other, found, is_named_optimizer=True, load_directly=True
                )
            names = [
                name
                for name, p in model.named_parameters()
                if p.requires_grad and (kind is FULL or p.numel())
            ]
            assert list(state["state"]) == names
            # What a rank has no element of is not saved by it, and what it counts means nothing.
            held = optimizer.state_dict()["state"]
            held = {name: own for name, own in held.items() if own["exp_avg"].numel()}
            found = other.state_dict()["state"]
            assert_close({name: found[name] for name in held}, held)


def test_optimizers_that_know_parameters_by_name(ranks: Ranks) -> None:
    ranks(2, body_named)


def body_local() -> None:
    quiet()
    for kind, config in ((LOCAL, LocalStateDictConfig()), (SHARDED, ShardedStateDictConfig())):
        model, _ = wrapped(use_orig_params=False)
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        with FSDP.state_dict_type(model, kind, config):
            found = FSDP.optim_state_dict(model, optimizer)
            other = torch.optim.AdamW(model.parameters())
            FSDP.optim_state_dict_to_load(model, other, found, load_directly=True)
        value = found["state"]["body.0.weight"]["exp_avg"]
        assert value.shape == (7, 5) and value.local.numel() < 35
        assert_close(other.state_dict()["state"], optimizer.state_dict()["state"])


def test_local_and_sharded_state_stay_where_they_are(ranks: Ranks) -> None:
    ranks(2, body_local)


KEPT: dict[str, Any] = {
    "nothing": None,
    "listed": [1, 2.5, None],
    "pair": ("text", (float("inf"), 3 + 4j)),
    "nested": {"shape": torch.Size([2]), 3: torch.arange(6, dtype=torch.bfloat16).view(2, 3)},
    "other shape": torch.arange(5, dtype=torch.float64),
    "dtype": torch.float16,
    "count": torch.tensor(7),
    "empty": torch.empty(0, 4),
}


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype is expected.dtype and is_equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert isinstance(found, list | tuple) and len(found) == len(expected)
        for own, value in zip(found, expected, strict=True):
            same(own, value)
    else:
        assert found == expected


def body_kept() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = FSDP(plain, use_orig_params=True)
    # The last bias has one element: no rank but the last has any of it.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            optimizer.state[parameter].update(copy.deepcopy(KEPT))
    found = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    for own in found["state"].values():
        same(own, KEPT)
    fitting = {k: v for k, v in KEPT.items() if k not in ("other shape", "empty")}
    groups = [{"params": ["1.bias"], "betas": (0.1, 0.2)}]
    given = {"state": {"1.bias": fitting}, "param_groups": groups}
    mine = given if dist.get_rank() == 0 else None
    loaded = FSDP.scatter_full_optim_state_dict(mine, model, optim=optimizer)
    # As after training, a rank without elements has no state.
    bias = list(model.parameters())[3]
    assert list(loaded["state"]) == ([3] if bias.numel() else [])
    for own in loaded["state"].values():
        same(own, fitting)
    assert loaded["param_groups"][0] == {"params": [3], "betas": (0.1, 0.2)}
    for parameter in optimizer.state:
        optimizer.state[parameter]["unknown"] = object()
    with pytest.raises(TypeError, match="found a builtins.object: it cannot be sent to ranks"):
        FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)


def test_state_of_every_kind_is_kept_where_a_rank_has_no_elements(ranks: Ranks) -> None:
    ranks(3, body_kept)
