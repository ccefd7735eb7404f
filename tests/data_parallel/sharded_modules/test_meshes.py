"""`fully_shard` on parts of the ranks: blocks of ranks, meshes of parameters, DTensors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import (
    DataParallelMeshDims,
    FSDPModule,
    ShardPlacementResult,
    fully_shard,
)
from meshwright.mesh import DeviceMesh, init_device_mesh
from meshwright.testing import Ranks


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)
    ).double()


def batch(seed: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed)).double()


def share(x: torch.Tensor, index: int | None = None, count: int | None = None) -> torch.Tensor:
    world = communicator()
    index, count = world.rank if index is None else index, count or world.size
    rows = len(x) // count
    return x[index * rows : (index + 1) * rows]


def same(model: nn.Module, one: nn.Module, *, gradients: bool = True) -> None:
    pairs = zip(model.named_parameters(), one.named_parameters(), strict=True)
    for (name, mine), (other, theirs) in pairs:
        assert name == other
        torch.testing.assert_close(whole(mine.detach()), theirs.detach(), rtol=1e-9, atol=1e-9)
        assert (mine.grad is None) is (theirs.grad is None), name
        if gradients and theirs.grad is not None:
            torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-9, atol=1e-9)


def train(model: nn.Module, one: nn.Module, mine: Callable[[torch.Tensor], torch.Tensor]) -> None:
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, one))
    for step in range(3):
        x = batch(step)
        model(mine(x)).square().mean().backward()
        one(x).square().mean().backward()
        same(model, one)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    same(model, one)


def gathers(recorder: Recorder) -> list[tuple[str, str, int]]:
    return [
        (c.axis, c.label, c.shape[0] if c.shape else 0)
        for c in recorder.collectives
        if c.label.startswith("unshard")
    ]


# ---------------------------------------------------------------------- blocks


def body_blocks() -> None:
    world = communicator()
    one = mlp()
    model = copy.deepcopy(one)
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, reshard_after_forward=2)
    fully_shard(model, reshard_after_forward=2)
    block = fully_shard.state(model[0]).unit.settings.block
    first = world.rank - world.rank % 2
    assert block is not None and block.ranks == (first, first + 1)
    train(model, one, share)

    recorder = Recorder()
    with observe(recorder):
        model(share(batch(7))).square().mean().backward()
    axes = [axis for axis, _, _ in gathers(recorder)]
    assert axes == ["shard"] * 3 + ["shard block"] * 3
    labels = [label for _, label, _ in gathers(recorder)]
    assert labels == [f"unshard {n}" for n in (0, 2, 4, 4, 2, 0)]

    # A forward without a backward leaves nothing behind that a later one would gather.
    model(share(batch(7)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter._local_tensor.data.mul_(2.0)
        for parameter in one.parameters():
            parameter.mul_(2.0)
    torch.testing.assert_close(model(share(batch(7))), one(share(batch(7))))

    # By hand, and from then on with a bool.
    model(share(batch(7)))
    model[0].reshard()
    assert fully_shard.state(model[0]).unit.groups[0].buffer._kept is None
    assert fully_shard.state(model[2]).unit.groups[0].buffer._kept is not None
    model.set_reshard_after_forward(True)
    recorder = Recorder()
    model.zero_grad()
    with observe(recorder):
        model(share(batch(7))).square().mean().backward()
    assert [axis for axis, _, _ in gathers(recorder)] == ["shard"] * 6


def test_parameters_wait_for_the_backward_in_blocks_of_ranks(ranks: Ranks) -> None:
    ranks(4, body_blocks)


def body_blocks_that_are_all_or_one() -> None:
    for after, forward, backward in ((1, 3, 0), (2, 3, 3), (True, 3, 3), (False, 3, 0)):
        model = mlp()
        for layer in (model[0], model[2], model[4]):
            fully_shard(layer, reshard_after_forward=after)
        fully_shard(model, reshard_after_forward=after)
        recorder = Recorder()
        with observe(recorder):
            out = model(batch(0))
            assert len(gathers(recorder)) == forward
            out.square().mean().backward()
        assert len(gathers(recorder)) == forward + backward
        assert {axis for axis, _, _ in gathers(recorder)} == {"shard"}


def test_a_block_of_one_or_of_all_ranks(ranks: Ranks) -> None:
    ranks(2, body_blocks_that_are_all_or_one)


# ------------------------------------------------------------ a mesh a parameter


class Experts(nn.Module):
    """A dense layer, and one whose weights differ between two halves of the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 4)
        self.expert = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(self.dense(x).tanh())


