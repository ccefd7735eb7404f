"""Between passes sharded modules show the parameters of the optimizer, with their gradients."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import fully_shard
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import ModuleWrapPolicy, ShardingStrategy
from meshwright.gradients import clip_grad_norm_ as clip_sharded
from meshwright.testing import Ranks


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mine(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(communicator().size)[communicator().rank]


def sharded(one: nn.Module, *, nested: bool, after: bool | None) -> Any:
    model: Any = copy.deepcopy(one)
    if nested:
        fully_shard(model[0], reshard_after_forward=after)
        fully_shard(model[2], reshard_after_forward=after)
    return fully_shard(model, reshard_after_forward=after)


def retained(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def retained_once(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward(retain_graph=True)


def logged(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    model(x)


def evaluated(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    model.eval()
    model(x).square().mean()
    model.train()


def penalized(model: nn.Module, x: torch.Tensor) -> None:
    """The term is taken while gradients of the first pass are there."""
    model(x).square().mean().backward()
    loss = model(x).square().mean()
    for p in model.parameters():
        loss = loss + whole(p.square().sum())
    loss.backward()


def body(nested: bool, after: bool | None) -> None:
    x = batch()
    for passes in (retained_once, retained, logged, evaluated, penalized):
        one = net()
        model = sharded(one, nested=nested, after=after)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, one)]
        mean = copy.deepcopy(one)
        for _ in range(3):
            norms = []
            for each, given, optimizer in zip((model, one), (mine(x), x), optimizers, strict=True):
                passes(each, given)
                held = optimizer.param_groups[0]["params"]
                assert [*map(id, each.parameters())] == [*map(id, held)], passes
                norms.append(whole(clip_grad_norm_(each.parameters(), 0.01)))
                for p in each.parameters():
                    p.grad = -p.grad
                optimizer.step()
                if passes is not retained_once:
                    optimizer.zero_grad()
            assert norms[0] > 0
            torch.testing.assert_close(*norms)
            for p, q, r in zip(
                model.parameters(), one.parameters(), mean.parameters(), strict=True
            ):
                torch.testing.assert_close(whole(p.detach()), q.detach())
                r.data.lerp_(whole(p.detach()), 0.5)


@pytest.mark.few(3)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("after", [None, False, True])
def test_whoever_takes_parameters_after_a_backward_gets_those_with_gradients(
    ranks: Ranks, nested: bool, after: bool | None
) -> None:
    ranks(2, body, nested, after)


def body_teacher(nested: bool) -> None:
    """A frozen copy follows by an average, though its forward has gradients switched on."""
    one = net()
    pairs = [[sharded(one, nested=nested, after=None) for _ in range(2)], [one, copy.deepcopy(one)]]
    optimizers = [torch.optim.SGD(student.parameters(), lr=0.5) for student, _ in pairs]
    for _, teacher in pairs:
        teacher.requires_grad_(False)
    for step in range(3):
        x = batch(step)
        for (student, teacher), given, optimizer in zip(
            pairs, (mine(x), x), optimizers, strict=True
        ):
            optimizer.zero_grad()
            (student(given) - teacher(2 * given)).square().mean().backward()
            optimizer.step()
            for p, q in zip(student.parameters(), teacher.parameters(), strict=True):
                q.lerp_(p.detach(), 0.1)
    for found, expected in zip(*pairs, strict=True):
        for p, q in zip(found.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(whole(p.detach()), q.detach())


@pytest.mark.parametrize("nested", [False, True])
def test_a_frozen_model_is_resharded_after_its_forward(ranks: Ranks, nested: bool) -> None:
    ranks(2, body_teacher, nested)


def wrapped(one: nn.Module, strategy: str, *, original: bool, nested: bool) -> FSDP:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The `NO_SHARD`")
        return FSDP(
            copy.deepcopy(one),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=original,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}) if nested else None,
        )


def same_when_summoned(model: FSDP, one: nn.Module, *, gradients: bool) -> None:
    """Compare what is whole; gradients are doubled there, and so are those at rest."""
    rest = [p.grad.clone() for p in model.parameters() if gradients and p.grad is not None]
    with FSDP.summon_full_params(model, with_grads=gradients):
        for (name, p), (other, q) in zip(
            model.named_parameters(), one.named_parameters(), strict=True
        ):
            assert name == other
            torch.testing.assert_close(p.detach(), q.detach())
            if gradients:
                torch.testing.assert_close(p.grad, q.grad)
                p.grad.mul_(2)  # pyrefly: ignore
    doubled = [p.grad for p in model.parameters() if gradients and p.grad is not None]
    assert len(doubled) == len(rest)
    for p, q in zip(doubled, rest, strict=True):
        torch.testing.assert_close(p, 2 * q)


def body_class(strategy: str, original: bool, nested: bool) -> None:
    x = batch()
    for passes in (retained_once, retained, logged, evaluated):
        one = net()
        model = wrapped(one, strategy, original=original, nested=nested)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, one)]
        for _ in range(2):
            norms = []
            for each, given, optimizer in zip((model, one), (mine(x), x), optimizers, strict=True):
                passes(each, given)
                held = optimizer.param_groups[0]["params"]
                assert [*map(id, each.parameters())] == [*map(id, held)], passes
                if each is model and strategy != "NO_SHARD":
                    with pytest.raises(RuntimeError, match=r"meshwright\.clip_grad_norm_"):
                        clip_grad_norm_(each.parameters(), 0.01)
                norms.append(clip_sharded(each.parameters(), 0.01))
                for p in each.parameters():
                    p.grad = None if p.grad is None else -p.grad
                optimizer.step()
                if passes is not retained_once:
                    optimizer.zero_grad()
            assert norms[0] > 0
            torch.testing.assert_close(*norms)
            same_when_summoned(model, one, gradients=False)
        for optimizer in optimizers:
            optimizer.zero_grad()
        passes(model, mine(x))
        passes(one, x)
        model(mine(x))
        assert [*model.state_dict()] == [*one.state_dict()]
        same_when_summoned(model, one, gradients=original)
        with pytest.raises(RuntimeError, match="the loss has read"):
            penalized(model, mine(x))


@pytest.mark.few(4, slow=8)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_the_class_shows_parameters_with_gradients_after_a_forward_for_a_log(
    ranks: Ranks, strategy: str, original: bool, nested: bool
) -> None:
    ranks(2, body_class, strategy, original, nested)


class Asks(nn.Module):
    """Asks itself for its dtype, as models of a known library do in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (dtype,) = {parameter.dtype for parameter in self.parameters()}
        return self.inner(x.to(dtype))


