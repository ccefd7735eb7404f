"""`parallelize` and `Trainable`: the numbers of one process, the contract of a step, refusals."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.comm import Recorder, communicator, observe
from meshwright.composition import Trainable, parallelize
from meshwright.errors import CheckpointMismatchError, NonFiniteError, PlanError
from meshwright.plan import BucketPlan, Plan, TrainPlan
from meshwright.testing import Ranks
from support.internals.axes import Axes
from support.internals.precision import Precision
from support.internals.reference import first_difference, record, train_reference
from support.late import raises_by_now

SMALL = BucketPlan(cap_mb=6e-5)
TOLERANCE = 1e-9
STEPS = 5
ROWS = 8


def plan_of(size: int, **train: object) -> Plan:
    return Plan(
        axes=Axes.of({"replicate": size}),
        train=TrainPlan(**train),
        buckets=SMALL if size > 1 else BucketPlan(),
    )


# ------------------------------------------------------------------------------------ models


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(3, 5, bias=False)
        self.back = nn.Linear(5, 3)
        self.back.weight = nn.Parameter(self.into.weight.detach().T.clone())
        self.again = nn.Linear(3, 5)
        self.again.weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(torch.tanh(self.into(x)) + self.again(x))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.never = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, *, x: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
        return {"out": self.layer(x) * scale}


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    model[2].requires_grad_(False)
    return model


def uneven() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 1), nn.Linear(1, 11), nn.Linear(11, 3))


def reused() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer)


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequential": sequential,
    "skip": Skip,
    "tied": Tied,
    "frozen": frozen,
    "unused": Unused,
    "uneven": uneven,
    "reused": reused,
    "keywords": Keywords,
    "batch_norm": normalized,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().double()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def mean(output: torch.Tensor | dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    found = output["out"] if isinstance(output, dict) else output
    return F.mse_loss(found, target)


def weighted(
    output: torch.Tensor | dict[str, torch.Tensor], target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum over the rows whose first target is positive, as with masked tokens."""
    found = output["out"] if isinstance(output, dict) else output
    mask = target[:, 0] > 0
    return (found - target)[mask].square().sum(), mask.sum()


def batches(size: int, name: str = "", steps: int = STEPS) -> list[tuple[object, torch.Tensor]]:
    torch.manual_seed(11)
    found: list[tuple[object, torch.Tensor]] = []
    for _ in range(steps):
        x = torch.randn(ROWS * size, 3, dtype=torch.float64)
        y = torch.randn(ROWS * size, 3, dtype=torch.float64)
        found.append(({"x": x, "scale": 0.5} if name == "keywords" else x, y))
    return found


def share(pair: tuple[object, torch.Tensor], rank: int) -> tuple[object, torch.Tensor]:
    rows = slice(rank * ROWS, (rank + 1) * ROWS)
    batch, target = pair
    if isinstance(batch, dict):
        return {**batch, "x": batch["x"][rows]}, target[rows]
    assert isinstance(batch, torch.Tensor)
    return batch[rows], target[rows]


# ------------------------------------------------------------------------------------ parity


@dataclass(frozen=True)
class Case:
    model: str
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    loss: Callable[..., object]
    accumulate: int = 1
    clip_norm: float | None = None

    def __str__(self) -> str:
        parts = [self.model, self.optimizer.__name__, self.loss.__name__, f"x{self.accumulate}"]
        return "-".join(parts) + ("-clip" if self.clip_norm else "")


CASES = [
    Case(name, optimizer, loss, accumulate, clip)
    for number, name in enumerate(MODELS)
    for optimizer, loss, accumulate, clip in (
        (sgd, (mean, weighted)[number % 2], 1 + number % 2, 0.05),
        (adam, (weighted, mean)[number % 2], 2 - number % 2, None),
    )
]


