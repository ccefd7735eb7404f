"""Nested values that modules are given, and what comes back of them."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.data_parallel import fully_shard
from meshwright.fsdp import FullyShardedDataParallel, MixedPrecision
from meshwright.testing import Ranks
from support.internals.data_parallel import Loan, tensors_kept_by

ONE, TWO = torch.ones(1), torch.ones(2)


@dataclass
class Pair:
    first: torch.Tensor
    second: object


def test_what_has_no_tensor_to_change_is_given_as_it_is() -> None:
    loan = Loan(lambda tensor: tensor)
    for value in (ONE, [], [ONE, {"a": (TWO, 3)}], {"a": []}, (ONE, [TWO]), Pair(ONE, 2), "text"):
        assert loan.give(value) is value


@pytest.mark.parametrize("kind", [list, deque])
def test_what_a_module_does_to_a_list_is_done_to_the_callers(kind: type) -> None:
    loan, theirs = Loan(lambda tensor: tensor + 1), kind([ONE, TWO, 5])
    own = loan.give((theirs, "x"))[0]
    assert type(own) is kind
    assert own is not theirs
    assert torch.equal(own[0], ONE + 1)
    new = torch.zeros(3)
    own[1] = new
    own.append(own[0])
    own.append(new)
    assert len(theirs) == 3
    loan.hand_back()
    assert [id(each) for each in theirs] == [*map(id, (ONE, new, 5, ONE, new))]


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_what_a_module_does_to_a_dict_is_done_to_the_callers(kind: type) -> None:
    inner: list[Any] = [TWO]
    loan, theirs = Loan(lambda tensor: tensor + 1), kind(a=ONE, b=inner, c=TWO)
    own = loan.give(theirs)
    own["d"] = own["b"]
    own["b"].append(own["a"])
    del own["c"]
    loan.hand_back()
    assert list(theirs) == ["a", "b", "d"]
    assert theirs["a"] is ONE
    assert theirs["b"] is theirs["d"] is inner
    assert [id(each) for each in inner] == [id(TWO), id(ONE)]


def test_a_list_or_dict_that_is_given_twice_is_one() -> None:
    for theirs in ([ONE], {"a": ONE}):
        loan = Loan(lambda tensor: tensor + 1)
        first, second = loan.give((theirs, [theirs]))
        assert first is second[0] is loan.give(theirs)
        assert first is not theirs
        _ = first.append(TWO) if isinstance(first, list) else first.update(b=TWO)
        loan.hand_back()
        assert [id(each) for each in (theirs if isinstance(theirs, list) else theirs.values())] == [
            id(ONE),
            id(TWO),
        ]


def test_what_was_only_read_stays_as_it_is() -> None:
    loan, theirs = Loan(lambda tensor: tensor + 1), [ONE, TWO]
    loan.give(theirs)
    loan.hand_back()
    assert theirs[0] is ONE
    assert theirs[1] is TWO


def test_what_is_given_twice_stays_one() -> None:
    loan, theirs = Loan(lambda tensor: tensor + 1), [ONE]
    first, second, inner = loan.give((theirs, theirs, {"a": ONE}))
    assert first is second
    assert loan.give(ONE) is first[0] is inner["a"]
    first.append(second[0])
    loan.hand_back()
    assert [id(each) for each in theirs] == [id(ONE), id(ONE)]


def test_other_containers_are_made_anew_where_tensors_change() -> None:
    pair = Loan(lambda tensor: tensor + 1).give(Pair(ONE, 2))
    assert torch.equal(pair.first, ONE + 1)
    assert Loan(lambda tensor: tensor + 1, rest=lambda value: [value]).give("x") == ["x"]


def test_what_is_new_in_a_list_is_told() -> None:
    for theirs in ([], [ONE]):
        loan = Loan(lambda tensor: tensor + 1)
        loan.give(theirs).append(TWO)
        assert [id(each) for each in loan.hand_back()] == [id(TWO)]
        assert theirs[-1] is TWO


def test_tensors_that_modules_keep_are_found() -> None:
    module: Any = torch.nn.Linear(1, 1)
    module.loss, module.losses, module.rate = module.weight * 2, [module.weight * 3, 1], ONE
    assert [*tensors_kept_by([module])] == [module.loss, module.losses[0]]


class Keeps(nn.Linear):
    """A layer that keeps a loss of its first pass."""

    loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.loss is None:
            self.loss = y.sum()
        return y


def body_nothing_is_held() -> None:
    layer = Keeps(2, 2)
    model = fully_shard(layer)
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward(retain_graph=True)
    assert layer.loss is not None
    assert len(layer.loss._backward_hooks or ()) == 1
    low = FullyShardedDataParallel(
        nn.Linear(2, 2),
        mixed_precision=MixedPrecision(torch.bfloat16, cast_forward_inputs=True),
    )
    x = torch.ones(1, 2)
    given = weakref.ref(x)
    low(x)
    del x
    assert given() is None


def test_forwards_leave_one_hook_on_a_kept_loss_and_hold_no_input(ranks: Ranks) -> None:
    ranks(2, body_nothing_is_held)
