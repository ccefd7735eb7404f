"""A small model, its data, and one process that trains on it, for tests of other programs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

ROWS = 64
WORDS = 32


def needs(*packages: str) -> None:
    """Skip the tests of a file, by name, where a package is missing; without loading it."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: see `make clients`", allow_module_level=True)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
    ).double()


def rows() -> torch.utils.data.TensorDataset:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 6, generator=draw, dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :2] * inputs[:, 2:4])


def adam(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def alone(
    batch: int = 8,
    steps: int = 4,
    make: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer] = adam,
    clip: float | None = None,
) -> dict[str, torch.Tensor]:
    """Train in this process; return the weights."""
    found, (inputs, targets) = model(), rows().tensors
    optimizer = make(found.parameters())
    for step in range(steps):
        part = slice(step * batch, (step + 1) * batch)
        optimizer.zero_grad()
        F.mse_loss(found(inputs[part]), targets[part]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(found.parameters(), clip)
        optimizer.step()
    return whole(found)


def whole(found: nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy the weights, gathered and by the names of the plain model."""
    state = found.state_dict() if isinstance(found, nn.Module) else found
    gathered = {
        name.removeprefix("module."): value.full_tensor()
        if hasattr(value, "full_tensor")
        else value
        for name, value in state.items()
    }
    return {name: value.detach().clone() for name, value in gathered.items()}


def assert_same(
    found: Iterable[Mapping[str, torch.Tensor]], expected: Mapping[str, torch.Tensor]
) -> None:
    """Compare the weights of each rank with those of one process."""
    for weights in found:
        torch.testing.assert_close(dict(weights), dict(expected), rtol=1e-9, atol=1e-12)


def gpt2() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config).double()


def llama() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).double()


def texts() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(0, WORDS, (32, 12), generator=draw)
    return [{"input_ids": row, "labels": row} for row in rows]
