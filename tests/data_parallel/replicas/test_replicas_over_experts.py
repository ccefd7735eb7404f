"""`replicate` of modules that exchange samples: experts, beside dense layers."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwright import parallelize_module
from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import (
    DistributedDataParallel,
    ReductionSettings,
    ReplicateOptions,
    replicate,
)
from meshwright.data_parallel.comm_hooks import allreduce_hook
from meshwright.errors import CollectiveMismatchError, NonFiniteError
from meshwright.expert_parallel import ExpertParallel
from meshwright.expert_parallel import experts as mark_experts
from meshwright.gradients import clip_grad_norm_
from meshwright.mesh import DeviceMesh, init_device_mesh
from meshwright.testing import Ranks
from support.internals.data_parallel import replicate_with

WIDTH = 4
LAYOUTS = [
    pytest.param((1, 2), id="expert"),
    pytest.param((2, 2), id="replicate and expert", marks=pytest.mark.slow),
]


# ------------------------------------------------------------------------------- the models


class Experts(nn.Module):
    """A loop over the experts that have tokens."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, 6) / 2)
        self.down = nn.Parameter(torch.randn(count, 6, WIDTH) / 2)
        self.num_experts = count

    def forward(
        self, rows: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(rows)
        for index in range(self.num_experts):
            token, slot = (indices == index).nonzero(as_tuple=True)
            y = (rows[token] @ self.up[index]).tanh() @ self.down[index]
            out = out.index_add(0, token, y * weights[token, slot, None])
        return out


class Net(nn.Module):
    """Dense layers with experts between them, some of which a pass may leave out."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.router = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList([Experts(count) for _ in range(2)])
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 2)
        self.used = 2
        self.uses_spare = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for experts in self.experts[: self.used]:
            weights, indices = self.router(x).softmax(1).topk(min(2, experts.up.shape[0]))
            x = x + experts(x, indices, weights)
        if self.uses_spare:
            x = x + self.spare(x)
        return self.last(x)


def net(count: int = 4) -> Net:
    torch.manual_seed(0)
    return Net(count).double()


def meshes(layout: Sequence[int]) -> tuple[DeviceMesh, DeviceMesh]:
    """The mesh, and all its ranks, over which dense parameters are equal."""
    mesh = init_device_mesh("cpu", tuple(layout), mesh_dim_names=("replicate", "ep"))
    return mesh, mesh["replicate", "ep"]._flatten("dense")


def split(one: Net, mesh: DeviceMesh) -> Net:
    model = copy.deepcopy(one)
    for part in model.experts:
        mark_experts(part)
    return parallelize_module(model, mesh["ep"], {"experts.*": ExpertParallel()})


def state_of(model: nn.Module) -> Any:
    return getattr(replicate, "state")(model)  # noqa: B009


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    x, y = (torch.randn(8, width, generator=drawn) for width in (3, 2))
    return x.double(), y.double()


def share(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    world = communicator()
    return [tensor.chunk(world.size)[world.rank] for tensor in tensors]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean() * 10


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(model: nn.Module, one: nn.Module, tolerance: float = 1e-9) -> None:
    """Names, weights and gradients are those of one process."""
    mine = {name.removeprefix("_orig_mod."): each for name, each in model.named_parameters()}
    theirs = dict(one.named_parameters())
    assert [*mine] == [*theirs]
    for name, expected in theirs.items():
        found = mine[name]
        pairs = [(found.detach(), expected.detach())]
        assert (found.grad is None) is (expected.grad is None), name
        if found.grad is not None and expected.grad is not None:
            pairs.append((found.grad, expected.grad))
        for ours, other in pairs:
            torch.testing.assert_close(
                whole(ours),
                other,
                rtol=tolerance,
                atol=tolerance * 1e-4,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def torchs_clip(model: nn.Module) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5)


our_clip = partial(clip_grad_norm_, max_norm=0.5)


def train(
    model: Any,
    one: Any,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    *,
    steps: int = 3,
    clip: Callable[[nn.Module], torch.Tensor] | None = None,
    tolerance: float = 1e-9,
    set_to_none: bool = True,
) -> None:
    """Train both; gradients, norms and weights agree after each step."""
    optimizers = [optimizer(each.parameters()) for each in (model, one)]
    for step in range(steps):
        given = batch(step)
        loss_of(model, *share(given)).backward()
        loss_of(one, *given).backward()
        same(model, one, tolerance)
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            torch.testing.assert_close(whole(clip(model)), norm, rtol=1e-9, atol=0.0)
            same(model, one, tolerance)
        for each in optimizers:
            each.step()
            each.zero_grad(set_to_none=set_to_none)
    same(model, one, tolerance)


# --------------------------------------------------------------------------------- training


def body_training(layout: tuple[int, ...]) -> None:
    for optimizer, clip, options in [
        (sgd, torchs_clip, {}),
        (adamw, our_clip, {"gradient_as_bucket_view": True}),
        (adamw, None, {"static_graph": True, "bucket_cap_mb": 1e-6}),
        (sgd, our_clip, {"find_unused_parameters": True, "unused_gradient": "none"}),
    ]:
        mesh, dense = meshes(layout)
        one = net()
        model = replicate(split(one, mesh), device_mesh=dense, **options)
        train(model, one, optimizer, clip=clip)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_train_as_one_process(ranks: Ranks, layout: tuple[int, ...]) -> None:
    ranks(math.prod(layout), body_training, layout)


def body_large(layout: tuple[int, ...]) -> None:
    """Gradients in memory of their own; fewer experts than ranks, and more on some ranks."""
    for count in (4, 3, 1):
        mesh, dense = meshes(layout)
        one = net(count)
        options = ReplicateOptions(
            process_group=dense.get_group(), reduction=ReductionSettings(alone_bytes=256)
        )
        model = replicate_with(split(one, mesh), options)
        train(model, one, adamw, steps=2, clip=our_clip)
        alone = [each for each in state_of(model).reducer.layouts if each.is_alone]
        assert {slot.name.split(".")[0] for each in alone for slot in each.slots} <= {"experts"}
        assert bool(alone) is (count > 2)


@pytest.mark.devices("host", reason="devices reduce large gradients in one line with others")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_and_missing_experts(ranks: Ranks, layout: tuple[int, ...]) -> None:
    ranks(math.prod(layout), body_large, layout)


def body_sent(layout: tuple[int, ...]) -> None:
    """One order on all ranks: experts over those that hold the same, notes over all, last."""
    mesh, dense = meshes(layout)
    one = net()
    model = replicate(split(one, mesh), device_mesh=dense, bucket_cap_mb=1e-6)
    loss_of(model, *share(batch(0))).backward()
    recorder = Recorder()
    with observe(recorder):
        loss_of(model, *share(batch(1))).backward()
    sent = [(c.axis, c.shape) for c in recorder.collectives if c.label.startswith("reduce ")]
    layouts = state_of(model).reducer.layouts
    own = [each for each in layouts if each.slots and "experts" in each.slots[0].name]
    assert len(own) == 4
    assert layouts[-1].group == 0
    assert len([axis for axis, _ in sent if axis == "dense"]) == len(layouts) - len(own)
    assert len([axis for axis, _ in sent if axis == "replicate"]) == (len(own) * (layout[0] > 1))
    plan = [(each.label, each.group, [slot.name for slot in each.slots]) for each in layouts]
    assert len({str(row) for row in communicator().gather_values(plan, label="plans")}) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_sent_over_which_ranks(ranks: Ranks, layout: tuple[int, ...]) -> None:
    ranks(math.prod(layout), body_sent, layout)


# -------------------------------------------------------------------------------- the passes


def body_accumulated(layout: tuple[int, ...]) -> None:
    mesh, dense = meshes(layout)
    one = net()
    model: Any = replicate(split(one, mesh), device_mesh=dense)
    for is_reduced in (True, False, True):
        # Not zeroed: what was reduced before stays, and what was kept is reduced once.
        for step in range(3):
            model.set_requires_gradient_sync(is_reduced or step == 2)
            loss_of(model, *share(batch(step))).backward()
            loss_of(one, *batch(step)).backward()
        same(model, one)
    model.zero_grad()
    one.zero_grad()
    for step in range(2):
        with model.no_sync() if not step else contextlib.nullcontext():
            loss_of(model, *share(batch(step))).backward()
        loss_of(one, *batch(step)).backward()
    same(model, one)
    model.zero_grad()
    one.zero_grad()
    train(model, one, sgd, steps=2, set_to_none=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_that_add_up_over_passes(ranks: Ranks, layout: tuple[int, ...]) -> None:
    ranks(math.prod(layout), body_accumulated, layout)


def body_unused(layout: tuple[int, ...]) -> None:
    """The second experts are used by no rank, by all, and by those of the first replica."""
    mesh, dense = meshes(layout)
    one, replica = net(), mesh.get_local_rank("replicate")
    model = replicate(split(one, mesh), device_mesh=dense, find_unused_parameters=True)
    optimizers = [adamw(each.parameters()) for each in (model, one)]
    for step, used in enumerate([(1, 1), (2, 2), (2, 1), (1, 2)]):
        model.used = used[replica]
        model.uses_spare = step == 2 and communicator().rank == 1
        loss_of(model, *share(batch(step))).backward()
        rows = [list(each.chunk(layout[0])) for each in batch(step)]
        for index, (x, y) in enumerate(zip(*rows, strict=True)):
            one.used = used[index]
            spares = [step == 2 and index * layout[1] + n == 1 for n in range(layout[1])]
            parts = zip(spares, x.chunk(layout[1]), y.chunk(layout[1]), strict=True)
            for uses_spare, mine, target in parts:
                one.uses_spare = uses_spare
                (loss_of(one, mine, target) / math.prod(layout)).backward()
        same(model, one)
        for each in optimizers:
            each.step()
            each.zero_grad()
    same(model, one)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_that_some_ranks_do_not_use(ranks: Ranks, layout: tuple[int, ...]) -> None:
    ranks(math.prod(layout), body_unused, layout)


def body_compiled(layout: tuple[int, ...]) -> None:
    mesh, dense = meshes(layout)
    one = net()
    model = replicate(split(one, mesh), device_mesh=dense)
    train(torch.compile(model, backend="aot_eager"), one, sgd, steps=2)


@pytest.mark.slow
def test_compiled_replicas_reduce_experts_outside_of_the_graph(ranks: Ranks) -> None:
    ranks(2, body_compiled, (1, 2))


# -------------------------------------------------------------------------------- the checks


def body_starts(layout: tuple[int, ...]) -> None:
    """All get the first rank's dense parameters; experts those of the first that holds the same."""
    mesh, dense = meshes(layout)
    one = net()
    model = split(one, mesh)
    if mesh.get_local_rank("replicate") == layout[0] - 1 and layout[0] > 1:
        with torch.no_grad():
            for parameter in model.parameters():
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter).zero_()
    if communicator().rank == 1:
        model.last.weight.data.zero_()
    for experts in model.experts:
        experts.register_buffer("own", torch.tensor(float(mesh.get_local_rank("ep"))))
    replicate(model, device_mesh=dense)
    train(model, one, sgd, steps=1)
    assert all(each.own == mesh.get_local_rank("ep") for each in model.experts)

    # Given anew: the first rank's values for what all hold, the first holder's for experts.
    fresh = torch.full((4, WIDTH, 6), 0.5).double()
    with torch.no_grad():
        one.experts[0].up.copy_(fresh)
    value = fresh if communicator().rank < layout[1] else fresh * 0
    model.experts[0].up = nn.Parameter(distribute_tensor(value, mesh["ep"], [Shard(0)]))
    train(model, one, sgd, steps=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_the_first_values_come_from(ranks: Ranks, layout: tuple[int, ...]) -> None:
    ranks(math.prod(layout), body_starts, layout)


def body_parted(layout: tuple[int, ...]) -> None:
    """Copies of experts that have parted are found, and named."""
    mesh, dense = meshes(layout)
    for name, rank, sides in [
        ("experts.1.down", 3, "the same on ranks [1, 3]"),
        ("experts.0.up", 2, "the same on ranks [0, 2]"),
    ]:
        one = net()
        model = replicate(split(one, mesh), device_mesh=dense)
        optimizer = sgd(model.parameters())
        train(model, one, sgd, steps=3)
        if communicator().rank == rank:
            written = model.get_parameter(name)
            local = written.to_local() if isinstance(written, DTensor) else written
            local.data.view(-1)[0] += 1.0
        with pytest.raises(CollectiveMismatchError) as raised:  # noqa: PT012
            for step in range(6):
                loss_of(model, *share(batch(step))).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert name in str(raised.value)
        assert sides in str(raised.value)


@pytest.mark.slow
def test_copies_of_experts_that_part_are_named(ranks: Ranks) -> None:
    ranks(4, body_parted, (2, 2))


def body_stops(layout: tuple[int, ...]) -> None:
    mesh, dense = meshes(layout)
    model = replicate(split(net(), mesh), device_mesh=dense, stop_on_non_finite=True)
    train(model, net(), sgd, steps=1)
    last = communicator().size - 1
    if communicator().rank == last:
        with torch.no_grad():
            model.experts[1].down.to_local()[0, 0, 0] = math.inf
    with pytest.raises(NonFiniteError, match=r"the gradient of .* on ranks"):
        loss_of(model, *share(batch(0))).backward()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_that_are_not_finite_stop_all_ranks(
    ranks: Ranks, layout: tuple[int, ...]
) -> None:
    ranks(math.prod(layout), body_stops, layout)


def body_refused(layout: tuple[int, ...]) -> None:
    mesh, dense = meshes(layout)
    given = share(batch(0))
    with pytest.raises(ValueError, match="DistributedDataParallel: parameter 'experts.0.up'"):
        DistributedDataParallel(split(net(), mesh), device_mesh=dense)
    part = "module 'experts.0' exchanges samples over axis 'ep', ranks .*would be left out"
    with pytest.raises(ValueError, match=part):
        replicate(split(net(), mesh), device_mesh=mesh["replicate"])(given[0])
    model = split(net(), mesh)
    model.experts[1].down = nn.Parameter(torch.zeros(2, 6, WIDTH).double())
    plain = "parameter 'experts.1.down' belongs to a module .*: expected a DTensor"
    with pytest.raises(ValueError, match=plain):
        replicate(model, device_mesh=dense)(given[0])
    model = net()
    model.spare.weight = nn.Parameter(
        distribute_tensor(model.spare.weight.detach(), mesh["ep"], [Shard(0)])
    )
    with pytest.raises(ValueError, match="'spare.weight' is a DTensor placed .*would mix"):
        replicate(model, device_mesh=dense)(given[0])
    joined: Any = replicate(split(net(), mesh), device_mesh=dense)
    is_refused = pytest.raises(ValueError, match="join: the module of 'experts.0.up' exchanges")
    with is_refused, joined.join():
        raise AssertionError("the block was entered")
    hooked: Any = replicate(split(net(), mesh), device_mesh=dense)
    state_of(hooked).register_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match="'experts.0.up' is a parameter of experts, whose"):
        hooked(given[0])
    called = replicate(split(net(), mesh), device_mesh=dense)
    lent = {name: 0.5 * parameter for name, parameter in called.named_parameters()}
    with pytest.raises(RuntimeError, match="functional_call gives experts 'experts.0.up', a DT"):
        torch.func.functional_call(called, lent, (given[0],))
    torch.func.functional_call(called, dict(called.named_parameters()), (given[0],))


def test_what_is_refused(ranks: Ranks) -> None:
    ranks(2, body_refused, (1, 2))
