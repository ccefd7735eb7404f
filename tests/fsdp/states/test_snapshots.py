"""State dicts of managed parameters stay as they are when training goes on, and load."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from typing import Any

import torch
from torch import nn

from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import ShardingStrategy, StateDictType
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.internals.fsdp import CONFIGS

WITHOUT_MESH = list(itertools.product(StateDictType, [False], ["FULL_SHARD", "NO_SHARD"]))
WITH_MESH = [
    (StateDictType.FULL_STATE_DICT, True, "FULL_SHARD"),
    (StateDictType.SHARDED_STATE_DICT, True, "FULL_SHARD"),
]


def build(strategy: str, mesh: Any, *, use_orig_params: bool) -> tuple[FSDP, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2)).double()
    model = FSDP(
        plain,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
        ignored_modules=[plain[2]],
        device_mesh=mesh,
    )
    return model, plain[2]


def train(model: FSDP, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.arange(6, dtype=torch.float64).view(2, 3)).square().sum()
    loss.backward()
    optimizer.step()
    return loss.item()


def local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def body(kind: StateDictType, mesh: Any, strategy: str, use_orig_params: bool) -> None:
    for offloads in (False, True):
        model, ignored = build(strategy, mesh, use_orig_params=use_orig_params)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        train(model, optimizer)
        config, optim_config = (of(offload_to_cpu=offloads) for of in CONFIGS[kind])
        with FSDP.state_dict_type(model, kind, config, optim_config):
            state = copy.copy(model.state_dict())
            held = FSDP.optim_state_dict(model, optimizer)
            values = {**state, "": held["state"]}
            own = dict(_flat(values))
            kept = {name: local(value).clone() for name, value in own.items()}
            # Also of what is ignored, as in any module's state dict, the state is live.
            live = {name for name in own if name.startswith("2.")}
            saved = {name: p.detach().clone() for name, p in ignored.named_parameters()}
            expected = [train(model, optimizer) for _ in range(2)]
            for name, value in own.items():
                assert name in live or torch.equal(local(value), kept[name]), (kind, name)
            other, rest = build(strategy, mesh, use_orig_params=use_orig_params)
            fresh = torch.optim.Adam(other.parameters(), lr=0.1)
            train(other, fresh)
            with FSDP.state_dict_type(other, kind):
                state = {k: v for k, v in state.items() if k not in live}
                if mesh is None:
                    file = io.BytesIO()
                    torch.save(state, file)
                    file.seek(0)
                    state = torch.load(file)
                other.load_state_dict(state, strict=False)
                rest.load_state_dict(saved)
                fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, held))
            found = [train(other, fresh) for _ in range(2)]
            assert found == expected, (kind, strategy)
            for name, value in own.items():
                assert name in live or torch.equal(local(value), kept[name]), (kind, name)


def _flat(values: dict[str, Any], prefix: str = "") -> Any:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def body_all() -> None:
    warnings.simplefilter("ignore")
    for (kind, has_mesh, strategy), use_orig in itertools.product(
        [*WITHOUT_MESH, *WITH_MESH], [False, True]
    ):
        mesh = init_device_mesh("cpu", (2,)) if has_mesh else None
        body(kind, mesh, strategy, use_orig)


def test_snapshots_do_not_change_with_a_step(ranks: Ranks) -> None:
    ranks(2, body_all)
