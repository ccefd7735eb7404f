"""Unmodified models of Hugging Face with experts under plans: the numbers of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.composition import parallelize
from meshwright.plan import ExpertPlan, PipelinePlan, Plan, TensorPlan, TrainPlan
from meshwright.testing import Ranks
from support.internals.axes import Axes
from support.internals.reference import first_difference, record, train_reference

pytest.importorskip("transformers")
from support.expert_parallel.hugging_face import FIVE, WORDS, tiny
from support.expert_parallel.wide import wide

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

LAYOUTS = (
    {"expert": 2},
    {"expert": 4},
    {"replicate": 2, "expert": 2},
    {"shard": 2, "expert": 2},
    {"expert": 2, "tensor": 2},
    {"pipeline": 2, "expert": 2},
)
LENGTH = 5
Pair = tuple[dict[str, torch.Tensor], torch.Tensor]


def model_of(folder: str) -> Any:
    model = tiny(folder)
    model.set_experts_implementation("batched_mm")  # for one process: the default raises in float64
    return model


def batches(parts: int, part: int) -> list[Pair]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(3):
        words = torch.randint(3, WORDS, (8, LENGTH), generator=generator)
        mine = words.chunk(parts)[part]
        found.append(({"input_ids": mine}, mine.roll(-1, 1)))
    return found


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output["logits"]
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plan_of(axes: dict[str, int], bias_rate: float | None = None) -> Plan:
    rules = {"model.embed_tokens": "embedding", "lm_head": "colwise_gathered"}
    return Plan(
        axes=Axes.of(axes),
        expert=ExpertPlan(balance="none", bias_rate=bias_rate),
        tensor=TensorPlan(rules=rules if "tensor" in axes else None),
        pipeline=PipelinePlan(schedule="1f1b", microbatches=2)
        if "pipeline" in axes
        else PipelinePlan(),
        train=TrainPlan(clip_norm=0.5),
    )


def body_trains(folder: str, axes: dict[str, int]) -> Any:
    with wide():
        example, _ = batches(1, 0)[0]
        laid = parallelize(
            model_of(folder),
            plan_of(axes),
            optimizer=momentum,
            loss=loss_of,
            example={name: value[:2] for name, value in example.items()},
        )
        return record(laid, batches(laid.data_size, laid.data_rank))


@pytest.mark.parametrize(
    "axes", LAYOUTS, ids=lambda axes: "-".join(f"{a}{n}" for a, n in axes.items())
)
@pytest.mark.parametrize("folder", FIVE)
def test_trains_as_one_process(ranks: Ranks, folder: str, axes: dict[str, int]) -> None:
    with wide():
        expected = train_reference(
            model_of(folder), batches(1, 0), optimizer=momentum, loss=loss_of, clip_norm=0.5
        )
    size = Axes.of(axes).world_size
    for found in ranks(size, partial(body_trains, folder, axes), timeout=200):
        difference = first_difference(found, expected, 1e-9)
        assert difference is None, difference


def summed(output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Over some of the words, more of them on the first ranks."""
    logits = output["logits"].flatten(0, 1)
    counts = (target.flatten() % 3 > 0) | (torch.arange(target.numel()) < 12)
    rows = functional.cross_entropy(logits, target.flatten(), reduction="none")
    return (rows * counts).sum(), counts.sum()


def body_balanced(loss: Any, axes: dict[str, int]) -> Any:
    with wide():
        plan = replace(
            plan_of(axes), expert=ExpertPlan(balance="global", auxiliary=0.3, z_loss=0.1)
        )
        example = {"input_ids": given(0)[:2]}
        laid = parallelize(
            model_of("mixtral"), plan, optimizer=momentum, loss=loss, example=example
        )
        return record(laid, batches(laid.data_size, laid.data_rank))


@pytest.mark.parametrize("axes", [{"expert": 2}, {"shard": 2, "expert": 2}], ids=str)
@pytest.mark.parametrize("loss", [loss_of, summed])
def test_losses_that_balance_are_those_of_one_process(
    ranks: Ranks, loss: Any, axes: dict[str, int]
) -> None:
    size = Axes.of(axes).world_size

    def balanced(output: Any, target: torch.Tensor) -> Any:
        layers = [logits.logsumexp(-1).square().mean() for logits in output["router_logits"]]
        added = 0.3 * output["aux_loss"] + 0.1 * sum(layers)
        if loss is loss_of:
            return loss_of(output, target) + added
        pairs = zip(output["logits"].chunk(size), target.chunk(size), strict=True)
        parts = [summed({"logits": logits}, goal) for logits, goal in pairs]
        total, count = (sum(each) for each in zip(*parts, strict=True))
        return total + added * count, count

    with wide():
        one = model_of("mixtral")
        one.config.output_router_logits = True
        expected = train_reference(
            one, batches(1, 0), optimizer=momentum, loss=balanced, clip_norm=0.5
        )
    for found in ranks(size, partial(body_balanced, loss, axes), timeout=200):
        difference = first_difference(found, expected, 1e-9)
        assert difference is None, difference


BIASED = (
    *LAYOUTS[:5],
    {"expert": 3},
    {"replicate": 2, "shard": 2, "expert": 2},
    {"shard": 2, "expert": 2, "tensor": 2},
)
STEPS, RATE = 50, 0.01


def biases_of(state: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state.items() if name.endswith("tion_bias")}


def given(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(3, WORDS, (24, LENGTH), generator=generator)


def _count(own: torch.Tensor, _: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    own.add_(args[1].flatten().bincount(minlength=len(own)))


def biases_of_one_process() -> dict[str, torch.Tensor]:
    """Count what the experts are called with, and move the biases by hand."""
    with wide():
        model = model_of("deepseek_v3")
        optimizer = momentum(model.parameters())
        blocks = [part.mlp for part in model.model.layers if hasattr(part.mlp, "experts")]
        counts = [torch.zeros(block.experts.num_experts, dtype=torch.int64) for block in blocks]
        for block, own in zip(blocks, counts, strict=True):
            block.experts.register_forward_pre_hook(partial(_count, own))
        for step in range(STEPS):
            words = given(step)
            loss_of(model(input_ids=words), words.roll(-1, 1)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            for block, own in zip(blocks, counts, strict=True):
                sign = (own.sum() - len(own) * own).sign()
                block.gate.e_score_correction_bias.add_(sign.double(), alpha=RATE)
                own.zero_()
        return biases_of(model.state_dict())


def body_biases(axes: dict[str, int]) -> dict[str, torch.Tensor]:
    with wide():
        laid = parallelize(
            model_of("deepseek_v3"),
            plan_of(axes, RATE),
            optimizer=momentum,
            loss=loss_of,
            example={"input_ids": given(0)[:2]},
        )
        for step in range(STEPS):
            mine = given(step).chunk(laid.data_size)[laid.data_rank]
            laid.step({"input_ids": mine}, mine.roll(-1, 1))
        return biases_of(laid.weights())


def test_biases_have_the_bits_of_one_process_after_50_steps(ranks: Ranks) -> None:
    expected = biases_of_one_process()
    assert any(value.abs().max() > 10 * RATE for value in expected.values())
    for axes in BIASED:
        for found in ranks(Axes.of(axes).world_size, partial(body_biases, axes), timeout=200):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), (axes, name)
