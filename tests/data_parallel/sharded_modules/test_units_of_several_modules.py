"""A unit of several modules, which are converted and loaded one after another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

from meshwright.comm import communicator
from meshwright.data_parallel import fully_shard
from meshwright.testing import Ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def sharded(model: nn.Sequential) -> Any:
    fully_shard([model[1], model[2]])
    return fully_shard(model)


def filled(model: Any, one: nn.Module) -> Any:
    """Give sharded parameters, which are somewhere, the values of ``one``."""
    with torch.no_grad():
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            p.copy_(distribute_tensor(q.to(p.dtype), p.device_mesh, p.placements))
    return model


def on_meta() -> Any:
    with torch.device("meta"):
        return sharded(net())


def emptied(one: nn.Module) -> Any:
    return filled(on_meta().to_empty(device="cpu"), one)


def emptied_by_module(one: nn.Module) -> Any:
    model = on_meta()
    for module in model.modules():
        module.to_empty(device="cpu", recurse=False)
    return filled(model, one)


def loaded(one: nn.Module) -> Any:
    model = on_meta()
    state = {
        name: distribute_tensor(one.get_parameter(name).detach(), p.device_mesh, p.placements)
        for name, p in model.named_parameters()
    }
    model.load_state_dict(state, assign=True)
    return model


def there_and_back(one: nn.Module) -> Any:
    model = sharded(copy.deepcopy(one))
    return filled(model.to("meta").to_empty(device="cpu"), one)


def converted(kind: str) -> Callable[[nn.Module], Any]:
    return lambda one: getattr(sharded(copy.deepcopy(one)), kind)()


def converted_later(one: nn.Module) -> Any:
    model = sharded(copy.deepcopy(one))
    model(torch.ones(1, 4)).sum().backward()
    model.zero_grad()
    return model.double()


WAYS: dict[str, tuple[Callable[[nn.Module], Any], torch.dtype]] = {
    "to_empty": (emptied, torch.float32),
    "to_empty module by module": (emptied_by_module, torch.float32),
    "load_state_dict, assign": (loaded, torch.float32),
    "to meta and back": (there_and_back, torch.float32),
    "double": (converted("double"), torch.float64),
    "bfloat16": (converted("bfloat16"), torch.bfloat16),
    "double after a pass": (converted_later, torch.float64),
}


def body() -> None:
    for way, (make, dtype) in WAYS.items():
        one = net()
        model = make(one)
        one.to(dtype)
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, one)]
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
        for _ in range(3):
            for each, optimizer in zip((model, one), optimizers, strict=True):
                # All ranks have the same batch, so that a mean rounds nothing.
                each(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            assert p.dtype is dtype, way
            torch.testing.assert_close(p.full_tensor(), q, msg=way)


def test_modules_of_one_unit_are_converted_one_after_another(ranks: Ranks) -> None:
    ranks(2, body)


def body_of_half() -> None:
    model = sharded(net())
    model[1].double()
    model.state_dict()
    with pytest.raises(RuntimeError, match="convert units as a whole"):
        model(torch.ones(1, 4))
    assert communicator().size == 2


def test_half_a_unit_is_named_when_it_is_used(ranks: Ranks) -> None:
    ranks(2, body_of_half)
