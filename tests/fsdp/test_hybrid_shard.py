"""Upstream's cases of hybrid sharding: sharding within groups of ranks and copies over them."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright import fsdp
from meshwright.comm import communicator
from meshwright.fsdp import (
    HYBRID_SHARDING_STRATEGIES,
    ModuleWrapPolicy,
    ShardingStrategy,
    StateDictType,
)
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.fsdp.hybrid_models import MyModel, fsdp_model, hybrid_model

HYBRID = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]


def groups_of(size: int) -> tuple[Any, Any]:
    """Shard and replicate groups of this rank, made as the seed does."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mine: list[Any] = [None, None]
    for start in range(0, world, size):
        ranks = list(range(start, start + size))
        group = dist.new_group(ranks)
        mine[0] = group if rank in ranks else mine[0]
    for start in range(size):
        ranks = list(range(start, world, size))
        group = dist.new_group(ranks)
        mine[1] = group if rank in ranks else mine[1]
    return mine[0], mine[1]


def body_manual_wrap() -> None:
    for strategy in HYBRID_SHARDING_STRATEGIES:
        with pytest.raises(
            ValueError, match="requires explicit specification of process group or device_mesh."
        ):
            FSDP(MyModel(), sharding_strategy=strategy)


def test_raises_manual_wrap_hybrid_shard_when_none_policy(ranks: Ranks) -> None:
    ranks(2, body_manual_wrap)


def body_sync() -> None:
    model = MyModel()
    for layer in (model.lin1, model.lin2, model.lin3):
        nn.init.constant_(layer.weight, dist.get_rank())
    model = FSDP(
        model,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
        sync_module_states=True,
        process_group=groups_of(2),
    )
    warnings.filterwarnings("ignore", message="FSDP.state_dict_type")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        assert (model.lin1.weight == 0).all()
        assert (model.lin2.weight == 0).all()
        assert (model.lin3.weight == 0).all()
        assert all((value == 0).all() for k, value in model.state_dict().items() if "weight" in k)


@pytest.mark.backends("shm", "gloo")
def test_hsdp_sync_module_state(ranks: Ranks) -> None:
    ranks(4, body_sync)


def body_save_load() -> None:
    shard, replicate = groups_of(2)
    build = partial(
        FSDP,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
        process_group=(shard, replicate),
    )
    model = build(MyModel())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 10)).sum().backward()
    optimizer.step()
    assert model.process_group == shard
    assert model._inter_node_pg == replicate
    warnings.filterwarnings("ignore", message="FSDP.state_dict_type")
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model_state = model.state_dict()
        state = FSDP.optim_state_dict(model, optimizer)
    loaded = build(MyModel())
    other = torch.optim.AdamW(loaded.parameters())
    with FSDP.state_dict_type(loaded, StateDictType.SHARDED_STATE_DICT):
        loaded.load_state_dict(model_state)
        FSDP.optim_state_dict_to_load(loaded, other, state)
    other.load_state_dict(state)
    for found, expected in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
def test_hsdp_save_load_state_dict(ranks: Ranks) -> None:
    ranks(4, body_save_load)


def body_invalid_group() -> None:
    with pytest.raises(ValueError, match="Expected process_group to be passed in"):
        FSDP(
            MyModel(),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            process_group=dist.distributed_c10d._get_default_group(),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        )


def test_invalid_pg_specification_raises(ranks: Ranks) -> None:
    ranks(2, body_invalid_group)


@contextlib.contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """Count the calls of two functions of `torch.distributed`, by replacing them."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*reduce_scatter_tensor")
        for name in ("all_reduce", "reduce_scatter_tensor"):
            original: Callable[..., Any] = getattr(dist, name)

            def call(*args: Any, _original: Any = original, _name: str = name, **kw: Any) -> Any:
                counts[_name] += 1
                return _original(*args, **kw)

            setattr(dist, name, call)
            stack.callback(setattr, dist, name, original)
        yield


def body_basic(strategy: str, mixed: bool, use_orig_params: bool, use_mesh: bool) -> None:
    chosen = ShardingStrategy[strategy]
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, world)) if use_mesh else None
    model = hybrid_model(chosen, use_orig_params, mixed=mixed, mesh=mesh)
    hybrid = [m for m in FSDP.fsdp_modules(model) if m.sharding_strategy is chosen]
    assert all(m.sharding_strategy in HYBRID_SHARDING_STRATEGIES for m in hybrid)
    assert {m.process_group.size() for m in hybrid} == {world}
    assert {m._inter_node_pg.size() for m in hybrid} == {1}
    assert len({m.process_group for m in hybrid}) == 1
    assert len({m._inter_node_pg for m in hybrid}) == 1
    inputs = model.module.get_input(torch.device("cpu"))
    counts: Counter[str] = Counter()
    with counted(counts):
        model(*inputs).sum().backward()
    units = len(fsdp._get_fsdp_handles(model))
    expected = sum(1 for m in hybrid if m in fsdp._get_fsdp_states(model) and m._unit is not None)
    assert units == 6 if mixed else units == 5
    assert counts["reduce_scatter_tensor"] == units
    assert counts["all_reduce"] == (expected if mixed else units)


@pytest.mark.few(2)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("strategy", HYBRID)
@pytest.mark.parametrize("mixed", [False, True])
def test_hybrid_basic_setup(ranks: Ranks, strategy: str, mixed: bool) -> None:
    ranks(2, body_all_basic, strategy, mixed)


def body_all_basic(strategy: str, mixed: bool) -> None:
    for use_orig_params, use_mesh in itertools.product((False, True), repeat=2):
        body_basic(strategy, mixed, use_orig_params, use_mesh)


def body_parity(strategy: str, per_node: int) -> None:
    for use_orig_params in (False, True):
        plain = fsdp_model(use_orig_params)
        world = dist.distributed_c10d._get_default_group()
        groups = fsdp._init_intra_and_inter_node_groups(world, per_node)
        hybrid = hybrid_model(ShardingStrategy[strategy], use_orig_params, groups=groups)
        assert hybrid._inter_node_pg.size() > 1
        pairs = [(m, torch.optim.Adam(m.parameters(), lr=1e-2)) for m in (plain, hybrid)]
        torch.manual_seed(dist.get_rank() + 1)
        for _ in range(5):
            inputs = plain.module.get_input(torch.device("cpu"))
            losses = []
            for model, optimizer in pairs:
                optimizer.zero_grad()
                loss = model(*inputs).sum()
                losses.append(loss)
                loss.backward()
                optimizer.step()
            torch.testing.assert_close(losses[0], losses[1])


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", HYBRID)
@pytest.mark.parametrize(("size", "per_node"), [pytest.param(2, 1, marks=pytest.mark.slow), (4, 2)])
def test_hybrid_parity(ranks: Ranks, strategy: str, size: int, per_node: int) -> None:
    ranks(size, body_parity, strategy, per_node)


def body_names() -> None:
    world = communicator()
    first = fsdp.hybrid_process_groups(world.group, 1)
    again = fsdp.hybrid_process_groups(world.group, 1)
    assert first == again
    assert [group.size() for group in first] == [1, 2]
    with pytest.raises(ValueError, match="expected ranks that fill nodes of 3, found 2 ranks"):
        fsdp.hybrid_process_groups(world.group, 3)


def test_groups_are_made_once(ranks: Ranks) -> None:
    ranks(2, body_names)
