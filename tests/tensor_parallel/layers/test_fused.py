"""Several matrices side by side, and layers with the weight the other way round, as one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from meshwright import parallelize_module
from meshwright.comm import held_boxes
from meshwright.tensor_parallel import (
    ColwiseParallel,
    FusedColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
)
from meshwright.testing import Ranks
from support.internals.comm import whole
from support.tensor_parallel.samples import alike, check_alike, tensor_mesh

WIDTH, OUT = 4, 12


class Conv1D(nn.Module):
    """As Hugging Face's GPT-2 has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], self.nf)


def mine(x: torch.Tensor, parts: int, rank: int) -> torch.Tensor:
    """This rank's half of each of the matrices that lie side by side."""
    return torch.cat([each.chunk(2, -1)[rank] for each in x.chunk(parts, -1)], -1)


def check(module: nn.Module, style: ParallelStyle, parts: int) -> None:
    """``parts`` of the output features, 0 for a layer by rows."""
    mesh = tensor_mesh()
    rank = mesh.get_local_rank()
    one, many = alike(module)
    parallelize_module(many, mesh, style)
    many = copy.deepcopy(many)
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(3)).double()
    whole_x = x.clone().requires_grad_()
    own_x = (x if parts else mine(x, 1, rank)).clone().requires_grad_()
    for _ in range(2):  # gradients of both add up
        expected, found = one(whole_x), many(own_x)
        expected_part = mine(expected, parts, rank) if parts else expected
        torch.testing.assert_close(found, expected_part)
        seed = torch.linspace(-1, 1, expected.numel(), dtype=x.dtype).view(expected.shape)
        expected.backward(seed)
        found.backward(mine(seed, parts, rank) if parts else seed)
    given = whole_x.grad
    assert given is not None
    assert own_x.grad is not None
    torch.testing.assert_close(own_x.grad, given if parts else mine(given, 1, rank))
    check_alike(one, many)
    for (name, parameter), expected in zip(many.named_parameters(), one.parameters(), strict=True):
        assert isinstance(parameter, DTensor), name
        for found in (parameter.full_tensor(), whole(parameter)):
            torch.testing.assert_close(found.detach(), expected.detach(), rtol=0, atol=0)
        for box, memory in held_boxes(parameter):
            assert torch.equal(memory, expected.detach()[box.slices()]), name


def body_styles() -> None:
    torch.manual_seed(0)
    for parts in (2, 3):
        for module in (nn.Linear(WIDTH, OUT), nn.Linear(WIDTH, OUT, bias=False)):
            check(module, FusedColwiseParallel(parts), parts)
        check(Conv1D(OUT, WIDTH), FusedColwiseParallel(parts), parts)
    check(Conv1D(OUT, WIDTH), ColwiseParallel(), 1)
    check(Conv1D(OUT, WIDTH), RowwiseParallel(), 0)
    mesh = tensor_mesh()
    with pytest.raises(ValueError, match=r"3 matrices in 15 output features.* multiple of 6"):
        parallelize_module(nn.Linear(WIDTH, 15), mesh, FusedColwiseParallel(3))
    with pytest.raises(NotImplementedError, match="a Embedding|an Embedding"):
        parallelize_module(nn.Embedding(WIDTH, OUT), mesh, FusedColwiseParallel(3))
    with pytest.raises(ValueError, match="parts >= 2"):
        FusedColwiseParallel(1)
    many = parallelize_module(nn.Linear(WIDTH, OUT), mesh, FusedColwiseParallel(3))
    # What torch's checkpoints ask for: one box, which would be of other rows.
    for part in (many.weight, many.state_dict()["weight"], torch.zeros_like(many.weight)):
        with pytest.raises(NotImplementedError, match="3 tensors lie side by side along dim 0"):
            part.__create_chunk_list__()
    whole_state = {"weight": torch.zeros(OUT, WIDTH), "bias": torch.zeros(OUT)}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(NotImplementedError, match="3 tensors lie side by side along dim 0"):
        set_model_state_dict(many, whole_state, options=options)
    wrong = nn.Sequential(nn.Linear(WIDTH, OUT), nn.GELU(), nn.Linear(OUT, WIDTH))
    plan: dict[str, ParallelStyle] = {"0": FusedColwiseParallel(3), "2": RowwiseParallel()}
    parallelize_module(wrong, mesh, plan)
    with pytest.raises(ValueError, match="0 gives parts of several matrices"):
        wrong(torch.zeros(2, WIDTH))


def test_layers_are_those_of_one_process(ranks: Ranks) -> None:
    ranks(2, body_styles)
