"""What a plan says is the layout that was predicted, for all that the search proposes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from torch.distributed.tensor import DTensor

from meshwright import Plan
from meshwright.composition import check_model, parallelize
from meshwright.errors import MeshwrightError
from meshwright.plan import match_names
from meshwright.planner import ModelShape, load_hardware
from meshwright.testing import Ranks
from support.hugging_face import model_of
from support.internals.composition import RULES, chunks_of
from support.internals.planner import (
    LAYER_LISTS,
    OURS,
    RunLayout,
    Searcher,
    Software,
    can_cut,
    changes,
    families,
    from_config,
    rank_parameters,
    tensor_rules,
    to_plan,
)

H100 = load_hardware("h100")
TRACED = replace(OURS, traced_stages=True)
LAYERS, RANKS, BATCH = 9, 8, 8
KINDS = {
    "Llama": {"num_hidden_layers": LAYERS},
    "GPT-2": {"n_layer": LAYERS},
    "Mixtral": {"num_hidden_layers": LAYERS, "num_local_experts": 4},
}


def model_and_shape(kind: str) -> tuple[Any, ModelShape]:
    """A small model without memory, and what the planner knows of it."""
    with torch.device("meta"):
        model = model_of(kind, **KINDS[kind])
    return model, from_config(json.loads(model.config.to_json_string()), 64)


def proposed(shape: ModelShape, software: Software = TRACED) -> Iterator[RunLayout]:
    """All layouts of 8 ranks."""
    searcher = Searcher(shape, H100, software, 1e18, BATCH)
    for family in families(shape, RANKS, BATCH):
        for _, _, choice in searcher.estimates(family):
            yield searcher.layout(family, *choice)


def run_of(plan: Plan, blocks: list[str]) -> RunLayout:
    """The layout that the runtime makes of a plan: placements as in composition/data_layout.py."""
    size = plan.axes.size
    p, is_sharded = size("pipeline"), size("shard") > 1
    sharers = size("shard") * size("expert") if is_sharded else 1
    count = plan.pipeline.microbatches if p > 1 else plan.train.accumulate
    data = size("replicate") * size("shard") * size("expert")
    again = {name for pattern in plan.train.recompute for name in match_names(pattern, blocks)}
    cuts = plan.pipeline.split if p > 1 else ()
    starts = [0, *(blocks.index(name) for name in cuts), len(blocks)]
    stages = [blocks[a:b] for a, b in itertools.pairwise(starts)]
    shares = [[name in again for name in stage] for stage in stages]
    for stage in shares:  # as many of each stage, and its first
        assert stage == sorted(stage, reverse=True)
        assert sum(stage) == min(len(stage), max(map(sum, shares)))
    largest = max(shares, key=len)
    return RunLayout(
        replicate=data // sharers,
        shard=sharers,
        zero=(3 if plan.shard.reshard_after_forward else 2) if is_sharded else 0,
        tensor=size("tensor"),
        pipeline=p,
        chunks=chunks_of(plan.pipeline, p) if p > 1 else 1,
        context=size("context"),
        expert=size("expert"),
        schedule=plan.pipeline.schedule,
        micro=BATCH // (data * count),
        microbatches=count,
        recompute="full" if again else "none",
        recompute_share=sum(largest) / len(largest),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_the_layout_that_was_predicted_and_can_be_run(kind: str) -> None:
    model, shape = model_and_shape(kind)
    names = {name for name, _ in model.named_modules()}
    listed = LAYER_LISTS.get(shape.name, "model.layers")
    blocks = [f"{listed}.{index}" for index in range(LAYERS)]
    assert names >= set(blocks)
    checked, axes = set[object](), set[str]()
    for layout in proposed(shape):
        plan = to_plan(layout, shape)
        assert run_of(plan, blocks) == layout
        assert layout.pipeline == 1 or not plan.train.recompute  # which assembly.py refuses
        for key in (tuple(layout.axes.items()), (layout.schedule, layout.stages)):
            if key not in checked:
                assert Plan.from_toml(plan.to_toml()) == plan
                check_model(model, plan, RANKS)
                checked.add(key)
        axes |= set(layout.axes)
    assert axes == {"pipeline", "replicate", "shard", "context", "tensor"} | (
        {"expert"} if kind == "Mixtral" else set()
    )


TYPES = sorted(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
CUTS = {
    "": {"shard": RANKS, "zero": 3, "recompute": "full", "recompute_share": 0.5},
    "pipeline": {"pipeline": 2, "replicate": 4, "microbatches": 4},
    "tensor": {"tensor": 2, "replicate": 4},
    "context": {"context": 2, "replicate": 4},
    "expert": {"expert": 2, "shard": RANKS, "zero": 3},
}


def sizes_of(kind: str) -> dict[str, Any]:
    """The defaults of a type, with eight layers and no dropout."""
    base = transformers.AutoConfig.for_model(kind).to_dict()
    lengths = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    lists = ("layer_types", "mlp_layer_types")
    return {
        **dict.fromkeys([key for key in lengths if key in base][:1], 8),
        **{key: base[key][:8] for key in lists if isinstance(base.get(key), list)},
        **dict.fromkeys([key for key in base if re.search("drop(out|out_prob)?$", key)], 0.0),
        **({"is_decoder": True} if "is_decoder" in base else {}),
    }


def small_model(kind: str) -> tuple[Any, ModelShape] | None:
    """A model of a type, and what the planner knows of it, if both take the type's defaults."""
    try:
        from_config(transformers.AutoConfig.for_model(kind).to_dict(), 64)
        config = transformers.AutoConfig.for_model(kind, **sizes_of(kind))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception:  # transformers' own defaults can be impossible, in many ways
        return None
    return model, from_config(json.loads(model.config.to_json_string()), 64)


