"""The fake communicator: real numbers, the same door, and an error for whatever cannot end."""

from __future__ import annotations

import time

import pytest
import torch

from meshwright.comm import Communicator, Recorder, Transfer, observe
from meshwright.errors import CollectiveMismatchError, CollectiveTimeoutError, RankFailedError
from meshwright.testing import FakeCommunicator, Outcome, Ranks, RanksFailed, run_fake


def every_operation(world: Communicator) -> dict[str, list[float]]:
    """What each operation gives on this rank; the same on any communicator."""
    n, r = world.size, world.rank
    mine = torch.arange(2 * n, dtype=torch.float64) + 100 * r
    found = {"all_reduce": mine.clone(), "broadcast": mine.clone(), "max": mine.clone()}
    world.all_reduce(found["all_reduce"], label="sum").wait()
    world.all_reduce(found["max"], reduction="max").wait()
    world.broadcast(found["broadcast"], source=n - 1).wait()
    found["all_gather"] = torch.empty(2 * n * n, dtype=torch.float64)
    pending = world.all_gather(found["all_gather"], mine)
    found["reduce_scatter"] = torch.empty(2, dtype=torch.float64)
    world.reduce_scatter(found["reduce_scatter"], mine).wait()
    found["all_to_all"] = torch.empty(2 * n, dtype=torch.float64)
    world.all_to_all(found["all_to_all"], mine).wait()
    counts = [r + 1] * n
    rows = [source + 1 for source in range(n)]
    found["uneven"] = torch.empty(sum(rows), dtype=torch.float64)
    sent = torch.full((sum(counts),), float(r), dtype=torch.float64)
    world.all_to_all(found["uneven"], sent, output_splits=rows, input_splits=counts).wait()
    found["recv"] = torch.empty(2 * n, dtype=torch.float64)
    around = world.batch(
        [
            Transfer(direction="send", tensor=mine, peer=(r + 1) % n, tag=3),
            Transfer(direction="recv", tensor=found["recv"], peer=(r - 1) % n, tag=3),
        ]
    )
    for transfer in around:
        transfer.wait()
    world.barrier()
    pending.wait()
    texts = world.gather_bytes(b"x" * r, label="texts")
    found["bytes"] = torch.tensor([len(text) for text in texts])
    return {name: tensor.tolist() for name, tensor in found.items()}


def test_equals_the_real_one(ranks: Ranks) -> None:
    from meshwright.comm import communicator

    def body() -> dict[str, list[float]]:
        return every_operation(communicator())

    assert run_fake(3, every_operation) == ranks(3, body)


def test_records_what_each_rank_issues() -> None:
    def body(world: FakeCommunicator) -> list[str]:
        world.all_reduce(torch.ones(3), label="gradients").wait()
        world.barrier(label="end")
        return [str(collective) for collective in world.collectives]

    expected = ['all_reduce #0 "gradients" on axis world', 'barrier #1 "end" on axis world']
    recorder = Recorder()
    with observe(recorder):
        assert run_fake(2, body) == [expected] * 2
    assert sorted(recorder.kinds()) == [("all_reduce", "gradients")] * 2 + [("barrier", "end")] * 2


def test_sums_run_in_rank_order() -> None:
    values = [1e16, 1.0, -1e16]

    def body(world: FakeCommunicator) -> float:
        time.sleep(0.02 * (world.size - world.rank))
        mine = torch.tensor(values[world.rank], dtype=torch.float64)
        world.all_reduce(mine).wait()
        return mine.item()

    assert run_fake(3, body) == [(values[0] + values[1]) + values[2]] * 3


def test_groups() -> None:
    def body(world: FakeCommunicator) -> tuple[str, float, bool]:
        row = world.split([(0, 1), (2, 3)], "shard")
        total = torch.tensor(float(world.rank))
        row.all_reduce(total).wait()
        return row.axis, total.item(), world.split([(0, 1, 2, 3)], "all") is world

    assert run_fake(4, body) == [("shard", 1.0, True)] * 2 + [("shard", 5.0, True)] * 2


def failures(n: int, body: object) -> tuple[Outcome, ...]:
    with pytest.raises(RanksFailed) as caught:
        run_fake(n, body)  # type: ignore[arg-type]
    return caught.value.outcomes


def test_a_mismatch_names_both_sides() -> None:
    def body(world: FakeCommunicator) -> None:
        if world.rank == 1:
            world.broadcast(torch.ones(2), label="weights").wait()
        else:
            world.all_reduce(torch.ones(2), label="gradients").wait()

    for outcome in failures(3, body):
        assert isinstance(outcome.exception, CollectiveMismatchError)
        assert 'issued all_reduce #0 "gradients"' in str(outcome.exception)
        assert 'issued broadcast #0 "weights"' in str(outcome.exception)
        assert "on ranks [0, 2]" in str(outcome.exception)


@pytest.mark.parametrize("kind", ["shape", "dtype", "reduction"])
def test_other_mismatches(kind: str) -> None:
    def body(world: FakeCommunicator) -> None:
        odd = world.rank == 1
        shape = 3 if odd and kind == "shape" else 2
        dtype = torch.float64 if odd and kind == "dtype" else torch.float32
        reduction = "max" if odd and kind == "reduction" else "sum"
        world.all_reduce(torch.ones(shape, dtype=dtype), reduction=reduction).wait()

    assert all(isinstance(o.exception, CollectiveMismatchError) for o in failures(2, body))


def test_a_missing_call_is_found_at_once() -> None:
    def body(world: FakeCommunicator) -> None:
        if world.rank != 1:
            world.all_reduce(torch.ones(1), label="gradients").wait()

    started = time.monotonic()
    outcomes = failures(3, body)
    assert time.monotonic() - started < 5.0
    assert isinstance(outcomes[0].exception, CollectiveTimeoutError)
    assert "rank 1 has ended" in str(outcomes[0].exception)
    assert 'rank 2 waits in all_reduce #0 "gradients"' in str(outcomes[0].exception)


def test_a_circle_of_sends_is_found() -> None:
    def body(world: FakeCommunicator) -> None:
        peer = 1 - world.rank
        world.send(torch.ones(1), peer).wait()
        world.recv(torch.ones(1), peer).wait()

    for outcome in failures(2, body):
        assert isinstance(outcome.exception, CollectiveTimeoutError)
        assert "rank 1 waits in send #0 on axis world with peer 0" in str(outcome.exception)


def test_a_failure_reaches_the_others() -> None:
    def body(world: FakeCommunicator) -> None:
        if world.rank == 0:
            raise KeyError("broken")
        world.barrier()

    outcomes = failures(2, body)
    assert isinstance(outcomes[0].exception, KeyError)
    assert isinstance(outcomes[1].exception, RankFailedError)
    assert outcomes[1].exception.rank == 0
