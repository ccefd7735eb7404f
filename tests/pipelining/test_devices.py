"""Schedules on ranks with simulated devices, whose transport goes by order alone, as NCCL's."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.pipelining import PipelineScheduleMulti, PipelineStage, get_schedule_class
from meshwright.pipelining.schedules import SCHEDULE_NAMES
from meshwright.schedule import Operation
from meshwright.testing import Ranks, RanksFailed, on_devices
from support.internals.pipelining import P2PTransfers
from support.internals.schedule import RECV_F, SEND_F, stage_ranks
from support.internals.testing import backend

STEPS = 5


class Layer(nn.Module):
    """Gives two values, of which one gets no gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6)).double()

    def forward(self, x: torch.Tensor, count: torch.Tensor | None = None) -> Any:
        count = x.detach() * 0 if count is None else count
        return x + self.body(x) + count, count + 0.25


def squares(output: Any, target: torch.Tensor) -> torch.Tensor:
    return (output[0] - target).square().sum()


def made(name: str, layers: list[nn.Module]) -> tuple[Any, list[int]]:
    """A schedule over all ranks, and the stages of this one."""
    world, kind = communicator(), get_schedule_class(name)
    holders = stage_ranks(world.size, len(layers), "v" if "V" in name else "loop")
    mine = [s for s, rank in enumerate(holders) if rank == world.rank]
    stages = [PipelineStage(layers[s], s, len(layers), world.device) for s in mine]
    is_multi = issubclass(kind, PipelineScheduleMulti)
    schedule: Any = kind(
        stages if is_multi else stages[0], 2 * world.size, loss_fn=squares, scale_grads=False
    )
    return schedule, mine


def body(name: str, plant: Callable[[Any], None] | None = None) -> None:
    """Train, with no host stop from the second step on, and compare with one process."""
    world = communicator()
    count = world.size * (2 if issubclass(get_schedule_class(name), PipelineScheduleMulti) else 1)
    layers: list[nn.Module] = [Layer(seed) for seed in range(count)]
    ones = copy.deepcopy(layers)
    schedule, mine = made(name, layers)
    if plant is not None:
        plant(schedule)
    batches = [torch.randn(2, 4 * world.size, 6).double() for _ in range(STEPS)]
    optimizer = torch.optim.SGD([p for s in mine for p in layers[s].parameters()], lr=0.001)

    def train(step: int) -> None:
        x, target = batches[step]
        kwargs = {"target": target} if count - 1 in mine else {}
        schedule.step(*((x,) if 0 in mine else ()), return_outputs=False, **kwargs)
        optimizer.step()
        optimizer.zero_grad()

    train(0)
    train(1)
    group: Any = world.group
    with nullcontext() if world.is_on_host else group._device.forbid_stops():
        for step in range(2, STEPS):
            train(step)
    if plant is not None and not world.is_on_host:
        return  # what is told at the end is enough
    whole = torch.optim.SGD([p for one in ones for p in one.parameters()], lr=0.001)
    for x, target in batches:
        value: Any = (x,)
        for one in ones:
            value = one(*value)
        squares(value, target).backward()
        whole.step()
        whole.zero_grad()
    for s in mine:
        for a, b in zip(layers[s].parameters(), ones[s].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_schedule_trains_as_one_process(ranks: Ranks, size: int, name: str) -> None:
    on_devices(ranks)(size, body, name)


def swapped(schedule: Any, operation: Operation) -> None:
    """Let the row of this rank do the first ``operation`` behind the second."""
    entries = schedule._runtime.programs[True]
    one, two, *_ = [n for n, entry in enumerate(entries) if entry.operation is operation]
    entries.insert(two, entries.pop(one))


def swap_sends(schedule: Any) -> None:
    if communicator().rank == 0:
        swapped(schedule, SEND_F)


def swap_receives(schedule: Any) -> None:
    if communicator().rank == 1:
        swapped(schedule, RECV_F)


def rely_on_tags(schedule: Any) -> None:
    """Say in tags which microbatch it is, and post the receives of the last rank as one likes."""

    def transfer(ways: str, name: str) -> Callable[..., Any]:
        def run(tensors: list[torch.Tensor], peer: int, label: str) -> list[Any]:
            lane, number = getattr(channels, ways)[peer]
            tag = 10_000 + int(re.sub(r".*_[FB]", "", label))
            call = getattr(lane, name)
            return [call(tensor, number, tag=tag, label=label) for tensor in tensors]

        return run

    channels = schedule._runtime.transport.channels
    channels.send, channels.recv = transfer("_sends", "send"), transfer("_receives", "recv")
    swap_receives(schedule)


POST = P2PTransfers.post


def post_and_wait(transfers: P2PTransfers, legs: Any) -> None:
    POST(transfers, legs)
    for leg in legs:
        if leg in transfers._posted:  # its control message has been read
            for pending in transfers._posted[leg].pendings:
                pending.wait()


def block(_: Any) -> None:
    backend.PATIENCE = 3.0
    P2PTransfers.post = post_and_wait  # type: ignore[method-assign]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("plant", "name", "text"),
    [
        (
            swap_sends,
            "GPipe",
            r"mixed up: recv from rank 0 \(1RECV_F0 on axis pipeline\) at \S+\.py:\d+ is "
            r"matched with send to rank 1 \(0SEND_F1 on axis pipeline\) at .*, "
            r"whose number is 1 and not 0",
        ),
        (
            swap_receives,
            "GPipe",
            r"mixed up: recv from rank 0 \(1RECV_F1 on .* with send to rank 1 \(0SEND_F0 on axis",
        ),
        (
            rely_on_tags,
            "GPipe",
            r"mixed up: recv from rank 0 \(1RECV_F1 .* whose tag is 10000 and not 10001",
        ),
        (block, "1F1B", r"deadlock: in the queue stand recv from rank \d \(\dRECV_[FB]\d on axis"),
    ],
)
def test_what_is_planted_is_told(
    ranks: Ranks, plant: Callable[[Any], None], name: str, text: str
) -> None:
    with pytest.raises(RanksFailed, match=text):
        on_devices(ranks)(2, body, name, plant)


@pytest.mark.devices("host", reason="transports of devices know no tags")
def test_tags_would_do_on_a_host(ranks: Ranks) -> None:
    """So that only order can tell the messages of the plant above apart."""
    ranks(2, body, "GPipe", rely_on_tags)
