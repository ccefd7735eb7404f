"""Mixed precision casts floating-point tensors: complex parameters keep both of their parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.data_parallel import (
    DistributedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
    replicate,
)
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import MixedPrecision as FsdpPrecision
from meshwright.testing import Ranks

LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}


class Turn(nn.Module):
    """Turns pairs of features by complex weights, and tells in which dtypes it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.turn = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        self.seen: tuple[torch.dtype, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = (x.dtype, self.scale.dtype, self.turn.dtype)
        turned = torch.view_as_complex((x * self.scale).float().unflatten(-1, (2, 2))) * self.turn
        return torch.view_as_real(turned).flatten(-2)


WRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "replicate": partial(replicate, mixed_precision=MixedPrecision(**LOW)),
    "DistributedDataParallel": partial(
        DistributedDataParallel, mixed_precision=MixedPrecision(**LOW)
    ),
    "fully_shard": partial(fully_shard, mp_policy=MixedPrecisionPolicy(**LOW)),
    "FullyShardedDataParallel": partial(
        FSDP,
        use_orig_params=True,
        mixed_precision=FsdpPrecision(**LOW, keep_low_precision_grads=True),
    ),
}


def body() -> None:
    one, x = Turn(), torch.tensor([[1.0, 2.0, -3.0, 1.0], [2.0, 0.0, 1.0, 1.0]])
    one(x).square().sum().backward()
    for name, wrap in WRAPS.items():
        inner = Turn()
        model = wrap(inner)
        model(x).square().sum().backward()
        low = torch.bfloat16
        assert inner.seen == (low, low, torch.complex64), name
        if isinstance(model, FSDP):
            with FSDP.summon_full_params(model, with_grads=True):
                found = inner.turn.grad.clone()
        else:
            found = inner.turn.grad
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
        torch.testing.assert_close(found, one.turn.grad, msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_complex_parameters_keep_their_dtype(ranks: Ranks) -> None:
    ranks(2, body)
