"""Sharded tensors through torch's distributed checkpoint, at other numbers of ranks and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor

from meshwright import comm
from meshwright.comm import Recorder, observe
from meshwright.data_parallel import fully_shard
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.internals.comm import ShardView
from support.internals.layout import FlatLayout
from support.values import assert_close, is_equal

SHAPES: dict[str, tuple[int, ...]] = {
    "first.weight": (7, 5),
    "first.bias": (7,),
    "conv.weight": (3, 2, 2, 2),
    "norm.scale": (1,),
    "empty": (0, 4),
    "last.weight": (2, 11),
}
Tensors = dict[str, torch.Tensor]


def whole(factor: float = 1.0) -> Tensors:
    """The whole tensors, numbered through."""
    found: Tensors = {}
    at = 0
    for name, shape in SHAPES.items():
        numel = math.prod(shape)
        found[name] = factor * torch.arange(at, at + numel, dtype=torch.float32).view(shape)
        at += numel
    return found


def views(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """This rank's flat shard of all tensors, as views of one line."""
    world = comm.communicator()
    layout = FlatLayout.pack(list(SHAPES), list(SHAPES.values()), "float32", world.size)
    line = torch.zeros(layout.padded_size)
    for index, tensor in enumerate(tensors.values()):
        start, stop = layout.range(index)
        line[start:stop] = tensor.flatten()
    first, last = layout.shard_range(world.rank)
    shard = line[first:last].clone()
    pieces = {piece.index: piece for piece in layout.owned(world.rank)}
    found: Tensors = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        piece = pieces.get(index)
        start, local = 0, shard[:0]
        if piece is not None:
            start, local = piece.start, shard[piece.offset : piece.offset + piece.numel]
        found[name] = ShardView(local, start, shape, name=name, communicator=world)
    return found


class Counted:
    """Counts calls of torch's collectives on tensors, made by anybody."""

    NAMES = (
        "all_reduce",
        "all_gather_into_tensor",
        "all_gather_single",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
        "all_to_all_single",
        "broadcast",
    )

    def __enter__(self) -> list[str]:
        self.calls: list[str] = []
        self.kept = {name: getattr(dist, name) for name in self.NAMES if hasattr(dist, name)}
        for name, function in self.kept.items():
            setattr(dist, name, self._counting(name, function))
        return self.calls

    def __exit__(self, *_: object) -> None:
        for name, function in self.kept.items():
            setattr(dist, name, function)

    def _counting(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            self.calls.append(name)
            return function(*args, **kwargs)

        return call


def save_without_collectives(state: dict[str, Any], folder: Path) -> None:
    """Save; no collective of ours and none of torch's on tensors may be made."""
    recorder = Recorder()
    with observe(recorder), Counted() as calls:
        dcp.save(state, checkpoint_id=folder)
    assert recorder.collectives == []
    assert calls == []


def save_views(folder: Path) -> None:
    save_without_collectives({"model": views(whole()), "optimizer": views(whole(0.5))}, folder)


def load_views(folder: Path) -> None:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in whole().items()}
    state = {"model": views(zeros), "optimizer": views(zeros)}
    recorder = Recorder()
    with observe(recorder):
        dcp.load(state, checkpoint_id=folder)
    assert recorder.collectives == []
    for part, factor in (("model", 1.0), ("optimizer", 0.5)):
        for name, expected in whole(factor).items():
            found = state[part][name]
            assert isinstance(found, ShardView)
            assert is_equal(found.full_tensor(), expected)


def load_plain(folder: Path) -> None:
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in whole().items()}}
    dcp.load(state, checkpoint_id=folder)
    for name, expected in whole().items():
        assert is_equal(state["model"][name], expected)


def stock_dtensors(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The parameters of a module under torch's own `fully_shard`."""
    module = nn.ParameterDict(
        {name.replace(".", "_"): t for name, t in tensors.items() if t.numel()}
    )
    holder = nn.Linear(1, 1, bias=False)
    holder.register_module("dict", module)
    stock_fully_shard(holder, mesh=init_device_mesh("cpu", (comm.communicator().size,)))
    return {
        name: module[name.replace(".", "_")].detach() for name, t in tensors.items() if t.numel()
    }


def load_stock(folder: Path) -> None:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in whole().items()}
    state = {"model": stock_dtensors(zeros)}
    dcp.load(state, checkpoint_id=folder)
    for name, found in state["model"].items():
        assert isinstance(found, DTensor)
        assert is_equal(found.full_tensor(), whole()[name])


