"""Sharded parameters beside plain tensors: the error names the parameter, its unit, the remedy."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.experimental import implicit_replication

from meshwright.comm import communicator
from meshwright.data_parallel import fully_shard, register_fsdp_forward_method
from meshwright.testing import Ranks


class Model(nn.Module):
    """Reads parameters of its units by many ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4).double()
        self.norm = nn.LayerNorm(4).double()
        self.embed = nn.Embedding(6, 4).double()
        self.head = nn.Linear(4, 6, bias=False).double()

    def forward(self, x: torch.Tensor, *, is_fused: bool = False) -> torch.Tensor:
        x = self.norm(self.body(x))
        return F.linear(x, self.head.weight) if is_fused else self.head(x)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x)) @ self.scale

    @property
    def scale(self) -> torch.Tensor:
        return self.head.weight.T


def sharded(model: Model) -> Model:
    for unit in (model.body, model.norm, model.embed, model.head):
        fully_shard(unit)
    return fully_shard(model)


def autocast(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x.float(), model.head.weight)


def without_gradients(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return F.linear(x, model.head.weight)


READS: dict[str, tuple[str, Callable[[Model, torch.Tensor], torch.Tensor]]] = {
    "linear": ("head", lambda model, x: F.linear(x, model.head.weight)),
    "linear with bias": ("body", lambda model, x: F.linear(x, model.body.weight, model.body.bias)),
    "product": ("body", lambda model, x: x @ model.body.weight),
    "batches": ("body", lambda model, x: x.expand(3, -1, -1) @ model.body.weight),
    "vector": ("body", lambda model, x: model.body.weight @ x[0]),
    "scale": ("norm", lambda model, x: x * model.norm.weight),
    "lookup": ("embed", lambda model, x: F.embedding(torch.arange(3), model.embed.weight)),
    "rows": ("embed", lambda model, x: model.embed.weight[torch.arange(3)]),
    "norm": ("norm", lambda model, x: F.layer_norm(x, (4,), model.norm.weight, model.norm.bias)),
    "forward of a parent": ("head", lambda model, x: model(x, is_fused=True)),
    "method": ("head", Model.features),
    "autocast": ("head", autocast),
    "without gradients": ("head", without_gradients),
}


def body_reads() -> None:
    x = torch.randn(5, 4).double()
    model = sharded(Model())
    model(x).sum().backward()
    for unit, read in READS.values():
        with pytest.raises(RuntimeError, match=rf"parameter '{unit}\.\w+' of the unit '{unit}' .*"):
            read(model, x)
        with pytest.raises(RuntimeError, match=r"after register_fsdp_forward_method\(module, 'the"):
            read(model, x)
    weight = model.body.weight
    assert (weight * torch.tensor(2.0)).full_tensor().shape == (4, 4)
    with implicit_replication():
        assert (weight * torch.ones(4, 4)).full_tensor().shape == (4, 4)
    with pytest.raises(RuntimeError, match="got mixed torch.Tensor and DTensor"):
        weight.grad * torch.ones(4, 4)  # which is no parameter


def test_a_parameter_that_is_read_outside_of_its_unit_is_named(ranks: Ranks) -> None:
    ranks(2, body_reads)


class Head(nn.Linear):
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias).square().mean()


def body_remedies() -> None:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(4, 4), Head(4, 6)).double()
    x, world = torch.randn(2, 6, 4).double(), communicator()
    for is_method in (True, False):
        many = copy.deepcopy(one)
        fully_shard(many[1])
        fully_shard(many)
        if is_method:
            register_fsdp_forward_method(many[1], "loss")
            loss = many[1].loss(x[world.rank])
        else:
            weight, bias = (
                p.full_tensor(grad_placements=[Partial("avg")]) for p in many[1].parameters()
            )
            loss = F.linear(x[world.rank], weight, bias).square().mean()
        loss.backward()
        one.zero_grad()
        one[1].loss(x.flatten(0, 1)).backward()
        for mine, theirs in zip(many[1].parameters(), one[1].parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def test_what_the_error_says_to_do_gives_the_gradients_of_one_process(ranks: Ranks) -> None:
    ranks(2, body_remedies)


def body_loads() -> None:
    model, state = sharded(Model()), Model().state_dict()
    for value in state.values():
        value.add_(1)
    for has_run in (False, True):
        if has_run:
            model(torch.ones(3, 4).double()).sum().backward()
        with pytest.raises(RuntimeError, match="parameter named .head.weight.") as raised:
            model.load_state_dict(state)
        text = str(raised.value)
        unit = "the unit 'head'" if has_run else "the unit of its FSDPLinear"
        assert re.search(rf"parameter '.*weight' of {unit} beside a plain tensor", text)
        assert "set_model_state_dict(model, state, options=StateDictOptions(full_" in text
        assert "got mixed" not in text
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, copy.deepcopy(state), options=options)
    for name, found in model.state_dict().items():
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(whole, state[name], msg=name)


def test_a_load_of_plain_tensors_names_what_loads_them(ranks: Ranks) -> None:
    ranks(2, body_loads)


class Inside(nn.Module):
    """Runs a backward pass inside of its forward."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.b(self.a(x)).square().mean()
        if self.way == "inputs, with a graph":
            (found,) = torch.autograd.grad(loss, [x], create_graph=True)
            return loss + self.b(found).square().sum()
        if self.way == "inputs":
            (found,) = torch.autograd.grad(loss, [x])
            return self.b(found)
        loss.backward(retain_graph=True)
        return loss if self.way == "last" else loss + self.b(x)


def body_inside() -> None:
    x, world = torch.randn(2, 3, 4).double(), communicator()
    for way, is_inner in (("inputs", False), ("inputs", True), ("backward", False)):
        model: nn.Module = Inside(way)
        fully_shard(model.a)
        if is_inner:
            fully_shard(model.b)
            model = nn.Sequential(model, nn.Linear(4, 4).double())
        fully_shard(model)
        with pytest.raises(
            RuntimeError,
            match=r"pass \(backward, autograd.grad\) inside of this forward has resharded it",
        ):
            model(x[world.rank].requires_grad_()).sum().backward()
    for way in ("inputs, with a graph", "last"):
        one = Inside(way)
        many = copy.deepcopy(one)
        for unit in (many.a, many):
            fully_shard(unit, reshard_after_forward=False)
        many(x[world.rank].detach().requires_grad_()).backward()
        for part in x.detach():
            one(part.requires_grad_()).backward()
        for mine, theirs in zip(many.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad / world.size)


def test_a_backward_inside_of_a_forward_is_named_where_it_does_harm(ranks: Ranks) -> None:
    ranks(2, body_inside)