def every_kind(one: nn.Module) -> list[Any]:
    """Shard ``one`` in each way, its children as units of their own."""
    found: list[Any] = []
    for after in (None, False, True):
        model: Any = copy.deepcopy(one)
        for child in model.children():
            fully_shard(child, reshard_after_forward=after)
        found.append(fully_shard(model, reshard_after_forward=after))
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        for original in (False, True):
            chosen: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy]}
            policy = ModuleWrapPolicy({*map(type, one.children())} - {nn.Tanh})
            chosen |= {"use_orig_params": original, "auto_wrap_policy": policy}
            found.append(FSDP(copy.deepcopy(one), **chosen))
    return found


def body_asks_itself() -> None:
    x = batch().float()
    torch.manual_seed(0)
    one = nn.Sequential(Asks(), nn.Linear(2, 2).double())
    for model in every_kind(one):
        for _ in range(2):
            model(x).sum().backward()  # gradients are there from now on
            torch.testing.assert_close(model[0](x), one[0](x))
        with torch.no_grad():
            torch.testing.assert_close(model[0](x), one[0](x))


def test_a_part_that_runs_by_itself_may_list_its_parameters(ranks: Ranks) -> None:
    ranks(2, body_asks_itself)


def body_listed_before_backward() -> None:
    def labels(model: Any, zero: Callable[[Any], object]) -> list[tuple[str, str]]:
        model(batch()).sum().backward()
        model(batch()).sum().backward()
        recorder = Recorder()
        with observe(recorder):
            loss = model(batch()).sum()
            zero(model)
            loss.backward()
        return recorder.kinds()

    listing = communicator().rank == 0  # alone, to count elements, say
    for ours, other in zip(every_kind(net()), every_kind(net()), strict=True):
        found = labels(ours, lambda model: model.zero_grad())
        assert found == labels(other, lambda model: listing and [*model.parameters()])
        one = net()
        one(batch()).sum().backward()
        norm = clip_grad_norm_(one.parameters(), 1.0)
        torch.testing.assert_close(whole(clip_sharded(ours.parameters(), 1.0)), norm)
        torch.testing.assert_close(whole(clip_sharded(other.parameters(), 1.0)), 3 * norm)


def test_zeroing_or_listing_between_forward_and_backward_sends_nothing_more(ranks: Ranks) -> None:
    ranks(2, body_listed_before_backward)
