"""Computes in float64 what a model casts to float32 itself, such as routers and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["wide"]


class _Wide(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        named = {key: _widened(x) for key, x in (kwargs or {}).items()}
        return func(*map(_widened, args), **named)


def _widened(x: object) -> object:
    return torch.float64 if x is torch.float32 else x


@contextmanager
def wide() -> Iterator[None]:
    """Have ``float()``, ``to(torch.float32)`` and ``dtype=torch.float32`` give float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)
