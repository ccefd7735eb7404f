"""The arithmetic of experts whose weights are one tensor: a matrix product for each expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from meshwright.expert_parallel.exchange import Route
from meshwright.expert_parallel.forms import APPLY_GATE

_GROUPED = (torch.float32, torch.bfloat16, torch.float16)


def fused_experts(
    module: nn.Module,
    rows: torch.Tensor,
    route: Route,
    experts: torch.Tensor,
    leaves: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Run the experts of a Hugging Face module on ``rows``, sorted by expert.

    ``experts`` has the expert of each row, ``leaves`` this rank's parameters by name.
    """
    own: Any = module

    def linear(x: torch.Tensor, key: str) -> torch.Tensor:
        weight = leaves[key]
        x, weight = _autocast(x, weight)
        weight = weight if own.is_transposed else weight.transpose(1, 2)
        y = _GroupedProduct.apply(x, weight, route)
        if not own.has_bias:
            return y
        return y + leaves[f"{key}_bias"].to(y.dtype).index_select(0, experts)

    if own.has_gate:
        x = getattr(own, APPLY_GATE)(linear(rows, "gate_up_proj"))
    else:
        x = own.act_fn(linear(rows, "up_proj"))
    y = linear(x, "down_proj")
    return own.post_expert_norm(y) if getattr(own, "has_post_expert_norm", False) else y


class _GroupedProduct(torch.autograd.Function):
    """Multiplies the rows of each expert by its matrix (in, out) of ``weight``.

    The gradient of ``weight`` has zeros for experts without rows, also where no expert has any.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor, route: Route
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.route = route  # pyrefly: ignore[missing-attribute]
        return _rows_times(x, weight, route)

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors  # pyrefly: ignore[missing-attribute]
        route: Route = ctx.route  # pyrefly: ignore[missing-attribute]
        needs = ctx.needs_input_grad  # pyrefly: ignore[missing-attribute]
        grad = grad.contiguous()
        of_x = _rows_times(grad, weight.transpose(1, 2), route) if needs[0] else None
        if not needs[1]:
            return of_x, None, None
        if weight.is_contiguous():
            return of_x, _by_expert(x, grad, route), None
        # The weight at rest is the transpose: its gradient is laid out as it is.
        return of_x, _by_expert(grad, x, route).transpose(1, 2), None


def _rows_times(x: torch.Tensor, weight: torch.Tensor, route: Route) -> torch.Tensor:
    if len(x) and _is_grouped(x, weight):
        return functional.grouped_mm(x, weight, offs=route.ends)
    y = x.new_empty((len(x), weight.shape[2]))
    start = 0
    for expert, count in enumerate(route.here):
        if count:
            end = start + count
            torch.mm(x[start:end], weight[expert], out=y[start:end])
            start = end
    return y


def _by_expert(x: torch.Tensor, y: torch.Tensor, route: Route) -> torch.Tensor:
    """Compute x^T y of each expert's rows: zeros for one without."""
    found = x.new_zeros((len(route.here), x.shape[1], y.shape[1]))
    start = 0
    for expert, count in enumerate(route.here):
        if count:
            end = start + count
            torch.mm(x[start:end].t(), y[start:end], out=found[expert])
            start = end
    return found


def _is_grouped(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch's ``grouped_mm`` can: it wants rows of 16 bytes, and knows no float64."""
    sizes = (x.shape[1] * x.element_size(), weight.shape[2] * x.element_size())
    return x.dtype in _GROUPED and not any(size % 16 for size in sizes)


def _autocast(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast as autocast does before a linear layer; autograd casts gradients back."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x, weight
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype)