def body_mesh_of_parameters() -> None:
    """The expert is sharded over two ranks; its gradients are the mean of theirs."""
    world = communicator()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "within"))
    torch.manual_seed(0)
    one = Experts().double()
    model = copy.deepcopy(one)
    expert = set(model.expert.parameters())
    result = ShardPlacementResult(Shard(0), grid["within"])

    def choose(parameter: nn.Parameter) -> Any:
        return result if parameter in expert else None

    fully_shard(model, shard_placement_fn=choose)
    assert model.expert.weight.device_mesh == grid["within"]
    assert model.dense.weight.device_mesh.size() == 4
    assert model.expert.weight._local_tensor.shape == (2, 4)
    assert model.dense.weight._local_tensor.shape == (1, 6)

    half = world.rank // 2
    references = [copy.deepcopy(one) for _ in range(2)]
    for step in range(2):
        x = batch(step)
        model(share(x)).square().mean().backward()
        for number, reference in enumerate(references):
            reference(share(x, number, 2)).square().mean().backward()
    for (name, mine), *theirs in zip(
        model.named_parameters(), *(r.parameters() for r in references), strict=True
    ):
        if name.startswith("unused"):
            assert mine.grad is None
            continue
        expected = theirs[half].grad
        if name.startswith("dense"):
            expected = (theirs[0].grad + theirs[1].grad) / 2
        torch.testing.assert_close(whole(mine.grad), expected, rtol=1e-9, atol=1e-9)
    for method in (model.set_custom_all_gather, model.set_custom_reduce_scatter):
        with pytest.raises(ValueError, match="is not supported with multiple"):
            method(lambda *_: None)


@pytest.mark.slow
def test_parameters_with_a_mesh_of_their_own(ranks: Ranks) -> None:
    ranks(4, body_mesh_of_parameters)


# -------------------------------------------------------------- DTensors already


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def deep() -> nn.Module:
    torch.manual_seed(0)
    model = Deep().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def body_with_tensor_parallelism(hybrid: bool) -> None:
    """Both weights of a block are cut by tensor parallelism first, along dims 0 and 1."""
    names = ("replicate", "shard", "tensor") if hybrid else ("shard", "tensor")
    grid = init_device_mesh("cpu", (2, 1, 2) if hybrid else (2, 2), mesh_dim_names=names)
    data = grid[names[:-1]] if hybrid else grid["shard"]
    one = deep()
    model = copy.deepcopy(one)
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, grid["tensor"], plan)
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    same(model, one)
    weight = model.blocks[0].up.weight
    assert weight.device_mesh.mesh_dim_names == names
    shown: list[Any] = []
    model.blocks[0].up.register_forward_hook(lambda m, *_: shown.append(m.weight))
    coordinate = grid.get_coordinate()
    train(model, one, lambda x: share(x, coordinate[0], 2))
    assert shown[0].placements == (Shard(0),)
    total = torch.nn.utils.clip_grad_norm_
    model(share(batch(1), coordinate[0], 2)).square().mean().backward()
    one(batch(1)).square().mean().backward()
    torch.testing.assert_close(
        whole(total([model.blocks[1].up.weight], 0.1)), total([one.blocks[1].up.weight], 0.1)
    )


@pytest.mark.parametrize("hybrid", [pytest.param(False, marks=pytest.mark.slow), True])
def test_parameters_that_tensor_parallelism_has_cut(ranks: Ranks, hybrid: bool) -> None:
    ranks(4, body_with_tensor_parallelism, hybrid)


def distributed(model: nn.Module, mesh: DeviceMesh, cuts: dict[str, int]) -> nn.Module:
    """``model`` with DTensors on ``mesh``: some cut along a dim on axis ``tensor``."""
    names = mesh.mesh_dim_names
    for name, parameter in list(model.named_parameters()):
        placements: list[Any] = [Replicate()] * mesh.ndim
        if name in cuts:
            placements[names.index("tensor")] = Shard(cuts[name])
        path, _, attribute = name.rpartition(".")
        spread = distribute_tensor(parameter.detach(), mesh, placements)
        setattr(model.get_submodule(path), attribute, nn.Parameter(spread))
    return model


