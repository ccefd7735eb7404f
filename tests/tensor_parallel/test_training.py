"""Training on several ranks to the numbers of one process, and exactly what is sent."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright import parallelize_module
from meshwright.comm import Recorder, observe
from meshwright.comm.dtensor import local_leaf
from meshwright.testing import Ranks
from tensor_parallel.samples import (
    WORDS,
    Block,
    DTensorOperators,
    alike,
    check_alike,
    sent,
    sequence_plan,
    tensor_mesh,
)

SEQUENCE = [
    "reduce_scatter embed forward",
    "all_gather up forward",
    "reduce_scatter down forward",
    "all_gather head forward",
    "all_gather head forward",
    "reduce_scatter head backward",
    "all_gather down backward",
    "reduce_scatter up backward",
    "all_gather embed backward",
    "all_reduce partial gradients",
]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_are_those_of_one_process(ranks: Ranks, size: int) -> None:
    """Sizes 7, 10 and 13 divide by neither 2 nor 4; AdamW and torch's clipping see DTensors."""

    def body() -> None:
        one, many = alike(Block())
        parallelize_module(many, tensor_mesh(), sequence_plan())
        assert many.head.weight is many.embed.weight
        ids = torch.randint(0, WORDS, (3, 8), generator=torch.Generator().manual_seed(1))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (one, many)]
        for step in range(10):
            recorder, operators = Recorder(), DTensorOperators()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            for _ in range(2 if step == 3 else 1):  # two backwards accumulate
                expected = one(ids).square().mean()
                expected.backward()
                with observe(recorder), operators:
                    loss = many(ids).square().mean()
                    loss.backward()
                torch.testing.assert_close(loss, expected)
            assert sent(recorder) == SEQUENCE * (2 if step == 3 else 1)
            assert operators.found == []
            check_alike(one, many)
            for parameter in many.parameters():
                assert isinstance(parameter, DTensor)
                assert isinstance(parameter, nn.Parameter)
                leaf = local_leaf(parameter)
                assert leaf.grad is None
                assert leaf.data_ptr() == parameter.to_local().data_ptr()
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (one, many)]
            torch.testing.assert_close(norms[1].full_tensor(), norms[0])
            for optimizer in optimizers:
                optimizer.step()
            check_alike(one, many, of="data")

    ranks(size, body)
