"""What a user gives by mistake, refused in our words before anything is built."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    Plan,
    PlanError,
    fully_shard,
    parallelize,
    parallelize_module,
    replicate,
)
from meshwright.composition import check_model
from meshwright.testing import Ranks
from support.internals.recipes import LanguageModel, ModelConfig


class Attention(nn.Module):
    """Drops by a function, inside of attention, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        p = 0.1 if self.training else 0.0
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=p)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.attention(x))


def net() -> nn.Sequential:
    return nn.Sequential(Layer(), Layer())


GLOBAL = "[axes]\nreplicate = 2\n[train]\ndropout = 'global'\n"
KEY = 'per_rank = ["*.attention"]'


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attention_that_drops_is_refused_with_the_key_that_helps(device: str) -> None:
    x = torch.ones(2, 3, 4, device=device)
    model = net().to(device).eval()
    before = torch.get_rng_state()
    with pytest.raises(PlanError) as caught:
        check_model(model, Plan.from_toml(GLOBAL), 2, (x,))
    assert f"or let each rank draw for itself there: [train] {KEY}" in str(caught.value)
    assert "\n" not in str(caught.value)
    check_model(model, Plan.from_toml(GLOBAL + KEY), 2, (x,))
    assert not model.training and not model[0].dropout.training
    assert torch.equal(before, torch.get_rng_state())


def body_refused_when_built() -> None:
    with pytest.raises(PlanError, match=r"per_rank = ..\*\.attention"):
        parallelize(
            net(),
            Plan.from_toml(GLOBAL),
            optimizer=None,
            loss=functional.mse_loss,
            example=(torch.ones(2, 3, 4),),
        )


def test_it_is_refused_before_the_first_step(ranks: Ranks) -> None:
    ranks(2, body_refused_when_built)


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (DistributedDataParallel, "DistributedDataParallel"),
        (FullyShardedDataParallel, "FullyShardedDataParallel"),
        (replicate, "replicate"),
        (fully_shard, "fully_shard"),
        (parallelize_module, "parallelize_module"),
        (
            lambda value: parallelize(value, Plan(), optimizer=None, loss=lambda *_: 0),
            "parallelize",
        ),
    ],
)
@pytest.mark.parametrize("value", [None, "x"])
def test_no_module_is_told_in_our_words(
    wrap: Callable[[object], object], name: str, value: object
) -> None:
    told = f"^{name}: expected a torch.nn.Module, found {type(value).__name__} "
    with pytest.raises(TypeError, match=told):
        wrap(value)


def test_an_optimizer_in_place_of_its_function_is_told() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"optimizer=lambda parameters: SGD\(parameters, \.\.\.\)"):
        parallelize(
            model,
            Plan(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),  # pyrefly: ignore
            loss=functional.mse_loss,
        )


def test_heads_that_do_not_divide_are_one_line() -> None:
    plan = Plan.from_toml("[axes]\ntensor = 3\n[tensor]\nrules = 'language-model'\n")
    with pytest.raises(PlanError) as caught:
        check_model(LanguageModel(ModelConfig(layers=4)), plan, 3)
    told = [line for line in str(caught.value).splitlines() if "heads = 4" in line]
    assert len(told) == 1
    assert " more cannot be split over tensor = 3 ranks" in told[0]
