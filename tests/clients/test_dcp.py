"""torch's distributed checkpoint between torch's wrappers and ours, both ways, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.testing import Ranks
from support.checkpoint.interchange import OURS, PEERS, load_all, save_all

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_each_goes_on_from_what_the_other_has_saved(ranks: Ranks, tmp_path: Path) -> None:
    """Model and AdamW of DDP, FSDP1, FSDP2, replicate and a plain model: to the last bit."""
    kinds = ["adamw"]
    assert ranks(2, save_all, tmp_path, [*PEERS, *OURS], kinds, timeout=300)[0] == {}
    for sources, names in ((PEERS, OURS), (OURS, PEERS)):
        cells = [(name, 2) for name in sources]
        assert ranks(2, load_all, tmp_path, cells, list(names), kinds, timeout=600)[0] == {}
