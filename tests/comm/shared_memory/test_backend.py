"""The backend in use: in place, under torch's layers, compiled, and with random calls."""

from __future__ import annotations

import gc
import importlib
import os
import random
import resource
import threading
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from meshwright.comm import shared_memory
from meshwright.errors import CollectiveTimeoutError
from meshwright.testing import Ranks
from support.internals.comm import (
    CHANNEL_BYTES,
    SLOT_BYTES,
    ArenaLayout,
    SharedTensors,
    accumulate,
    check_reduction,
)


def join(backend: str = "cpu:meshwright") -> dist.ProcessGroup:
    dist.init_process_group(backend)
    world = dist.group.WORLD
    assert world is not None
    return world


def current(name: str, older: str) -> Any:
    return getattr(dist, name, None) or getattr(dist, older)


all_gather_single = current("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = current("reduce_scatter_single", "reduce_scatter_tensor")

# ---------------------------------------------------------------------- without ranks


def test_this_machine_is_supported() -> None:
    assert shared_memory.unsupported() == ""
    assert shared_memory.host_identity() == shared_memory.host_identity()


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_nothing_in_an_arena_overlaps(size: int) -> None:
    layout = ArenaLayout(size, SLOT_BYTES, CHANNEL_BYTES)
    ends = [8 * (layout.states + size)]
    starts = [8 * layout.rank_word(0)]
    ends += [8 * layout.rank_word(size), 8 * layout.record(size, 0), layout.slot(size, 0)]
    starts += [8 * layout.record(0, 0), layout.slot(0, 0), layout.channel(0, 0)]
    assert all(end <= start for end, start in zip(ends, starts, strict=True))
    assert layout.channel(size - 1, size - 1) + CHANNEL_BYTES == layout.nbytes


@pytest.mark.parametrize("alias", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("reduction", ["sum", "avg", "product", "max"])
def test_reductions_go_in_rank_order_even_onto_themselves(
    reduction: str, alias: int | None
) -> None:
    tensors = [torch.rand(100, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected = torch.empty(100)
    accumulate(expected, [tensor.clone() for tensor in tensors], reduction)
    target = torch.empty(100) if alias is None else tensors[alias]
    accumulate(target, tensors, reduction, alias)
    assert torch.equal(target, expected)
    if reduction == "sum":
        first, second, third, fourth = [
            torch.rand(100, generator=torch.Generator().manual_seed(i)) for i in range(4)
        ]
        assert torch.equal(expected, ((first + second) + third) + fourth)


def test_narrow_sums_are_rounded_once() -> None:
    tensors = [torch.tensor([256.0], dtype=torch.bfloat16)]
    tensors += [torch.tensor([1.0], dtype=torch.bfloat16) for _ in range(3)]
    target = torch.empty(1, dtype=torch.bfloat16)
    accumulate(target, tensors, "sum")
    assert target.item() == torch.tensor(259.0).bfloat16().item() != 256.0


def test_reductions_that_have_no_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="band needs an integer"):
        check_reduction("band", torch.float32)
    with pytest.raises(ValueError, match="max has no meaning"):
        check_reduction("max", torch.complex64)
    with pytest.raises(ValueError, match="not available"):
        check_reduction("PREMUL_SUM", torch.float32)


def test_shared_tensors_return_to_a_pool_and_are_located() -> None:
    tensors = SharedTensors()
    tensor = tensors.allocate(1000, torch.float32)
    address = tensor.data_ptr()
    location = tensors.locate(tensor[10:].data_ptr())
    assert location is not None and location.offset == 4096 + 40
    assert tensors.address_of(os.getpid(), location) == tensor[10:].data_ptr()
    assert tensors.locate(torch.empty(10).data_ptr()) is None
    view = tensor[5:]
    del tensor
    gc.collect()
    assert tensors.locate(address) is not None, "a view keeps it"
    del view
    gc.collect()
    assert tensors.locate(address) is None
    assert tensors.allocate(990, torch.float32).data_ptr() == address
    assert tensors.allocate(0, torch.float32).numel() == 0


def test_segments_leave_half_of_the_files_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))
    tensors = SharedTensors()
    held = [tensors.allocate(1000, torch.float32) for _ in range(6)]
    shared = [tensors.locate(tensor.data_ptr()) is not None for tensor in held]
    assert shared == [True] * 4 + [False] * 2
    assert all(tensor.numel() == 1000 for tensor in held)
    del held[0]
    gc.collect()
    again = tensors.allocate(1000, torch.float32)
    assert tensors.locate(again.data_ptr()) is not None, "from the pool, which opens no file"


# ---------------------------------------------------------------------- in place


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_shared_tensors_give_the_same_numbers(ranks: Ranks, size: int) -> None:
    """Shared on all ranks, on some and on none: the bits are the same."""

    def body() -> None:
        world = join()
        rank = dist.get_rank()

        def made(numel: int, dtype: torch.dtype, *, shared: bool) -> torch.Tensor:
            if shared:
                return shared_memory.allocate(world, numel, dtype)
            return torch.empty(numel, dtype=dtype)

        for dtype in (torch.float32, torch.bfloat16):
            for numel in (size * 100, size * 400_000):
                share = numel // size
                all_of_it = [torch.rand(numel, generator=_generator(r)) for r in range(size)]
                results = []
                for sharing in ([True] * size, [r % 2 == 0 for r in range(size)], [False] * size):
                    whole = made(numel, dtype, shared=sharing[rank])
                    whole.copy_(all_of_it[rank])
                    part = made(share, dtype, shared=sharing[rank])
                    reduce_scatter_single(part, whole)
                    gathered = made(numel, dtype, shared=sharing[rank])
                    mine = gathered[rank * share : (rank + 1) * share]
                    mine.copy_(part)
                    all_gather_single(gathered, mine)
                    dist.all_reduce(whole)
                    assert torch.equal(gathered, whole)
                    swapped = made(numel, dtype, shared=False)
                    dist.all_to_all_single(swapped, gathered)
                    assert torch.equal(swapped, mine.repeat(size))
                    dist.broadcast(gathered, size - 1)
                    results.append(whole.clone())
                assert torch.equal(results[0], results[1])
                assert torch.equal(results[0], results[2])
        subgroup = dist.new_group()  # other groups find the tensors too
        tensor = shared_memory.allocate(world, 300_000, torch.float32).fill_(1)
        dist.all_reduce(tensor, group=subgroup)
        assert bool((tensor == size).all())

    ranks(size, body, connected=False)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_many_shared_tensors_come_and_go(ranks: Ranks) -> None:
    def body() -> None:
        world = join()
        for turn in range(30):
            numel = 100_000 + turn * 7_000
            tensor = shared_memory.allocate(world, numel, torch.float32).fill_(turn)
            dist.all_reduce(tensor)
            assert bool((tensor == 2 * turn).all())

    ranks(2, body, connected=False)


@pytest.mark.slow
def test_a_gigabyte_goes_in_chunks(ranks: Ranks) -> None:
    def body() -> int:
        join()
        tensor = torch.ones(1 << 28)
        dist.all_reduce(tensor)
        assert tensor.min() == tensor.max() == 2
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return max(
            512 * os.stat(link).st_blocks
            for link in links
            if os.path.islink(link) and "meshwright-arena" in os.readlink(link)
        )

    # Two slots a rank, and some pages of counts and records.
    assert max(ranks(2, body, connected=False, timeout=180)) < 2 * 2 * SLOT_BYTES + (1 << 20)


# ---------------------------------------------------------------------- torch's layers


def test_torch_layers_work_on_it(ranks: Ranks) -> None:
    def body() -> None:
        join()
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        full = torch.arange(32.0).view(8, 4)
        spread = distribute_tensor(full, mesh, [Replicate(), Shard(0)])
        assert torch.equal(spread.redistribute(mesh, [Shard(1), Shard(0)]).full_tensor(), full)
        model = torch.nn.Linear(4, 4)
        copy = torch.nn.Linear(4, 4)
        copy.load_state_dict(model.state_dict())
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        parallel(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
        for rank in range(4):
            (copy(torch.full((2, 4), float(rank))).sum() / 4).backward()
        torch.testing.assert_close(model.weight.grad, copy.weight.grad)

    ranks(4, body, connected=False)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_functional_collectives(ranks: Ranks, backend: str) -> None:
    def body() -> None:
        world = join()
        rank = dist.get_rank()
        with warnings.catch_warnings():  # inductor warns of torch.jit when it is loaded
            warnings.simplefilter("ignore")
            importlib.import_module("torch._inductor.compile_fx")
        newer = getattr(functional, "all_gather_single_autograd", None)
        all_gather = newer or functional.all_gather_tensor_autograd
        scatter = getattr(functional, "reduce_scatter_single", None)
        reduce_scatter = scatter or functional.reduce_scatter_tensor

        numbers = torch.arange(4.0)

        def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            summed = functional.all_reduce(x * 2, "sum", world)
            gathered = all_gather(summed + 1, 0, world)
            share = reduce_scatter(gathered * x.sum(), "sum", 0, world)
            swapped = functional.all_to_all_single(x + numbers, [2, 2], [2, 2], world)
            first = functional.broadcast(x, 0, world)
            both = functional.all_reduce_coalesced([x, share], "max", world)
            return gathered.sin(), share + 0, swapped * 2, first - 1, *(each + 0 for each in both)

        x = torch.full((4,), float(rank))
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        found = compiled(x)
        ones = torch.ones(4)
        expected = [
            (3 * torch.ones(8)).sin(),
            12 * ones,
            2 * torch.tensor([0.0, 1, 1, 2]) + 4 * rank,
        ]
        expected += [-ones, ones, 12 * ones]
        for got, eager, wanted in zip(found, step(x), expected, strict=True):
            assert torch.allclose(got, wanted) and torch.allclose(got, eager)

    ranks(2, body, connected=False, timeout=120)


def test_a_backward_thread_and_the_main_thread_share_a_group(ranks: Ranks) -> None:
    def body() -> None:
        groups = [join(), dist.new_group()]
        sums = [torch.zeros(50), torch.zeros(200_000)]

        def loop(which: int) -> None:
            for turn in range(100):
                tensor = torch.full_like(sums[which], float(turn))
                dist.all_reduce(tensor, group=groups[which], async_op=bool(which))
                dist.barrier(group=groups[which])
                sums[which] += tensor

        other = threading.Thread(target=loop, args=(1,))
        other.start()
        loop(0)
        other.join()
        for total in sums:
            assert bool((total == 2 * sum(range(100))).all())

    ranks(2, body, connected=False)


# ---------------------------------------------------------------------- random calls


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([2, 3, 4]))
@pytest.mark.slow
def test_random_calls_equal_the_sums_in_rank_order(ranks: Ranks, seed: int, size: int) -> None:
    """Operations, sizes, dtypes, groups and waits drawn from one seed on all ranks."""
    ranks(size, random_calls, seed, 60, connected=False)


@pytest.mark.soak
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([2, 3, 4]))
def test_many_random_calls(ranks: Ranks, seed: int, size: int) -> None:
    ranks(size, random_calls, seed, 200, connected=False, timeout=120)


