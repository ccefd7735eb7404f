"""Seeds from names."""

from __future__ import annotations

from meshwright.randomness import name_seed


def test_name_seed_is_stable() -> None:
    assert name_seed(0, "x") == name_seed(0, "x") != name_seed(0, "y") != name_seed(1, "y")
    assert 0 <= name_seed(5, 1, 2) < 2**63
    # Runs are resumed by it: its values may never change.
    assert name_seed(3, "layers.0", 7) == 1292305171802069795
