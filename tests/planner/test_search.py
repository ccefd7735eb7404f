"""The search: no layout that fits is faster, refusals say why, and it is quick."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from meshwright import Plan, PlanError
from meshwright.planner import ModelShape, best_layouts, load_hardware
from support.internals.planner import (
    GIB,
    OURS,
    USABLE,
    Constants,
    RunLayout,
    Searcher,
    answer,
    families,
    neighbors,
    rank_memory,
    step_time,
    to_plan,
)

H100 = load_hardware("h100")
SMALL = ModelShape(layers=16, hidden=2048, heads=16, kv_heads=8, ffn=8192, vocab=32000, seq=2048)
LARGE = ModelShape(
    layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, seq=8192
)


def test_no_layout_that_fits_is_faster() -> None:
    found = best_layouts(SMALL, 8, H100, batch=64)
    assert found.best is not None
    for tensor, pipeline, micro in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8)):
        data = 8 // (tensor * pipeline)
        if not data or 64 % (data * micro):
            continue
        for shard, zero in {(1, 0), (data, 3 if data > 1 else 0)}:
            layout = RunLayout(
                replicate=data // shard,
                shard=shard,
                zero=zero,
                tensor=tensor,
                pipeline=pipeline,
                micro=micro,
                microbatches=64 // (data * micro),
            )
            if rank_memory(SMALL, layout, OURS).total > 0.9 * 80 * GIB:
                continue
            seconds = step_time(SMALL, layout, H100, OURS, Constants(), replay=True).total
            assert seconds >= 0.98 * found.best.time.total, layout


def test_each_of_the_pareto_set_takes_longer_and_needs_less() -> None:
    found = best_layouts(SMALL, 8, H100, batch=64)
    assert found.best is found.pareto[0]
    for one, other in itertools.pairwise(found.pareto):
        assert other.time.total >= one.time.total
        assert other.memory.total < one.memory.total
    assert all(c.layout.gpus == 8 and c.layout.batch == 64 for c in found.pareto)


def test_neighbors_say_what_is_wrong_with_them() -> None:
    found = best_layouts(LARGE, 1024, H100, batch=512)
    lines = neighbors(found, LARGE, H100, 512)
    assert any("of 75.2 usable GiB" in line for line in lines)
    found = best_layouts(SMALL, 8, H100, batch=64)
    lines = neighbors(found, SMALL, H100, 64)
    assert any("%, " in line and " s" in line for line in lines)


def test_where_nothing_fits_the_category_is_named() -> None:
    found = answer(LARGE, 8, H100, 64)
    assert found.toml == ""
    assert "nothing fits" in found.lines[0]
    assert "of 75.2 usable GiB" in found.lines[0]
    assert any(name in found.lines[0] for name in ("weights", "optimizer", "gradients", "units"))
    odd = answer(SMALL, 17, H100, 64)
    assert "divides" in odd.lines[0]
    assert "2040 sequences" in answer(SMALL, 12, H100).lines[0]  # of 2,048, by 12 GPUs


@pytest.mark.parametrize(("gpus", "batch"), [(0, 8), (2.0, 8), (8, -4), (8, float("nan"))])
def test_sizes_that_are_none_are_refused(gpus: float, batch: float) -> None:
    with pytest.raises(PlanError, match="expected whole numbers of GPUs and sequences"):
        best_layouts(SMALL, gpus, H100, batch=batch)  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [("memory_gib", float("nan")), ("node", 0), ("intra_gbps", 0.0), ("generation", "volta")],
)
def test_machines_made_in_python_are_checked(field: str, value: Any) -> None:
    with pytest.raises(PlanError, match=field):
        best_layouts(SMALL, 2, replace(H100, **{field: value}), batch=8)


def test_layouts_a_little_too_large_do_not_fit() -> None:
    found = best_layouts(SMALL, 8, replace(H100, memory_gib=6.0), batch=64)
    less = 0.96 * found.pareto[-1].memory.total / GIB * (1 + OURS.fragments) / USABLE
    nearly = best_layouts(SMALL, 8, replace(H100, memory_gib=less), batch=64)
    assert found.fitting > 0
    assert (nearly.best, nearly.fitting) == (None, 0)


def test_what_fits_by_the_estimate_fits_in_full() -> None:
    """Also where the first layers have no experts, and are smaller."""
    mixture = ModelShape(
        layers=8, hidden=1024, heads=8, ffn=4096, vocab=128_000, seq=2048,
        experts=8, topk=2, moe_ffn=2048, dense_layers=3,
    )  # fmt: skip
    searcher = Searcher(mixture, H100, OURS, 1e18, 16)
    for family in families(mixture, 4, 16):
        for seconds, memory, choice in searcher.estimates(family):
            full = searcher.candidate(searcher.layout(family, *choice))
            assert memory == pytest.approx(full.memory.total, rel=0.005), full.layout
            counted = full.time.total - full.time.parts["other"]
            uneven = 0.25 if full.layout.schedule == "vmin" else 0.07
            assert seconds == pytest.approx(counted, rel=uneven), full.layout


def test_the_answer_is_a_plan() -> None:
    found = answer(SMALL, 8, H100, 64)
    assert Plan.from_toml(found.toml).axes.world_size == 8
    assert "fits" in found.fit_lines[0]


def test_degrees_of_a_layout_are_axes_of_its_plan() -> None:
    layout = RunLayout(
        shard=16, zero=3, tensor=2, pipeline=2, expert=8, microbatches=4,
        recompute="full", recompute_share=1.0,
    )  # fmt: skip
    plan = to_plan(layout, SMALL)
    assert plan.axes.mapping() == {"pipeline": 2, "shard": 2, "expert": 8, "tensor": 2}
    assert plan.axes.world_size == layout.gpus
    assert plan.pipeline.microbatches == 4
    assert plan.train.recompute == ("model.layers.*",)
    assert plan.pipeline.split == ("model.layers.8",)
    assert to_plan(replace(layout, zero=2), SMALL).shard.reshard_after_forward is False
    quarter = to_plan(replace(layout, recompute_share=0.25), SMALL, [str(n) for n in range(16)])
    assert quarter.train.recompute == ("0", "1", "8", "9")


def test_every_layout_with_experts_is_a_plan_of_all_gpus() -> None:
    mixture = replace(SMALL, experts=8, topk=2, moe_ffn=4096)
    found = list(families(mixture, 16, 64))
    assert {layout.expert for layout in found} == {1, 2, 4, 8}
    assert all(to_plan(layout, mixture).axes.world_size == 16 for layout in found)


def printed(program: str) -> list[str]:
    """What a fresh interpreter prints for ``program``, in words."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    return done.stdout.decode().split()


