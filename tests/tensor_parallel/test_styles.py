"""Each style on one module: outputs and gradients are those of one process."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshwright import comm, parallelize_module
from meshwright.mesh import DeviceMesh
from meshwright.tensor_parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
)
from meshwright.testing import Ranks
from support.tensor_parallel.samples import alike, check_alike, tensor_mesh

EVEN = (4, 8, 12)
PRIME = (3, 5, 7)
"""Batch, width of the input, width of the output; a length of 8 divides by 4 ranks."""
LENGTH = 8


def spread(
    whole: torch.Tensor, mesh: DeviceMesh, placement: object, *, local: bool
) -> torch.Tensor:
    """A leaf that holds ``whole`` placed so: local, or a DTensor."""
    given = distribute_tensor(whole.detach().clone(), mesh, [placement])
    found = given.to_local() if local else given
    found = found.detach()
    return found.requires_grad_() if whole.is_floating_point() else found


def gathered(
    found: torch.Tensor, mesh: DeviceMesh, placement: object, shape: torch.Size
) -> torch.Tensor:
    """The whole of a local tensor that is placed so."""
    if not isinstance(found, DTensor):
        strides = torch.empty(shape).stride()
        found = DTensor.from_local(
            found, mesh, [placement], run_check=False, shape=shape, stride=strides
        )
    return found.full_tensor()


def check(
    module: nn.Module,
    style: ParallelStyle,
    x: torch.Tensor,
    layouts: tuple[object, object],
    *,
    local: tuple[bool, bool],
) -> None:
    """``layouts`` and ``local`` of the input and of the output."""
    mesh = tensor_mesh()
    one, many = alike(module)
    case = f"{style} on {one}, {'local' if local[0] else 'DTensor'} input"
    parallelize_module(many, mesh, style)
    whole = x.detach().clone()
    if x.is_floating_point():
        whole.requires_grad_()
    given = spread(x, mesh, layouts[0], local=local[0])
    expected, output = one(whole), many(given)
    assert isinstance(output, DTensor) is not local[1], case
    if isinstance(output, DTensor):
        placement = output.placements[0]
        assert placement == layouts[1] or placement.dim == layouts[1].dim + output.ndim, case
        assert output.shape == expected.shape, case
    found = gathered(output.detach(), mesh, layouts[1], expected.shape)
    torch.testing.assert_close(found, expected, msg=lambda text: f"{case}: {text}")
    seed = torch.Generator().manual_seed(3)
    slope = torch.randn(expected.shape, dtype=expected.dtype, generator=seed)
    expected.backward(slope)
    # The gradient of a part of a sum is whole on every rank.
    placed = Replicate() if layouts[1] == Partial() else layouts[1]
    output.backward(spread(slope, mesh, placed, local=local[1]).detach())
    if x.is_floating_point():
        gradient = gathered(given.grad, mesh, layouts[0], x.shape)
        torch.testing.assert_close(gradient, whole.grad, msg=lambda text: f"{case}: {text}")
    check_alike(one, many)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_linear_layers(ranks: Ranks, size: int) -> None:
    def body() -> None:
        layouts = [Replicate(), Shard(1), Shard(-1)]
        ends = itertools.product((EVEN, PRIME), layouts, [*layouts, Partial()])
        for sizes, source, target in ends:
            batch, wide, out = sizes
            x = torch.randn(
                batch, LENGTH, wide, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
            )
            for style, has_bias in itertools.product(
                (ColwiseParallel, RowwiseParallel), (True, False)
            ):
                for local in ((True, True), (False, False)):
                    if target == Partial() and style is ColwiseParallel:
                        continue
                    chosen = style(
                        input_layouts=source, output_layouts=target, use_local_output=local[1]
                    )
                    layer = nn.Linear(wide, out, bias=has_bias)
                    check(layer, chosen, x, (source, target), local=local)
        x = torch.randn(2, LENGTH, 6, dtype=torch.complex128)
        comm.communicator().broadcast(x).wait()
        for style in (ColwiseParallel, RowwiseParallel):
            chosen = style(input_layouts=Replicate(), output_layouts=Replicate())
            layer = nn.Linear(6, 5, dtype=torch.complex128)
            check(layer, chosen, x, (Replicate(), Replicate()), local=(True, True))

    ranks(size, body, timeout=120)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_embeddings(ranks: Ranks, size: int) -> None:
    """Padding, norms and frequencies are those of the whole table; parts may be empty."""

    def body() -> None:
        options = [{}, {"padding_idx": 4}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}]
        for words, option, local in itertools.product((8, 5), options, (True, False)):
            ids = torch.randint(0, words, (3, LENGTH), generator=torch.Generator().manual_seed(2))
            for target in (Replicate(), Shard(1)):
                rows = RowwiseParallel(
                    input_layouts=Replicate(), output_layouts=target, use_local_output=local
                )
                check(
                    nn.Embedding(words, 6, **option),
                    rows,
                    ids,
                    (Replicate(), target),
                    local=(local, local),
                )
            if "max_norm" in option:
                continue
            for source, target in ((Replicate(), Shard(-1)), (Shard(1), Replicate())):
                columns = ColwiseParallel(
                    input_layouts=source, output_layouts=target, use_local_output=local
                )
                check(
                    nn.Embedding(words, 7, **option),
                    columns,
                    ids,
                    (source, target),
                    local=(local, local),
                )

    ranks(size, body, timeout=120)
