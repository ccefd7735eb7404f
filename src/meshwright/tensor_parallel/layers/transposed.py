"""Linear layers that hold their matrix as (input features, output features).

Those of Hugging Face's GPT-2 are no `torch.nn.Linear` but a ``Conv1D``. They are known by what they
hold, so that nothing of that package is imported.
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.tensor_parallel.layers.linear import Settings, by_columns, by_rows
from meshwright.tensor_parallel.layouts import untraced

__all__ = ["ColumnConv1D", "RowConv1D", "is_conv1d"]


def is_conv1d(module: nn.Module) -> bool:
    """Check for ``nx`` input, ``nf`` output features, and a weight of that shape."""
    shape = getattr(module, "nx", None), getattr(module, "nf", None)
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and tuple(weight.shape) == shape


class ColumnConv1D(nn.Module):
    """A ``Conv1D`` that holds some of the output features: put before the module's own class."""

    _tensor_parallel: Settings
    nx: int
    nf: int

    @untraced
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Output features of this rank, laid out as the style says."""
        settings, features = self._tensor_parallel, (self.nx, self.nf)
        return by_columns(self, settings, x, features, is_transposed=True)


class RowConv1D(nn.Module):
    """A ``Conv1D`` that holds some of the input features: put before the module's own class."""

    _tensor_parallel: Settings
    nx: int
    nf: int

    @untraced
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, laid out as the style says, with the bias added once."""
        settings, features = self._tensor_parallel, (self.nx, self.nf)
        return by_rows(self, settings, x, features, is_transposed=True)
