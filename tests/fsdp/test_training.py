"""Training in every strategy against one process and torch's FSDP."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Peer
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as PeerPolicy

from meshwright.comm import communicator
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import (
    MixedPrecision,
    ModuleWrapPolicy,
    ShardedGradScaler,
    ShardingStrategy,
    hybrid_process_groups,
)
from meshwright.testing import Ranks

STRATEGIES = [strategy.name for strategy in ShardingStrategy]


class Net(nn.Module):
    """Prime sizes, a tied weight over units, a layer that is never used, a module used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.twice = nn.Linear(7, 7)
        self.last = nn.Linear(7, 5)
        self.unused = nn.Linear(3, 1)
        self.last.weight = nn.Parameter(self.first.weight.detach().t().contiguous())
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.twice(torch.tanh(self.twice(self.first(x) + self.tied(x))))
        return self.last(torch.tanh(hidden))


def batch(step: int, size: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 5, dtype=torch.float64, generator=generator)


def wrap(strategy: str, use_orig_params: bool, model: nn.Module | None = None) -> FSDP:
    chosen = ShardingStrategy[strategy]
    groups: Any = None
    if "HYBRID" in strategy:
        groups = hybrid_process_groups(communicator().group, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The `NO_SHARD`")
        return FSDP(
            Net().double() if model is None else model,
            process_group=groups,
            sharding_strategy=chosen,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=use_orig_params,
        )


def steps(model: nn.Module, kind: type[torch.optim.Optimizer], accumulate: bool) -> list[float]:
    optimizer = kind(model.parameters(), lr=0.05)
    losses = []
    for step in range(5):
        whole = batch(step)
        parts = [whole]
        if isinstance(model, FSDP):
            mine = whole.chunk(dist.get_world_size())[dist.get_rank()]
            parts = list(mine.chunk(3)) if accumulate else [mine]
            for part in parts[:-1]:
                with model.no_sync():
                    (model(part).square().mean() / len(parts)).backward()
        loss = model(parts[-1]).square().mean() / len(parts)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(whole[:2])
    return losses


def body_numbers(strategy: str, use_orig_params: bool) -> None:
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        for accumulate in (False, True):
            one = Net().double()
            # A flat parameter has zeros where a parameter was not used: AdamW decays it then.
            one.unused.requires_grad_(False)
            steps(one, kind, accumulate)
            model = wrap(strategy, use_orig_params)
            steps(model, kind, accumulate)
            for name, value in model.state_dict().items():
                if "unused" not in name:
                    torch.testing.assert_close(value, one.state_dict()[name], msg=name)


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_weights_are_those_of_one_process(
    ranks: Ranks, strategy: str, use_orig_params: bool
) -> None:
    ranks(4 if "HYBRID" in strategy else 3, body_numbers, strategy, use_orig_params)


def body_peer(use_orig_params: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    ours = FSDP(
        copy.deepcopy(plain),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
    )
    theirs = Peer(
        copy.deepcopy(plain),
        auto_wrap_policy=PeerPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
        device_id=communicator().device,
    )
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=0.1)) for m in (ours, theirs)]
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        x, results = torch.randn(4, 5), []
        for model, optimizer in pairs:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            norm = model.clip_grad_norm_(0.1)
            gradients = [p.grad for p in model.parameters()]
            optimizer.step()
            results.append((loss, norm, gradients))
        torch.testing.assert_close(*[r[0] for r in results])
        torch.testing.assert_close(*[r[1] for r in results])
        for a, b in zip(results[0][2], results[1][2], strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.few(1)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.devices("host", reason="torch's FSDP keeps memory by record_stream, on no CPU")
def test_steps_are_those_of_torch(ranks: Ranks, size: int, use_orig_params: bool) -> None:
    ranks(size, body_peer, use_orig_params)


def body_mixed() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    seen: list[torch.dtype] = []
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    plain[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    model = FSDP(plain, mixed_precision=precision)
    loss = model(torch.ones(2, 5)).float().sum()
    loss.backward()
    assert seen == [torch.bfloat16]
    assert model._flat_param.dtype == model._flat_param.grad.dtype == torch.float32
    assert model.state_dict()["0.weight"].dtype == torch.float32


def test_mixed_precision(ranks: Ranks) -> None:
    ranks(2, body_mixed)


def body_scaler() -> None:
    model = FSDP(nn.Linear(4, 2), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = ShardedGradScaler(init_scale=8.0)
    before = model.state_dict()["weight"]
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if dist.get_rank() == 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert torch.equal(model.state_dict()["weight"], before)
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(model.state_dict()["weight"], before - 2.0)
    # A group of one has nobody to ask: this one could not even be asked.
    alone = ShardedGradScaler(process_group=One())
    lone = torch.ones(1, requires_grad=True)
    stepping = torch.optim.SGD([lone], lr=1.0)
    alone.scale(lone * torch.inf).sum().backward()
    alone.step(stepping)
    assert lone.item() == 1.0


class One:
    """A group that has nothing but a rank and a size."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def test_ranks_skip_a_step_together(ranks: Ranks) -> None:
    ranks(2, body_scaler)
