"""Modules that run on this rank's part of a sequence, with parameters that every rank holds.

While the forward runs, the parameters are leaves over the local tensors (``self.weight`` is one
there); before and after, whatever it ends with, they are the DTensors. Each rank uses them on other
positions, so that their gradients are partial sums.
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
from meshwright.tensor_parallel.layouts import Arrival, Cut, Site, normal, untraced

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
    """The dim of the activations that is cut; None for any one of local tensors."""
    is_local: bool
    partial: tuple[tuple[str, str, PartialGradient], ...]
    """Path of the owner, name, and what sums the gradient."""

    def __deepcopy__(self, memo: object) -> Sequence:
        return self


class SequencePart(Cut):
    """The class that `SequenceParallel` puts before a module's own."""

    @untraced
    def forward(self, *inputs: object, **options: object) -> object:
        """Run the module's own forward on local tensors; the first input is the sequence.

        Raises ValueError when that is not a tensor, TypeError when the output is not. Where any dim
        may be cut, inputs and output are what the module takes and gives.
        """
        if self._tensor_parallel.dim is None:
            with self._on_leaves():
                return super().forward(*inputs, **options)
        return self._on_part(self._tensor_parallel.dim, inputs, options)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Assign a parameter. Raises ValueError for a plain one: nothing would sum its gradient."""
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
        """True where the mask is to be that of one process; ours knows what it is a part of."""
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
        found = Arrival(output, normal(placement, output.ndim), tuple(shape))
        return site.leave(found, placement, is_local=settings.is_local)

    @contextmanager
    def _on_leaves(self) -> Iterator[None]:
        """Put local leaves in place of parameters, but for those that a manager has replaced."""
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
