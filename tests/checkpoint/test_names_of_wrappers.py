"""Names and values that torch's checkpoint functions find under wrappers, as without them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from meshwright.comm import communicator
from meshwright.data_parallel import DistributedDataParallel, fully_shard, replicate
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import ModuleWrapPolicy
from meshwright.testing import Ranks
from support.checkpoint.interchange import differences, sorted_groups

Wrap = Callable[[nn.Module], nn.Module]

WRAPS: dict[str, Wrap] = {
    "DistributedDataParallel": DistributedDataParallel,
    "flat": FSDP,
    "original": partial(FSDP, use_orig_params=True),
    "replicate": replicate,
    "fully_shard": fully_shard,
}
FULL = StateDictOptions(full_state_dict=True)


class Counting(nn.Linear):
    """Has extra state, and a buffer that is not saved."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen = 0
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Inner(nn.Module):
    """A child with the name that wrappers give theirs, and one with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 6)
        self.count = Counting(6, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.count(self.module(x).tanh())


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Inner()
    model.count.seen = seed
    model.steps.fill_(seed)
    return model.double()


def beside() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(2, 2).double()


def in_parts(wrap: Wrap, model: nn.Module) -> nn.Module:
    model.module = torch.compile(wrap(model.module), backend="eager")
    model.count = wrap(torch.compile(model.count, backend="eager"))
    return model


SHAPES: dict[str, Callable[[Wrap, nn.Module], nn.Module]] = {
    "alone": lambda wrap, model: wrap(model),
    "compiled outside": lambda wrap, model: torch.compile(wrap(model), backend="eager"),
    "compiled inside": lambda wrap, model: wrap(torch.compile(model, backend="eager")),
    "checkpointed inside": lambda wrap, model: wrap(checkpoint_wrapper(model)),
    "checkpointed outside": lambda wrap, model: checkpoint_wrapper(wrap(model)),
    "below": lambda wrap, model: nn.ModuleDict({"plain": beside(), "deep": wrap(model)}),
    "in parts": in_parts,
}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """Two steps on the same batch on every rank."""
    torch.manual_seed(5)
    optimizer = adam(model)
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.randn(3, 4, dtype=torch.float64)
        if isinstance(model, nn.ModuleDict):
            model["plain"](x[:, :2]).square().mean().backward()
            model["deep"](x).square().mean().backward()
        else:
            model(x).square().mean().backward()
        optimizer.step()
    return optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    weights, moments = get_state_dict(model, optimizer, options=FULL)
    return [weights, sorted_groups(moments)]


def wrong_in(shape: str, wrap: Wrap) -> list[str]:
    """Compare what torch's functions get and set with that of the plain model."""
    one = net(0)
    one = nn.ModuleDict({"plain": beside(), "deep": one}) if shape == "below" else one
    expected = state_of(one, trained(one))
    model = SHAPES[shape](wrap, net(0))
    optimizer = trained(model)
    outside = [name for name, _ in model.named_parameters()]
    wrong = differences(state_of(model, optimizer), expected, "get")
    # Torch takes no plain tensors for DTensors, unless it is told that all are whole.
    for spreads in (False, True) if wrap is fully_shard else (None, False, True):
        fresh = SHAPES[shape](wrap, net(3))
        loaded = adam(fresh)
        options = StateDictOptions(
            full_state_dict=spreads is not None, broadcast_from_rank0=bool(spreads)
        )
        is_given = not spreads or communicator().rank == 0
        weights, moments = copy.deepcopy(expected) if is_given else ({}, {})
        keys = set_model_state_dict(fresh, weights, options=options)
        wrong += [f"set {spreads}: {key}" for key in (*keys.missing_keys, *keys.unexpected_keys)]
        set_optimizer_state_dict(fresh, loaded, moments, options=options)
        wrong += differences(state_of(fresh, loaded), expected, f"set {spreads}")
    if outside != [name for name, _ in model.named_parameters()]:
        wrong.append("names outside of those functions have changed")
    return wrong


def body_shapes(name: str) -> None:
    warnings.filterwarnings("ignore")
    for shape in SHAPES:
        assert wrong_in(shape, WRAPS[name]) == [], shape


@pytest.mark.parametrize("name", WRAPS)
@pytest.mark.slow
def test_names_and_values_are_those_of_the_plain_model(ranks: Ranks, name: str) -> None:
    ranks(2, body_shapes, name)


# ------------------------------------------------------------- frozen, unused and missing parts


class Partly(nn.Module):
    """Uses some of its parameters; one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 6)
        self.unused = nn.Linear(3, 5)
        self.frozen = nn.Linear(6, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.used(x))


def partly(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Partly().double()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4, dtype=torch.float64)).square().mean().backward()
    optimizer.step()


def body_partly(name: str) -> None:
    warnings.filterwarnings("ignore")
    wrap = WRAPS[name]
    if name == "flat":  # a flat parameter is frozen as a whole, and used as a whole
        wrap = partial(FSDP, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    one = partly(0)
    theirs = momentum(one)
    step(one, theirs)
    model = wrap(partly(0))
    optimizer = momentum(model)
    step(model, optimizer)
    for flattens in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flattens, full_state_dict=True)
        expected = get_optimizer_state_dict(one, theirs, options=options)
        found = get_optimizer_state_dict(model, optimizer, options=options)
        if not flattens:
            expected, found = sorted_groups(expected), sorted_groups(found)
            assert set(expected["state"]) == {"used.weight", "used.bias"}
        assert differences(found, expected) == []
    # Into an optimizer that has no state yet, one that has the same, and one of other parameters.
    options = StateDictOptions(full_state_dict=True, strict=False)
    for begins in (lambda *_: None, step):
        other = wrap(partly(0))
        loaded = momentum(other)
        begins(other, loaded)
        given = get_optimizer_state_dict(one, theirs)
        set_optimizer_state_dict(other, loaded, copy.deepcopy(given), options=options)
        found = get_optimizer_state_dict(other, loaded, options=FULL)["state"]
        assert differences({n: found[n] for n in given["state"]}, given["state"]) == []
    trained_only = get_model_state_dict(
        model, options=StateDictOptions(ignore_frozen_params=True, full_state_dict=True)
    )
    kept = {name: value for name, value in one.state_dict().items() if "frozen" not in name}
    assert differences(trained_only, kept) == []


def body_partly_in_one_unit() -> None:
    """Give what is unused zeros for gradients, as a flat parameter does."""
    warnings.filterwarnings("ignore")
    one = partly(0).requires_grad_(True)
    theirs = momentum(one)
    step(one, theirs)
    given = get_optimizer_state_dict(one, theirs)
    model = FSDP(partly(3).requires_grad_(True))
    optimizer = momentum(model)
    set_model_state_dict(model, dict(one.state_dict()))
    loose = StateDictOptions(strict=False)
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(given), options=loose)
    found = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
    assert differences({name: found[name] for name in given["state"]}, given["state"]) == []
    assert not found["unused.weight"]["momentum_buffer"].any()
    step(model, optimizer)
    step(one, theirs)
    weights = get_model_state_dict(model, options=FULL)
    assert differences(weights, dict(one.state_dict())) == []


def test_state_of_a_part_of_a_flat_parameter(ranks: Ranks) -> None:
    ranks(2, body_partly_in_one_unit)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", WRAPS)
def test_state_of_a_part_of_the_parameters(ranks: Ranks, name: str) -> None:
    ranks(2, body_partly, name)
