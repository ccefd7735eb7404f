"""Optimizers and norms over every kind of parameter: the numbers of one process, or a refusal."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import meshwright as mw
from meshwright.comm import communicator
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import ModuleWrapPolicy, ShardingStrategy
from meshwright.gradients import check_optimizer
from meshwright.mesh import init_device_mesh
from meshwright.plan import PipelinePlan, Plan, TensorPlan, TrainPlan
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel
from meshwright.testing import Ranks
from support.internals.axes import Axes
from support.internals.comm import GradientPart, gradient_part, spread_of

Wrap = Callable[[nn.Module], Any]


def net(rows: int = 3) -> nn.Module:
    """Rows that 2 and 4 ranks divide, and a last layer with ``rows``."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, rows)).double()


def uneven() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 7), nn.Linear(7, 3)).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).double()


def share(whole: torch.Tensor) -> torch.Tensor:
    world = communicator()
    return whole.chunk(world.size)[world.rank]


# ----------------------------------------------------------------------------------- layouts


def in_class(model: nn.Module, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The `NO_SHARD`", FutureWarning)
        return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **options)


def hybrid_mesh() -> Any:
    size = communicator().size
    return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))


def hybrid_class(model: nn.Module, **options: Any) -> Any:
    hybrid = ShardingStrategy.HYBRID_SHARD
    return in_class(model, sharding_strategy=hybrid, device_mesh=hybrid_mesh(), **options)


def sharded(model: nn.Module, **options: Any) -> Any:
    for layer in model:
        if isinstance(layer, nn.Linear):
            mw.fully_shard(layer, **options)
    return mw.fully_shard(model, **options)


def cut(model: nn.Module) -> Any:
    mesh = init_device_mesh("cpu", (communicator().size,), mesh_dim_names=("tensor",))
    return mw.parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


PARTS: dict[str, Wrap] = {
    "flat": in_class,
    "original": partial(in_class, use_orig_params=True),
    "grad op": partial(in_class, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "hybrid flat": hybrid_class,
    "hybrid original": partial(hybrid_class, use_orig_params=True),
}
"""With parameters of which each rank holds a plain part."""

WHOLE: dict[str, Wrap] = {
    "replicate": mw.replicate,
    "fully_shard": sharded,
    "hybrid": lambda model: sharded(model, mesh=hybrid_mesh()),
    "whole": partial(in_class, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True),
}
"""With whole parameters, or DTensors."""


def backward(model: nn.Module, step: int, *, is_cut: bool = False) -> None:
    world = communicator()
    part = batch(step) if is_cut else batch(step).chunk(world.size)[world.rank]
    model(part).square().mean().backward()


@contextlib.contextmanager
def all_whole(model: Any) -> Iterator[nn.Module]:
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model):
            yield model.module
    else:
        yield model


def assert_equal(model: Any, one: nn.Module, why: str) -> None:
    with all_whole(model) as whole:
        for (name, expected), found in zip(one.named_parameters(), whole.parameters(), strict=True):
            full = found.full_tensor() if hasattr(found, "full_tensor") else found
            torch.testing.assert_close(
                full, expected, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{why} {n}: {text}"
            )


# ------------------------------------------------------------------------------------- norms

NORMS: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "clip_grad_norm_": lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.01),
    "foreach": lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.01, foreach=True),
    "each": lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.01, foreach=False),
    "maximum": lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.01, norm_type=math.inf),
    "get_total_norm": lambda ps: torch.nn.utils.get_total_norm(
        [p.grad for p in ps if p.grad is not None]
    ),
    "by hand": lambda ps: sum(p.grad.norm() ** 2 for p in ps if p.grad is not None),
    "of data": lambda ps: sum(p.grad.detach().data.norm(2) for p in ps if p.grad is not None),
    "of squares": lambda ps: sum((p.grad**2).sum() for p in ps if p.grad is not None),
    "in another dtype": lambda ps: sum(
        p.grad.float().square().sum() for p in ps if p.grad is not None
    ),
    "largest": lambda ps: max(p.grad.abs().max() for p in ps if p.grad is not None),
    "of one vector": lambda ps: torch.cat(
        [p.grad.view(-1) for p in ps if p.grad is not None]
    ).norm(),
    "of clones": lambda ps: sum(p.grad.clone().norm() for p in ps if p.grad is not None),
    "of detached clones": lambda ps: sum(
        p.grad.clone().detach().norm() for p in ps if p.grad is not None
    ),
    "dot": lambda ps: [p.grad.view(-1) @ p.grad.view(-1) for p in ps if p.grad is not None],
}


