"""Programs that use a model's modules and parameters around its own forward pass, or before it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint_sequential

import meshwright as mw
from meshwright.composition import check_model
from meshwright.data_parallel import DistributedDataParallel, keep_batch_norm_local
from meshwright.errors import PlanError
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.plan import Plan
from meshwright.tensor_parallel import ColwiseParallel, parallelize_module
from meshwright.testing import Ranks


def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def mine(tensors: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    one, other = (tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in tensors)
    return one, other


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()


def loss_of(model: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def sums(model: nn.Module) -> torch.Tensor:
    return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


# ---------------------------------------------------------------- before the first forward


def body_children_first(calls_root_later: bool) -> None:
    plain, model = net(), mw.replicate(net())
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        whole, own = batches(step), mine(batches(step))
        loss_of(plain, *whole).backward()
        if calls_root_later and step:
            loss_of(model, *own).backward()
        else:
            x, y = own
            (checkpoint_sequential(model, 2, x, use_reentrant=False) - y).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("calls_root_later", [False, True], ids=["parts", "then the whole"])
def test_parts_of_a_replica_that_run_first_are_reduced(
    ranks: Ranks, calls_root_later: bool
) -> None:
    ranks(2, body_children_first, calls_root_later)


def body_penalty_first() -> None:
    plain, model = net(), mw.replicate(net())
    penalties = [sums(each) for each in (plain, model)]
    (loss_of(plain, *batches(0)) + penalties[0]).backward()
    (loss_of(model, *mine(batches(0))) + penalties[1]).backward()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_a_penalty_may_be_computed_before_the_first_forward(ranks: Ranks) -> None:
    ranks(2, body_penalty_first)


class Density(nn.Module):
    """A model that programs train by a method, or whose weights they read."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.enc(x) * self.scale

    def log_prob(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.enc.weight, self.enc.bias) * self.scale


def density() -> Density:
    torch.manual_seed(0)
    return Density().double()


PASSES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "a method": lambda model, x: model.log_prob(x),
    "weights that are read": lambda model, x: F.linear(x, model.enc.weight) * model.scale,
    "a part with tensors lent": lambda model, x: (
        functional_call(model.enc, dict(model.enc.named_parameters()), (x,)) * model.scale
    ),
    "compiled": lambda model, x: torch.compile(model.log_prob, backend="eager")(x),
}
ALONE = r"found one of rank \d alone for parameter 'scale': the first forward of the module sets"


