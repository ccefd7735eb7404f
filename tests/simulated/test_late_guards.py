"""Guards under a simulated device: they look one step late, and nothing leaves before they have."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import LateNumbers, communicator, disconnect, settle
from meshwright.data_parallel import fully_shard, replicate
from meshwright.errors import CollectiveMismatchError
from meshwright.testing import Ranks, RanksFailed
from simulated.world import on_devices

LATE = "One step of an optimizer may have used"


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def sharded() -> nn.Module:
    model = layers()
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def replicated() -> nn.Module:
    return replicate(layers())


SAID = {
    sharded: "Optimizer steps differ across ranks: before forward 4 ranks .* have changed their",
    replicated: "the ranks reduced gradients of different passes together: rank 0 was in backward",
}
GIVEN_OUT: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "settle": lambda model, optimizer: settle(),
    "state_dict": lambda model, optimizer: model.state_dict(),
    "state of the optimizer": lambda model, optimizer: optimizer.state_dict(),
    "disconnect": lambda model, optimizer: disconnect(),
    "next pass": lambda model, optimizer: model(torch.ones(2, 4)).sum().backward(),
}


def body_left_out(make: Callable[[], nn.Module], end: str) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = communicator().rank
    for number in (1, 2, 3, 4):
        model(torch.ones(2, 4)).sum().backward()
        if (number, rank) != (3, 1):
            optimizer.step()  # which rank 1 leaves out once
        optimizer.zero_grad()
    with pytest.raises(CollectiveMismatchError, match=SAID[make]) as raised:
        GIVEN_OUT[end](model, optimizer)
    assert LATE in str(raised.value)


@pytest.mark.parametrize("end", GIVEN_OUT)
@pytest.mark.parametrize("make", SAID)
def test_a_step_that_a_rank_left_out_shows_before_anything_leaves(
    ranks: Ranks, make: Callable[[], nn.Module], end: str
) -> None:
    on_devices(ranks)(2, body_left_out, make, end)


def body_guard_off() -> None:
    LateNumbers.look = lambda *_: None
    body_left_out(replicated, "next pass")


def test_a_guard_that_is_off_is_seen(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="DID NOT RAISE"):
        on_devices(ranks)(2, body_guard_off)


class Branches(nn.Module):
    """Three layers of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](x)


def body_branches(sharded: bool) -> None:
    world = communicator()
    torch.manual_seed(1)
    one = Branches().double()
    many: Any = copy.deepcopy(one)
    many = fully_shard(many) if sharded else replicate(many, bucket_cap_mb=0.0001)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (one, many)]
    for step in range(8):
        which = [[0, 0], [0, 0], [0, 1], [1, 1], [1, 2], [2, 2], [0, 2], [1, 1]][step]
        x = torch.full((2, 4), 1.0 + step).double()
        (sum(one(x + rank, which[rank]).sum() for rank in range(2)) / 2).backward()
        many(x + world.rank, which[world.rank]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for wanted, found in zip(one.parameters(), many.parameters(), strict=True):
        whole = found.full_tensor() if sharded else found
        torch.testing.assert_close(whole, wanted)


@pytest.mark.parametrize("sharded", [True, False])
def test_paths_that_change_train_as_in_one_process(ranks: Ranks, *, sharded: bool) -> None:
    on_devices(ranks)(2, body_branches, sharded)


def body_static() -> None:
    model = replicate(Branches(), static_graph=True)
    rank = communicator().rank
    for step in range(4):
        model(torch.ones(2, 4), 1 if (step, rank) == (2, 1) else 0).sum().backward()


def test_another_path_of_a_static_graph_shows_in_the_next_pass(ranks: Ranks) -> None:
    said = "Your training graph has changed in this iteration.*rank 1 did not use .*layers.0"
    with pytest.raises(RanksFailed, match=re.compile(said, re.DOTALL)):
        on_devices(ranks)(2, body_static)