def refuse_norms(parameters: list[nn.Parameter]) -> None:
    """What would be a norm of this rank's part raises, and changes nothing."""
    before = [None if p.grad is None else p.grad.clone() for p in parameters]
    for name, norm in NORMS.items():
        with pytest.raises(RuntimeError, match="each rank holds a part of '.*clip_grad_norm_"):
            pytest.fail(f"{name} gave {norm(parameters)}")
    for parameter, old in zip(parameters, before, strict=True):
        assert (parameter.grad is None) is (old is None)
        assert old is None or torch.equal(parameter.grad, old)


def body_norms() -> None:
    world = communicator()
    layouts = {
        n: w for n, w in (*PARTS.items(), *WHOLE.items()) if "hybrid" not in n or world.size > 2
    }
    for name, wrap in layouts.items():
        one, model = net(), wrap(net())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (one, model)]
        for step in range(3):
            one(batch(step)).square().mean().backward()
            backward(model, step)
            held = list(model.parameters())
            if name in PARTS:
                refuse_norms(held)
                found = mw.clip_grad_norm_(held, 0.1)
            else:
                found = torch.nn.utils.clip_grad_norm_(held, 0.1)
            expected = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            assert float(found) == pytest.approx(float(expected), rel=1e-9), name
            for optimizer, module in zip(optimizers, (one, model), strict=True):
                torch.nn.utils.clip_grad_value_(module.parameters(), 0.02)
                optimizer.step()
                optimizer.zero_grad(set_to_none=step != 1)
                buffers = [own["momentum_buffer"] for own in optimizer.state.values()]
                assert GradientPart not in map(type, buffers)
            assert_equal(model, one, name)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_norm_is_of_all_ranks_or_is_refused(ranks: Ranks, size: int) -> None:
    ranks(size, body_norms)


def body_norms_of_flat_groups() -> None:
    """Of units, and of parameters that axis tensor has cut."""
    world = communicator()
    for is_cut, wrap in ((False, sharded), (True, cut)):
        one, model = net(), wrap(net())
        flats = mw.flat_groups(model)
        optimizers = [torch.optim.AdamW(each, lr=0.1) for each in (one.parameters(), flats)]
        for step in range(3):
            one(batch(step)).square().mean().backward()
            backward(model, step, is_cut=is_cut)
            refuse_norms([flat for flat in flats if spread_of(flat)])
            expected = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            # DTensors, all of them where a unit has them all, have a norm over all ranks.
            if not is_cut:
                found = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
                assert float(found) == pytest.approx(float(expected), rel=1e-9)
            mw.clip_grad_norm_(flats, 0.1)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_equal(model, one, "flat_groups")
    assert world.size == 2


def test_a_norm_of_flat_groups_is_refused(ranks: Ranks) -> None:
    ranks(2, body_norms_of_flat_groups)


