"""The strategies of the strategy table behind one face: wrap, read gradients, read weights."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor

from meshwright.comm import communicator
from meshwright.data_parallel import (
    DistributedDataParallel,
    MixedPrecisionPolicy,
    flat_groups,
    fully_shard,
    replicate,
)
from meshwright.data_parallel import MixedPrecision as ReplicaPrecision
from meshwright.fsdp import (
    CustomPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedGradScaler,
    ShardingStrategy,
    fsdp_units,
)
from meshwright.mesh import init_device_mesh
from support.internals.comm import part_like, whole

Pairs = Iterator[tuple[str, torch.Tensor | None, torch.Tensor | None]]
"""Name, what this rank holds of a gradient, and what it should hold."""


class Laid(Protocol):
    """A model laid out over the ranks."""

    module: nn.Module

    def parameters(self) -> list[nn.Parameter]: ...

    def no_sync(self) -> contextlib.AbstractContextManager[None]: ...

    def set_trainable(self, name: str, is_trainable: bool) -> None: ...

    def gradients(self, expected: Mapping[str, torch.Tensor]) -> Pairs: ...

    def weights(self) -> Mapping[str, torch.Tensor]: ...

    def scaler(self) -> GradScaler: ...


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a strategy is asked to lay out."""

    model: nn.Module
    units: list[str]
    is_narrow: bool
    """Whether parameters are float32 and compute in bfloat16."""
    scale: float = 1024.0


class Whole:
    """Every rank holds the whole model, with ``replicate`` or the wrapper class."""

    def __init__(self, request: Request, wrap: Callable[[Request], nn.Module]) -> None:
        self._plain = request.model
        self._scale = request.scale
        self.module = wrap(request)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.module.no_sync()

    def set_trainable(self, name: str, is_trainable: bool) -> None:
        self._plain.get_submodule(name).requires_grad_(is_trainable)

    def gradients(self, expected: Mapping[str, torch.Tensor]) -> Pairs:
        for name, parameter in self._plain.named_parameters():
            yield name, parameter.grad, expected.get(name)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self._plain.state_dict()

    def scaler(self) -> GradScaler:
        return GradScaler("cpu", init_scale=self._scale)


class Chunked(Whole):
    """`fully_shard`: DTensors at rest."""

    def gradients(self, expected: Mapping[str, torch.Tensor]) -> Pairs:
        for name, parameter in self._plain.named_parameters():
            found, wanted = parameter.grad, expected.get(name)
            wanted = None if wanted is None else part_like(wanted, parameter)
            yield name, local(found), local(wanted)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {name: whole(value) for name, value in self._plain.state_dict().items()}

    def scaler(self) -> GradScaler:
        return ShardedGradScaler("cpu", init_scale=self._scale)


class Flattened(Chunked):
    """`fully_shard` with an optimizer on one long tensor for each unit."""

    def parameters(self) -> list[nn.Parameter]:
        return flat_groups(self._plain)


