"""The operations that the model needs, against a count of what torch runs."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from support.internals.recipes import (
    LanguageModel,
    ModelConfig,
    cross_entropy,
    flops_a_token,
    matrix_flops,
)


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_is_what_torch_counts(tied: bool) -> None:
    config = ModelConfig(layers=2, heads=2, dim=16, context=32, tied=tied)
    model = LanguageModel(config)
    tokens = torch.zeros(3, config.context, dtype=torch.long)
    # The kernel of plain matrix products is the one whose operations torch counts on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        summed = cross_entropy(model(tokens), tokens)
        summed[0].backward()
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    # Norms and biases are in the formula, and multiply no matrix.
    assert counter.get_total_flops() == tokens.numel() * (flops_a_token(config) - 6 * vectors)


def test_a_matrix_product_is_measured() -> None:
    assert 1e7 < matrix_flops(torch.device("cpu"), "float32") < 1e14
