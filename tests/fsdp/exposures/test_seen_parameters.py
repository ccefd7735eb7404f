"""Parameters and gradients as programs see them in a pass: those of one process, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from meshwright.data_parallel import fully_shard
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import MixedPrecision, ShardingStrategy
from meshwright.gradients import clip_grad_norm_
from meshwright.testing import Ranks

KINDS = [
    (strategy, use_orig_params)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for use_orig_params in (True, False)
]


class Net(nn.Module):
    """Lists its parameters in its forward, and has a penalty of them there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.first = nn.Linear(5, 5, dtype=torch.float64)
        self.head = nn.Linear(5, 3, dtype=torch.float64)
        self.seen: list[object] = []

    def forward(self, x: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
        own = [name.rpartition("wrapped_module.")[2] for name, _ in self.named_parameters()]
        shapes = [tuple(p.shape) for p in self.parameters()]
        self.seen = [own, shapes, next(self.parameters()).dtype, len([*self.head.parameters()])]
        penalty = sum(p.square().sum() for p in self.head.parameters())
        penalty = penalty + sum(p.square().sum() for p in self.parameters())
        y = torch.tanh(self.first(x.to(self.gain.dtype)))
        if given is not None:
            y = torch.func.functional_call(self.head, {"weight": given}, y)
        else:
            y = self.head(y)
        return (y * self.gain).square().mean() + 0.01 * penalty


def numbers() -> torch.Tensor:
    return torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def wrapped(net: nn.Module, strategy: str, use_orig_params: bool, **more: object) -> FSDP:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The `NO_SHARD`")
        return FSDP(
            net,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
            **more,  # pyrefly: ignore
        )


def whole(model: FSDP) -> list[torch.Tensor]:
    with FSDP.summon_full_params(model):
        return [p.detach().clone() for p in model.parameters()]


def train(model: nn.Module, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = run()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def body_parameters_in_a_forward() -> None:
    one = Net()
    expected = train(one, lambda: one(numbers()))
    for strategy, use_orig_params in KINDS:
        net = Net()
        model = wrapped(net, strategy, use_orig_params)
        found = train(model, partial(model, numbers()))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(whole(model), [*one.parameters()], rtol=1e-9, atol=1e-12)
        assert net.seen == one.seen
        listed = [name.rpartition(".")[2] for name, _ in model.named_parameters()]
        assert ("_flat_param" in listed) is not use_orig_params, "what optimizers hold is back"


def test_parameters_listed_in_a_forward_are_whole(ranks: Ranks) -> None:
    ranks(2, body_parameters_in_a_forward)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    """Find whole gradients of what the model lists by a step of a known size."""
    before = whole(model)  # pyrefly: ignore
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return [b - a for a, b in zip(whole(model), before, strict=True)]  # pyrefly: ignore


def plain_gradients(run: Callable[[Net], object]) -> list[torch.Tensor]:
    one = Net()
    run(one)
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in one.parameters()]


def body_between_forward_and_backward() -> None:
    def penalized(model: nn.Module) -> None:
        loss = model(numbers()) + sum(p.square().sum() for p in model.parameters())
        loss.backward()

    def dropped(model: nn.Module) -> None:
        model(2 * numbers()).backward()
        loss = model(numbers())
        model.zero_grad()
        loss.backward()

    def accumulated(model: nn.Module, *, changes: str) -> None:
        with model.no_sync() if isinstance(model, FSDP) else warnings.catch_warnings():
            for factor in (2, 3):
                model(factor * numbers()).backward()
            assert all(p.grad is not None for p in model.parameters())
            if changes in ("dropped", "zeroed"):
                model.zero_grad(set_to_none=changes == "dropped")
            for p in model.parameters() if changes == "halved" else ():
                p.grad.mul_(0.5)  # pyrefly: ignore
            model(4 * numbers()).backward()
        model(numbers()).backward()

    def penalty_of_gradient(model: nn.Module) -> None:
        x = numbers().requires_grad_()
        loss = model(x)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()

    for run in (dropped, penalty_of_gradient):
        units = fully_shard(Net(), reshard_after_forward=False)
        run(units)
        found = [p.grad.full_tensor() for p in units.parameters()]  # pyrefly: ignore
        torch.testing.assert_close(found, plain_gradients(run), msg=lambda m: f"fully_shard: {m}")
    chain = fully_shard(nn.Sequential(*(fully_shard(nn.Linear(5, 5)) for _ in range(3))))
    assert type(chain[0:2]) is nn.Sequential
    assert chain[0:2](torch.ones(2, 5)).shape == (2, 5)
    for strategy, use_orig_params in KINDS:
        case = f"{strategy}, {use_orig_params=}"

        def check(run: Callable[..., object], case: str = case) -> None:
            model = wrapped(Net(), strategy, use_orig_params)  # noqa: B023
            run(model)
            expected = plain_gradients(run)
            torch.testing.assert_close(gradients(model), expected, msg=lambda m: f"{case}: {m}")

        check(dropped)
        for changes in ("kept", "halved", "zeroed", "dropped"):
            check(lambda m, changes=changes: accumulated(m, changes=changes))
        check(penalty_of_gradient)  # a root keeps its own parameters until the backward
        check(penalized)
        if strategy == "FULL_SHARD":
            net = Net()
            net.first = wrapped(net.first, strategy, use_orig_params)
            with pytest.raises(RuntimeError, match="gradients of gradients where"):
                penalty_of_gradient(wrapped(net, strategy, use_orig_params))
        model = wrapped(Net(), strategy, use_orig_params)
        with model.no_sync():
            model(numbers()).backward()
        with pytest.raises(RuntimeError, match="wait for their reduction"):
            model.clip_grad_norm_(1.0)
        for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_):
            with pytest.raises(RuntimeError, match="asked of .* wait for their reduction"):
                clip(model.parameters(), 1.0)
        with pytest.raises(RuntimeError, match="wait for their reduction"):
            torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_gradients_are_those_of_what_was_seen_and_dropped(ranks: Ranks) -> None:
    ranks(2, body_between_forward_and_backward)