def same_as_one_process(case: Case) -> None:
    world = communicator()
    model = build(case.model)
    norm = "local" if case.model == "batch_norm" else None
    pieces = case.accumulate * (world.size if norm else 1)
    data = batches(world.size, case.model)
    reference = train_reference(
        model,
        data,
        optimizer=case.optimizer,
        loss=case.loss,
        accumulate=pieces,
        clip_norm=case.clip_norm,
    )
    plan = plan_of(
        world.size, accumulate=case.accumulate, clip_norm=case.clip_norm, batch_norm=norm
    )
    if world.rank:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    trainable = parallelize(model, plan, optimizer=case.optimizer, loss=case.loss)
    run = record(trainable, [share(pair, world.rank) for pair in data])
    if norm:  # running statistics are rank 0's own, which one process does not have
        weights = {n: w for n, w in run.weights.items() if not n.startswith("1.")}
        learned = {n: p.detach() for n, p in model.named_parameters()}
        run = replace(run, weights={**weights, **learned})
        reference = replace(
            reference, weights={n: w for n, w in reference.weights.items() if n in learned}
        )
    # A bias before BatchNorm has a gradient of rounding alone, of which Adam makes steps.
    assert first_difference(run, reference, 10 * TOLERANCE if norm else TOLERANCE) is None


def table(cases: Iterable[Case]) -> None:
    for case in cases:
        try:
            same_as_one_process(case)
        except Exception as error:
            error.add_note(f"case {case}")
            raise


def test_same_as_one_process_on_two_ranks(ranks: Ranks) -> None:
    ranks(2, table, CASES)


def test_same_as_one_process_on_four_ranks(ranks: Ranks) -> None:
    ranks(4, table, CASES[::3])


def test_one_rank_is_one_process(ranks: Ranks) -> None:
    ranks(1, table, CASES[:2])


def body_sync_batch_norm() -> None:
    """Statistics of all ranks: outputs, gradients and running statistics are one process's."""
    world = communicator()
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None))
    model.append(nn.BatchNorm1d(4, affine=False, track_running_stats=False)).append(nn.Linear(4, 3))
    model.double()
    data = batches(world.size)
    reference = train_reference(model, data, optimizer=sgd, loss=weighted)
    plan = plan_of(world.size, batch_norm="sync")
    trainable = parallelize(model, plan, optimizer=sgd, loss=weighted)
    run = record(trainable, [share(pair, world.rank) for pair in data])
    assert first_difference(run, reference, TOLERANCE) is None
    assert type(model[1]) is nn.BatchNorm1d
    with observe(quiet := Recorder()):
        trainable.eval(*share(data[0], world.rank))
    assert quiet.kinds() == []


def body_own_loop() -> None:
    """Several calls of forward_backward make one step of all their samples."""
    world = communicator()
    model = build("skip")
    (x, y), *_ = batches(world.size)
    assert isinstance(x, torch.Tensor)
    reference = train_reference(model, [(x, y)], optimizer=sgd, loss=weighted)
    trainable = parallelize(model, plan_of(world.size), optimizer=sgd, loss=weighted)
    mine_x, mine_y = share((x, y), world.rank)
    assert isinstance(mine_x, torch.Tensor)
    trainable.forward_backward(mine_x[:1], mine_y[:1], is_last=False)
    trainable.forward_backward(mine_x[1:5], mine_y[1:5], is_last=False)
    with pytest.raises(RuntimeError, match="call forward_backward first"):
        trainable.optimizer_step()
    trainable.forward_backward(mine_x[5:], mine_y[5:])
    with pytest.raises(RuntimeError, match="pass is_last=False to all calls but the last"):
        trainable.forward_backward(mine_x, mine_y)
    result = trainable.optimizer_step()
    torch.testing.assert_close(result.loss.item(), reference.losses[0])
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, reference.weights[name])


def body_unequal_counts() -> None:
    """Ranks with different numbers of samples agree with one process when the loss counts."""
    world = communicator()
    model = build("uneven")
    (x, y), *_ = batches(world.size)
    assert isinstance(x, torch.Tensor)
    reference = train_reference(model, [(x, y)], optimizer=sgd, loss=weighted)
    cut = 3
    rows = slice(0, cut) if world.rank == 0 else slice(cut, None)
    trainable = parallelize(model, plan_of(world.size, accumulate=2), optimizer=sgd, loss=weighted)
    run = record(trainable, [(x[rows], y[rows])])
    assert first_difference(run, reference, TOLERANCE) is None


