"""Odd models and steps under each strategy, held against one process in double precision."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.data_parallel import fully_shard, replicate
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.testing import Ranks
from support.data_parallel.odd_models import CASES, Case

ON_HOSTS = pytest.mark.devices("host", reason="torch.export takes the device that C++ knows")
STEPS = 2
SHARE = 3


def laid_out(strategy: str, model: Case) -> Any:
    if strategy == "replicate":
        return replicate(model)
    if strategy == "fully_shard":
        for name in model.units:
            fully_shard(model.get_submodule(name))
        return fully_shard(model)
    options = {"use_orig_params": strategy == "original"}
    for name in model.units:
        parent, _, own = name.rpartition(".")
        wrapper = FSDP(model.get_submodule(name), **options)
        setattr(model.get_submodule(parent), own, wrapper)
    return FSDP(model, **options)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def differences(strategy: str, kind: type[Case]) -> list[str]:
    """How the weights differ from those of one process after a few steps."""
    world = communicator()
    torch.manual_seed(0)
    one = kind()
    torch.manual_seed(0)
    model = laid_out(strategy, kind())
    optimizers = sgd(model), sgd(one)
    for number in range(STEPS):
        x = torch.randn(SHARE * world.size, 5, generator=torch.Generator().manual_seed(number))
        kind.step(model, optimizers[0], x.chunk(world.size)[world.rank], number)
        kind.step(one, optimizers[1], x, number)
    found = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }
    if list(found) != list(one.state_dict()):
        return [f"names {list(found)}"]
    return [
        name
        for name, value in one.state_dict().items()
        if not torch.allclose(found[name], value, rtol=kind.tolerance, atol=kind.tolerance)
    ]


def body(strategy: str) -> dict[str, str]:
    """What went wrong, by case; nothing else runs after an error that is not a refusal."""
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    wrong: dict[str, str] = {}
    for name, kind in CASES.items():
        text = kind.refused.get(strategy, "")
        try:
            bad = differences(strategy, kind)
        except (ValueError, RuntimeError) as error:
            if text and text in str(error):
                continue
            raise type(error)(f"{name}: {error}") from error
        if text or bad:
            wrong[name] = "was not refused" if text else f"differs in {bad}"
    return wrong


@pytest.mark.few(1, slow=2)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "strategy",
    [pytest.param("replicate", marks=ON_HOSTS), "fully_shard", "flat", "original"],
)
def test_weights_are_those_of_one_process(ranks: Ranks, strategy: str, size: int) -> None:
    for wrong in ranks(size, body, strategy, timeout=120):
        assert wrong == {}
