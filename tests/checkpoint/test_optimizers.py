"""Optimizer state hangs on parameter names, not on their order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from meshwright.checkpoint import (
    flatten,
    load_optimizer_state,
    load_tensors,
    optimizer_state,
    save_tensors,
    unflatten,
)
from meshwright.errors import CheckpointMismatchError

OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=0.1, betas=(0.8, 0.9), amsgrad=True),
    "adam": lambda p: Adam(p, lr=torch.tensor(0.1), capturable=False, foreach=False),
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "plain": lambda p: SGD(p, lr=0.1),
    "rmsprop": lambda p: RMSprop(p, centered=True),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def step(module: nn.Module, optimizer: Optimizer, seed: int) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    module(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def through_disk(folder: Path, module: nn.Module, optimizer: Optimizer) -> object:
    tensors, structure = flatten(optimizer_state(optimizer, module.named_parameters()), "optimizer")
    found = load_tensors(save_tensors(folder, tensors, {"optimizer": structure}, step=0))
    return unflatten(found.metadata["optimizer"], found.tensors)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_resumed_optimizer_goes_on_bit_for_bit(
    tmp_path: Path, kind: str, is_reversed: bool
) -> None:
    one, other = model(), model()
    first = OPTIMIZERS[kind](list(one.parameters()))
    for seed in range(3):
        step(one, first, seed)
    state = through_disk(tmp_path, one, first)
    other.load_state_dict(one.state_dict())
    parameters = list(other.parameters())
    second = OPTIMIZERS[kind](parameters[::-1] if is_reversed else parameters)
    load_optimizer_state(second, other.named_parameters(), state)
    for seed in range(3, 6):
        step(one, first, seed)
        step(other, second, seed)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_loaded_state_is_a_copy() -> None:
    one, other = model(), model()
    first, second = (OPTIMIZERS["adamw"](list(m.parameters())) for m in (one, other))
    step(one, first, 0)
    state = optimizer_state(first, one.named_parameters())
    load_optimizer_state(second, other.named_parameters(), state)
    for a, b in zip(first.state.values(), second.state.values(), strict=True):
        assert all(a[key].data_ptr() != b[key].data_ptr() for key in a)


def test_no_silent_cast_to_the_dtype_of_the_parameter() -> None:
    one = nn.Linear(2, 2).bfloat16()
    first, second = (SGD(one.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
    moment = torch.full((2, 2), 1.0001)
    first.state[one.weight]["momentum_buffer"] = moment
    load_optimizer_state(
        second, one.named_parameters(), optimizer_state(first, one.named_parameters())
    )
    loaded = second.state[one.weight]["momentum_buffer"]
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, moment)


@pytest.mark.parametrize("kind", [AdamW, SGD, torch.optim.Adagrad])
def test_state_has_the_strides_of_its_parameter(kind: type[Optimizer]) -> None:
    """Fused steps go through the memory of both, and files hold values in the order of dims."""

    def build() -> tuple[Tensor, Optimizer]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(5, 4).t())
        more = {"momentum": 0.9} if kind is SGD else {}
        return weight, kind([weight], lr=0.1, fused=True, **more)

    def step(weight: Tensor, optimizer: Optimizer, seed: int) -> None:
        gradient = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        weight.grad = torch.empty_like(weight).copy_(gradient)
        optimizer.step()

    weight, optimizer = build()
    step(weight, optimizer, 1)
    saved = optimizer_state(optimizer, [("weight", weight)])
    state: Any = saved["state"]
    for key, value in state["weight"].items():
        state["weight"][key] = value.contiguous().clone()
    other, again = build()
    other.data.copy_(weight.data)
    load_optimizer_state(again, [("weight", other)], saved)
    for each in ((weight, optimizer), (other, again)):
        step(*each, 2)
    assert torch.equal(weight, other)


def test_every_difference_is_listed() -> None:
    one, other = (
        model(),
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Linear(2, 2)),
    )
    first = SGD([{"params": one[0].parameters()}, {"params": one[2].parameters()}], lr=0.1)
    second = SGD(list(other.parameters())[1:], lr=0.1)
    state = optimizer_state(first, one.named_parameters())
    with pytest.raises(CheckpointMismatchError) as caught:
        load_optimizer_state(second, other.named_parameters(), state)
    assert [line.strip() for line in str(caught.value).splitlines()] == [
        "the saved optimizer does not fit this one:",
        "'3.bias' has no saved state",
        "'3.weight' has no saved state",
        "'0.weight' is saved but not a parameter here",
        "'2.bias' is in group 1 in the checkpoint, in group 0 here",
        "'2.weight' is in group 1 in the checkpoint, in group 0 here",
        "2 groups in the checkpoint, 1 here",
    ]


def test_parameters_without_a_name_and_state_of_another_form() -> None:
    one = model()
    optimizer = SGD(one.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"parameter 0 of shape \(4, 3\) is not among"):
        optimizer_state(optimizer, one[2].named_parameters())
    for state in (None, {}, optimizer.state_dict()["state"], {"state": {}, "param_groups": [1]}):
        with pytest.raises(CheckpointMismatchError, match="expected the state of an optimizer"):
            load_optimizer_state(optimizer, one.named_parameters(), state)


def test_without_copies_the_tensors_are_taken_and_none_is_shared() -> None:
    """But where two parameters are given the same one, or a view of memory with more in it."""
    model, line = nn.Linear(2, 2, bias=False), torch.arange(8.0)
    other = nn.Parameter(torch.zeros(2, 2))
    named = [("first", model.weight), ("second", other)]
    optimizer = torch.optim.SGD([model.weight, other], lr=0.1, momentum=0.9)
    momentum, view = torch.ones(2, 2), line[4:].view(2, 2)
    groups = [{**optimizer.param_groups[0], "params": ["first", "second"]}]

    def loaded(one: torch.Tensor, two: torch.Tensor, *, copies: bool) -> list[torch.Tensor]:
        state = {"first": {"momentum_buffer": one}, "second": {"momentum_buffer": two}}
        saved = {"state": state, "param_groups": groups}
        load_optimizer_state(optimizer, named, saved, copies=copies)
        found = [optimizer.state[each]["momentum_buffer"] for _, each in named]
        assert torch.equal(found[0], one) and torch.equal(found[1], two)
        return found

    taken = loaded(momentum, momentum, copies=False)
    assert taken[0].data_ptr() == momentum.data_ptr() != taken[1].data_ptr()
    assert loaded(momentum, view, copies=False)[1].data_ptr() != view.data_ptr()
    assert loaded(momentum, view, copies=True)[0].data_ptr() != momentum.data_ptr()
