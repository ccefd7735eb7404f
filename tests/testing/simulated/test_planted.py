"""Faults that are planted in the library, each of which a simulated device tells by name.

Those of pipelines are in tests/pipelining/test_devices.py, a guard that is off in
test_late_guards.py.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.comm import Communicator, Pending, communicator
from meshwright.composition import parallelize
from meshwright.data_parallel import fully_shard, replicate
from meshwright.plan import Plan
from meshwright.testing import Ranks, RanksFailed, on_devices
from meshwright.testing.simulated import SimulationError, WorkLine, device_of
from support.internals.comm import _StorageLine, late
from support.internals.data_parallel import FlatBuffer
from support.internals.testing import SimulatedWork, backend
from support.internals.torch_internals import default_store, make_group

Patch = pytest.MonkeyPatch


# ------------------------------------------------------------------------- what is trained


def sharded(model: nn.Module) -> nn.Module:
    for layer in model.children():
        fully_shard(layer)
    return fully_shard(model)


def replicated(model: nn.Module) -> nn.Module:
    return replicate(model, bucket_cap_mb=0.0001)


def training(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], object]:
    """Make a step of a small model."""
    torch.manual_seed(1)
    model = wrap(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 6)

    def step() -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output - target).square().sum(), len(output)


def trained_by_a_plan() -> Callable[[], object]:
    """Make a step whose loss has a count that the host knows."""
    made = parallelize(
        nn.Linear(6, 3),
        Plan.from_toml("[axes]\nreplicate = 2\n"),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=counted,
    )
    x, target = torch.randn(4, 6), torch.randn(4, 3)

    def step() -> None:
        made.step(x, target)

    return step


def waiting_twice() -> Callable[[], object]:
    """Use what a collective has made on the stream of the second of two waits."""
    world, side = communicator(), WorkLine("side")

    def step() -> None:
        device = device_of(world)
        x = torch.ones(4)
        pending = world.all_reduce(x, label="a sum")
        with device.use(side):
            pending.wait()
        pending.wait()
        x.add_(1)

    return step


NUMBERS = itertools.count()


def meeting() -> Callable[[], object]:
    """Let rank 0 go on when rank 1 has come."""
    world, store = communicator(), default_store()

    def step() -> str:
        key = f"rank 1 has come {next(NUMBERS)}"
        if world.rank == 1:
            time.sleep(0.2)
            store.set(key, "")
        world.barrier(label="both have come")
        return "" if store.check([key]) else "passed the barrier before rank 1 had come"

    return step


# ------------------------------------------------------------------------- what is planted


def ended(pending: Pending) -> torch.Tensor | None:
    """Wait on the host until the numbers are there, and let no stream wait."""
    for work in pending.works:
        assert isinstance(work, SimulatedWork)
        assert work._job.ended.wait(backend.PATIENCE)
    return pending._value


def no_wait_of(kind: str) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        wait = Pending.wait

        def unwaited(self: Pending, *args: Any, **kwargs: Any) -> torch.Tensor | None:
            is_ours = self.issued.kind == kind and not self.communicator.is_on_host
            return ended(self) if is_ours else wait(self, *args, **kwargs)

        patch.setattr(Pending, "wait", unwaited)

    return plant


def on_a_side(owner: Any, name: str) -> Callable[[Patch], None]:
    """Run a function of the library on a stream of its own, with no wait for it or by it."""

    def plant(patch: Patch) -> None:
        function, side = getattr(owner, name), WorkLine("a side")

        def moved(*args: Any, **kwargs: Any) -> Any:
            with device_of(communicator()).use(side):
                return function(*args, **kwargs)

        patch.setattr(owner, name, moved)

    return plant


def wait_once(patch: Patch) -> None:
    wait = Pending.wait

    def first(self: Pending, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        found, self.works = wait(self, *args, **kwargs), ()
        return found

    patch.setattr(Pending, "wait", first)


def around_sums(
    before: Callable[[torch.Tensor], object] | None = None,
    after: Callable[[torch.Tensor], object] | None = None,
) -> Callable[[Patch], None]:
    """Do something to each tensor before its sum begins, or while it is under way."""

    def plant(patch: Patch) -> None:
        all_reduce = Communicator.all_reduce

        def planted(self: Communicator, tensor: torch.Tensor, **more: Any) -> Pending:
            if before is not None and not self.is_on_host:
                before(tensor)
            pending = all_reduce(self, tensor, **more)
            if after is not None and not self.is_on_host:
                ended(pending)
                after(tensor)
            return pending

        patch.setattr(Communicator, "all_reduce", planted)

    return plant


def shown(tensor: torch.Tensor) -> None:
    with open(os.devnull, "w") as nowhere:
        print(tensor, file=nowhere)


def freed_too_soon(patch: Patch) -> None:
    finish = FlatBuffer.finish_gather

    def finished(self: FlatBuffer, before_freeing: Callable[[], None] | None = None) -> None:
        finish(self, before_freeing)
        self.release()

    patch.setattr(FlatBuffer, "finish_gather", finished)


class Passed:
    """The event of a guard that asks nobody whether the device has come to it."""

    def query(self) -> bool:
        return True


def looked_too_soon(patch: Patch) -> None:
    patch.setattr(late, "record", lambda device: Passed())


def not_pinned(patch: Patch) -> None:
    patch.setattr(torch.Tensor, "pin_memory", lambda self: self)


def barrier_of_streams(patch: Patch) -> None:
    def barrier(self: Communicator, *, label: str = "", async_op: bool = False) -> Pending:
        return self.all_reduce(torch.zeros(1, device=self.device), label=label)

    patch.setattr(Communicator, "barrier", barrier)


class Fault(NamedTuple):
    """A fault that is planted, and what has to be said of it."""

    make: Callable[[], Callable[[], object]]
    """Makes the step that shows it."""
    plant: Callable[[Patch], None]
    said: str


SUM = r"all_reduce \([^)]*on axis replicate\) of group 0"
HERE = r"simulated/test_planted\.py:\d+"
SHARDED, REPLICATED = (lambda: training(sharded)), (lambda: training(replicated))

FAULTS: dict[str, Fault] = {
    "no wait for a gather": Fault(
        SHARDED,
        no_wait_of("all_gather"),
        r"unordered: aten\.\S+ on the first stream at \S+:\d+ reads what all_gather \(unshard \S+ "
        r"on axis \S+\) of group 0 on the stream of group 0 at \S+:\d+ writes, .*for nothing",
    ),
    "no wait for a sum": Fault(
        REPLICATED,
        no_wait_of("all_reduce"),
        rf"unordered: .* what {SUM} on the .*:\d+ .*waits for nothing",
    ),
    "no wait for a sum of shares": Fault(
        SHARDED, no_wait_of("reduce_scatter"), r"unordered: .* what reduce_scatter \(reduce \S+ on"
    ),
    "a sum on another stream": Fault(
        REPLICATED,
        on_a_side(Communicator, "all_reduce"),
        rf"unordered: {SUM} on the stream of group 0 at \S+:\d+ writes what aten\.\S+ on the first",
    ),
    "a wait of another stream": Fault(
        SHARDED,
        on_a_side(FlatBuffer, "finish_gather"),
        r"unordered: aten\.addmm\S* on the first stream at .* aten\.split_with\S* on a side",
    ),
    "a second wait that is none": Fault(
        waiting_twice,
        wait_once,
        rf"unordered: aten\.add_\S* on the first stream at {HERE} writes what all_reduce \(a sum",
    ),
    "a write into a sum that is under way": Fault(
        REPLICATED,
        around_sums(after=lambda tensor: tensor.mul_(1)),
        rf"unordered: aten\.mul_\S+ on the first stream at {HERE} writes what {SUM}",
    ),
    "memory of another stream": Fault(
        SHARDED,
        on_a_side(_StorageLine, "restore"),
        r"early free: \S+reusable_storage\.py:\d+ gives memory back to a side, and aten\.",
    ),
    "memory that is gone": Fault(
        SHARDED, freed_too_soon, r"no memory: aten\.t\S* on the first stream at \S+:\d+ uses"
    ),
    "late numbers too soon": Fault(
        REPLICATED,
        looked_too_soon,
        r"unordered: tolist on thread \S+ at observing/late\.py:\d+ reads",
    ),
    "a copy from memory that is not pinned": Fault(
        trained_by_a_plan, not_pinned, r"host stops: aten\.clone\S* at comm/streams\.py:\d+"
    ),
    "item": Fault(
        REPLICATED,
        around_sums(before=lambda tensor: tensor.sum().item()),
        rf"host stops: aten\._local_scalar_dense\.default at {HERE}",
    ),
    "tolist": Fault(
        REPLICATED, around_sums(before=torch.Tensor.tolist), rf"host stops: tolist at {HERE}"
    ),
    "cpu": Fault(
        REPLICATED, around_sums(before=torch.Tensor.cpu), rf"host stops: aten\.clone\S* at {HERE}"
    ),
    "print": Fault(REPLICATED, around_sums(before=shown), rf"host stops: __repr__ at {HERE}"),
    "nonzero": Fault(
        REPLICATED,
        around_sums(before=torch.nonzero),
        rf"host stops: aten\.nonzero\.default at {HERE}",
    ),
    "a factor on the host": Fault(
        REPLICATED,
        around_sums(before=lambda tensor: tensor.mul_(torch.ones_like(tensor).cpu())),
        rf"mixed devices: aten\.mul_\S+ on the first stream at {HERE} has tensors of host and",
    ),
    "a barrier that does not hold the host": Fault(
        meeting, barrier_of_streams, "passed the barrier before rank 1 had come"
    ),
}


def said_of(make: Callable[[], Callable[[], object]], plant: Callable[[Patch], None] | None) -> str:
    """Train, from the third step on with what is planted, and list what is said of it."""
    device, texts = device_of(communicator()), list[object]()
    with pytest.MonkeyPatch.context() as patch:
        try:
            step = make()
            step()
            step()
            if plant is not None:
                plant(patch)
            with device.forbid_stops():
                texts += [step(), step()]
        except SimulationError as error:
            texts.append(error)
    del step
    gc.collect()
    texts += device.faults
    # Memory that is let go from here on is none of this fault's.
    device.current.wait_for(communicator().group._stream.line)
    device.faults.clear()
    return "\n".join(str(text) for text in texts if text)


def body() -> dict[str, str]:
    said = {}
    for make in dict.fromkeys(fault.make for fault in FAULTS.values()):
        assert not said_of(make, None)
    for name, fault in FAULTS.items():
        said[name] = said_of(fault.make, fault.plant)
    return said


def test_each_is_told_by_name(ranks: Ranks) -> None:
    first, second = on_devices(ranks)(2, body)
    second["a barrier that does not hold the host"] = first["a barrier that does not hold the host"]
    missed = [
        f"{name}: expected {fault.said}\nfound {said[name][:1000]}"
        for name, fault in FAULTS.items()
        for said in (first, second)
        if not re.search(fault.said, said[name])
    ]
    assert not missed, "\n".join(missed)


def body_planted(name: str) -> None:
    fault = FAULTS[name]
    with pytest.MonkeyPatch.context() as patch:
        step = fault.make()
        fault.plant(patch)
        step()


def test_a_fault_ends_the_run(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=FAULTS["no wait for a sum"].said):
        on_devices(ranks)(2, body_planted, "no wait for a sum")


def body_split() -> None:
    """Rank 0 makes a group alone in the way in which all have to take part, and in another."""
    backend.PATIENCE = 1.0
    dist.new_group([0, 1])
    dist.new_group([1])
    if communicator().rank == 0:
        make_group("rank 0", [0], timedelta(seconds=20))
        said = rf"deadlock: group 0 is bound .* at {HERE}, which its ranks \[1\] do not enter"
        with pytest.raises(SimulationError, match=said):
            dist.new_group([0], use_local_synchronization=True)


def test_a_split_that_not_all_enter_is_refused(ranks: Ranks) -> None:
    on_devices(ranks)(2, body_split)
