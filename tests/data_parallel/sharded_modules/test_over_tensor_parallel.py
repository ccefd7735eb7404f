"""`fully_shard` over modules that tensor parallelism has cut."""

from __future__ import annotations

import copy
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

from meshwright.comm import Recorder, held_boxes, observe
from meshwright.data_parallel import MixedPrecisionPolicy, flat_groups, fully_shard
from meshwright.errors import LayoutError
from meshwright.gradients import clip_grad_norm_
from meshwright.mesh import DeviceMesh, init_device_mesh
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from meshwright.testing import Ranks
from support.data_parallel import tensor_parallel_samples as samples

STRIDED = "(_StridedShard(dim=0, sf=2), Shard(dim=0))"


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def torchs_clip(model: nn.Module) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def place(mesh: DeviceMesh) -> tuple[int, int]:
    names = mesh.mesh_dim_names[:-1]
    index, count = 0, 1
    for name in names:
        index = index * mesh[name].size() + mesh.get_local_rank(name)
        count *= mesh[name].size()
    return index, count


def even(width: int = 8) -> nn.Module:
    """Two cuts of dim 0 divide every parameter: words, too."""
    torch.manual_seed(0)
    model = samples.Net(width).double()
    model.words = nn.Embedding(12, width).double()
    model.head = nn.Linear(width, 12, bias=False).double()
    model.head.weight = model.words.weight
    return model


# ------------------------------------------------------------------------------- training


