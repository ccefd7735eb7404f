"""Operations of a device's communicators in one steady step, and the copies around them, exactly.

A unit takes one all-gather for the forward, one for the backward, one reduce-scatter and, where it
is hybrid, one all-reduce, for each dtype and group of ranks. Each is packed and unpacked by at most
one operation. A replica takes one all-reduce for each bucket of bytes.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.compiler import aot_backend
from meshwright.data_parallel import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from meshwright.fsdp import FullyShardedDataParallel, MixedPrecision
from meshwright.fsdp.wrap import ModuleWrapPolicy
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from meshwright.testing.simulated import SimulatedDevice
from support.internals.data_parallel import NOTES

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
COPIES = {
    "aten._foreach_copy_.default": "copies",
    "aten._chunk_cat.out": "join",
    "aten.split_with_sizes_copy.out": "split",
    "aten._foreach_zero_.default": "zeros",
    "aten._foreach_add_.List": "add",
    "aten.copy_.default": "copy",
}
"""What packs and unpacks, by the names of this file."""

Step = list[str]
"""Operations in order: kind, unit or bucket, dtype, and the elements that it writes here."""


@contextlib.contextmanager
def recorded(*, with_copies: bool) -> Iterator[Step]:
    """Record what the device's communicators do in the block, and copies where asked for."""
    found: Step = []
    launch = SimulatedDevice.launch

    def record(
        device: SimulatedDevice, what: str, reads: Any = (), writes: Any = (), line: Any = None
    ) -> Any:
        kind = next((kind for kind in KINDS if what.startswith(kind)), None)
        if kind is not None:
            label = what.split("(")[1].split(" on axis")[0].split(" ", 1)[-1]
            dtype = str(writes[0].dtype).removeprefix("torch.")
            found.append(f"{kind} {label} {dtype} {sum(t.numel() for t in writes)}")
        elif with_copies and what in COPIES:
            found.append(COPIES[what])
        return launch(device, what, reads, writes, line)

    with mock.patch.object(SimulatedDevice, "launch", record):
        yield found


# ----------------------------------------------------------------------------------- models

SHARD = 116
"""Elements of half of a `Block` with the gap before its second matrix: slots begin at 16s."""
WHOLE = 2 * SHARD


class Block(nn.Module):
    """Two layers of 96 weights each, with biases of 12 and 8."""

    def __init__(self, *, width: int = 8, inner: int = 12, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(x)).to(self.down.weight.dtype)
        return x + self.down(y).to(x.dtype)


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.weight)


def frozen() -> Block:
    block = Block()
    block.up.requires_grad_(False)
    return block


def of_two_dtypes() -> Block:
    block = Block()
    block.down.double()
    return block


def tied() -> Block:
    block = Block(inner=8)
    block.down.weight = block.up.weight
    return block


