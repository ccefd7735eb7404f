"""Communication of activations: values, adjoints in both directions, and what is sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from meshwright.testing import FakeCommunicator, run_fake
from support.internals.layout import chunk
from support.internals.tensor_parallel import (
    Labels,
    copy_to,
    exchange,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)

Function = Callable[[torch.Tensor, FakeCommunicator], torch.Tensor]
ROWS = 5
LABELS = Labels.of("layer")
FUNCTIONS: dict[str, tuple[str, Function, str, list[str], list[str]]] = {
    "copy_to": ("whole", lambda x, a: copy_to(x, a, LABELS), "copies", [], ["all_reduce"]),
    "reduce_from": ("part of a sum", lambda x, a: reduce_from(x, a, LABELS), "whole",
                    ["all_reduce"], []),
    "gather_from": ("chunk", lambda x, a: gather_from(x, a, LABELS, dim=1, total=ROWS), "whole",
                    ["all_gather"], []),
    "gather_from partial": (
        "chunk", lambda x, a: gather_from(x, a, LABELS, dim=1, total=ROWS, partial=True), "copies",
        ["all_gather"], ["reduce_scatter"]),
    "scatter_to": ("whole", lambda x, a: scatter_to(x, a, LABELS, dim=1), "chunk",
                   [], ["all_gather"]),
    "reduce_scatter_to": ("part of a sum", lambda x, a: reduce_scatter_to(x, a, LABELS, dim=1),
                          "chunk", ["reduce_scatter"], ["all_gather"]),
    "exchange": ("chunk", lambda x, a: exchange(x, a, LABELS, dim=1, to=2, total=ROWS),
                 "chunk of dim 2", ["all_to_all"], ["all_to_all"]),
}  # fmt: skip


def given(kind: str, rank: int, size: int) -> torch.Tensor:
    """This rank's local tensor of a global one of shape (2, ROWS, 3), or a part of a sum."""
    seed = rank if kind == "part of a sum" else 0
    whole = torch.randn(
        2, ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    if kind == "chunk":
        start, length = chunk(ROWS, size, rank)
        return whole.narrow(1, start, length).clone()
    return whole


def counts_here(kind: str, rank: int) -> bool:
    """Whether what this rank computes of a tensor placed so is counted in a sum over ranks."""
    return kind != "whole" or rank == 0


def body(axis: FakeCommunicator, name: str, inputs: list[torch.Tensor], order: int) -> object:
    """This rank's share of a scalar of the function, its gradient, and what was sent."""
    source, function, target, _, _ = FUNCTIONS[name]
    x = inputs[axis.rank].clone().requires_grad_()
    out = function(x, axis)
    forward = [c.kind for c in axis.collectives]
    seed = axis.rank if target == "copies" else 7
    weight = torch.randn(
        2, ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    if target.startswith("chunk"):
        dim = 2 if target.endswith("2") else 1
        start, length = chunk(weight.shape[dim], axis.size, axis.rank)
        weight = weight.narrow(dim, start, length)
    value = (weight * out.sin()).sum()
    counted = target
    if order == 2:
        (first,) = torch.autograd.grad(value, x, create_graph=True)
        # Every rank has the gradient of a part of a sum, and uses it for a part of its own.
        counted = "copies" if source == "part of a sum" else source
        own = axis.rank + 1 if counted == "copies" else 1
        value = own * first.square().sum()
    (gradient,) = torch.autograd.grad(value, x)
    backward = [c.kind for c in axis.collectives][len(forward) :]
    share = value.item() if counts_here(counted, axis.rank) else 0.0
    return share, gradient, forward, backward


@pytest.mark.few(14)
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_finite_differences(name: str, size: int, order: int) -> None:
    """ROWS over 3 and 4 ranks give short and empty chunks."""
    source, _, _, forward, backward = FUNCTIONS[name]
    inputs = [given(source, rank, size) for rank in range(size)]
    shares, gradients, *sent = zip(*run_fake(size, body, name, inputs, order), strict=True)
    directions = [torch.randn_like(x) for x in inputs]
    if source == "whole":
        directions = [directions[0]] * size
    step = 1e-5
    moved = []
    for sign in (1, -1):
        near = [x + sign * step * v for x, v in zip(inputs, directions, strict=True)]
        moved.append(sum(found[0] for found in run_fake(size, body, name, near, order)))
    slope = (moved[0] - moved[1]) / (2 * step)
    pairs = zip(gradients, directions, strict=True)
    found = sum((g * v).sum().item() for r, (g, v) in enumerate(pairs) if counts_here(source, r))
    assert found == pytest.approx(slope, rel=1e-6, abs=1e-8)
    if source == "whole":
        assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    assert any(shares)
    if order == 1:
        assert list(sent) == [(forward,) * size, (backward,) * size]