def test_a_part_computes_as_a_plain_tensor_but_for_norms() -> None:
    part = gradient_part(torch.arange(6.0) - 2, "layer.weight")
    plain = torch.arange(6.0) - 2
    for function in (
        lambda g: g.abs() * 2 - g**3,
        lambda g: torch.where((g < 9) & (g > 0), g, 0.0).to(torch.float64),
        lambda g: torch.maximum(g, -g) + torch.max(g, torch.tensor(0.0)),
        lambda g: torch.cat([g.view(2, 3), g.detach().data.view(2, 3)]),
        lambda g: torch._foreach_mul([g, g], 3.0)[1],
        lambda g: g.clone(),
        lambda g: torch.clone(g.detach()),
    ):
        found = function(part)
        assert type(found) is GradientPart
        assert torch.equal(found, function(plain))
        with pytest.raises(RuntimeError, match="norm of a gradient .* part of 'layer.weight': "):
            found.norm()
    for function in (
        torch.zeros_like,
        lambda g: g[1:3],
        lambda g: g.new_ones(3),
        lambda g: torch.isnan(g).any(),
        lambda g: (g - torch.ones(6)).abs().max(),
        lambda g: torch.max(g, torch.zeros(6)),
        lambda g: g.as_subclass(torch.Tensor),
        lambda g: copy.deepcopy({"gradient": g})["gradient"],
        lambda g: pickle.loads(pickle.dumps(g)),
        lambda g: torch.load(saved(g), weights_only=True),
    ):
        assert type(function(part)) is torch.Tensor
        assert torch.equal(function(part), function(plain))
    assert repr(part) == repr(plain)
    assert not part.is_sparse
    momentum = torch.zeros(6)
    assert momentum.lerp_(part, 0.5) is momentum
    part.mul_(2)
    assert torch.equal(part, 2 * plain)


def saved(tensor: torch.Tensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return file


# -------------------------------------------------------------------------------- optimizers


class Lamb(torch.optim.Optimizer):
    """Scales each update by the norm of its parameter over its own."""

    number: Callable[[torch.Tensor], Any] = staticmethod(lambda tensor: tensor)

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    size = self.number(parameter.norm()) / self.number(parameter.grad.norm())
                    parameter.sub_(group["lr"] * size * parameter.grad)


class LambInNumbers(Lamb):
    number = staticmethod(lambda tensor: tensor.item())


class GlobalNorm(Lamb):
    """Asks for the norm of all gradients, as a number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        norm = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in held))
        for parameter in held:
            parameter.sub_(parameter.grad, alpha=0.1 / norm)


class Signs(Lamb):
    """Element-wise, and nobody knows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=0.01)


class Declared(Signs):
    pass


class Quiet(torch.optim.AdamW):
    """Its step is that of AdamW."""


class Loud(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


ELEMENTS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=0.1, weight_decay=0.1, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "fused SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "fused Adagrad": partial(torch.optim.Adagrad, lr=0.1, fused=True),
    "NAdam": partial(torch.optim.NAdam, lr=0.1),
    "RAdam": partial(torch.optim.RAdam, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "Quiet": partial(Quiet, lr=0.1),
    "Declared": Declared,
}
PARAMETERS = {
    "Adafactor": torch.optim.Adafactor,
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2]),
}
UNKNOWN = {"Lamb": Lamb, "Signs": Signs, "Loud": Loud, "GlobalNorm": GlobalNorm}
ON_DTENSORS = ("Lamb", "LambInNumbers", "GlobalNorm", *ELEMENTS)


def train(one: nn.Module, model: Any, optimizers: Any, *, is_cut: bool = False) -> None:
    for step in range(3):
        one(batch(step)).square().mean().backward()
        backward(model, step, is_cut=is_cut)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def everywhere() -> dict[str, Wrap]:
    """Layouts with parts, as many as the ranks allow."""
    layouts = {**PARTS, "flat_groups": sharded}
    return {n: w for n, w in layouts.items() if communicator().size > 2 or "hybrid" not in n}


def body_elements(*, in_all: bool) -> None:
    """Whatever looks at elements alone has the numbers of one process, without a word."""
    mw.declare_element_wise(Declared)
    layouts = [*everywhere().items()]
    for number, (name, build) in enumerate(ELEMENTS.items()):
        for layout, wrap in layouts if in_all else [layouts[number % len(layouts)]]:
            one, model = uneven(), wrap(uneven())
            held = mw.flat_groups(model) if layout == "flat_groups" else model.parameters()
            train(one, model, (build(one.parameters()), build(held)))
            assert_equal(model, one, f"{name} in {layout}")


