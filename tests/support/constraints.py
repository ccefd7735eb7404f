"""The versions that development and CI install."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def pinned() -> list[str]:
    """The lines of the file of constraints."""
    return re.findall(r"^[\w.-]+==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
