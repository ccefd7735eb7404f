"""The one-process reference, and the first difference between two runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.internals.reference import ReferenceRun, first_difference, train_reference


def batches(steps: int = 3) -> list[tuple[object, object]]:
    torch.manual_seed(1)
    return [(torch.randn(6, 3), torch.randn(6, 2)) for _ in range(steps)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def run(**options: object) -> ReferenceRun:
    return train_reference(model(), batches(), optimizer=sgd, loss=F.mse_loss, **options)


def test_is_a_plain_training_loop() -> None:
    expected = model().double()
    optimizer = sgd(expected.parameters())
    found = run(clip_norm=0.1)
    for step, (x, y) in enumerate(batches()):
        loss = F.mse_loss(expected(x.double()), y.double())
        loss.backward()
        assert found.losses[step] == loss.item()
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(found.gradients[step][name], parameter.grad)
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(found.weights[name], weight)


def test_the_model_is_kept_and_the_dtype_can_stay() -> None:
    original = model()
    before = {name: weight.clone() for name, weight in original.state_dict().items()}
    found = train_reference(original, batches(), optimizer=sgd, loss=F.mse_loss, dtype=None)
    assert found.weights["0.weight"].dtype is torch.float32
    for name, weight in original.state_dict().items():
        assert torch.equal(weight, before[name])
        assert original.get_parameter(name).grad is None


def test_accumulation_changes_nothing() -> None:
    assert first_difference(run(accumulate=3), run(), 1e-12) is None


def test_counted_losses_give_the_mean() -> None:
    def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (output - target).square().sum(), target.numel()

    data = batches()
    found = train_reference(model(), data, optimizer=sgd, loss=counted, accumulate=4)
    assert first_difference(found, run(), 1e-12) is None


def test_a_loss_without_target() -> None:
    found = train_reference(
        model(), [(x, None) for x, _ in batches()], optimizer=sgd, loss=lambda output: output.mean()
    )
    assert len(found.losses) == 3


# ------------------------------------------------------------------------------- differences


def test_the_first_difference_is_named() -> None:
    reference = run()
    gradients = [dict(step) for step in reference.gradients]
    gradients[1]["2.bias"] = gradients[1]["2.bias"] * (1 + 1e-6)
    gradients[2]["0.bias"] = gradients[2]["0.bias"] * 2
    found = first_difference(replace(reference, gradients=tuple(gradients)), reference, 1e-9)
    assert found is not None
    assert (found.kind, found.step, found.name) == ("gradient", 1, "2.bias")
    assert found.error == pytest.approx(1e-6, rel=1e-3)
    assert str(found).startswith("step 2: the gradient of '2.bias' differs from one process by 1.0")
    assert first_difference(reference, reference, 0.0) is None


def test_losses_come_before_gradients_and_weights_last() -> None:
    reference = run()
    weights = {**reference.weights, "0.weight": reference.weights["0.weight"] + 1}
    other = replace(reference, weights=weights)
    found = first_difference(other, reference, 1e-9)
    assert found is not None
    assert (found.kind, found.step) == ("weight", 2)
    worse = replace(other, losses=(reference.losses[0], 7.0, reference.losses[2]))
    found = first_difference(worse, reference, 1e-9)
    assert found is not None
    assert (found.kind, found.step) == ("loss", 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_differs(value: float) -> None:
    reference = run()
    weights = {**reference.weights, "2.bias": torch.full((2,), value)}
    found = first_difference(replace(reference, weights=weights), reference, 1e-9)
    assert found is not None
    assert found.name == "2.bias"
    same = replace(reference, weights=weights)
    assert first_difference(same, same, 0.0) is None


def test_missing_tensors_steps_and_shapes() -> None:
    reference = run()
    gradients = [{n: g for n, g in s.items() if n != "0.weight"} for s in reference.gradients]
    lacking = replace(reference, gradients=tuple(gradients))
    assert "exists only in one process" in str(first_difference(lacking, reference, 1))
    assert "does not exist in one process" in str(first_difference(reference, lacking, 1))
    short = replace(reference, losses=(1.0,), gradients=reference.gradients[:1])
    assert "1 steps against 3" in str(first_difference(short, reference, 1))
    weights = {**reference.weights, "2.bias": torch.zeros(3)}
    odd = replace(reference, weights=weights)
    assert "shape (3,) against (2,)" in str(first_difference(odd, reference, 1))


def test_rounding_noise_is_no_difference() -> None:
    """A gradient that is zero but for rounding may differ by more than its own size."""
    reference = run()
    noise = [{**step, "noise": torch.tensor([1e-17])} for step in reference.gradients]
    other = [{**step, "noise": torch.tensor([-3e-17])} for step in reference.gradients]
    a, b = (replace(reference, gradients=tuple(g)) for g in (noise, other))
    assert first_difference(a, b, 1e-9) is None