def body_parts() -> None:
    """Optimizers that look at more are refused, or named once, before they change anything."""
    for layout, wrap in everywhere().items():
        model = wrap(net())
        held = mw.flat_groups(model) if layout == "flat_groups" else list(model.parameters())
        backward(model, 0)
        before = [p.detach().clone() for p in held]
        for name in ("Adafactor", "LBFGS"):
            optimizer = getattr(torch.optim, name)(held)
            with pytest.raises(
                TypeError, match=f"{name} looks at .* parts, .* Use an element-wise"
            ):
                optimizer.step(lambda: pytest.fail("the closure was called"))
        assert all(map(torch.equal, held, before))
        is_first = layout == "flat"
        chosen = [{"params": [p for p in held if (p.ndim > 1) is cut]} for cut in (True, False)]
        empty = pytest.warns(UserWarning, match="group 0 of ASGD has no parameters. .* p.ndim")
        with empty if is_first else contextlib.nullcontext():
            torch.optim.ASGD(chosen, lr=0.0).step()
        for name in ("Signs", "Loud"):
            with told(name) if is_first else contextlib.nullcontext():
                UNKNOWN[name](held).step()
            UNKNOWN[name](held).step()  # one word is enough
        assert not all(map(torch.equal, held, before))
        refused = pytest.raises(RuntimeError, match="norm of a gradient of which each rank holds")
        with refused, told("Lamb") if is_first else contextlib.nullcontext():
            Lamb(held).step()


def told(name: str) -> Any:
    return pytest.warns(UserWarning, match=f"{name} is not known .*declare_element_wise.{name}")


class OwnClass(torch.Tensor):
    """A tensor of the user's."""


