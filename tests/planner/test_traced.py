"""Models traced without memory, against the same models run with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import PlanError
from meshwright.gradients import call_module
from meshwright.planner import named_model, trace_model
from meshwright.testing import MODELS
from support.internals.recipes import LanguageModel, ModelConfig


def really_saved(model: nn.Module, batch: Any, target: Any, loss: Any) -> int:
    """Bytes that hooks see in a forward with memory."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(call_module(model, batch), target)
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_is_saved_is_what_a_run_saves(name: str) -> None:
    sample = MODELS[name]
    batch, target = sample.example_batch(6, torch.Generator().manual_seed(0))
    trace = trace_model(sample.build, batch, target=target, loss=sample.loss)
    assert trace.saved() == really_saved(sample.build(), batch, target, sample.loss)
    assert sum(unit.saved for unit in trace.units) == trace.saved()
    assert trace.parameters == sum(p.numel() for p in sample.build().parameters())


def language_model(layers: int = 2) -> nn.Module:
    return LanguageModel(ModelConfig(layers=layers, dim=32, heads=2))


def test_operations_are_those_of_a_hand_count() -> None:
    rows, length, dim = 2, 16, 32
    trace = trace_model(language_model, torch.zeros(rows, length, dtype=torch.long))
    tokens = rows * length
    products = 2 * tokens * (4 * dim * dim + 2 * dim * 4 * dim)
    attention = 4 * tokens * length * dim
    head = 2 * tokens * dim * 256
    units = {unit.name: unit for unit in trace.units}
    assert units["layers.0"].flops == units["layers.1"].flops == products + attention
    assert trace.flops[""] == 2 * (products + attention) + head
    assert sum(unit.flops for unit in trace.units) == trace.flops[""]


def test_units_are_blocks_and_what_is_beside_them() -> None:
    trace = trace_model(language_model, torch.zeros(1, 8, dtype=torch.long), compute="bfloat16")
    assert trace.blocks == ("layers.0", "layers.1")
    assert [u.name for u in trace.units] == [
        *("embedding", "dropout", "layers.0", "layers.1", "norm", "head", "")
    ]
    assert trace.units[2].shape == (1, 8, 32)
    # A block that is recomputed keeps its input alone.
    whole, full = (trace.kept(again, inside="layers.0") for again in ((), ("layers.0",)))
    assert trace.bytes_of(full) == 8 * 32 * 4
    assert trace.units[2].saved == trace.bytes_of(whole) > trace.bytes_of(full)


def test_recomputed_modules_keep_their_inputs() -> None:
    x = torch.zeros(1, 8, dtype=torch.long)
    trace = trace_model(language_model, x)
    whole = trace.saved()
    one, both = trace.saved(["layers.0"]), trace.saved(["layers.*"])
    assert whole - one == one - both
    assert trace.saved(["layers.1", "layers.1.attention"]) == one


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (lambda: nn.Linear(3, 3), "RuntimeError"),
        (lambda: nn.Linear(-3, 3), "RuntimeError"),
    ],
)
def test_a_model_that_cannot_run_is_refused_in_one_line(build: Any, problem: str) -> None:
    with pytest.raises(PlanError, match="cannot be traced without memory") as caught:
        trace_model(build, torch.zeros(2, 7))
    assert problem in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_trace_takes_no_memory() -> None:
    def large() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2**16, 2**16) for _ in range(40)))

    trace = trace_model(large, torch.zeros(4, 2**16))
    assert trace.parameters == 40 * (2**32 + 2**16)
    assert isinstance(trace.flops, Mapping)
    assert isinstance(trace.units, Sequence)


def test_a_decoder_is_found_again_in_its_trace() -> None:
    shape, trace = named_model("planner.test_traced:small", 64)
    parameters = sum(p.numel() for p in small().parameters())
    assert abs(shape.parameters - parameters) < 0.01 * parameters
    assert trace.parameters == parameters
    # The norm before the head counts as a row of it.
    found = (shape.layers, shape.hidden, shape.seq, shape.vocab - 1, shape.tied)
    assert found == (3, 64, 64, 256, False)
    # Norms and biases multiply nothing, and are taken from attention.
    assert abs(shape.head_dim - 64) <= 2
    assert abs(shape.ffn - 256) <= 3
    # Nothing is known of the heads, so that axis tensor has nothing to split.
    assert shape.heads == 1
    flops = shape.flops * 64
    assert flops == pytest.approx(trace.flops[""], rel=0.02)


def small() -> nn.Module:
    return LanguageModel(ModelConfig(layers=3, dim=64, heads=2))


def rows() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)), torch.zeros(5, 64)


def words() -> str:
    return "no module"


def test_a_model_without_blocks_is_one_layer() -> None:
    shape, _ = named_model("planner.test_traced:rows")
    assert (shape.layers, shape.seq, shape.vocab) == (1, 1, 1)
    # In bfloat16: what enters both layers, and what the ReLU returns is one of these.
    assert shape.saved == 2 * (64 + 32)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("planner.test_traced:words", "it returned a str"),
        ("planner.test_traced:none", "AttributeError"),
        ("no_such_package:none", "no_such_package"),
    ],
)
def test_a_function_that_gives_no_model_is_refused(name: str, problem: str) -> None:
    with pytest.raises(PlanError, match="expected package.module:function") as caught:
        named_model(name)
    assert problem in str(caught.value)
