"""Models and optimizers under each wrapper, ours and torch's, through torch's checkpoints.

Every rank trains on the same batch, and worlds are powers of two: the mean over ranks is exact, so
that each wrapper on each world trains as one plain process does, to the last bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as PeerFSDP
from torch.distributed.fsdp import fully_shard as peer_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as PeerWrapPolicy
from torch.nn.parallel import DistributedDataParallel as PeerDDP

from meshwright.data_parallel import DistributedDataParallel, fully_shard, replicate
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import ModuleWrapPolicy
from meshwright.mesh import init_device_mesh

__all__ = ["OPTIMIZERS", "OURS", "PEERS", "STEPS", "WRAPPERS", "load_all", "save_all"]

STEPS = 2

Wrap = Callable[[nn.Module], nn.Module]


class Net(nn.Module):
    """Rows that divide by 4 and rows that do not, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 8)
        self.norm = nn.LayerNorm(8)
        self.middle = nn.Sequential(nn.Linear(8, 7), nn.Tanh())
        self.last = nn.Linear(7, 3, bias=False)
        self.register_buffer("count", torch.tensor(float(seed)))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.norm(self.first(x))))


def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _sharded(shard: Callable[..., Any], model: nn.Module) -> nn.Module:
    mesh = _mesh()
    for part in (model.first, model.middle, model):
        shard(part, mesh=mesh)
    return model


def _peer_fsdp(model: nn.Module, **options: Any) -> nn.Module:
    policy = PeerWrapPolicy({nn.Linear})
    if options.pop("with_mesh", False):
        options["device_mesh"] = _mesh()
    return PeerFSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


def _fsdp(model: nn.Module, **options: Any) -> nn.Module:
    if options.pop("with_mesh", False):
        options["device_mesh"] = _mesh()
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **options)


OURS: Mapping[str, Wrap] = {
    "DistributedDataParallel": DistributedDataParallel,
    "replicate": replicate,
    "FullyShardedDataParallel, flat": _fsdp,
    "FullyShardedDataParallel, original": partial(_fsdp, use_orig_params=True),
    "FullyShardedDataParallel, original, mesh": partial(
        _fsdp, use_orig_params=True, with_mesh=True
    ),
    "fully_shard": partial(_sharded, fully_shard),
}

PEERS: Mapping[str, Wrap] = {
    "plain": lambda model: model,
    "torch DistributedDataParallel": PeerDDP,
    "torch FullyShardedDataParallel, flat": _peer_fsdp,
    "torch FullyShardedDataParallel, original": partial(_peer_fsdp, use_orig_params=True),
    "torch FullyShardedDataParallel, original, mesh": partial(
        _peer_fsdp, use_orig_params=True, with_mesh=True
    ),
    "torch fully_shard": partial(_sharded, peer_fully_shard),
}

WITHOUT_MESH = ("torch FullyShardedDataParallel, flat", "torch FullyShardedDataParallel, original")

WRAPPERS: Mapping[str, Wrap] = {**PEERS, **OURS}


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


OPTIMIZERS = {"adamw": _adamw, "sgd": _sgd}
OPTIONS = {"adamw": StateDictOptions(), "sgd": StateDictOptions(flatten_optimizer_state_dict=True)}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def one_process(kind: str, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    model = Net(0)
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer, range(steps))
    return get_state_dict(model, optimizer)


def sorted_groups(moments: dict[str, Any]) -> dict[str, Any]:
    """``moments`` with the names of each group in order: flat parameters have another one."""
    groups = [{**group, "params": sorted(group["params"])} for group in moments["param_groups"]]
    return {**moments, "param_groups": groups}


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Paths at which nested values differ; ``found`` may hold parts that know the whole."""
    if isinstance(expected, Mapping):
        if set(found) != set(expected):
            return [f"{path}: {sorted(set(found) ^ set(expected))}"]
        return [
            d for key in expected for d in differences(found[key], expected[key], f"{path}.{key}")
        ]
    if isinstance(expected, list | tuple):
        pairs = enumerate(zip(found, expected, strict=True))
        return [d for number, (a, b) in pairs for d in differences(a, b, f"{path}[{number}]")]
    if isinstance(expected, torch.Tensor):
        return [] if torch.equal(found, expected) else [path]
    return [] if found == expected else [path]


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer, options=OPTIONS[kind])
    return {"model": weights, "optimizer": moments}


def folder_of(folder: Path, name: str, kind: str, size: int) -> Path:
    return folder / f"{name.replace(' ', '-')}-{kind}-{size}"


def quiet() -> None:
    warnings.filterwarnings("ignore")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[-300:]}"


def save_all(folder: Path, names: Sequence[str], kinds: Sequence[str]) -> dict[str, str]:
    """Train under each of ``names`` and save; the errors, by name and optimizer."""
    quiet()
    errors: dict[str, str] = {}
    for name in names:
        for kind in kinds:
            try:
                model = WRAPPERS[name](Net(0))
                optimizer = OPTIMIZERS[kind](model)
                train(model, optimizer, range(STEPS))
                path = folder_of(folder, name, kind, dist.get_world_size())
                dcp.save(_state(model, optimizer, kind), checkpoint_id=path)
            except (Exception, CheckpointException) as error:
                errors[f"{name} {kind}"] = _said(error)
    return errors


def load_all(
    folder: Path, sources: Sequence[tuple[str, int]], names: Sequence[str], kinds: Sequence[str]
) -> dict[str, str]:
    """Load each of ``sources`` into each of ``names`` and train on; what went wrong."""
    quiet()
    errors: dict[str, str] = {}
    if dist.get_world_size() > 2:
        # Torch asks for a GPU where a rank of its older wrapper has nothing to load.
        names = [name for name in names if name not in WITHOUT_MESH]
    for source, size in sources:
        for name in names:
            for kind in kinds:
                cell = f"{source} on {size} -> {name} on {dist.get_world_size()}, {kind}"
                try:
                    wrong = _load(folder_of(folder, source, kind, size), name, kind)
                except (Exception, CheckpointException) as error:
                    wrong = [_said(error)]
                if wrong:
                    errors[cell] = str(wrong)[:300]
    return errors


def _load(path: Path, name: str, kind: str) -> list[str]:
    model = WRAPPERS[name](Net(7))
    optimizer = OPTIMIZERS[kind](model)
    state = _state(model, optimizer, kind)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=OPTIONS[kind],
    )
    wrong: list[str] = []
    for steps in (STEPS, STEPS + 1):
        full = StateDictOptions(full_state_dict=True)
        found = (
            get_model_state_dict(model, options=full),
            sorted_groups(get_optimizer_state_dict(model, optimizer, options=full)),
        )
        weights, moments = one_process(kind, steps)
        expected = weights, sorted_groups(moments)
        wrong += differences(list(found), list(expected), f"after {steps} steps")
        train(model, optimizer, range(steps, steps + 1))
    return wrong
