"""Injected faults strike the right rank, at the right place and step."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.testing import Ending, Fault, InjectedError, Ranks, RanksFailed, arm


def train(text: str, steps: int = 3) -> int:
    world = communicator()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saving = arm(Fault.parse(text), rank=world.rank, module=model, optimizer=optimizer)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        for parameter in model.parameters():
            world.all_reduce(parameter.grad).wait()
        optimizer.step()
        optimizer.zero_grad()
    saving()
    return steps


@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["forward", "backward", "optimizer", "save"])
def test_raise_at_each_place(ranks: Ranks, place: str) -> None:
    step = 0 if place == "save" else 2
    text = f"{place}:rank=1:step={step}:raise"
    if place == "save":
        fault = Fault.parse(text)
        with pytest.raises(InjectedError, match=text):
            arm(fault, rank=1)()
        return
    with pytest.raises(RanksFailed) as caught:
        ranks(2, train, text)
    assert caught.value.first.rank == 1
    assert isinstance(caught.value.__cause__, InjectedError)
    assert ranks(2, train, text, steps=2) == [2, 2]


def test_kill_and_exit(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(1, train, "backward:rank=0:step=1:kill")
    assert caught.value.first.signal == signal.SIGKILL
    with pytest.raises(RanksFailed) as caught:
        ranks(1, train, "optimizer:rank=0:exit")
    assert caught.value.first.exit_code == 17


def test_stop_and_sleep(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(1, train, "forward:rank=0:stop", timeout=1.0)
    assert caught.value.first.stopped
    with pytest.raises(RanksFailed) as caught:
        ranks(1, train, "forward:rank=0:seconds=30:sleep", timeout=1.0)
    assert caught.value.first.ending == Ending.HUNG
    assert ranks(1, train, "forward:rank=0:seconds=0.01:sleep") == [3]


@pytest.mark.parametrize("text", ["forward:kill", "lunch:rank=1:kill", "save:rank=1:x=2:kill", ""])
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected PLACE:rank=R"):
        Fault.parse(text)


def test_text_and_missing_place() -> None:
    fault = Fault.parse("optimizer:rank=1:step=3:kill")
    assert str(fault) == "optimizer:rank=1:step=3:kill"
    with pytest.raises(ValueError, match="needs an optimizer to wait in"):
        arm(fault, rank=1)
    arm(fault, rank=0)()
