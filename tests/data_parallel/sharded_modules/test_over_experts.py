"""`fully_shard` of modules that exchange samples: experts, beside dense layers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.comm import Recorder, communicator, held_boxes, observe
from meshwright.data_parallel import MixedPrecisionPolicy, ShardPlacementResult, fully_shard
from meshwright.data_parallel.comm_hooks import allreduce_hook
from meshwright.errors import CollectiveMismatchError, NonFiniteError
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.gradients import clip_grad_norm_
from meshwright.mesh import DeviceMesh, init_device_mesh
from meshwright.testing import Ranks
from support.data_parallel import exchanging_samples as samples

LAYOUTS = [
    pytest.param((1, 2), id="expert"),
    pytest.param((2, 2), id="shard and expert", marks=pytest.mark.slow),
    pytest.param((2, 1, 2), id="replicate and expert", marks=pytest.mark.slow),
]
ALONE = [
    pytest.param((2, 1), id="expert 1", marks=pytest.mark.slow),
    pytest.param((1, 1, 2), id="replicate 1", marks=pytest.mark.slow),
    pytest.param((2, 1, 1), id="replicate alone", marks=pytest.mark.slow),
]
"""With axes of one rank."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def torchs_clip(model: nn.Module) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5)


our_clip = partial(clip_grad_norm_, max_norm=0.5)


