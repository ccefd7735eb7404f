"""`ContextParallel`: the style of a module whose attention sees the keys of all ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.context_parallel.attention import Attending, attending, now_attending
from meshwright.context_parallel.split import ContextSplit
from meshwright.mesh import DeviceMesh
from meshwright.tensor_parallel import ParallelStyle
from meshwright.tensor_parallel.styles import shown
from meshwright.torch_internals.trees import tree_leaves


class ContextParallel(ParallelStyle):
    """Attention of a module over sequences that are split over ranks.

    Inside of `context_parallel` its split holds. Elsewhere rank r of the axis has the r-th of equal
    chunks of each sequence, a document of its own. The module is given hidden states (rows, tokens,
    width), or queries, keys and values (rows, heads, tokens, width) with ``seq_dim=2``.
    ``attention_type``: as torch has it; that of FlexAttention is refused.

    Raises ValueError for another ``seq_dim`` or ``attention_type``.
    """

    def __init__(self, *, seq_dim: int = 2, attention_type: object = None) -> None:
        kind = getattr(attention_type, "name", attention_type) or "SDPA"
        if seq_dim not in (2, -2) or str(kind).upper() != "SDPA":
            raise ValueError(
                "expected seq_dim = 2 and attention_type SDPA, of scaled_dot_product_attention, "
                f"found {seq_dim} and {kind}"
            )
        self.seq_dim, self.attention_type = seq_dim, attention_type

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        vars(module)["_meshwright_axis"] = self.site_of(module, device_mesh).axis
        own = type(module)
        bases = {"__module__": own.__module__}
        module.__class__ = type(own.__name__, (SplitAttention, own), bases)
        return module

    def __repr__(self) -> str:
        return shown(self, "seq_dim", "attention_type")


class SplitAttention(nn.Module):
    """Comes before the class of a module."""

    _meshwright_axis: Communicator

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the module has it
        """Run the module's own forward, with attention caught."""
        with self._attending(args, kwargs):
            return super().forward(*args, **kwargs)

    def _attending(self, *given: object) -> contextlib.AbstractContextManager[None]:
        tensors = (x for x in tree_leaves(given) if isinstance(x, torch.Tensor) and x.ndim > 2)
        first = next(tensors, None)
        if now_attending() is not None or first is None:
            return contextlib.nullcontext()
        axis = self._meshwright_axis
        length = first.shape[-2] * axis.size
        return attending(Attending(axis, ContextSplit.of([[length]], axis.size, "contiguous")))
