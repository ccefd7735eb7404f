"""A rank fails while others are in another step: all are told who it was."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.comm import communicator
from meshwright.errors import CollectiveMismatchError, PipelinePeerError, RankFailedError
from meshwright.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from meshwright.testing import Ranks
from support.internals.comm import Notices
from support.internals.pipelining import Failures, Turns

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


def batches(good: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step on this rank: of one that can be done, or not."""
    world, rows = communicator(), 4 if good else 1
    x = torch.arange(16, dtype=torch.float64).view(4, 4)[:rows] / 16
    target = {"target": x} if world.rank == world.size - 1 else {}
    return ((x,) if world.rank == 0 else ()), target


def trained(size: int) -> tuple[nn.Sequential, Any]:
    """A model of one layer a stage, and its schedule over all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4, dtype=torch.float64) for _ in range(size)])
    world = communicator()
    stage = PipelineStage(model[world.rank], world.rank, size, CPU)
    return model, Schedule1F1B(stage, 4, loss_fn=nn.MSELoss())


def body_all_bad(sizes: Sequence[bool]) -> None:
    """Steps that the first and the last rank refuse, and the others come to, leave no trace."""
    world = communicator()
    model, schedule = trained(world.size)
    for step, good in enumerate(sizes):
        time.sleep(0.1 * ((world.rank + step) % 3 == 0))
        args, kwargs = batches(good)
        if not good and step % 2 and world.rank == world.size - 1:
            kwargs = {}
        if not good:
            with pytest.raises((ValueError, RuntimeError), match="has 1 rows|needs a target"):
                (schedule.eval if step % 3 == 2 else schedule.step)(*args, **kwargs)
            communicator().barrier()
        elif step % 3 == 2:
            schedule.eval(*args)
        else:
            schedule.step(*args, **kwargs)
    model.zero_grad()
    schedule.step(*batches(True)[0], **batches(True)[1])
    whole = copy.deepcopy(model)
    whole.zero_grad()
    x = torch.arange(16, dtype=torch.float64).view(4, 4) / 16
    for part in x.chunk(4):
        (nn.functional.mse_loss(whole(part), part) / 4).backward()
    mine, theirs = model[world.rank], whole[world.rank]
    torch.testing.assert_close(mine.weight.grad, theirs.weight.grad, rtol=0, atol=1e-12)


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("size", [2, 4])
def test_steps_that_all_ranks_refuse_leave_the_schedule_usable(ranks: Ranks, size: int) -> None:
    ranks(size, body_all_bad, [False, False, True, False, False], timeout=30)


def body_waited() -> None:
    """The first rank alone refuses: the others only wait for it, and are told."""
    world = communicator()
    _, schedule = trained(world.size)
    args, kwargs = batches(world.rank != 0)
    text = r"^rank 0 stage 0 failed in step\(\): ValueError: .*has 1 rows"
    with pytest.raises(ValueError, match=text if world.rank else "has 1 rows"):
        schedule.step(*args, **kwargs)
    args, kwargs = batches(True)
    schedule.step(*args, **kwargs)


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("size", [2, 4])
def test_a_step_that_the_first_rank_refuses_has_begun_nowhere(ranks: Ranks, size: int) -> None:
    ranks(size, body_waited, timeout=30)


def body_begun(has_raised: bool, refusals: int) -> None:
    """The last rank refuses a step that the first has begun, and is called again: all are told."""
    world = communicator()
    last = world.size - 1
    _, schedule = trained(world.size)
    theirs = rf"rank {last} stage {last} failed in step\(\): ValueError: .* has 1 rows"
    args, kwargs = batches(True)
    if world.rank == last:
        hear("waits")
        for _ in range(refusals):
            with pytest.raises(ValueError, match="has 1 rows"):
                schedule.step(**batches(False)[1])
        if has_raised:
            hear("raised")
        begun = rf"rank \d had begun a step that this rank refused: {theirs}"
        with pytest.raises(PipelinePeerError, match=begun):
            schedule.step(**kwargs)
    else:
        say("waits")
        with pytest.raises(PipelinePeerError, match=f"^{theirs}"):
            schedule.step(*args)
        say("raised")
    with pytest.raises(PipelinePeerError, match=f"unusable since an earlier step .*{theirs}"):
        schedule.step(*args, **kwargs)


@pytest.mark.few(2)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize(
    ("has_raised", "refusals", "size"), [(False, 1, 2), (False, 2, 3), (True, 2, 2)]
)
@pytest.mark.devices("host", reason="no host waits for a device's message, and looks")
def test_a_step_that_one_rank_refuses_and_another_has_begun_ends_the_schedule(
    ranks: Ranks, has_raised: bool, refusals: int, size: int
) -> None:
    ranks(size, body_begun, has_raised, refusals, timeout=30)


def body_evaluated() -> None:
    """The first rank has sent an evaluation that the last has refused: the next one tells."""
    world = communicator()
    _, schedule = trained(world.size)
    if world.rank == 0:
        # Its sends have ended, or wait for who has refused.
        with suppress(PipelinePeerError):
            schedule.eval(*batches(True)[0])
        say("ended")
        return
    with pytest.raises(ValueError, match="has 1 rows"):
        schedule.eval(**batches(False)[1])
    hear("ended")
    with pytest.raises(PipelinePeerError, match="rank 0 had begun a step that this rank refused"):
        schedule.eval(**batches(True)[1])


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


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.devices("host", reason="no host waits for a device's message, and looks")
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


@pytest.mark.few(3)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("body", [body_ahead, body_behind, body_consumed, body_evaluated])
@pytest.mark.devices("host", reason="no host waits for a device's message, and looks")
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


@pytest.mark.few(1)
@pytest.mark.parametrize("wrap", [replicate_over, shard_over])
@pytest.mark.devices("host", reason="no host waits for a device's message, and looks")
def test_other_pipelines_are_told(ranks: Ranks, wrap: Callable[..., Any]) -> None:
    ranks(4, body_replicas, wrap, timeout=30)
