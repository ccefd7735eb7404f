"""Modules as users have them, seen by data parallelism.

Bottom-up:

    nested            the tensors in whatever a module is given or returns
    module_tensors    the parameters and buffers that a module holds now
    equal_buffers     the buffers that are kept equal
    batch_norm        BatchNorm with the statistics of all ranks, or of one
    checkpoint_names  names without the wrappers, for torch's checkpoint functions
    of_this_process   modules that no other process and no file can hold
"""

from __future__ import annotations

__all__: list[str] = []
