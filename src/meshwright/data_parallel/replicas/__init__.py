"""Replicas: models whose copies are equal on all ranks.

Bottom-up:

    gradient_bucket  a bucket as a communication hook sees it
    low_precision    computation in a narrower dtype
    options          the options of `replicate` and `DistributedDataParallel`
    bucket_layout    the gradients that are reduced together, and their order
    buckets          the reductions: buckets of gradients, and large or sparse gradients alone
    static_graph     the check that every pass uses what the first one used
    reducer          hooks that count arriving gradients and launch the reductions
    traced           a replica under `torch.compile`
    replica          the state of one replicated module, around its reducer
    join             ranks that have run out of batches
    distributed      `DistributedDataParallel`
    replicated       `replicate`
"""

from __future__ import annotations

__all__: list[str] = []
