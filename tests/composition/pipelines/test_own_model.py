"""`parallelize` with axis pipeline: parameters of the model itself, hooks, losses that read."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from meshwright.comm import communicator
from meshwright.composition import parallelize
from meshwright.errors import LayoutError, PipelinePeerError, PlanError
from meshwright.plan import PipelinePlan, Plan, TensorPlan, TrainPlan
from meshwright.testing import Ranks, RanksFailed
from support.in_backward import apply_in_backward
from support.internals.axes import Axes
from support.internals.comm import Unreadable

SCHEDULES = (
    *("gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "zb1p", "zb2p"),
    *("zbv", "vhalf", "vmin", "dualpipev"),
)
RULES = {"layers.*.0": "colwise_gathered", "head": "colwise_gathered"}
STEPS = 3


class Chain(nn.Module):
    """A chain of modules, which stays modules."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
        self.layers, self.head = nn.ModuleList(blocks), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Graph(Chain):
    """No chain: it is traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.layers:
            x = layer(x) + y
        return self.head(x)


class Tied(nn.Module):
    """One weight in the first stage and in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class TiedGraph(Tied):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = y = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh() + y
        return self.head(x)


# ------------------------------------------------------------------ what users do to a model

Change = Callable[[nn.Module], object]
Loss = Callable[[Any, Any], torch.Tensor]


def nothing(model: nn.Module) -> None:
    """Leave it as it is."""


def clamp(gradient: torch.Tensor) -> torch.Tensor:
    """No microbatch and no rank alone can tell what this makes of a gradient."""
    return gradient.clamp(-0.01, 0.01)


def halve(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def hooks_on_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(clamp)


def hooks_behind_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)


def step_in_backward(model: nn.Module) -> None:
    """Let each parameter be stepped as soon as its gradient is there, and by nothing else."""
    optimizers: dict[nn.Parameter, torch.optim.Optimizer] = {}

    def step(parameter: nn.Parameter) -> None:
        if parameter not in optimizers:  # made late, of what is there then
            optimizers[parameter] = torch.optim.Adam([parameter], lr=0.05)
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def stepped_by_torch(model: nn.Module) -> None:
    apply_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})


