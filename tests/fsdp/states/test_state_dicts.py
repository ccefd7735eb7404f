"""State dicts of the three kinds, saved and loaded, and torch's FSDP as the measure."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Peer
from torch.distributed.fsdp import StateDictType as PeerType

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import keep_batch_norm_local
from meshwright.fsdp import (
    FullStateDictConfig,
    LocalStateDictConfig,
    ModuleWrapPolicy,
    ShardingStrategy,
    StateDictType,
)
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp.wrap import (
    CustomPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.internals.comm import ShardView

FULL, LOCAL, SHARDED = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
)


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        keep_batch_norm_local(self.norm)
        self.last = nn.Linear(7, 3)
        self.tied = nn.Linear(7, 3, bias=False)
        self.tied.weight = self.last.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x))
        return self.last(hidden) + self.tied(hidden)


POLICY = ModuleWrapPolicy({nn.Linear})


@contextmanager
def kind(model: nn.Module, chosen: StateDictType, config: Any = None) -> Iterator[None]:
    context = FSDP.state_dict_type(model, chosen, config)
    with pytest.warns(FutureWarning, match="are being deprecated"):
        context.__enter__()
    try:
        yield
    finally:
        context.__exit__(None, None, None)


def equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name].cpu(), value.cpu()), name  # what is offloaded, too


def body_full(use_orig_params: bool) -> None:
    plain = Net().state_dict()
    model = FSDP(Net(), auto_wrap_policy=POLICY, use_orig_params=use_orig_params)
    equal(model.state_dict(), plain)
    equal(nn.Sequential(model).state_dict(), {f"0.{k}": v for k, v in plain.items()})
    with kind(model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        found = model.state_dict()
    equal(found, plain if dist.get_rank() == 0 else {})
    other = FSDP(Net(1), auto_wrap_policy=POLICY, use_orig_params=use_orig_params)
    recorder = Recorder()
    with observe(recorder):
        assert not other.load_state_dict(plain).missing_keys
    assert recorder.collectives == []
    equal(other.state_dict(), plain)
    torch.testing.assert_close(other(torch.ones(2, 5)), Net()(torch.ones(2, 5)))
    broken = dict(plain)
    broken["extra"] = broken.pop("first.bias")
    with pytest.raises(RuntimeError, match=r"first\.bias"):
        other.load_state_dict(broken)
    assert other.load_state_dict(broken, strict=False).missing_keys == ["first.bias"]
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.bias"):
        other.load_state_dict({**plain, "first.bias": torch.ones(3)})


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_full_state_dicts_are_those_of_the_module(ranks: Ranks, use_orig_params: bool) -> None:
    ranks(3, body_full, use_orig_params)


def body_sharded(use_orig_params: bool, use_mesh: bool) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)) if use_mesh else None
    options: dict[str, Any] = {"auto_wrap_policy": POLICY, "device_mesh": mesh}
    model = FSDP(Net(), use_orig_params=use_orig_params, **options)
    other = FSDP(Net(1), use_orig_params=not use_orig_params, **options)
    plain = Net().state_dict()
    recorder = Recorder()
    with kind(model, SHARDED):
        with observe(recorder):
            state = model.state_dict()
        assert use_mesh or recorder.collectives == []
        assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in plain.items()}
        assert use_mesh or isinstance(state["first.weight"], ShardView)
        for name, value in plain.items():
            found = state[name]
            whole = found.full_tensor() if hasattr(found, "full_tensor") else found
            assert torch.equal(whole, value), name
    with kind(other, SHARDED):
        if use_orig_params or use_mesh:
            return other.load_state_dict(state) and None
        other.load_state_dict(model.state_dict() if use_mesh else state)
    equal(other.state_dict(), plain)
    return None


@pytest.mark.few(1)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("use_mesh", [False, True])
def test_sharded_state_dicts_round_trip(
    ranks: Ranks, use_orig_params: bool, use_mesh: bool
) -> None:
    ranks(2, body_sharded, use_orig_params, use_mesh)


def body_other_wrapping(strategy: ShardingStrategy) -> None:
    model = FSDP(Net(), auto_wrap_policy=POLICY)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The `NO_SHARD`")
        other = FSDP(Net(1), sharding_strategy=strategy)
    with kind(model, SHARDED):
        state = model.state_dict()
    held = [value.local.numel() for value in state.values() if isinstance(value, ShardView)]
    assert dist.get_rank() == 0 or 0 in held  # the last bias lies on the first ranks alone
    with kind(other, SHARDED):
        other.load_state_dict(state)
    equal(other.state_dict(), Net().state_dict())


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_sharded_state_dicts_go_to_another_wrapping(
    ranks: Ranks, strategy: ShardingStrategy
) -> None:
    """A rank whose elements fitted, as do none, skipped the gathers that the others waited in."""
    ranks(4, body_other_wrapping, strategy)


def body_local() -> None:
    model = FSDP(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    peer = Peer(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), device_id=communicator().device)
    assert model._flat_param.shape == peer._flat_param.shape == (17,)
    with kind(model, LOCAL, LocalStateDictConfig()):
        state = model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Peer.state_dict_type(peer, PeerType.LOCAL_STATE_DICT):
            expected = peer.state_dict()
        assert list(state) == list(expected) == ["_flat_param"]
        assert state["_flat_param"].shape == expected["_flat_param"].size() == (66,)
    other = FSDP(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    with kind(other, LOCAL):
        other.load_state_dict(state)
    assert torch.equal(other._flat_param, model._flat_param)


def test_local_state_dicts_are_flat_shards(ranks: Ranks) -> None:
    ranks(4, body_local)


def body_settings() -> None:
    model = FSDP(nn.Linear(4, 4))
    with pytest.raises(ZeroDivisionError), kind(model, SHARDED):
        raise ZeroDivisionError
    assert FSDP.get_state_dict_type(model).state_dict_type is FULL
    with (
        pytest.raises(RuntimeError, match="Expected state_dict_config of type"),
        pytest.warns(FutureWarning, match="deprecated"),
    ):
        FSDP.set_state_dict_type(model, FULL, LocalStateDictConfig())
    inner = FSDP(nn.Linear(4, 4))
    both = nn.Sequential(model, inner)
    with pytest.warns(FutureWarning, match="deprecated"):
        before = FSDP.set_state_dict_type(inner, SHARDED)
    assert before.state_dict_type is FULL
    with pytest.raises(AssertionError, match="should have the same state_dict_type"):
        FSDP.get_state_dict_type(both)


def test_settings_are_restored_and_checked(ranks: Ranks) -> None:
    ranks(2, body_settings)


def body_no_shard() -> None:
    with pytest.warns(FutureWarning, match="The `NO_SHARD` sharding strategy is deprecated."):
        model = FSDP(Net(), sharding_strategy=ShardingStrategy.NO_SHARD)
    with (
        kind(model, SHARDED),
        pytest.warns(UserWarning, match="When using ``NO_SHARD`` for ``ShardingStrategy``"),
    ):
        equal(model.state_dict(), Net().state_dict())


def test_without_sharding_the_dict_is_full(ranks: Ranks) -> None:
    ranks(2, body_no_shard)


class Twice(nn.Module):
    """A layer and a block that have two names each, one of them in a list."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.again = self.layer
        self.blocks = nn.ModuleList([self.block, nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](self.again(self.block(self.layer(x)))))


