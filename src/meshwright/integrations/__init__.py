"""What other programs need to run on ours. Each file imports its program when it is called.

Bottom-up:

    ray  loops of Ray Train: metrics and checkpoints
"""

from __future__ import annotations

__all__: list[str] = []
