"""Communication in graphs: of autograd, and of compilers.

Bottom-up:

    functional  collectives that autograd and the compiler understand
    untraced    functions that `torch.compile` calls without tracing them
    marks       operators that stand for gradient reductions until a pass fuses them
    units       operators that gather, free and reduce sharded units
"""

from __future__ import annotations

__all__: list[str] = []
