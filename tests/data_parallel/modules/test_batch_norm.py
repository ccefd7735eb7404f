"""Replicas and shards say once that BatchNorm uses the statistics of each rank alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.compiler import aot_backend
from meshwright.composition import parallelize
from meshwright.data_parallel import (
    DistributedDataParallel,
    fully_shard,
    keep_batch_norm_local,
    replicate,
    synchronize_batch_norm,
)
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.plan import Plan, TrainPlan
from meshwright.testing import Ranks
from support.data_parallel.replica_samples import loss
from support.internals.axes import Axes
from support.internals.data_parallel import LocalStatistics


def net(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 4), norm(4))
    return nn.Sequential(inner, nn.Tanh(), nn.Linear(4, 3), nn.LayerNorm(3)).double()


def in_units(model: nn.Sequential) -> nn.Module:
    fully_shard(model[0])
    return fully_shard(model)


def in_wrappers(model: nn.Sequential) -> nn.Module:
    model[0] = FullyShardedDataParallel(model[0])
    return FullyShardedDataParallel(model)


WRAPS: tuple[Callable[[nn.Sequential], Any], ...] = (
    replicate,
    DistributedDataParallel,
    in_units,
    in_wrappers,
)


def said(*calls: Callable[[], object]) -> list[str]:
    """What BatchNorm was the occasion of, call by call."""
    found: list[str] = []
    for call in calls:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        told = [each for each in caught if "BatchNorm" in str(each.message)]
        assert len(told) < 2
        assert all("/tests/" in each.filename for each in told)  # the line that called the model
        texts = [str(each.message) for each in told]
        found.append(texts[0] if texts else "")
    return found


def body() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    is_first = communicator().rank == 0
    for wrap in WRAPS:
        model = net()
        ours = wrap(model)

        def train(ours: Any = ours) -> None:
            loss(ours, x).backward()

        def evaluate(ours: Any = ours) -> None:
            with torch.no_grad():
                ours.eval()(x)
            ours.train()

        before, first, then = said(evaluate, train, train)
        assert (before, then) == ("", "")
        assert bool(first) is is_first
        if is_first:
            assert "BatchNorm '0.1' normalizes by the batch of each of 2 ranks alone" in first
            assert "synchronize_batch_norm(model, communicator())" in first
            assert "keep_batch_norm_local(model)" in first

        # What is no BatchNorm over the batch, or not of this rank alone, or is meant.
        frozen = net()
        frozen[0][1].eval()
        synchronized = net()
        assert synchronize_batch_norm(synchronized, communicator()) is synchronized
        meant = net()
        keep_batch_norm_local(meant)
        for silent in (frozen, synchronized, meant, net(nn.Identity)):
            inner = wrap(silent)
            assert said(lambda inner=inner: loss(inner, x).backward()) == [""]
    # What is frozen may train later; all else is asked once and never again.
    due = {
        kind: LocalStatistics(silent, [communicator()])
        for kind, silent in {"frozen": frozen, "synchronized": synchronized, "meant": meant}.items()
    }
    for statistics in due.values():
        statistics.tell()
    assert [kind for kind, s in due.items() if s.is_due] == (["frozen"] if is_first else [])
    # On a CPU torch's own has no forward in training.
    torchs = LocalStatistics(net(nn.SyncBatchNorm), [communicator()])
    assert said(torchs.tell) == [""]
    assert not torchs.is_due


def body_later() -> None:
    """BatchNorm without statistics of its own, one that trains later, one that is added later."""
    x = torch.randn(4, 3, dtype=torch.float64)
    is_first = communicator().rank == 0
    without = replicate(net(lambda n: nn.BatchNorm1d(n, track_running_stats=False)))
    without.eval()
    assert [bool(t) for t in said(lambda: loss(without, x).backward())] == [is_first]
    model = net()
    model[0][1].eval()
    ours = DistributedDataParallel(model)

    def train() -> None:
        loss(ours, x).backward()

    assert said(train) == [""]
    model[0][1].train()
    assert [bool(text) for text in said(train, train)] == [is_first, False]
    model[1] = nn.BatchNorm1d(4).double()
    (text,) = said(train)
    assert bool(text) is is_first
    assert not text or "BatchNorm '1' normalizes" in text
    # What a warning has named is not named again, by whichever replica; nothing is left to ask.
    model[2] = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    again = DistributedDataParallel(model)
    found = said(train, lambda: loss(again, x).backward())
    assert [bool(text) for text in found] == [is_first, False]


def body_compiled() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    compiled = torch.compile(replicate(net()), backend=aot_backend)
    found = said(lambda: loss(compiled, x).backward(), lambda: loss(compiled, x).backward())
    assert [bool(text) for text in found] == [communicator().rank == 0, False]


def body_plans() -> None:
    for axis in ("replicate", "shard"):
        for kind in ("local", "sync"):
            plan = Plan(axes=Axes.of({axis: 2}), train=TrainPlan(batch_norm=kind))  # pyrefly: ignore
            trainable = parallelize(
                net().float(),
                plan,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                loss=nn.functional.mse_loss,
            )
            x = torch.randn(4, 3)
            assert said(lambda trainable=trainable, x=x: trainable.step(x, x)) == [""]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(body, id="wraps"),
        pytest.param(body_later, id="later", marks=pytest.mark.slow),
        pytest.param(body_plans, id="plans", marks=pytest.mark.slow),
        pytest.param(
            body_compiled,
            id="compiled",
            marks=[
                pytest.mark.slow,
                pytest.mark.devices("host", reason="nothing is compiled under a dispatch mode"),
            ],
        ),
    ],
)
def test_it_is_said_once_where_nothing_was_chosen(ranks: Ranks, case: Callable[[], None]) -> None:
    ranks(2, case)


def test_one_rank_has_nothing_to_say(ranks: Ranks) -> None:
    ranks(1, lambda: loss(replicate(net()), torch.randn(4, 3, dtype=torch.float64)).backward())


def body_one_value() -> None:
    norm = synchronize_batch_norm(nn.BatchNorm1d(4).double(), communicator())
    with pytest.raises(ValueError, match="expected more than one value per channel"):
        norm(torch.randn(1, 4, dtype=torch.float64))


def test_one_value_a_channel_has_no_variance(ranks: Ranks) -> None:
    ranks(1, body_one_value)
