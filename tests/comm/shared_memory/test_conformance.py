"""The same cases on Gloo and on shared memory, at 1 to 4 ranks: what is gathered is equal bitwise.

All cases of one backend and size run in one world. Each gives what the rank got and what it should
have got, computed in rank order from the tensors of all ranks; the rank compares them.
"""

from __future__ import annotations

import functools
import itertools
import traceback
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from meshwright.testing import Ranks

Tensors = list[torch.Tensor]
Case = Callable[[int, int], "Result"]

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
SIZES = (0, 7, 1000, 70_001, 700_003)
"""One of each path: nothing, small, direct, staged in several rounds."""
STAGED_DTYPES = (torch.float32, torch.bfloat16, torch.complex64)
"""The dtypes of the largest size: what moves the bytes does not know the others either."""


def sizes_of(dtype: torch.dtype) -> tuple[int, ...]:
    return SIZES if dtype in STAGED_DTYPES else SIZES[:-1]


class Result(NamedTuple):
    """What a rank got and should have got."""

    got: Tensors
    expected: Tensors
    is_exact: bool = True
    """Whether Gloo gives the same bits; it takes sums of floats in another order."""


CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def current(module: ModuleType, *names: str) -> Callable[..., Any]:
    """The first of the names that this torch has: the newer ones end in ``single``."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


all_gather_single = current(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = current(dist, "reduce_scatter_single", "reduce_scatter_tensor")
functional_all_gather = current(functional, "all_gather_single", "all_gather_tensor")
functional_reduce_scatter = current(functional, "reduce_scatter_single", "reduce_scatter_tensor")


def given(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """The tensor of ``rank``, which every rank can make."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randint(1, 5, (numel,), generator=generator)
    if dtype.is_floating_point or dtype.is_complex:
        return (values + torch.rand(numel, generator=generator)).to(dtype)
    return values.to(dtype) if dtype != torch.bool else values > 2


def total(tensors: Tensors) -> torch.Tensor:
    """The sum in rank order, narrow floats in float32."""
    is_narrow = tensors[0].dtype in (torch.bfloat16, torch.float16)
    wide = [tensor.float() if is_narrow else tensor for tensor in tensors]
    return functools.reduce(torch.add, wide).to(tensors[0].dtype)


