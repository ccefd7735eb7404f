"""User modules as data parallelism sees them.

Bottom-up:

    nested            the tensors in the inputs and outputs of a module
    module_tensors    the parameters and buffers that a module holds now; buffers kept equal
    batch_norm        BatchNorm with the statistics of all ranks, or of one
    checkpoint_names  names without the wrappers, for torch's checkpoint functions
    of_this_process   modules that cannot be pickled
"""

from __future__ import annotations

__all__: list[str] = []
