"""`experts_of`: a user's list of experts over ranks, with the names of the list."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

import meshwright as mw
from meshwright import checkpoint, comm
from meshwright.expert_parallel import ExpertParallel, experts_of
from meshwright.testing import Ranks
from support.expert_parallel.samples import D, alike, expert_mesh, part
from support.internals.axes import Axes

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


class Listed(nn.Module):
    """A block that loops over its experts, or calls what `experts_of` has made of them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.router = nn.Linear(D, number)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, D)) for _ in range(number)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, indices = self.router(x).softmax(-1).topk(2)
        if not isinstance(self.experts, nn.ModuleList):
            return self.experts(x, indices, weights)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = (weights * (indices == number)).sum(-1, keepdim=True)
            found = found + weight * expert(x)
        return found


def check(number: int, sizes: list[int], folder: Path) -> None:
    torch.manual_seed(number)
    one, many = alike(Listed(number))
    names, values = list(one.state_dict()), one.state_dict()
    assert experts_of(many) is many.experts
    assert many.experts.get_parameter("0__weight").shape == (number, 5, D)
    mw.parallelize_module(many, expert_mesh(), {"experts": ExpertParallel()})
    assert list(many.state_dict()) == names
    x = torch.randn(sum(sizes), D, dtype=torch.float64)
    comm.communicator().broadcast(x).wait()
    expected, found = one(x), many(part(x, sizes))
    torch.testing.assert_close(found, part(expected, sizes), **CLOSE)
    expected.square().sum().backward()
    found.square().sum().backward()
    for key, parameter in many.experts.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        name = key.replace("__", ".")
        whole = torch.stack([expert.get_parameter(name).grad for expert in one.experts])
        torch.testing.assert_close(parameter.grad.full_tensor(), whole, **CLOSE)

    checkpoint.save(folder, 1, model=many)
    for parameter in many.parameters():
        parameter.detach().zero_()
    many.load_state_dict(values)
    assert all(map(torch.equal, many.state_dict().values(), values.values()))
    plain = copy.deepcopy(one)
    for parameter in (*plain.parameters(), *many.parameters()):
        parameter.detach().zero_()
    for model in (plain, many):
        checkpoint.load(folder, model=model)
        assert all(map(torch.equal, model.state_dict().values(), values.values()))
    # Functions of torch look each name up in the model.
    whole = get_model_state_dict(many, options=StateDictOptions(full_state_dict=True))
    assert list(whole) == names
    assert all(map(torch.equal, whole.values(), values.values()))
    optimizer = torch.optim.AdamW(many.experts.parameters())
    optimizer.step()
    state = get_optimizer_state_dict(many, optimizer)["state"]
    assert set(state) == {f"experts.{name}" for name, _ in many.experts.named_parameters()}
    for parameter in many.parameters():
        parameter.detach().zero_()
    set_model_state_dict(many, dict(values), options=StateDictOptions(full_state_dict=True))
    assert all(map(torch.equal, many.state_dict().values(), values.values()))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"experts.0__bias"'):
        many.load_state_dict({key: x for key, x in values.items() if key != "experts.1.0.bias"})


def test_a_list_of_experts(ranks: Ranks, tmp_path: Path) -> None:
    """Numbers, names in state dicts and checkpoints; a number that does not divide."""
    ranks(2, check, 3, [4, 3], tmp_path)


class Acting(nn.Linear):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(D, D)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(super().forward(x))


def body_of_load(folder: Path) -> None:
    def laid() -> Any:
        torch.manual_seed(0)
        model = Listed(3).double()
        experts_of(model)
        plan = mw.Plan(axes=Axes.of({"replicate": 2}))
        return mw.parallelize(model, plan, optimizer=torch.optim.Adam, loss=nn.MSELoss())

    x = torch.ones(4, D, dtype=torch.float64)
    trained, resumed = laid(), laid()
    trained.step(x, 2 * x)
    checkpoint.save(folder, 1, model=trained)
    checkpoint.load(folder, model=resumed)
    for each in (trained, resumed):
        each.step(x, 2 * x)
    for name, value in trained.weights().items():
        assert torch.equal(resumed.weights()[name], value), name


def test_a_trainable_with_a_list_resumes(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, body_of_load, tmp_path)


def test_an_optimizer_of_the_list_trains_nothing_and_says_so() -> None:
    block = Listed(2)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    experts_of(block)
    block(torch.randn(3, D)).sum().backward()
    with pytest.raises(RuntimeError, match=r"parameter '0\.0\.weight' as it was before experts_of"):
        optimizer.step()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a Linear with one nn.ModuleList, of experts"):
        experts_of(nn.Linear(1, 1))
    block = Listed(2)
    block.experts[1] = nn.Linear(D, D)
    with pytest.raises(ValueError, match="expected experts of 'experts' of one class"):
        experts_of(block)
    shared = nn.Linear(D, D)
    for unlike in (
        [nn.Sequential(nn.Linear(D, D), each) for each in (nn.ReLU(), nn.Tanh())],
        [nn.Sequential(nn.Linear(D, D), nn.Dropout(p)) for p in (0.1, 0.2)],
        [Acting(torch.relu), Acting(torch.tanh)],
        [nn.Sequential(nn.Linear(D, D), shared) for _ in range(2)],
    ):
        block.experts = nn.ModuleList(unlike)
        with pytest.raises(ValueError, match="expected experts of 'experts' of one class and equ"):
            experts_of(block)
    block.experts = nn.ModuleList(nn.BatchNorm1d(D) for _ in range(2))
    with pytest.raises(ValueError, match="without buffers"):
        experts_of(block)


def refused_by_the_class() -> None:
    _, many = alike(Listed(2))
    experts_of(many)
    with pytest.raises(ValueError, match=r"'experts.0__weight' has other names in state dicts"):
        mw.FullyShardedDataParallel(many, use_orig_params=True)
    wrapped = mw.FullyShardedDataParallel(many, ignored_states=[*many.experts.parameters()])
    assert "experts.0.0.weight" in wrapped.state_dict()


def test_the_fsdp_class_refuses_what_has_other_names_in_state_dicts(ranks: Ranks) -> None:
    ranks(2, refused_by_the_class)
