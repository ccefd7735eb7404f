"""Streams of a device beside the computation: what runs on them, after what, in which memory."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from meshwright.comm import Communicator, communicator
from meshwright.data_parallel import fully_shard
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from meshwright.testing.simulated import WorkLine, device_of
from support.internals.testing import Stamp

pytestmark = pytest.mark.devices("simulated")
LAYERS, WIDE = 6, 64
UNIT = WIDE * WIDE * 4
"""Bytes of one whole unit."""


def build(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)])
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def end_of(line: WorkLine) -> Stamp:
    """The last piece of work that ``line`` was given."""
    return Stamp(line.number, line._clock[line.number])


@contextmanager
def hearing(hear: Any) -> Iterator[None]:
    """Tell ``hear`` the kind of each collective of a unit, its communicator and label."""
    with ExitStack() as stack:
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            call = getattr(Communicator, kind)

            def heard(
                self: Communicator, *args: Any, _call: Any = call, _kind: str = kind, **how: Any
            ) -> Any:
                if how.get("label", "").startswith(("unshard", "reduce", "replicate")):
                    hear(_kind, self, how["label"])
                return _call(self, *args, **how)

            stack.enter_context(mock.patch.object(Communicator, kind, heard))
        yield


def body_streams(hybrid: bool) -> dict[str, set[str]]:
    """By kind, the streams that collectives were issued from, as far as they are known apart."""
    world = communicator()
    device = device_of(world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")) if hybrid else None
    model = build(mesh=mesh)
    found: dict[str, set[WorkLine]] = defaultdict(set)
    for _ in range(2):
        with hearing(lambda kind, axis, label: found[kind].add(device.current)):
            model(torch.randn(2, WIDE)).sum().backward()
    lines = [line for each in found.values() for line in each]
    assert len(lines) == len(set(lines)), "two kinds on one stream"
    assert device.current not in lines
    return {kind: {line.name for line in each} for kind, each in found.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("hybrid", [False, True])
def test_gathers_and_sums_run_on_streams_of_their_own(ranks: Ranks, hybrid: bool) -> None:
    kinds = ["all_gather", "reduce_scatter"] + ["all_reduce"] * hybrid
    expected = {kind: {"a side stream"} for kind in kinds}
    assert ranks(4 if hybrid else 2, body_streams, hybrid) == [expected] * (4 if hybrid else 2)


def body_overlap(prefetches: bool) -> tuple[list[str], float]:
    """Gathers that begin behind all that is computed, and the most memory, in whole units."""
    device = device_of(communicator())
    model = build()
    if not prefetches:
        for layer in model:
            layer.set_modules_to_forward_prefetch([])
    waits: list[str] = []

    def hear(kind: str, axis: Communicator, label: str) -> None:
        if device.current.comes_after(end_of(device._first)):
            waits.append(label)

    x = torch.randn(1, WIDE)
    with torch.no_grad():
        for _ in range(3):
            model(x)  # the order is known from then on
        before = device.memory.allocated
        device.memory.peak = before
        with hearing(hear):
            model(x)
    return waits, (device.memory.peak - before) / UNIT


@pytest.mark.parametrize("prefetches", [False, True])
def test_gathers_run_beside_the_computation_in_the_memory_of_two_units(
    ranks: Ranks, prefetches: bool
) -> None:
    for waits, units in ranks(2, body_overlap, prefetches):
        # What begins ahead comes before the computation that it runs beside. Of those that begin
        # when they are needed only the first has nothing to run beside.
        assert prefetches or waits == ["unshard 0"]
        assert 1.9 < units < 2.5


def body_of_small_tensors() -> tuple[float, float]:
    """The most memory of a forward pass, and what a step without gradients leaves, in units."""
    device = device_of(communicator())
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDE, WIDE) for _ in range(LAYERS)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.randn(1, WIDE)
    with torch.no_grad():
        for _ in range(3):
            model(x)
    before = device.memory.allocated
    device.memory.peak = before
    with torch.no_grad():
        model(x)
    peak = device.memory.peak - before
    model(x).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        model(x)
    return peak / UNIT, (device.memory.allocated - before) / UNIT


def test_units_of_small_tensors_take_the_memory_of_one_more_for_a_moment(ranks: Ranks) -> None:
    for units, kept in ranks(2, body_of_small_tensors):
        # What was gathered of two, and one that is copied from it.
        assert 2.9 < units < 3.5
        assert kept < 0.2, "gradients are kept through the next forward"


def body_hybrid() -> list[bool]:
    """Whether the computation waits for the sums over the shards when it starts the second sums."""
    world = communicator()
    device = device_of(world)
    model = build(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")))
    model(torch.randn(2, WIDE)).sum().backward()
    waits: list[bool] = []
    groups: list[WorkLine] = []

    def issued(kind: str, axis: Communicator, label: str) -> None:
        if kind == "reduce_scatter":
            groups[:] = [axis.group._stream.line]
        elif kind == "all_reduce":
            waits.append(device._first.comes_after(end_of(groups[0])))

    with hearing(issued):
        model(torch.randn(2, WIDE)).sum().backward()
    return waits


def test_the_computation_does_not_wait_for_the_first_of_two_sums(ranks: Ranks) -> None:
    for waits in ranks(4, body_hybrid):
        assert waits == [False] * LAYERS


def body_dropped() -> None:
    model = build()

    def refuse(*_: object) -> None:
        raise ValueError("planted")

    model[LAYERS // 2].register_full_backward_hook(refuse)
    with pytest.raises(ValueError, match="planted"):
        model(torch.randn(2, WIDE, requires_grad=True)).sum().backward()
    del model
    gc.collect()


def test_a_model_dropped_in_a_backward_gives_no_memory_back_that_is_in_use(ranks: Ranks) -> None:
    ranks(2, body_dropped)
