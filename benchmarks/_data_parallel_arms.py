"""The models of the data-parallel benchmark, and each under every strategy: ours and torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from meshwright.data_parallel import fully_shard, replicate
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.fsdp import wrap as our_wrap

__all__ = ["ARMS", "FAMILIES", "MODELS", "PEERS", "WORKLOADS", "Workload", "encoder", "make"]


@dataclass(frozen=True)
class Workload:
    """A model, one rank's batch, how many steps make a round, and the class of a unit."""

    build: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    steps: int
    layer: type[nn.Module]


def encoder(layers: int, dim: int, heads: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        dim, heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def linears() -> nn.Module:
    return nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(4)))


LAYER = nn.TransformerEncoderLayer

WORKLOADS = {
    "tiny": Workload(lambda: encoder(60, 32, 4), lambda: torch.randn(4, 16, 32), 6, LAYER),
    "gpt": Workload(lambda: encoder(6, 256, 8), lambda: torch.randn(4, 128, 256), 3, LAYER),
    "few": Workload(lambda: encoder(12, 32, 4), lambda: torch.randn(1, 4, 32), 4, LAYER),
    "net": Workload(linears, lambda: torch.randn(1, 2000), 6, nn.Linear),
    "large": Workload(
        lambda: encoder(24, 2048, 16).bfloat16(),
        lambda: torch.randn(4, 1024, 2048, dtype=torch.bfloat16),
        3,
        LAYER,
    ),
    "miniature": Workload(lambda: encoder(2, 16, 2), lambda: torch.randn(2, 4, 16), 2, LAYER),
}

MODELS = ("tiny", "gpt", "net")
"""Those whose times are compared."""

Build = Callable[[nn.Module, Workload, dist.ProcessGroup | None], nn.Module]
"""Makes an arm of a model of its own. The group is the one that torch's arms are to use."""


def ddp(**options: bool) -> Build:
    def build(model: nn.Module, work: Workload, group: dist.ProcessGroup | None) -> nn.Module:
        return DistributedDataParallel(model, process_group=group, **options)

    return build


def torch_flat(model: nn.Module, work: Workload, group: dist.ProcessGroup | None) -> nn.Module:
    return torch_fsdp1(model, work, group, use_orig_params=False)


def torch_orig(model: nn.Module, work: Workload, group: dist.ProcessGroup | None) -> nn.Module:
    return torch_fsdp1(model, work, group, use_orig_params=True)


def torch_fsdp1(
    model: nn.Module, work: Workload, group: dist.ProcessGroup | None, *, use_orig_params: bool
) -> nn.Module:
    return TorchFullyShardedDataParallel(
        model,
        process_group=group,
        device_id=device_of(model),
        auto_wrap_policy=ModuleWrapPolicy({work.layer}),
        use_orig_params=use_orig_params,
    )


def torch_fsdp2(model: nn.Module, work: Workload, group: dist.ProcessGroup | None) -> nn.Module:
    options: dict[str, Any] = {}
    if group is not None:
        options["mesh"] = DeviceMesh.from_group(
            group, device_of(model).type, mesh_dim_names=("shard",)
        )
    shard_each(model, work.layer, lambda part: torch_fully_shard(part, **options))
    return model


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def world_mesh(model: nn.Module) -> DeviceMesh:
    kind = device_of(model).type
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("shard",))


def ours(model: nn.Module, work: Workload, group: dist.ProcessGroup | None) -> nn.Module:
    mesh = world_mesh(model)
    shard_each(model, work.layer, lambda part: fully_shard(part, mesh=mesh))
    return model


def facade(*, use_orig_params: bool) -> Build:
    def build(model: nn.Module, work: Workload, group: dist.ProcessGroup | None) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            device_mesh=world_mesh(model),
            device_id=device_of(model),
            auto_wrap_policy=our_wrap.ModuleWrapPolicy({work.layer}),
            use_orig_params=use_orig_params,
        )

    return build


def shard_each(
    model: nn.Module, layer: type[nn.Module], apply: Callable[[nn.Module], object]
) -> None:
    """Each layer a unit, and the root."""
    parts: Iterable[nn.Module] = [part for part in model.modules() if isinstance(part, layer)]
    for part in (*parts, model):
        apply(part)


ARMS: dict[str, Build] = {
    "plain": lambda model, work, group: model,
    "ddp": ddp(),
    "ddp view": ddp(gradient_as_bucket_view=True),
    "ddp static": ddp(gradient_as_bucket_view=True, static_graph=True),
    "replicate": lambda model, work, group: replicate(model),
    "replicate view": lambda model, work, group: replicate(model, gradient_as_bucket_view=True),
    "fsdp1 flat": torch_flat,
    "fsdp1 orig": torch_orig,
    "fsdp2": torch_fsdp2,
    "facade flat": facade(use_orig_params=False),
    "facade orig": facade(use_orig_params=True),
    "fully_shard": ours,
}

FAMILIES = {
    "replicated": ("plain", "ddp", "ddp view", "ddp static", "replicate", "replicate view"),
    "sharded": (
        "plain",
        "fsdp1 flat",
        "fsdp1 orig",
        "fsdp2",
        "facade flat",
        "facade orig",
        "fully_shard",
    ),
}

PEERS = {
    "replicated": ("ddp", "ddp view", "ddp static"),
    "sharded": ("fsdp1 flat", "fsdp1 orig", "fsdp2"),
}
"""The arms of each family that ours are compared with."""


def make(
    name: str, arm: str, model: nn.Module, group: dist.ProcessGroup | None = None
) -> nn.Module:
    """A copy of ``model`` under the strategy ``arm``."""
    return ARMS[arm](copy.deepcopy(model), WORKLOADS[name], group)