def body_unequal_means() -> None:
    world = communicator()
    trainable = parallelize(build("skip"), plan_of(world.size), optimizer=sgd, loss=mean)
    before = copy.deepcopy(trainable.module.state_dict())
    x = torch.zeros(3 + world.rank, 3, dtype=torch.float64)
    with raises_by_now(ValueError, match=r"return \(sum, count\)") as caught:
        trainable.step(x, x)
    assert "3 on ranks [0]; 4 on ranks [1]" in str(caught.value)
    for name, weight in trainable.module.state_dict().items():
        assert torch.equal(weight, before[name]) or not world.is_on_host


def body_empty_count() -> None:
    world = communicator()
    trainable = parallelize(build("skip"), plan_of(world.size), optimizer=sgd, loss=weighted)
    x = torch.zeros(2, 3, dtype=torch.float64)
    with raises_by_now(ValueError, match="count of 0 on every rank"):
        trainable.step(x, x)
    one = torch.ones(2, 3, dtype=torch.float64)
    assert trainable.step(x, one if world.rank else x).loss.isfinite()


@pytest.mark.parametrize(
    "body",
    [
        body_sync_batch_norm,
        body_own_loop,
        body_unequal_counts,
        body_unequal_means,
        body_empty_count,
    ],
    ids=lambda body: body.__name__[5:],
)
@pytest.mark.few(2)
def test_loss_contract(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)


# ------------------------------------------------------------------------- the rest of a step


def body_collectives() -> None:
    world = communicator()
    plan = plan_of(world.size, accumulate=2, batch_norm="local", clip_norm=1.0)
    with observe(recorder := Recorder()):
        trainable = parallelize(build("batch_norm"), plan, optimizer=sgd, loss=mean)
    assert recorder.kinds() == [
        ("all_gather", "compare parameters"),
        ("broadcast", "broadcast parameters"),
    ]
    x, y = share(batches(world.size)[0], world.rank)
    trainable.step(x, y)
    with observe(step := Recorder()):
        trainable.step(x, y)
    expected = ["loss and counts", *(f"reduce bucket {n}" for n in range(3)), "broadcast buffers"]
    assert [label for _, label in step.kinds()] == expected
    described = trainable.describe()
    assert [replace(c, sequence=0) for c in described.collectives] == [
        replace(c, sequence=0) for c in step.collectives
    ]
    text = str(described)
    assert "train.accumulate = 2" in text
    assert "0.weight" in text
    with observe(quiet := Recorder()):
        found = trainable.eval(x, y)
    assert quiet.kinds() == []
    assert found.loss.isfinite()
    assert trainable.module.training


def body_state_dict() -> None:
    """A trainable that loads a state goes on as the one that gave it, bit for bit."""
    world = communicator()
    data = [share(pair, world.rank) for pair in batches(world.size)]
    plan = plan_of(world.size)

    def fresh(seed: int) -> Trainable:
        torch.manual_seed(seed)
        return parallelize(Tied().double(), plan, optimizer=adam, loss=mean)

    whole = fresh(0)
    for pair in data:
        whole.step(*pair)
    first = fresh(0)
    for pair in data[:2]:
        first.step(*pair)
    state = copy.deepcopy(first.state_dict())
    assert sorted(state["optimizer"]["state"]) == sorted(
        name for name, _ in first.module.named_parameters()
    )
    second = fresh(1)
    second.step(*data[0])
    second.load_state_dict(state)
    assert second.steps == 2
    for pair in data[2:]:
        second.step(*pair)
    for name, weight in whole.module.state_dict().items():
        assert torch.equal(weight, second.module.state_dict()[name])
    other = parallelize(build("skip"), plan, optimizer=adam, loss=mean)
    wrong = {**state, "model": other.module.state_dict()}
    with pytest.raises(CheckpointMismatchError, match="the saved optimizer does not fit") as caught:
        other.load_state_dict(wrong)
    assert "'into.weight' is saved but not a parameter here" in str(caught.value)


def body_non_finite() -> None:
    world = communicator()
    trainable = parallelize(build("sequential"), plan_of(world.size), optimizer=sgd, loss=mean)
    pair = share(batches(world.size)[0], world.rank)
    trainable.step(*pair)
    before = copy.deepcopy(trainable.module.state_dict())
    broken = "2.weight" if world.rank else "0.bias"
    parameter = dict(trainable.module.named_parameters())[broken]
    hook = parameter.register_hook(lambda gradient: gradient * torch.inf)
    text = r"step 2.*the gradient of '0.bias' on ranks \[0\]; the gradient"
    with raises_by_now(NonFiniteError, match=text):
        trainable.step(*pair)
    for name, weight in trainable.module.state_dict().items():  # momentum goes on of a device's
        assert torch.equal(weight, before[name]) or not world.is_on_host
    hook.remove()
    assert trainable.step(*pair).loss.isfinite()


