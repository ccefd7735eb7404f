"""Modules whose parameters are shards: `fully_shard` and its iterations.

Bottom-up:

    agreement       units, settings, passes and their order, the same on all ranks
    module_tree     the modules of one root, and those added later
    iteration       the state that units of one root share in an iteration
    module_hooks    the hooks that gather, free and reduce units
    traced_units    the same inside a compiled graph
    sharded_join    ranks that have run out of batches
    sharded_module  the members that `fully_shard` adds to a module
    sharded         `fully_shard`
"""

from __future__ import annotations

__all__: list[str] = []
