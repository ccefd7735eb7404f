"""Dropout whose masks do not depend on the layout, in place of torch's modules."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from meshwright.randomness.draws import DimPart, Draws
from meshwright.randomness.refusals import declared, let_draw, random_modules
from meshwright.torch_internals.tensors import FakeTensor
from meshwright.torch_internals.tracing import not_traced

_CHANNEL_DIMS: dict[type[nn.Module], int] = {
    nn.Dropout: 0,
    nn.AlphaDropout: 0,
    nn.Dropout1d: 1,
    nn.Dropout2d: 2,
    nn.Dropout3d: 3,
}
"""Modules that are replaced, with the number of last dims that share one decision."""

_SATURATION = -1.7580993408473766
"""The limit of SELU at minus infinity, AlphaDropout's value of dropped elements (Klambauer et
al., Self-Normalizing Neural Networks, 2017)."""


class Dropout(nn.Dropout):
    """Sets elements to zero with probability ``p`` and scales the others, in training mode.

    The mask depends on ``draws`` and on ``site``, the name of the module in the full model. Dim 0
    of the input must be samples. If the input is this rank's shard of an activation, ``parts`` are
    its sharded dims, and the mask is that shard of the full mask.
    """

    parts: tuple[DimPart, ...]

    def __init__(
        self,
        p: float,
        inplace: bool = False,
        *,
        site: str,
        draws: Draws,
        parts: Sequence[DimPart] = (),
        channel_dims: int = 0,
        is_alpha: bool = False,
    ) -> None:
        """``channel_dims``: how many last dims share one decision, as in `torch.nn.Dropout2d`."""
        super().__init__(p, inplace)
        self.site = site
        self.parts = tuple(parts)
        """The sharded dims of inputs."""
        self._draws = draws
        self._channel_dims = channel_dims
        self._is_alpha = is_alpha

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Drop some elements of ``input``; in evaluation mode return it unchanged."""
        if not self.training or self.p == 0.0 or self._draws.is_rehearsal:
            return input
        if input.is_meta or isinstance(input, FakeTensor):
            return input * torch.ones_like(input)
        if torch.compiler.is_exporting():
            raise RuntimeError(
                f"dropout {self.site!r} draws by step and sample, which a traced graph would keep "
                "as they were: trace the model in evaluation mode, or leave this module out"
            )
        if torch.compiler.is_compiling():
            return _dropped_outside(self, input)
        return self.dropped(input)

    def dropped(self, input: torch.Tensor) -> torch.Tensor:
        """Drop some elements of ``input``, as in training."""
        keep = self._kept(input)
        if self._is_alpha:
            return self._saturate(input, keep)
        noise = keep.to(input.dtype)
        if self.p < 1.0:
            noise.mul_(1.0 / (1.0 - self.p))
        return input.mul_(noise) if self.inplace else input * noise

    def extra_repr(self) -> str:
        """Add the site to the module's own ``extra_repr``."""
        return f"{super().extra_repr()}, site={self.site!r}"

    def _kept(self, input: torch.Tensor) -> torch.Tensor:
        shared = self._channel_dims
        if shared and input.ndim != shared + 2:
            raise ValueError(
                f"dropout {self.site!r}: expected samples, channels and {shared} more dims, found "
                f"shape {tuple(input.shape)}"
            )
        local = input.shape[: input.ndim - shared]
        bits = self._draws.bits(self.site, local, self.parts, input.device)
        if self.p == 1.0:
            keep = torch.zeros_like(bits, dtype=torch.bool)
        else:
            keep = bits >= round(self.p * 2**32) - 2**31
        return keep.view(*keep.shape, *(1,) * shared)

    def _saturate(self, input: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        if self.p == 1.0:
            return input * 0.0
        scale = 1.0 / math.sqrt((1.0 - self.p) * (1.0 + self.p * _SATURATION**2))
        shift = -scale * _SATURATION * self.p
        noise = keep.to(input.dtype)
        found = input * (noise * scale) + ((1.0 - noise) * (scale * _SATURATION) + shift)
        return input.copy_(found) if self.inplace else found


def replace_dropout(model: nn.Module, draws: Draws, *, per_rank: Sequence[str] = ()) -> list[str]:
    """Replace torch's dropout modules by `Dropout`; returns their names.

    Modules whose names match a pattern of ``per_rank``, and their submodules, are not replaced:
    there each rank draws for itself, and results depend on the layout. Call it on the full model,
    before it is split or wrapped: module names become sites.

    Raises ValueError, and replaces nothing, if other modules draw random numbers or a pattern
    matches nothing; `RandomOperators` finds those that are visible only at run time.
    """
    left = declared(model, per_rank)
    problems = [
        (name, why)
        for name, module in model.named_modules()
        if name not in left and (why := random_modules(module)) is not None
    ]
    if problems:
        raise ValueError(
            "these modules draw random numbers that depend on the layout: "
            + "; ".join(f"{name} ({why})" for name, why in problems)
            + f". Set their dropout to 0, or {let_draw(name for name, _ in problems)}"
        )
    ours: dict[nn.Module, Dropout] = {}
    for name, module in model.named_modules():
        dims = _CHANNEL_DIMS.get(type(module))
        if dims is None or name in left:
            continue
        found = Dropout(
            module.p,  # pyrefly: ignore[bad-argument-type]
            module.inplace,  # pyrefly: ignore[bad-argument-type]
            site=name,
            draws=draws,
            channel_dims=dims,
            is_alpha=type(module) is nn.AlphaDropout,
        )
        ours[module] = found.train(module.training)
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child in ours:
                parent._modules[key] = ours[child]
    return [each.site for each in ours.values()]


@not_traced
def _dropped_outside(module: Dropout, input: torch.Tensor) -> torch.Tensor:
    """Drop outside of compiled graphs, which would bake in step and samples."""
    return module.dropped(input)
