"""Optimizers that step in the backward: torch's function for them, imported where it is called."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch


def apply_in_backward(
    kind: type[torch.optim.Optimizer],
    parameters: Iterable[torch.nn.Parameter],
    options: dict[str, Any],
    **more: Any,
) -> None:
    """Call torch's ``_apply_optimizer_in_backward``.

    Its package compiles optimizers when it is imported, which takes each rank half a second.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what else torch loads with it
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(kind, parameters, options, **more)
