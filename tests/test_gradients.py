"""Norm, clipping, loss contract, loss scale, and the stop that all ranks make together."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.errors import NonFiniteError
from meshwright.gradients import (
    LossScale,
    LossWindow,
    SpreadGradients,
    agree_on_non_finite,
    clip_grad_norm_,
    cut_batch,
    global_norm,
    read_loss,
)
from meshwright.testing import Ranks


def model_with_gradients(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 300), nn.Linear(300, 400)).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e9])
def test_clips_as_torch_does(norm_type: float, max_norm: float) -> None:
    ours, theirs = model_with_gradients(), model_with_gradients()
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type)
    found = clip_grad_norm_(ours, max_norm, norm_type)
    torch.testing.assert_close(found, expected)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_tied_parameters_count_once() -> None:
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([3.0, 0.0, 4.0])
    assert clip_grad_norm_([weight, weight], 10.0).item() == 5.0
    assert clip_grad_norm_(weight, 1.0).item() == 5.0
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, 0.0, 0.8]))


def test_a_long_float32_norm_keeps_its_digits() -> None:
    weight = nn.Parameter(torch.zeros(3_000_001))
    torch.manual_seed(0)
    weight.grad = torch.randn(3_000_001) + 0.3
    exact = weight.grad.double().norm().item()
    assert abs(clip_grad_norm_(weight, 1e9).item() / exact - 1) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_measured_in_float32(dtype: torch.dtype) -> None:
    weights = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (7, 100_000)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 200.0)
    norm = clip_grad_norm_(weights, 1e9)
    assert norm.dtype is torch.float32
    torch.testing.assert_close(norm.item(), 200.0 * math.sqrt(100_007))


def test_nothing_to_clip() -> None:
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert clip_grad_norm_(nn.Linear(2, 2), 1.0).item() == 0.0


def test_refuses_what_cannot_be_clipped() -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([1.0, math.nan])
    with pytest.raises(ValueError, match="expected max_norm >= 0"):
        clip_grad_norm_(weight, -1.0)
    with pytest.raises(RuntimeError, match="the gradient norm of order 2"):
        clip_grad_norm_(weight, 1.0, error_if_nonfinite=True)


def body_spread_norm(norm_type: float) -> None:
    """Some gradients are held by every rank, others lie spread over the axis."""
    world = communicator()
    torch.manual_seed(0)
    whole, spread = torch.randn(5), torch.randn(6)
    mine = spread.chunk(world.size)[world.rank]
    found = global_norm(
        [
            SpreadGradients(gradients=(whole,)),
            SpreadGradients(gradients=(mine,), communicators=(world,)),
        ],
        norm_type,
    )
    torch.testing.assert_close(found, torch.cat([whole, spread]).norm(norm_type))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_norm_over_an_axis(ranks: Ranks, norm_type: float) -> None:
    ranks(2, body_spread_norm, norm_type)


# -------------------------------------------------------------------------------- loss contract


def test_losses_are_read() -> None:
    mean = read_loss(torch.tensor([2.0]))
    assert (mean.is_mean, mean.count, mean.total.shape) == (True, 1.0, ())
    counted = read_loss((torch.tensor(2.0), 3))
    assert (counted.is_mean, counted.count) == (False, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        1.0,
        None,
        torch.zeros(2),
        (torch.zeros(2), 1),
        (torch.tensor(1.0),),
        (torch.tensor(1.0), "1"),
    ],
)
def test_other_losses_are_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="expected the loss function to return"):
        read_loss(wrong)


def test_batches_are_cut() -> None:
    x, y = torch.arange(10).view(5, 2), torch.arange(5)
    parts = cut_batch({"x": x, "flag": True}, y, 2)
    assert [size for _, _, size in parts] == [3, 2]
    assert parts[1][0]["flag"] is True
    assert torch.equal(torch.cat([part["x"] for part, _, _ in parts]), x)
    assert [t.tolist() for _, t, _ in parts] == [[0, 1, 2], [3, 4]]
    with pytest.raises(ValueError, match=r"found lengths \[4, 5\]"):
        cut_batch(x, y[:4], 2)
    with pytest.raises(ValueError, match="at least 6"):
        cut_batch(x, y, 6)


def body_window() -> None:
    world = communicator()
    window = LossWindow(world)
    for part in range(2):
        window.add(read_loss((torch.tensor(1.0 + world.rank), 2 + part)), 3)
    window.close()
    assert window.factor() == 1 / (5 * world.size)
    assert window.mean().item() == pytest.approx((2 + 4) / (5 * world.size))
    window.check_sizes()
    unequal = LossWindow(world)
    unequal.add(read_loss(torch.tensor(1.0)), 3 + world.rank)
    unequal.close()
    with pytest.raises(ValueError, match="rank 0: 3; rank 1: 4"):
        unequal.check_sizes()


def body_stop() -> None:
    world = communicator()
    mine = [[], ["the gradient of 'b'", "the gradient of 'c'"]][world.rank]
    error = agree_on_non_finite(world, mine, what="step 3: the gradient norm is nan")
    assert isinstance(error, NonFiniteError)
    assert str(error).startswith(
        "step 3: the gradient norm is nan: on rank 1 the gradient of 'b' and 1 more is not finite."
    )
    overflow = agree_on_non_finite(world, [], what="step 3: the gradient norm is inf")
    assert "although every rank's own values are finite" in str(overflow)


@pytest.mark.parametrize("body", [body_window, body_stop], ids=["window", "stop"])
def test_all_ranks_together(ranks: Ranks, body: object) -> None:
    ranks(2, body)


def test_loss_scale() -> None:
    scale = LossScale(initial=8.0, interval=2, smallest=2.0)
    assert scale.update(True)
    assert scale.update(True)
    assert scale.scale == 16.0
    assert scale.update(False)
    assert (scale.scale, scale.good_steps) == (8.0, 0)
    other = LossScale()
    other.load_state_dict(scale.state_dict())
    assert (other.scale, other.good_steps) == (8.0, 0)
    assert [scale.update(False) for _ in range(3)] == [True, True, False]