def body_non_finite_loss() -> None:
    world = communicator()
    trainable = parallelize(build("sequential"), plan_of(world.size), optimizer=sgd, loss=mean)
    x, y = share(batches(world.size)[0], world.rank)
    if world.rank == 1:
        y = y * torch.nan
    text = r"(on rank 1|finite:) the gradient of '2.bias' and 4 more (is not|on ranks \[1\])"
    with raises_by_now(NonFiniteError, match=text):
        trainable.step(x, y)


def body_float16() -> None:
    """An overflow on one rank is skipped by all, halves the scale, and training goes on."""
    world = communicator()
    torch.manual_seed(0)
    plan = replace(plan_of(world.size), precision=Precision(compute="float16"))
    trainable = parallelize(sequential(), plan, optimizer=sgd, loss=mean)
    x, y = torch.randn(8, 3), torch.randn(8, 3)
    assert trainable.loss_scale is not None
    scale = trainable.loss_scale.scale
    before = copy.deepcopy(trainable.module.state_dict())
    huge = trainable.step(x * (1e7 if world.rank else 1), y)
    assert huge.skipped
    assert trainable.loss_scale.scale == scale / 2
    for name, weight in trainable.module.state_dict().items():
        assert torch.equal(weight, before[name])
    results = [trainable.step(x, y) for _ in range(20)]
    assert not results[-1].skipped
    assert results[-1].loss < results[0].loss


def body_bfloat16() -> None:
    world = communicator()
    torch.manual_seed(0)
    plan = replace(plan_of(world.size), precision=Precision(compute="bfloat16", reduce="bfloat16"))
    trainable = parallelize(sequential(), plan, optimizer=sgd, loss=mean)
    x, y = torch.randn(8, 3), torch.randn(8, 3)
    with observe(recorder := Recorder()):
        first = trainable.step(x, y)
    kinds = {c.dtype for c in recorder.collectives if c.label.startswith("reduce bucket")}
    assert kinds == {"bfloat16"}
    assert all(p.dtype is torch.float32 for p in trainable.module.parameters())
    for _ in range(10):
        last = trainable.step(x, y)
    assert last.loss < first.loss


def body_recompute() -> None:
    world = communicator()
    model = nn.Sequential(*(Skip() for _ in range(3))).double()
    data = batches(world.size)
    reference = train_reference(model, data, optimizer=sgd, loss=mean)
    names = list(model.state_dict())
    calls: list[int] = []
    model[1].first.register_forward_hook(lambda *_: calls.append(1))
    plan = plan_of(world.size, recompute=("1", "2"))
    trainable = parallelize(model, plan, optimizer=sgd, loss=mean)
    run = record(trainable, [share(pair, world.rank) for pair in data])
    assert len(calls) == 2 * STEPS
    assert list(model.state_dict()) == names
    assert first_difference(run, reference, TOLERANCE) is None


def body_different_plans() -> None:
    world = communicator()
    plan = plan_of(world.size, clip_norm=1.0 + world.rank)
    trainable = parallelize(build("skip"), plan, optimizer=sgd, loss=mean)
    x = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(PlanError, match=r"train.clip_norm is 1.0 on ranks \[0\]; 2.0 on"):
        trainable.step(x, x)


def body_sampler() -> None:
    world = communicator()
    trainable = parallelize(build("skip"), plan_of(world.size), optimizer=None, loss=mean)
    assert (trainable.data_rank, trainable.data_size) == (world.rank, world.size)
    mine = trainable.sampler(10, 4).next_indices()
    texts = world.gather_bytes(json.dumps(mine).encode(), label="check")
    together = [index for text in texts for index in json.loads(text)]
    assert len(set(together)) == 4
    with pytest.raises(RuntimeError, match="has no optimizer"):
        trainable.optimizer_step()


