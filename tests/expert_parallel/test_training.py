"""Experts on two ranks compute what one process computes with all tokens."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright import comm
from meshwright.testing import Ranks
from support.expert_parallel.samples import FORMS, Block, D, alike, over, part

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
EXPERTS = ("mixtral", "gpt_oss", "no gate", "post norm", "own", "grouped")


def check_gradients(one: nn.Module, many: nn.Module) -> None:
    """Experts have their rows of the whole gradient; others are summands of it."""
    for (name, whole), mine in zip(one.named_parameters(), many.parameters(), strict=True):
        assert whole.grad is not None, name
        assert mine.grad is not None, name
        if isinstance(mine, DTensor):
            assert isinstance(mine.grad, DTensor), name
            found = mine.grad.full_tensor()
        else:
            found = mine.grad.clone()
            comm.communicator().all_reduce(found).wait()
        torch.testing.assert_close(found, whole.grad, **CLOSE, msg=lambda t, n=name: f"{n}: {t}")


def check(block: Block, sizes: list[int], exchange: str) -> None:
    """Compare outputs, the gradient of the input and those of all parameters."""
    torch.manual_seed(1)
    x = torch.randn(sum(sizes), D, dtype=torch.float64)
    weigh = torch.randn(sum(sizes), D, dtype=torch.float64)
    for each in (x, weigh):
        comm.communicator().broadcast(each).wait()
    one, many = alike(block)
    over(many, exchange)
    given, mine = x.clone().requires_grad_(), part(x, sizes).clone().requires_grad_()
    for _ in range(2):  # the second accumulates
        expected = one(given)
        (expected * weigh).sum().backward()
        found = many(mine)
        torch.testing.assert_close(found, part(expected, sizes), **CLOSE)
        (found * part(weigh, sizes)).sum().backward()
    assert given.grad is not None
    torch.testing.assert_close(mine.grad, part(given.grad, sizes), **CLOSE)
    check_gradients(one, many)
    with torch.no_grad():
        torch.testing.assert_close(many.eval()(mine), part(expected, sizes), **CLOSE)


@pytest.mark.few(6, slow=6)
@pytest.mark.parametrize("exchange", ["tokens", "pairs"])
@pytest.mark.parametrize("form", EXPERTS)
def test_numbers_are_those_of_one_process(ranks: Ranks, form: str, exchange: str) -> None:
    """Plain; M that does not divide, K = M; a rank without tokens; one token; all to one expert."""

    def body() -> None:
        make = FORMS[form]
        check(Block(make(4), 2), [7, 5], exchange)
        check(Block(make(3), 3), [4, 6], exchange)
        check(Block(make(5), 1), [0, 6], exchange)
        check(Block(make(1), 1), [3, 2], exchange)  # the second rank has no expert
        check(Block(make(4), 2), [1, 0], exchange)
        far = torch.tensor([0.0, 0, 0, 9])  # every token goes to the last expert
        check(Block(make(4), 1, bias=far), [3, 4], exchange)

    ranks(2, body)