def full_of(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found.clone()


def body_dtensors(*, in_all: bool) -> None:
    """Operators on DTensors are those of whole tensors, also where a number is asked for."""
    world = communicator()
    builds: dict[str, Any] = {**UNKNOWN, "LambInNumbers": LambInNumbers}
    if in_all:
        builds.update(ELEMENTS)
    layouts: dict[str, Wrap] = {"shard": sharded, "tensor": cut}
    if world.size > 2:
        layouts = {"hybrid": WHOLE["hybrid"], "shard": sharded}
    for layout, wrap in layouts.items():
        start = net if layout == "tensor" else uneven
        for name, build in builds.items():
            one, model = start(), wrap(start())
            if name == "Rprop" or (layout == "tensor" and ("fused" in name or name == "AdamW")):
                continue  # torch takes DTensors and plain tensors one by one only
            optimizers = (build(one.parameters()), build(list(model.parameters())))
            train(one, model, optimizers, is_cut=layout == "tensor")
            assert_equal(model, one, f"{name} over {layout}")
        # Operators on lists take DTensors and plain tensors, each by itself.
        for kind in ("foreach", "fused"):
            model = wrap(start())
            some = [*model.parameters(), nn.Parameter(torch.ones(2, dtype=torch.float64))]
            full = [nn.Parameter(full_of(each)) for each in some]
            for held in (some, full):
                for parameter in held:
                    parameter.grad = torch.ones_like(parameter)
                torch.optim.AdamW(held, **{kind: held is some}).step()
            for parameter, expected in zip(some, full, strict=True):
                torch.testing.assert_close(
                    full_of(parameter), expected.detach(), rtol=1e-12, atol=0
                )
        own = nn.Parameter(torch.ones(2).as_subclass(OwnClass))
        with pytest.raises(TypeError, match="AdamW.foreach=True. .* beside ones of class OwnClass"):
            torch.optim.AdamW([*model.parameters(), own], foreach=True).step()
        for name, hint in (
            ("Adafactor", r"own_matrices\("),
            ("Rprop", r"Give it flat_groups\(model"),
        ):
            with pytest.raises(TypeError, match=f"{name} uses operators .* DTensors, .*{hint}"):
                getattr(torch.optim, name)(model.parameters()).step()


def body_rows() -> None:
    """LBFGS joins all parameters to one row; an optimizer of a flat one has its parts already."""
    even = nn.Linear(4, 4).double()
    even.register_parameter("nothing", nn.Parameter(torch.zeros(0, dtype=torch.float64)))
    with pytest.raises(TypeError, match="LBFGS makes one row of all .* that have no elements"):
        check_optimizer(torch.optim.LBFGS(mw.fully_shard(even).parameters()))
    uneven_rows = sharded(uneven())
    with pytest.raises(TypeError, match="LBFGS makes one row of all .* uneven parts"):
        torch.optim.LBFGS(uneven_rows.parameters()).step(lambda: pytest.fail("it was called"))
    with pytest.raises(TypeError, match="LBFGS makes one row of all .* beside plain tensors"):
        check_optimizer(torch.optim.LBFGS([*uneven_rows.parameters(), nn.Parameter(torch.ones(2))]))
    for model in (sharded(net()), net()):
        for parameter in (flats := mw.flat_groups(model))[0], next(model.parameters()):
            optimizer = torch.optim.SGD(flats, lr=0.1)
            if parameter is not flats[0]:
                optimizer.add_param_group({"params": [parameter]})
                with pytest.raises(TypeError, match="SGD has a parameter of .* and would step it"):
                    optimizer.step()
            else:
                optimizer.step()


def body_whole() -> None:
    """On whole parameters every optimizer is what it is in one process."""
    builds: dict[str, Any] = {**PARAMETERS, **UNKNOWN, "LambInNumbers": LambInNumbers}
    for layout in ("replicate", "whole"):
        for name, build in builds.items():
            one, model = net(), WHOLE[layout](net())
            train(one, model, (build(one.parameters()), build(list(model.parameters()))))
            if name != "Muon":  # it computes in bfloat16
                assert_equal(model, one, f"{name} in {layout}")
    flat = in_class(net(), sharding_strategy=ShardingStrategy.NO_SHARD)
    with pytest.raises(
        TypeError, match="Adafactor looks at the whole parameter.* lines of several"
    ):
        torch.optim.Adafactor(flat.parameters()).step()
    with pytest.raises(TypeError, match="Adafactor looks at the whole parameter"):
        check_optimizer(torch.optim.Adafactor(mw.flat_groups(net())))
    assert not check_optimizer(torch.optim.LBFGS(mw.flat_groups(net())))


class OwnSearch(torch.optim.LBFGS):
    """LBFGS under another name."""


class NeedsClosure(torch.optim.SGD):
    """SGD whose step computes the loss itself."""

    def step(self, closure: Any) -> Any:
        return super().step(closure)


def body_losses() -> None:
    """Ranks whose losses differ take the same steps of LBFGS: those of one process."""
    world = communicator()
    inputs = batch(0) * torch.arange(1.0, 9.0).double().square().unsqueeze(1)
    whole_class = partial(in_class, sharding_strategy=ShardingStrategy.NO_SHARD)
    wraps: dict[str, Any] = {
        **{name: WHOLE[name] for name in ("replicate", "fully_shard")},
        "flat": WHOLE["replicate"],
        "class": mw.DistributedDataParallel,
        "one flat": whole_class,
        "original": partial(whole_class, use_orig_params=True),
    }
    for layout, wrap in wraps.items():
        one = net(4)
        model = wrap(net(4))  # torch does not flatten DTensors with uneven rows
        for module, part in ((one, inputs), (model, inputs.chunk(world.size)[world.rank])):
            kind = OwnSearch if layout == "class" else torch.optim.LBFGS
            is_flat = layout == "flat" and module is model
            held = mw.flat_groups(module) if is_flat else module.parameters()
            optimizer = kind(held, max_iter=8, line_search_fn="strong_wolfe")
            calls = 0

            def closure(module: Any = module, part: Any = part, optimizer: Any = optimizer) -> Any:
                nonlocal calls
                calls += 1
                optimizer.zero_grad()
                loss = (module(part) - part).square().mean()
                loss.backward()
                return loss

            losses = [optimizer.step(closure), optimizer.step(closure=closure)]
            assert calls > 10
            if module is one:
                expected = losses
        torch.testing.assert_close(losses, [loss.detach() for loss in expected])
        whole = model.module if layout == "class" else model
        is_fsdp = isinstance(model, FSDP)
        shown = model.summon_full_params(model) if is_fsdp else contextlib.nullcontext()
        with torch.no_grad(), shown:
            for (name, q), p in zip(one.named_parameters(), whole.parameters(), strict=True):
                found = p.full_tensor() if hasattr(p, "full_tensor") else p
                torch.testing.assert_close(found, q, rtol=1e-6, atol=1e-8, msg=f"{layout} {name}")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "body", [body_elements, body_losses, body_parts, body_dtensors, body_rows, body_whole]
)
def test_an_optimizer_has_what_it_looks_at(ranks: Ranks, body: Any) -> None:
    ranks(2, body, **({"in_all": False} if body in (body_elements, body_dtensors) else {}))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_optimizer_in_every_layout(ranks: Ranks, size: int) -> None:
    ranks(size, body_parts)
    for body in (body_elements, body_dtensors):
        ranks(size, body, in_all=True, timeout=300)