def body_wrong_losses() -> None:
    world = communicator()
    x = torch.zeros(2, 3, dtype=torch.float64)
    for wrong in (
        lambda output, target: output - target,
        lambda output, target: ((output - target).sum(), "2"),
        lambda output, target: 1.0,
    ):
        trainable = parallelize(build("skip"), plan_of(world.size), optimizer=sgd, loss=wrong)
        with pytest.raises(TypeError, match="expected the loss function to return"):
            trainable.step(x, x)


REST = [
    body_collectives,
    body_state_dict,
    body_non_finite,
    body_non_finite_loss,
    body_float16,
    body_bfloat16,
    body_recompute,
    body_different_plans,
    body_sampler,
    body_wrong_losses,
]


@pytest.mark.few(3)
@pytest.mark.parametrize("body", REST, ids=lambda body: body.__name__[5:])
def test_step(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)


# ---------------------------------------------------------------------------------- refusals


def body_refusals() -> None:
    bad = Plan.from_toml(
        """
[axes]
replicate = 1
tensor = 2
[train]
recompute = ["layers.*"]
[precision]
compute = "float64"
optimizer = "float64"
"""
    )
    with pytest.raises(PlanError) as caught:
        parallelize(normalized(), bad, optimizer=sgd, loss=mean)
    problems = "\n".join(caught.value.problems)
    for text in (
        "line 4: axis tensor = 2 has nothing to cut: give [tensor] rules",
        "line 6: 'layers.*' in [train] recompute matches no module",
        "line 8: compute = 'float64' differs from parameters",
        "line 9: optimizer = 'float64' needs a second copy",
    ):
        assert text in problems
    with pytest.raises(PlanError, match=r"the model has BatchNorm \('1'\): say in \[train\]"):
        parallelize(normalized(), plan_of(2), optimizer=sgd, loss=mean)
    wrong_world = Plan(axes=Axes.of({"replicate": 3}))
    with pytest.raises(PlanError, match="axes multiply to 3"):
        parallelize(sequential(), wrong_world, optimizer=sgd, loss=mean)
    with pytest.raises(PlanError, match="has no effect: the model has no BatchNorm"):
        parallelize(sequential(), plan_of(2, batch_norm="local"), optimizer=sgd, loss=mean)
    partly = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(PlanError, match=r"'1.weight' is on the meta device and '0.weight' is not"):
        parallelize(partly, plan_of(2), optimizer=sgd, loss=mean)
    scale = nn.Module()
    scale.factor = nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(PlanError, match=r"drawn from \[train\] seed: .*Module"):
        parallelize(scale, plan_of(2), optimizer=sgd, loss=mean)


def test_what_cannot_be_laid_out_is_refused_at_once(ranks: Ranks) -> None:
    ranks(2, body_refusals)


class Rotary(nn.Module):
    """Turns pairs of features by a complex buffer, and by a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.polar(torch.ones(2), torch.tensor([0.3, 0.9])))
        self.more = nn.Parameter(torch.tensor([0.5 + 0.5j, 1.0 - 2.0j]))
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.to(self.more.real.dtype).unflatten(-1, (2, 2)))
        turned = torch.view_as_real(pairs * self.turns * self.more).flatten(-2)
        return self.out(turned.to(self.out.weight.dtype))


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_the_dtype_of_parameters_keeps_complex_numbers_complex(ranks: Ranks) -> None:
    def body() -> None:
        world = communicator()
        for name, kind in (("float64", torch.complex64), ("bfloat16", torch.complex128)):
            dtype = getattr(torch, name)
            torch.manual_seed(0)
            one = Rotary()
            one.more.data, one.turns = one.more.data.to(kind), one.turns.to(kind)
            plan = replace(plan_of(world.size), precision=Precision(parameters=name))
            trainable = parallelize(
                copy.deepcopy(one), plan, optimizer=torch.optim.AdamW, loss=F.mse_loss
            )
            x, y = torch.ones(4, 4, dtype=dtype), torch.zeros(4, 2, dtype=dtype)
            trainable.forward_backward(x, y)
            one.out.to(dtype)
            F.mse_loss(one(x), y).backward()
            found = trainable.gradients()
            for key, parameter in one.named_parameters():
                torch.testing.assert_close(found[key], parameter.grad, msg=f"{name} {key}")

    ranks(2, body)
