"""BatchNorm with the statistics of all ranks' batches together, as one process would have them."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from meshwright.comm import Communicator
from meshwright.comm.functional import all_gather

__all__ = ["batch_norms", "synchronise_batch_norm"]


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm modules inside ``module``, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, _BatchNorm)}


def synchronise_batch_norm(module: nn.Module, communicator: Communicator) -> None:
    """Let every BatchNorm in ``module`` normalise by the statistics of all ranks, in training mode.

    Names, class, parameters and buffers stay; only the computation changes. Every rank's forward
    pass must then reach the same BatchNorm modules in the same order. Each of them gathers
    ``2 * channels + 1`` numbers a rank; the backward pass reduces as many.
    """
    for name, part in batch_norms(module).items():
        # An attribute of the instance hides the method of its class.
        setattr(part, "forward", partial(_forward, part, communicator, f"batch norm {name}"))  # noqa: B010


def _forward(
    module: _BatchNorm, communicator: Communicator, label: str, x: torch.Tensor
) -> torch.Tensor:
    if not module.training:
        return type(module).forward(module, x)
    module._check_input_dim(x)
    wide = x if x.dtype.itemsize >= 4 else x.float()
    dims = [0, *range(2, x.ndim)]
    channels = x.shape[1]
    count = x.numel() // channels
    own_mean = wide.sum(dims) / max(count, 1)
    own_squares = (wide - _spread(own_mean, x.ndim)).square().sum(dims)
    row = torch.cat([own_mean.new_full((1,), count), own_mean, own_squares]).unsqueeze(0)
    rows = all_gather(row, communicator, label=label)
    counts, means, squares = rows[:, :1], rows[:, 1 : channels + 1], rows[:, channels + 1 :]
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    # Squares about each rank's own mean, moved to the common mean: no digits cancel.
    variance = (squares.sum(0) + (counts * (means - mean).square()).sum(0)) / total
    _track(module, mean.detach(), variance.detach(), total.detach())
    scale = torch.rsqrt(variance + module.eps)
    result = (wide - _spread(mean, x.ndim)) * _spread(scale, x.ndim)
    if module.weight is not None:
        result = result * _spread(module.weight, x.ndim) + _spread(module.bias, x.ndim)
    return result.to(x.dtype)


def _spread(vector: torch.Tensor, ndim: int) -> torch.Tensor:
    """One number a channel, in the shape that multiplies a batch of ``ndim`` dims."""
    return vector.view(-1, *(1,) * (ndim - 2))


@torch.no_grad()
def _track(
    module: _BatchNorm, mean: torch.Tensor, variance: torch.Tensor, total: torch.Tensor
) -> None:
    """Move the running statistics, by the variance without bias, as one process does."""
    if module.running_mean is None or module.running_var is None:
        return
    factor = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked += 1
        if factor is None:
            factor = 1.0 / float(module.num_batches_tracked)
    weight = 0.0 if factor is None else factor
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), weight)
    unbiased = variance * (total / (total - 1))
    module.running_var.lerp_(unbiased.to(module.running_var.dtype), weight)
