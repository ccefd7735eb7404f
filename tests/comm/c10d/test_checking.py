"""Calls that ranks make differently, each named before its data moves: ``connect(check=True)``.

The table has what rank 0 does and what rank 1 does in its place; other ranks do as rank 0.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from meshwright.comm import Communicator, communicator, connect, disconnect
from meshwright.errors import CollectiveMismatchError, CommunicationError
from meshwright.testing import Ranks
from support.internals.comm import lookup, waiting
from support.internals.torch_internals import default_store

BACKENDS = ("shm", "gloo", "simulated")
Calls = Callable[[Communicator], object]


def ones(world: Communicator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, device=world.device, dtype=dtype)


# --------------------------------------------------------------------------- ours


def reduced(
    *shape: int, dtype: torch.dtype = torch.float32, reduction: str = "sum", label: str = ""
) -> Calls:
    def call(world: Communicator) -> None:
        tensor = ones(world, *shape, dtype=dtype)
        world.all_reduce(tensor, reduction=reduction, label=label).wait()

    return call


def sent_from(source: int, *shape: int) -> Calls:
    return lambda world: world.broadcast(ones(world, *shape), source=source).wait()


def gathered(*shape: int, dtype: torch.dtype = torch.float32, label: str = "") -> Calls:
    def call(world: Communicator) -> None:
        whole = ones(world, world.size, *shape, dtype=dtype)
        world.all_gather(whole, ones(world, *shape, dtype=dtype), label=label).wait()

    return call


def scattered(numel: int, reduction: str = "sum") -> Calls:
    def call(world: Communicator) -> None:
        whole = ones(world, world.size * numel)
        world.reduce_scatter(ones(world, numel), whole, reduction=reduction).wait()

    return call


def exchanged(gives: list[int], takes: list[int]) -> Calls:
    def call(world: Communicator) -> None:
        given, taken = ones(world, sum(gives)), ones(world, sum(takes))
        world.all_to_all(taken, given, output_splits=takes, input_splits=gives).wait()

    return call


def message(
    *shape: int, dtype: torch.dtype = torch.float32, label: str = "", tag: int = 0
) -> Calls:
    """Rank 1 receives, rank 0 sends."""

    def call(world: Communicator) -> None:
        tensor = ones(world, *shape, dtype=dtype)
        move = world.recv if world.rank else world.send
        move(tensor, 1 - world.rank, label=label, tag=tag).wait()

    return call


def barrier(world: Communicator) -> None:
    world.barrier()


# --------------------------------------------------------------------------- torch's


def torch_reduced(
    *shape: int, dtype: torch.dtype = torch.float32, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Calls:
    return lambda world: dist.all_reduce(ones(world, *shape, dtype=dtype), op=op)


def torch_sent_from(source: int, *shape: int, dtype: torch.dtype = torch.float32) -> Calls:
    return lambda world: dist.broadcast(ones(world, *shape, dtype=dtype), source)


def torch_reduced_to(root: int, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Calls:
    return lambda world: dist.reduce(ones(world, 2), root, op=op)


def torch_gathered_on(root: int) -> Calls:
    def call(world: Communicator) -> None:
        rows = [ones(world, 2) for _ in range(world.size)] if world.rank == root else None
        dist.gather(ones(world, 2), rows, dst=root)

    return call


def torch_scattered_from(root: int) -> Calls:
    def call(world: Communicator) -> None:
        rows = [ones(world, 2) for _ in range(world.size)] if world.rank == root else None
        dist.scatter(ones(world, 2), rows, src=root)

    return call


def torch_gathered(*shape: int, dtype: torch.dtype = torch.float32) -> Calls:
    def call(world: Communicator) -> None:
        rows = [ones(world, *shape, dtype=dtype) for _ in range(world.size)]
        dist.all_gather(rows, ones(world, *shape, dtype=dtype))

    return call


def torch_scattered(numel: int, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Calls:
    def call(world: Communicator) -> None:
        whole = ones(world, world.size * numel)
        lookup.current("reduce_scatter")(ones(world, numel), whole, op=op)

    return call


def torch_exchanged(gives: list[int], takes: list[int]) -> Calls:
    def call(world: Communicator) -> None:
        given, taken = ones(world, sum(gives)), ones(world, sum(takes))
        dist.all_to_all_single(taken, given, takes, gives)

    return call


def torch_exchanged_lists(gives: list[int], takes: list[int]) -> Calls:
    def call(world: Communicator) -> None:
        given, taken = ([ones(world, n) for n in each] for each in (gives, takes))
        dist.all_to_all(taken, given)

    return call


def torch_message(*shape: int, dtype: torch.dtype = torch.float32) -> Calls:
    """Rank 1 receives, rank 0 sends."""

    def call(world: Communicator) -> None:
        tensor = ones(world, *shape, dtype=dtype)
        move = dist.recv if world.rank else dist.send
        move(tensor, 1 - world.rank, group=world.group)

    return call


def torch_barrier(world: Communicator) -> None:
    dist.barrier()


def functional(*shape: int) -> Calls:
    """A functional collective, which C++ makes."""

    def call(world: Communicator) -> None:
        mesh = DeviceMesh.from_group(world.group, "cpu")
        DTensor.from_local(ones(world, *shape), mesh, [Partial()], run_check=False).full_tensor()

    return call


def both(*calls: Calls) -> Calls:
    def call(world: Communicator) -> None:
        for each in calls:
            each(world)

    return call


LISTS = torch_exchanged_lists([1, 1], [1, 1])
"""Gloo has no exchange of lists: it is compared all the same."""

TABLE: dict[str, tuple[Calls, Calls]] = {
    "kind, ours": (reduced(2), sent_from(0, 2)),
    "kind, ours, of equally many bytes": (scattered(2), gathered(2)),
    "kind, torch's": (torch_reduced(2), torch_sent_from(0, 2)),
    "kind, torch's: a barrier": (torch_barrier, torch_reduced(1)),
    "kind, mixed": (gathered(2), torch_reduced(2)),
    "kind, mixed: a barrier": (torch_reduced(1), barrier),
    "root, ours": (sent_from(0, 2), sent_from(1, 2)),
    "root, torch's broadcast": (torch_sent_from(0, 2), torch_sent_from(1, 2)),
    "root, torch's reduce": (torch_reduced_to(0), torch_reduced_to(1)),
    "root, torch's gather": (torch_gathered_on(0), torch_gathered_on(1)),
    "root, torch's scatter": (torch_scattered_from(0), torch_scattered_from(1)),
    "root, mixed": (sent_from(0, 2), torch_sent_from(1, 2)),
    "shape, ours": (reduced(2), reduced(3)),
    "shape, ours, of equally many elements": (reduced(2, 3), reduced(3, 2)),
    "shape, torch's": (torch_gathered(2), torch_gathered(3)),
    "shape, torch's, of equally many elements": (torch_sent_from(0, 2, 3), torch_sent_from(0, 6)),
    "shape, mixed": (gathered(4), torch_gathered(2, 2)),
    "shape, of a DTensor": (functional(2), functional(3)),
    "kind, of a DTensor and mixed": (functional(2), gathered(2)),
    "dtype, ours": (reduced(2), reduced(2, dtype=torch.int32)),
    "dtype, torch's": (
        torch_sent_from(0, 2, dtype=torch.float16),
        torch_sent_from(0, 2, dtype=torch.bfloat16),
    ),
    "dtype, mixed": (gathered(2), torch_gathered(2, dtype=torch.int32)),
    "reduction, ours": (reduced(2), reduced(2, reduction="max")),
    "reduction, torch's": (torch_reduced(2), torch_reduced(2, op=dist.ReduceOp.MIN)),
    "reduction, torch's reduce": (torch_reduced_to(0), torch_reduced_to(0, dist.ReduceOp.MAX)),
    "reduction, torch's shares": (torch_scattered(2), torch_scattered(2, dist.ReduceOp.MAX)),
    "reduction, mixed": (reduced(2, reduction="max"), torch_reduced(2)),
    "order, ours": (
        both(reduced(2, label="first"), reduced(2, label="second")),
        both(reduced(2, label="second"), reduced(2, label="first")),
    ),
    "order, torch's": (
        both(torch_reduced(2), torch_sent_from(0, 2)),
        both(torch_sent_from(0, 2), torch_reduced(2)),
    ),
    "order, mixed": (
        both(gathered(2), torch_reduced(2)),
        both(torch_reduced(2), gathered(2)),
    ),
    "one call too many, ours": (both(reduced(2), barrier), barrier),
    "one call too few, torch's": (torch_sent_from(0, 2), both(torch_reduced(2), barrier)),
    "one call too many, mixed": (both(gathered(2), torch_barrier), torch_barrier),
    "split sizes, ours": (exchanged([1, 1], [1, 1]), exchanged([1, 1], [2, 1])),
    "split sizes, torch's": (torch_exchanged([1, 1], [1, 1]), torch_exchanged([2, 1], [1, 1])),
    "split sizes, torch's lists": (
        LISTS,
        torch_exchanged_lists([1, 1], [2, 1]),
    ),
    "split sizes, mixed": (exchanged([1, 1], [1, 1]), torch_exchanged([1, 1], [3, 1])),
    "label, ours": (reduced(2, label="gradients"), reduced(2, label="weights")),
    "label, ours: a gather": (gathered(2, label="layer 1"), gathered(2, label="layer 2")),
}
"""Collectives. Nothing of them is sent, so that one group does for all."""

MESSAGES: dict[str, tuple[Calls, Calls]] = {
    "shape of a message, ours": (message(2), message(3)),
    "dtype of a message, ours": (message(2), message(2, dtype=torch.int32)),
    "shape of a message, torch's": (torch_message(2, 3), torch_message(3, 2)),
    "dtype of a message, torch's": (torch_message(2), torch_message(2, dtype=torch.int32)),
    "shape of a message, mixed": (message(4), torch_message(2)),
}
"""Messages, one of which is left behind by each."""


def body() -> list[str]:
    """Make the collectives of the table, and return what this rank has raised for each."""
    world = connect(check=True)
    found: list[str] = []
    for calls in TABLE.values():
        try:
            calls[world.rank](world)
            found.append("nothing")
        except CollectiveMismatchError as error:
            found.append(str(error))
    assert world.gather_values(world.rank, label="still in step") == [0, 1]
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_collectives_that_differ_are_named_on_all_ranks(ranks: Ranks, backend: str) -> None:
    for found in ranks(2, body, backend=backend):
        for kind, text in zip(TABLE, found, strict=True):
            assert "on ranks [0]" in text, (kind, text)
            assert "on ranks [1]" in text, (kind, text)
            assert text.count("test_checking.py:") == 2, (kind, text)


def body_of_messages() -> list[str]:
    """Make each message of the table in a group of its own, which it leaves with one side open."""
    connect(check=True)
    found: list[str] = []
    for calls in MESSAGES.values():
        world = communicator(dist.new_group(), "pair")
        try:
            calls[world.rank](world)
            found.append("nothing")
        except CollectiveMismatchError as error:
            found.append(str(error))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_messages_that_differ_are_named(ranks: Ranks, backend: str) -> None:
    rows = ranks(2, body_of_messages, backend=backend)
    for kind, *found in zip(MESSAGES, *rows, strict=True):
        # Who sends a small message may have gone on before the other side was there.
        assert found[1] != "nothing", kind
        for text in found:
            if text != "nothing":
                assert "send" in text, (kind, text)
                assert "recv" in text, (kind, text)
                assert text.count("test_checking.py:") == 2, (kind, text)


# --------------------------------------------------------------------------- what never meets


def two_groups() -> None:
    one, other = (communicator(dist.new_group(), name) for name in ("one", "other"))
    (other if one.rank else one).all_reduce(ones(one, 2)).wait()


def two_groups_in_another_order() -> None:
    groups = [communicator(dist.new_group(), name) for name in ("one", "other")]
    for each in groups[:: 1 - 2 * groups[0].rank]:
        dist.all_reduce(ones(each, 2), group=each.group)


def another_tag() -> None:
    message(2, tag=communicator().rank)(communicator())
    communicator().barrier()


def both_receive() -> None:
    world = communicator()
    dist.recv(ones(world, 2), 1 - world.rank)


def both_send_large() -> None:
    world = communicator()
    dist.send(ones(world, 100_000), 1 - world.rank)


def another_peer() -> None:
    """Rank 0 sends to 1, which receives from 2."""
    world = communicator()
    if world.rank == 0:
        world.send(ones(world, 2), 1).wait()
    elif world.rank == 1:
        world.recv(ones(world, 2), 2).wait()
    world.barrier()


def collective_against_message() -> None:
    world = communicator()
    if world.rank:
        dist.recv(ones(world, 2), 0)
    else:
        dist.all_reduce(ones(world, 2))


APART: dict[str, tuple[int, Callable[[], None]]] = {
    "group, ours": (2, two_groups),
    "order of groups, torch's": (2, two_groups_in_another_order),
    "tag, ours": (2, another_tag),
    "direction, torch's": (2, both_receive),
    "direction, torch's, of large messages": (2, both_send_large),
    "peer, ours": (3, another_peer),
    "a collective against a message, torch's": (2, collective_against_message),
}
"""Calls of which no two are of the same thing: all ranks wait, until it is seen that none moves."""


def body_apart(calls: Callable[[], None]) -> str:
    waiting.DEADLOCK, waiting.CALL_EVERY = 1.0, 0.5
    connect(check=True)
    with pytest.raises(CommunicationError) as raised:
        calls()
    return str(raised.value)


@pytest.mark.few(0, slow=8)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", APART)
def test_calls_that_never_meet_end_with_what_each_rank_is_in(
    ranks: Ranks, kind: str, backend: str
) -> None:
    size, calls = APART[kind]
    for text in ranks(size, body_apart, calls, backend=backend):
        for rank in (0, 1):
            assert f"rank {rank}" in text or f"ranks [{rank}]" in text, text


def both_send() -> str:
    world = connect(check=True)
    dist.send(ones(world, 2), 1 - world.rank)
    try:
        disconnect()
    except CommunicationError as error:
        return str(error)
    return "nothing"


def test_messages_that_nobody_received_are_named_at_the_end(ranks: Ranks) -> None:
    found = ranks(2, both_send, backend="shm")
    assert any("1 were sent and 0 were to be received" in text for text in found), found


def well_matched() -> int:
    """Everything of the table that fits, messages in another order of their tags, or from any."""
    world = connect(check=True)
    for calls in TABLE.values():
        if calls[0] is not LISTS or world.backend == "meshwright":
            calls[0](world)
    peer = 1 - world.rank
    sends = [world.send(ones(world, 2), peer, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        world.recv(ones(world, 2), peer, tag=tag).wait()
    for each in sends:
        each.wait()
    for shape, source in ((2, None), (3, 0), (4, None)):
        if world.rank:
            assert dist.recv(ones(world, shape), source) == 0
        else:
            dist.send(ones(world, shape), 1)
    world.barrier()
    before = default_store().num_keys()
    for _ in range(20):
        world.barrier()
    kept = default_store().num_keys() - before
    assert kept <= 6, f"20 calls leave {kept} keys in the store"
    return world.size


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_calls_that_fit_go_through(ranks: Ranks, backend: str) -> None:
    assert ranks(2, well_matched, backend=backend) == [2, 2]
