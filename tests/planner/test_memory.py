"""Bytes of a rank: states, activations and those in flight, against counts by hand."""

from __future__ import annotations

import pytest

from meshwright.planner import ModelShape
from support.internals.planner import (
    GIB,
    OURS,
    RunLayout,
    Software,
    flights,
    layer_activations,
    rank_memory,
    rank_parameters,
    stage_layers,
)
from support.internals.schedule import Costs, build, simulate

GPT = ModelShape(
    layers=8, hidden=1024, heads=16, ffn=4096, glu=False, vocab=50304, seq=2048, tied=True
)
PLAIN = Software(flash=0, dropout=True, logits_bytes=6)


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("sequence", [False, True])
def test_activations_of_a_layer_are_those_of_the_paper(tensor: int, sequence: bool) -> None:
    # Korthikanti et al. 2022, equations 1 to 4.
    s, b, h, a, t = GPT.seq, 4, GPT.hidden, GPT.heads, tensor
    layout = RunLayout(tensor=t, sequence=sequence, micro=b)
    scores = 5 * a * s / h
    whole = s * b * h * ((34 + scores) / t if sequence else 10 + (24 + scores) / t)
    found = layer_activations(GPT, layout, PLAIN, moe=False, recompute="none")
    assert found == pytest.approx(whole)
    selective = layer_activations(GPT, layout, PLAIN, moe=False, recompute="selective")
    assert selective == pytest.approx(whole - s * b * h * scores / t)
    full = layer_activations(GPT, layout, PLAIN, moe=False, recompute="full")
    assert full == pytest.approx(2 * s * b * h / (t if sequence else 1))


@pytest.mark.parametrize(
    ("zero", "each"), [(0, 18.0), (1, 6 + 12 / 4), (2, 2 + 16 / 4), (3, 16 / 4)]
)
def test_states_of_a_parameter(zero: int, each: float) -> None:
    shard = 4 if zero > 1 else 1
    pipeline = 2 if zero == 2 else 1  # without a pipeline, it is FSDP's
    layout = RunLayout(replicate=4 // shard, shard=shard, zero=zero, pipeline=pipeline)
    dense, expert = rank_parameters(GPT, layout, 0)
    parts = rank_memory(GPT, layout, PLAIN, 0).parts
    total = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert expert == 0
    assert total == pytest.approx(each * dense)


def test_parameters_of_ranks_sum_to_those_of_the_model() -> None:
    untied = ModelShape(layers=8, hidden=64, heads=4, ffn=256, vocab=1000, seq=16)
    for schedule, chunks in (("1f1b", 1), ("interleaved1f1b", 2), ("zbv", 2)):
        layout = RunLayout(pipeline=4, chunks=chunks, schedule=schedule, tensor=2)
        ranks = [rank_parameters(untied, layout, rank)[0] for rank in range(4)]
        assert 2 * sum(ranks) == untied.parameters


@pytest.mark.parametrize(
    ("name", "chunks", "microbatches"),
    [
        ("gpipe", 1, 8),
        ("1f1b", 1, 8),
        ("1f1b", 1, 4),
        ("interleaved1f1b", 2, 8),
        ("interleaved1f1b", 3, 4),
        ("interleaved1f1b", 2, 7),
        ("interleaved1f1b", 8, 7),
        ("loopedbfs", 2, 8),
        ("zb1p", 1, 8),
        ("zbv", 2, 12),
        ("dualpipev", 2, 12),
        ("zb2p", 1, 12),
        ("vhalf", 2, 12),
        ("vmin", 2, 12),
    ],
)
def test_activations_in_flight_are_those_of_the_schedule(
    name: str, chunks: int, microbatches: int
) -> None:
    peaks = simulate(build(name, 4, microbatches, chunks), Costs(), events=False).peaks
    found = [flights(name, 4, chunks, microbatches, rank) for rank in range(4)]
    for rank in range(4):
        assert peaks[rank] <= found[rank] <= peaks[rank] + (name in ("zb1p", "zbv", "dualpipev"))
    if name not in ("zb1p", "zbv", "dualpipev"):
        assert found == list(peaks)


def test_layers_of_stages() -> None:
    assert stage_layers(GPT, RunLayout(pipeline=4)) == [2, 2, 2, 2]
    assert stage_layers(GPT, RunLayout(pipeline=3)) == [3, 3, 2]
    fewer = ModelShape(layers=14, hidden=64, heads=4, ffn=256, vocab=100, seq=16)
    assert stage_layers(fewer, RunLayout(pipeline=4)) == [3, 4, 4, 3]
    balanced = RunLayout(pipeline=4, vocabulary="balanced")
    assert sum(stage_layers(GPT, balanced, head=1.9)) == 8
    assert stage_layers(GPT, balanced, head=1.9)[-1] < 2


def test_the_rank_that_needs_the_most_is_found() -> None:
    wide = ModelShape(layers=4, hidden=64, heads=4, ffn=256, vocab=100_000, seq=512)
    found = rank_memory(wide, RunLayout(pipeline=4, microbatches=4), OURS)
    assert found.rank == 3
    assert found.largest in ("logits", "workspace")
    assert found.parts["logits"] == 14 * 512 * 100_000
    assert found.parts["workspace"] == GIB
