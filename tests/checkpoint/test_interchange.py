"""Every wrapper, ours and torch's, goes on from what every other has saved, to the last bit.

The table: saved by torch's distributed checkpoint under one wrapper on some ranks, loaded under
another on as many or others, model and optimizer, and trained on.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.testing import Ranks
from support.checkpoint.interchange import OPTIMIZERS, OURS, PEERS, load_all, save_all

SIZES = (1, 2, 4)


def table(ranks: Ranks, folder: Path, names: list[str], kinds: list[str], sizes: list[int]) -> None:
    """Save under each name on each number of ranks, load each under each on each, and compare."""
    for size in sizes:
        assert ranks(size, save_all, folder, names, kinds, timeout=300)[0] == {}
    sources = [(name, size) for name in names for size in sizes]
    for size in sizes:
        assert ranks(size, load_all, folder, sources, names, kinds, timeout=1800)[0] == {}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.slow
def test_some_wrappers_go_on_from_each_other(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    names = ["plain", "DistributedDataParallel", "FullyShardedDataParallel, flat"]
    names += ["torch FullyShardedDataParallel, original"] if kind == "adamw" else ["fully_shard"]
    table(ranks, tmp_path, names, [kind], [2])


@pytest.mark.soak
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_all_wrappers_go_on_from_each_other(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    table(ranks, tmp_path, [*PEERS, *OURS], [kind], list(SIZES))
