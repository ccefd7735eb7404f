"""DTensors built around local tensors, and views of flat ranges as tensors of state dicts."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, distribute_tensor

from meshwright import comm
from meshwright.errors import LayoutError
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.comm.boxes import local_box
from support.internals.comm import (
    Ranges,
    ShardView,
    at_rest,
    beginning_storage,
    cut_once_more,
    dtensor_around,
    dtensor_at_rest,
    dtensor_like,
    held,
    is_dtensor,
    local_of,
    mesh_communicators,
    part_like,
    torch_placements,
)
from support.internals.comm import whole as gathered
from support.internals.data_parallel import accumulator_of
from support.internals.layout import Box, Partial, Replicate, Shard, chunk

SHAPES = [(8, 3), (5, 3), (3,), (1, 4), (4, 0), (0, 4), (7, 2, 3)]


def whole(shape: tuple[int, ...]) -> torch.Tensor:
    """Numbered elements."""
    return torch.arange(math.prod(shape), dtype=torch.float64).view(shape)


@pytest.mark.parametrize("place", [(2, 4), (slice(1, 3),), (slice(2, 2),), (slice(None), 3)])
def test_a_storage_begins_with_what_a_view_shows(place: tuple[int | slice, ...]) -> None:
    line = torch.arange(30.0).view(6, 5)
    view = line[place].requires_grad_(False)
    found = beginning_storage(view)
    assert (found.storage_offset(), found.shape, found.stride()) == (0, view.shape, view.stride())
    assert torch.equal(found, view)
    before = line._version
    found.mul_(2)
    assert torch.equal(found, line[place]), "the memory is one"
    assert line._version == before + 1, "and so is what is written to it"
    assert found.untyped_storage().nbytes() < line.nbytes
    assert torch.equal(copy.deepcopy(found), found)
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    assert torch.equal(torch.load(file), found)
    del line, view
    assert torch.isfinite(found).all(), "its memory is kept"


def test_a_storage_moves_alone_and_meta_tensors_share_nothing() -> None:
    line = torch.arange(6.0)
    place, found = line.data_ptr(), beginning_storage(line)
    assert found.data_ptr() == place
    found.share_memory_()
    assert found.data_ptr() != place, "it moves alone"
    assert line.data_ptr() == place
    assert torch.equal(found, line)
    made = beginning_storage(torch.empty(4, 3, device="meta")[2])
    assert (made.device.type, made.shape, made.storage_offset()) == ("meta", (3,), 0)


@pytest.mark.parametrize("size", [2, 4])
def test_dtensors_share_the_storage_of_their_part(ranks: Ranks, size: int) -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
        for shape in SHAPES:
            full = whole(shape)
            spread = torch_placements([Shard(0)])
            box = local_box(shape, mesh, spread)
            local = full[box.slices()].clone()
            tensor = dtensor_at_rest(local, mesh, [Shard(0)], shape, full.stride())
            stock = distribute_tensor(full, mesh, spread)
            assert torch.equal(tensor.to_local(), stock.to_local())
            assert torch.equal(tensor.full_tensor(), full)
            assert torch.equal(gathered(tensor), full)
            assert tensor.shape == full.shape
            assert tensor.stride() == full.stride()
            assert local_of(tensor).data_ptr() == local.data_ptr()
            local.fill_(7.0)
            assert (tensor.to_local() == 7.0).all()
            twin = dtensor_like(torch.full_like(local, 3.0), tensor)
            assert torch.equal(twin.full_tensor(), torch.full_like(full, 3.0))
            with pytest.raises(LayoutError, match="expected a part of shape"):
                dtensor_like(local.float(), tensor)
            back = at_rest(tensor)
            assert back.local.data_ptr() == local.data_ptr()
            assert (back.mesh, back.placements, back.shape) == (mesh, spread, shape)
            assert is_dtensor(tensor)
            assert not is_dtensor(local)

    ranks(size, body)


def test_a_part_that_is_not_on_the_device_of_the_mesh_stays_where_it_is(ranks: Ranks) -> None:
    """As shards that are offloaded; ``meta`` stands for the GPU of the mesh."""

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        mesh._device_type = "meta"
        local = torch.ones(2, 3)
        tensor = dtensor_at_rest(local, mesh, [Shard(0)], (4, 3), (3, 1))
        assert tensor.device == local.device
        assert local_of(tensor).data_ptr() == local.data_ptr()
        mesh._device_type = "cpu"  # operators ask a device for its number of devices
        leaf = nn.Parameter(tensor)
        assert accumulator_of(leaf).variable is leaf  # type: ignore[attr-defined]

    ranks(2, body)


def test_dtensors_on_two_axes(ranks: Ranks) -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        full = whole((5, 3))
        for placements in ([Replicate(), Shard(1)], [Shard(0), Shard(1)], [Shard(0), Shard(0)]):
            box = local_box(full.shape, mesh, torch_placements(placements))
            tensor = dtensor_at_rest(full[box.slices()], mesh, placements, full.shape, (3, 1))
            assert torch.equal(tensor.full_tensor(), full)
        for shape in ((8, 3), (6, 3)):
            full = whole(shape)
            strided, _ = cut_once_more([Replicate(), Shard(0)], mesh, 0, 0)
            box = local_box(shape, mesh, strided)
            data, cut = divmod(comm.communicator().rank, 2)
            first, rows = chunk(shape[0], 2, cut)
            start, count = chunk(rows, 2, data)
            assert box == Box((first + start, 0), (count, shape[1]))
            tensor = dtensor_at_rest(full[box.slices()], mesh, strided, shape, (3, 1))
            assert torch.equal(tensor.full_tensor(), full)
            assert torch.equal(gathered(tensor), full)
            assert held(tensor, "weight").boxes == (box,)
            assert torch.equal(part_like(full, tensor).to_local(), tensor.to_local())
        axes = [c.axis for c in mesh_communicators(mesh)]
        assert axes == ["replicate", "shard"]
        partial = dtensor_at_rest(full, mesh, [Partial(), Replicate()], full.shape, (3, 1))
        assert torch.equal(partial.full_tensor(), 2 * full)
        with pytest.raises(LayoutError, match="'sum' is placed"):
            held(partial, "sum")

    ranks(4, body)


def test_rows_that_are_cut_twice_and_unevenly(ranks: Ranks) -> None:
    """The last of 7 rows was looked for on a rank that has none: zeros in what was gathered."""

    def body() -> None:
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("shard", "tensor"))
        for rows in range(1, 14):
            full = whole((rows, 3))
            strided, _ = cut_once_more([Replicate(), Shard(0)], mesh, 0, 0)
            box = local_box(full.shape, mesh, strided)
            tensor = dtensor_at_rest(full[box.slices()], mesh, strided, full.shape, (3, 1))
            assert torch.equal(tensor.full_tensor(), full)
            assert torch.equal(gathered(tensor), full)
            assert [b for b in held(tensor, "weight").boxes if b.numel] == [box] * bool(box.numel)
            assert torch.equal(part_like(full, tensor).to_local(), tensor.to_local())

    ranks(6, body)


def test_a_part_of_another_shape_is_refused(ranks: Ranks) -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(LayoutError, match=r"to have shape \(2, 3\); found \(3, 3\)"):
            dtensor_at_rest(torch.zeros(3, 3), mesh, [Shard(0)], (4, 3), (3, 1))
        tensor = dtensor_at_rest(torch.zeros(2, 3), mesh, [Shard(0)], (4, 3), (3, 1))
        with pytest.raises(ValueError, match="expected a plain tensor, found a DTensor of shape"):
            comm.communicator().all_reduce(tensor)

    ranks(2, body)


def test_an_optimizer_steps_the_shard_through_its_dtensor(ranks: Ranks) -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        local = torch.ones(2, 3)
        parameter = nn.Parameter(dtensor_at_rest(local, mesh, [Shard(0)], (4, 3), (3, 1)))
        gradient = torch.full((2, 3), 2.0)
        parameter.grad = dtensor_at_rest(gradient, mesh, [Shard(0)], (4, 3), (3, 1))
        torch.optim.SGD([parameter], lr=0.25).step()
        assert torch.equal(local, torch.full((2, 3), 0.5))
        assert isinstance(parameter, DTensor)

    ranks(2, body)


# ------------------------------------------------------------------------------- ShardView


def view_of(shape: tuple[int, ...], start: int, stop: int) -> ShardView:
    """The view of a range of numbered elements."""
    return ShardView(whole(shape).flatten()[start:stop], start, shape, name="lin.weight")


@pytest.mark.parametrize("shape", [(12,), (3, 4), (2, 3, 2), (12, 1), (1, 12)])
def test_every_range_gives_its_boxes(shape: tuple[int, ...]) -> None:
    full = whole(shape)
    for start in range(13):
        for stop in range(start, 13):
            view = view_of(shape, start, stop)
            assert view.shape == view.size() == full.shape
            chunks = view.__create_chunk_list__()
            items = view.__create_write_items__("a.b", view)
            assert [item.index.offset for item in items] == [chunk.offsets for chunk in chunks]
            seen: list[float] = []
            for box, item in zip(chunks, items, strict=True):
                index = MetadataIndex("a.b", box.offsets)
                part = view.__get_tensor_shard__(index)
                place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                assert torch.equal(part, full[place])
                assert item.tensor_data is not None
                assert item.tensor_data.size == full.shape
                seen += part.flatten().tolist()
            assert seen == list(range(start, stop))


@pytest.mark.parametrize(
    "within",
    [
        pytest.param([[(2, 2)], [(0, 4)]], id="rows"),
        pytest.param([[(0, 4)], [(1, 3)]], id="columns"),
        pytest.param([[(0, 1), (2, 2)], [(0, 4)]], id="strided rows"),
        pytest.param([[(0, 4)], [(0, 2), (3, 1)]], id="strided columns"),
        pytest.param([[(0, 1), (3, 1)], [(0, 1), (2, 1)]], id="both"),
    ],
)
def test_every_range_within_a_part_gives_its_boxes(within: list[Ranges]) -> None:
    full = whole((4, 4))
    rows, columns = (
        [n for start, count in own for n in range(start, start + count)] for own in within
    )
    part = full[rows][:, columns].flatten()
    for start in range(part.numel() + 1):
        for stop in range(start, part.numel() + 1):
            local = part[start:stop].clone()
            view = ShardView(local, start, (4, 4), within=within)
            again = copy.deepcopy(torch.empty_like(view))
            for box, memory in view.boxes():
                assert torch.equal(memory, full[box.slices()])
            for (box, memory), (same, other) in zip(view.boxes(), again.boxes(), strict=True):
                assert box == same
                other.copy_(memory)
            assert torch.equal(again.local, local)
            holding = held(view, "a")
            parts = [full[box.slices()].flatten() for box in holding.boxes]
            assert torch.equal(holding.tensor, torch.cat([*parts, full.new_empty(0)]))
    with pytest.raises(LayoutError, match="expected a 1-D range within"):
        ShardView(part.clone(), 1, (4, 4), within=within)
    with pytest.raises(RuntimeError, match="or is of a part"):
        ShardView(part[:1], 0, (4, 4), within=within).full_tensor()


def test_a_tensor_without_elements_has_one_empty_box() -> None:
    view = view_of((0, 3), 0, 0)
    assert [tuple(chunk.sizes) for chunk in view.__create_chunk_list__()] == [(0, 3)]


def test_views_move_and_copy_their_own_elements() -> None:
    view = view_of((3, 4), 3, 9)
    for moved in (view.to(torch.float32), view.clone(), view.cpu(), view.detach()):
        assert isinstance(moved, ShardView)
        assert (moved.start, moved.stop, moved.shape) == (3, 9, view.shape)
        assert moved.local.tolist() == view.local.tolist()
    assert view.to(torch.float32).dtype == torch.float32
    assert view.to(dtype=torch.float64, device="cpu") is view
    cloned = view.clone()
    assert isinstance(cloned, ShardView)
    assert cloned.local.data_ptr() != view.local.data_ptr()
    assert copy.deepcopy(view).local.data_ptr() != view.local.data_ptr()
    assert view.numel() == 12
    assert "start=3" in repr(view)
    target = torch.zeros_like(view)
    assert isinstance(target, ShardView)
    assert target.local.tolist() == [0.0] * 6
    target.copy_(view)
    assert torch.equal(target.local, view.local)
    target.copy_(10 * whole((3, 4)))
    assert torch.equal(target.local, 10 * view.local)


def test_a_view_is_pickled_without_its_communicator() -> None:
    file = io.BytesIO()
    torch.save({"w": view_of((3, 4), 3, 9)}, file)
    file.seek(0)
    back = torch.load(file, weights_only=False)["w"]
    assert isinstance(back, ShardView)
    assert (back.start, back.shape, back.name) == (3, (3, 4), "lin.weight")
    assert back.local.tolist() == list(range(3, 9))


COMPUTES: list[Callable[[ShardView], object]] = [
    lambda view: view + 1,
    lambda view: 2 * view,
    lambda view: view.mul_(2.0),
    lambda view: view.sum(),
    lambda view: view[0],
    lambda view: view.view(-1),
    lambda view: torch._foreach_mul_([view], 2.0),
    lambda view: torch.stack([view, view]),
    lambda view: torch.zeros(3, 4, dtype=torch.float64).copy_(view),
]


@pytest.mark.parametrize("compute", COMPUTES)
def test_arithmetic_is_refused_by_name(compute: Callable[[ShardView], object]) -> None:
    with pytest.raises(RuntimeError, match=r"^ShardView 'lin.weight' of shape \(3, 4\) holds 6 of"):
        compute(view_of((3, 4), 3, 9))


@pytest.mark.parametrize("foreach", [True, False])
def test_an_optimizer_loads_views_and_refuses_to_step(foreach: bool) -> None:
    layer = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1, foreach=foreach)
    layer(torch.ones(4)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = view_of((3, 4), 3, 9)
    optimizer.load_state_dict(state)
    loaded = optimizer.state_dict()["state"][0]["exp_avg"]
    assert isinstance(loaded, ShardView)
    assert loaded.dtype == torch.float32
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"^ShardView 'lin.weight'.* give optimizers the state"):
        optimizer.step()
    assert torch.equal(layer.weight, before)


def test_wrong_ranges_are_refused() -> None:
    with pytest.raises(LayoutError, match="1-D range within the 12 elements"):
        view_of((3, 4), 8, 12).__class__(torch.zeros(5), 8, (3, 4))
    with pytest.raises(LayoutError, match="1-D range"):
        ShardView(torch.zeros(2, 2), 0, (3, 4))
    with pytest.raises(ValueError, match="holds elements 0 to 6, the other 3 to 9"):
        view_of((3, 4), 0, 6).copy_(view_of((3, 4), 3, 9))
    with pytest.raises(ValueError, match=r"expected a source of the same shape, found \(4, 3\)"):
        view_of((3, 4), 0, 6).copy_(whole((4, 3)))
    with pytest.raises(ValueError, match="no box begins at"):
        view_of((3, 4), 0, 6).__get_tensor_shard__(MetadataIndex("a", (2, 0)))
    with pytest.raises(RuntimeError, match="without a communicator"):
        view_of((3, 4), 0, 6).full_tensor()


@pytest.mark.parametrize("size", [2, 4])
def test_full_tensors(ranks: Ranks, size: int) -> None:
    def body() -> None:
        world = comm.communicator()
        full = whole((3, 4))
        share = -(-full.numel() // (size + 1))  # the last rank holds more
        start = world.rank * share
        stop = full.numel() if world.rank == size - 1 else start + share
        view = ShardView(full.flatten()[start:stop], start, (3, 4), communicator=world)
        assert torch.equal(view.full_tensor(), full)
        mine = full.flatten() if world.rank == 0 else full.flatten()[:0]
        assert torch.equal(ShardView(mine, 0, (3, 4), communicator=world).full_tensor(), full)
        assert torch.equal(ShardView(full.flatten(), 0, (3, 4)).full_tensor(), full)
        short = ShardView(full.flatten()[:1], 0, (3, 4), name="w", communicator=world)
        with pytest.raises(RuntimeError, match="hold .* of 12 elements"):
            short.full_tensor()

    ranks(size, body)


def body_on_the_host() -> None:
    """A part that was offloaded, of a mesh whose ranks communicate on devices."""
    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(6.0).view(3, 2)
    spread = distribute_tensor(values, mesh, torch_placements([Shard(0)]))
    offloaded = dtensor_around(local_of(spread).detach().cpu(), at_rest(spread))
    found = gathered(offloaded)
    assert found.tolist() == values.tolist()
    assert found.device == torch.device("cpu")


@pytest.mark.devices("host", "simulated")
def test_what_was_offloaded_is_gathered(ranks: Ranks) -> None:
    ranks(2, body_on_the_host)
