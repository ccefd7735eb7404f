"""A rank fails while others are in another step: all are told who it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.comm import communicator
from meshwright.comm.failures.notices import Notices
from meshwright.errors import CollectiveMismatchError, PipelinePeerError, RankFailedError
from meshwright.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from meshwright.pipelining.failures import Failures, Turns
from meshwright.testing import Ranks

CPU = torch.device("cpu")


def say(event: str) -> None:
    """Tell the other ranks that ``event`` has happened."""
    Notices(communicator(), "steps apart").post(event, "yes")


def hear(event: str) -> None:
    """Wait until some rank has said that ``event`` has happened."""
    notices, until = Notices(communicator(), "steps apart"), time.monotonic() + 20
    while notices.read(event) is None:
        assert time.monotonic() < until, event
        time.sleep(0.005)


class Fails(nn.Module):
    """Raises in its ``number``-th forward or backward, once ``event`` has been heard."""

    def __init__(self, number: int, event: str, *, backward: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.left, self.event, self.backward = number, event, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if not self.backward:
            self.count(y)
        elif y.requires_grad:
            y.register_hook(self.count)
        return y

    def count(self, _: torch.Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            hear(self.event)
            raise OSError("planted")


def body_ahead() -> None:
    """The first rank fails in the last backward of step 1, when the last is in step 2."""
    world = communicator()
    layer = Fails(8, "ahead", backward=True) if world.rank == 0 else nn.Linear(4, 4)
    stage = PipelineStage(layer, world.rank, world.size, CPU)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.MSELoss())
    x = torch.ones(4, 4)
    args = (x,) if stage.is_first else ()
    kwargs = {"target": x} if stage.is_last else {}
    schedule.step(*args, **kwargs)
    if world.rank == 0:
        with pytest.raises(RuntimeError, match="Failed to run stage backward.*planted"):
            schedule.step(*args)
        return
    with pytest.raises(PipelinePeerError, match="rank 0 stage 0 failed in 0B3: .*planted"):  # noqa: PT012
        schedule.step(**kwargs)
        if stage.is_last:
            say("ahead")
        schedule.step(**kwargs)


def body_behind() -> None:
    """The last rank fails in evaluation 1; the first is in evaluation 2 and cannot send."""
    world = communicator()
    layer = Fails(4, "ahead", backward=False) if world.rank else nn.Linear(4, 4)
    schedule = ScheduleGPipe(PipelineStage(layer, world.rank, 2, CPU), 2)
    x = torch.ones(500_000, 4)
    schedule.eval(*((x,) if world.rank == 0 else ()))
    if world.rank == 0:
        schedule.eval(x)
        say("ahead")
        with pytest.raises(PipelinePeerError, match="rank 1 stage 1 failed in 1F1: .*planted"):
            schedule.eval(x)
    else:
        with pytest.raises(RuntimeError, match="failed to run forward.*planted"):
            schedule.eval()


def two_stages() -> tuple[nn.Module, ScheduleGPipe, torch.Tensor]:
    world = communicator()
    layer = nn.Linear(4, 4)
    stage = PipelineStage(layer, world.rank, world.size, CPU)
    return layer, ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss()), torch.ones(4, 4)


def body_alike() -> None:
    """All ranks refuse a step, some sooner than others: the schedule goes on."""
    world = communicator()
    layer, schedule, x = two_stages()
    for step in range(3):
        time.sleep(0.2 * ((world.rank + step) % 2))
        if world.rank == 0:
            with pytest.raises(ValueError, match="has 1 rows"):
                schedule.step(x[:1])
        else:
            with pytest.raises(RuntimeError, match="needs a target"):
                schedule.step()
        layer.zero_grad()
        schedule.step(*((x,) if world.rank == 0 else ()), **({"target": x} if world.rank else {}))
        assert layer.weight.grad is not None
    assert schedule.eval(*((x,) if world.rank == 0 else ())) is None or world.rank == 1


def body_begun(culprit: int, has_raised: bool) -> None:
    """One rank refuses a step that the other has begun, and is called again: all are told."""
    world = communicator()
    _, schedule, x = two_stages()
    good, bad = ((x,), {}), ((x[:1],), {})
    if world.rank == 1:
        good, bad = ((), {"target": x}), ((), {"target": x[:1]})
    theirs = rf"rank {culprit} stage {culprit} failed in step\(\): ValueError: .* has 1 rows"
    if world.rank == culprit:
        hear("waits")
        with pytest.raises(ValueError, match="has 1 rows"):
            schedule.step(*bad[0], **bad[1])
        if has_raised:
            hear("raised")
        begun = rf"rank {1 - culprit} had begun a step that this rank refused: {theirs}"
        with pytest.raises(PipelinePeerError, match=begun):
            schedule.step(*good[0], **good[1])
    else:
        say("waits")
        with pytest.raises(PipelinePeerError, match=f"^{theirs}"):
            schedule.step(*good[0], **good[1])
        say("raised")
    with pytest.raises(PipelinePeerError, match=f"unusable since an earlier step .*{theirs}"):
        schedule.step(*good[0], **good[1])


@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("has_raised", [False, True])
def test_a_step_that_one_rank_refuses_and_another_has_begun_ends_the_schedule(
    ranks: Ranks, culprit: int, has_raised: bool
) -> None:
    ranks(2, body_begun, culprit, has_raised, timeout=30)


def body_consumed() -> None:
    """What was received in a step that failed is not waited for a second time."""
    world = communicator()
    layer = Fails(1, "sent", backward=False) if world.rank else nn.Linear(4, 4)
    schedule = ScheduleGPipe(PipelineStage(layer, world.rank, 2, CPU), 1)
    x = torch.ones(4, 4)
    if world.rank == 0:
        schedule.eval(x)
        say("sent")
        return
    with pytest.raises(RuntimeError, match="failed to run forward.*planted"):
        schedule.eval()
    with pytest.raises(PipelinePeerError, match="unusable since an earlier step failed"):
        schedule.eval()


def body_unequal(fails: bool) -> None:
    """Rank 0 has built a schedule more: both wait in different ones, or one has failed in its."""
    world = communicator()
    layer = Fails(2, "go", backward=False) if fails and world.rank == 0 else nn.Linear(4, 4)
    stage = PipelineStage(layer, world.rank, 2, CPU)
    if world.rank == 0:
        ScheduleGPipe(stage, 2)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss())
    x = torch.ones(4, 4)
    say("go")
    if world.rank == 1:
        state = r"failed \(RuntimeError: .*planted.*\)" if fails else "waits"
        text = (
            f"rank 0 {state} in step 0 of schedule 1 .*, and rank 1 waits in step 0 of schedule 0"
        )
        with pytest.raises(CollectiveMismatchError, match=text):
            schedule.step(target=x)
        say("raised")
        return
    kind = RuntimeError if fails else CollectiveMismatchError
    with pytest.raises(kind, match="planted" if fails else "rank 1 waits in step 0 of schedule 0"):
        schedule.step(x)
    hear("raised")


@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("fails", [False, True])
def test_ranks_in_different_schedules_are_named(ranks: Ranks, fails: bool) -> None:
    ranks(2, body_unequal, fails, timeout=30)


def test_ranks_may_be_in_different_schedules_for_a_while() -> None:
    """Whose steps have the same order has nothing to fear from words that are old."""
    board: Any = SimpleNamespace(texts={})
    board.read, board.replace = board.texts.get, board.texts.__setitem__
    words: list[list[Turns]] = []
    for rank in range(2):
        group: Any = SimpleNamespace(ranks=[3, 4], rank=rank, counts={})
        words.append([Turns(group, board, number, f"plan {number}") for number in range(2)])
    (first, second), (train, evaluate) = words
    first.look(0)
    train.look(0)
    first.end(0)
    second.look(0)  # it is a step ahead
    train.look(0)
    train.end(0)
    evaluate.look(0)
    second.end(0, OSError("planted"))
    evaluate.look(0)
    evaluate.end(0)  # it could not begin
    train.look(1)
    first.look(1)
    first.end(1)
    first.end(2)
    second.look(3)
    with pytest.raises(CollectiveMismatchError, match="rank 3 waits in step 3 of schedule 1 .*, a"):
        train.look(3)


def test_a_refused_step_is_told_to_those_who_come_to_it_alone() -> None:
    texts: dict[str, str] = {}
    board: Any = SimpleNamespace(
        post=lambda key, text: texts.setdefault(key, text) == text, read=texts.get
    )
    first, second, third = (
        Failures(cast("Any", SimpleNamespace(ranks=[5, 6, 7], rank=n)), board, has_replicas=False)
        for n in range(3)
    )
    first.tell(4, ValueError("planted"), 0, "step()", for_good=False)
    second.tell(4, ValueError("late"), 1, "step()", for_good=False)
    first.look(5)
    second.look(5)
    third.look(3)
    with pytest.raises(ValueError, match=r"rank 5 stage 0 failed in step\(\): .*planted") as told:
        third.look(4)
    third.tell(4, told.value, 2, "2F0", for_good=True)
    with pytest.raises(PipelinePeerError, match=r"^rank 7 had begun .*: rank 5 stage 0 .*planted"):
        first.look(5)
    with pytest.raises(PipelinePeerError, match="^rank 5 stage 0 .*planted"):
        second.look(5)


@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("body", [body_ahead, body_behind, body_alike, body_consumed])
def test_who_fails_is_named_in_other_steps(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body, timeout=30)


def test_who_fails_is_named_far_away(ranks: Ranks) -> None:
    ranks(4, body_ahead, timeout=30)


def body_replicas(wrap: Callable[..., Any]) -> None:
    """Ranks of other pipelines wait for the reduction with one that has failed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    pipeline, world = communicator(mesh.get_group("pipeline")), communicator()
    torch.manual_seed(0)
    layer = Fails(2 if world.rank == 3 else 99, "go", backward=False)
    wrap(layer, mesh["data"])
    stage = PipelineStage(layer, pipeline.rank, 2, CPU, group=pipeline.group)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.MSELoss())
    say("go")
    x = torch.ones(4, 4)
    kind = {3: RuntimeError, 2: PipelinePeerError}.get(world.rank, RankFailedError)
    with pytest.raises((kind, PipelinePeerError), match=r"rank 3 .*planted|failed to run forward"):
        schedule.step(*((x,) if stage.is_first else ()), **({"target": x} if stage.is_last else {}))


def replicate_over(layer: nn.Module, mesh: Any) -> None:
    mw.replicate(layer, device_mesh=mesh)


def shard_over(layer: nn.Module, mesh: Any) -> None:
    mw.fully_shard(layer, mesh=mesh)


@pytest.mark.parametrize("wrap", [replicate_over, shard_over])
def test_other_pipelines_are_told(ranks: Ranks, wrap: Callable[..., Any]) -> None:
    ranks(4, body_replicas, wrap, timeout=30)
