"""Every operation of the door gives the right numbers and is written down once."""

from __future__ import annotations

import pytest
import torch

from meshwright import comm
from meshwright.comm import Recorder, Transfer, observe
from meshwright.testing import Ranks

pytestmark = pytest.mark.backends("shm", "gloo")

SIZES = [2, 3, 4]
LARGE = 20_000  # elements: beyond the size from which Gloo's all-gather is replaced


@pytest.mark.few(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_sums_and_gathers(ranks: Ranks, size: int, dtype: torch.dtype) -> None:
    def body() -> None:
        world = comm.communicator()
        rank, n = world.rank, world.size
        total = sum(range(1, n + 1))
        summed = world.all_reduce(torch.full((5,), rank + 1, dtype=dtype)).wait()
        assert torch.equal(summed, torch.full((5,), total, dtype=dtype))
        for count in (1, 7, LARGE):
            gathered = torch.empty(n * count, dtype=dtype)
            mine = torch.full((count,), rank, dtype=dtype)
            world.all_gather(gathered, mine).wait()
            assert torch.equal(gathered, torch.arange(n).to(dtype).repeat_interleave(count))
            share = torch.empty(count, dtype=dtype)
            whole = torch.arange(n).to(dtype).repeat_interleave(count) + rank
            world.reduce_scatter(share, whole).wait()
            expected = n * rank + n * (n - 1) // 2
            assert torch.equal(share, torch.full((count,), expected, dtype=dtype))
            assert torch.equal(whole, torch.arange(n).to(dtype).repeat_interleave(count) + rank)

    ranks(size, body)


@pytest.mark.few(2)
@pytest.mark.parametrize("size", SIZES)
def test_reductions_roots_and_exchanges(ranks: Ranks, size: int) -> None:
    def body() -> None:
        world = comm.communicator()
        rank, n = world.rank, world.size
        values = torch.tensor([float(rank), float(-rank)])
        assert world.all_reduce(values.clone(), reduction="max").wait().tolist() == [n - 1, 0]
        assert world.all_reduce(values.clone(), reduction="min").wait().tolist() == [0, 1 - n]
        part = torch.empty(1)
        world.reduce_scatter(part, torch.full((n,), rank + 1.0), reduction="max").wait()
        assert part.item() == n
        for source in range(n):
            assert world.broadcast(torch.tensor([rank]), source=source).wait().item() == source
        rows = torch.arange(n).view(n, 1) + 10 * rank
        swapped = torch.empty_like(rows)
        world.all_to_all(swapped, rows).wait()
        assert swapped.flatten().tolist() == [rank + 10 * other for other in range(n)]
        uneven_in, uneven_out = torch.full((n + 1,), rank), torch.empty(2 * n, dtype=torch.int64)
        first_gets_two = [2] + [1] * (n - 1)
        to_come = [2] * n if rank == 0 else [1] * n
        uneven_out = uneven_out[: sum(to_come)]
        world.all_to_all(
            uneven_out, uneven_in, output_splits=to_come, input_splits=first_gets_two
        ).wait()
        assert uneven_out.unique_consecutive().tolist() == list(range(n))
        world.barrier()

    ranks(size, body)


@pytest.mark.few(2)
@pytest.mark.parametrize("size", SIZES)
def test_transfers_in_any_order(ranks: Ranks, size: int) -> None:
    def body() -> None:
        world = comm.communicator()
        rank, n = world.rank, world.size
        right, left = (rank + 1) % n, (rank - 1) % n
        received = torch.empty(3)
        pending = [
            world.recv(received, left, tag=7),
            world.send(torch.full((3,), float(rank)), right, tag=7),
        ]
        for p in pending:
            p.wait()
        assert received.tolist() == [left] * 3
        inbox = [torch.empty(1), torch.empty(1)]
        batch = [
            Transfer(direction="send", tensor=torch.tensor([rank + 0.5]), peer=right, tag=1),
            Transfer(direction="recv", tensor=inbox[0], peer=left, tag=1),
            Transfer(direction="send", tensor=torch.tensor([rank + 0.25]), peer=left, tag=2),
            Transfer(direction="recv", tensor=inbox[1], peer=right, tag=2),
        ]
        for p in world.batch(batch):
            p.wait()
        assert [t.item() for t in inbox] == [left + 0.5, right + 0.25]

    ranks(size, body)


def test_half_sums_are_rounded_once(ranks: Ranks) -> None:
    def body() -> list[float]:
        world = comm.communicator()
        # 256 + 1 + 1 + 1 is 260 after one rounding; 256 if each step rounds to bfloat16.
        value = 256.0 if world.rank == 0 else 1.0
        share = torch.empty(1, dtype=torch.bfloat16)
        world.reduce_scatter(share, torch.full((4,), value, dtype=torch.bfloat16)).wait()
        return [share.item()]

    assert ranks(4, body) == [[260.0]] * 4


def test_gather_into_a_slice_of_the_output_copies_nothing(ranks: Ranks) -> None:
    def body() -> None:
        world = comm.communicator()
        whole = torch.full((2 * LARGE,), -1.0)
        mine = whole[world.rank * LARGE : (world.rank + 1) * LARGE]
        mine.fill_(world.rank)
        world.all_gather(whole, mine).wait()
        assert whole.view(2, -1)[:, 0].tolist() == [0, 1] and whole.sum() == LARGE

    ranks(2, body)


def test_control_data_of_different_lengths(ranks: Ranks) -> None:
    def body() -> tuple[list[bytes], list[tuple[float, ...]], list[bytes]]:
        world = comm.communicator()
        return (
            world.gather_bytes(b"x" * world.rank, label="lengths"),
            world.gather_numbers([world.rank, 0.1], label="numbers"),
            world.gather_bytes(b"", label="nothing"),
        )

    for found in ranks(3, body):
        assert found == (
            [b"", b"x", b"xx"],
            [(0.0, 0.1), (1.0, 0.1), (2.0, 0.1)],
            [b"", b"", b""],
        )


def test_recorder_sees_kind_axis_shape_label_and_number(ranks: Ranks) -> None:
    def body() -> list[tuple[object, ...]]:
        world = comm.communicator()
        with observe(recorder := Recorder()):
            world.all_reduce(torch.ones(2, 3), reduction="max", label="loss").wait()
            world.all_gather(torch.empty(4), torch.ones(2), label="unshard 0").wait()
            peer = 1 - world.rank
            ends = [world.send(torch.ones(1), peer), world.recv(torch.ones(1), peer)]
            for end in ends:
                end.wait()
            world.broadcast(torch.ones(1), source=1).wait()
        world.barrier()
        assert recorder.bytes() == 24 + 16 + 4 + 4 + 4
        return [
            (c.kind, c.axis, c.shape, c.dtype, c.reduction, c.peer, c.label, c.sequence)
            for c in recorder.collectives
        ]

    for rank, found in enumerate(ranks(2, body)):
        assert found == [
            ("all_reduce", "world", (2, 3), "float32", "max", None, "loss", 0),
            ("all_gather", "world", (4,), "float32", None, None, "unshard 0", 1),
            ("send", "world", (1,), "float32", None, 1 - rank, "", 0),
            ("recv", "world", (1,), "float32", None, 1 - rank, "", 0),
            ("broadcast", "world", (1,), "float32", None, 1, "", 2),
        ]


def test_wrong_arguments_are_refused_before_any_rank_waits(ranks: Ranks) -> None:
    def body() -> None:
        world = comm.communicator()
        with pytest.raises(ValueError, match="unknown reduction 'avg': expected one of sum"):
            world.all_reduce(torch.ones(1), reduction="avg")
        with pytest.raises(ValueError, match="expected 2 x 3 elements of torch.float32, found 5"):
            world.all_gather(torch.empty(5), torch.ones(3))
        with pytest.raises(ValueError, match=r"expected 2 x 3 .* found 6 of torch.float64"):
            world.reduce_scatter(torch.empty(3), torch.ones(6, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"contiguous tensor, found shape \(2, 3\)"):
            world.all_reduce(torch.ones(3, 2).t())
        with pytest.raises(ValueError, match="rank 2 is not on axis world: expected 0..1"):
            world.send(torch.ones(1), 2)
        with pytest.raises(ValueError, match="found a tensor on meta"):
            world.all_reduce(torch.ones(1, device="meta"))
        world.barrier()

    ranks(2, body)


def test_an_asynchronous_collective_is_waited_for_when_its_value_is_asked(ranks: Ranks) -> None:
    def body() -> None:
        world = comm.communicator()
        pending = [world.all_reduce(torch.full((n,), 1.0)) for n in (10, LARGE, 3)]
        for p in reversed(pending):
            value = p.wait()
            assert p.is_completed() and value.eq(world.size).all()
            assert p.wait() is value

    ranks(4, body)


def test_a_replaced_function_sees_every_call(ranks: Ranks) -> None:
    """A profiler, or a test that counts, has put its own function on torch.distributed."""

    def body() -> dict[str, int]:
        import torch.distributed as dist

        world = comm.communicator()
        counts: dict[str, int] = {}

        def counted(name: str) -> None:
            original = getattr(dist, name)

            def call(*args: object, **kwargs: object) -> object:
                counts[name] = counts.get(name, 0) + 1
                return original(*args, **kwargs)

            setattr(dist, name, call)

        gather = "all_gather_single" if hasattr(dist, "all_gather_single") else None
        for name in ("all_reduce", gather or "all_gather_into_tensor"):
            counted(name)
        scatter = "reduce_scatter_single" if gather else "reduce_scatter_tensor"
        counted(scatter)
        world.all_reduce(torch.ones(1)).wait()
        gathered = torch.empty(2 * LARGE)
        world.all_gather(gathered, torch.full((LARGE,), float(world.rank))).wait()
        assert gathered.sum() == LARGE
        share = torch.empty(3)
        world.reduce_scatter(share, torch.ones(6)).wait()
        assert share.tolist() == [2.0] * 3
        return {name.split("_")[0] + str(len(counts)): n for name, n in counts.items()}

    assert ranks(2, body) == [{"all3": 1, "reduce3": 1}] * 2


def test_the_old_spelling_is_called_when_somebody_replaced_it(ranks: Ranks) -> None:
    def body() -> int:
        import torch.distributed as dist

        calls = []

        def old_name(output: torch.Tensor, tensor: torch.Tensor, **kwargs: object) -> None:
            calls.append(kwargs)
            output.copy_(tensor[: output.numel()])

        dist.reduce_scatter_tensor = old_name
        share = torch.empty(3)
        comm.communicator().reduce_scatter(share, torch.ones(6)).wait()
        assert share.tolist() == [1.0] * 3
        return len(calls)

    assert ranks(2, body) == [1, 1]


@pytest.mark.few(2)
@pytest.mark.parametrize("size", SIZES)
def test_the_list_form_of_all_gather_is_a_call_of_its_own(ranks: Ranks, size: int) -> None:
    def body() -> None:
        import torch.distributed as dist

        calls: list[str] = []
        listed = dist.all_gather

        def refused(*_: object, **__: object) -> None:
            raise AssertionError("the single-tensor form was called")

        def counted(*args: object, **kwargs: object) -> object:
            calls.append("all_gather")
            return listed(*args, **kwargs)

        for name in ("all_gather_into_tensor", "all_gather_single"):
            if hasattr(dist, name):
                setattr(dist, name, refused)
        dist.all_gather = counted
        world = comm.communicator()
        recorder = Recorder()
        rows = torch.empty(size, 2, dtype=torch.int64)
        with observe(recorder):
            pending = world.all_gather_list(
                rows, torch.tensor([world.rank, -world.rank]), label="order"
            )
            assert pending.wait() is rows
        assert rows.tolist() == [[rank, -rank] for rank in range(size)]
        assert calls == ["all_gather"]
        assert recorder.kinds() == [("all_gather", "order")]
        with pytest.raises(ValueError, match="all_gather on axis world"):
            world.all_gather_list(rows, torch.zeros(3, dtype=torch.int64))

    ranks(size, body)
