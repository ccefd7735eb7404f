"""Gradients of another dtype than their parameter, and optimizers of mixed lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.data_parallel import DistributedDataParallel, fully_shard, replicate
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.testing import Ranks


def net() -> Any:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 2, dtype=torch.bfloat16)
    model.weight.grad_dtype = torch.float32
    return model


def body() -> None:
    for shard in (fully_shard, FSDP, lambda m: FSDP(m, use_orig_params=True)):
        with pytest.raises(TypeError, match=r"'weight' of torch.bfloat16 has grad_dtype=torch.fl"):
            shard(net())
    one, x = net(), torch.ones(2, 4, dtype=torch.bfloat16)
    one(x).square().mean().backward()
    for wrap in (
        replicate,
        lambda m: replicate(m, gradient_as_bucket_view=True),
        lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True),
    ):
        model = wrap(net())
        for _ in range(2):
            model.zero_grad()
            model(x).square().mean().backward()
            for p, q in zip(model.parameters(), one.parameters(), strict=True):
                assert p.grad.dtype == q.grad.dtype
                torch.testing.assert_close(p.grad, q.grad, rtol=0.02, atol=0.02)


def test_gradients_of_another_dtype_are_kept_or_refused(ranks: Ranks) -> None:
    ranks(2, body)


def body_of_private_state() -> None:
    model: Any = fully_shard(nn.Linear(4, 2))
    with pytest.raises(AttributeError, match="set_reshard_after_forward"):
        model._get_fsdp_state()


def test_the_private_state_of_torch_names_the_public_setting(ranks: Ranks) -> None:
    ranks(1, body_of_private_state)


def body_of_mixed_lists(kind: str) -> None:
    found = []
    for shards in (True, False):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)).double()
        if shards:
            fully_shard(model[1])
            replicate(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, **{kind: True})
        for _ in range(3):
            if shards:
                model[1].unshard(async_op=True)
            model(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_one_optimizer_steps_shards_beside_replicas(ranks: Ranks, kind: str) -> None:
    ranks(2, body_of_mixed_lists, kind)