def chosen_by_name(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) or getattr(module, "out_features", 0) == 4


POLICIES: dict[str, Callable[..., Any]] = {
    "types": ModuleWrapPolicy({nn.Linear}),
    "types inside of types": ModuleWrapPolicy({nn.Linear, nn.Sequential}),
    "sizes": partial(size_based_auto_wrap_policy, min_num_params=20),
    "custom": CustomPolicy(chosen_by_name),
    "function": partial(lambda_auto_wrap_policy, lambda_fn=chosen_by_name),
    "always": always_wrap_policy,
    "layers": partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential}),
}


def body_policies(policy: str, use_orig_params: bool) -> None:
    plain, inner = Twice().double(), Twice().double()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ModuleList.*")
        model = FSDP(inner, auto_wrap_policy=POLICIES[policy], use_orig_params=use_orig_params)
    optimizer, plain_optimizer = (
        torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, plain)
    )
    for step in range(2):
        batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).double()
        model(batch.chunk(2)[dist.get_rank()]).square().mean().backward()
        plain(batch).square().mean().backward()
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    model.load_state_dict({name: 2 * value for name, value in plain.state_dict().items()})
    with kind(model, SHARDED):
        model.load_state_dict(model.state_dict())
    state = FSDP.optim_state_dict(model, optimizer)["state"]
    assert sorted(state) == sorted(name for name, _ in plain.named_parameters())
    equal(model.state_dict(), {name: 2 * value for name, value in plain.state_dict().items()})


def body_all_policies(use_orig_params: bool) -> None:
    for policy in POLICIES:
        body_policies(policy, use_orig_params)


@pytest.mark.few(1)
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["views", "flat"])
def test_policies_wrap_a_module_under_two_names_once(ranks: Ranks, use_orig_params: bool) -> None:
    ranks(2, body_all_policies, use_orig_params)
