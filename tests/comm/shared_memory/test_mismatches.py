"""Calls that differ between ranks: named on every rank, with both sides, before data moves."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import shared_memory
from meshwright.errors import CollectiveMismatchError
from meshwright.testing import Ranks
from support.comm.shared_memory import LARGE, error_of, join

Mismatch = Callable[[int, dist.ProcessGroup, bool], dist.Work | None]
"""Called with this rank, a group and whether to wait later; what rank 1 calls differs."""


def reduction_differs(rank: int, group: dist.ProcessGroup, later: bool) -> dist.Work | None:
    operation = dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM
    return dist.all_reduce(torch.ones(3), operation, group=group, async_op=later)


def scattered_reduction_differs(
    rank: int, group: dist.ProcessGroup, later: bool
) -> dist.Work | None:
    operation = dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM
    parts = [torch.ones(3)] * 3
    return dist.reduce_scatter(torch.ones(3), parts, operation, group=group, async_op=later)


def order_differs(rank: int, group: dist.ProcessGroup, later: bool) -> dist.Work | None:
    assert isinstance(group, shared_memory.SharedMemoryGroup)
    group.label_next("reduce layer 1" if rank == 1 else "reduce layer 0")
    return dist.all_reduce(torch.ones(3), group=group, async_op=later)


def operation_differs(rank: int, group: dist.ProcessGroup, later: bool) -> dist.Work | None:
    if rank == 1:
        return dist.broadcast(torch.ones(3), 0, group=group, async_op=later)
    return dist.all_reduce(torch.ones(3), group=group, async_op=later)


def barrier_differs(rank: int, group: dist.ProcessGroup, later: bool) -> dist.Work | None:
    if rank == 1:
        return dist.barrier(group=group, async_op=later)
    return dist.all_gather([torch.ones(3)] * 3, torch.ones(3), group=group, async_op=later)


def gathering_root_differs(rank: int, group: dist.ProcessGroup, later: bool) -> dist.Work | None:
    root = rank % 2
    places = [torch.ones(3)] * 3 if rank == root else None
    return dist.gather(torch.ones(3), places, root, group=group, async_op=later)


def scattering_root_differs(rank: int, group: dist.ProcessGroup, later: bool) -> dist.Work | None:
    root = rank % 2
    parts = [torch.ones(3)] * 3 if rank == root else None
    return dist.scatter(torch.ones(3), parts, root, group=group, async_op=later)


MISMATCHES: dict[str, tuple[Mismatch, list[str]]] = {
    "shape": (
        lambda rank, group, later: dist.all_reduce(
            torch.ones(*((4, 2) if rank == 1 else (2, 4))), group=group, async_op=later
        ),
        ["float32[2, 4]", "float32[4, 2]"],
    ),
    "large shape": (
        lambda rank, group, later: dist.all_reduce(
            torch.ones(LARGE + rank), group=group, async_op=later
        ),
        [f"float32[{LARGE}]", f"float32[{LARGE + 1}]"],
    ),
    "gathered shape": (
        lambda rank, group, later: dist.all_gather(
            [torch.ones(3 + rank)] * 3, torch.ones(3 + rank), group=group, async_op=later
        ),
        ["all_gather float32[3]", "all_gather float32[4]", "all_gather float32[5]"],
    ),
    "dtype": (
        lambda rank, group, later: dist.all_reduce(
            torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32),
            group=group,
            async_op=later,
        ),
        ["float32[4]", "int32[4]"],
    ),
    "exchanged dtype": (
        lambda rank, group, later: dist.all_to_all_single(
            torch.ones(3, dtype=torch.int32 if rank == 1 else torch.float32),
            torch.ones(3, dtype=torch.int32 if rank == 1 else torch.float32),
            group=group,
            async_op=later,
        ),
        ["all_to_all float32", "all_to_all int32"],
    ),
    "operation": (operation_differs, ["broadcast", "all_reduce"]),
    "barrier": (barrier_differs, ["called barrier", "called all_gather"]),
    "reduction": (reduction_differs, ["all_reduce sum", "all_reduce max"]),
    "scattered reduction": (
        scattered_reduction_differs,
        ["reduce_scatter sum", "reduce_scatter max"],
    ),
    "root": (
        lambda rank, group, later: dist.broadcast(
            torch.ones(4), rank % 2, group=group, async_op=later
        ),
        ["root rank 0", "root rank 1"],
    ),
    "reducing root": (
        lambda rank, group, later: dist.reduce(
            torch.ones(4), rank % 2, group=group, async_op=later
        ),
        ["root rank 0", "root rank 1"],
    ),
    "gathering root": (gathering_root_differs, ["root rank 0", "root rank 1"]),
    "scattering root": (scattering_root_differs, ["root rank 0", "root rank 1"]),
    "order": (order_differs, ['"reduce layer 0"', '"reduce layer 1"']),
    "splits": (
        lambda rank, group, later: dist.all_to_all_single(
            torch.ones(3),
            torch.ones(3),
            [1, 1, 1],
            [1, 2, 0] if rank == 1 else None,
            group=group,
            async_op=later,
        ),
        ["rank 1 sends", "bytes to rank", "room for 4"],
    ),
}


def _then_barrier(operation: Mismatch, rank: int, group: dist.ProcessGroup, later: bool) -> None:
    work = operation(rank, group, later)
    if work is not None:
        work.wait()
    dist.barrier(group=group)


@pytest.mark.parametrize("kind", ["synchronous", "asynchronous"])
def test_mismatches_are_named_on_every_rank(ranks: Ranks, kind: str) -> None:
    """Each mismatch has a group of its own, which is of no use afterwards."""

    def body() -> None:
        join()
        rank, later = dist.get_rank(), kind == "asynchronous"
        for name, (operation, texts) in MISMATCHES.items():
            group = dist.new_group()
            assert group is not None

            error = error_of(functools.partial(_then_barrier, operation, rank, group, later), 2)
            assert isinstance(error, CollectiveMismatchError), (name, error)
            for text in texts:
                assert text in str(error), (name, error)
            with pytest.raises(CollectiveMismatchError, match="unusable"):
                dist.all_reduce(torch.ones(3), group=group, async_op=later)
        dist.all_reduce(torch.ones(3))  # the world is well
        dist.destroy_process_group()

    ranks(3, body, connected=False)


def test_an_unlabeled_call_fits_a_labeled_one(ranks: Ranks) -> None:
    def body() -> None:
        group = join()
        tensor = torch.ones(3)
        if dist.get_rank() == 1:
            group.label_next("reduce layer 0")
        dist.all_reduce(tensor)
        assert group.next_label == ""
        assert tensor.tolist() == [2, 2, 2]

    ranks(2, body, connected=False)


def test_a_group_that_threads_share_is_named(ranks: Ranks) -> None:
    """As `dcp.async_save` shares the default group with the training."""

    def body() -> None:
        join()
        group = dist.new_group()
        reduce = functools.partial(dist.all_reduce, group=group)
        thread = threading.Thread(target=reduce, args=(torch.ones(3),), name="saving")
        thread.start()
        thread.join()
        with pytest.raises(CollectiveMismatchError, match=r"beside each other \(.*saving\), in"):
            reduce(torch.ones(3 + dist.get_rank()))
        dist.destroy_process_group()

    ranks(2, body, connected=False)


def test_messages_that_differ_are_named(ranks: Ranks) -> None:
    wrong = [torch.ones(4), torch.ones(3, dtype=torch.int32), torch.ones(LARGE)]

    def body() -> None:
        join()
        for tensor in wrong:
            group = dist.new_group()
            if dist.get_rank() == 1:
                dist.send(torch.ones(3), 0, group=group)
                receive = functools.partial(dist.recv, torch.ones(3), 0, group=group)
            else:
                receive = functools.partial(dist.recv, tensor, 1, group=group)
            error = error_of(receive, 2)
            assert isinstance(error, CollectiveMismatchError)
            assert "rank 1 called send float32[3]" in str(error)
            name = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            assert f"rank 0 called recv {name}" in str(error)

    ranks(2, body, connected=False)