def sharded(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def on(layout: tuple[int, ...], test: Callable[[tuple[int, ...]], None], ranks: Ranks) -> None:
    ranks(math.prod(layout), test, layout)


# ------------------------------------------------------------------------ one divisor for all


def body_own_mesh_of_experts(layout: tuple[int, ...]) -> None:
    """Experts on a mesh of their own, by ``shard_placement_fn`` alone."""
    one = samples.net()
    mesh, ep, data = samples.meshes(layout)
    model = samples.spread(one, ep)
    own = {p for block in model.blocks for p in block.experts.parameters()}
    result = ShardPlacementResult(Shard(0), mesh["shard"])

    def choose(parameter: nn.Parameter) -> Any:
        return result if parameter in own else None

    sharded(model, data, shard_placement_fn=choose)
    samples.train(model, one, adamw, clip=our_clip)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_experts_on_a_mesh_of_their_own_have_the_divisor_of_all(
    ranks: Ranks, layout: tuple[int, ...]
) -> None:
    on(layout, body_own_mesh_of_experts, ranks)


def body_training(layout: tuple[int, ...]) -> None:
    one = samples.net()
    mesh, ep, data = samples.meshes(layout)
    model = sharded(samples.spread(one, ep), data)
    names = [name for name, _ in one.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    experts, dense = model.blocks[0].experts.up, model.blocks[0].dense.weight
    unit = fully_shard.state(model.blocks[0]).unit
    (own,) = (group.axes for group in unit.groups if group.axes.exchange is not None)
    assert (own.size, own.exchange.ranks) == (communicator().size, tuple(ep.mesh.tolist()))
    if mesh["shard"].size() > 1:
        assert experts.device_mesh.mesh_dim_names == ("shard", "ep")
        first = "_StridedShard(dim=0, sf=2)" if ep.size() > 1 else "Shard(dim=0)"
        assert str(experts.placements) == f"({first}, Shard(dim=0))"
    else:  # nothing is left to shard experts over
        assert own.shard is None
        assert experts.device_mesh.mesh_dim_names == tuple(
            name for name in mesh.mesh_dim_names if name != "shard"
        )
        assert experts.placements[-1] == Shard(0)
    assert dense.device_mesh == data

    recorder = Recorder()
    with observe(recorder):
        samples.train(model, one, sgd, steps=1, clip=torchs_clip)
    asked = Counter((c.label, c.axis) for c in recorder.collectives)
    found = {at: n for at, n in asked.items() if at[0].endswith(" blocks.0")}
    expected = {}
    if mesh["shard", "ep"].size() > 1:
        expected |= {("unshard blocks.0", "dense"): 2, ("reduce blocks.0", "dense"): 1}
    if own.shard is not None and ep.size() > 1:  # else both lie over one group, in one launch
        expected |= {("unshard blocks.0", "shard"): 2, ("reduce blocks.0", "shard"): 1}
    if own.replicate is not None:
        expected |= {("replicate blocks.0", "replicate"): 1, ("reduce blocks.0", "replicate"): 1}
    assert found == expected

    samples.train(model, one, adamw, clip=our_clip)
    norms = []
    for each, given in ((model, samples.share(samples.batch(9))), (one, samples.batch(9))):
        samples.loss_of(each, *given).backward()
        norms.append(clip_grad_norm_(each, 0.1, norm_type=math.inf))
    torch.testing.assert_close(*norms, rtol=1e-9, atol=1e-12)
    samples.same(model, one)


@pytest.mark.parametrize("layout", LAYOUTS + ALONE)
def test_experts_beside_dense_layers_train_as_one_process(
    ranks: Ranks, layout: tuple[int, ...]
) -> None:
    on(layout, body_training, ranks)


# ----------------------------------------------------------------------------- other passes


def accumulate(model: Any, one: nn.Module) -> None:
    """Two passes before a reduction, twice: by each of the two ways to ask for that."""
    optimizers = [sgd(each.parameters()) for each in (model, one)]
    for step in range(0, 4, 2):
        if step:
            with model.no_sync():
                samples.loss_of(model, *samples.share(samples.batch(step))).backward()
        else:
            model.set_requires_gradient_sync(False)
            samples.loss_of(model, *samples.share(samples.batch(step))).backward()
            model.set_requires_gradient_sync(True)
        samples.loss_of(one, *samples.batch(step)).backward()
        samples.loss_of(model, *samples.share(samples.batch(step + 1))).backward()
        samples.loss_of(one, *samples.batch(step + 1)).backward()
        samples.same(model, one)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    samples.same(model, one)


def body_recomputed(layout: tuple[int, ...]) -> None:
    """Recomputed: samples travel a third time. Experts are units of their own."""
    _, ep, data = samples.meshes(layout)
    one = samples.net(recomputes=True)
    model = samples.spread(one, ep)
    for block in model.blocks:
        fully_shard(block.experts, mesh=data)
    samples.train(sharded(model, data), one, adamw, steps=2, clip=our_clip)


def body_accumulated(layout: tuple[int, ...]) -> None:
    """Three experts: two and one on a rank. The root is one unit, kept whole for the backward."""
    _, ep, data = samples.meshes(layout)
    one = samples.net(3)
    model = fully_shard(samples.spread(one, ep), mesh=data, reshard_after_forward=False)
    accumulate(model, one)
    samples.train(model, one, adamw, steps=2, clip=torchs_clip)


def body_options(layout: tuple[int, ...]) -> None:
    _, ep, data = samples.meshes(layout)
    one = samples.net()
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    model = sharded(samples.spread(one, ep), data, mp_policy=policy)
    samples.train(model, one, sgd, steps=2, tolerance=1e-4)

    # A divisor of the user's holds for all gradients of a unit; frozen experts, and dense ones.
    one = samples.net()
    one.blocks[1].experts.bias.requires_grad_(False)
    one.blocks[1].dense.weight.requires_grad_(False)
    model = sharded(samples.spread(one, ep), data)
    model.blocks[0].set_gradient_divide_factor(1.0)
    samples.loss_of(model, *samples.share(samples.batch(0))).backward()
    samples.loss_of(one, *samples.batch(0)).backward()
    for parameter in one.blocks[0].parameters():
        parameter.grad *= communicator().size
    samples.same(model, one)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputed_experts(ranks: Ranks, layout: tuple[int, ...]) -> None:
    on(layout, body_recomputed, ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_with_more_and_fewer_experts_accumulate(
    ranks: Ranks, layout: tuple[int, ...]
) -> None:
    on(layout, body_accumulated, ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_dtypes_frozen_experts_and_a_divisor_of_the_users(
    ranks: Ranks, layout: tuple[int, ...]
) -> None:
    on(layout, body_options, ranks)


# ------------------------------------------------------------------- experts alone, and checks


def body_alone(layout: tuple[int, ...]) -> None:
    """Experts are the root: no other axis says which ranks compute together."""
    _, ep, data = samples.meshes(layout)
    torch.manual_seed(0)
    one = samples.Experts(4).double()
    model = samples.Experts(4).double()
    model.load_state_dict(one.state_dict())
    model.exchange(ep)
    fully_shard(model, mesh=data)
    optimizers = [adamw(each.parameters()) for each in (model, one)]
    drawn = torch.Generator().manual_seed(0)

    def backward() -> None:
        rows = torch.randn(8, samples.WIDTH, generator=drawn).double()
        weights, chosen = rows.softmax(1).topk(2)
        model(*samples.share((rows, chosen, weights))).square().mean().backward()
        one(rows, chosen, weights).square().mean().backward()
        samples.same(model, one)

    for _ in range(3):
        backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    backward()
    if communicator().rank == 0:
        optimizers[0].step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    rows = torch.ones(2, samples.WIDTH, dtype=torch.float64)
    with pytest.raises(CollectiveMismatchError, match="Optimizer steps differ across ranks"):
        model(rows, torch.zeros(2, 1, dtype=torch.long), rows[:, :1]).sum().backward()


@pytest.mark.devices("host", reason="a device compares steps a pass later")
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_experts_alone_are_a_root_whose_passes_are_compared(
    ranks: Ranks, layout: tuple[int, ...]
) -> None:
    on(layout, body_alone, ranks)


def body_stops(layout: tuple[int, ...]) -> None:
    """Not finite in the experts of one rank: all ranks stop, and the next pass is right."""
    _, ep, data = samples.meshes(layout)
    rank, last = communicator().rank, communicator().size - 1
    given = samples.share(samples.batch(0))
    one = samples.net()
    model = sharded(samples.spread(one, ep), data, stop_on_non_finite=True)
    samples.train(model, one, sgd, steps=1)
    experts = model.blocks[1].experts
    experts.on_gradient = (lambda gradient: gradient * math.nan) if rank == last else None
    named = rf"the gradient of 'blocks.1.experts.up' on ranks .{last}."
    with pytest.raises(NonFiniteError, match=named):
        samples.loss_of(model, *given).backward()
    experts.on_gradient = None
    model.zero_grad()
    samples.train(model, one, sgd, steps=1)


def body_starts(layout: tuple[int, ...]) -> None:
    """Dense parameters start alike on all ranks, experts on those that hold the same."""
    _, ep, data = samples.meshes(layout)
    rank, last = communicator().rank, communicator().size - 1
    given = samples.share(samples.batch(0))
    for spoiled in ("last.weight", "blocks.0.experts.down"):
        model = samples.spread(samples.net(), ep)
        for block in model.blocks:
            block.experts.register_buffer("own", torch.tensor(ep.get_local_rank()))
        if rank == last:
            with torch.no_grad():
                model.get_parameter(spoiled).add_(1.0)
        sharded(model, data)
        if spoiled == "last.weight" or communicator().size > 2:
            with pytest.raises(CollectiveMismatchError, match=f"'{spoiled}' to have the same"):
                samples.loss_of(model, *given).backward()
        else:
            samples.loss_of(model, *given).backward()

    # Or they are given what the first rank has, and experts what the first of theirs has.
    one = samples.net()
    model = samples.spread(one, ep)
    for block in model.blocks:
        block.experts.register_buffer("own", torch.tensor(ep.get_local_rank()), persistent=False)
    if rank == last:
        with torch.no_grad():
            model.last.weight.zero_()
    sharded(model, data, sync_module_states=True)
    assert model.blocks[0].experts.own == ep.get_local_rank()
    samples.train(model, one, adamw, steps=1)


def body_saved(layout: tuple[int, ...], folder: Path) -> None:
    """Saved, and loaded where nothing is split: names and boxes are the model's own."""
    _, ep, data = samples.meshes(layout)
    given = samples.share(samples.batch(0))
    one = samples.net()
    model = sharded(samples.spread(one, ep), data)
    optimizer = adamw(model.parameters())
    samples.loss_of(model, *given).backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        full = value.full_tensor()
        for box, held in held_boxes(value):
            assert torch.equal(full[box.slices()], held), name
    state = get_model_state_dict(model)
    moments = get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder)
    found = {name: torch.zeros_like(value) for name, value in one.state_dict().items()}
    dcp.load({"model": found}, checkpoint_id=folder)
    for name, value in state.items():
        assert torch.equal(found[name], value.full_tensor()), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_stop_at_gradients_of_experts_that_are_not_finite(
    ranks: Ranks, layout: tuple[int, ...]
) -> None:
    on(layout, body_stops, ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_starting_values_are_compared_where_they_are_alike(
    ranks: Ranks, layout: tuple[int, ...]
) -> None:
    on(layout, body_starts, ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_hold_experts_whole(
    ranks: Ranks, layout: tuple[int, ...], tmp_path: Path
) -> None:
    ranks(math.prod(layout), body_saved, layout, tmp_path)


# --------------------------------------------------------------------------------- refusals


def body_refused() -> None:
    mesh, ep, data = samples.meshes((1, 2))

    def built() -> Any:
        return samples.spread(samples.net(), ep)

    def refused(text: str, call: Callable[[], object], kind: type[Exception] = ValueError) -> None:
        with pytest.raises(kind, match=text):
            call()

    model, crossed = built(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "shard"))
    refused("the replicate dim of the mesh is 'ep', whose", lambda: sharded(model, crossed))
    crossed = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shard"))
    text = "'experts' exchanges samples over axis 'ep', which is in the replicate dim 'copies'"
    refused(text, lambda: sharded(built(), crossed))
    text = r"'experts' exchanges .* axis 'ep', ranks \[0, 1\], and .* over ranks \[.\]: gradients"
    refused(text, lambda: sharded(built(), mesh["shard"]))
    model = built()
    fully_shard(model.first, mesh=mesh["shard"])
    refused(r"'blocks.1.experts' exchanges .* over ranks \[.\]", lambda: fully_shard(model))

    model = built()
    model.blocks[0].experts.scale = nn.Parameter(torch.ones(4, 2))
    refused("'experts.scale' belongs to .* found a plain tensor", lambda: sharded(model, data))
    other = distribute_tensor(torch.ones(4, 2), ep, [Shard(1)])
    model.blocks[0].experts.scale = nn.Parameter(other)
    refused(r"'experts.scale' .* expected .* \(Shard\(0\),\)", lambda: sharded(model, data))
    model = built()
    model.blocks[0].own = nn.Module()
    model.blocks[0].own.weight = model.blocks[0].experts.up
    refused("'experts.up' is tied, and some of the modules", lambda: sharded(model, data))
    model = built()
    fully_shard(model.blocks[0], mesh=data)
    model.tied = nn.Module()
    model.tied.weight = model.blocks[0].experts.up
    refused("'tied.weight' is tied, and some", lambda: fully_shard(model, mesh=data))

    model = sharded(built(), data)
    refused("a parameter of experts", lambda: model.register_comm_hook(None, allreduce_hook))
    samples.loss_of(model, *samples.share(samples.batch(0))).backward()

    def join() -> None:
        with model.join():
            pass

    refused("join: the module of 'blocks.0.experts..*' exchanges samples over axis 'ep'", join)
    text = "FullyShardedDataParallel: module 'blocks.0.experts' exchanges samples"
    refused(text, lambda: FullyShardedDataParallel(built()))


def test_what_is_refused(ranks: Ranks) -> None:
    ranks(2, body_refused)


def body_blocks_refused() -> None:
    _, ep, data = samples.meshes((2, 2))
    with pytest.raises(ValueError, match=r"reshard_after_forward=2 .* is in a unit with experts"):
        sharded(samples.spread(samples.net(), ep), data, reshard_after_forward=2)


@pytest.mark.slow
def test_blocks_of_ranks_with_other_experts_are_refused(ranks: Ranks) -> None:
    ranks(4, body_blocks_refused)