@pytest.mark.slow
def test_plans_of_all_types_that_are_taken_name_their_modules() -> None:
    taken, problems = 0, list[str]()
    for kind in TYPES:
        if (built := small_model(kind)) is None:
            continue
        model, shape = built
        for axis, layout in CUTS.items():
            if (axis == "expert" and not shape.experts) or (axis and not can_cut(shape, axis)):
                continue
            plan = to_plan(RunLayout(**layout), shape)
            try:
                check_model(model, plan, RANKS)
            except MeshwrightError as error:
                problems.append(f"{kind}, {axis}: {error}")
        taken += 1
    assert not problems, "\n".join(problems)
    assert taken > 80


def test_stages_of_a_chain_recompute_equally_many_layers() -> None:
    shape = model_and_shape("Llama")[1]
    blocks = [f"model.layers.{index}" for index in range(LAYERS)]
    again = [layout for layout in proposed(shape, OURS) if layout.recompute != "none"]
    assert {layout.stages for layout in again} > {1, 2, 4, 8}
    assert all(run_of(to_plan(layout, shape), blocks) == layout for layout in again)


def test_neighbors_are_layouts_that_the_search_proposes() -> None:
    shape = model_and_shape("Mixtral")[1]
    for software in (OURS, TRACED):
        known = set(proposed(shape, software))
        for best in [*known][::97]:
            found = dict(changes(best, shape, BATCH, software))
            assert found
            assert set(found.values()) <= known, set(found.values()) - known


def test_rules_of_axis_tensor_are_sets_of_ours_or_the_models_own() -> None:
    small = ModelShape(layers=2, hidden=64, heads=4, ffn=128, vocab=100, seq=16)
    for kind in ("llama", "gpt2", "mixtral"):
        assert tensor_rules(replace(small, name=kind)) in RULES
    assert tensor_rules(replace(small, name="phi3")) == "model"
    bloom = replace(small, name="bloom")
    assert tensor_rules(bloom) is tensor_rules(replace(small, name="stablelm")) is None
    axes = {axis for layout in families(bloom, 4, 8) for axis in layout.axes}
    assert axes == {"replicate", "shard"}


def local_numel(parameter: torch.Tensor) -> int:
    """Elements that this rank has."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


def parameters_of_a_rank(kind: str, plan: str) -> int:
    """Elements of this rank's parameters after a step in a plan."""
    ids = torch.arange(64).reshape(8, 8) % 20 + 3
    trainable = parallelize(
        model_of(kind, **KINDS[kind]),
        Plan.from_toml(plan),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=lambda output, _: output["logits"].float().square().mean(),
        example={"input_ids": ids[:2]},
    )
    trainable.step({"input_ids": ids}, torch.zeros(8))
    return sum(local_numel(each) for each in trainable.module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("Mixtral", RunLayout(shard=4, zero=3, expert=2, micro=2)),
        ("Mixtral", RunLayout(replicate=4, expert=4, micro=2)),
        ("Llama", RunLayout(pipeline=2, tensor=2, microbatches=4)),
        (
            "Llama",
            RunLayout(
                replicate=2, pipeline=2, chunks=3, schedule="interleaved1f1b", microbatches=4
            ),
        ),
        ("Llama", RunLayout(shard=2, zero=2, tensor=2, recompute="full", recompute_share=4 / 9)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_plan_trains_with_the_parameters_that_were_predicted(
    kind: str, layout: RunLayout, ranks: Ranks
) -> None:
    shape = model_and_shape(kind)[1]
    found = ranks(4, parameters_of_a_rank, kind, to_plan(layout, shape).to_toml())
    for rank, count in enumerate(found):
        predicted = layout.kept(*rank_parameters(shape, layout, rank * layout.pipeline // 4))
        assert count == pytest.approx(predicted, rel=0.05)