def each(rank: int, size: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensors:
    return [given(index, numel, dtype, seed) for index in range(size)]


@case
def all_reduce_sums(rank: int, size: int) -> Result:
    got, expected = [], []
    for dtype in DTYPES:
        for numel in sizes_of(dtype):
            tensors = each(rank, size, numel, dtype)
            tensor = tensors[rank].clone()
            dist.all_reduce(tensor)
            got.append(tensor)
            expected.append(total(tensors))
    return Result(got, expected, is_exact=False)


@case
def all_reduce_reductions(rank: int, size: int) -> Result:
    names: dict[str, Callable[..., torch.Tensor]] = {
        "MAX": torch.maximum,
        "MIN": torch.minimum,
        "PRODUCT": torch.mul,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    got, expected = [], []
    for name, combine in names.items():
        dtypes = (torch.int64, torch.uint8)
        if name in ("MAX", "MIN"):
            dtypes += (torch.float32, torch.bfloat16)
        for dtype in dtypes:
            for numel in (5, 300_001):
                tensors = each(rank, size, numel, dtype)
                tensor = tensors[rank].clone()
                dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
                got.append(tensor)
                expected.append(functools.reduce(combine, tensors))
    return Result(got, expected)


@case
def all_reduce_average(rank: int, size: int) -> Result:
    tensors = each(rank, size, 1000, torch.float32)
    tensor = tensors[rank].clone()
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    return Result([tensor], [total(tensors) / size], is_exact=False)


@case
def all_reduce_strided(rank: int, size: int) -> Result:
    tensors = [tensor.view(50, 20).t() for tensor in each(rank, size, 1000, torch.float32)]
    base = tensors[rank].clone()
    dist.all_reduce(base)
    row = given(rank, 1000, torch.float32)[::2]
    dist.all_reduce(row)
    rows = [tensor[::2] for tensor in each(rank, size, 1000, torch.float32)]
    return Result([base, row], [total(tensors), total(rows)], is_exact=False)


@case
def all_reduce_of_parameters(rank: int, size: int) -> Result:
    tensors = each(rank, size, 100, torch.float32)
    parameter = torch.nn.Parameter(tensors[rank].clone())
    version = parameter._version
    dist.all_reduce(parameter)
    assert parameter._version == version
    with torch.inference_mode():
        inside = tensors[rank].clone()
        dist.all_reduce(inside)
    dist.all_reduce(inside)
    twice = functools.reduce(torch.add, [total(tensors)] * size)
    return Result([parameter.detach(), inside.clone()], [total(tensors), twice], is_exact=False)


@case
def all_reduce_coalesced(rank: int, size: int) -> Result:
    sizes = (3, 40_000, 0, 11)
    mine = [given(rank, numel, torch.float32) for numel in sizes]
    with dist._coalescing_manager():
        for tensor in mine:
            dist.all_reduce(tensor)
    return Result(
        mine, [total(each(rank, size, numel, torch.float32)) for numel in sizes], is_exact=False
    )


@case
def all_gathers(rank: int, size: int) -> Result:
    got, expected = [], []
    for dtype in DTYPES:
        for numel in sizes_of(dtype):
            tensors = each(rank, size, numel, dtype)
            output = torch.zeros(size * numel, dtype=dtype)
            all_gather_single(output, tensors[rank])
            listed = [torch.zeros(numel, dtype=dtype) for _ in range(size)]
            dist.all_gather(listed, tensors[rank])
            got += [output, *listed]
            expected += [torch.cat(tensors), *tensors]
    return Result(got, expected)


@case
def all_gathers_uneven(rank: int, size: int) -> Result:
    got, expected = [], []
    for scale in (1, 3, 300_000):
        tensors = [given(index, scale * (index + 1), torch.int32) for index in range(size)]
        listed = [torch.zeros_like(tensor) for tensor in tensors]
        dist.all_gather(listed, tensors[rank])
        got += listed
        expected += tensors
    return Result(got, expected)


@case
def all_gathers_strided(rank: int, size: int) -> Result:
    tensors = [tensor.view(6, 4).t() for tensor in each(rank, size, 24, torch.float32)]
    frame = torch.zeros(size * 4, 12)
    all_gather_single(frame[:, ::2], tensors[rank].contiguous())
    listed = [torch.zeros(8, 6)[::2] for _ in range(size)]
    dist.all_gather(listed, tensors[rank])
    return Result([frame[:, ::2], *listed], [torch.cat(tensors), *tensors])


@case
def reduce_scatters(rank: int, size: int) -> Result:
    got, expected = [], []
    for dtype in DTYPES:
        for numel in sizes_of(dtype):
            tensors = each(rank, size, numel * size, dtype)
            output = torch.zeros(numel, dtype=dtype)
            reduce_scatter_single(output, tensors[rank].clone())
            got.append(output)
            expected.append(total(tensors)[rank * numel : (rank + 1) * numel])
    return Result(got, expected, is_exact=False)


@case
def reduce_scatters_into_own_share(rank: int, size: int) -> Result:
    got, expected = [], []
    for numel in (10, 200_000):
        tensors = each(rank, size, numel * size, torch.float32)
        whole = tensors[rank].clone()
        reduce_scatter_single(whole[rank * numel : (rank + 1) * numel], whole)
        got.append(whole[rank * numel : (rank + 1) * numel])
        expected.append(total(tensors)[rank * numel : (rank + 1) * numel])
    return Result(got, expected, is_exact=False)


@case
def reduce_scatters_of_lists(rank: int, size: int) -> Result:
    got, expected = [], []
    for numel in (0, 5, 90_000):
        parts = [each(rank, size, numel, torch.float32, seed) for seed in range(size)]
        output = torch.zeros(numel)
        dist.reduce_scatter(output, [parts[target][rank] for target in range(size)])
        got.append(output)
        expected.append(total(parts[rank]))
    return Result(got, expected, is_exact=False)


@case
def broadcasts(rank: int, size: int) -> Result:
    got, expected = [], []
    for dtype in (torch.float32, torch.bool, torch.bfloat16, torch.complex64):
        for numel in sizes_of(dtype):
            for root in (0, size - 1):
                tensors = each(rank, size, numel, dtype)
                tensor = tensors[rank].clone()
                dist.broadcast(tensor, root)
                got.append(tensor)
                expected.append(tensors[root])
    return Result(got, expected)


@case
def broadcasts_strided(rank: int, size: int) -> Result:
    strided = torch.full((10, 4), float(rank))
    dist.broadcast(strided[:, 1], size - 1)
    expected = torch.full((10, 4), float(rank))
    expected[:, 1] = size - 1
    return Result([strided], [expected])


@case
def reduces(rank: int, size: int) -> Result:
    got, expected = [], []
    for numel in SIZES:
        for root in (0, size - 1):
            tensors = each(rank, size, numel, torch.float32)
            tensor = tensors[rank].clone()
            dist.reduce(tensor, root)
            if rank == root:
                got.append(tensor)
                expected.append(total(tensors))
    return Result(got, expected, is_exact=False)


@case
def gathers_and_scatters(rank: int, size: int) -> Result:
    got, expected = [], []
    for numel in SIZES:
        for root in (0, size - 1):
            tensors = each(rank, size, numel, torch.float32)
            listed = [torch.zeros(numel) for _ in range(size)] if rank == root else None
            dist.gather(tensors[rank], listed, dst=root)
            if listed is not None:
                got += listed
                expected += tensors
            output = torch.zeros(numel)
            dist.scatter(output, list(tensors) if rank == root else None, src=root)
            got.append(output)
            expected.append(tensors[rank])
    return Result(got, expected)


@case
def all_to_alls(rank: int, size: int) -> Result:
    got, expected = [], []
    for numel in SIZES:
        tensors = each(rank, size, numel * size, torch.float32)
        output = torch.zeros(numel * size)
        dist.all_to_all_single(output, tensors[rank])
        got.append(output)
        parts = [tensor[rank * numel : (rank + 1) * numel] for tensor in tensors]
        expected.append(torch.cat(parts))
        if numel:
            listed = [torch.zeros(numel) for _ in range(size)]
            dist.all_to_all(listed, list(tensors[rank].chunk(size)))
            got += listed
            expected += parts
    return Result(got, expected)


@case
def all_to_alls_with_splits(rank: int, size: int) -> Result:
    got, expected = [], []
    for scale in (1, 60_000):
        # Rank r sends (r + p) % 3 rows to rank p.
        rows = [[(source + target) % 3 * scale for target in range(size)] for source in range(size)]
        tensors = [given(r, 2 * sum(rows[r]), torch.int32).view(-1, 2) for r in range(size)]
        wanted = [rows[source][rank] for source in range(size)]
        output = torch.zeros(sum(wanted), 2, dtype=torch.int32)
        dist.all_to_all_single(output, tensors[rank], wanted, rows[rank])
        got.append(output)
        expected.append(torch.cat([t.split(rows[s])[rank] for s, t in enumerate(tensors)]))
    return Result(got, expected)


@case
def objects(rank: int, size: int) -> Result:
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": r, "text": "x" * r} for r in range(size)]
    shared: list[object] = [rank, "of the first"] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, src=0)
    assert shared == [0, "of the first"]
    return Result([], [])


@case
def two_groups_at_once(rank: int, size: int) -> Result:
    """Operations on two groups, started in opposite orders on odd and even ranks."""
    groups = [dist.new_group(), dist.new_group()]
    tensors = [torch.full((50_000,), float(rank + 1 + which)) for which in (0, 1)]
    works: list[dist.Work | None] = [None, None]
    for which in (0, 1) if rank % 2 else (1, 0):
        works[which] = dist.all_reduce(tensors[which], group=groups[which], async_op=True)
    for which in (0, 1):
        work = works[which]
        assert work is not None
        work.wait()
    base = size * (size + 1) / 2
    expected = [torch.full((50_000,), base), torch.full((50_000,), base + size)]
    for group in groups:
        dist.destroy_process_group(group)
    return Result(tensors, expected)


@case
def many_asynchronous(rank: int, size: int) -> Result:
    tensors = [torch.full((97 * i,), float(rank + i)) for i in range(60)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    dist.barrier()
    for work in reversed(works):
        assert work is not None
        work.wait()
        assert work.is_completed()
    base = size * (size - 1) / 2
    return Result(tensors, [torch.full((97 * i,), base + size * i) for i in range(60)])


@case
def subgroups(rank: int, size: int) -> Result:
    halves = [list(range(0, size, 2)), list(range(1, size, 2))]
    groups = [dist.new_group(ranks) if ranks else None for ranks in halves]
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=groups[rank % 2])
    return Result([tensor], [torch.tensor([float(sum(halves[rank % 2]))])])


@case
def functional_collectives(rank: int, size: int) -> Result:
    tensors = each(rank, size, 24 * size, torch.float32)
    world = dist.group.WORLD
    summed = functional.all_reduce(tensors[rank], "sum", world)
    gathered = functional_all_gather(tensors[rank], 0, world)
    share = functional_reduce_scatter(tensors[rank], "sum", 0, world)
    together = functional.all_reduce_coalesced([tensors[rank], tensors[rank][:5]], "sum", world)
    got = [summed + 0, gathered + 0, share + 0, *(tensor + 0 for tensor in together)]
    whole = total(tensors)
    expected = [whole, torch.cat(tensors), whole.chunk(size)[rank], whole, whole[:5]]
    return Result(got, expected, is_exact=False)


BEYOND_GLOO = {
    "all_reduce_average",
    "all_reduce_strided",
    "broadcasts_strided",
    "all_gathers_uneven",
    "reduce_scatters_of_lists",
}
"""What Gloo refuses, or does to the wrong elements."""


def _run(backend: str) -> dict[str, str]:
    """All cases on this rank, up to the first that fails: empty text, or its error."""
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    outcomes: dict[str, str] = {}
    for name, function in CASES.items():
        if backend == "gloo" and name in BEYOND_GLOO:
            continue
        try:
            _compare(function(rank, size), is_gloo=backend == "gloo")
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    dist.destroy_process_group()
    return outcomes


def _compare(result: Result, *, is_gloo: bool) -> None:
    for got, expected in zip(result.got, result.expected, strict=True):
        if result.is_exact or not is_gloo:
            assert torch.equal(got, expected)
        else:
            is_narrow = got.dtype in (torch.bfloat16, torch.float16)
            tolerance = 2e-2 if is_narrow else 1e-5
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@functools.cache
def _outcomes(ranks: Ranks, backend: str, size: int) -> list[dict[str, str]]:
    return ranks(size, _run, backend, connected=False)


def check(ranks: Ranks, names: Iterable[str], size: int) -> None:
    backends = ["cpu:meshwright", "gloo"] if size > 1 else ["cpu:meshwright"]
    for name, backend in itertools.product(names, backends):
        if backend == "gloo" and name in BEYOND_GLOO:
            continue
        for rank, outcomes in enumerate(_outcomes(ranks, backend, size)):
            assert name in outcomes, f"{backend}: rank {rank} did not come to {name}"
            assert not outcomes[name], f"{name}, {backend}, rank {rank}: {outcomes[name]}"


def test_every_case_on_three_ranks(ranks: Ranks) -> None:
    check(ranks, CASES, 3)


@pytest.mark.few(0, slow=12)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_case(ranks: Ranks, name: str, size: int) -> None:
    check(ranks, [name], size)