def body_training(steps: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    for sequence, optimizer, options in [
        (True, sgd, {"reshard_after_forward": False}),
        (False, partial(torch.optim.AdamW, lr=0.01, foreach=True), {}),
    ]:
        one = even()
        model = samples.cut(one, mesh["tensor"], sequence=sequence)
        names = [name for name, _ in model.named_parameters()]
        sharded(model, mesh["shard"], **options)
        clip = partial(clip_grad_norm_, max_norm=0.5) if sequence else torchs_clip
        samples.train(model, one, optimizer, place(mesh), steps=steps, clip=clip)
        assert [name for name, _ in model.named_parameters()] == names
        assert str(model.words.weight.placements) == STRIDED
        # Also what no style has named, so that torch's functions of lists take them all.
        assert {parameter.device_mesh for parameter in model.parameters()} == {mesh}
        assert model.idle.weight.grad is None


@pytest.mark.parametrize("steps", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_sharded_cut_modules_train_as_one_process(ranks: Ranks, steps: int) -> None:
    ranks(4, body_training, steps)


# ----------------------------------------------------------------------- what a step does


def body_steps() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    index, count = place(mesh)
    one = samples.net()
    one.blocks[0].up.weight.requires_grad_(False)
    model = sharded(samples.cut(one, mesh["tensor"]), mesh["shard"])
    # 11 words: two cuts of dim 0 would not be even, so the other dim is cut.
    assert str(model.words.weight.placements) == "(Shard(dim=1), Shard(dim=0))"
    seen: list[type] = []
    model.blocks[0].up.register_forward_hook(lambda m, *_: seen.append(type(m.weight)))

    def backward(step: int) -> None:
        given = samples.batch(step)
        samples.loss_of(model, *samples.share(given, index, count)).backward()
        samples.loss_of(one, *given).backward()

    model.set_requires_gradient_sync(False)
    backward(0)
    model.set_requires_gradient_sync(True)
    for step in (1, 2):
        backward(step)
        samples.same(model, one)
    assert seen == [DTensor] * 3

    recorder, operators = Recorder(), samples.CountDTensorOperators()
    for part in (model, one):
        part.zero_grad()
    given = samples.share(samples.batch(3), index, count)
    with observe(recorder), operators:
        samples.loss_of(model, *given).backward()
    assert operators.found == []
    assert {c.axis for c in recorder.collectives} == {"shard", "tensor"}
    # The first block has two groups, one of them frozen, in one launch; the root stays gathered.
    asked = {"unshard FSDPNet": 1, "unshard blocks.0": 2, "unshard blocks.1": 2}
    asked |= {f"reduce {name}": 1 for name in ("FSDPNet", "blocks.0", "blocks.1")}
    sent = Counter(c.label for c in recorder.collectives if c.axis == "shard")
    assert {k: n for k, n in sent.items() if k not in ("order", "use counts")} == asked
    assert [c.label for c in recorder.collectives if c.label == "partial gradients"] == [
        "partial gradients"
    ]
    samples.loss_of(one, *samples.batch(3)).backward()
    samples.same(model, one)

    # The norm of flat shards: of one kind, and of several, which one line cannot say.
    with pytest.raises(LayoutError, match="holds some that tensor parallelism has cut"):
        clip_grad_norm_(flat_groups(model), 0.5)
    layer = fully_shard(nn.Linear(4, 3).double(), mesh=mesh["shard"])
    flats = flat_groups(layer)
    layer(torch.full((2, 4), index + 1.0, dtype=torch.float64)).square().sum().backward()
    norm = clip_grad_norm_(layer, math.inf)
    torch.testing.assert_close(clip_grad_norm_(flats, math.inf), norm, rtol=1e-12, atol=1e-12)

    # In another dtype; the sum of partial gradients too.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
    one = samples.net()
    model = sharded(samples.cut(one, mesh["tensor"]), mesh["shard"], mp_policy=policy)
    samples.train(model, one, sgd, place(mesh), steps=2, tolerance=0.1)

    layer = parallelize_module(nn.Linear(5, 4, bias=False), mesh["tensor"], ColwiseParallel())
    with pytest.raises(NotImplementedError, match=r"uneven sharding on dim 1: 'weight' of shape"):
        fully_shard(layer, mesh=mesh["shard"], shard_placement_fn=lambda _: Shard(1))
    with pytest.raises(ValueError, match="in common with the data axis .shard.: a mean"):
        fully_shard(parallelize_module(nn.Linear(4, 4), mesh["tensor"], ColwiseParallel()))


@pytest.mark.slow
def test_accumulation_precision_and_what_travels(ranks: Ranks) -> None:
    ranks(4, body_steps)


def body_uneven(folder: Path) -> None:
    """No dim of the first layer divides: 9 rows over two tensor ranks, 5 and 4 over two more."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(copy.deepcopy(one), mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["shard"])
    assert str(model[0].weight.placements) == STRIDED
    pairs = [(model, adamw(model.parameters())), (one, adamw(one.parameters()))]
    (_, ours), (_, theirs) = pairs
    rows = torch.randn(4, 3, dtype=torch.float64)
    for _ in range(3):
        model(rows.chunk(2)[mesh.get_local_rank("shard")]).square().mean().backward()
        one(rows).square().mean().backward()
        samples.same(model, one)
        for clip in (torchs_clip, partial(clip_grad_norm_, max_norm=0.5)):
            norm = nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            torch.testing.assert_close(samples.whole(clip(model)), norm, rtol=1e-9, atol=1e-9)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        samples.same(model, one)
    for name, value in model.state_dict().items():
        whole = value.full_tensor()
        for box, held in held_boxes(value):
            assert torch.equal(whole[box.slices()], held), name
    dcp.save(model.state_dict(), checkpoint_id=folder)
    found = {name: torch.zeros_like(value) for name, value in one.state_dict().items()}
    dcp.load(found, checkpoint_id=folder)
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value.full_tensor()), name


def test_rows_that_neither_axis_divides(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, body_uneven, tmp_path)


# --------------------------------------------------------------------------- other layouts


def body_hybrid(shape: tuple[int, int, int]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tensor"))
    one = samples.net()
    model = samples.cut(one, mesh["tensor"], sequence=False)
    for tied in (model.words, model.head):  # the root takes what both use
        fully_shard(tied, mesh=mesh["replicate", "shard"])
    sharded(model, mesh["replicate", "shard"])
    recorder = Recorder()
    with observe(recorder):
        samples.train(model, one, adamw, place(mesh), steps=3, clip=torchs_clip)
    axes = {c.axis for c in recorder.collectives}
    assert axes == {"replicate", "shard", "tensor"}
    for collective in recorder.collectives:
        if collective.label.startswith(("reduce", "unshard")):
            assert collective.axis == "shard", collective


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)])
def test_hybrid(ranks: Ranks, shape: tuple[int, int, int]) -> None:
    ranks(4, body_hybrid, shape)


@pytest.mark.slow
def test_three_axes_of_two_ranks(ranks: Ranks) -> None:
    ranks(8, body_hybrid, (2, 2, 2))


# --------------------------------------------------------------------------------- saved


def laid_out(shape: tuple[int, int]) -> tuple[nn.Module, nn.Module, DeviceMesh]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("shard", "tensor"))
    one = even()
    one.idle.requires_grad_(False)  # torch's functions make state for all others
    model = samples.cut(one, mesh["tensor"])
    return (sharded(model, mesh["shard"]) if shape[0] > 1 else model), one, mesh


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def step_both(
    pairs: list[tuple[nn.Module, torch.optim.Optimizer]], at: tuple[int, int], step: int
) -> None:
    (model, ours), (one, theirs) = pairs
    given = samples.batch(step)
    samples.loss_of(model, *samples.share(given, *at)).backward()
    samples.loss_of(one, *given).backward()
    for optimizer in (ours, theirs):
        optimizer.step()
        optimizer.zero_grad()
    samples.same(model, one)


def body_save(folder: Path) -> None:
    model, one, mesh = laid_out((2, 2))
    pairs = [(model, adamw(model.parameters())), (one, adamw(one.parameters()))]
    for step in range(2):
        step_both(pairs, place(mesh), step)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, expected in one.state_dict().items():
        torch.testing.assert_close(whole[name], expected, rtol=1e-9, atol=1e-9)
    dcp.save(state_of(*pairs[0]), checkpoint_id=folder)


def body_load(folder: Path, shape: tuple[int, int]) -> None:
    model, one, mesh = laid_out(shape)
    pairs = [(model, adamw(model.parameters())), (one, adamw(one.parameters()))]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = state_of(*pairs[0])
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, pairs[0][1], state["optimizer"])
    for step in range(2):
        given = samples.batch(step)
        samples.loss_of(one, *given).backward()
        pairs[1][1].step()
        pairs[1][1].zero_grad()
    samples.same(model, one)
    step_both(pairs, place(mesh), 2)


@pytest.mark.slow
def test_a_checkpoint_of_both_axes_goes_on_at_other_layouts(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, body_save, tmp_path)
    ranks(4, body_load, tmp_path, (1, 4))
    ranks(4, body_load, tmp_path, (4, 1))
    ranks(2, body_load, tmp_path, (1, 2))
