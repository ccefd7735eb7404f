"""Memory that is reused from step to step.

Bottom-up:

    heap              how much freed memory the C heap keeps
    pages             pages that move between tensors instead of being freed and allocated again
    reusable_storage  1-D tensors whose memory can be freed and restored while views stay valid
"""

from __future__ import annotations

__all__: list[str] = []
