"""Access to the functions of c10d.

Bottom-up:

    calls     calls as fingerprints, compared before data moves
    lookup    functions of `torch.distributed`, looked up at the moment of a call
    nccl      settings of c10d's own watchdog for NCCL
    gloo      faster algorithms for Gloo, built from Gloo's own operations, chosen by size
    shares    gathers of equal shares, reductions to them, and several operations in one launch
    checking  every call of a group compared with those of the other ranks, on request
"""

from __future__ import annotations

__all__: list[str] = []
