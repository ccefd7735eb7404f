"""In which precision a wrapper works now: its mixed one, or full precision while it evaluates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshwright.data_parallel.shards.unit import Unit
from meshwright.fsdp.options import MixedPrecision


class PrecisionMode:
    """Switches the dtypes of a unit and of the buffers of its modules between two modes."""

    def __init__(self, precision: MixedPrecision, unit: Unit | None) -> None:
        self.now = precision
        """What inputs are cast by."""
        self._mixed = precision
        self._full = replace(precision, param_dtype=None, reduce_dtype=None, buffer_dtype=None)
        self._unit = unit
        self._casts_buffers = precision.buffer_dtype is not None
        self._buffers: dict[tuple[nn.Module, str], torch.dtype] = {}
        """The buffers that have been cast, with their dtypes before."""
        dtypes = (precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype)
        self.is_mixed = any(dtype is not None for dtype in dtypes)
        """Whether there are two modes at all."""

    def enter(self, modules: Iterable[nn.Module], *, is_full: bool) -> None:
        """Work in full precision, or in the mixed one, from this forward on."""
        wanted = self._full if is_full else self._mixed
        if self._casts_buffers and not is_full:
            self._cast_buffers(modules)
            self._casts_buffers = False
        if wanted is self.now:
            return
        self.now = wanted
        if is_full:
            self._restore_buffers()
        if self._unit is not None:
            self._unit.reshard()
            for group in self._unit.groups:
                group.compute_in(wanted.param_dtype, wanted.reduce_dtype)

    def _cast_buffers(self, modules: Iterable[nn.Module]) -> None:
        dtype: Any = self._mixed.buffer_dtype
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    self._buffers[module, name] = buffer.dtype
                    module._buffers[name] = buffer.to(dtype)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Show the buffers in their own dtypes inside the block, as state dicts hold them."""
        cast = {place: place[0]._buffers.get(place[1]) for place in self._buffers}
        for (module, name), dtype in self._buffers.items():
            buffer = cast[module, name]
            if buffer is not None:
                module._buffers[name] = buffer.to(dtype)
        try:
            yield
        finally:
            for (module, name), buffer in cast.items():
                if buffer is not None:
                    module._buffers[name] = buffer

    def _restore_buffers(self) -> None:
        for (module, name), dtype in self._buffers.items():
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = buffer.to(dtype)
        self._buffers.clear()
        self._casts_buffers = self._mixed.buffer_dtype is not None
