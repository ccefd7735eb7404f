"""All functions of `torch.distributed.checkpoint.state_dict` on `fully_shard` and `replicate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import fully_shard, keep_batch_norm_local, replicate
from meshwright.testing import Ranks
from support.values import assert_close

State = Mapping[str, Any]
Wrap = Callable[[nn.Module], nn.Module]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        keep_batch_norm_local(self.norm)
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def shard(model: nn.Module) -> nn.Module:
    fully_shard(model.first)
    return fully_shard(model)


def repeat(model: nn.Module) -> nn.Module:
    return replicate(model)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = Net().double()
    model.first.bias.requires_grad_(False)
    return model.eval()  # the statistics of the batch norm are buffers that stay


def batch() -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(5)).double()


def share() -> torch.Tensor:
    world = communicator()
    return batch().chunk(world.size)[world.rank]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trainable, lr=0.01)


def trained(model: nn.Module, x: torch.Tensor) -> torch.optim.Optimizer:
    optimizer = adam(model)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def cloned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: cloned(item) for key, item in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


def same(found: Any, expected: Any, path: str = "") -> None:
    if isinstance(expected, Mapping):
        assert set(found) == set(expected), path
        for key, value in expected.items():
            same(found[key], value, f"{path}.{key}")
    elif isinstance(expected, torch.Tensor):
        assert_close(whole(found), expected, rtol=1e-9, atol=1e-9, msg=path)
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for index, value in enumerate(expected):
            same(found[index], value, f"{path}[{index}]")
    else:
        assert found == expected, path


def goes_on(model: nn.Module, ours: Any, one: nn.Module, theirs: Any) -> None:
    """One more step of both comes to the same."""
    model(share()).square().mean().backward()
    one(batch()).square().mean().backward()
    ours.step()
    theirs.step()
    for mine, other in zip(model.parameters(), one.parameters(), strict=True):
        assert_close(whole(mine.detach()), other.detach(), rtol=1e-8, atol=1e-8)


def body_each_part(wrap: Wrap) -> None:
    """The sharded dict costs nothing, has the plain names, and comes back into another model."""
    one, plain = net(), trained
    theirs = plain(one, batch())
    model = wrap(net())
    ours = trained(model, share())
    recorder = Recorder()
    with observe(recorder):
        weights, moments = get_model_state_dict(model), get_optimizer_state_dict(model, ours)
    assert recorder.kinds() == []
    same(weights, get_model_state_dict(one))
    same(moments, get_optimizer_state_dict(one, theirs))
    is_sharded = wrap is shard
    assert isinstance(weights["last.weight"], DTensor) is is_sharded
    assert isinstance(moments["state"]["last.weight"]["exp_avg"], DTensor) is is_sharded
    weights, moments = cloned(weights), cloned(moments)

    other = wrap(net(seed=3))
    fresh = adam(other)
    missing = set_model_state_dict(other, weights)
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    set_optimizer_state_dict(other, fresh, moments)
    same(get_optimizer_state_dict(other, fresh), get_optimizer_state_dict(one, theirs))
    goes_on(other, fresh, one, theirs)


def body_both_at_once(wrap: Wrap) -> None:
    one = net()
    theirs = trained(one, batch())
    model = wrap(net())
    ours = trained(model, share())
    weights, moments = get_state_dict(model, ours)
    same([weights, moments], list(get_state_dict(one, theirs)))
    other = wrap(net(seed=3))
    fresh = adam(other)
    set_state_dict(
        other,
        fresh,
        model_state_dict=cloned(weights),
        optim_state_dict=cloned(moments),
    )
    goes_on(other, fresh, one, theirs)


def body_whole_on_rank_0(wrap: Wrap) -> None:
    """Whole tensors on the CPU of rank 0 alone, and back from there to all."""
    rank = communicator().rank
    one = net()
    theirs = trained(one, batch())
    model = wrap(net())
    ours = trained(model, share())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, ours, options=options)
    if wrap is shard:
        assert bool(weights) is bool(moments) is (rank == 0)
    if rank == 0:
        same(weights, get_model_state_dict(one))
        same(moments, get_optimizer_state_dict(one, theirs))
        assert not any(isinstance(value, DTensor) for value in weights.values())
    other = wrap(net(seed=3 + rank))
    fresh = adam(other)
    back = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = (weights, moments) if rank == 0 else ({}, {})
    set_model_state_dict(other, given[0], options=back)
    set_optimizer_state_dict(other, fresh, given[1], options=back)
    goes_on(other, fresh, one, theirs)


def body_whole_everywhere(wrap: Wrap) -> None:
    one = net()
    theirs = trained(one, batch())
    model = wrap(net())
    ours = trained(model, share())
    options = StateDictOptions(full_state_dict=True)
    weights, moments = get_state_dict(model, ours, options=options)
    same(weights, get_model_state_dict(one))
    same(moments, get_optimizer_state_dict(one, theirs))
    other = wrap(net(seed=3))
    fresh = adam(other)
    set_state_dict(
        other, fresh, model_state_dict=weights, optim_state_dict=moments, options=options
    )
    goes_on(other, fresh, one, theirs)


def body_options(wrap: Wrap) -> None:
    one = net()
    model = wrap(net())
    ours, theirs = trained(model, share()), trained(one, batch())
    frozen = StateDictOptions(ignore_frozen_params=True)
    weights = get_model_state_dict(model, options=frozen)
    assert "first.bias" not in weights
    same(weights, get_model_state_dict(one, options=frozen))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    moments = get_optimizer_state_dict(model, ours, options=flat)
    assert "state.last.weight.exp_avg" in moments
    same(moments, get_optimizer_state_dict(one, theirs, options=flat))
    fresh = adam(model)
    set_optimizer_state_dict(model, fresh, cloned(moments), options=flat)
    same(get_optimizer_state_dict(model, fresh), get_optimizer_state_dict(one, theirs))

    part = get_model_state_dict(model)
    del part["last.bias"]
    with pytest.raises(RuntimeError, match="last.bias"):
        set_model_state_dict(model, cloned(part))
    loose = StateDictOptions(strict=False)
    found = set_model_state_dict(model, cloned(part), options=loose)
    assert found.missing_keys == ["last.bias"]


def body_between_forward_and_backward(wrap: Wrap) -> None:
    """The root keeps whole parameters for the backward; what is saved is at rest all the same."""
    model = wrap(net())
    before = {name: whole(value).clone() for name, value in model.state_dict().items()}
    loss = model(share()).square().mean()
    state = get_model_state_dict(model)
    assert isinstance(state["last.weight"], DTensor) is (wrap is shard)
    same(state["last.weight"], before["last.weight"])
    loss.backward()
    loss = model(share()).square().mean()
    set_model_state_dict(model, {name: value + 0 for name, value in state.items()})
    assert isinstance(model.last.state_dict()["weight"], DTensor) is (wrap is shard)
    del loss
    model(share()).square().mean().backward()


BODIES = [
    body_each_part,
    body_both_at_once,
    body_whole_on_rank_0,
    body_whole_everywhere,
    body_options,
    body_between_forward_and_backward,
]


@pytest.mark.few(2)
@pytest.mark.parametrize("wrap", [shard, repeat], ids=["fully_shard", "replicate"])
@pytest.mark.parametrize("body", BODIES, ids=[b.__name__.removeprefix("body_") for b in BODIES])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_functions_of_torch(ranks: Ranks, body: Callable[[Wrap], None], wrap: Wrap) -> None:
    ranks(2, body, wrap)
