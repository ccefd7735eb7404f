"""Checkpoints of training that goes on at 2, 3 and 4 ranks, held against one plain process.

The optimizer is no plain case: two groups with settings of their own, a frozen parameter, one that
no pass uses, one that the optimizer does not have, and state that is neither a tensor nor whole.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from meshwright import declare_element_wise
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import ModuleWrapPolicy, StateDictType
from meshwright.testing import Ranks


@declare_element_wise
class Odd(torch.optim.Optimizer):
    """Momentum, with state of every kind: parts, numbers, and a counter that is a tensor."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1, "decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                own = self.state[parameter]
                if not own:
                    own.update(step=torch.tensor(0.0), passes=0, is_new=True)
                    own["momentum"] = torch.zeros_like(parameter)
                own["step"] += 1
                own["passes"] += 1
                own["is_new"] = False
                own["momentum"].mul_(0.5).add_(parameter.grad).add_(parameter, alpha=group["decay"])
                parameter.sub_(own["momentum"], alpha=group["lr"] / own["step"].item())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unused, self.frozen = nn.Linear(3, 3), nn.Linear(5, 5)
        self.first, self.second, self.left_out = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left_out(self.second(torch.tanh(self.first(self.frozen(x)))))


def wrapped(use_orig_params: bool) -> FSDP:
    model = Net().double()
    policy = ModuleWrapPolicy({nn.Linear})
    return FSDP(model, auto_wrap_policy=policy, use_orig_params=use_orig_params)


def odd(model: nn.Module) -> Odd:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and "left" not in n]
    return Odd(
        [
            {"params": [p for n, p in named if "first" not in n]},
            {"params": [p for n, p in named if "first" in n], "lr": 0.3, "decay": 0.01},
        ]
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        mine = x.chunk(dist.get_world_size())[dist.get_rank()] if isinstance(model, FSDP) else x
        model.zero_grad()
        model(mine).square().mean().backward()
        optimizer.step()


def one_process(steps: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    model = Net().double()
    optimizer = odd(model)
    train(model, optimizer, range(steps))
    names = {parameter: name for name, parameter in model.named_parameters()}
    return model.state_dict(), {names[p]: own for p, own in optimizer.state.items()}


def save(folder: Path, kind: str, model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    with FSDP.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"]):
        found = FSDP.optim_state_dict(model, optimizer)
        state = {"model": model.state_dict(), "optimizer": found}
        if kind == "FULL":
            if dist.get_rank() == 0:
                folder.mkdir()
                torch.save(state, folder / "whole.pt")
        else:
            dcp.save({"model": state["model"], "optimizer": found["state"]}, checkpoint_id=folder)
            if dist.get_rank() == 0:
                torch.save(found["param_groups"], folder / "groups.pt")
    dist.barrier()


def load(folder: Path, kind: str, model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    with FSDP.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"]):
        if kind == "FULL":
            state = torch.load(folder / "whole.pt")
        else:
            # A step gives the optimizer state of every kind and shape that is to be loaded.
            train(model, optimizer, range(1))
            own = FSDP.optim_state_dict(model, optimizer)["state"]
            state = {"model": model.state_dict(), "optimizer": own}
            dcp.load(state, checkpoint_id=folder)
            groups = torch.load(folder / "groups.pt")
            state["optimizer"] = {"state": state["optimizer"], "param_groups": groups}
        model.load_state_dict(state["model"])
        FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"], load_directly=True)


def body(folder: Path, kind: str, use_orig_params: bool) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    size = dist.get_world_size()
    model = wrapped(use_orig_params)
    optimizer = odd(model)
    if size > 2:
        for group in optimizer.param_groups:
            group["lr"] = 7.0  # what was saved counts
        load(folder / str(size - 1), kind, model, optimizer)
    train(model, optimizer, range(2 * (size - 2), 2 * (size - 1)))
    save(folder / str(size), kind, model, optimizer)
    weights, states = one_process(2 * (size - 1))
    whole = FSDP.optim_state_dict(model, optimizer)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights[name], msg=name)
    used = {n: own for n, own in whole["state"].items() if not n.startswith("unused")}
    assert used.keys() == states.keys()
    for name, own in states.items():
        assert used[name].keys() == own.keys()
        for key, value in own.items():
            found = used[name][key]
            assert type(found) is type(value)
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found, value, msg=f"{name} {key}", check_device=False)
            else:
                assert found == value
    if use_orig_params:
        assert whole["state"].keys() == states.keys()
    assert [group["lr"] for group in whole["param_groups"]] == [0.1, 0.3]


@pytest.mark.few(1)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_training_goes_on(ranks: Ranks, tmp_path: Path, kind: str, use_orig_params: bool) -> None:
    for size in (2, 3, 4):
        ranks(size, body, tmp_path, kind, use_orig_params)


def body_local(folder: Path) -> None:
    """torch's own LOCAL state with original parameters saves those of one rank for all."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    for use_orig_params in (False, True):
        model = wrapped(use_orig_params)
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            state = {"model": model.state_dict()}
            own = folder / str(use_orig_params)
            if dist.get_world_size() == 2:
                dcp.save(state, checkpoint_id=own)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(3.0)
            state = {"model": model.state_dict()}
            dcp.load(state, checkpoint_id=own)
            model.load_state_dict(state["model"])
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, Net().double().state_dict()[name], msg=name)


def test_local_state(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, body_local, tmp_path)
    ranks(3, body_local, tmp_path)
