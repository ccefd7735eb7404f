"""The loss of each microbatch, and what its backward starts from.

A loss is weighted by the gradient that its backward starts with: accumulated gradients are never
scaled, and reported losses are those of ``loss_fn``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.pipelining.microbatch import check_loss

_KEPT = 256
"""The number of seeds that are kept."""


@dataclass(slots=True)
class Start:
    """The loss of one microbatch, and its weight in the gradient."""

    loss: torch.Tensor
    weight: float = 1.0
    seed: torch.Tensor | None = None
    """The weight as the gradient to start with; None where the loss is multiplied instead."""

    def of(self, loss: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the root of the backward of ``loss`` and its gradient (None: 1).

        ``loss`` None is `loss` itself; another, such as a scaled one, has the same weight.
        """
        if self.seed is not None and (loss is None or loss is self.loss):
            return self.loss, self.seed
        root = self.loss if loss is None else loss
        return (root if self.weight == 1.0 else root * self.weight), None


class Losses:
    """Computes losses with the user's function."""

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self._loss_fn = loss_fn
        self._seeds: dict[object, torch.Tensor] = {}

    def compute(
        self,
        outputs: Mapping[int, Any],
        targets: Sequence[Any],
        microbatch: int,
        weights: Sequence[float],
        options: Mapping[str, Any],
    ) -> tuple[Any, Start]:
        """Call the function for one microbatch; returns the loss and the start of its backward."""
        loss = self._loss_fn(outputs[microbatch], targets[microbatch], **options)
        check_loss(loss, outputs, targets, microbatch, is_weighed=bool(weights))
        first = loss[0] if isinstance(loss, tuple) else loss
        weight = weights[microbatch] if weights else 1.0
        return loss, Start(first, weight, self._seed(first, weight))

    def _seed(self, loss: torch.Tensor, weight: float) -> torch.Tensor | None:
        """The gradient ``weight`` of ``loss``; None unless that is a plain float scalar."""
        if type(loss) is not torch.Tensor or loss.dim() or not loss.is_floating_point():
            return None
        key = (weight, loss.dtype, loss.device)
        found = self._seeds.get(key)
        if found is None:
            found = torch.full((), weight, dtype=loss.dtype, device=loss.device)
            if len(self._seeds) >= _KEPT:
                self._seeds.clear()
            self._seeds[key] = found
        return found
