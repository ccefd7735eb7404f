"""Low-precision training of torchao under our `fully_shard`: what trains, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.comm import communicator
from meshwright.testing import Ranks
from support.clients import needs

needs("torchao")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROWS = 32


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 32, bias=False))


def halves() -> tuple[torch.Tensor, ...]:
    """Two batches, whose scales are their own: one process computes them apart, too."""
    return torch.randn(2, ROWS, 32, generator=torch.Generator().manual_seed(1)).unbind()


def step(found: nn.Module, batches: tuple[torch.Tensor, ...]) -> None:
    for batch in batches:
        (found(batch).square().mean() / len(batches)).backward()


def float8(found: nn.Module, *, gathers: bool) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=True)
    return convert_to_float8_training(found, config=config)


def int8(found: nn.Module) -> nn.Module:
    from torchao import quantize_
    from torchao.prototype.quantized_training import int8_mixed_precision_training

    quantize_(found, int8_mixed_precision_training())
    return found


def trained(found: nn.Module, batches: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(found.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        step(found, batches)
        optimizer.step()
    return {name: plain(parameter) for name, parameter in found.named_parameters()}


def plain(parameter: Any) -> torch.Tensor:
    local = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    inner = getattr(local, "_tensor", getattr(local, "_data", local))
    return inner.detach().clone()


@pytest.mark.parametrize("kind", ["float8", "int8"])
def test_weights_that_gather_themselves_train_as_in_one_process(ranks: Ranks, kind: str) -> None:
    def body() -> dict[str, torch.Tensor]:
        world = communicator()
        found = float8(model(), gathers=True) if kind == "float8" else int8(model())
        mw.fully_shard(found[0])
        mw.fully_shard(found[2])
        mw.fully_shard(found)
        return trained(found, (halves()[world.rank],))

    def alone() -> dict[str, torch.Tensor]:
        found = float8(model(), gathers=False) if kind == "float8" else int8(model())
        return trained(found, halves())

    (expected,) = ranks(1, alone, timeout=300)
    for found in ranks(2, body, timeout=300):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_weights_of_several_tensors_are_refused_by_name(ranks: Ranks) -> None:
    def body() -> None:
        from torchao import quantize_
        from torchao.prototype.quantized_training import int8_weight_only_quantized_training

        found = model()
        quantize_(found, int8_weight_only_quantized_training())
        with pytest.raises(TypeError, match="is a Int8QuantizedTrainingLinearWeight"):
            mw.fully_shard(found)

    ranks(2, body, timeout=300)
