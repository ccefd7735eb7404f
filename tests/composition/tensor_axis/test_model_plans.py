"""Plans that models carry: what is read of them, what is refused, and parity with one process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.composition import check_model, parallelize
from meshwright.errors import PlanError
from meshwright.plan import ExpertPlan, PipelinePlan, Plan, TensorPlan
from meshwright.testing import Ranks
from support.internals.axes import Axes
from support.internals.comm import side_by_side
from support.internals.composition import (
    WORDS,
    ModelCut,
    carried_plan,
    expert_modules,
    expert_problems,
    origin_of_rules,
    rule_problems,
    stage_starts,
    unknown_words,
)
from support.internals.layout import Shard
from support.internals.reference import first_difference, record, train_reference

WIDTH, HEADS, HEAD, TAIL, RANK, INNER, EXPERTS = 16, 4, 4, 2, 8, 12, 3


class Attention(nn.Module):
    """Queries, keys and values of heads; a number for each head; a norm within a head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.head_dim = HEAD
        for key in ("q_proj", "k_proj", "v_proj"):
            setattr(self, key, nn.Linear(WIDTH, heads * HEAD, bias=False))
        self.q_norm = nn.LayerNorm(HEAD)
        self.sinks = nn.Parameter(torch.randn(heads))
        self.o_proj = nn.Linear(heads * HEAD, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = self.q_norm(q) @ k.transpose(2, 3)
        sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class Latent(nn.Module):
    """Keys from a narrow projection, of which a tail goes to every head directly."""

    def __init__(self) -> None:
        super().__init__()
        self.qk_rope_head_dim = TAIL
        self.kv_a = nn.Linear(WIDTH, RANK + TAIL)
        self.kv_b = nn.Linear(RANK, HEADS * HEAD)
        self.out = nn.Linear(HEADS * (HEAD + TAIL), WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrow, tail = self.kv_a(x).split([RANK, TAIL], dim=-1)
        heads = self.kv_b(narrow).unflatten(-1, (-1, HEAD))
        tail = tail.sin().unsqueeze(-2).expand(*heads.shape[:-1], TAIL)
        return self.out(torch.cat([heads, tail * tail], dim=-1).flatten(-2))


class Experts(nn.Module):
    """Every expert of every token, gate and up in one matrix; and one that computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.nothing = nn.Identity()

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("bld,ehd->bleh", x, self.gate_up).chunk(2, dim=-1)
        each = torch.einsum("bleh,edh->bled", functional.silu(gate) * up, self.down)
        first = weights[..., :1] * self.nothing(x)
        return first + (each * weights[..., 1:, None]).sum(2)


class Shared(nn.Module):
    """A layer of its own parameters, side by side along its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(INNER, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(WIDTH, INNER) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(functional.linear(x, self.up).tanh(), self.down)


class Block(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.attention, self.latent = Attention(heads), Latent()
        self.router, self.experts, self.shared = nn.Linear(WIDTH, EXPERTS + 1), Experts(), Shared()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        x = x + self.latent(x)
        return x + self.experts(x, self.router(x).softmax(-1)) + self.shared(x)


TENSOR = {
    "lm_head": "colwise_gather_output",
    "embed": "embedding_rowwise",
    "positions": "embedding_colwise",
    "blocks.*.attention": "local_params",
    "blocks.*.attention.sinks": "colwise",
    "blocks.*.attention.q_proj": "colwise",
    "blocks.*.attention.k_proj": "colwise",
    "blocks.*.attention.v_proj": "colwise",
    "blocks.*.attention.q_norm": "replicated_with_grad_allreduce",
    "blocks.*.attention.o_proj": "rowwise",
    "blocks.*.latent.kv_a": "mla_kv_a_proj",
    "blocks.*.latent.kv_b": "colwise",
    "blocks.*.latent.out": "rowwise",
    "blocks.*.router": "replicate",
    "blocks.*.experts": "moe_tp_experts",
    "blocks.*.experts.gate_up": "packed_colwise",
    "blocks.*.experts.down": "rowwise",
    "blocks.*.experts.nothing": "moe_identity_expert",
    "blocks.*.shared": "all_reduce",
    "blocks.*.shared.up": "colwise",
    "blocks.*.shared.down": "rowwise",
    "blocks.*.dense": "colwise",
}


class Model(nn.Module):
    """A model with its plans in attributes, as transformers has them."""

    def __init__(self, plan: Mapping[str, str] = TENSOR, heads: int = HEADS) -> None:
        super().__init__()
        self.tp_plan = dict(plan)
        self.pp_plan = {"lm_head": 1, "embed": 1, "positions": 1, "blocks": 1, "gone": 1}
        self.ep_plan = {"blocks.*.experts": "ep_dispatch_experts", "blocks.*.router": "ep_router"}
        self.embed, self.positions = nn.Embedding(11, WIDTH), nn.Embedding(6, WIDTH)
        self.blocks = nn.ModuleList(Block(heads) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def model_of(**changes: Any) -> Model:
    torch.manual_seed(0)
    return Model(**changes).double()


def plan_of(rules: Any = "model", **axes: int) -> Plan:
    return Plan(axes=Axes.of(axes or {"tensor": 2}), tensor=TensorPlan(rules=rules))


def refusals(model: nn.Module, plan: Plan | None = None) -> list[str]:
    with pytest.raises(PlanError) as caught:
        check_model(model, plan or plan_of(), 2)
    return list(caught.value.problems)


# ------------------------------------------------------------------------- what is read


def test_words_become_styles_and_parameters_are_kept_by_their_modules() -> None:
    cut = ModelCut.of(model_of(), plan_of())
    assert cut.styles["blocks.1.attention.q_proj"] == "colwise"
    assert cut.styles["lm_head"] == cut.styles["positions"] == "colwise_gathered"
    assert cut.styles["embed"] == "embedding"
    assert cut.styles["blocks.0.attention.q_norm"] == "replicated"
    assert "blocks.0.router" not in cut.styles
    assert cut.own["blocks.0.experts"] == {"gate_up": side_by_side(1, 2), "down": Shard(2)}
    assert cut.own["blocks.1.attention"] == {"sinks": Shard(0)}


def test_a_parameter_needs_no_word_for_its_module() -> None:
    plan = {key: word for key, word in TENSOR.items() if word != "local_params"}
    assert (
        ModelCut.of(model_of(plan=plan), plan_of()).styles
        == ModelCut.of(model_of(), plan_of()).styles
    )


def test_axis_expert_keeps_experts_and_what_is_inside_whole() -> None:
    cut = ModelCut.of(model_of(), plan_of(tensor=2, expert=2))
    assert not [name for name in cut.styles if ".experts" in name]
    assert "blocks.0.shared" in cut.styles


def test_a_plan_of_a_module_inside_applies_below_it() -> None:
    around = nn.Sequential(model_of(), nn.Linear(11, 11))
    assert carried_plan(around, "tp_plan")["0.lm_head"] == "colwise_gather_output"
    assert ModelCut.of(around, plan_of()).styles["0.blocks.0.latent.kv_b"] == "colwise"
    assert stage_starts(around) == [f"0.{name}" for name in stage_starts(model_of())]


def test_what_a_wrapper_answers_for_another_module_is_not_its_own_plan() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of()

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    assert "inner.lm_head" in carried_plan(Wrapper(), "tp_plan")


def test_stages_begin_in_the_order_of_the_model_and_at_items_of_lists() -> None:
    expected = ["embed", "positions", "blocks.0", "blocks.1", "lm_head"]
    assert stage_starts(model_of()) == expected


def test_modules_of_experts_are_those_named_and_those_whose_parameters_are() -> None:
    model = model_of()
    assert expert_modules(model) == ["blocks.0.experts", "blocks.1.experts"]
    model.ep_plan = {"blocks.*.experts.down": "grouped_gemm"}
    assert expert_modules(model) == ["blocks.0.experts", "blocks.1.experts"]
    assert not unknown_words(model)


def test_the_origin_of_rules_is_said_with_counts() -> None:
    (line,) = origin_of_rules(model_of(), plan_of())
    assert line.startswith("tensor.rules: from the tp_plan of Model: lm_head = colwise_gather_outp")
    assert "blocks.*.experts.gate_up = packed_colwise (2)" in line
    assert line.endswith("; nothing is called blocks.*.dense")
    (line,) = origin_of_rules(model_of(), plan_of({"lm_head": "colwise_gathered"}))
    assert line == "tensor.rules: from a table of the plan: lm_head = colwise_gathered (1)"
    (line,) = origin_of_rules(model_of(), plan_of("llama"))
    assert line.startswith("tensor.rules: from the set 'llama' of meshwright: **.lm_head")


# ------------------------------------------------------------------------- what is refused


def test_an_unknown_word_is_refused_with_its_pattern() -> None:
    (found,) = refusals(model_of(plan={**TENSOR, "blocks.*.latent.out": "row_wise"}))
    assert "'blocks.*.latent.out' the word 'row_wise', which is not known" in found
    assert "did you mean 'rowwise'?" in found


@pytest.mark.parametrize(
    ("pattern", "word"),
    [("lm_head", "packed_rowwise"), ("blocks.*.shared.up", "moe_tp_experts")],
    ids=["of parameters for a module", "of modules for a parameter"],
)
def test_a_word_at_the_wrong_kind_is_refused(pattern: str, word: str) -> None:
    (found,) = refusals(model_of(plan={pattern: word, "embed": "embedding_rowwise"}))
    assert f"{pattern!r} the word {word!r}" in found


def test_a_plan_that_names_no_module_lists_the_nearest() -> None:
    (found,) = refusals(model_of(plan={"block.*.latent.kv_bb": "colwise"}))
    assert "no pattern of the tp_plan of Model (block.*.latent.kv_bb) matches" in found
    assert re.search(r"the nearest names are blocks\.\d\.latent\.kv_b$", found)


def test_without_a_plan_the_error_lists_what_the_model_carries() -> None:
    model = model_of(plan={})
    (found,) = refusals(model)
    assert "Model carries ep_plan (blocks.*.experts, blocks.*.router) and pp_plan (" in found
    assert "no tp_plan" in found
    del model.ep_plan, model.pp_plan
    assert "Model carries no plan, and no tp_plan" in refusals(model)[0]


def test_heads_that_do_not_divide_name_the_layer_and_both_numbers() -> None:
    (found,) = refusals(model_of(heads=3))
    assert "'blocks.0.attention.q_proj' and 5 more cannot be split over tensor = 2" in found
    assert "num_heads = 3, which is no multiple of 2" in found


def test_gathered_projections_may_have_any_heads() -> None:
    gathered = {
        "blocks.*.attention.q_proj": "colwise_gather_output",
        "blocks.*.attention.o_proj": "rowwise_split_input",
    }
    assert not [*rule_problems(model_of(plan=gathered, heads=3), plan_of())]


def test_stages_of_a_model_without_a_plan_are_refused() -> None:
    model = model_of()
    del model.pp_plan
    plan = Plan(axes=Axes.of({"pipeline": 2}), pipeline=PipelinePlan(split="model", microbatches=2))
    (found,) = refusals(model, plan)
    assert '[pipeline] split = "model": Model carries tp_plan (' in found
    assert "no pp_plan" in found


def test_experts_of_a_model_without_a_plan_or_with_new_words_are_refused() -> None:
    model, plan = model_of(), Plan(axes=Axes.of({"expert": 2}), expert=ExpertPlan(modules="model"))
    assert not [*expert_problems(model, plan)]
    model.ep_plan["blocks.*.shared"] = "ep_shared"
    (found,) = expert_problems(model, plan)
    assert "'blocks.*.shared' the word 'ep_shared', which is not known" in found.message
    del model.ep_plan
    (found,) = expert_problems(model, plan)
    assert '[expert] modules = "model": Model carries tp_plan (' in found.message


# ------------------------------------------------------------------------- on ranks


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 11, (4, 6), generator=generator)
    return ids, ids.roll(-1, 1)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def trained(changes: dict[str, Any], axes: dict[str, int]) -> tuple[str, str]:
    whole = [batch_of(0), batch_of(1)]
    expected = train_reference(
        model_of(**changes), whole, optimizer=adamw, loss=loss_of, clip_norm=None
    )
    laid = parallelize(
        model_of(**changes),
        plan_of(**axes),
        optimizer=adamw,
        loss=loss_of,
        example=(batch_of(2)[0][:2],),
    )
    described = str(laid.describe())
    parts, part = laid.data_size, laid.data_rank
    mine = [(ids.chunk(parts)[part], target.chunk(parts)[part]) for ids, target in whole]
    return str(first_difference(record(laid, mine), expected, 1e-9) or ""), described


def test_every_word_trains_as_one_process_and_is_described(ranks: Ranks) -> None:
    assert {*TENSOR.values()} > {w for w, style in WORDS.items() if style == w} - {
        "sequence_parallel",
        "rowwise",
    }
    for difference, described in ranks(2, trained, {}, {"tensor": 2}):
        assert not difference
        assert "tensor.rules: from the tp_plan of Model: lm_head" in described
        assert "blocks.0.experts.gate_up" in described


@pytest.mark.slow
@pytest.mark.parametrize("other", ["shard", "replicate"])
def test_every_word_trains_as_one_process_beside_data_axes(ranks: Ranks, other: str) -> None:
    for difference, _ in ranks(4, trained, {}, {other: 2, "tensor": 2}):
        assert not difference


WRONG = {
    "a tail without its sum": ({"blocks.*.latent.kv_a": "replicate"}, "blocks.0.latent.kv_a"),
    "a norm without its sum": ({"blocks.*.attention.q_norm": "replicate"}, "attention.q_norm"),
    "experts that are not packed": (
        {"blocks.*.experts.gate_up": "colwise"},
        "The first module that returns something else is 'blocks.0.experts'",
    ),
    "an expert that counts twice": (
        {"blocks.*.experts.nothing": "replicate"},
        "The first module that returns something else is 'blocks.0.experts'",
    ),
}


@pytest.mark.parametrize("name", [*WRONG][:1])
def test_a_wrong_plan_is_refused(ranks: Ranks, name: str) -> None:
    check_refused(ranks, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WRONG][1:])
def test_other_wrong_plans_are_refused(ranks: Ranks, name: str) -> None:
    check_refused(ranks, name)


def check_refused(ranks: Ranks, name: str) -> None:
    words, expected = WRONG[name]

    def body() -> str:
        with pytest.raises(PlanError) as caught:
            trained({"plan": {**TENSOR, **words}}, {"tensor": 2})
        return str(caught.value)

    for found in ranks(2, body):
        assert expected in found


def test_matrices_side_by_side_that_do_not_divide_are_refused(ranks: Ranks) -> None:
    def body() -> str:
        with pytest.raises(PlanError) as caught:
            trained({"plan": {"blocks.*.shared.down": "packed_colwise"}}, {"tensor": 3})
        return str(caught.value)

    for found in ranks(3, body):
        assert "blocks.0.shared.down has 2 matrices side by side in dim 0 of (16, 12)" in found
        assert "expected a multiple of 6" in found
