"""Options that were imported from torch mean the same here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as peer

from meshwright import fsdp
from meshwright.comm import communicator
from meshwright.data_parallel import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from meshwright.testing import Ranks
from support.internals.fsdp import own_config, own_member


@pytest.mark.parametrize("name", ["ShardingStrategy", "BackwardPrefetch", "StateDictType"])
def test_members_of_torchs_enums(name: str) -> None:
    kind, theirs = getattr(fsdp, name), getattr(peer, name)
    assert [own_member(kind, member) for member in theirs] == list(kind)
    for wrong in (1, theirs, None, "FULL_SHARD"):
        with pytest.raises(TypeError, match=f"expected a {name} "):
            own_member(kind, wrong)


@pytest.mark.parametrize(
    "name", ["MixedPrecision", "FullStateDictConfig", "ShardedOptimStateDictConfig"]
)
def test_configurations_of_torch(name: str) -> None:
    kind = getattr(fsdp, name)
    found = own_config(kind, getattr(peer, name)())
    assert type(found) is kind
    assert found == kind()
    assert own_config(kind, 3) == 3


def test_policies_of_torch() -> None:
    theirs = peer.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    assert MixedPrecisionPolicy.of(theirs) == MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, cast_forward_inputs=False
    )
    assert OffloadPolicy.of(peer.CPUOffloadPolicy(pin_memory=False)) == CPUOffloadPolicy(False)
    assert OffloadPolicy.of(peer.OffloadPolicy()) == OffloadPolicy()
    with pytest.raises(
        TypeError, match="expected mp_policy .* found MixedPrecision without output"
    ):
        MixedPrecisionPolicy.of(peer.MixedPrecision())
    with pytest.raises(TypeError, match="expected offload_policy .* found dtype"):
        OffloadPolicy.of(torch.bfloat16)


def body() -> None:
    layer: Any = nn.Linear(4, 4)
    policy = peer.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert fsdp.fully_shard(layer, mp_policy=policy)(torch.randn(2, 4)).dtype is torch.bfloat16
    wrapped = fsdp.FullyShardedDataParallel(
        nn.Linear(4, 4),
        device_id=communicator().device,
        sharding_strategy=peer.ShardingStrategy.SHARD_GRAD_OP,  # pyrefly: ignore[bad-argument-type]
        backward_prefetch=peer.BackwardPrefetch.BACKWARD_POST,  # pyrefly: ignore[bad-argument-type]
    )
    assert wrapped.sharding_strategy is fsdp.ShardingStrategy.SHARD_GRAD_OP
    with pytest.warns(FutureWarning):
        fsdp.FullyShardedDataParallel.set_state_dict_type(
            wrapped,
            peer.StateDictType.SHARDED_STATE_DICT,  # pyrefly: ignore[bad-argument-type]
            peer.ShardedStateDictConfig(),  # pyrefly: ignore[bad-argument-type]
        )
    assert len(wrapped.state_dict()) == 2


def test_modules_take_them(ranks: Ranks) -> None:
    ranks(2, body)