@pytest.mark.slow
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([2, 3, 4]))
def test_random_calls_on_gloo(ranks: Ranks, seed: int, size: int) -> None:
    """The same calls, one after another, give the same numbers there."""
    ranks(size, random_calls, seed, 60, "gloo", connected=False, timeout=120)


def random_calls(seed: int, count: int, backend: str = "cpu:meshwright") -> None:
    world = join(backend)
    groups = [world, dist.new_group()]
    rank, size = dist.get_rank(), dist.get_world_size()
    draw = random.Random(seed)
    pending: list[tuple[dist.Work | None, torch.Tensor, torch.Tensor, object]] = []
    sends: list[dist.Work | None] = []
    """Kept: a message that is dropped before it has left takes its memory with it."""
    for call in range(count):
        kind = draw.choice(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"])
        dtype = draw.choice([torch.float32, torch.float64, torch.int32, torch.bool])
        numel = draw.choice([0, 1, draw.randrange(2_000), draw.randrange(600_000)])
        group, root, is_async = draw.choice(groups), draw.randrange(size), draw.random() < 0.6
        shared = draw.random() < 0.4
        tensors = [
            torch.randint(0, 9, (numel * size,), generator=_generator(call * 7 + r)).to(dtype)
            for r in range(size)
        ]
        mine = tensors[rank]
        if shared and numel:
            mine = shared_memory.allocate(world, numel * size, dtype).copy_(mine)
        out = torch.zeros(numel, dtype=dtype)
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total = total + tensor
        work: dist.Work | None
        if kind == "all_reduce":
            work = dist.all_reduce(mine, group=group, async_op=is_async)
            out, expected = mine, total
        elif kind == "all_gather":
            out = torch.zeros(numel * size * size, dtype=dtype)
            work = all_gather_single(out, mine, group=group, async_op=is_async)
            expected = torch.cat(tensors)
        elif kind == "reduce_scatter":
            work = reduce_scatter_single(out, mine, group=group, async_op=is_async)
            expected = total[rank * numel : (rank + 1) * numel]
        elif kind == "broadcast":
            work = dist.broadcast(mine, root, group=group, async_op=is_async)
            out, expected = mine, tensors[root]
        else:
            sends.append(dist.isend(mine, (rank + 1) % size, group=group, tag=call % 3))
            out = torch.zeros(numel * size, dtype=dtype)
            work = dist.irecv(out, (rank - 1) % size, group=group, tag=call % 3)
            expected = tensors[(rank - 1) % size]
        pending.append((work, out, expected, (seed, call, kind, dtype, numel, mine)))
        # Gloo hangs where messages and collectives of several groups are under way together.
        while pending and (backend == "gloo" or draw.random() < 0.4):
            _finish(*pending.pop(draw.randrange(len(pending))))
    for entry in pending:
        _finish(*entry)
    dist.barrier()


def _finish(
    work: dist.Work | None, out: torch.Tensor, expected: torch.Tensor, what: object
) -> None:
    if work is not None:
        work.wait()
    assert torch.equal(out, expected), what


def test_what_torch_asks_of_a_group(ranks: Ranks) -> None:
    """Its time limit can be set, and that of one barrier."""

    def body() -> None:
        world = join()
        if dist.get_rank() == 0:
            with pytest.raises(CollectiveTimeoutError, match=r"barrier.* missing is rank 1"):
                world.monitored_barrier(timedelta(seconds=0.2))
        else:
            time.sleep(0.5)
            world.monitored_barrier()
        backend = world._get_backend(torch.device("cpu"))
        assert backend.name() == world.getBackendName() == shared_memory.BACKEND
        assert list(world._device_types) == [torch.device("cpu")]
        with pytest.raises(RuntimeError, match="communicates on the CPU"):
            world._get_backend(torch.device("cuda"))
        # The latter until torch 2.13.
        limit = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
        limit(timedelta(seconds=0.3), world)
        if dist.get_rank() == 0:
            start = time.monotonic()
            with pytest.raises(CollectiveTimeoutError, match="missing is rank 1"):
                dist.all_reduce(torch.ones(1))
            assert time.monotonic() - start < 2
        else:
            time.sleep(0.8)

    ranks(2, body, connected=False)


def test_lives_are_looked_at_from_several_threads(ranks: Ranks) -> None:
    def body() -> None:
        world = join()
        assert isinstance(world, shared_memory.SharedMemoryGroup)
        peers, errors = world._meeting.peers, []

        def look() -> None:
            try:
                for _ in range(20_000):
                    assert not peers.lost()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        dist.barrier()

    ranks(2, body, connected=False)