def body_mesh_of_all_axes(
    shape: tuple[int, ...], names: tuple[str, ...], shard: Any, replicate: Any, placed: str
) -> None:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    cuts = {"0.weight": 0, "0.bias": 0, "2.weight": 1} if "tensor" in names else {}
    model = distributed(copy.deepcopy(one), mesh, cuts)
    dims = DataParallelMeshDims(shard=shard, replicate=replicate)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, dp_mesh_dims=dims)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    assert isinstance(model[0], FSDPModule)
    assert str(model[0].weight.placements) == placed
    same(model, one)
    data = [names.index(n) for n in (*dims.replicate_names, *dims.shard_names)]
    spread = [Shard(0) if index in data else Replicate() for index in range(mesh.ndim)]
    count = 1
    for index in data:
        count *= shape[index]
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, one))
    for step in range(3):
        x = batch(step)
        # A global sum over the data axes, of which each rank's part is multiplied by their number:
        # the mean over them is the sum again.
        out = model(distribute_tensor(x, mesh, spread))
        (out.square().sum() * count / out.numel()).backward()
        one(x).square().mean().backward()
        same(model, one)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    same(model, one)


STRIDED = "(_StridedShard(dim=0, sf=2), Shard(dim=0))"


@pytest.mark.parametrize(
    ("shape", "names", "shard", "replicate", "placed"),
    [
        ((2, 2), ("shard", "tensor"), "shard", None, STRIDED),
        ((2, 2), ("tensor", "shard"), "shard", None, "(Shard(dim=0), Shard(dim=0))"),
        ((2, 2), ("copies", "tensor"), None, "copies", "(Replicate(), Shard(dim=0))"),
        ((2, 2), ("copies", "shard"), "shard", "copies", "(Replicate(), Shard(dim=0))"),
        ((2, 2), ("a", "b"), ("a", "b"), None, "(Shard(dim=0),)"),
    ],
    ids=["strided", "data inside", "copies", "hybrid", "two names"],
)
@pytest.mark.few(1)
def test_a_mesh_of_all_axes(
    ranks: Ranks,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    shard: Any,
    replicate: Any,
    placed: str,
) -> None:
    ranks(4, body_mesh_of_all_axes, shape, names, shard, replicate, placed)


def body_meshes_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tensor"))
    dims = DataParallelMeshDims(shard="shard")

    def refused(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
        with pytest.raises(kind, match=text):
            call()

    text = "At least one of shard or replicate must be set"
    refused(ValueError, text, DataParallelMeshDims)
    call = lambda: fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=dims)  # noqa: E731
    refused(ValueError, "all parameters must be DTensors on the full mesh", call)
    bare = init_device_mesh("cpu", (2, 1))
    call = lambda: fully_shard(nn.Linear(2, 2), mesh=bare, dp_mesh_dims=dims)  # noqa: E731
    refused(ValueError, "mesh must have mesh_dim_names when dp_mesh_dims is provided", call)
    wrong = DataParallelMeshDims(shard="data")
    call = lambda: fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=wrong)  # noqa: E731
    refused(ValueError, "Mesh dim name 'data' not found in mesh.mesh_dim_names", call)
    cut = nn.Linear(2, 2, bias=False)
    cut.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Shard(0), Replicate()]))
    call = lambda: fully_shard(cut, mesh=mesh, dp_mesh_dims=dims)  # noqa: E731
    refused(ValueError, r"Expected Replicate\(\) on data dim 'shard' \(index 0\)", call)
    for result in ("dim 0", ShardPlacementResult(Shard(0), "a mesh")):
        call = lambda r=result: fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda _: r)  # noqa: E731
        refused(ValueError, "Invalid shard_placement_fn result", call)


def test_meshes_that_are_refused(ranks: Ranks) -> None:
    ranks(2, body_meshes_refused)


# -------------------------------------------------------------------- padding


def body_padding() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2**18, 5, bias=False))
    with pytest.warns(UserWarning, match=r"adds 20% padding.*shard_placement_fn"):
        fully_shard(model)
    assert fully_shard.state(model).padding == pytest.approx(0.2)
    assert fully_shard.state(fully_shard(nn.Linear(2, 2))).padding == 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fully_shard(nn.Linear(2**18, 5, bias=False), shard_placement_fn=lambda _: Shard(1))
        fully_shard(nn.Linear(2**17, 41, bias=False))


def test_padding_is_reported_when_a_unit_is_built(ranks: Ranks) -> None:
    ranks(2, body_padding)


def test_the_own_mesh_is_that_of_users(ranks: Ranks) -> None:
    def body() -> None:
        model: Any = fully_shard(nn.Linear(4, 6).double())
        mesh = init_device_mesh("cpu", (communicator().size,))
        ones = distribute_tensor(torch.ones(6, 4).double(), mesh, [Shard(0)])
        torch.testing.assert_close(whole(model.weight * ones), whole(model.weight))

    ranks(2, body)
