"""Operations of a device's communicators in one step: one each way for a unit and dtype, packed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.compiler import aot_backend
from meshwright.data_parallel import fully_shard
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.internals.data_parallel import NOTES
from support.internals.testing import CommunicationStream

Operations = list[tuple[str, int]]
"""Kinds, and the elements that each writes on this rank."""
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
SIDE = 512
"""Of matrices of 1 MiB, which hosts gather and reduce one by one."""
WHOLE = 8 * SIDE * SIDE
WIDE = 1024
"""Of matrices of 4 MiB, which replicas on hosts reduce one by one."""


class Layers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@contextlib.contextmanager
def recorded() -> Iterator[Operations]:
    """Record what the device's communicators do in the block."""
    found: Operations = []
    issue = CommunicationStream.issue

    def record(stream: CommunicationStream, text: str, run: Any, reads: Any, writes: Any) -> Any:
        kind = next(kind for kind in KINDS if kind in text)
        found.append((kind, sum(tensor.numel() for tensor in writes)))
        return issue(stream, text, run, reads, writes)

    with mock.patch.object(CommunicationStream, "issue", record):
        yield found


def operations(
    build: Callable[[], nn.Module], lay_out: Callable[[nn.Module], Any], width: int
) -> Operations:
    """Compare gradients with one process; returns the operations of the second step."""
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    model = lay_out(build())
    x = torch.randn(2, width)
    found: Operations = []
    for _ in range(2):
        model.zero_grad()
        with recorded() as step:
            model(x).sum().backward()
        found = step
    plain(x).sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        gradient: Any = other.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(whole, one.grad, atol=1e-4, rtol=1e-4)
    return found


def sharded(unit: Callable[[], nn.Module], shape: tuple[int, ...]) -> Operations:
    names = ("replicate", "shard")[-len(shape) :]

    def lay_out(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for part in model.children():
            fully_shard(part, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return operations(lambda: nn.Sequential(unit(), unit()), lay_out, SIDE)


def body_units() -> None:
    gathers, sums = [("all_gather", WHOLE)], [("reduce_scatter", WHOLE // 2)]
    assert sharded(lambda: Layers(SIDE), (2,)) == gathers * 4 + sums * 2


def body_lone_parameters() -> None:
    """A unit of one parameter moves without copies, as it did."""
    whole = SIDE * SIDE
    gathers, sums = [("all_gather", whole)], [("reduce_scatter", whole // 2)]
    found = sharded(lambda: nn.Linear(SIDE, SIDE, bias=False), (2,))
    assert found == gathers * 4 + sums * 2


def body_hybrid() -> None:
    found = sharded(lambda: Layers(SIDE), (2, 2))
    assert sorted(found) == sorted(
        [("all_gather", WHOLE)] * 4
        + [("reduce_scatter", WHOLE // 2), ("all_reduce", WHOLE // 2)] * 2
    )


@pytest.mark.devices("simulated", reason="hosts move large parameters without copies")
@pytest.mark.parametrize("body", [body_units, body_lone_parameters])
def test_a_unit_moves_by_one_operation(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)


@pytest.mark.devices("simulated", reason="hosts move large parameters without copies")
def test_a_unit_is_summed_over_copies_by_one_operation_more(ranks: Ranks) -> None:
    ranks(4, body_hybrid)


def body_buckets() -> None:
    """The first is closed by its first gradient, which stays in its own memory."""
    found = operations(lambda: Layers(WIDE), mw.replicate, WIDE)
    matrix = WIDE * WIDE
    assert found == [("all_reduce", matrix), ("all_reduce", 7 * matrix + 8 + NOTES)]


def body_one_large() -> None:
    """What is sent last carries what ranks know of each other."""
    found = operations(lambda: nn.Linear(WIDE, WIDE, bias=False), mw.replicate, WIDE)
    assert found == [("all_reduce", WIDE * WIDE + 1 + NOTES)]


class Mixed(Layers):
    """Its first half computes in float64."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.layers[:4].double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x.to(layer.weight.dtype))).float()
        return x


def tied_and_frozen() -> nn.Module:
    model = Layers(WIDE)
    model.layers[7].weight = model.layers[0].weight
    for frozen in model.layers[1:3]:
        frozen.requires_grad_(False)
    return model


def body_tied_and_frozen() -> None:
    """A tied gradient travels once, and frozen parameters have no place."""
    found = operations(tied_and_frozen, mw.replicate, WIDE)
    matrix = WIDE * WIDE
    assert found == [("all_reduce", matrix), ("all_reduce", 4 * matrix + 5 + NOTES)]


def body_dtypes() -> None:
    """Each dtype has buckets of its own, of which the first is small."""
    found = operations(lambda: Mixed(WIDE), mw.replicate, WIDE)
    matrix = WIDE * WIDE
    assert found == [
        ("all_reduce", matrix),
        ("all_reduce", matrix),
        ("all_reduce", 3 * matrix + 3),
        ("all_reduce", 3 * matrix + 3 + 2 + NOTES),
    ]


def body_wrapper() -> None:
    """`DistributedDataParallel` sends the same buckets; ``bucket_cap_mb`` sets their bytes."""
    matrix = WIDE * WIDE
    found = operations(lambda: Layers(WIDE), mw.DistributedDataParallel, WIDE)
    assert found == [("all_reduce", matrix), ("all_reduce", 7 * matrix + 8 + NOTES)]
    lay_out = partial(mw.replicate, bucket_cap_mb=12, gradient_as_bucket_view=True)
    assert operations(lambda: Layers(WIDE), lay_out, WIDE) == [
        ("all_reduce", matrix + 1),
        ("all_reduce", 3 * matrix + 3),
        ("all_reduce", 3 * matrix + 3),
        ("all_reduce", matrix + 1 + NOTES),
    ]


def body_compiled() -> None:
    """Modes of the simulated device end graphs, so these are eager buckets; those of graphs are in
    tests/compiler/test_bucket_plan.py.
    """

    def lay_out(model: nn.Module) -> Any:
        return torch.compile(mw.replicate(model), backend=aot_backend)

    matrix = WIDE * WIDE
    found = operations(lambda: Layers(WIDE), lay_out, WIDE)
    assert found == [("all_reduce", matrix), ("all_reduce", 7 * matrix + 8 + NOTES)]


@pytest.mark.devices("simulated", reason="hosts reduce large gradients where they lie")
@pytest.mark.parametrize(
    "body",
    [
        body_buckets,
        body_one_large,
        body_tied_and_frozen,
        body_dtypes,
        body_wrapper,
        body_compiled,
    ],
)
def test_replicas_send_buckets_of_bytes(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)
