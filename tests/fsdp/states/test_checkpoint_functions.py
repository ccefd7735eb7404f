"""Optimizers of the facade through `torch.distributed.checkpoint.state_dict`, bit by bit.

Every rank trains on the same batch, and worlds are powers of two: the mean over ranks is exact, so
any world and one plain process train alike to the last bit.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as peer_fully_shard

from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import ModuleWrapPolicy, ShardingStrategy
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FULL = StateDictOptions(full_state_dict=True)
KINDS = {"adamw": None, "sgd": FLAT}


def net(seed: int = 0) -> nn.Sequential:
    """On four ranks the last layer, of four elements, has whole parameters on one rank alone."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, 3))
    model.append(nn.Linear(3, 1))
    model[2].requires_grad_(False)
    return model.double()


def wrapped(seed: int = 0, **options: Any) -> FSDP:
    policy = ModuleWrapPolicy({nn.Linear})
    return FSDP(net(seed), auto_wrap_policy=policy, use_orig_params=True, **options)


def optimizer_for(model: nn.Module, kind: str, lr: float = 0.1) -> torch.optim.Optimizer:
    """Two groups, with the frozen parameters in the second."""
    listed = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": listed[:2], "lr": lr},
        {"params": listed[2:], "lr": lr * 2, "weight_decay": 0.1},
    ]
    if kind == "adamw":
        return torch.optim.AdamW(groups, amsgrad=True)
    return torch.optim.SGD(groups, momentum=0.9, dampening=0.5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def one_process(kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = optimizer_for(model, kind)
    train(model, optimizer, range(steps))
    return model, optimizer


def equal(found: Any, expected: Any) -> None:
    """Nested values; whole tensors on the left may be parts with the shape of the whole."""
    assert type(found) is type(expected) or isinstance(expected, torch.Tensor | list | tuple)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            equal(found[key], value)
    elif isinstance(expected, list | tuple):
        for own, value in zip(found, expected, strict=True):
            equal(own, value)
    elif isinstance(expected, torch.Tensor):
        whole = found.full_tensor() if hasattr(found, "full_tensor") else found
        assert torch.equal(whole, expected)
    else:
        assert found == expected


def is_trained(model: nn.Module, kind: str, steps: int) -> None:
    found = get_model_state_dict(model, options=FULL)
    equal(found, dict(one_process(kind, steps)[0].state_dict()))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, options: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": moments}


def resume(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, options: Any = None
) -> None:
    state = state_of(model, optimizer, options)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )


def body_goes_on(folder: Path, steps: int) -> None:
    """Two more steps after those that another world has saved."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    for kind, options in KINDS.items():
        model = wrapped(seed=steps)
        optimizer = optimizer_for(model, kind, lr=7.0 if steps else 0.1)
        if steps:
            resume(folder / f"{kind}-{steps}", model, optimizer, options)
        train(model, optimizer, range(steps, steps + 2))
        state = state_of(model, optimizer, options)
        one, theirs = one_process(kind, steps + 2)
        equal(state["optimizer"], get_optimizer_state_dict(one, theirs, options=options))
        dcp.save(state, checkpoint_id=folder / f"{kind}-{steps + 2}")
        # Saving has changed nothing.
        train(model, optimizer, range(steps + 2, steps + 3))
        is_trained(model, kind, steps + 3)


def body_into_torch(folder: Path) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    for kind, options in KINDS.items():
        for peer in (net(1), peer_fully_shard(net(1), mesh=init_device_mesh("cpu", (2,)))):
            optimizer = optimizer_for(peer, kind, lr=7.0)
            resume(folder / f"{kind}-4", peer, optimizer, options)
            train(peer, optimizer, range(4, 6))
            is_trained(peer, kind, 6)
        # And what torch's has saved, into ours.
        dcp.save(state_of(peer, optimizer, options), checkpoint_id=folder / f"{kind}-torch")
        model = wrapped(seed=2)
        optimizer = optimizer_for(model, kind, lr=7.0)
        resume(folder / f"{kind}-torch", model, optimizer, options)
        train(model, optimizer, range(6, 7))
        is_trained(model, kind, 7)


@pytest.mark.slow
def test_training_goes_on_at_other_sizes_and_in_torch(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, body_goes_on, tmp_path, 0)
    ranks(4, body_goes_on, tmp_path, 2)
    ranks(2, body_into_torch, tmp_path)


def body_options() -> None:
    """Every option that torch has, on every strategy, without a file between."""
    warnings.filterwarnings("ignore")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    strategies: list[dict[str, Any]] = [
        {},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh},
    ]
    for number, strategy in enumerate(strategies):
        kind = list(KINDS)[number % 2]
        one, theirs = one_process(kind, 2)
        model = wrapped(**strategy)
        optimizer = optimizer_for(model, kind)
        # Before the first step there is a state to load into, and none afterwards.
        fresh = get_optimizer_state_dict(model, optimizer)
        first = fresh["state"]["0.weight"]
        assert first["momentum_buffer" if kind == "sgd" else "exp_avg"].shape == (7, 5)
        assert not optimizer.state and first.get("step", torch.tensor(0.0)) == 0
        train(model, optimizer, range(2))
        for flattens in (False, True):
            expected = get_optimizer_state_dict(one, theirs, options=FLAT if flattens else None)
            for offloads in (False, True):
                full = StateDictOptions(
                    full_state_dict=True,
                    cpu_offload=offloads,
                    flatten_optimizer_state_dict=flattens,
                )
                whole = get_optimizer_state_dict(model, optimizer, options=full)
                assert bool(whole) == (rank == 0 or not offloads)
                if whole:
                    equal(whole, expected)
        # torch itself cannot load whole tensors from a flat dict.
        for spreads in (False, True):
            other = wrapped(**strategy)
            other.load_state_dict(model.state_dict())
            loaded = optimizer_for(other, kind, lr=7.0)
            given = get_optimizer_state_dict(one, theirs) if rank == 0 or not spreads else {}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=spreads)
            set_optimizer_state_dict(other, loaded, copy.deepcopy(given), options=options)
            train(other, loaded, range(2, 3))
            is_trained(other, kind, 3)
        # Names are those of the model also where wrappers are inside of other modules.
        around = nn.ModuleDict({"sharded": model, "plain": one})
        inside = get_optimizer_state_dict(around, optimizer)
        equal(inside["state"]["sharded.0.weight"], theirs.state[one[0].weight])
        assert inside["param_groups"][0]["params"] == ["sharded.0.weight", "sharded.0.bias"]
        trained = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
        assert trained.keys() == one.state_dict().keys() - {"2.weight", "2.bias"}
        # Outside of those functions all is as it was.
        assert next(iter(model.named_parameters()))[0].startswith("_fsdp_wrapped_module.")
        assert set(optimizer.state_dict()["state"]) <= set(range(8))


@pytest.mark.slow
def test_options(ranks: Ranks) -> None:
    ranks(4, body_options)


class Factored(torch.optim.SGD):
    """Has state of a form of its own."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["rows"] = torch.zeros(3)


class Naming(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {}


def body_refused() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    model = wrapped()
    own = torch.optim.AdamW(model.parameters())
    get_optimizer_state_dict(model, own)
    for refused, kind, text in (
        (
            partial(get_optimizer_state_dict, model, Naming(model.parameters(), lr=1.0)),
            RuntimeError,
            "its class, Naming, has a state_dict of its own",
        ),
        (
            partial(get_optimizer_state_dict, model, Factored(model.parameters(), lr=1.0)),
            ValueError,
            r"'rows' of 0.weight has shape \(3,\), this rank's part \(",
        ),
        (
            partial(set_optimizer_state_dict, model, own, own.state_dict() | {"state": {0: {}}}),
            ValueError,
            r"names of the model's parameters, found \['0'\]",
        ),
    ):
        with pytest.raises(kind, match=text):
            refused()
    # An optimizer that has state of other parameters alone is given that of all.
    train(model, own, range(1))
    everything = get_optimizer_state_dict(model, own, options=FLAT)
    expected = {parameter: copy.deepcopy(state) for parameter, state in own.state.items()}
    own.state.pop(model[0].weight, None)
    set_optimizer_state_dict(model, own, everything, options=FLAT)
    for parameter, state in expected.items():
        if parameter.numel():
            equal(own.state[parameter], state)


def test_what_cannot_be_right_is_refused(ranks: Ranks) -> None:
    ranks(2, body_refused)
