"""Wrappers as a pipeline's schedule drives them."""

from __future__ import annotations

from torch import nn

from meshwright.data_parallel.residency import ShardedResidency
from meshwright.data_parallel.sharded_modules.module_hooks import Driver
from meshwright.fsdp.unit_wrapper import wrappers_in


class WrapperResidency(ShardedResidency):
    """Of all wrappers of one root."""

    def prepare(self, module: nn.Module, driver: Driver) -> None:
        """Set the root up, choose dtypes, and take what was written to parameters since."""
        for wrapper in wrappers_in(module):
            wrapper.prepare()