def gradients_anew(model: nn.Module) -> None:
    """Let hooks put other gradients into the place of some, and take others away."""

    def put(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5

    def take(parameter: nn.Parameter) -> None:
        parameter.grad = None

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(take if "layers.1" in name else put)


def hooks_on_modules(model: Any) -> None:
    model.layers[1].register_full_backward_hook(lambda _, given, __: (given[0] * 3,))
    model.layers[2][0].register_forward_pre_hook(
        lambda _, args, kwargs: ((args[0] * 0.5,), kwargs), with_kwargs=True
    )
    model.head.register_forward_hook(lambda _, __, output: output * 2)
    model.layers[3].register_full_backward_pre_hook(lambda _, given: (given[0] * 2,))


def mse(_: Any) -> Loss:
    return F.mse_loss


def penalty_on_head(model: Any) -> Loss:
    return lambda output, target: F.mse_loss(output, target) + 0.1 * whole(model.head.weight)


def whole(weight: Any) -> torch.Tensor:
    """A penalty on a weight, of which a rank may hold a part."""
    full = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return full.square().sum()


def head_in_loss(model: Any) -> Loss:
    return lambda output, target: F.mse_loss(model.head(output), target)


# ------------------------------------------------------------------------------- comparison


def plan_of(
    schedule: str, train: TrainPlan | None = None, *, rules: Any = RULES, **axes: int
) -> Plan:
    pipeline = PipelinePlan(schedule=schedule, microbatches=4 if schedule != "1f1b" else 2)  # pyrefly: ignore
    tensor = TensorPlan(rules=rules if axes.get("tensor", 1) > 1 else None)
    return Plan(axes=Axes.of(axes), pipeline=pipeline, train=train or TrainPlan(), tensor=tensor)


def built(kind: type[nn.Module], change: Change = nothing) -> Any:
    torch.manual_seed(0)
    model = kind().double()
    change(model)
    return model


def data(rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    x, y = (torch.randn(rows, 4, generator=draw).double() for _ in range(2))
    return x, y


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def alone(
    kind: type[nn.Module], change: Change, loss_of: Callable[[Any], Loss]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a plain loop in one process."""
    model = built(kind, change)
    loss, optimizer, (x, y), losses = loss_of(model), momentum(model.parameters()), data(), []
    for _ in range(STEPS):
        found = loss(model(x), y)
        found.backward()
        losses.append(found.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def laid_out(model: Any, plan: Plan, loss: Loss, optimizer: Any = momentum) -> Any:
    return parallelize(model, plan, optimizer=optimizer, loss=loss, example=(data()[0][:2],))


def step(trainable: Any) -> float:
    rows = 16 // trainable.data_size
    mine = slice(trainable.data_rank * rows, (trainable.data_rank + 1) * rows)
    x, y = data()
    return trainable.step(x[mine], y[mine]).loss.item()


Case = tuple[type[nn.Module], Change, Callable[[Any], Loss]]


def body_as_alone(plan: Plan, cases: list[Case], *, is_made_before: bool = False) -> None:
    for kind, change, loss_of in cases:
        model = built(kind, change)
        before = momentum(model.parameters())
        recipe = (lambda _, o=before: o) if is_made_before else momentum
        trainable = laid_out(model, plan, loss_of(model), recipe)
        losses, weights = alone(kind, change, loss_of)
        case = (kind.__name__, change.__name__, loss_of.__name__, plan.pipeline.schedule)
        found = [step(trainable) for _ in range(STEPS)]
        assert found == pytest.approx(losses, rel=1e-10), case
        for name, value in trainable.weights().items():
            torch.testing.assert_close(
                value, weights[name], rtol=1e-9, atol=1e-12, msg=f"{case} {name}"
            )


FEW: list[Case] = [(Chain, hooks_on_modules, head_in_loss), (Graph, nothing, penalty_on_head)]
CASES: list[Case] = [
    *FEW,
    (Chain, hooks_on_modules, penalty_on_head),
    (Graph, nothing, head_in_loss),
    (Tied, nothing, penalty_on_head),
    (TiedGraph, nothing, penalty_on_head),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_hooks_and_weights_in_losses_are_those_of_one_process(ranks: Ranks, schedule: str) -> None:
    ranks(2, body_as_alone, plan_of(schedule, pipeline=2), CASES, is_made_before=schedule == "zbv")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "other", [pytest.param("replicate", marks=pytest.mark.slow), "shard", "tensor"]
)
def test_hooks_and_weights_in_losses_beside_other_axes(ranks: Ranks, other: str) -> None:
    ranks(4, body_as_alone, plan_of("zbv", pipeline=2, **{other: 2}), FEW)


@pytest.mark.slow
def test_flat_gradients_of_shards_are_what_hooks_have_made_of_them(ranks: Ranks) -> None:
    cases: list[Case] = [(Graph, step_in_backward, mse), (Graph, gradients_anew, mse)]
    ranks(2, body_as_alone, no_pipeline(TrainPlan(flat=True), shard=2), cases)


def body_hooks_on_gradients() -> None:
    plan = plan_of("zbv", pipeline=2)
    for kind in (Chain, Graph, Tied):
        for change in (hooks_on_gradients, step_in_backward, stepped_by_torch):
            with pytest.raises(
                PlanError, match=r"parameter '\w.*weight' has a hook on its gradient"
            ):
                laid_out(built(kind, change), plan, F.mse_loss)
    # Later, on one rank: both say so, before anything is sent, and the next step is a step again.
    for kind in (Chain, Graph):
        model = built(kind)
        trainable = laid_out(model, plan, F.mse_loss)
        losses, _ = alone(kind, nothing, mse)
        assert step(trainable) == pytest.approx(losses[0], rel=1e-10)
        is_here = not isinstance(model.head.weight, Unreadable)
        for put in ("register_hook", "register_post_accumulate_grad_hook"):
            handle = getattr(model.head.weight, put)(clamp) if is_here else None
            with pytest.raises(
                LayoutError if is_here else PipelinePeerError,
                match="parameter 'head.weight' has a hook on its gradient",
            ):
                step(trainable)
            if handle is not None:
                handle.remove()
        assert step(trainable) == pytest.approx(losses[1], rel=1e-10)


def test_hooks_on_gradients_are_refused(ranks: Ranks) -> None:
    ranks(2, body_hooks_on_gradients)


@pytest.mark.few(0, slow=3)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hooks_and_weights_in_losses_under_all_schedules(ranks: Ranks, schedule: str) -> None:
    ranks(2, body_as_alone, plan_of(schedule, pipeline=2), CASES, is_made_before=True)
    accumulated = TrainPlan(accumulate=2, flat=True)
    ranks(4, body_as_alone, plan_of(schedule, accumulated, pipeline=2, shard=2), CASES)


@pytest.mark.soak
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hooks_and_weights_in_losses_on_all_layouts(ranks: Ranks, schedule: str) -> None:
    for is_made_before in (False, True):
        plan = plan_of(schedule, pipeline=2)
        ranks(2, body_as_alone, plan, CASES, is_made_before=is_made_before)
    for other in ("replicate", "shard"):
        accumulated = TrainPlan(accumulate=2, flat=True)
        ranks(4, body_as_alone, plan_of(schedule, pipeline=2, **{other: 2}), CASES)
        ranks(4, body_as_alone, plan_of(schedule, accumulated, pipeline=2, **{other: 2}), CASES)
    ranks(4, body_as_alone, plan_of(schedule, pipeline=2, tensor=2), CASES[:4])


# ------------------------------------------------------------------- the objects of the model


def body_objects() -> None:
    rank = communicator().rank
    for kind, schedule in ((Chain, "1f1b"), (Graph, "1f1b"), (Chain, "zbv"), (TiedGraph, "zbv")):
        model = built(kind)
        given = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in given.items():
            parameter.requires_grad_("bias" not in name)
            parameter.decays = name  # as groups of optimizers are made of
        before = momentum(model.parameters())
        trainable = laid_out(
            model, plan_of(schedule, pipeline=2), F.mse_loss, lambda _, o=before: o
        )
        mine = trainable.named_parameters()
        for name, parameter in mine.items():
            assert parameter is given[name] is model.get_parameter(name)
            assert (parameter.requires_grad, parameter.decays in given) == (
                "bias" not in name,
                True,
            )
        # The optimizer that was there before steps what this rank has, and forgets the rest.
        held = {id(parameter) for parameter in trainable.module.parameters()}
        assert held == {id(p) for group in before.param_groups for p in group["params"]}
        assert step(trainable) != step(trainable)
        trained = [name for name, p in built(kind).named_parameters() if "bias" not in name]
        assert [*trainable.state_dict()["optimizer"]["state"]] == trained
        others = {n: p for n, p in model.named_parameters() if id(p) not in held}
        look_at_others(others, rank)
        with pytest.raises(LayoutError, match="is held by stage"):
            model(data()[0])
        with pytest.raises(LayoutError, match="is held by stage"):
            model.state_dict()


def look_at_others(others: dict[str, Any], rank: int) -> None:
    """What other ranks hold looks as it did, has no memory, and is refused by name."""
    assert others
    for name, other in others.items():
        assert isinstance(other, nn.Parameter)
        assert (other.numel(), other.grad) == (16 if "weight" in name else 4, None)
        with torch._C.DisableTorchFunctionSubclass():
            assert other.untyped_storage().nbytes() == 8
        text = (
            rf"parameter '{name}' is held by stage \d, on rank {1 - rank}; its value .* rank {rank}"
        )
        for read in (torch.sum, torch.Tensor.detach, torch.Tensor.tolist, lambda p: 2.0 * p):
            with pytest.raises(LayoutError, match=text):
                read(other)
        assert f"parameter '{name}' is held" in repr(other)


def test_stages_hold_the_parameters_of_the_model_itself(ranks: Ranks) -> None:
    ranks(2, body_objects)


def body_stale_optimizers() -> None:
    for axes in ({"shard": 2}, {"tensor": 2}, {"pipeline": 2, "shard": 1}):
        model = built(Chain) if "pipeline" not in axes else built_on_meta()
        plan = plan_of("1f1b", **axes) if "pipeline" in axes else no_pipeline(**axes)
        before = momentum(model.parameters())
        with pytest.raises(PlanError, match=r"10 parameters of the SGD, 'layers.0.0.weight' first"):
            laid_out(model, plan, F.mse_loss, lambda _, o=before: o)
    model = built_on_meta()
    for parameter in model.parameters():
        parameter.decays = True
        parameter.register_hook(torch.zeros_like)
    trainable = laid_out(model, no_pipeline(replicate=2), F.mse_loss)
    weights = trainable.weights()
    step(trainable)
    assert all(parameter.decays for parameter in trainable.module.parameters())
    torch.testing.assert_close(trainable.weights(), weights, rtol=0, atol=0)


def built_on_meta() -> Any:
    with torch.device("meta"):
        return Chain().double()


def no_pipeline(train: TrainPlan | None = None, **axes: int) -> Plan:
    rules = RULES if "tensor" in axes else None
    return Plan(axes=Axes.of(axes), train=train or TrainPlan(), tensor=TensorPlan(rules=rules))


def test_optimizers_of_parameters_that_were_replaced_are_refused(ranks: Ranks) -> None:
    ranks(2, body_stale_optimizers)


def given_anew(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.ones(4, 4).double())


def loaded_by_assignment(model: Any) -> None:
    model.load_state_dict(built(Graph).state_dict(), assign=True)


def body_given_anew(kind: type[nn.Module], plan: Plan, change: Change) -> None:
    before, model = built(Graph), built(kind)
    change(before)
    step(laid_out(before, plan, F.mse_loss))
    trainable = laid_out(model, plan, F.mse_loss)
    step(trainable)
    change(model)
    step(trainable)


def test_parameters_that_are_given_anew_are_refused_by_name(ranks: Ranks) -> None:
    for kind, change, axes, name in (
        (Chain, given_anew, {"replicate": 2}, "head.weight"),
        (Graph, loaded_by_assignment, {}, "layers.[02].0.weight"),
    ):
        plan = plan_of("1f1b", pipeline=2, **axes)
        text = rf"LayoutError: parameter '{name}' was given anew after parallelize"
        with pytest.raises(RanksFailed, match=text):
            ranks(4 if axes else 2, body_given_anew, kind, plan, change)


class Scaled(nn.Module):
    """A layer with a buffer, and with one that no forward uses."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("unused", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) * self.scale)


class ScaledChain(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(4))


class ScaledGraph(ScaledChain):
    forward = Graph.forward


def scales_in_place(model: Any) -> None:
    for layer in model.layers:
        if not isinstance(layer.scale, Unreadable):
            layer.scale.mul_(0.5)


def scales_anew(model: Any) -> None:
    for layer in model.layers:
        layer.scale = torch.full((4,), 0.5).double()


def frozen_in_part(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("1" not in name)


CHANGES = (scales_in_place, scales_anew, frozen_in_part)


def body_changed_later(plan: Plan) -> None:
    """What is done to the model after it was laid out is as if it had been done before."""
    for kind in (ScaledChain, ScaledGraph):
        for change in CHANGES:
            model = built(kind)
            trainable = laid_out(model, plan, F.mse_loss)
            change(model)
            if kind is ScaledGraph and change is scales_anew:
                with pytest.raises(
                    (LayoutError, PipelinePeerError), match=r"'layers.\d.scale' was given anew"
                ):
                    step(trainable)
                continue
            losses, weights = alone(kind, change, mse)
            assert [step(trainable) for _ in range(STEPS)] == pytest.approx(losses, rel=1e-10)
            for name, value in trainable.weights().items():
                torch.testing.assert_close(
                    value, weights[name], rtol=1e-9, atol=1e-12, msg=f"{change.__name__} {name}"
                )


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zbv", marks=pytest.mark.slow)])
def test_what_is_changed_after_a_model_was_laid_out_holds(ranks: Ranks, schedule: str) -> None:
    ranks(2, body_changed_later, plan_of(schedule, pipeline=2))


@pytest.mark.slow
@pytest.mark.parametrize("other", ["replicate", "shard"])
def test_what_is_changed_later_holds_beside_other_axes(ranks: Ranks, other: str) -> None:
    ranks(4, body_changed_later, plan_of("1f1b", pipeline=2, **{other: 2}))


# ------------------------------------------------- writes to tied parameters, between steps


class TiedTwice(TiedGraph):
    """One weight in three stages and more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight = self.layers[3].weight = self.first.weight


def listed(model: Any, trainable: Any) -> list[nn.Parameter]:
    named = (model if trainable is None else trainable).named_parameters()
    return [*dict(named).values()]


def decays(model: Any, trainable: Any) -> None:
    for parameter in listed(model, trainable):
        parameter.mul_(0.75)


def decays_data(model: Any, trainable: Any) -> None:
    for parameter in listed(model, trainable):
        parameter.data.mul_(0.75)


def by_the_first_name(model: Any, trainable: Any) -> None:
    if not isinstance(model.first.weight, Unreadable):
        model.first.weight.data.add_(0.1)


def by_the_last_name(model: Any, trainable: Any) -> None:
    if not isinstance(model.head.weight, Unreadable):
        model.head.weight.data.add_(0.1)


def freezes(model: Any, trainable: Any) -> None:
    for parameter in listed(model, trainable):
        parameter.requires_grad_(parameter.dim() == 1)


WRITES = (decays, decays_data, by_the_first_name, by_the_last_name, freezes)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def body_written(plan: Plan, kinds: tuple[type[nn.Module], ...]) -> None:
    whole = plan.axes.size("shard") == plan.axes.size("tensor") == 1
    for kind in kinds:
        for write in WRITES if whole and not plan.train.flat else WRITES[:1]:
            one, model = built(kind), built(kind)
            optimizer = adam(one.parameters())
            trainable = laid_out(model, plan, F.mse_loss, adam)
            for number in range(4):
                if number in (1, 3):
                    with torch.no_grad():
                        write(one, None)
                        write(model, trainable)
                x, y = data()
                loss = F.mse_loss(one(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                case = (kind.__name__, write.__name__, plan.pipeline.schedule)
                assert step(trainable) == pytest.approx(loss.item(), rel=1e-10), case
                if number == 2:  # a state goes on as if nothing had been
                    state = trainable.state_dict()
                    trainable.load_state_dict(state)
            found = trainable.weights()
            for name, value in one.state_dict().items():
                torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=f"{case}")
            assert {*trainable.named_parameters()} <= {*dict(one.named_parameters())}


KINDS = (Tied, TiedGraph, TiedTwice)


@pytest.mark.parametrize(
    "schedule",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in ("1f1b", "zbv")), "interleaved1f1b"],
)
@pytest.mark.slow
def test_writes_to_tied_parameters_take_effect(ranks: Ranks, schedule: str) -> None:
    ranks(2, body_written, plan_of(schedule, pipeline=2), KINDS)


@pytest.mark.parametrize(
    "other",
    ["shard", *(pytest.param(each, marks=pytest.mark.slow) for each in ("replicate", "tensor"))],
)
def test_writes_to_tied_parameters_beside_other_axes(ranks: Ranks, other: str) -> None:
    rules = {"layers.0": "colwise_gathered"}  # of the layers that are not tied
    plan = plan_of("zbv", rules=rules, pipeline=2, **{other: 2})
    ranks(4, body_written, plan, (TiedTwice,))


@pytest.mark.few(0, slow=2)
@pytest.mark.parametrize("other", ["replicate", "shard"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_writes_to_tied_parameters_everywhere(ranks: Ranks, schedule: str, other: str) -> None:
    for train in (TrainPlan(accumulate=2), TrainPlan(flat=True)):
        plan = plan_of(schedule, train, pipeline=2, **{other: 2})
        ranks(4, body_written, plan, KINDS)


def body_written_apart(plan: Plan) -> None:
    """Rank 0 alone writes what stages on both ranks hold: all ranks say so, before they step."""
    for kind, factor in ((Tied, 1.001), (TiedGraph, 0.5)):
        model = built(kind)
        trainable = laid_out(model, plan, F.mse_loss)
        step(trainable)
        if communicator().rank == 0:
            model.first.weight.data.mul_(factor)
        with pytest.raises(
            LayoutError, match=r"'first.weight' is held by .*ranks \[0, 1\].*differ"
        ):
            step(trainable)


def test_a_write_to_one_of_several_copies_is_refused_by_name(ranks: Ranks) -> None:
    ranks(2, body_written_apart, plan_of("1f1b", pipeline=2))


# ------------------------------------------------------------------------------- losses, refused


class WithWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4).double())

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output * self.weight, target)


def stranger(_: Any) -> Loss:
    weight = torch.ones(4, requires_grad=True)
    return lambda output, target: F.mse_loss(output * weight, target)


def penalty_on_first(model: Any) -> Loss:
    first = model.layers[0][0].weight
    return lambda output, target: F.mse_loss(output, target) + first.square().sum()


def penalty_on_all(model: Any) -> Loss:
    return lambda output, target: (
        F.mse_loss(output, target)
        + sum(parameter.square().sum() for parameter in model.parameters())
    )


def penalty_on_part(model: Any) -> Loss:
    return lambda o, target: F.mse_loss(o, target) + model.layers[0][0].weight.square().sum()


def penalty_on_part_whole(model: Any) -> Loss:
    return lambda output, target: F.mse_loss(output, target) + whole(model.layers[0][0].weight)


def penalty_on_part_of_head(model: Any) -> Loss:
    return lambda output, target: F.mse_loss(output, target) + model.head.weight.square().sum()


def body_steps(kind: type[nn.Module], plan: Plan, loss_of: Callable[[Any], Loss]) -> None:
    model = built(kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tensor attribute .* was assigned during export")
        trainable = laid_out(model, plan, loss_of(model))
    step(trainable)


def with_weight(_: Any) -> Loss:
    return WithWeight()


FIRST = r"'layers.0.0.weight' is held by stage 0, on rank 0; its value was asked for on rank 1"
OWN = "the loss, a WithWeight, has the parameter 'weight'"
REFUSED: dict[str, tuple[type[nn.Module], Plan, Callable[[Any], Loss], str]] = {
    "another stage's": (Chain, plan_of("1f1b", pipeline=2), penalty_on_first, FIRST),
    "a stranger in a graph": (
        *(Graph, plan_of("1f1b", pipeline=2), stranger),
        "requires grad and is no parameter of the",
    ),
    "a shard": (
        *(Chain, no_pipeline(shard=2), penalty_on_part),
        "'layers.0.0.weight' when each rank of axi",
    ),
    "a part of a matrix": (
        *(Chain, no_pipeline(tensor=2), penalty_on_part),
        "reads 'layers.0.0.weight', of which each",
    ),
    "its own": (Chain, no_pipeline(replicate=2), with_weight, OWN),
    "all in a graph": (Graph, plan_of("zb1p", pipeline=2), penalty_on_all, FIRST),
    "its rank's in a v": (
        *(Chain, plan_of("zbv", pipeline=2), penalty_on_first),
        "reads parameter 'layers.0.0.weight",
    ),
    "a stranger": (
        *(Chain, no_pipeline(replicate=2), stranger),
        "requires grad and is no parameter of the mo",
    ),
    "a whole shard": (
        *(Graph, no_pipeline(shard=2), penalty_on_part_whole),
        "reads parameter 'layers.0.0.weight'",
    ),
    "its own in stages": (Chain, plan_of("1f1b", pipeline=2), with_weight, OWN),
}
QUICK = 5
"""Of `REFUSED`, so many run in `make test`."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if number < QUICK else [pytest.mark.slow])
        for number, name in enumerate(REFUSED)
    ],
)
def test_losses_that_read_what_they_may_not_are_refused_by_name(ranks: Ranks, name: str) -> None:
    kind, plan, loss_of, text = REFUSED[name]
    with pytest.raises(RanksFailed, match=text):
        ranks(2, body_steps, kind, plan, loss_of)


def test_a_loss_on_this_ranks_part_of_a_weight_is_refused(ranks: Ranks) -> None:
    plan = no_pipeline(shard=2, tensor=2)
    with pytest.raises(RanksFailed, match=r"reads 'head.weight', of which each rank of axis"):
        ranks(4, body_steps, Chain, plan, penalty_on_part_of_head)
    ranks(4, body_as_alone, plan, [(Chain, nothing, head_in_loss)])


# ------------------------------------------------------------------------ what forward leaves


class Leaving(nn.Module):
    """A layer that keeps what its last forward has found, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.found, self.calls = nn.Linear(4, 4), torch.zeros(()).double(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh()
        self.found = y.square().mean()
        self.calls += 1
        return y


class LeavingChain(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Leaving() for _ in range(4)), Leaving()


class Counting(nn.Module):
    """A layer that counts its forwards, and keeps what it has made in the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.kept = nn.Linear(4, 4), 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.kept is None:
            self.kept = torch.full((4,), 2.0, dtype=x.dtype, device=x.device)
        return self.linear(x).tanh() * self.kept


class Measuring(nn.Linear):
    """A layer that measures what it makes."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = super().forward(input)
        self.found = y.square().mean().item()
        return y


class LeavingNumbers(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Measuring(4, 4) for _ in range(4))


class LeavingHead(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Counting() for _ in range(4)), Leaving()


class LeavingGraph(Chain):
    """What its own forward leaves is of no stage."""

    found = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        self.found = x.square().mean()
        return self.head(x)


class CountingGraph(Graph):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * 0.9**self.calls


def left_by_head(model: Any) -> Loss:
    return lambda output, target: F.mse_loss(output, target) + model.head.found


def left_by_first(model: Any) -> Loss:
    return lambda output, target: F.mse_loss(output, target) + model.layers[0].found


def left_by_model(model: Any) -> Loss:
    return lambda output, target: F.mse_loss(output, target) + model.found


def body_left() -> None:
    for schedule in ("1f1b", "zb1p", "zbv"):
        body_as_alone(plan_of(schedule, pipeline=2), [(LeavingHead, nothing, left_by_head)])
    model = built(LeavingHead)
    trainable = laid_out(model, plan_of("1f1b", pipeline=2), F.mse_loss)
    for _ in range(3):
        step(trainable)
    # Looking at how the model runs leaves no trace: each forward is one of a microbatch.
    own = [p.calls for p in trainable.module.modules() if isinstance(p, Leaving | Counting)]
    assert {*own} == {6}
    with pytest.raises(
        PlanError, match="module 'layers.0' leaves a value in the attribute 'found'"
    ):
        laid_out(built(LeavingNumbers), plan_of("zbv", pipeline=2), F.mse_loss)
    with pytest.raises(PlanError, match="changes its attribute 'calls'"):
        laid_out(built(CountingGraph), plan_of("1f1b", pipeline=2), F.mse_loss)


def test_what_forward_leaves_on_modules_is_right_or_refused(ranks: Ranks) -> None:
    ranks(2, body_left)
    for kind, loss_of, text in (
        (LeavingChain, left_by_first, "forward of module 'layers.0' leaves a value in the attribu"),
        (
            LeavingGraph,
            left_by_model,
            "forward of the model .LeavingGraph. leaves a value in the a",
        ),
    ):
        for schedule in ("1f1b", "zbv"):
            with pytest.raises(RanksFailed, match=text):
                ranks(2, body_steps, kind, plan_of(schedule, pipeline=2), loss_of)


def body_evaluation() -> None:
    for kind, schedule in ((Chain, "zbv"), (Graph, "1f1b")):
        one, model = built(kind), built(kind)
        trainable = laid_out(model, plan_of(schedule, pipeline=2), penalty_on_head(model))
        x, y = data()
        wanted = penalty_on_head(one)(one(x), y).float()
        torch.testing.assert_close(trainable.eval(x, y).loss, wanted.detach())
        failing = laid_out(built(kind), plan_of(schedule, pipeline=2), refusing)
        for _ in range(2):
            with pytest.raises((ValueError, PipelinePeerError), match="no such target"):
                failing.eval(x, y)


def refusing(_: torch.Tensor, __: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such target")


def test_the_loss_of_an_evaluation_is_computed_where_the_last_stage_is(ranks: Ranks) -> None:
    ranks(2, body_evaluation)


# --------------------------------------------------------------------------- modules taken apart


def hook(*_: Any) -> None:
    """Do nothing."""


def body_modules() -> None:
    plan = plan_of("1f1b", pipeline=2)
    put: dict[str, Callable[[Any], object]] = {
        "forward hook of module 'layers.1'": lambda m: m.layers[1].register_forward_hook(hook),
        "backward hook of the model": lambda m: m.register_full_backward_hook(hook),
        "state_dict pre-hook of module 'head'": lambda m: m.head.register_state_dict_pre_hook(hook),
        "forward pre-hook of all modules": lambda _: register_module_forward_pre_hook(hook),
    }
    for text, change in put.items():
        model = built(Graph)
        handle: Any = change(model)
        with pytest.raises(PlanError, match=text):
            laid_out(model, plan, F.mse_loss)
        handle.remove()
    model = built(Chain)
    model.register_load_state_dict_post_hook(hook)
    with pytest.raises(PlanError, match="load_state_dict post-hook of the model itself .Chain."):
        laid_out(model, plan, F.mse_loss)
    # Later, too: in the next step or evaluation.
    chain, graph = built(Chain), built(Graph)
    found = [laid_out(model, plan, F.mse_loss) for model in (chain, graph)]
    for model, trainable in zip((chain, graph), found, strict=True):
        for register in (model.register_forward_hook, model.layers.register_forward_pre_hook):
            handle = register(hook)
            for act in (step, lambda trainable: trainable.eval(*data())):
                with pytest.raises(LayoutError, match="would never run: put it on a module in one"):
                    act(trainable)
            handle.remove()
    handle = graph.head.register_full_backward_hook(hook)
    with pytest.raises(LayoutError, match="backward hook on module 'head'.*would never run"):
        step(found[1])
    handle.remove()
    chain.head.register_full_backward_hook(hook)
    graph.train()
    assert [step(trainable) for trainable in found]
    graph.eval()
    with pytest.raises(LayoutError, match="the mode of module 'Graph' was changed, .* traced"):
        step(found[1])
    chain.eval()
    assert not chain.head.training


class Penalized(nn.Module):
    """Reads its head once more behind it, so that tracing gives the head to two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.head(self.norm(self.layer(x)))
        return y, 0.1 * sum(p.square().sum() for p in self.head.parameters())


def penalized_loss(output: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    return (output[0] - y).square().mean() + output[1]


def what_two_stages_of_a_rank_hold(schedule: str) -> None:
    torch.manual_seed(0)
    model = Penalized().double()
    one = copy.deepcopy(model)
    x, y = torch.randn(8, 4).double(), torch.randn(8, 3).double()
    plan = f'[axes]\npipeline = 2\n[pipeline]\nschedule = "{schedule}"\nmicrobatches = 4\n'
    trainable = parallelize(
        model,
        Plan.from_toml(plan),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        loss=penalized_loss,
        example=x,
    )
    optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
    for number in range(3):
        optimizer.zero_grad()
        penalized_loss(one(x), y).backward()
        handles = [
            parameter.register_hook(lambda gradient: 0.5 * gradient)
            for parameter in model.head.parameters()
            if number == 1 and not isinstance(parameter, Unreadable)
        ]
        if number == 1:
            with pytest.raises((LayoutError, PipelinePeerError), match="'head.*' has a hook on it"):
                trainable.forward_backward(x, y)
            for handle in handles:
                handle.remove()
        trainable.forward_backward(x, y)
        found = trainable.gradients()
        for name, parameter in one.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12)
        optimizer.step()
        trainable.optimizer_step()
        state = trainable.state_dict()["model"]
        for name, value in one.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", ["zbv", "interleaved1f1b"])
def test_what_two_stages_of_a_rank_hold_is_one_parameter(ranks: Ranks, schedule: str) -> None:
    ranks(2, what_two_stages_of_a_rank_hold, schedule)


def test_hooks_of_modules_that_are_taken_apart_are_refused(ranks: Ranks) -> None:
    ranks(2, body_modules)


def body_trial() -> None:
    """The runs in which a cut model is compared with the whole one leave it as it is."""
    model = built(LeavingChain)
    calls: list[int] = []
    model.head.linear.bias.register_hook(lambda _: calls.append(1))
    before = model.layers[0].found
    model.layers[0].linear.weight.grad = torch.ones(4, 4).double()
    rules = {"layers.*.linear": "colwise_gathered"}
    plan = Plan(axes=Axes.of({"tensor": 2}), tensor=TensorPlan(rules=rules))
    laid_out(model, plan, F.mse_loss)
    assert model.layers[0].found is before
    assert (model.layers[0].calls, model.head.calls, calls) == (0, 0, [])


def test_comparisons_leave_attributes_and_hooks_alone(ranks: Ranks) -> None:
    ranks(2, body_trial)
