"""BatchNorm over the batches of all ranks together, as in one process, or over each rank's own.

torch's default is each rank's own batch; using it without saying so warns once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.nn import SyncBatchNorm

from meshwright.comm import Communicator
from meshwright.comm.graphs.functional import all_gather
from meshwright.errors import warn
from meshwright.torch_internals.modules import (
    AnyBatchNorm,
    AnyInstanceNorm,
    check_input_dim,
)

M = TypeVar("M", bound=nn.Module)

IS_KNOWN = "_meshwright_local_statistics"
"""The attribute of a BatchNorm whose user has said, or was warned, that the statistics are of
each rank: replicas may be rebuilt, and nested."""

_WRAPPERS = re.compile(r"_(\w+_wrapped_module|orig_mod)\.")


def batch_norms(module: nn.Module) -> dict[str, AnyBatchNorm]:
    """List the BatchNorm modules inside ``module``, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, AnyBatchNorm)}


def running_instance_norms(module: nn.Module) -> dict[str, nn.Module]:
    """List the InstanceNorm modules inside ``module`` that keep running statistics, by name."""
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, AnyInstanceNorm) and part._buffers.get("running_mean") is not None
    }


def with_statistics(module: nn.Module) -> dict[str, nn.Module]:
    """List the modules inside ``module`` that keep batch statistics, by name."""
    return {**batch_norms(module), **running_instance_norms(module)}


def synchronize_batch_norm(module: M, communicator: Communicator) -> M:
    """Make each BatchNorm in ``module`` normalize by the statistics of all ranks, in training mode.

    Returns ``module``.

    Names, class, parameters and buffers stay; only the computation changes. Every rank's forward
    pass must then reach the same BatchNorm modules in the same order. Each of them gathers
    ``2 * channels + 1`` numbers a rank; the backward pass reduces as many.
    """
    for name, part in batch_norms(module).items():
        # An attribute of the instance hides the method of its class.
        setattr(part, "forward", partial(_forward, part, communicator, f"batch norm {name}"))  # noqa: B010
    return module


synchronise_batch_norm = synchronize_batch_norm
"""The older name of `synchronize_batch_norm`."""


def keep_batch_norm_local(module: nn.Module) -> None:
    """Keep every BatchNorm in ``module`` on each rank's own batch, without a warning.

    That is torch's behavior; its numbers differ from those of one process. The same holds for
    running statistics of an InstanceNorm.
    """
    for part in with_statistics(module).values():
        part.__dict__[IS_KNOWN] = True


class LocalStatistics:
    """Warns once, on one rank, of BatchNorm modules that normalize by each rank's batch alone."""

    def __init__(self, module: nn.Module, axes: Sequence[Communicator]) -> None:
        """``axes`` are those over which ranks train on different batches."""
        self._axes = tuple(axes)
        self._is_first = all(axis.rank == 0 for axis in axes) and any(a.size > 1 for a in axes)
        self.follow(module)

    def follow(self, module: nn.Module) -> None:
        """Watch the modules that ``module`` holds now instead of the former ones."""
        self._named = with_statistics(module) if self._is_first else {}
        self.is_due = bool(self._named)
        """True where there is one that has not trained yet."""

    def tell(self) -> None:
        """Warn about modules that use the statistics of their own batch in the pass that begins."""
        waiting = {name: part for name, part in self._named.items() if not _uses_batch(part)}
        found = {
            name: part
            for name, part in self._named.items()
            if name not in waiting and _is_unasked(part)
        }
        if found:
            # One warning is enough, also where others are frozen for now.
            for part in self._named.values():
                part.__dict__[IS_KNOWN] = True
            waiting.clear()
        self._named = waiting
        self.is_due = bool(waiting)
        named = {_WRAPPERS.sub("", n) or type(p).__name__: p for n, p in found.items()}
        if batched := [n for n, part in named.items() if isinstance(part, AnyBatchNorm)]:
            self._warn(batched)
        if kept := [n for n, part in named.items() if not isinstance(part, AnyBatchNorm)]:
            self._warn_of_running(kept)

    def _warn_of_running(self, names: Sequence[str]) -> None:
        ranks = " x ".join(str(axis.size) for axis in self._axes)
        warn(
            f"InstanceNorm {', '.join(map(repr, names[:3]))} keeps running statistics of the batch "
            f"of each of {ranks} ranks alone, so an evaluation gives other numbers than one "
            "process would. Leave track_running_stats out; if those of each rank are meant, call "
            "keep_batch_norm_local(model) of meshwright.data_parallel"
        )

    def _warn(self, names: Sequence[str]) -> None:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        ranks = " x ".join(str(axis.size) for axis in self._axes)
        warn(
            f"BatchNorm {', '.join(map(repr, names[:3]))}{more} normalizes by the batch of each of "
            f"{ranks} ranks alone, so this trains to other numbers than one process would. For the "
            "statistics of all ranks call synchronize_batch_norm(model, communicator()) of "
            "meshwright.data_parallel and meshwright.comm before the first forward; if those of "
            "each rank are meant, call keep_batch_norm_local(model) of meshwright.data_parallel"
        )


def _uses_batch(part: nn.Module) -> bool:
    # Past nn.Module's lookup of buffers, as frozen modules are asked in each pass.
    return part.training or part._buffers.get("running_mean") is None


def _is_unasked(part: nn.Module) -> bool:
    """Whether the user has not chosen whose statistics ``part`` uses."""
    if isinstance(part, SyncBatchNorm) or IS_KNOWN in vars(part):
        return False
    return getattr(vars(part).get("forward"), "func", None) is not _forward


def _forward(
    module: AnyBatchNorm, communicator: Communicator, label: str, x: torch.Tensor
) -> torch.Tensor:
    if not module.training:
        return type(module).forward(module, x)
    check_input_dim(module, x)
    wide = x if x.dtype.itemsize >= 4 else x.float()
    dims = [0, *range(2, x.ndim)]
    channels = x.shape[1]
    count = x.numel() // channels
    if count == 1 and communicator.is_alone:
        raise ValueError(
            f"{label}: expected more than one value per channel over all ranks in training, got "
            f"input size {list(x.shape)}: their variance is not known"
        )
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
    """View a vector with one element per channel so that it broadcasts over ``ndim`` dims."""
    return vector.view(-1, *(1,) * (ndim - 2))


@torch.no_grad()
def _track(
    module: AnyBatchNorm, mean: torch.Tensor, variance: torch.Tensor, total: torch.Tensor
) -> None:
    """Update the running statistics with the unbiased variance, as one process does."""
    if module.running_mean is None or module.running_var is None:
        return
    factor = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / float(module.num_batches_tracked)
    weight = 0.0 if factor is None else factor
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), weight)
    unbiased = variance * (total / (total - 1))
    module.running_var.lerp_(unbiased.to(module.running_var.dtype), weight)
