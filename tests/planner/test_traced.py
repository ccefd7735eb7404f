"""Models traced without memory, against the same models run with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import Plan, PlanError
from meshwright.gradients import call_module
from meshwright.planner import load_hardware, named_model, recompute_for, trace_model
from meshwright.testing import MODELS
from support.internals.planner import RunLayout, Software, predict, rank_memory
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


def deep() -> nn.Module:
    return LanguageModel(ModelConfig(layers=12, dim=256, heads=4))


def rows() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)), torch.zeros(5, 64)


def words() -> str:
    return "no module"


def test_a_model_without_blocks_is_one_layer() -> None:
    shape, _ = named_model("planner.test_traced:rows")
    assert (shape.layers, shape.seq, shape.vocab) == (1, 1, 1)
    # In bfloat16: what enters both layers, and what the ReLU returns is one of these.
    assert shape.saved == 2 * (64 + 32)


# ------------------------------------------------------------------------------- odd models


class Odd(nn.Module):
    """A model of tokens with ``layers`` perceptrons, which may do other things beside them."""

    def __init__(self, widths: Sequence[int] = (128, 128), beside: int = 0, sines: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 32)
        self.layers = nn.ModuleList(Perceptron(width) for width in widths)
        wide = (nn.Linear(32, beside), nn.ReLU(), nn.Linear(beside, 32)) if beside else ()
        self.beside = nn.Sequential(*wide)
        self.head = nn.Linear(32, 500)
        self.sines = sines

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | float = 0.0) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(self.sines):
            x = torch.sin(x)
        for layer in (self.beside, *self.layers):
            x = layer(x)
        if isinstance(positions, torch.Tensor):
            x = x + positions[:, None]
        return self.head(x)


class Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(64, 64)
        self.register_buffer("turn", torch.zeros(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x @ self.turn)


def sines() -> nn.Module:
    return Odd(sines=20)


def half() -> nn.Module:
    return nn.Sequential(Odd(), nn.LayerNorm(500)).bfloat16()[0]


def placed() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    return Odd(), (torch.zeros(2, 16, dtype=torch.long), torch.arange(16.0))


def uneven() -> nn.Module:
    return Odd((32, 32, 2048))


def adapted() -> nn.Module:
    model = Odd((128,) * 4)
    for part in (model.embedding, *model.layers[:3]):
        part.requires_grad_(False)
    return model


def buffered() -> tuple[nn.Module, torch.Tensor]:
    return Buffered(), torch.zeros(2, 8, 64)


def wide() -> nn.Module:
    return Odd(beside=2**14)


def images() -> tuple[nn.Module, torch.Tensor]:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    return nn.Sequential(*layers), torch.zeros(2, 3, 16, 16)


@pytest.mark.parametrize("name", ["buffered", "wide", "images"])
def test_what_no_decoder_is_like_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(PlanError, match="no decoder has its .* parameters") as caught:
        named_model(f"planner.test_traced:{name}", 32)
    said = str(caught.value)
    assert all(way in said for way in ("trace_model", "--plan auto", "--rehearse RANK"))
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("name", ["sines", "half", "placed", "uneven", "adapted"])
def test_a_decoder_keeps_what_its_model_keeps(name: str) -> None:
    shape, trace = named_model(f"planner.test_traced:{name}", 32)
    assert shape.saved * shape.layers == pytest.approx(trace.saved() / trace.tokens)
    assert shape.parameters == pytest.approx(trace.parameters, rel=0.05)
    assert shape.flops == pytest.approx(trace.flops[""] / trace.tokens, rel=0.05)
    if name == "sines":
        assert trace.saved() > 20 * 32 * 32 * 4
    pytest.importorskip("scipy")
    # The search says that it fits if all blocks recompute: then a choice is found.
    budget = shape.layers * shape.least + shape.saved
    for tokens in (trace.tokens, 8 * trace.tokens):
        found = recompute_for(trace, load_hardware("h100"), tokens, tokens * budget)
        assert found.peak <= tokens * budget


def test_frozen_parameters_have_no_gradients() -> None:
    shape, trace = named_model("planner.test_traced:adapted", 32)
    model = adapted()
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(unit.trainable for unit in trace.units) == trainable < 0.7 * trace.parameters
    machine = load_hardware("h100")
    for axes, ranks in (("replicate", 1), ("shard", 2)):
        memory = predict(trace, Plan.from_toml(f"axes.{axes} = 2"), machine).memory
        assert memory["parameters"] * ranks == 4 * trace.parameters
        assert memory["gradients"] * ranks == 4 * trainable
        assert memory["optimizer"] * ranks == 8 * trainable
    parts = rank_memory(shape, RunLayout(shard=2, zero=3), Software()).parts
    share = trainable / trace.parameters
    assert parts["gradients"] == pytest.approx(share * parts["weights"])
    assert parts["optimizer"] == pytest.approx(2 * share * parts["weights"])


def test_a_failing_trace_logs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logged = list[logging.LogRecord]()
    log = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(log, "handle", logged.append)
    with pytest.raises(PlanError, match="cannot be traced"):
        trace_model(Odd, (torch.zeros(2, 8, dtype=torch.long), torch.zeros(9)))
    assert not logged
    assert not log.disabled


@pytest.mark.parametrize(
    ("tokens", "budget"), [(64, -1.0), (64, float("nan")), (64, 0.0), (0, 1e9), (-5, 1e9)]
)
def test_budgets_that_are_none_are_refused(tokens: int, budget: float) -> None:
    trace = trace_model(Odd, torch.zeros(2, 8, dtype=torch.long))
    with pytest.raises(PlanError, match="expected tokens and bytes above 0"):
        recompute_for(trace, load_hardware("h100"), tokens, budget)


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
