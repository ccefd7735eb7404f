"""Strategies for Lightning Fabric: replicas, and sharded parameters.

::

    fabric = Fabric(strategy=lightning.replicated(), devices=4)
    fabric = Fabric(strategy=lightning.sharded(lambda model: model.layers), devices=4)

Fabric does launching, data, precision, clipping, saving and loading. Meshwright wraps the modules
and leaves gradients unreduced under ``no_backward_sync``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from meshwright.data_parallel import FSDPModule, fully_shard, replicate
from meshwright.data_parallel.replicas.replicated import ReplicatedModule


class SyncControl:
    """Fabric's control over whether gradients are reduced."""

    def no_backward_sync(
        self, module: FSDPModule | ReplicatedModule, enabled: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Leave gradients of passes in the block unreduced, if ``enabled``."""
        if not enabled:
            return contextlib.nullcontext()
        return _unreduced(module) if isinstance(module, FSDPModule) else module.no_sync()


@contextlib.contextmanager
def _unreduced(module: FSDPModule) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def replicated(**keywords: Any) -> Any:  # noqa: ANN401 - a strategy of Lightning
    """Make a strategy for ``Fabric`` that applies `replicate` to modules.

    ``keywords`` are those of Fabric's ``DDPStrategy`` and of `replicate`. ``state_dict`` has the
    names of the plain module.
    """
    from lightning.fabric.strategies import DDPStrategy

    class ReplicateStrategy(DDPStrategy):
        """Fabric's DDP strategy with `replicate`."""

        def __init__(self, **keywords: Any) -> None:
            super().__init__(**keywords)
            self._backward_sync_control = SyncControl()

        def setup_module(self, module: nn.Module) -> nn.Module:
            """Replicate ``module``."""
            device_ids = self._determine_ddp_device_ids()
            return replicate(module, device_ids=device_ids, **self._ddp_kwargs)

    return ReplicateStrategy(**keywords)


def sharded(
    units: Callable[[Any], Iterable[nn.Module]] | None = None,
    *,
    save_distributed_checkpoint: bool = True,
    **options: Any,
) -> Any:  # noqa: ANN401 - a strategy of Lightning
    """Make a strategy for ``Fabric`` that applies `fully_shard` to modules, over all ranks.

    ``units(model)`` lists the modules that are gathered one at a time, such as the layers; the
    root module is the last unit. ``options`` are those of `fully_shard`. As with all sharding
    strategies of Fabric, set up the model first: ``model = fabric.setup_module(model)``, then
    ``optimizer = fabric.setup_optimizers(make(model.parameters()))``. Checkpoints are Fabric's: a
    folder of shards, or one file of full tensors without ``save_distributed_checkpoint``.
    """
    from lightning.fabric.strategies import ModelParallelStrategy

    def shard(model: nn.Module, mesh: Any) -> nn.Module:  # noqa: ANN401 - a DeviceMesh
        for unit in () if units is None else units(model):
            fully_shard(unit, mesh=mesh["data_parallel"], **options)
        return fully_shard(model, mesh=mesh["data_parallel"], **options)

    class ShardStrategy(ModelParallelStrategy):
        """Fabric's model-parallel strategy with `fully_shard`."""

        def setup_environment(self) -> None:
            """Make the mesh: one data-parallel dim over all ranks."""
            self._data_parallel_size = self.num_nodes * self.num_processes
            super().setup_environment()
            self._backward_sync_control = SyncControl()

    return ShardStrategy(
        shard, tensor_parallel_size=1, save_distributed_checkpoint=save_distributed_checkpoint
    )
