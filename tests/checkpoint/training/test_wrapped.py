"""Names of the plain model under wrappers, and extra state of modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright import checkpoint
from support.internals.checkpoint import ModelState, NamedOptimizer, plain_names
from support.internals.data_parallel import SteppedOver


class Wrapper(SteppedOver):
    """A wrapper as the class of replicas is one."""

    _wrapped_as = "module"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Compiled(nn.Module):
    """Around a module as `torch.compile` is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def wrapped() -> nn.Module:
    """Wrappers around the whole and a part, and a module of the user's with the wrapper's name."""
    model = nn.Module()
    model.block = Wrapper(Compiled(nn.Linear(2, 2)))
    model.module = nn.Linear(2, 3)
    return Compiled(Wrapper(model))


def test_wrappers_are_in_no_name() -> None:
    model = wrapped()
    names = ["block.weight", "block.bias", "module.weight", "module.bias"]
    own = [name for name, _ in model.named_parameters()]
    assert own[0] == "_orig_mod.module.block.module._orig_mod.weight"
    assert list(map(plain_names(model), own)) == names
    optimizer = torch.optim.SGD(model.parameters())
    assert NamedOptimizer(optimizer, [model]).groups == [names]
    assert list(ModelState([model]).tensors) == names


class Counting(nn.Module):
    """Has extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {"rows": 0}

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state


def test_extra_state_of_modules_goes_on(tmp_path: Path) -> None:
    one, other = nn.Sequential(Counting()), nn.Sequential(Counting())
    one[0].seen = {"rows": 7, "mean": torch.ones(2)}
    checkpoint.load(checkpoint.save(tmp_path, 1, model=one), model=other)
    assert other[0].seen["rows"] == 7
    assert torch.equal(other[0].seen["mean"], torch.ones(2))
