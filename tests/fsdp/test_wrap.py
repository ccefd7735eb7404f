"""Wrap policies: which modules become units. No process is needed but for the last tests."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from meshwright.fsdp import (
    CustomPolicy,
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    ShardingStrategy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from meshwright.testing import Ranks
from support.internals.fsdp import deferred_parameters


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 8)


def model() -> nn.Sequential:
    shared = nn.Linear(2, 2)
    return nn.Sequential(Block(), nn.ModuleList([shared, shared]), nn.Linear(3, 3))


def names(policy: wrap.WrapPolicy, root: nn.Module | None = None) -> list[str]:
    root = model() if root is None else root
    found = {module: name for name, module in root.named_modules()}
    return [found[target] for target in wrap.find_targets(root, policy)]


POLICIES = [
    (ModuleWrapPolicy({Block}), ["0"]),
    (ModuleWrapPolicy([nn.Linear, Block]), ["0.a", "0.b", "0", "1.0", "2"]),
    (CustomPolicy(lambda m: isinstance(m, nn.Linear)), ["0.a", "0.b", "1.0", "2"]),
    (always_wrap_policy, ["0.a", "0.b", "0", "1.0", "1", "2"]),
    (partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Block)), ["0"]),
    (partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}), ["0"]),
    (partial(size_based_auto_wrap_policy, min_num_params=30), ["0.b"]),
    (partial(size_based_auto_wrap_policy, min_num_params=60), ["0"]),
    (partial(size_based_auto_wrap_policy, min_num_params=30, force_leaf_modules={Block}), []),
    (
        partial(wrap._or_policy, policies=[ModuleWrapPolicy({Block}), always_wrap_policy]),
        ["0.a", "0.b", "0", "1.0", "1", "2"],
    ),
]


@pytest.mark.parametrize(("policy", "expected"), POLICIES)
def test_policies(policy: wrap.WrapPolicy, expected: list[str]) -> None:
    assert names(policy) == expected


def test_custom_policies_give_arguments() -> None:
    root = model()
    chosen = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    policy = CustomPolicy(lambda m: chosen if isinstance(m, Block) else False)
    assert wrap.find_targets(root, policy) == {root[0]: chosen}


def test_ignored_modules_are_not_wrapped() -> None:
    root = model()
    targets = wrap.find_targets(root, always_wrap_policy, ignored_modules=set(root[0].modules()))
    assert root[0].a not in targets
    assert root[2] in targets


def test_a_shared_parameter_goes_to_the_lowest_common_unit() -> None:
    root = nn.Sequential(Block(), Block())
    root[0].b.weight = nn.Parameter(torch.zeros(4, 4))
    root[0].a.weight = root[0].b.weight
    root[1].a.bias = root[0].a.bias
    targets = wrap.find_targets(root, ModuleWrapPolicy({Block, nn.Linear}))
    deferred = deferred_parameters(root, targets)
    weight, bias = root[0].a.weight, root[0].a.bias
    assert deferred[root[0].a] == {weight, bias}
    assert deferred[root[0].b] == {weight}
    assert deferred[root[0]] == {bias}
    assert deferred[root[1].a] == deferred[root[1]] == {bias}


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module, flag: int = 0) -> None:
        super().__init__()
        self.module, self.flag = module, flag


def test_wrap_applies_what_enable_wrap_says() -> None:
    plain = nn.Linear(2, 2)
    assert wrap.wrap(plain) is plain
    with wrap.enable_wrap(wrapper_cls=Wrapped, flag=1):
        first, second = wrap.wrap(plain), wrap.wrap(plain, flag=2)
        with (
            pytest.raises(NotImplementedError, match="^You are already within an autowrap context"),
            wrap.enable_wrap(wrapper_cls=Wrapped),
        ):
            pass
    assert isinstance(first, Wrapped) and first.flag == 1
    assert isinstance(second, Wrapped) and second.flag == 2
    assert wrap.wrap(plain) is plain


def body_wrapped() -> None:
    root = FullyShardedDataParallel(model(), auto_wrap_policy=always_wrap_policy)
    wrapped = FullyShardedDataParallel.fsdp_modules(root)
    assert len(wrapped) == 7
    assert root.module[1].module[0] is root.module[1].module[1]
    assert FullyShardedDataParallel.fsdp_modules(root, root_only=True) == [root]


@pytest.mark.filterwarnings("ignore:FSDP will not all-gather")
def test_shared_modules_are_wrapped_once(ranks: Ranks) -> None:
    ranks(2, body_with_containers)


def body_with_containers() -> None:
    with pytest.warns(UserWarning, match="containers that do not implement forward: ModuleList"):
        body_wrapped()


class Adapted(nn.Module):
    """A frozen layer with an adapter that trains beside it, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.adapter = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)


def test_adapters_are_units_inside_of_frozen_ones(ranks: Ranks) -> None:
    def is_adapter(module: nn.Module) -> bool:
        return not [*module.children()] and any(p.requires_grad for p in module.parameters())

    def body() -> None:
        blocks = partial(transformer_auto_wrap_policy, transformer_layer_cls={Adapted})
        either = [partial(lambda_auto_wrap_policy, lambda_fn=is_adapter), blocks]
        for policy in (
            partial(wrap._or_policy, policies=either),
            CustomPolicy(lambda m: is_adapter(m) or isinstance(m, Adapted)),
        ):
            torch.manual_seed(0)
            one = nn.Sequential(Adapted(), Adapted()).double()
            model = FullyShardedDataParallel(copy.deepcopy(one), auto_wrap_policy=policy)
            x = torch.ones(2, 4, dtype=torch.float64)
            for each in (model, one):
                optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
                each(x).square().mean().backward()
                optimizer.step()
            torch.testing.assert_close(model.state_dict(), one.state_dict())

    ranks(2, body)
