"""Where parameters begin: whole and in parts at multiples of 16 bytes, of any shape and dtype."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.comm import Pending
from meshwright.testing import FakeCommunicator, run_fake
from support.internals.data_parallel import BufferTypes, DataAxes, FlatBuffer
from support.internals.data_parallel import buffer as module
from support.internals.layout import FlatLayout

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]
BYTES = 16


def body(
    world: FakeCommunicator,
    shapes: list[tuple[int, int]],
    dims: list[int],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> list[str]:
    """Gather once; name what does not begin as it should, or came to another place."""
    names = [str(number) for number in range(len(shapes))]
    kind = str(dtypes[0]).removeprefix("torch.")
    layout = FlatLayout.chunked(names, shapes, kind, world.size, dims=dims)
    types = BufferTypes.of(dtypes[0], dtypes[1], None)
    held = FlatBuffer(layout, DataAxes(shard=world), types, CPU)
    counts = [math.prod(shape) for shape in shapes]
    wholes = [torch.arange(n).remainder(7).to(dtypes[0]) for n in counts]
    held.fill([whole.view(shape) for whole, shape in zip(wholes, shapes, strict=True)])
    started: list[Pending] = []
    moves = held.gather("", started)
    if moves is not None:
        moves.ranks.all_gather_coalesced(moves.outputs, moves.tensors).wait()
    held.finish_gather()
    wrong = []
    for index, view in enumerate(map(held.view, range(len(shapes)))):
        if view.numel() and view.data_ptr() % BYTES:
            wrong.append(f"whole {index} begins at {view.data_ptr() % BYTES}")
        if not torch.equal(view.reshape(-1).float(), wholes[index].to(types.compute).float()):
            wrong.append(f"{index} has other values")
        part = held.local(index)
        if part.numel() and part.data_ptr() % BYTES:
            wrong.append(f"part {index} begins at {part.data_ptr() % BYTES}")
    assert len(world.collectives) <= 1
    return wrong


@pytest.fixture(autouse=True)
def _alone_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gather tensors by themselves from so few bytes that odd ones are, too."""
    monkeypatch.setattr(module, "ALONE", 64)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 1)), min_size=1),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES[:3]),
    st.integers(1, 4),
)
@example([(0, 1, 0), (9, 5, 0)], torch.float32, torch.float64, 2)
@settings(max_examples=60, deadline=None)
def test_parameters_begin_at_multiples_of_16_bytes(
    cases: list[tuple[int, int, int]], master: torch.dtype, compute: torch.dtype, size: int
) -> None:
    shapes = [(rows, columns) for rows, columns, _ in cases]
    dims = [dim for _, _, dim in cases]
    run = functools.partial(run_fake, size, body)
    # Large ones last, as a unit puts them.
    order = sorted(range(len(cases)), key=lambda index: math.prod(shapes[index]))
    shapes, dims = [shapes[index] for index in order], [dims[index] for index in order]
    assert run(shapes, dims, (master, compute)) == [[]] * size
