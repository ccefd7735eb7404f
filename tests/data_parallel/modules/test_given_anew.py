"""Parameters and buffers that a module is given anew after its replica was set up."""

from __future__ import annotations

import copy
import re
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune

from meshwright.comm import Recorder, communicator, observe
from meshwright.compiler import aot_backend, compiled_autograd
from meshwright.composition import parallelize
from meshwright.data_parallel import DistributedDataParallel, MixedPrecision, replicate
from meshwright.data_parallel.comm_hooks import allreduce_hook
from meshwright.errors import CollectiveMismatchError, CommunicationError
from meshwright.plan import PipelinePlan, Plan, TensorPlan
from meshwright.testing import Ranks
from support.data_parallel.replica_samples import batch, loss, same_gradients
from support.internals.axes import Axes

Wrap = Callable[..., Any]
WRAPS: tuple[Wrap, ...] = (replicate, DistributedDataParallel)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]
    return nn.Sequential(*layers).double()


def fresh(*shape: int) -> nn.Parameter:
    """A parameter that is equal in one process and on rank 0 alone."""
    generator = torch.Generator().manual_seed(5 + communicator().rank)
    return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))


def linear(inputs: int, outputs: int) -> nn.Linear:
    found = nn.Linear(inputs, outputs)
    found.weight, found.bias = fresh(outputs, inputs), fresh(outputs)
    return found


# --------------------------------------------------------------------------------- parameters


class Adapter(nn.Module):
    """A layer that is frozen, with one of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = fresh(base.in_features, 2), fresh(2, base.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down @ self.up


class Renamed(nn.Module):
    """A layer whose weight has another name."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.matrix, self.shift = base.weight, base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.matrix, self.shift)


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.T


def is_assigned(model: nn.Sequential) -> None:
    model[2].weight = fresh(4, 4)


def is_loaded(model: nn.Sequential) -> None:
    state = {name: fresh(*tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def has_a_layer_more(model: nn.Sequential) -> None:
    model[1] = nn.Sequential(nn.Tanh(), linear(4, 4))


def has_an_adapter(model: nn.Sequential) -> None:
    model[2] = Adapter(model[2])


def lacks_one(model: nn.Sequential) -> None:
    model[2].bias = None


def is_tied(model: nn.Sequential) -> None:
    model[3] = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    model[3][0].weight, model[3][0].bias = model[2].weight, model[2].bias


def is_parametrized(model: nn.Sequential) -> None:
    parametrize.register_parametrization(model[2], "weight", Symmetric())


def is_weight_normed(model: nn.Sequential) -> None:
    parametrizations.weight_norm(model[2])


def is_pruned(model: nn.Sequential) -> None:
    prune.l1_unstructured(model[2], "weight", amount=3)


def is_swapped(model: nn.Sequential) -> None:
    # Not fresh values: the object stays, and nothing says that it holds something else.
    torch.utils.swap_tensors(model[2].weight, nn.Parameter(torch.ones(4, 4).double()))


def is_renamed(model: nn.Sequential) -> None:
    model[2] = Renamed(model[2])


def is_converted(model: nn.Sequential) -> None:
    model.float().double()


def is_of_another_shape(model: nn.Sequential) -> None:
    model[0].weight.data = torch.ones(5, 3).double()
    model[0].bias.data = torch.ones(5).double()
    model[2] = linear(5, 4)


CHANGES = (
    is_assigned,
    is_loaded,
    has_a_layer_more,
    has_an_adapter,
    lacks_one,
    is_tied,
    is_parametrized,
    is_weight_normed,
    is_pruned,
    is_swapped,
    is_renamed,
    is_converted,
    is_of_another_shape,
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 6e-5},
    {"static_graph": True},
    {"skip_all_reduce_unused_params": True, "unused_gradient": "zeros"},
    {"mixed_precision": MixedPrecision(param_dtype=torch.float64)},
)


def share(x: torch.Tensor) -> torch.Tensor:
    world = communicator()
    return x.chunk(world.size)[world.rank]


def of_rank_zero(change: Callable[[nn.Sequential], None], model: nn.Sequential) -> None:
    """``change`` as rank 0 makes it."""
    change(model)
    for parameter in model.parameters():
        communicator().broadcast(parameter.detach(), label="values of rank 0").wait()


def train_both(one: nn.Module, ours: Any, inner: nn.Module, steps: int = 2) -> None:
    """Train both models, and compare their gradients and weights after each step."""
    x, mine = batch()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, inner)]
    for _ in range(steps):
        loss(one, x).backward()
        loss(ours, mine).backward()
        same_gradients(inner, one)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, a), b in zip(one.named_parameters(), inner.parameters(), strict=True):
            torch.testing.assert_close(b, a, msg=name)


