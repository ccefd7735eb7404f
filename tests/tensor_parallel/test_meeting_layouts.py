"""Layouts between styles: those that do not meet are found before anything is sent."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional

from meshwright import parallelize_module
from meshwright.comm import Recorder, observe
from meshwright.tensor_parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
)
from meshwright.testing import Ranks
from tensor_parallel.samples import DTensorOperators, alike, check_alike, sent, tensor_mesh

WIDTH, HEADS, LENGTH = 8, 4, 6


class Attention(nn.Module):
    """Separate projections; as many heads as this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor | None = None) -> torch.Tensor:
        """Shape (batch, length, WIDTH)."""
        batch, length, _ = x.shape
        shape = (batch, length, -1, WIDTH // HEADS)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.out(y.reshape(batch, length, -1))


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, length, WIDTH)."""
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


def sequence_plan(*, local: bool = False) -> dict[str, ParallelStyle]:
    """As torch's tutorials have it: blocks gather their input once for all their projections."""
    cut, whole = Shard(1), Replicate()
    gather = PrepareModuleInput(
        input_layouts=(cut,), desired_input_layouts=(whole,), use_local_output=local
    )
    return {
        "norms.*": SequenceParallel(),
        "attention": gather,
        "attention.[qkv]": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=cut),
        "mlp": gather,
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(output_layouts=cut),
        "": PrepareModuleInputOutput(
            input_layouts=whole,
            desired_input_layouts=cut,
            use_local_input=True,
            output_layouts=cut,
            desired_output_layouts=whole,
        ),
    }


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_transformer_layer_with_prepared_inputs(ranks: Ranks, size: int) -> None:
    """One gather and one reduce-scatter a block for all projections; local inputs cost k sums."""

    def body() -> None:
        length = LENGTH if size == 2 else 8
        x = torch.randn(
            2, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        for local in (False, True):
            one, many = alike(Layer())
            parallelize_module(many, tensor_mesh(), sequence_plan(local=local))
            whole, given = x.clone().requires_grad_(), x.clone().requires_grad_()
            recorder, operators = Recorder(), DTensorOperators()
            expected = one(whole)
            with observe(recorder), operators:
                found = many(given)
                found.square().mean().backward()
            expected.square().mean().backward()
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(given.grad, whole.grad)
            check_alike(one, many)
            assert operators.found == []
            kinds = [each.kind for each in recorder.collectives]
            forward = ["all_gather", "reduce_scatter"] * 2 + ["all_gather"]
            assert kinds[:5] == forward
            backward = sorted(kinds[5:])
            gathers, sums, scatters = 3, (5 if local else 1), (0 if local else 2)
            expected_kinds = ["all_gather"] * gathers + ["all_reduce"] * sums
            assert backward == expected_kinds + ["reduce_scatter"] * scatters, sent(recorder)

    ranks(size, body)
