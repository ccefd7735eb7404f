"""Modules that a wrapper ignores stay each rank's own in every wrapper around it and below it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import MixedPrecision, ModuleWrapPolicy
from meshwright.testing import Ranks


class Expert(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 1.0 + seed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


class Block(nn.Sequential):
    """A linear, one expert more than the number of the rank, a linear."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(10)
        first, last = nn.Linear(4, 4), nn.Linear(4, 4)
        super().__init__(first, *(Expert(rank + n) for n in range(rank + 1)), last)

    def experts(self) -> list[nn.Module]:
        return [module for module in self if isinstance(module, Expert)]


class Model(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.block = Block(rank)
        torch.manual_seed(20)
        self.head = nn.Linear(4, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


def batch(rank: int) -> torch.Tensor:
    return torch.arange(8, dtype=torch.float64).view(2, 4) / (3 + rank)


def numbers(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Values by a name that does not count the experts of ``rank``; theirs with the rank."""
    found: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        own = name.replace(f"block.{rank + 2}", "block.last")
        expert = own == name and name.startswith("block.") and not name.startswith("block.0")
        found[f"{rank} {own}" if expert else own] = value.detach().clone()
    return found


def in_one_process(size: int) -> dict[str, torch.Tensor]:
    """Both ranks' models after two steps: what they share is stepped by the mean gradient."""
    models = [Model(rank) for rank in range(size)]
    for _ in range(2):
        for rank, model in enumerate(models):
            model.zero_grad()
            model(batch(rank)).square().sum().backward()
        shared = [[*m.block[0].parameters(), *m.block[-1].parameters()] for m in models]
        shared = [[*own, *m.head.parameters()] for own, m in zip(shared, models, strict=True)]
        for same in zip(*shared, strict=True):
            mean = torch.stack([p.grad for p in same]).mean(0)
            for parameter in same:
                parameter.grad = mean.clone()
        for model in models:
            torch.optim.SGD(model.parameters(), lr=0.01).step()
    found: dict[str, torch.Tensor] = {}
    for rank, model in enumerate(models):
        found.update(numbers(model, rank))
    return found


def by_modules(model: Model, **options: object) -> nn.Module:
    model.block = FSDP(model.block, ignored_modules=model.block.experts(), **options)
    return FSDP(model, **options)


def by_states(model: Model, **options: object) -> nn.Module:
    states = [p for expert in model.block.experts() for p in expert.parameters()]
    model.block = FSDP(model.block, ignored_states=states, **options)
    return FSDP(model, **options)


def by_policy(model: Model, **options: object) -> nn.Module:
    policy = ModuleWrapPolicy({Block})
    return FSDP(model, ignored_states=model.block.experts(), auto_wrap_policy=policy, **options)


def body(wrap: Callable[[Model], nn.Module]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = in_one_process(size)
    plain = Model(rank)
    experts = {id(p) for expert in plain.block.experts() for p in expert.parameters()}
    model = wrap(plain)
    assert experts <= {id(p) for p in model.parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(batch(rank)).square().sum().backward()
        optimizer.step()
    found = numbers(model, rank)
    assert len(found) == len(plain.block.experts()) * 3 + 6
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], msg=f"{rank} {name}")


def body_all() -> None:
    for use_orig_params in (False, True):
        for wrap in (by_modules, by_policy):
            body(partial(wrap, use_orig_params=use_orig_params))
        body(partial(by_policy, use_orig_params=use_orig_params, sync_module_states=True))
    body(by_states)
    plain = Model(0)
    expert = plain.block.experts()[0]
    precision = MixedPrecision(buffer_dtype=torch.bfloat16)
    model = by_modules(plain, mixed_precision=precision)
    model(batch(0))
    assert expert.scale.dtype is torch.float64


def test_what_a_wrapper_ignores_no_other_takes(ranks: Ranks) -> None:
    ranks(2, body_all)
