from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from support.internals.recipes import LanguageModel, ModelConfig, cross_entropy, initialize

SMALL = ModelConfig(layers=2, heads=2, dim=16, context=12)


def build(config: ModelConfig = SMALL, seed: int = 0) -> LanguageModel:
    model = LanguageModel(config)
    initialize(model, seed)
    return model


def test_names_are_readable() -> None:
    names = dict(build().named_parameters())
    assert {"embedding.weight", "head.weight", "norm.weight"} <= names.keys()
    assert {"layers.1.attention.wq.weight", "layers.1.feed_forward.w2.weight"} <= names.keys()
    assert not dict(build().named_buffers())


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("tied", [False, True])
def test_no_position_sees_a_later_byte(activation: str, tied: bool) -> None:
    model = build(
        ModelConfig(
            layers=2, heads=2, dim=16, context=12, hidden=24, activation=activation, tied=tied
        )
    )
    tokens = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    first, second = model(tokens), model(changed)
    assert first.shape == (2, 12, 256)
    torch.testing.assert_close(first[:, :7], second[:, :7])
    assert not torch.allclose(first[:, 7:], second[:, 7:])


def test_positions_matter() -> None:
    tokens = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    logits = build()(tokens)
    assert not torch.allclose(logits[0, -1], logits[1, -1])


def test_a_fresh_model_is_close_to_uniform() -> None:
    tokens = torch.randint(0, 256, (4, 13), generator=torch.Generator().manual_seed(0))
    total, count = cross_entropy(build()(tokens[:, :-1]), tokens[:, 1:])
    assert int(count) == 48
    assert math.isclose(total.item() / 48, math.log(256), rel_tol=0.02)


def test_values_depend_on_seed_and_name_alone() -> None:
    first = dict(build(seed=1).named_parameters())
    deeper = dict(
        build(ModelConfig(layers=2, heads=2, dim=16, context=99), seed=1).named_parameters()
    )
    other = dict(build(seed=2).named_parameters())
    assert all(torch.equal(value, deeper[name]) for name, value in first.items())
    assert not torch.equal(first["head.weight"], other["head.weight"])
    assert not torch.equal(
        first["layers.0.attention.wq.weight"], first["layers.1.attention.wq.weight"]
    )


def test_a_model_built_on_meta_gets_the_same_values() -> None:
    with torch.device("meta"):
        model = LanguageModel(SMALL)
    initialize(model.to_empty(device="cpu"), 3)
    expected = dict(build(seed=3).named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())


def test_float64_starts_from_the_float32_values() -> None:
    wide = LanguageModel(SMALL).double()
    initialize(wide, 0)
    narrow = dict(build().named_parameters())
    assert all(torch.equal(value.float(), narrow[name]) for name, value in wide.named_parameters())
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(wide(tokens).float(), build()(tokens), atol=1e-4, rtol=1e-4)


def test_tied_head_is_one_parameter() -> None:
    model = build(ModelConfig(layers=1, heads=2, dim=16, context=8, tied=True))
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_dropout_acts_in_training_only() -> None:
    model = build(ModelConfig(layers=1, heads=2, dim=16, context=8, dropout=0.5))
    tokens = torch.arange(8)[None]
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_it_learns_a_cycle() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = (torch.arange(26) % 5)[None].repeat(4, 1)
    loss = nn.functional.cross_entropy
    for _ in range(30):
        value = loss(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert value.item() < 0.5