def change_and_train(wrap: Wrap, change: Callable[[nn.Sequential], None], **options: Any) -> None:
    one = mlp()
    inner = copy.deepcopy(one)
    ours = wrap(inner, **options)
    train_both(one, ours, inner)
    of_rank_zero(change, one)
    change(inner)
    train_both(one, ours, inner)


def body_every_change() -> None:
    for wrap in WRAPS:
        for change in CHANGES:
            change_and_train(wrap, change)


def body_options() -> None:
    for options in OPTIONS:
        for change in (is_loaded, has_a_layer_more, has_an_adapter):
            change_and_train(replicate, change, **options)
    hooked = mlp()
    ours = DistributedDataParallel(hooked)
    ours.register_comm_hook(None, allreduce_hook)
    one = copy.deepcopy(hooked)
    train_both(one, ours, hooked)
    of_rank_zero(has_a_layer_more, one)
    has_a_layer_more(hooked)
    train_both(one, ours, hooked)


def body_between_passes() -> None:
    """As in one process: what has no place any more is not reduced, and nobody waits for it."""
    x, mine = batch()
    one = mlp()
    ours = replicate(copy.deepcopy(one))
    kept = ours[2].weight
    with ours.no_sync():
        loss(ours, mine).backward()
    loss(one, x).backward()
    of_rank_zero(is_assigned, one)
    is_assigned(ours)
    loss(one, x).backward()
    loss(ours, mine).backward()
    same_gradients(ours, one)
    assert kept.grad is not None  # that of this rank alone, which nothing uses

    # Given anew between a forward and its backward: the gradient is of the one before.
    before, value = ours[2].weight, loss(ours, mine)
    before.grad = None
    is_assigned(ours)
    value.backward()
    assert before.grad is not None
    assert ours[2].weight.grad is None

    # An evaluation of one rank needs no other, also where parameters are others.
    is_loaded(ours)
    if communicator().rank == 0:
        with torch.no_grad():
            ours(mine)
    one.load_state_dict(ours.state_dict())
    of_rank_zero(lambda _: None, one)
    one.zero_grad()
    loss(one, x).backward()
    loss(ours, mine).backward()
    same_gradients(ours, one)


def body_by_and_by() -> None:
    """A tie that ends, a change under no_sync, parameters in containers, a block of join."""
    for wrap in WRAPS:
        one = mlp()
        is_tied(one)
        inner = copy.deepcopy(one)
        ours = wrap(inner)
        train_both(one, ours, inner)
        of_rank_zero(is_assigned, one)
        is_assigned(inner)
        train_both(one, ours, inner)
        x, mine = batch()
        of_rank_zero(is_loaded, one)
        is_loaded(inner)
        with ours.no_sync():
            loss(ours, mine).backward()
        loss(ours, mine).backward()
        loss(one, x.repeat(2, 1)).mul(2).backward()
        same_gradients(inner, one)
    inner = mlp()
    ours = DistributedDataParallel(inner)
    rank = communicator().rank
    with ours.join():
        for number in range(3 - rank):
            if number == 1:
                is_assigned(inner)
            inner.zero_grad()
            loss(ours, mine).backward()
    for parameter in inner.parameters():
        of_first = parameter.detach().clone()
        communicator().broadcast(of_first, label="values of rank 0").wait()
        assert torch.equal(of_first, parameter)


