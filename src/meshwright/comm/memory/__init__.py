"""Memory that is used again from step to step.

Bottom-up:

    heap              what C's heap keeps of what is freed
    pages             pages that move between tensors instead of being freed and allocated again
    reusable_storage  1-D tensors whose memory comes and goes, while views of them stay valid
"""

from __future__ import annotations

__all__: list[str] = []
