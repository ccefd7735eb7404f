"""Gradients over several ranks: accumulation, unused parameters, order, failures."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import replicate
from meshwright.errors import CollectiveMismatchError
from meshwright.testing import Ranks
from support.data_parallel.replica_samples import Branches, Breaks, batch, loss, same_gradients
from support.late import raises_by_now

SMALL = 6e-5
"""A bucket_cap_mb that gives several buckets to the small models below."""


def mlp(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)
    ).to(dtype)


def pair(is_view: bool) -> tuple[nn.Sequential, nn.Sequential]:
    one = mlp()
    both = replicate(copy.deepcopy(one), gradient_as_bucket_view=is_view, bucket_cap_mb=SMALL)
    return one, both


# ------------------------------------------------------------------------------ accumulation


def accumulate_and_zero(
    one: nn.Module, ours: nn.Module, x: torch.Tensor, share: torch.Tensor
) -> None:
    for set_to_none in (True, False, True):
        for factor in (1, 2, 3):
            loss(one, x * factor).backward()
            loss(ours, share * factor).backward()
        same_gradients(ours, one)
        one.zero_grad(set_to_none=set_to_none)
        ours.zero_grad(set_to_none=set_to_none)


def body_two_backwards(is_view: bool) -> None:
    one, ours = pair(is_view)
    x, share = batch()
    accumulate_and_zero(one, ours, x, share)


def body_large_gradients(is_view: bool) -> None:
    """Gradients that are copied as they come, beside small ones that are copied together."""
    torch.manual_seed(0)
    again = nn.Linear(150, 150)
    one = nn.Sequential(nn.Linear(3, 150), again, nn.Tanh(), again, nn.Linear(150, 2)).double()
    ours = replicate(copy.deepcopy(one), gradient_as_bucket_view=is_view)
    x, share = batch()
    accumulate_and_zero(one, ours, x, share)
    with ours.no_sync():
        loss(ours, share).backward()
    loss(ours, share).backward()
    for _ in range(2):
        loss(one, x).backward()
    same_gradients(ours, one)


def body_no_sync(is_view: bool) -> None:
    one, ours = pair(is_view)
    x, share = batch()
    with observe(recorder := Recorder()):
        with ours.no_sync():
            loss(ours, share).backward()
            loss(ours, share * 2).backward()
        ours.set_requires_gradient_sync(False)
        loss(ours, share * 3).backward()
        silent = [label for kind, label in recorder.kinds() if kind == "all_reduce"]
        ours.set_requires_gradient_sync(True)
        loss(ours, share * 4).backward()
    assert silent == []
    for factor in (1, 2, 3, 4):
        loss(one, x * factor).backward()
    same_gradients(ours, one)


def body_several_forwards(is_view: bool) -> None:
    one, ours = pair(is_view)
    x, share = batch()
    (loss(one, x) + loss(one, 2 * x) * loss(one, 3 * x)).backward()
    with observe(recorder := Recorder()):
        first, second, third = loss(ours, share), loss(ours, 2 * share), loss(ours, 3 * share)
        (first + second + third).backward()
    assert recorder.kinds()[-2:] == [
        ("all_reduce", "reduce bucket 1"),
        ("all_reduce", "reduce bucket 2"),
    ]
    one.zero_grad()
    (loss(one, x) + loss(one, 2 * x) + loss(one, 3 * x)).backward()
    same_gradients(ours, one)


def body_two_backwards_of_one_forward(is_view: bool) -> None:
    one, ours = pair(is_view)
    x, share = batch()
    for model, part in ((one, x), (ours, share)):
        value = loss(model, part)
        value.backward(retain_graph=True)
        value.backward()
    same_gradients(ours, one)


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        body_two_backwards,
        body_large_gradients,
        body_no_sync,
        body_several_forwards,
        body_two_backwards_of_one_forward,
    ],
    ids=lambda body: body.__name__.removeprefix("body_"),
)
@pytest.mark.few(3)
def test_accumulation(ranks: Ranks, body: Callable[[bool], None], is_view: bool) -> None:
    ranks(2, body, is_view)


def test_accumulation_on_three_ranks(ranks: Ranks) -> None:
    ranks(3, body_two_backwards, True)


# -------------------------------------------------------------------- unused, frozen, reused


def body_unused(is_view: bool) -> None:
    world = communicator()
    one = Branches()
    ours = replicate(copy.deepcopy(one), gradient_as_bucket_view=is_view, bucket_cap_mb=SMALL)
    x, share = batch()
    choices = [[0, 1], [0, 2], [0, 1], [2]]
    for _ in range(2):
        for rank, rows in enumerate(x.chunk(world.size)):
            (one(rows, choices[rank]).square().mean() / world.size).backward()
        ours(share, choices[world.rank]).square().mean().backward()
        assert ours.layers[3].weight.grad is None
        assert ours.layers[2].weight.grad is not None
        same_gradients(ours, one)
        one.zero_grad()
        ours.zero_grad()


def body_unused_after_local_gradients() -> None:
    """What was gathered on one rank without a reduction is part of the next reduction."""
    world = communicator()
    one = Branches()
    ours = replicate(copy.deepcopy(one))
    x, share = batch()
    with ours.no_sync():
        if world.rank == 1:
            ours(share, [1]).square().mean().backward()
    ours(share, [0]).square().mean().backward()
    (one(x.chunk(world.size)[1], [1]).square().mean() / world.size).backward()
    one(x, [0]).square().mean().backward()
    same_gradients(ours, one)


def body_rank_without_parameters() -> None:
    world = communicator()
    model = Branches()
    ours = replicate(model)
    _, share = batch()
    x = share.clone().requires_grad_()
    out = ours(x, [0] if world.rank == 0 else [])
    out.sum().backward()
    expected = torch.full((3,), 4.0 / world.size, dtype=torch.float64)
    torch.testing.assert_close(ours.layers[0].bias.grad, expected)


def body_requires_grad_flips() -> None:
    one, ours = pair(True)
    x, share = batch()
    for frozen in ({0}, {4}, set(), {0, 2}):
        for model in (one, ours):
            for number in (0, 2, 4):
                model[number].requires_grad_(number not in frozen)
        loss(one, x).backward()
        loss(ours, share).backward()
        same_gradients(ours, one)
        one.zero_grad()
        ours.zero_grad()


def body_tied_and_reused() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    one = nn.Sequential(first, second, first).double()
    ours = replicate(copy.deepcopy(one))
    x, share = batch()
    loss(one, x).backward()
    loss(ours, share).backward()
    assert ours[0].weight is ours[1].weight
    same_gradients(ours, one)


def body_mixed_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.narrow = nn.Linear(3, 3, dtype=torch.float32)
            self.wide = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.wide(self.narrow(x.float()).double())

    one = Mixed()
    ours = replicate(copy.deepcopy(one))
    x, share = batch()
    loss(one, x).backward()
    with observe(recorder := Recorder()):
        loss(ours, share).backward()
    reduced = [c.dtype for c in recorder.collectives if c.kind == "all_reduce"]
    assert reduced == ["float64", "float32"]
    same_gradients(ours, one)


def body_checkpointed(use_reentrant: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.inner:
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return x

    one = Recomputed()
    ours = replicate(copy.deepcopy(one), bucket_cap_mb=SMALL)
    x, share = batch()
    x, share = x.requires_grad_(), share.detach().requires_grad_()
    loss(one, x).backward()
    loss(ours, share).backward()
    same_gradients(ours, one)


def body_late_gradient() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(3, 3).double()
            self.layer = nn.Linear(3, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x

    ours = replicate(Twice(), bucket_cap_mb=1e-6)
    _, share = batch()
    value = loss(ours, share.requires_grad_())
    with pytest.raises(RuntimeError) as caught:
        value.backward()
    text = str(caught.value)
    assert text.startswith("Expected to mark a variable ready only once. Rank ")
    assert f"Rank {communicator().rank}: parameter 'layer." in text
    assert "(of layer) got another gradient" in text
    assert "no gradient yet: parameters spare.bias, spare.weight (of spare)" in text


@pytest.mark.few(1)
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_parameters_unused_on_some_ranks(ranks: Ranks, size: int, is_view: bool) -> None:
    ranks(size, body_unused, is_view)


@pytest.mark.parametrize(
    "body",
    [
        body_unused_after_local_gradients,
        body_rank_without_parameters,
        body_requires_grad_flips,
        body_tied_and_reused,
        body_mixed_dtypes,
        body_late_gradient,
    ],
    ids=lambda body: body.__name__.removeprefix("body_"),
)
@pytest.mark.few(2)
def test_models(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoints(ranks: Ranks, use_reentrant: bool) -> None:
    ranks(2, body_checkpointed, use_reentrant)


# ---------------------------------------------------------------------- order and failures


def body_order_is_fixed() -> None:
    """Rank 1 gets its gradients in the reverse order of rank 0; the launches agree all the same."""
    world = communicator()
    torch.manual_seed(0)
    one = Branches()
    ours = replicate(copy.deepcopy(one), bucket_cap_mb=SMALL)
    x, share = batch()
    order = [0, 1, 2, 3]
    for rank, rows in enumerate(x.chunk(world.size)):
        path = order if rank == 0 else order[::-1]
        (one(rows, path).square().mean() / world.size).backward()
    with observe(recorder := Recorder()):
        ours(share, order if world.rank == 0 else order[::-1]).square().mean().backward()
    labels = [label for kind, label in recorder.kinds() if kind == "all_reduce"]
    assert labels == [f"reduce bucket {n}" for n in range(len(labels))]
    assert len(labels) > 2
    same_gradients(ours, one)


class Breakable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor, broken: int | None = None) -> torch.Tensor:
        for number, layer in enumerate(self.inner):
            x = layer(Breaks.apply(x) if number == broken else x)
        return x


def body_backward_raises(is_view: bool) -> None:
    """Each rank breaks at another layer, so they have launched different buckets."""
    world = communicator()
    one = Breakable()
    ours = replicate(copy.deepcopy(one), gradient_as_bucket_view=is_view, bucket_cap_mb=SMALL)
    x, share = batch()
    for broken in (1 + world.rank * 2, 4, None):
        if broken is not None:
            with pytest.raises(ValueError, match="planted"):
                ours(share, broken).square().mean().backward()
        ours.zero_grad()
    loss(one, x).backward()
    loss(ours, share).backward()
    same_gradients(ours, one)


def body_one_rank_gives_up() -> None:
    """A peer that goes on gets an error and never a mean that lacks a rank."""
    world = communicator()
    ours = replicate(Breakable(), bucket_cap_mb=SMALL)
    _, share = batch()
    if world.rank == 0:
        with pytest.raises(ValueError, match="planted"):
            ours(share, 2).square().mean().backward()
        ours(share)
    else:
        output = ours(share).square().mean()
        with raises_by_now(CollectiveMismatchError, match="was given up, on ranks .0."):
            output.backward()


@pytest.mark.parametrize("is_view", [False, True])
def test_the_iteration_after_a_failed_backward_trains(ranks: Ranks, is_view: bool) -> None:
    ranks(2, body_backward_raises, is_view)


@pytest.mark.parametrize(
    "body", [body_order_is_fixed, body_one_rank_gives_up], ids=lambda body: body.__name__[5:]
)
def test_order(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)
