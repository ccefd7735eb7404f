"""`OwnParameters`: the style of a module that computes with parameters of its own, such as experts.

::

    summed   y = sum_r f(x, W_r)    x is whole, its gradient is summed; f is linear in its output
    else     y_r = f(x_r, W_r)      x is this rank's part already
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.comm.dtensors.dtensor import AnyPlacement, is_dtensor
from meshwright.comm.dtensors.local_leaves import local_part_of
from meshwright.layout import Partial, Replicate
from meshwright.mesh import DeviceMesh
from meshwright.tensor_parallel.functions import copy_to
from meshwright.tensor_parallel.layouts import PlacedTensor, Site, WithAxis, untraced
from meshwright.tensor_parallel.styles import ParallelStyle, distribute, guard_loading, shown
from meshwright.torch_internals.trees import tree_map_only


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of the style for one module. Copies of the module share it."""

    site: Site
    keys: tuple[str, ...]
    is_summed: bool
    partial: tuple[()] = ()
    """Each rank has the whole gradient of its parts."""

    def __deepcopy__(self, memo: object) -> _Settings:
        return self


class OwnParameters(ParallelStyle):
    """Shards parameters of a module that its own forward uses: ``placements`` by their names.

    The forward runs on local parts. With ``is_summed`` its inputs are whole on every rank and its
    output, one tensor, is a summand; otherwise both are this rank's parts already.

    Raises ValueError for a dim that does not divide where tensors lie side by side along it.
    """

    def __init__(self, placements: Mapping[str, AnyPlacement], *, is_summed: bool) -> None:
        self.placements = placements
        self.is_summed = is_summed

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        site = self.site_of(module, device_mesh)
        for key, placement in self.placements.items():
            shape = tuple(getattr(module, key).shape)
            parts, dim = getattr(placement, "split_factor", 1), getattr(placement, "dim", 0)
            if parts > 1 and shape[dim] % (parts * site.axis.size):
                raise ValueError(
                    f"{site.labels.name}.{key} has {parts} matrices side by side in dim {dim} of "
                    f"{shape}, of which {site.axis.size} ranks of axis {site.axis.axis} cannot "
                    f"have equal parts each: expected a multiple of {parts * site.axis.size}"
                )
            distribute(module, key, placement, site, self.src_data_rank)
        guard_loading(module)
        vars(module)["_meshwright_style"] = _Settings(site, (*self.placements,), self.is_summed)
        own = type(module)
        names = {"__module__": own.__module__}
        module.__class__ = type(own.__name__, (OwnParametersPart, own), names)
        return module

    def __repr__(self) -> str:
        return shown(self, "placements", "is_summed")


class OwnParametersPart(WithAxis):
    """The mixin that `OwnParameters` puts before a module's own class."""

    @untraced
    def forward(self, *inputs: Any, **options: Any) -> Any:  # noqa: ANN401 - the module's own
        """Run the module's own forward on local parameters."""
        settings: _Settings = self._meshwright_style
        if not settings.is_summed:
            with self._on_leaves():
                return super().forward(*inputs, **options)
        inputs, options = tree_map_only(
            torch.Tensor, partial(_used_in_part, settings.site), (inputs, options)
        )
        with self._on_leaves():
            found = super().forward(*inputs, **options)
        if not isinstance(found, torch.Tensor):
            raise ValueError(
                f"{settings.site.labels.name}: expected one tensor as output, to be summed over "
                f"the ranks, found {type(found).__name__}"
            )
        given = PlacedTensor(found, Partial(), tuple(found.shape))
        return settings.site.leave(given, Replicate(), is_local=True)

    @contextmanager
    def _on_leaves(self) -> Iterator[None]:
        """Replace the parameters that are DTensors by their local leaves in the block."""
        held = {key: self._parameters[key] for key in self._meshwright_style.keys}
        at_rest = {key: p for key, p in held.items() if p is not None and is_dtensor(p)}
        try:
            parts: dict[str, Any] = {key: local_part_of(p) for key, p in at_rest.items()}
            self._parameters.update(parts)
            yield
        finally:
            self._parameters.update(at_rest)


def _used_in_part(site: Site, x: torch.Tensor) -> torch.Tensor:
    """Have the gradient of ``x``, which is whole on every rank, summed over the ranks."""
    if not (x.is_floating_point() or x.is_complex()):
        return x
    return copy_to(site.arrive(x, Replicate()).local, site.axis, site.labels)
