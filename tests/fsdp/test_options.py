"""Options that users give to the constructor, and read from the wrapper afterwards."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from meshwright.comm import communicator
from meshwright.errors import CommunicationError
from meshwright.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CustomPolicy,
    FlatParameter,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardedGradScaler,
    ShardingStrategy,
    StateDictType,
    always_wrap_policy,
    size_based_auto_wrap_policy,
)
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp.wrap import enable_wrap
from meshwright.fsdp.wrap import wrap as wrapped_here
from meshwright.testing import Ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()


class Shift(nn.Module):
    """Nothing but a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.ones(3))

    def reset_parameters(self) -> None:
        self.by.fill_(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


class Seats:
    """All that laying a module out asks a group for."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def attributes() -> None:
    here = communicator().device
    for device in ("cpu:0", str(here), here):
        assert FSDP(net(), device_id=device).compute_device == here
    model = FSDP(net())
    assert (model.cpu_offload, model.mixed_precision) == (CPUOffload(), MixedPrecision())
    assert model.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    assert model.forward_prefetch is False
    assert [type(parameter) for parameter in model.params] == [FlatParameter]
    precision = MixedPrecision(param_dtype=torch.float32)
    model = FSDP(
        net(),
        cpu_offload=CPUOffload(offload_params=True),
        mixed_precision=precision,
        backward_prefetch=None,
        forward_prefetch=True,
        use_orig_params=True,
    )
    assert (model.cpu_offload, model.mixed_precision) == (CPUOffload(True), precision)
    assert (model.backward_prefetch, model.forward_prefetch) == (None, True)
    assert model.params == list(model.parameters())
    model.backward_prefetch, model.forward_prefetch = BackwardPrefetch.BACKWARD_POST, False
    assert model.backward_prefetch is BackwardPrefetch.BACKWARD_POST
    settings = model._unit.settings
    assert (settings.backward_prefetch, settings.forward_prefetch) == ("after", False)


def groups_that_only_count() -> None:
    for rank, use_orig_params in ((0, False), (2, True), (3, False)):
        seats = Seats(rank, 4)
        model = FSDP(net(), process_group=seats, use_orig_params=use_orig_params)
        assert (model.rank, model.world_size, model.process_group) == (rank, 4, seats)
        whole = 20 if not use_orig_params else 22  # 16 bytes before each parameter
        assert sum(p.numel() for p in model.parameters()) <= -(-whole // 4)
    policy = ModuleWrapPolicy({nn.Linear})
    assert (
        len(list(FSDP(net(), process_group=Seats(1, 2), auto_wrap_policy=policy).parameters())) == 2
    )
    with pytest.raises(CommunicationError, match="found a Seats with a rank and a size"):
        model(torch.ones(1, 3).double())


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_a_group_that_only_counts_needs_no_run() -> None:
    assert not torch.distributed.is_initialized()
    groups_that_only_count()
    for rank, size in ((0, 1), (1, 2)):
        seats = Seats(rank, size)
        for policy in (
            always_wrap_policy,
            ModuleWrapPolicy({nn.Linear}),
            partial(size_based_auto_wrap_policy, min_num_params=4),
        ):
            model = FSDP(net(), process_group=seats, auto_wrap_policy=policy)
            assert all(isinstance(part, FSDP) for part in model.module)
        with enable_wrap(wrapper_cls=FSDP, process_group=seats):
            assert wrapped_here(nn.Linear(3, 3)).world_size == size
    scaler, weight = ShardedGradScaler(process_group=Seats(0, 1)), torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight * 2).sum().backward()
    scaler.step(optimizer)
    assert weight.item() == -1.0


def buffers_on_meta() -> None:
    seen: list[str] = []

    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.fill_(2.0)

    for function, wanted in ((init, 2.0), (None, 3.0)):
        for policy in (None, ModuleWrapPolicy({nn.Linear})):
            for inner in (nn.Linear, nn.Identity):
                seen.clear()
                with torch.device("meta"):
                    plain = nn.Sequential(inner(3, 3), Shift())
                model = FSDP(plain, param_init_fn=function, auto_wrap_policy=policy)
                assert torch.equal(model.module[1].by, torch.full((3,), wanted))
                assert (function is None) or sorted(set(seen)) == sorted(
                    {inner.__name__, "Sequential", "Shift"}
                )
                model(torch.ones(1, 3))
    plain = nn.Sequential(nn.Linear(3, 3), Shift().to("meta"))
    before = plain[0].weight.detach().clone()
    model = FSDP(plain, param_init_fn=init)
    assert torch.equal(model.state_dict()["0.weight"], before)
    assert torch.equal(model.state_dict()["1.by"], torch.full((3,), 2.0))


def recomputed() -> None:
    """Wrappers for recomputation inside of the wrapper, and around it."""
    expected = net().state_dict()
    for kind in StateDictType:
        for wrap in (
            lambda module: FSDP(checkpoint_wrapper(module)),
            lambda module: FSDP(checkpoint_wrapper(checkpoint_wrapper(module))),
            lambda module: FSDP(checkpoint_wrapper(module), use_orig_params=True),
            lambda module: checkpoint_wrapper(FSDP(checkpoint_wrapper(module))),
            lambda module: FSDP(
                nn.Sequential(*(FSDP(checkpoint_wrapper(part)) for part in module))
            ),
        ):
            model, other = wrap(net()), wrap(net())
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
            for each in (model, other):
                with pytest.warns(FutureWarning, match="being deprecated"):
                    FSDP.set_state_dict_type(each, kind)
            result: Any = other.load_state_dict(model.state_dict())
            assert not result.missing_keys and not result.unexpected_keys
            with pytest.warns(FutureWarning, match="being deprecated"):
                FSDP.set_state_dict_type(other, StateDictType.FULL_STATE_DICT)
            found = other.state_dict()
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), (kind, name)


def body() -> None:
    attributes()
    groups_that_only_count()
    buffers_on_meta()
    recomputed()
    shared = net()
    with pytest.raises(ValueError, match="wrapped in another place, and here it is not"):
        FSDP(nn.ModuleDict({"a": FSDP(shared[0]), "b": nn.Sequential(shared[0])}))


@pytest.mark.filterwarnings("ignore:FSDP will not all-gather")
def test_options_and_attributes(ranks: Ranks) -> None:
    ranks(2, body)


def test_what_policies_by_size_leave_out_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = partial(size_based_auto_wrap_policy, recurse=False, nonwrapped_numel=9)
    ask: Any = size_based_auto_wrap_policy
    assert {nn.MultiheadAttention} == ask.FORCE_LEAF_MODULES
    assert {nn.ModuleList, nn.ModuleDict} == ask.EXCLUDE_WRAP_MODULES
    assert policy(module=nn.Linear(3, 3), min_num_params=4)
    monkeypatch.setattr(ask, "EXCLUDE_WRAP_MODULES", {nn.Linear})
    assert not policy(module=nn.Linear(3, 3), min_num_params=4)
    assert policy(module=nn.ModuleList(), min_num_params=4)


def test_a_policy_keeps_its_own_strategy_for_what_mixed_precision_leaves_out() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    own = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    policy = CustomPolicy(lambda module: own if isinstance(module, nn.BatchNorm1d) else False)
    low = MixedPrecision(param_dtype=torch.float16)
    with pytest.warns(UserWarning, match="Both mixed precision and an auto_wrap_policy"):
        wrapped = FSDP(
            model, process_group=Seats(0, 2), auto_wrap_policy=policy, mixed_precision=low
        )
    norm: Any = wrapped.module[1]
    assert norm.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert norm.mixed_precision == MixedPrecision()
