"""The collectives of shared memory with threads for ranks: every way that data can take.

One process and no rank of its own: tensors that lie in shared memory, that do not, and a mixture,
over slots so small that several rounds are needed.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from meshwright.comm.shared_memory import SharedMemoryGroup
from support.internals.comm import backend, collectives

Group = SharedMemoryGroup
SIZES = (0, 1, 1000, 16_385, 70_000, 200_000)
"""Elements of a share: in one slot, above the limit for data in place, in several rounds."""


@pytest.fixture(autouse=True)
def quick_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    yield
    sys.setswitchinterval(before)


def on_threads(size: int, body: Callable[[Group, int], None]) -> None:
    """Run ``body`` with a group of ``size`` ranks, each a thread of this process."""
    store, host = dist.HashStore(), backend._Host()
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        options: Any = SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=size,
            timeout=timedelta(seconds=20),
            group_id="threads",
            global_ranks_in_group=list(range(size)),
        )
        group = host.create(options, None)
        assert isinstance(group, Group)
        try:
            with torch.no_grad():
                body(group, rank)
        except BaseException as error:  # raised again below
            errors.append(error)
            group.abort()
        finally:
            group.shutdown()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def options_of(kind: type, is_asynchronous: bool, **values: object) -> Any:
    options = kind()
    options.asyncOp = is_asynchronous
    for name, value in values.items():
        setattr(options, name, value)
    return options


def added(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The sum in rank order."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = total + tensor
    return total


class Turn:
    """One random call, the same on all ranks but for where its tensors lie."""

    def __init__(self, group: Group, rank: int, size: int, number: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        common = random.Random(number)
        self.share = common.choice(SIZES)
        self.is_async = common.random() < 0.5
        place = common.choice(("shared", "private", "mixed"))
        alone = random.Random(f"{number}/{rank}")
        self.is_shared = place == "shared" or (place == "mixed" and alone.random() < 0.5)
        generator = torch.Generator().manual_seed(number)
        self.given = [torch.randn(self.share * size, generator=generator) for _ in range(size)]
        self.splits = [
            [common.choice((0, 3, 7000, 100_000)) for _ in range(size)] for _ in range(size)
        ]

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.is_shared:
            return tensor.clone()
        return self.group.tensors.allocate(tensor.numel(), tensor.dtype).copy_(tensor)

    def parts(self, tensors: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
        return [t[rank * self.share : (rank + 1) * self.share] for t in tensors]

    def all_reduce(self) -> None:
        mine = self.placed(self.given[self.rank])
        self.group.allreduce([mine], options_of(c10d.AllreduceOptions, self.is_async)).wait()
        assert torch.equal(mine, added(self.given))

    def reduce_scatter(self) -> None:
        mine = self.placed(self.given[self.rank])
        output = self.parts([mine], self.rank)[0] if self.share % 2 else torch.empty(self.share)
        options = options_of(c10d.ReduceScatterOptions, self.is_async)
        self.group.reduce_scatter_single(output, mine, options).wait()
        assert torch.equal(output, added(self.parts(self.given, self.rank)))

    def all_gather(self) -> None:
        mine = self.placed(self.given[self.rank])
        output = torch.empty(mine.numel() * self.size)
        options = options_of(c10d.AllgatherOptions, self.is_async)
        self.group.all_gather_single(output, mine, options).wait()
        assert torch.equal(output, torch.cat(self.given))

    def all_to_all(self) -> None:
        mine, output = self.placed(self.given[self.rank]), torch.empty(self.share * self.size)
        options = options_of(c10d.AllToAllOptions, self.is_async)
        self.group.all_to_all_single(output, mine, [], [], options).wait()
        assert torch.equal(output, torch.cat(self.parts(self.given, self.rank)))

    def all_to_all_uneven(self) -> None:
        splits = self.splits
        rows = [
            [torch.full((splits[a][b],), float(10 * a + b)) for b in range(self.size)]
            for a in range(self.size)
        ]
        sizes = [splits[a][self.rank] for a in range(self.size)]
        mine, output = self.placed(torch.cat(rows[self.rank])), torch.empty(sum(sizes))
        options = options_of(c10d.AllToAllOptions, self.is_async)
        self.group.all_to_all_single(output, mine, sizes, splits[self.rank], options).wait()
        assert torch.equal(output, torch.cat([rows[a][self.rank] for a in range(self.size)]))

    def ring(self) -> None:
        mine, output = self.placed(self.given[self.rank]), torch.empty(self.share * self.size)
        send = self.group.send([mine], (self.rank + 1) % self.size, 7)
        receive = self.group.recv([output], (self.rank - 1) % self.size, 7)
        for work in (receive, send) if self.is_async else (send, receive):
            work.wait()
        assert torch.equal(output, self.given[(self.rank - 1) % self.size])


KINDS = (
    Turn.all_reduce,
    Turn.reduce_scatter,
    Turn.all_gather,
    Turn.all_to_all,
    Turn.all_to_all_uneven,
    Turn.ring,
)


@pytest.mark.parametrize("size", [2, 3])
def test_every_way_gives_the_sum_in_rank_order(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (collectives, backend):
        monkeypatch.setattr(module, "SLOT_BYTES", 256 << 10)

    def body(group: Group, rank: int) -> None:
        for number in range(30):
            KINDS[number % len(KINDS)](Turn(group, rank, size, number))

    on_threads(size, body)