class Facade:
    """`FullyShardedDataParallel`."""

    def __init__(
        self, request: Request, strategy: ShardingStrategy, sizes: tuple[int, int], orig: bool
    ) -> None:
        model = request.model
        names = {id(p): name for name, p in model.named_parameters()}
        self._names = {
            (id(module), key): names[id(parameter)]
            for module in model.modules()
            for key, parameter in module.named_parameters(recurse=False)
        }
        self._scale = request.scale
        self._has_originals = orig
        chosen = {id(model.get_submodule(name)) for name in request.units}
        narrow = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.module: Any = _quietly(
            FullyShardedDataParallel,
            model,
            device_mesh=mesh_of(sizes) if "HYBRID" in strategy.name else None,
            sharding_strategy=strategy,
            auto_wrap_policy=CustomPolicy(lambda part: id(part) in chosen),
            mixed_precision=narrow if request.is_narrow else None,
            use_orig_params=orig,
        )

    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.module.no_sync()

    def set_trainable(self, name: str, is_trainable: bool) -> None:
        self.module.module.get_submodule(name).requires_grad_(is_trainable)

    def gradients(self, expected: Mapping[str, torch.Tensor]) -> Pairs:
        for unit in fsdp_units(self.module):
            for group in unit.groups:
                layout, axes = group.buffer.layout, group.axes
                places = [slot.places[0] for slot in group.slots]
                names = [self._names[id(module), key] for module, key in places]
                pieces = layout.owned(axes.part if axes.shard is not None else 0)
                wanted = {
                    names[piece.index]: expected[names[piece.index]].flatten()[
                        piece.start : piece.stop
                    ]
                    for piece in pieces
                    if names[piece.index] in expected
                }
                if self._has_originals:
                    for slot, name in zip(group.slots, names, strict=True):
                        mine, theirs = slot.original.grad, wanted.get(name)
                        if name in wanted or name not in expected:
                            whole_shape = mine is not None and axes.shard is None
                            yield name, mine.flatten() if whole_shape else mine, theirs
                    continue
                line = torch.zeros(layout.shard_size, dtype=group.types.master)
                for piece in pieces:
                    if names[piece.index] in wanted:
                        stop = piece.offset + piece.stop - piece.start
                        line[piece.offset : stop] = wanted[names[piece.index]]
                flat = unit.exposure.flat
                # Zeros where a unit ran and none of its parameters was used.
                has_gradient = any(name in expected for name in names) or flat.grad is not None
                yield " ".join(names), flat.grad, line if has_gradient else None

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.module.state_dict()

    def scaler(self) -> GradScaler:
        return ShardedGradScaler("cpu", init_scale=self._scale)


def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def mesh_of(sizes: tuple[int, int]) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


def halves(first_is_whole: bool) -> tuple[int, int]:
    """Sizes of the axes replicate and shard; with two ranks one of them has both."""
    size = communicator().size
    if size == 2:
        return (2, 1) if first_is_whole else (1, 2)
    return size // 2, 2


def _quietly(build: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy")
        warnings.filterwarnings("ignore", message=".*has both parameters with requires_grad=")
        warnings.filterwarnings("ignore", message="Both mixed precision and an auto_wrap_policy")
        return build(*args, **kwargs)


def _replicate(request: Request) -> nn.Module:
    return replicate(request.model)


def _distributed(request: Request) -> nn.Module:
    narrow = ReplicaPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return DistributedDataParallel(
        request.model,
        gradient_as_bucket_view=True,
        mixed_precision=narrow if request.is_narrow else None,
    )


def _shard(
    after: bool | int | None = None, is_hybrid: bool = False
) -> Callable[[Request], nn.Module]:
    def wrap(request: Request) -> nn.Module:
        narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {
            "mesh": mesh_of(halves(True)) if is_hybrid else None,
            "reshard_after_forward": after,
            "mp_policy": narrow if request.is_narrow else None,
        }
        for name in request.units:
            fully_shard(request.model.get_submodule(name), **options)
        return fully_shard(request.model, **options)

    return wrap


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to lay a model out."""

    lay_out: Callable[[Request], Laid]
    is_flat: bool = False
    """One flat parameter for each unit."""
    has_policy: bool = True
    """Whether it can be told to compute in a narrower dtype."""
    casts_norms: bool = True
    """Whether a policy for dtypes holds for BatchNorm too."""
    broadcasts: bool = False
    """Whether buffers are those of rank 0 in each forward pass."""


def _facade(strategy: ShardingStrategy, orig: bool) -> Strategy:
    def lay_out(request: Request) -> Laid:
        return Facade(request, strategy, halves("ZERO2" in strategy.name), orig)

    return Strategy(lay_out=lay_out, is_flat=not orig, casts_norms=False)


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        "replicate": Strategy(
            lay_out=lambda r: Whole(r, _replicate), has_policy=False, broadcasts=True
        ),
        "ddp": Strategy(lay_out=lambda r: Whole(r, _distributed), broadcasts=True),
        "fully_shard": Strategy(lay_out=lambda r: Chunked(r, _shard(True))),
        "fully_shard kept": Strategy(lay_out=lambda r: Chunked(r, _shard(False))),
        "fully_shard hybrid": Strategy(lay_out=lambda r: Chunked(r, _shard(None, True))),
        "fully_shard flat": Strategy(lay_out=lambda r: Flattened(r, _shard())),
        **{
            f"{strategy.name} {'original' if orig else 'flat'}": _facade(strategy, orig)
            for strategy in ShardingStrategy
            for orig in (False, True)
        },
    }
)
