"""`fully_shard` of modules that exchange samples: experts, beside dense layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from meshwright.data_parallel import ShardPlacementResult, fully_shard
from meshwright.gradients import clip_grad_norm_
from meshwright.mesh import DeviceMesh
from meshwright.testing import Ranks
from support.data_parallel import exchanging_samples as samples


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def torchs_clip(model: nn.Module) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5)


our_clip = partial(clip_grad_norm_, max_norm=0.5)


def sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


# ------------------------------------------------------------------------ one divisor for all


def body_own_mesh_of_experts(shape: tuple[int, int]) -> None:
    """Experts on a mesh of their own, by ``shard_placement_fn`` alone."""
    one = samples.net()
    mesh, ep, data = samples.meshes(shape)
    model = samples.spread(one, ep)
    own = {p for block in model.blocks for p in block.experts.parameters()}
    result = ShardPlacementResult(Shard(0), mesh["shard"])

    def choose(parameter: nn.Parameter) -> Any:
        return result if parameter in own else None

    sharded(model, data, shard_placement_fn=choose)
    samples.train(model, one, adamw, clip=our_clip)


def test_experts_on_a_mesh_of_their_own_have_the_divisor_of_all(ranks: Ranks) -> None:
    ranks(2, body_own_mesh_of_experts, (1, 2))


@pytest.mark.slow
def test_experts_that_are_sharded_on_a_mesh_of_their_own(ranks: Ranks) -> None:
    ranks(4, body_own_mesh_of_experts, (2, 2))