class Halves(nn.Module):
    """A unit that runs and gets a gradient on some ranks, or on none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 5, dtype=torch.float64)
        self.head = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor, *, uses: bool) -> torch.Tensor:
        y = self.first(x)
        return self.head(x + (y if uses else y.detach())).square().mean()


def body_unit_without_gradient() -> None:
    rank = torch.distributed.get_rank()
    for strategy, use_orig_params in KINDS:
        for users in ((), (1,), (0, 1)):
            net = Halves()
            net.first = wrapped(net.first, strategy, use_orig_params)  # pyrefly: ignore
            model, one = wrapped(net, strategy, use_orig_params), Halves()
            optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, one)]
            for _ in range(2):
                model(numbers(), uses=rank in users).backward()
                loss = sum(one(numbers(), uses=each in users) for each in (0, 1)) / 2
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            torch.testing.assert_close(
                whole(model),
                [*one.parameters()],
                msg=lambda m: f"{strategy} {users}: {m}",  # noqa: B023
            )


def test_a_unit_that_got_no_gradient_is_not_moved(ranks: Ranks) -> None:
    ranks(2, body_unit_without_gradient)


def body_changes_that_would_be_lost() -> None:
    given = torch.full((3, 5), 0.5, dtype=torch.float64)
    expected = Net()(numbers(), given)
    for strategy, use_orig_params in KINDS:
        net = Net()
        model = wrapped(net, strategy, use_orig_params)
        torch.testing.assert_close(model(numbers(), given), expected)
        loss = model(numbers())
        weight = net.first.weight  # of which both ranks have a piece
        weight.data = torch.ones(weight.shape if weight.numel() else (5, 5)).double()
        with pytest.raises(AssertionError, match="changing the parameters between"):
            loss.backward()
        if not use_orig_params:
            below = wrapped(Net(), strategy, use_orig_params)
            below.module.head.requires_grad_(False)
            with pytest.raises(RuntimeError, match="changed by itself"):
                below(numbers())
            inside = wrapped(Net(), strategy, use_orig_params)
            optimizer = torch.optim.SGD([next(inside.module.head.parameters())], 0.1)
            inside(numbers()).backward()
            with pytest.raises(RuntimeError, match="a step would change nothing"):
                optimizer.step()
            continue
        model = wrapped(Net(), strategy, use_orig_params)
        model(numbers()).backward()
        before = gradients_shown(model)
        # What is not sharded is shown itself, as torch says: there edits stay on all ranks.
        stays = strategy == "NO_SHARD"
        weights = [p.detach().clone() for p in model.parameters()]
        with FSDP.summon_full_params(model, with_grads=True, writeback=False), torch.no_grad():
            for p in model.parameters():
                p.grad.mul_(2)  # pyrefly: ignore
                p.mul_(3)
        kept = [gradient * (2 if stays else 1) for gradient in before]
        torch.testing.assert_close(gradients_shown(model), kept)
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            torch.testing.assert_close(parameter.detach(), weight * (3 if stays else 1))
        with FSDP.summon_full_params(model, with_grads=True):
            model.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    net = fully_shard(Net(), reshard_after_forward=False)
    loss = net(numbers())
    net.first.weight.data = torch.ones_like(net.first.weight)  # pyrefly: ignore
    with pytest.raises(RuntimeError, match="given other memory"):
        loss.backward()


def gradients_shown(model: nn.Module) -> list[torch.Tensor]:
    with FSDP.summon_full_params(model, with_grads=True):
        return [p.grad.clone() for p in model.parameters()]  # pyrefly: ignore


def test_what_is_changed_between_counts_or_is_refused(ranks: Ranks) -> None:
    ranks(2, body_changes_that_would_be_lost)


def body_mixed_precision() -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for strategy, use_orig_params in KINDS:
        net = Net().float()
        model = wrapped(net, strategy, use_orig_params, mixed_precision=policy)
        with model.no_sync():
            model(numbers().float()).backward()
        assert net.seen[2] is torch.bfloat16, (strategy, use_orig_params)
        wholes = [p.grad.numel() for p in model.parameters()]  # pyrefly: ignore
        assert sum(wholes) == sum(p.numel() for p in Net().parameters())
        model.zero_grad()
        model(numbers().float()).backward()
        once = wrapped(Net().float(), strategy, use_orig_params, mixed_precision=policy)
        once(numbers().float()).backward()
        torch.testing.assert_close(gradients(model), gradients(once), rtol=0, atol=0)


def test_models_see_the_dtype_that_they_compute_in(ranks: Ranks) -> None:
    ranks(2, body_mixed_precision)