@pytest.mark.slow
def test_thousands_of_gpus_are_searched_in_seconds_and_little_memory() -> None:
    seconds, mebibytes, considered, threads, best = printed(
        "import resource, threading, time\n"
        "from meshwright.planner import ModelShape, best_layouts, load_hardware\n"
        f"found = best_layouts({LARGE!r}, 16384, load_hardware('h100'), batch=2048)\n"
        "used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "print(time.process_time(), used, found.considered, threading.active_count(),\n"
        "      found.best is not None)"
    )
    assert (int(considered) >= 300_000, best, threads) == (True, "True", "1")
    assert float(seconds) < 10
    assert float(mebibytes) < 1024


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [16384, 131072])
def test_a_step_of_many_ranks_is_simulated_by_its_stages(gpus: int) -> None:
    start = time.process_time()
    for schedule, chunks in (("1f1b", 1), ("interleaved1f1b", 4), ("zb2p", 1), ("vhalf", 2)):
        layout = RunLayout(
            replicate=gpus // 1024, shard=8, zero=1, tensor=8, sequence=True, pipeline=16,
            microbatches=256, schedule=schedule, chunks=chunks,
        )  # fmt: skip
        assert layout.gpus == gpus
        found = step_time(LARGE, layout, H100, OURS, Constants(), replay=True)
        memory = max(rank_memory(LARGE, layout, OURS, rank).total for rank in range(16))
        assert memory > 0
        counted = step_time(LARGE, layout, H100, OURS, Constants())
        assert found.total == pytest.approx(counted.total, rel=0.1)
    assert time.process_time() - start < 4 * 5


def test_the_planner_starts_without_torch_and_soon() -> None:
    program = (
        "import sys, time; start = time.process_time(); import meshwright.planner.search; "
        "print(time.process_time() - start, 'torch' in sys.modules)"
    )
    seconds, has_torch = printed(program)
    assert has_torch == "False"
    assert float(seconds) < 0.3
