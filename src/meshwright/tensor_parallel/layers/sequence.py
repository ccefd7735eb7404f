"""Modules that run on this rank's shard of a sequence, with replicated parameters.

During the forward, the parameters are leaves over the local tensors (including ``self.weight``);
before and after, even after an error, they are the DTensors. Each rank uses them on other
positions, so their gradients are partial sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.comm.dtensors.dtensor import is_dtensor
from meshwright.comm.dtensors.local_leaves import PartialGradient, forget_unsummed, local_part_of
from meshwright.layout import Shard
from meshwright.randomness import Dropout
from meshwright.tensor_parallel.layouts import PlacedTensor, Site, WithAxis, normal, untraced

_DROPPING = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


@dataclass(frozen=True, slots=True)
class Sequence:
    """The settings of the style for one module. Copies of the module share it."""

    site: Site
    dim: int | None
    """The sharded dim of the activations; None for any dim of local tensors."""
    is_local: bool
    partial: tuple[tuple[str, str, PartialGradient], ...]
    """(path of the owner, name, summing object) of each parameter."""

    def __deepcopy__(self, memo: object) -> Sequence:
        return self


class SequencePart(WithAxis):
    """The mixin that `SequenceParallel` puts before a module's own class."""

    @untraced
    def forward(self, *inputs: object, **options: object) -> object:
        """Run the module's own forward on local tensors; the first input is the sequence.

        Raises ValueError when that is not a tensor, TypeError when the output is not. If any dim
        may be sharded, inputs and outputs are passed through unchanged.
        """
        if self._tensor_parallel.dim is None:
            with self._on_leaves():
                return super().forward(*inputs, **options)
        return self._on_part(self._tensor_parallel.dim, inputs, options)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter. Raises ValueError for a plain one in place of a DTensor."""
        settings = self._tensor_parallel
        is_summed = any(not path and key == name for path, key, _ in settings.partial)
        if is_summed and param is not None and not is_dtensor(param):
            raise ValueError(
                f"{settings.site.labels.name}.{name} is a DTensor, whose gradient SequenceParallel "
                "sums over the ranks, and cannot become a plain parameter: write the values into "
                "the one that is there (with torch.no_grad(): parameter.copy_(...)), or assign it "
                "before parallelize_module"
            )
        super().register_parameter(name, param)

    @property
    def _drops(self) -> bool:
        """True for torch's dropout in training, which needs a DTensor to draw the global mask."""
        return self.training and isinstance(self, _DROPPING) and not isinstance(self, Dropout)

    def _on_part(
        self, dim: int, inputs: tuple[object, ...], options: dict[str, object]
    ) -> torch.Tensor:
        settings = self._tensor_parallel
        site, name = settings.site, settings.site.labels.name
        first = inputs[0] if inputs else None
        if not isinstance(first, torch.Tensor):
            raise ValueError(
                f"expecting input of {self} to be a torch.Tensor or DTensor, but got {first} "
                f"({name}: the first positional input is the sequence)"
            )
        placement = Shard(dim)
        given = site.move(site.arrive(first, placement), placement)
        if self._drops:
            whole = site.leave(given, placement, is_local=False)
            output = site.arrive(super().forward(whole, *inputs[1:], **options), placement).local
        else:
            with self._on_leaves():
                output = super().forward(given.local, *inputs[1:], **options)
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"{name}: expected one tensor as output, found {type(output).__name__}")
        shape = list(output.shape)
        shape[dim] = given.shape[dim]
        found = PlacedTensor(output, normal(placement, output.ndim), tuple(shape))
        return site.leave(found, placement, is_local=settings.is_local)

    @contextmanager
    def _on_leaves(self) -> Iterator[None]:
        """Replace parameters by local leaves in the block; skip those that are not DTensors."""
        settings = self._tensor_parallel
        forget_unsummed(settings.site.axis)
        at_rest: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        try:
            for path, key, add in settings.partial:
                owner = self.get_submodule(path)
                parameter = getattr(owner, key)
                if is_dtensor(parameter):
                    at_rest.append((owner._parameters, key, parameter))
                    part: Any = local_part_of(parameter, add)
                    owner._parameters[key] = part
            yield
        finally:
            for owner, key, parameter in at_rest:
                owner[key] = parameter