def save_stock(folder: Path) -> None:
    dcp.save({"model": stock_dtensors(whole())}, checkpoint_id=folder)


def load_from_stock(folder: Path) -> None:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in whole().items()}
    state = {"model": {n: v for n, v in views(zeros).items() if v.numel()}}
    dcp.load(state, checkpoint_id=folder)
    for name, found in state["model"].items():
        assert isinstance(found, ShardView)
        assert is_equal(found.full_tensor(), whole()[name])


@pytest.mark.slow
def test_views_saved_by_two_ranks_are_loaded_by_others(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_views, tmp_path)
    for size in (1, 2, 3, 4):
        ranks(size, load_views, tmp_path)
    ranks(3, load_plain, tmp_path)
    for size in (3, 4):
        ranks(size, load_stock, tmp_path)


def test_views_are_loaded_from_torchs_own_shards(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_stock, tmp_path)
    for size in (3, 4):
        ranks(size, load_from_stock, tmp_path)


def test_views_saved_by_four_ranks_are_loaded_by_two(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, save_views, tmp_path)
    ranks(2, load_views, tmp_path)
    ranks(2, load_stock, tmp_path)


# ------------------------------------------------------- trained models, through torch's functions

STEPS = 2

Shard = Callable[..., object]


def plain_model() -> nn.Sequential:
    """Rows that do not divide by 2, 3 or 4, and fewer rows than ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def applied(model: nn.Sequential, shard: Shard) -> nn.Sequential:
    """``model`` under one of the two `fully_shard`."""
    mesh = init_device_mesh("cpu", (comm.communicator().size,))
    for module in (model[0], model[2], model):
        shard(module, mesh=mesh)
    return model


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    """Steps ``first`` and later, on the same batch on every rank."""
    for step in range(first, first + steps):
        batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).double()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def reference(steps: int) -> dict[str, torch.Tensor]:
    """The weights of one process after ``steps``."""
    model = plain_model()
    trained(model, adam(model), 0, steps)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def same_weights(model: nn.Module, steps: int) -> None:
    state = get_model_state_dict(model)
    for name, expected in reference(steps).items():
        found = state[name]
        full = found.full_tensor() if isinstance(found, DTensor) else found
        assert_close(full, expected, rtol=0.0, atol=1e-12)


def save_trained(folder: Path, shard: Shard) -> None:
    model = applied(plain_model(), shard)
    optimizer = adam(model)
    trained(model, optimizer, 0, STEPS)
    recorder = Recorder()
    with observe(recorder), Counted() as calls:
        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
    assert recorder.collectives == []
    assert calls == []
    for tensor in state["model"].values():
        assert isinstance(tensor, DTensor)
    save_without_collectives(state, folder)


def load_and_train(folder: Path, shard: Shard | None) -> None:
    model = plain_model()
    if shard is not None:
        applied(model, shard)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = adam(model)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    same_weights(model, STEPS)
    trained(model, optimizer, STEPS, STEPS)
    same_weights(model, 2 * STEPS)


@pytest.mark.slow
@pytest.mark.devices("host", reason="torch's fully_shard asks more of streams than these have")
@pytest.mark.parametrize("size", [3, 4])
def test_a_trained_model_goes_on_at_another_size(ranks: Ranks, tmp_path: Path, size: int) -> None:
    ranks(2, save_trained, tmp_path, fully_shard)
    ranks(size, load_and_train, tmp_path, fully_shard)
    ranks(size, load_and_train, tmp_path, stock_fully_shard)
    ranks(2, load_and_train, tmp_path, None)


@pytest.mark.devices("host", reason="torch's fully_shard asks more of streams than these have")
@pytest.mark.parametrize("size", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_a_model_trained_under_torchs_own_goes_on_under_ours(
    ranks: Ranks, tmp_path: Path, size: int
) -> None:
    ranks(2, save_trained, tmp_path, stock_fully_shard)
    ranks(size, load_and_train, tmp_path, fully_shard)