def train_by(way: str, model: Any, inner: Any) -> None:
    """Train ``inner`` of ``model`` by one of `PASSES`, beside one process."""
    plain, run = density(), PASSES[way]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        loss_of(partial(run, plain), *batches(step)).backward()
        loss_of(partial(run, inner), *mine(batches(step))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def body_no_forward(way: str) -> None:
    model = mw.replicate(density())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    get_optimizer_state_dict(model, optimizer)  # a step with gradients of zeros is none of ours
    loss_of(partial(PASSES[way], model), *mine(batches(0))).backward()
    with pytest.raises(RuntimeError, match=ALONE):
        optimizer.step()
    with pytest.raises(RuntimeError, match=ALONE):
        torch.compile(optimizer.step, backend="eager")()
    optimizer.zero_grad()
    with model.no_sync():
        loss_of(partial(PASSES[way], model), *mine(batches(0))).backward()
    with pytest.raises(RuntimeError, match=ALONE):
        optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(mine(batches(0))[0])
    train_by(way, model, model)


@pytest.mark.few(2)
@pytest.mark.parametrize("way", PASSES)
def test_a_replica_that_has_not_run_raises_before_a_step(ranks: Ranks, way: str) -> None:
    ranks(2, body_no_forward, way)


def body_no_forward_of_a_wrapper(way: str) -> None:
    model = DistributedDataParallel(density())
    train_by(way, model, model.module)
    copied = copy.deepcopy(model)
    loss_of(partial(PASSES[way], copied.module), *mine(batches(0))).backward()
    with pytest.raises(RuntimeError, match=ALONE):
        torch.optim.SGD(copied.parameters(), lr=0.1).step()


@pytest.mark.few(2)
@pytest.mark.parametrize("way", PASSES)
def test_a_wrapper_reduces_without_a_forward_and_its_copy_raises(ranks: Ranks, way: str) -> None:
    ranks(2, body_no_forward_of_a_wrapper, way)


# ------------------------------------------------------------------ transforms of torch.func


class Shifted(nn.Module):
    """A layer and a buffer, which other ranks than the first begin with otherwise."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enc = nn.Linear(6, 6)
        self.shift: torch.Tensor
        self.register_buffer("shift", torch.full((6,), shift))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.enc(x)) + self.shift


def of_weights(model: nn.Module, x: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    return lambda weights: functional_call(model, weights, (x,)).square().sum()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def loss_with(model: nn.Module, weights: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
    return functional_call(model, (weights, buffers), (x,)).square().sum()


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad": lambda m, x: grad(of_weights(m, x))(weights_of(m)),
    "grad of buffers, too": lambda m, x: grad(partial(loss_with, m), (0, 1))(
        weights_of(m), {name: buffer.clone() for name, buffer in m.named_buffers()}, x
    ),
    "jvp": lambda m, x: jvp(m, (x,), (torch.ones_like(x),)),
    "jacrev": lambda m, x: jacrev(of_weights(m, x))(weights_of(m)),
    "hessian": lambda m, x: hessian(lambda x: m(x).square().sum())(x),
    "gradients of samples": lambda m, x: vmap(
        lambda each: grad(of_weights(m, each))(weights_of(m))
    )(x),
}


def body_transforms(kind: Callable[[nn.Module], Any], name: str, *, trains_first: bool) -> None:
    """What a transform gives is of this rank's batch, with weights and buffers of rank 0."""
    transform = TRANSFORMS[name]
    plain, model = Shifted(1.0), kind(Shifted(1.0 + dist.get_rank()))
    x, y = mine(batches(0))
    if trains_first:
        warnings.filterwarnings("ignore", "the forward pass has written buffer 'shift'")
        loss_of(model, x, y).backward()
        model.zero_grad()
        next(model.buffers()).add_(dist.get_rank())
    for _ in range(2):
        found, expected = (tree_leaves(transform(each, x)) for each in (model, plain))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    loss_of(model, x, y).backward()
    loss_of(plain, *batches(0)).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.few(2)
@pytest.mark.devices("host", reason="vmap does not reach the thread of a simulated backward")
@pytest.mark.parametrize("trains_first", [False, True], ids=["first", "after a pass"])
@pytest.mark.parametrize("kind", [mw.replicate, DistributedDataParallel], ids=["function", "class"])
def test_replicas_may_be_transformed(ranks: Ranks, kind: Any, trains_first: bool) -> None:
    for name in TRANSFORMS:
        ranks(2, body_transforms, kind, name, trains_first=trains_first)


# ------------------------------------------------------ what was collected before sharding

SHARDS: dict[str, Callable[[nn.Module], Any]] = {"fully_shard": mw.fully_shard, "class": FSDP}


def body_collected_before(kind: str) -> None:
    model = net()
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    SHARDS[kind](model)
    assert [tuple(parameter.shape) for parameter in decayed] == [(8, 6), (6, 8)]
    for use in (
        lambda p: p.square().sum(),
        lambda p: p.data.clamp_(-0.1, 0.1),
        lambda p: p.detach().clone(),
        lambda p: p.register_hook(print),
        lambda p: p.requires_grad_(False),
        lambda p: p.tolist(),
        lambda p: p.grad,
    ):
        with pytest.raises(RuntimeError, match=r"parameter '0\.weight' as it was before its mod"):
            use(decayed[0])
    assert "as it was before" in repr(decayed[0])


@pytest.mark.parametrize("kind", SHARDS)
def test_what_was_collected_before_sharding_is_refused(ranks: Ranks, kind: str) -> None:
    ranks(2, body_collected_before, kind)


class OwnOptimizer:
    """An optimizer that is none of torch's, as those are that keep a list and one learning rate."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [*model.parameters()]

    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.1)


def body_own_optimizer() -> None:
    whole, own = batches(0), mine(batches(0))
    plain = net()
    expected = OwnOptimizer(plain)
    loss_of(plain, *whole).backward()
    expected.step()
    for kind, wrap in WRAPS.items():
        model: Any = net()
        optimizer = OwnOptimizer(model)
        model = wrap(model)
        loss_of(model, *own).backward()
        if kind in ("fully_shard", "flat"):
            with pytest.raises(
                RuntimeError, match=r"'0\.weight' as it was before its module was sh"
            ):
                optimizer.step()
            continue
        optimizer.step()
        torch.testing.assert_close(loss_of(model, *whole), loss_of(plain, *whole))


def test_an_optimizer_of_ones_own_that_was_built_before(ranks: Ranks) -> None:
    """It trains what it was built of, or says in its first step that this is trained no more."""
    ranks(2, body_own_optimizer)


def body_own_optimizer_over_tensor_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    styles = {"0": ColwiseParallel()}
    model: Any = net()
    optimizers = (OwnOptimizer(model), torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(parallelize_module(model, mesh["tensor"], styles), *batches(0)).backward()
    for optimizer in optimizers:
        with pytest.raises(RuntimeError, match=r"'0\.weight' as it was before parallelize_module"):
            optimizer.step()
    for wrap in (
        lambda model: mw.fully_shard(model, mesh=mesh["data"]),
        lambda model: FSDP(model, device_mesh=mesh["data"]),
    ):
        model = parallelize_module(net(), mesh["tensor"], styles)
        optimizer = OwnOptimizer(model)
        loss_of(wrap(model), *mine(batches(0))).backward()
        with pytest.raises(RuntimeError, match=r"'0\.weight' as it was before its module was sh"):
            optimizer.step()


def test_an_optimizer_of_ones_own_that_was_built_before_over_tensor_ranks(ranks: Ranks) -> None:
    ranks(2, body_own_optimizer_over_tensor_ranks)


class Keeps(nn.Module):
    """Keeps a view of its weight, or the weight in a list, from when it is made."""

    def __init__(self, as_view: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).double()
        self.kept: Any = self.layer.weight.T if as_view else [self.layer.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.kept[0] if isinstance(self.kept, list) else self.kept
        return self.layer(x) @ kept


class MadeOf(nn.Module):
    """Keeps the tensor that its weight was made of, and reads it where it is told to."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.initial = torch.randn(6, 6).double()
        self.weight = nn.Parameter(self.initial)
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + (x @ self.initial if self.reads else 0)


class Shares(nn.Module):
    """Has two parameters in one memory: the same elements, some of them, or none."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        memory = torch.ones(6, 6)
        self.a, self.b = nn.Parameter(memory[:first]), nn.Parameter(memory[last:])


class Around(nn.Module):
    """Has what ``held`` holds in modules that are units of their own, and in itself."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.units = nn.ModuleList()
        for name, parameter in list(held.named_parameters()):
            self.units.append(unit := nn.Module())
            unit.register_parameter(name.rpartition(".")[2], parameter)
        self.register_buffer("kept", getattr(held, "kept", None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def around(kind: str, held: nn.Module) -> nn.Module:
    """Make a model whose units have, each for itself, what lies together in ``held``."""
    model = Around(held)
    model.units = nn.ModuleList(map(SHARDS[kind], model.units))
    return SHARDS[kind](model)


def body_kept(kind: str) -> None:
    with pytest.raises(ValueError, match=r"'kept' of a Keeps is a view of parameter 'layer\.weig"):
        SHARDS[kind](Keeps(as_view=True))
    plain = nn.Linear(6, 6)
    plain.register_buffer("old", plain.weight.data[1:])
    with pytest.raises(ValueError, match=r"'old' of a Linear is a view of parameter 'weight'"):
        SHARDS[kind](plain)
    for first, last in ((6, 0), (4, 3)):
        with pytest.raises(ValueError, match=r"'a' and 'b' are two objects in the same memory"):
            SHARDS[kind](Shares(first, last))
    SHARDS[kind](Shares(3, 3))
    beside = nn.Linear(6, 6)
    memory = torch.ones(8, 6)  # bytes of one storage that are each one's own
    beside.weight = nn.Parameter(memory[:6])
    beside.register_buffer("rest", memory[6:])
    SHARDS[kind](beside)
    with pytest.raises(RuntimeError, match=r"'weight' has no shape yet, .* on one batch first"):
        SHARDS[kind](nn.LazyLinear(3))
    for apart, found in ((Shares(6, 0), "two objects"), (Keeps(as_view=True), "is a view")):
        with pytest.raises(ValueError, match=found):
            around(kind, apart)(batches(0)[0])
    around(kind, Shares(3, 3))(batches(0)[0])
    model = SHARDS[kind](Keeps(as_view=False))
    with pytest.raises(RuntimeError, match=r"'layer\.weight' as it was before its module was sha"):
        model(batches(0)[0])


@pytest.mark.filterwarnings("ignore:The passed-in `module` is on CPU")  # what is not drawn yet
@pytest.mark.parametrize("kind", SHARDS)
def test_what_a_module_keeps_of_its_parameters_is_refused(ranks: Ranks, kind: str) -> None:
    ranks(2, body_kept, kind)


def body_made_of(kind: str) -> None:
    one, many = MadeOf(reads=False), SHARDS[kind](MadeOf(reads=False))
    for model, share in ((one, tuple), (many, mine)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            loss_of(model, *share(batches(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
    x = batches(2)[0]
    with torch.no_grad():
        torch.testing.assert_close(many(x), one(x))
    with pytest.raises(RuntimeError, match=r"'initial' was in the memory of parameter 'weight'"):
        SHARDS[kind](MadeOf(reads=True))(x)


@pytest.mark.parametrize("kind", SHARDS)
def test_the_tensor_that_a_parameter_was_made_of_may_be_kept(ranks: Ranks, kind: str) -> None:
    ranks(2, body_made_of, kind)


# ------------------------------------------------------------- rows, statistics, schedulers

WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "replicate": mw.replicate,
    "DistributedDataParallel": mw.DistributedDataParallel,
    "fully_shard": mw.fully_shard,
    "flat": FSDP,
    "original": lambda model: FSDP(model, use_orig_params=True),
}


def body_frequencies() -> None:
    for kind in (nn.Embedding, nn.EmbeddingBag):
        for wrap in WRAPS.values():
            model = nn.Sequential(kind(5, 6, scale_grad_by_freq=True))
            with pytest.raises(ValueError, match=r"divided by how often each row is looked up"):
                wrap(model)(torch.zeros(2, 1, dtype=torch.int64))


def test_gradients_divided_by_frequencies_are_refused(ranks: Ranks) -> None:
    ranks(2, body_frequencies)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (nn.Embedding(5, 6, scale_grad_by_freq=True), "has scale_grad_by_freq=True"),
        (nn.InstanceNorm1d(2, track_running_stats=True), "InstanceNorm with running statistics"),
    ],
    ids=["frequencies", "statistics"],
)
@pytest.mark.parametrize("plan", ["[axes]\nreplicate = 2", "[axes]\nshard = 2"])
def test_plans_refuse_what_depends_on_one_rank(layer: nn.Module, text: str, plan: str) -> None:
    with pytest.raises(PlanError, match=text):
        check_model(nn.Sequential(layer), Plan.from_toml(plan), 2)


def body_instance_norm(kind: str) -> None:
    def made() -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 6), nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True)
        )

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        WRAPS[kind](made())(torch.ones(2, 6))
    told = ["InstanceNorm '2' keeps running statistics" in str(each.message) for each in said]
    assert told == ([True] if dist.get_rank() == 0 else [])
    meant = made()
    keep_batch_norm_local(meant)
    WRAPS[kind](meant)(torch.ones(2, 6))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["replicate", "DistributedDataParallel", "fully_shard", "flat"])
