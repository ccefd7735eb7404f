"""Replicas: models whose copies are equal on all ranks.

Bottom-up:

    options          the options of `replicate` and `DistributedDataParallel`
    gradient_bucket  a bucket as a communication hook sees it
    slots            the gradients that are reduced together, and their order
    buckets          several gradients in one buffer, reduced in one call
    alone            a large gradient in its own memory, a sparse one by its rows
    static_graph     the check that every pass uses what the first one used
    reducer          hooks that count gradients in, and the reductions
    traced           a replica under `torch.compile`
    low_precision    computation in a narrower dtype
    replica          a module that is kept equal, around its reducer
    join             ranks that have run out of batches
    replicated       `replicate`
    distributed      `DistributedDataParallel`
"""

from __future__ import annotations

__all__: list[str] = []
