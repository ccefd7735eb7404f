"""Strategies of Lightning Fabric: equal replicas, and parameters in parts.

::

    fabric = Fabric(strategy=lightning.replicated(), devices=4)
    fabric = Fabric(strategy=lightning.sharded(lambda model: model.layers), devices=4)

Launch, data, precision, clipping, saving and loading are Fabric's. What wraps a module, and what
leaves gradients unreduced in ``no_backward_sync``, is ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from meshwright.data_parallel import FSDPModule, fully_shard, replicate
from meshwright.data_parallel.replicas.replicated import ReplicatedModule


class SyncControl:
    """The answer to Fabric where gradients are to stay on their rank."""

    def no_backward_sync(
        self, module: FSDPModule | ReplicatedModule, enabled: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Leave gradients of passes in the block on this rank, if ``enabled``."""
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
    """Make a strategy for ``Fabric`` that gives modules to `replicate`.

    ``keywords`` are those of Fabric's ``DDPStrategy`` and of `replicate`. ``state_dict`` has the
    names of the plain module.
    """
    from lightning.fabric.strategies import DDPStrategy

    class ReplicateStrategy(DDPStrategy):
        """Fabric's strategy of replicas, on ours."""

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
    """Make a strategy for ``Fabric`` that gives modules to `fully_shard`, over all ranks.

    ``units(model)`` lists the modules that are gathered one at a time, such as the layers; the
    whole model is the last. ``options`` are those of `fully_shard`. As with any strategy of Fabric
    that shards, the model is set up first: ``model = fabric.setup_module(model)``, then
    ``optimizer = fabric.setup_optimizers(make(model.parameters()))``. Checkpoints are Fabric's: a
    folder of parts, or one file of whole tensors without ``save_distributed_checkpoint``.
    """
    from lightning.fabric.strategies import ModelParallelStrategy

    def shard(model: nn.Module, mesh: Any) -> nn.Module:  # noqa: ANN401 - a DeviceMesh
        for unit in () if units is None else units(model):
            fully_shard(unit, mesh=mesh["data_parallel"], **options)
        return fully_shard(model, mesh=mesh["data_parallel"], **options)

    class ShardStrategy(ModelParallelStrategy):
        """Fabric's strategy of parallel models, on ours."""

        def setup_environment(self) -> None:
            """Make the mesh: all ranks hold parts of the same."""
            self._data_parallel_size = self.num_nodes * self.num_processes
            super().setup_environment()
            self._backward_sync_control = SyncControl()

    return ShardStrategy(
        shard, tensor_parallel_size=1, save_distributed_checkpoint=save_distributed_checkpoint
    )
