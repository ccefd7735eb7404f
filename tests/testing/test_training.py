"""`assert_same_training` and the sample models: agreement passes, each kind of difference fails."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.data_parallel import keep_batch_norm_local, replicate
from meshwright.errors import ParityError
from meshwright.plan import Plan
from meshwright.testing import MODELS, Ranks, assert_same_training, wrapped
from support.internals.axes import Axes

COMPARABLE = [name for name, sample in MODELS.items() if not sample.depends_on]


@pytest.mark.parametrize("name", MODELS)
def test_every_sample_trains(name: str) -> None:
    sample = MODELS[name]
    torch.manual_seed(0)
    model = sample.build()
    batch, target = sample.example_batch(5, torch.Generator().manual_seed(1))
    again, _ = sample.example_batch(5, torch.Generator().manual_seed(1))
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    loss = sample.loss(output, target)
    loss.backward()
    assert loss.ndim == 0
    assert str(batch) == str(again)
    with_gradient = {n for n, p in model.named_parameters() if p.grad is not None}
    without = {n for n, _ in model.named_parameters()} - with_gradient
    assert without == {
        "frozen": {"2.weight", "2.bias", "4.bias"},
        "unused": {"never.weight", "never.bias", "scale"},
    }.get(name, set())


def test_models_is_frozen() -> None:
    with pytest.raises(TypeError):
        MODELS["more"] = MODELS["tied"]  # type: ignore[index]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", COMPARABLE)
def test_replicate_trains_as_one_process(ranks: Ranks, name: str) -> None:
    wrap = wrapped(partial(replicate, bucket_cap_mb=1e-4))
    assert_same_training(MODELS[name], wrap, world=2, clip_norm=0.5, ranks=ranks)


@pytest.mark.parametrize("name", ["tied", "keywords"])
def test_a_plan_trains_as_one_process(ranks: Ranks, name: str) -> None:
    plan = Plan(axes=Axes.of({"replicate": 2}))
    assert_same_training(MODELS[name], plan, world=2, ranks=ranks)


def test_local_batch_statistics_equal_a_cut_reference(ranks: Ranks) -> None:
    def wrap(model: nn.Module) -> nn.Module:
        keep_batch_norm_local(model)
        return replicate(model, broadcast_buffers=False)

    with pytest.raises(ParityError, match="'batch_norm' on 2 ranks: rank 0, step 1: "):
        assert_same_training(MODELS["batch_norm"], wrapped(wrap), world=2, ranks=ranks)


class Forgetful(nn.Module):
    """Averages all gradients but those of one parameter."""

    def __init__(self, model: nn.Module, forgotten: str) -> None:
        super().__init__()
        self.model = model
        world = communicator()

        def average(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            world.all_reduce(parameter.grad).wait()
            parameter.grad /= world.size

        for name, parameter in model.named_parameters():
            if name != forgotten:
                parameter.register_post_accumulate_grad_hook(average)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def test_a_forgotten_gradient_is_named(ranks: Ranks) -> None:
    sample = MODELS["sequential"]
    assert_same_training(sample, wrapped(partial(Forgetful, forgotten="")), world=2, ranks=ranks)
    with pytest.raises(ParityError, match=r"rank 0, step 1: the gradient of '2.weight' differs"):
        assert_same_training(
            sample, wrapped(partial(Forgetful, forgotten="2.weight")), world=2, ranks=ranks
        )


def test_dropout_is_refused() -> None:
    with pytest.raises(ValueError, match="'dropout' draws random numbers"):
        assert_same_training(MODELS["dropout"], wrapped(replicate), world=2)


def test_unequal_shares_are_refused(ranks: Ranks) -> None:
    with pytest.raises(Exception, match="batch_size must divide by the 2 shares"):
        assert_same_training(MODELS["skip"], wrapped(replicate), world=2, batch_size=5, ranks=ranks)