def body_lent() -> None:
    """Tensors that a functional call lends are not parameters, and come and go without a word."""
    one = mlp()
    ours = replicate(copy.deepcopy(one))
    _, mine = batch()
    loss(ours, mine).backward()
    for make in (torch.Tensor.requires_grad_, nn.Parameter):
        lent = {name: make(torch.ones_like(p)) for name, p in one.named_parameters()}
        with observe(recorder := Recorder()):
            found = functional_call(ours, lent, (mine,)).sum()
            gradients = torch.autograd.grad(found, list(lent.values()))
        assert all("compare" not in label for _, label in recorder.kinds())
        expected = functional_call(one, lent, (mine,)).sum()
        torch.testing.assert_close(found, expected)
        for a, b in zip(gradients, torch.autograd.grad(expected, list(lent.values())), strict=True):
            torch.testing.assert_close(a, b)
    ours.zero_grad()
    train_both(one, ours, ours)


class Scaled(nn.Module):
    """A model that computes with nine tenths of its weights, in functional calls alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        lent = {name: 0.9 * p for name, p in self.inner.named_parameters()}
        return functional_call(self.inner, lent, (x,))


def body_lent_from_the_first() -> None:
    """Every pass is a functional call, also the first, and the first with a new parameter."""
    for wrap in WRAPS:
        one = mlp()
        inner = copy.deepcopy(one)
        ours = wrap(inner)
        train_both(Scaled(one), Scaled(ours), inner)
        for model in (one, inner):
            model[2].weight = nn.Parameter(2 * model[2].weight.detach())
            model.append(nn.Linear(2, 2, bias=False, dtype=torch.float64))
            nn.init.ones_(model[-1].weight)
        train_both(Scaled(one), Scaled(ours), inner)
        train_both(one, ours, inner)

    # Buffers of its own follow, when they come in sight: also for those who evaluate.
    for keys in (("1.running_mean",), ("0.weight", "1.running_mean", "1.running_var")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double().eval()
        one, ours = copy.deepcopy(model), replicate(model, forward_sync_buffers=False)
        ours[1].running_mean.add_(communicator().rank)  # pyrefly: ignore
        _, mine = batch()
        for each in (one, ours):
            lent = {name: value.clone() for name, value in each.state_dict().items()}
            functional_call(each, {key: lent[key] for key in keys}, (mine,)).sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(ours(mine), one(mine))

    # What is lent was made before any value of rank 0 could be sent.
    apart = Scaled(replicate(nn.Sequential(linear(3, 2))))
    _, mine = batch()
    with pytest.raises(CollectiveMismatchError, match="'0.weight' to have the same values"):
        loss(apart, mine).backward()
    inner = replicate(nn.Sequential(linear(3, 2)))
    with torch.no_grad():
        Scaled(inner)(mine)
        with pytest.raises(CollectiveMismatchError, match="'0.weight' to have the same values"):
            inner(mine)


def body_searched() -> None:
    """LBFGS knows that the gradients of parameters given anew are means, too."""
    one = mlp()
    ours = replicate(copy.deepcopy(one))
    x, mine = batch()
    loss(ours, mine).backward()
    of_rank_zero(is_loaded, one)
    is_loaded(ours)
    loss(ours, mine).backward()
    for model, rows in ((one, x), (ours, mine)):
        optimizer = torch.optim.LBFGS(
            model.parameters(), lr=4, max_iter=8, line_search_fn="strong_wolfe"
        )

        def again(model: nn.Module = model, rows: torch.Tensor = rows) -> torch.Tensor:
            model.zero_grad()
            value = loss(model, rows)
            value.backward()
            return value

        optimizer.step(again)
    for a, b in zip(one.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.parametrize(
    "body",
    [
        *(body_every_change, body_options, body_between_passes, body_by_and_by, body_lent),
        *(body_lent_from_the_first, body_searched),
    ],
    ids=["changes", "options", "between", "by-and-by", "lent", "lent-first", "searched"],
)
@pytest.mark.few(2)
def test_parameters_that_are_given_anew_are_reduced(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)


@pytest.mark.slow
@pytest.mark.backends("shm", "gloo")
def test_they_are_on_four_ranks_and_both_backends(ranks: Ranks) -> None:
    ranks(4, body_every_change, timeout=120)


# ----------------------------------------------------------------------------- on one rank only


def of_another_kind(model: nn.Module) -> None:
    model.register_buffer("more", torch.zeros(2))


def body_on_one_rank(
    change: Callable[[Any], None], odd: int, *, is_compiled: bool
) -> tuple[str, float]:
    model = mlp()
    ours: Any = replicate(model)
    if is_compiled:
        ours = torch.compile(ours, backend=aot_backend)
    else:
        model.register_buffer("some", torch.zeros(1))
    _, mine = batch()
    for _ in range(2):
        loss(ours, mine).backward()
    if communicator().rank == odd:
        change(model)
    begun = time.monotonic()

    def go_on() -> None:
        for _ in range(2):
            loss(ours, mine).backward()

    # Dynamo makes an error of its own of what is raised while it traces.
    with pytest.raises((CommunicationError, torch._dynamo.exc.InternalTorchDynamoError)) as caught:
        go_on()
    return str(caught.value), time.monotonic() - begun


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.devices("host", reason="only the watch of a real device names who does not come")
@pytest.mark.parametrize(
    ("change", "odd", "named"),
    [
        (is_assigned, 1, "parameter '2.weight' was given anew"),
        pytest.param(lacks_one, 0, "parameter '2.bias' is gone", marks=pytest.mark.slow),
        pytest.param(
            of_another_kind, 0, "buffer 'more' is of another kind", marks=pytest.mark.slow
        ),
    ],
)
def test_what_one_rank_alone_is_given_is_named(
    ranks: Ranks, change: Callable[[Any], None], odd: int, named: str
) -> None:
    for text, seconds in ranks(2, body_on_one_rank, change, odd, is_compiled=False):
        assert named in text
        assert re.search(r"rank(s \[)? ?[01]", text), text
        assert seconds < 20


@pytest.mark.slow
@pytest.mark.backends("shm", "gloo")
def test_it_is_named_where_replicas_are_compiled(ranks: Ranks) -> None:
    for text, _ in ranks(2, body_on_one_rank, is_assigned, 1, is_compiled=True):
        assert "parameter '2.weight' was given anew" in text


def body_different_ones() -> str:
    model = replicate(mlp())
    _, mine = batch()
    loss(model, mine).backward()
    if communicator().rank:
        model[0].weight = fresh(4, 3)
    else:
        is_assigned(model)
    with pytest.raises(CommunicationError) as caught:
        loss(model, mine).backward()
    return str(caught.value)


@pytest.mark.slow
def test_ranks_that_are_given_different_ones_are_named(ranks: Ranks) -> None:
    for text in ranks(2, body_different_ones):
        assert "'0.weight' was given anew" in text
        assert "'2.weight' was given anew" in text


# ------------------------------------------------------------------------------------ buffers


class Averages(nn.Module):
    """Assigns its buffers anew in each forward, some of them others in kind than before."""

    def __init__(self, *, changes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3).double()
        self.register_buffer("mean", torch.zeros(3).double())
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.zeros(3).double(), persistent=False)
        self.register_buffer("late", None)
        self.register_buffer("signs", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("waves", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("own", torch.zeros(1))
        self.changes = changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        with torch.no_grad():
            rows = y.detach().mean(0)
            self.mean = 0.9 * self.mean + 0.1 * rows
            self.steps = torch.tensor(int(self.steps) + 1 + communicator().rank)
            self.signs, self.waves = rows > 0, rows.to(torch.complex64)
            self.own = self.own + 1 + communicator().rank
            self.hidden = torch.cat([self.hidden, rows]) if self.changes else self.hidden + rows
            if self.changes:
                self.late = rows.mean().expand(2)
        return y + self.mean.to(y.dtype)


def seen_by(ours: Any, module: nn.Module) -> list[dict[str, torch.Tensor]]:
    """The buffers with which each forward of some begins, also in evaluation."""
    seen: list[dict[str, torch.Tensor]] = []

    def note(*_: object) -> None:
        named = module.named_buffers()
        seen.append({name: b.clone() for name, b in named if name != "own"})

    module.layer.register_forward_pre_hook(note)
    torch.manual_seed(communicator().rank)
    for number in range(5):
        x = torch.randn(4, 3, dtype=torch.float64)
        if number == 2:
            module.mean = module.mean.float()
        if number == 3:
            module.inner = nn.BatchNorm1d(3).double().eval()
            module.inner.running_mean.normal_()
        if number == 4:
            del module.inner
        ours(x).square().mean().backward()
        with torch.inference_mode(number % 2 == 0), torch.no_grad():
            ours(x)
    return seen


def rows_of(found: list[dict[str, torch.Tensor]]) -> Iterator[tuple[int, str, torch.Tensor]]:
    for number, named in enumerate(found):
        for name, tensor in named.items():
            yield number, name, tensor


def body_buffers() -> list[list[tuple[int, str, torch.Tensor]]]:
    found: list[list[tuple[int, str, torch.Tensor]]] = []
    warnings.filterwarnings("ignore", "the forward pass has written buffer 'mean'")
    for wrap in WRAPS:
        for changes in (False, True):
            module = Averages(changes=changes)
            module.__dict__["_ddp_params_and_buffers_to_ignore"] = {"own"}
            found.append(list(rows_of(seen_by(wrap(module), module))))
            assert module.own.item() == 10 * (1 + communicator().rank)
    return found


@pytest.mark.backends("shm", "gloo")
def test_buffers_that_are_assigned_are_kept_equal(ranks: Ranks) -> None:
    first, second = ranks(2, body_buffers)
    for ours, theirs in zip(first, second, strict=True):
        assert len(ours) == len(theirs) > 30
        for (number, name, a), (_, other, b) in zip(ours, theirs, strict=True):
            assert name == other
            assert torch.equal(a, b), (number, name)


class Codebook(nn.Module):
    def __init__(self, *, is_frozen: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3), requires_grad=not is_frozen)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("history", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        if self.training:
            rows = y.detach().mean(0)
            self.mean = 0.9 * self.mean + 0.1 * rows
            self.history = torch.cat([self.history, rows.mean().reshape(1)])
        return y + 0.1 * self.mean


def body_plan(*, is_frozen: bool, **axes: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), Codebook(is_frozen=is_frozen))
    is_piped = "pipeline" in axes
    is_cut = "tensor" in axes
    rules = {"0": "colwise", "1": "rowwise"} if is_cut else None
    plan = Plan(axes=Axes.of(axes), tensor=TensorPlan(rules=rules))
    if is_piped:
        cut = PipelinePlan(schedule="gpipe", microbatches=2, split=("2",))  # pyrefly: ignore
        plan = Plan(axes=Axes.of(axes), pipeline=cut)
    trainable = parallelize(
        model,
        plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=F.mse_loss,
        example=(torch.ones(4, 3),) if is_piped or is_cut else None,
    )
    torch.manual_seed(1 + trainable.data_rank)
    for _ in range(2):
        trainable.step(torch.randn(4, 3), torch.randn(4, 3))
    return {name: b.flatten().tolist() for name, b in trainable.module.named_buffers()}


@pytest.mark.few(1)
@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_plans_keep_them_equal(ranks: Ranks, axis: str) -> None:
    first, second = ranks(2, body_plan, is_frozen=False, **{axis: 2})
    assert len(first["2.history"]) == 3
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_plans_with_tensor_keep_them_equal(ranks: Ranks, axis: str) -> None:
    first, *others = ranks(4, body_plan, is_frozen=False, **{axis: 2, "tensor": 2})
    assert len(first["2.history"]) >= 3
    assert all(other == first for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_stages_keep_them_equal(ranks: Ranks, axis: str, is_frozen: bool) -> None:
    found = ranks(4, body_plan, is_frozen=is_frozen, **{"pipeline": 2, axis: 2})
    held = [row for row in found if row]
    assert len(held) == 2
    assert held[0] == held[1]


# ----------------------------------------------------------------------------------- compiled


def compiled_and_hooked() -> Any:
    return compiled_autograd(lambda graph: torch.compile(graph, backend=aot_backend))


def body_compiled(*changes: Callable[[Any], None], in_hooks: bool = False) -> None:
    if in_hooks:
        torch._dynamo.config.optimize_ddp = "python_reducer"
    for wrap in WRAPS:
        for change in changes:
            torch._dynamo.reset()
            one = mlp()
            inner = copy.deepcopy(one)
            ours = torch.compile(wrap(inner), backend=aot_backend)
            x, mine = batch()
            for number in range(4):
                if number == 2:
                    of_rank_zero(change, one)
                    change(inner)
                    one.zero_grad()
                    inner.zero_grad()
                loss(one, x).backward()
                value = loss(ours, mine)
                if in_hooks:
                    with compiled_and_hooked():
                        value.backward()
                else:
                    value.backward()
                same_gradients(inner, one)


def body_compiled_buffers() -> dict[str, Any]:
    """What buffers become of other batches on each rank, and then one batch that is the same."""
    module = Averages(changes=False)
    ours = torch.compile(replicate(module), backend=aot_backend)
    for seed in (1 + communicator().rank, 3 + communicator().rank, 0):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        ours(x).square().mean().backward()
    return {name: b.tolist() for name, b in module.named_buffers() if name != "own"}


def body_compiled_and_lent() -> None:
    one = mlp()
    ours = replicate(copy.deepcopy(one))
    _, mine = batch()
    lent = {n: torch.ones_like(p).requires_grad_() for n, p in one.named_parameters()}

    def run(model: nn.Module) -> torch.Tensor:
        return functional_call(model, lent, (mine,)).sum()

    found, expected = torch.compile(run, backend=aot_backend)(ours), run(one)
    torch.testing.assert_close(found, expected)


@pytest.mark.devices("host", reason="nothing is compiled under a dispatch mode")
@pytest.mark.slow
def test_compiled_replicas_follow(ranks: Ranks) -> None:
    ranks(2, body_compiled, is_assigned)


@pytest.mark.devices("host", reason="nothing is compiled under a dispatch mode")
@pytest.mark.slow
def test_compiled_replicas_follow_what_is_lent_and_buffers(ranks: Ranks) -> None:
    ranks(2, body_compiled_and_lent)
    first, second = ranks(2, body_compiled_buffers)
    # A forward adds its rank to what it was given: the same on both, of rank 0.
    assert first.pop("steps") == 3
    assert second.pop("steps") == 4
    assert first == second


@pytest.mark.devices("host", reason="nothing is compiled under a dispatch mode")
@pytest.mark.few(0, slow=1)
@pytest.mark.parametrize("in_hooks", [False, True], ids=["marks", "hooks"])
def test_compiled_replicas_follow_all_changes(ranks: Ranks, in_hooks: bool) -> None:
    changes = (is_loaded, has_an_adapter) if in_hooks else (is_loaded, is_tied, is_renamed)
    ranks(2, body_compiled, *changes, in_hooks=in_hooks, timeout=300)