def two(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(block(), block())


def ends_tied() -> nn.Module:
    """The first and the last unit share a matrix, which is the root's."""
    model = nn.Sequential(Block(), Block())
    model[1].up.weight = model[0].up.weight
    return model


def shard(*shape: int, **options: Any) -> Callable[[nn.Module], nn.Module]:
    names = ("replicate", "shard")[-len(shape) :]

    def lay_out(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for part in model.children():
            fully_shard(part, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    return lay_out


def compiled(lay_out: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], Any]:
    """Modes of the simulated device end graphs, so what is seen here is eager."""
    return lambda model: torch.compile(lay_out(model), backend=aot_backend)


def wrap(**options: Any) -> Callable[[nn.Module], nn.Module]:
    policy = ModuleWrapPolicy({Block})

    def lay_out(model: nn.Module) -> nn.Module:
        with warnings.catch_warnings(action="ignore"):  # of frozen parameters
            return FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)

    return lay_out


def train(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def accumulate(model: Any, x: torch.Tensor) -> None:
    model.set_requires_gradient_sync(False)
    train(model, x)
    model.set_requires_gradient_sync(True)
    train(model, x)


def accumulate_in_no_sync(model: Any, x: torch.Tensor) -> None:
    with model.no_sync():
        train(model, x)
    train(model, x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its layout, and the operations of a steady step on rank 0."""

    build: Callable[[], nn.Module] = two(Block)
    lay_out: Callable[[nn.Module], Any]
    step: Callable[[Any, torch.Tensor], None] = train
    expected: Step
    width: int = 8
    """Of the input."""
    is_rough: bool = False
    """True where it computes in bfloat16."""


def run(case: Case, *, with_copies: bool) -> Step:
    """Train three steps, of which the third counts, and compare gradients with one process."""
    torch.manual_seed(0)
    plain = case.build()
    torch.manual_seed(0)
    model = case.lay_out(case.build())
    x = torch.randn(2, case.width)
    steps: list[Step] = []
    for _ in range(3):
        model.zero_grad()
        with recorded(with_copies=with_copies) as found:
            case.step(model, x)
        steps.append(found)
    for _ in range(1 if case.step is train else 2):
        train(plain, x)
    if isinstance(model, FullyShardedDataParallel):
        return steps[-1]  # whose parameters are flat: their values have tests of their own
    accuracy = 0.1 if case.is_rough else 1e-4
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        gradient: Any = other.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(
            whole, one.grad, atol=accuracy, rtol=accuracy, check_device=False
        )
    return steps[-1]


def body_cases(cases: str, *, with_copies: bool) -> dict[str, Step]:
    table: Mapping[str, Case] = globals()[cases]
    return {name: run(case, with_copies=with_copies) for name, case in table.items()}


def expected_of(cases: Mapping[str, Case]) -> dict[str, Step]:
    return {name: case.expected for name, case in cases.items()}


# ------------------------------------------------------------------------------------ shards

Lines = dict[str, int]
"""Elements of what moves, by dtype."""


def passes(
    whole: Lines,
    part: Lines,
    *,
    further: Lines | None = None,
    pack: Step | None = None,
    unpack: Step | None = None,
    join: Step | None = None,
    after: Step | None = None,
    is_kept: bool = False,
) -> tuple[Step, Step]:
    """A forward and a backward of units 0 and 1, which gather ``whole`` and reduce to ``part``.

    ``pack`` and ``unpack`` are around each gather, ``join`` is before each reduction, and ``after``
    behind the last sum. Units that are kept are not gathered for the backward.
    """
    unpack = ["split"] if unpack is None else unpack
    join = ["join"] if join is None else join

    def gather(unit: int) -> Step:
        return [*(pack or ()), *(f"all_gather {unit} {d} {n}" for d, n in whole.items())]

    def reduce(unit: int) -> Step:
        return [*join, *(f"reduce_scatter {unit} {d} {n}" for d, n in part.items())]

    def end(unit: int) -> Step:
        return [*(f"all_reduce {unit} {d} {n}" for d, n in (further or {}).items()), *(after or ())]

    forward = [*gather(0), *gather(1), *unpack, *unpack]
    again = ([], []) if is_kept else ([*gather(1), *gather(0), *unpack], unpack)
    return forward, [*again[0], *reduce(1), *again[1], *end(1), *reduce(0), *end(0)]


def one_pass(*args: Any, **options: Any) -> Step:
    forward, backward = passes(*args, **options)
    return [*forward, *backward]


FLOATS = {"float32": WHOLE}, {"float32": SHARD}
NARROW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
OF_FROZEN = {"float32": 212}, {"float32": 52}
FORWARD, BACKWARD = passes(*FLOATS)
OF_CLASS = one_pass({"float32": 212}, {"float32": 106}, unpack=[], join=["copies"])

SHARDS = {
    "plain": Case(lay_out=shard(2), expected=one_pass(*FLOATS)),
    "matrices of more than 1 MiB, which hosts move one by one": Case(
        build=two(lambda: Block(width=512, inner=768)),
        lay_out=shard(2),
        expected=one_pass({"float32": 2 * 393_856}, {"float32": 393_856}),
        width=512,
    ),
    "tied in a unit": Case(
        build=two(tied),
        lay_out=shard(2),
        expected=one_pass({"float32": 104}, {"float32": 52}),
    ),
    "tied over units: the root has the matrix, alone, and keeps it": Case(
        build=ends_tied,
        lay_out=shard(2),
        expected=[
            "all_gather FSDPSequential float32 96",
            *one_pass({"float32": 136}, {"float32": 68}),
            "reduce_scatter FSDPSequential float32 48",
        ],
    ),
    "frozen parameters are gathered with the others, and not reduced": Case(
        build=two(frozen),
        lay_out=shard(2),
        expected=one_pass(*OF_FROZEN, pack=["copies"]),
    ),
    "frozen, kept": Case(
        build=two(frozen),
        lay_out=shard(2, reshard_after_forward=False),
        expected=one_pass(*OF_FROZEN, pack=["copies"], is_kept=True),
    ),
    "frozen, on the host": Case(
        build=two(frozen),
        lay_out=shard(2, offload_policy=CPUOffloadPolicy()),
        expected=one_pass(*OF_FROZEN, pack=["copy", "copy"], after=["copy"]),
    ),
    "two dtypes": Case(
        build=two(of_two_dtypes),
        lay_out=shard(2),
        expected=one_pass(
            {"float32": 108, "float64": 104},
            {"float32": 54, "float64": 52},
            unpack=["split", "split"],
            join=["join", "join"],
        ),
    ),
    "a unit of one parameter is not copied": Case(
        build=two(Single),
        lay_out=shard(2),
        expected=one_pass({"float32": 64}, {"float32": 32}, unpack=[], join=[]),
    ),
    "one parameter, cast": Case(
        build=two(Single),
        lay_out=shard(2, mp_policy=NARROW),
        expected=one_pass({"bfloat16": 64}, {"float32": 32}, pack=["copy"], unpack=[]),
        is_rough=True,
    ),
    "uneven rows": Case(
        build=two(lambda: Block(inner=5)),
        lay_out=shard(2),
        expected=one_pass({"float32": 168}, {"float32": 84}),
    ),
    "on the host": Case(
        lay_out=shard(2, offload_policy=CPUOffloadPolicy()),
        expected=one_pass(*FLOATS, pack=["copy"], after=["copy"]),
    ),
    "accumulated": Case(
        lay_out=shard(2),
        step=accumulate,
        expected=[
            *FORWARD,
            *(each for each in BACKWARD if "all_gather" in each or each == "split"),
            *FORWARD,
            *BACKWARD,
        ],
    ),
    "kept": Case(
        lay_out=shard(2, reshard_after_forward=False),
        expected=one_pass(*FLOATS, is_kept=True),
    ),
    "mixed precision": Case(
        lay_out=shard(2, mp_policy=NARROW),
        expected=one_pass({"bfloat16": WHOLE}, {"float32": SHARD}, pack=["copy"]),
        is_rough=True,
    ),
    "compiled": Case(lay_out=compiled(shard(2)), expected=one_pass(*FLOATS)),
    "the class": Case(
        lay_out=wrap(),
        expected=OF_CLASS,
    ),
    "the class, original parameters": Case(
        lay_out=wrap(use_orig_params=True),
        expected=OF_CLASS,
    ),
    "the class, frozen": Case(
        build=two(frozen),
        lay_out=wrap(use_orig_params=True),
        expected=OF_CLASS,
    ),
    "the class, mixed precision": Case(
        lay_out=wrap(
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        ),
        expected=one_pass(
            {"bfloat16": 212}, {"float32": 106}, pack=["copy"], unpack=[], join=["copies"]
        ),
    ),
    "the class, accumulated": Case(
        lay_out=wrap(),
        step=accumulate_in_no_sync,
        expected=[
            *(each for each in OF_CLASS if "all_gather" in each),
            *["copies", "copies"],  # what waits is shown as the gradient of the flat parameter
            *OF_CLASS,
        ],
    ),
}

HYBRID = {
    "plain": Case(lay_out=shard(2, 2), expected=one_pass(*FLOATS, further={"float32": SHARD})),
    "frozen": Case(
        build=two(frozen),
        lay_out=shard(2, 2),
        expected=one_pass(*OF_FROZEN, further={"float32": 52}, pack=["copies"]),
    ),
    "frozen, kept among two ranks": Case(
        build=two(frozen),
        lay_out=shard(4, reshard_after_forward=2),
        expected=one_pass({"float32": 276}, {"float32": 34}, pack=["copies"]),
    ),
}


@pytest.mark.devices("simulated", reason="hosts move large parameters without copies")
def test_a_unit_moves_by_one_operation(ranks: Ranks) -> None:
    assert ranks(2, body_cases, "SHARDS", with_copies=True)[0] == expected_of(SHARDS)


@pytest.mark.slow
@pytest.mark.devices("simulated", reason="hosts move large parameters without copies")
def test_a_unit_is_summed_over_copies_by_one_operation_more(ranks: Ranks) -> None:
    assert ranks(4, body_cases, "HYBRID", with_copies=True)[0] == expected_of(HYBRID)


# ---------------------------------------------------------------------------------- replicas

WIDE = 1024
MATRIX = WIDE * WIDE
"""4 MiB, from which replicas on hosts reduce a gradient by itself."""


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDE, WIDE, bias=False) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x.to(layer.weight.dtype))).to(x.dtype)
        return x


def half_in_float64() -> nn.Module:
    model = Layers()
    model.layers[:4].double()
    return model


def tied_and_frozen() -> nn.Module:
    model = Layers()
    model.layers[7].weight = model.layers[0].weight
    for layer in model.layers[1:3]:
        layer.requires_grad_(False)
    return model


def buckets(*sizes: int) -> Step:
    return [f"all_reduce bucket {n} float32 {size}" for n, size in enumerate(sizes)]


WHOLE_MODEL = buckets(MATRIX, 7 * MATRIX + 8 + NOTES)
"""The first bucket is closed by its first gradient, which stays in its own memory. What is sent
last carries what ranks know of each other."""

REPLICAS = {
    "plain": Case(build=Layers, lay_out=mw.replicate, expected=WHOLE_MODEL, width=WIDE),
    "one parameter": Case(
        build=lambda: nn.Linear(WIDE, WIDE, bias=False),
        lay_out=mw.replicate,
        expected=buckets(MATRIX + 1 + NOTES),
        width=WIDE,
    ),
    "tied gradients travel once, frozen parameters have no place": Case(
        build=tied_and_frozen,
        lay_out=mw.replicate,
        expected=buckets(MATRIX, 4 * MATRIX + 5 + NOTES),
        width=WIDE,
    ),
    "each dtype has buckets of its own": Case(
        build=half_in_float64,
        lay_out=mw.replicate,
        expected=[
            f"all_reduce bucket 0 float32 {MATRIX}",
            f"all_reduce bucket 1 float64 {MATRIX}",
            f"all_reduce bucket 2 float32 {3 * MATRIX + 3}",
            f"all_reduce bucket 3 float64 {3 * MATRIX + 3 + 2 + NOTES}",
        ],
        width=WIDE,
    ),
    "the class": Case(
        build=Layers, lay_out=mw.DistributedDataParallel, expected=WHOLE_MODEL, width=WIDE
    ),
    "buckets of 12 MB": Case(
        build=Layers,
        lay_out=partial(mw.replicate, bucket_cap_mb=12, gradient_as_bucket_view=True),
        expected=buckets(MATRIX + 1, 3 * MATRIX + 3, 3 * MATRIX + 3, MATRIX + 1 + NOTES),
        width=WIDE,
    ),
    "accumulated": Case(
        build=Layers,
        lay_out=mw.DistributedDataParallel,
        step=accumulate_in_no_sync,
        expected=WHOLE_MODEL,
        width=WIDE,
    ),
    "compiled: those of graphs are in tests/compiler/test_bucket_plan.py": Case(
        build=Layers, lay_out=compiled(mw.replicate), expected=WHOLE_MODEL, width=WIDE
    ),
}


@pytest.mark.devices("simulated", reason="hosts reduce large gradients where they lie")
def test_replicas_send_buckets_of_bytes(ranks: Ranks) -> None:
    assert ranks(2, body_cases, "REPLICAS", with_copies=False)[0] == expected_of(REPLICAS)
