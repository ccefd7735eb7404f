"""Messages between ranks: small and large, in any order, from any source, on Gloo and ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from meshwright.testing import Ranks

Tensors = list[torch.Tensor]
Compared = tuple[Tensors, Tensors]
"""What was received and what should have been."""


def given(rank: int, numel: int, seed: int = 0) -> torch.Tensor:
    """The tensor of ``rank``, which every rank can make."""
    return torch.rand(numel, generator=torch.Generator().manual_seed(1000 * seed + rank))


def messages_in_any_order(rank: int, size: int) -> Compared:
    """Small and large, tags received in the reverse of the order in which they were sent."""
    after, before = (rank + 1) % size, (rank - 1) % size
    sizes = (3, 300_000, 0, 5_000, 900_000)
    sends = [dist.isend(given(rank, numel, tag), after, tag=tag) for tag, numel in enumerate(sizes)]
    got = [torch.zeros(numel) for numel in sizes]
    for tag in reversed(range(len(sizes))):
        dist.recv(got[tag], before, tag=tag)
    for send in sends:
        assert send is not None
        send.wait()
    return (got, [given(before, n, tag) for tag, n in enumerate(sizes)])


def messages_posted_early(rank: int, size: int) -> Compared:
    after, before = (rank + 1) % size, (rank - 1) % size
    got = torch.zeros(600_000)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, got, before, tag=1),
            dist.P2POp(dist.isend, given(rank, 600_000), after, tag=1),
        ]
    )
    for work in works:
        work.wait()
    return ([got], [given(before, 600_000)])


def messages_strided(rank: int, size: int) -> Compared:
    after, before = (rank + 1) % size, (rank - 1) % size
    strided = torch.zeros(40, 2)
    receive = dist.irecv(strided[:, 1], before)
    dist.send(given(rank, 80)[::2], after)
    assert receive is not None
    receive.wait()
    return ([strided[:, 1]], [given(before, 80)[::2]])


def messages_from_any_source(rank: int, size: int) -> Compared:
    if rank != 0:
        dist.send(torch.tensor([float(rank)]), 0, tag=7)
        return [], []
    seen = []
    for _ in range(size - 1):
        tensor = torch.zeros(1)
        source = dist.recv(tensor, tag=7)
        assert source == tensor.item()
        seen.append(tensor.item())
    return ([torch.tensor(sorted(seen))], [torch.arange(1.0, size)])


def many_small_messages(rank: int, size: int) -> Compared:
    """More than the ring of a channel holds, before the first is received."""
    after, before = (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(torch.full((4,), float(i)), after, tag=i % 2) for i in range(150)]
    got = []
    for tag in (1, 0):
        for _ in range(75):
            tensor = torch.zeros(4)
            dist.recv(tensor, before, tag=tag)
            got.append(tensor)
    for send in sends:
        assert send is not None
        send.wait()
    order = [*range(1, 150, 2), *range(0, 150, 2)]
    return (got, [torch.full((4,), float(i)) for i in order])


CASES: list[Callable[[int, int], Compared]] = [
    messages_in_any_order,
    messages_posted_early,
    messages_from_any_source,
    many_small_messages,
    messages_strided,
]


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("backend", ["cpu:meshwright", "gloo"])
def test_messages(ranks: Ranks, backend: str, size: int) -> None:
    """Gloo refuses strided tensors, the last case."""

    def body() -> None:
        dist.init_process_group(backend)
        for case in CASES if backend != "gloo" else CASES[:-1]:
            got, expected = case(dist.get_rank(), dist.get_world_size())
            for tensor, wanted in zip(got, expected, strict=True):
                assert torch.equal(tensor, wanted), case.__name__
            dist.barrier()
        dist.destroy_process_group()

    ranks(size, body, connected=False)