def test_running_statistics_of_one_rank_are_named_once(ranks: Ranks, kind: str) -> None:
    ranks(2, body_instance_norm, kind)


def body_scheduled() -> None:
    def scheduled(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return optimizer

    plan = Plan.from_toml("[axes]\nreplicate = 2")
    trainable = mw.parallelize(net(), plan, optimizer=scheduled, loss=nn.functional.mse_loss)
    assert torch.isfinite(trainable.step(*mine(batches(0))).loss)


def test_an_optimizer_may_have_a_scheduler_when_it_is_made(ranks: Ranks) -> None:
    ranks(2, body_scheduled)


# -------------------------------------------------------- gradients that were not reduced


def body_dropped() -> None:
    model, plain = net(), net()
    sharded: Any = mw.fully_shard(model)
    x, y = mine(batches(0))
    sharded.set_requires_gradient_sync(False)
    (sharded(x) * y).square().mean().backward()
    sharded.zero_grad()
    sharded.set_requires_gradient_sync(True)
    loss_of(sharded, x, y).backward()
    loss_of(plain, *batches(0)).backward()
    for found, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad)


def test_a_module_drops_gradients_that_wait(ranks: Ranks) -> None:
    ranks(2, body_dropped)


def body_steps_alone(kind: str) -> None:
    model: Any = WRAPS[kind](net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "DistributedDataParallel":
        model.require_backward_grad_sync = False
    else:
        model.set_requires_gradient_sync(False)
    loss_of(model, *mine(batches(0))).backward()
    if kind == "fully_shard":
        with pytest.raises(RuntimeError, match="steps while gradients of .* wait for their reduc"):
            optimizer.step()
        return
    with pytest.warns(UserWarning, match="steps with gradients of this rank alone"):
        optimizer.step()
    optimizer.step()  # said once


class Players(nn.Module):
    """Two that play against each other, in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = net(), net()

    def forward(self, name: str, *args: Any) -> Any:
        return loss_of(getattr(self, name), *args)


def body_steps_of_others(kind: str) -> None:
    """The one steps by what was reduced, while gradients of the other wait."""
    model: Any = Players()
    if kind == "fully_shard":
        for player in (model.one, model.other):
            mw.fully_shard(player)
        mw.fully_shard(model)
    else:
        model = WRAPS[kind](model)
    one, other = (
        torch.optim.SGD([p for n, p in model.named_parameters() if f"{name}." in n], lr=0.1)
        for name in ("one", "other")
    )
    step = mine(batches(0))
    for _ in range(2):
        model("one", *step).backward()
        model.set_requires_gradient_sync(False)
        model("other", *step).backward()
        one.step()
        model.set_requires_gradient_sync(True)
        model("other", *step).backward()
        other.step()
        model.zero_grad()


def body_inputs_named(kind: str) -> None:
    """Parameters that are named in ``inputs=`` are not in the graph: a step by none is told of."""
    model: Any = SHARDS[kind](net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = mine(batches(0))
    loss_of(model, *given).backward()
    optimizer.step()  # without a word
    optimizer.zero_grad()
    named = [*model.parameters()]  # before the forward: some units stay whole behind it
    loss_of(model, *given).backward(inputs=named)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(lambda: 0.0)  # which would compute them
    loss_of(model, *given)
    with pytest.warns(UserWarning, match=r"SGD steps without a gradient, .* backward\(inputs="):
        optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("kind", SHARDS)
def test_a_step_without_any_gradient_is_named(ranks: Ranks, kind: str) -> None:
    ranks(2, body_inputs_named, kind)


@pytest.mark.parametrize("kind", ["replicate", "fully_shard"])
def test_a_step_may_leave_gradients_of_others_waiting(ranks: Ranks, kind: str) -> None:
    ranks(2, body_steps_of_others, kind)


@pytest.mark.parametrize("kind", ["replicate", "DistributedDataParallel", "fully_shard"])
def test_a_step_without_a_reduction_is_named(ranks: Ranks, kind: str) -> None:
    ranks(2, body_steps_alone, kind)


def body_tests_of_parts() -> None:
    model = FSDP(net())
    loss_of(model, *mine(batches(0))).backward()
    gradient: Any = next(model.parameters()).grad
    for use in (
        lambda g: (g.abs() < 0.2).all(),
        lambda g: (g > 0).any(),
        lambda g: g.numpy(),
        lambda g: g.tolist(),
        lambda g: g.roll(1),
        lambda g: torch.flip(g, (0,)),
    ):
        with pytest.raises(RuntimeError, match="of which each rank holds a part"):
            use(gradient)
    assert "tensor" in repr(gradient)
    torch.testing.assert_close(gradient, gradient.clone())
    assert torch.equal(gradient, gradient.clone())


def test_parts_of_gradients_answer_no_test_of_all_elements(ranks: Ranks) -> None:
    ranks(2, body_tests_of_parts)
