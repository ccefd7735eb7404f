"""Seconds: products, collectives by topology, and schedules counted and replayed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from meshwright.planner import ModelShape, load_hardware
from support.internals.planner import (
    OURS,
    Constants,
    Group,
    Kernels,
    PassTimes,
    RunLayout,
    data_seconds,
    is_built,
    makespan,
    rank_parameters,
    replayed,
    step_time,
)
from support.internals.schedule import BUILDERS, TWO_A_RANK, Costs, build, lower, simulate

LLAMA = ModelShape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq=8192)
H100 = load_hardware("h100")
USUAL = Constants()


def test_a_product_is_bound_by_its_work_or_its_memory() -> None:
    kernels = Kernels(LLAMA, RunLayout(), H100, OURS, USUAL)
    large = kernels.product(8192, 8192, 8192)
    ceiling = H100.matmul_tflops * 1e12 * USUAL.product_hopper
    assert 1.0 < large / (2 * 8192**3 / ceiling) < 1.2
    thin = kernels.product(1, 8192, 8192)
    assert thin >= 2 * 8192**2 / (H100.memory_gbps * 1e9)
    assert kernels.product(8192, 8192, 8192, size=1) < large


def test_a_layer_takes_what_its_host_or_its_kernels_take_and_more_where_both_are_as_fast() -> None:
    def forward(launch: float) -> float:
        constants = replace(USUAL, launch=launch, uneven=0.25)
        return Kernels(LLAMA, RunLayout(), H100, OURS, constants).layer(moe=False).forward

    alone = forward(0.0)
    assert forward(alone / 30) == pytest.approx(1.25 * alone)
    assert forward(alone / 300) == pytest.approx(alone, rel=1e-3)
    assert forward(alone / 3) == pytest.approx(10 * alone, rel=1e-3)


def test_collectives_hide_behind_a_late_host() -> None:
    def layer(launch: float, latency: float) -> PassTimes:
        constants = replace(USUAL, launch=launch, latency=latency, uneven=0.0)
        layout = RunLayout(tensor=8, sequence=True)
        return Kernels(LLAMA, layout, H100, OURS, constants).layer(moe=False)

    assert layer(1e-3, 1e-4) == replace(layer(1e-3, 0.0), waiting=layer(1e-3, 1e-4).waiting)
    found = layer(0.0, 1e-4)
    assert found.both - layer(0.0, 0.0).both == pytest.approx(8e-4)
    assert found.waiting < found.both


def test_gradients_of_weights_hide_collectives_of_the_backward() -> None:
    def layer(overlap: bool) -> PassTimes:
        software = replace(OURS, overlap_back=overlap)
        return Kernels(LLAMA, RunLayout(tensor=8), H100, software, USUAL).layer(moe=False)

    shown, hidden = layer(False), layer(True)
    assert hidden.forward == shown.forward
    assert shown.waiting - hidden.waiting == pytest.approx(min(shown.waiting / 2, shown.weight))


def test_a_ring_over_whole_nodes_has_all_their_cards() -> None:
    apart, whole, inside = Group(4, 8, H100), Group(32, 1, H100), Group(8, 1, H100)
    assert (apart.local, apart.nodes) == (1, 4)
    assert (whole.local, whole.nodes) == (8, 4)
    assert (inside.local, inside.nodes) == (8, 1)
    assert whole.rate(USUAL) / apart.rate(USUAL) > 6
    size = 2.0**30
    assert inside.reduce(size, USUAL) < whole.reduce(size, USUAL) < apart.reduce(size, USUAL)
    # Of the all-gather of a ring each rank receives all but its own part.
    seconds = apart.gather(size, USUAL) - USUAL.latency - 2 * USUAL.hop
    assert seconds == pytest.approx(3 / 4 * size / (H100.inter_gbps * 1e9 * USUAL.network))


def test_an_exchange_sends_each_token_once_to_a_node() -> None:
    few, many = Group(16, 1, H100), Group(64, 1, H100)
    one = few.exchange(2.0**26, 8, USUAL)
    assert one < few.exchange(2.0**26, 1, USUAL)
    assert one < many.exchange(2.0**26, 8, USUAL)


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "microbatches"),
    [
        ("1f1b", 4, 1, 19),
        ("gpipe", 4, 1, 12),
        ("interleaved1f1b", 4, 3, 24),
        ("zb1p", 4, 1, 20),
        ("zbv", 4, 2, 23),
        ("dualpipev", 4, 2, 24),
        ("zb2p", 4, 1, 20),
        ("vhalf", 4, 2, 24),
        ("vmin", 4, 2, 24),
    ],
)
def test_a_step_is_drawn_out_as_its_schedule_runs(
    name: str, ranks: int, chunks: int, microbatches: int
) -> None:
    stages = [PassTimes(1 + 0.1 * (s % 3), 1.2, 0.8) for s in range(ranks * chunks)]
    stages[-1] = PassTimes(1.4, 1.8, 1.1)
    layout = RunLayout(pipeline=ranks, chunks=chunks, microbatches=microbatches, schedule=name)
    costs = Costs(
        forward=[s.forward for s in stages],
        input=[s.input for s in stages],
        weight=[s.weight for s in stages],
        transfer=0.05,
    )
    whole = simulate(lower(build(name, ranks, microbatches, chunks)), costs, events=False).makespan
    assert replayed(layout, stages, 0.05) == pytest.approx(whole, rel=1e-9)
    assert makespan(layout, stages, 0.05) == pytest.approx(whole, rel=0.04)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_is_built_is_known(ranks: int) -> None:
    for name, microbatches in itertools.product(BUILDERS, (1, 2, 3, 5, 7, 8, 9)):
        try:
            build(name, ranks, microbatches, 2 if name in TWO_A_RANK else 1)
            found = True
        except ValueError:
            found = False
        assert is_built(name, ranks, microbatches) == found, (name, microbatches)


def test_replicas_reduce_their_own_share_of_the_gradients() -> None:
    def seconds(shard: int, context: int, expert: int = 1) -> float:
        mixture = replace(LLAMA, experts=8, topk=2, moe_ffn=4096)
        layout = RunLayout(replicate=4, shard=shard, zero=3, context=context, expert=expert)
        dense, experts = rank_parameters(mixture, layout, 0)
        return data_seconds(Kernels(mixture, layout, H100, OURS, USUAL), dense, experts)

    assert seconds(8, 4) == pytest.approx(seconds(32, 1))
    assert seconds(8, 1, expert=4) == pytest.approx(seconds(8, 1))


def test_parts_of_a_step_sum_to_it() -> None:
    for layout in (
        RunLayout(shard=8, zero=3, micro=2),
        RunLayout(replicate=2, tensor=2, sequence=True, pipeline=2, microbatches=8),
        RunLayout(context=2, tensor=4, sequence=True, recompute="full"),
    ):
        found = step_time(LLAMA, layout, H100, OURS, USUAL, replay=True)
        assert found.total == pytest.approx(sum(found.parts.values()))
        assert all(part >= -1e-9 for part in found.parts.values())
        assert 0.1 < found.work.mfu(found.total, H100.peak()) < 0.8


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_frozen_parameters_are_not_reduced_or_stepped(zero: int) -> None:
    layout = RunLayout(shard=8, zero=zero)
    half, whole = (
        step_time(replace(LLAMA, frozen=frozen), layout, H100, OURS, USUAL).parts
        for frozen in (0.5, 0.0)
    )
    assert half["optimizer"] == pytest.approx(0.5 * whole["optimizer"])
    assert half["replicate"] + half["shard"] < whole["replicate"] + whole["shard"]


def test_what_costs_more_takes_longer() -> None:
    plain = RunLayout(replicate=2, tensor=2, sequence=True, pipeline=2, microbatches=8)

    def seconds(layout: RunLayout) -> float:
        return step_time(LLAMA, layout, H100, OURS, USUAL, replay=True).total

    assert seconds(replace(plain, recompute="full")) > 1.2 * seconds(plain)
    assert seconds(replace(plain, microbatches=16)) > 1.7 * seconds(plain)
    # Beyond a node axis tensor has the network between its products.
    wide = RunLayout(tensor=16, sequence=True, microbatches=8)
    narrow = RunLayout(tensor=8, sequence=True, pipeline=2, microbatches=8)
    assert seconds(wide) > 1.3 * seconds(narrow)
