"""Optimizers that step sharded weights by other numbers on some ranks are named on all."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.data_parallel import fully_shard
from meshwright.errors import CollectiveMismatchError
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.testing import Ranks
from support.internals.data_parallel import Steps, StepWatch
from support.late import raises_by_now

WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fully_shard": fully_shard,
    "flat": FullyShardedDataParallel,
    "class": partial(FullyShardedDataParallel, use_orig_params=True),
}


def adam(model: nn.Module, **options: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, **options)


class Loop:
    """Three forwards with two steps in between, before which a rank may do something alone."""

    def __init__(self, wrap: str) -> None:
        torch.manual_seed(0)
        self.model = WRAPS[wrap](nn.Linear(4, 4).to(communicator().device))
        self.optimizer = adam(self.model)

    def step(self, count: int) -> None:
        for _ in range(count):
            self.loss = self.model(torch.ones(2, 4, device=communicator().device)).sum()
            self.loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def body_another_rate(wrap: str) -> None:
    loop = Loop(wrap)
    loop.step(2)
    if communicator().rank:
        loop.optimizer.param_groups[0]["lr"] /= 2
    said = r"before forward 4 .*AdamW with lr=0.1, .* on ranks \[0\]; AdamW with lr=0.05, .*\[1\]"
    with raises_by_now(CollectiveMismatchError, match="Settings of optimizers differ") as raised:
        loop.step(3)
    assert re.search(said, str(raised.value)), raised.value
    assert "No optimizer" not in str(raised.value)  # steps were made


@pytest.mark.devices("host", "simulated")
@pytest.mark.parametrize("wrap", WRAPS)
def test_another_rate_on_one_rank_is_named(ranks: Ranks, wrap: str) -> None:
    ranks(2, body_another_rate, wrap)


def body_plateau() -> None:
    loop = Loop("fully_shard")
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(loop.optimizer, patience=0)
    for _ in range(4):
        loop.step(1)
        scheduler.step(1.0 if communicator().rank else float(loop.loss.detach()))


def body_alike() -> None:
    """What may differ: how a step is computed, and the loss that nobody schedules by."""
    loop = Loop("fully_shard")
    loop.optimizer.param_groups[0]["foreach"] = communicator().rank == 0
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, 5)
    for _ in range(4):
        loop.step(1)
        scheduler.step()


def test_a_schedule_by_the_loss_of_one_rank_is_named(ranks: Ranks) -> None:
    ranks(2, body_alike)
    with pytest.raises(Exception, match="Settings of optimizers differ"):
        ranks(2, body_plateau)


def test_settings_in_tensors_and_what_are_none() -> None:
    model = nn.Linear(2, 2)
    watch = StepWatch(model.parameters, with_settings=True)
    rate = torch.tensor(0.5)
    groups = [{"params": [each]} for each in model.parameters()]
    optimizer = torch.optim.Adam(groups, lr=rate, betas=[0.5, 0.75], foreach=False)  # pyrefly: ignore[bad-argument-type]
    optimizer.param_groups[0]["norm"] = 3.0  # what a user notes for each rank
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for expected in (0.5, 0.25):
        rate.fill_(expected)
        optimizer.step()
        watch.take()
        # Of both groups: which parameters lie together is no setting.
        (only,) = watch.settings
        assert only.startswith(f"Adam with lr={expected}, betas=(0.5, 0.75), eps=")
        assert "norm" not in only


def test_settings_are_those_of_the_steps_since_the_last_question() -> None:
    model = nn.Linear(2, 2)
    watch = StepWatch(model.parameters, with_settings=True)
    optimizer = torch.optim.AdamW(
        [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.5}],
        lr=torch.tensor(0.1),
        betas=(0.8, 0.9),
        foreach=False,
    )
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    for parameter in (*model.parameters(), *other.param_groups[0]["params"]):
        parameter.grad = torch.ones_like(parameter)
    assert watch.take() is Steps.NONE
    assert watch.settings == ()
    for decay in (0.5, 0.25):
        optimizer.param_groups[1]["weight_decay"] = decay
        optimizer.step()
        other.step()  # of parameters that are not watched
        assert watch.take() is Steps.ENDED
        first, second = watch.settings
        assert first.startswith("AdamW with lr=0.1")
        assert "betas=(0.8, 0.9), eps=" in first
        assert "foreach" not in first
        assert f"weight_decay={decay}" in second
    assert watch.take() is Steps.NONE
    assert watch.settings == ()
