"""Seeds that depend on names."""

from __future__ import annotations

import hashlib

__all__ = ["name_seed"]


def name_seed(seed: int, *names: object) -> int:
    """Compute a seed of 63 bits that depends on ``seed`` and ``names``, the same on every
    machine.
    """
    text = "\0".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