def test_what_is_declared_is_a_class_of_optimizers() -> None:
    for wrong in (Signs([nn.Parameter(torch.ones(1))]), torch.nn.Linear, 3):
        with pytest.raises(TypeError, match="expected a class of optimizers with a method step"):
            mw.declare_element_wise(wrong)
    with pytest.raises(TypeError, match="LBFGS is not element-wise: it looks at all parameters"):
        mw.declare_element_wise(torch.optim.LBFGS)
    assert mw.declare_element_wise(torch.optim.SGD) is torch.optim.SGD


# ------------------------------------------------------------------------------------- plans


def body_plans() -> None:
    """What a plan gives to an optimizer is looked at when it is built."""
    example = {"loss": lambda out: out.square().mean(), "example": (batch(0),)}
    flat = Plan(axes=Axes.of({"shard": 2}), train=TrainPlan(flat=True))
    with pytest.raises(TypeError, match="Adafactor looks at the whole parameter"):
        mw.parallelize(net(), flat, optimizer=torch.optim.Adafactor, **example)
    cuts = TensorPlan(rules={"0": "colwise", "2": "rowwise"})
    tensor = Plan(axes=Axes.of({"tensor": 2}), tensor=cuts)
    owned = mw.parallelize(net(), tensor, optimizer=torch.optim.Adafactor, **example)
    assert "Adafactor steps each of 4 matrices" in str(owned.describe())
    replicas = Plan(axes=Axes.of({"replicate": 2}))
    for kind in (torch.optim.LBFGS, OwnSearch, NeedsClosure):
        with pytest.raises(TypeError, match=rf"the step of {kind.__name__} needs closure"):
            mw.parallelize(net(), replicas, optimizer=kind, **example)
    pipeline = PipelinePlan(schedule="1f1b", microbatches=2)
    staged = Plan(axes=Axes.of({"pipeline": 2}), pipeline=pipeline)

    def build(optimizer: Any) -> Any:
        return mw.parallelize(net(), staged, optimizer=optimizer, **example)

    with pytest.raises(TypeError, match="LBFGS looks at all .* other ranks of axis 'pipeline'"):
        build(torch.optim.LBFGS)
    with pytest.warns(UserWarning, match="GlobalNorm is not known .* of axis 'pipeline'"):
        build(GlobalNorm).step(batch(0))
    found = build(torch.optim.Adafactor)
    one = net()
    optimizer = torch.optim.Adafactor(one.parameters())
    for step in range(2):
        one(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.step(batch(step))
    for name, whole in found.weights().items():
        torch.testing.assert_close(whole, one.state_dict()[name], rtol=1e-9, atol=1e-12)
    found.forward_backward(batch(0))
    torch.nn.utils.clip_grad_norm_(found.module.parameters(), 0.1)
    with pytest.warns(UserWarning, match="gradients were changed between .* clip_norm"):
        found.optimizer_step()


def test_a_plan_looks_at_its_optimizer(ranks: Ranks) -> None:
    ranks(2, body_plans)
