"""Causal models of Hugging Face in chunks: their own loss, also with experts, caps and adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from meshwright.losses import cross_entropy, in_chunks
from meshwright.plan import PipelinePlan, Plan, TensorPlan, TrainPlan
from meshwright.testing import Ranks, assert_same_training
from support.internals.axes import Axes

transformers = pytest.importorskip("transformers")
from support.hugging_face import GROUPED, KINDS, LENGTH, WORDS, sample_of  # noqa: E402

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {}),
    "tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "Gemma 2": ("Gemma2ForCausalLM", {"final_logit_softcapping": 3.0}),
    "Cohere": ("CohereForCausalLM", {"logit_scale": 0.25}),
    "Granite": ("GraniteForCausalLM", {"logits_scaling": 8.0}),
    "Mixtral": (
        "MixtralForCausalLM",
        {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1},
    ),
}


def made(name: str) -> Any:
    kind, options = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)
    config = model.config_class(**{**GROUPED, **options})
    config._experts_implementation = "batched_mm"  # the default raises in float64
    return model(config).double().train()


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_the_models_own(name: str) -> None:
    """Hugging Face's loss is in float32: it is taken of the logits in float64 here."""
    model = made(name)
    ids = torch.randint(3, WORDS, (3, LENGTH))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    plain = model(input_ids=ids, labels=labels)
    shifted = functional.pad(labels[:, 1:], (0, 1), value=-100)
    total, count = cross_entropy(plain.logits, shifted)  # pyrefly: ignore
    loss = total / count
    if name == "Mixtral":
        loss = loss + 0.1 * plain.aux_loss
    torch.testing.assert_close(loss.float(), plain.loss.float(), rtol=1e-5, atol=0.0)
    used = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(loss, used, allow_unused=True)
    in_chunks(model, chunk=5)
    for given in (
        {"labels": labels},
        {"shift_labels": shifted},
        {"labels": None, "shift_labels": shifted},
    ):
        output = model(input_ids=ids, **given)
        assert output.logits is None and output.loss is None
        total, count = output.loss_terms
        # Mixtral's auxiliary loss is in float32.
        torch.testing.assert_close(
            total / count, loss, rtol=1e-7 if name == "Mixtral" else 1e-12, atol=0.0
        )
        found = torch.autograd.grad(total / count, used, allow_unused=True)
        torch.testing.assert_close(
            found, expected, rtol=1e-9, atol=1e-8 if name == "Mixtral" else 1e-12
        )
    again = model.eval()(input_ids=ids, labels=labels)
    torch.testing.assert_close(again.logits, plain.logits, rtol=1e-12, atol=1e-12)
    assert again.loss is not None and not hasattr(again, "loss_terms")


def words(size: int, generator: torch.Generator) -> torch.Tensor:
    """Labels of which each sample ignores another number."""
    found = torch.randint(3, WORDS, (size, LENGTH), generator=generator)
    for row in range(size):
        found[row, : row % 5] = -100
    return found


def placed(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Words with their positions, which axis context splits."""
    ids = torch.randint(3, WORDS, (size, LENGTH), generator=generator)
    return {"input_ids": ids, "position_ids": torch.arange(LENGTH).expand(size, -1)}


LAYOUTS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "shard": ("Llama", {"shard": 2}, {}),
    "tied": ("GPT-2", {"replicate": 2}, {}),
    "tensor": ("Llama", {"tensor": 2}, {"tensor": TensorPlan(rules="llama")}),
    "tensor tied": ("GPT-2", {"tensor": 2}, {"tensor": TensorPlan(rules="gpt2")}),
    "context": ("Llama", {"context": 2}, {}),
    "context shard": ("Qwen3", {"context": 2, "shard": 2}, {}),
    "pipeline": (
        "Llama",
        {"pipeline": 2},
        {"pipeline": PipelinePlan(schedule="1f1b", microbatches=2)},
    ),
    "pipeline tied": (
        "GPT-2",
        {"pipeline": 2},
        {"pipeline": PipelinePlan(schedule="zbv", microbatches=2)},
    ),
    "pipeline tensor": (
        "Llama",
        {"pipeline": 2, "tensor": 2},
        {
            "pipeline": PipelinePlan(schedule="1f1b", microbatches=2),
            "tensor": TensorPlan(rules="llama"),
        },
    ),
}


@pytest.mark.few(1, slow=8)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plan_trains_as_one_process_with_all_logits(ranks: Ranks, name: str) -> None:
    kind, axes, tables = LAYOUTS[name]
    plan = Plan(axes=Axes.of(axes), train=TrainPlan(loss_chunk=7), **tables)
    sample = replace(sample_of(kind), targets=words, loss=cross_entropy)  # pyrefly: ignore
    assert_same_training(
        replace(sample, inputs=placed) if "context" in axes else sample,
        plan,
        world=plan.axes.world_size,
        batch_size=8,
        tolerance=1e-6,  # norms of Llama are in float32, and round what differs in the last bit
        ranks=ranks,
    )


def test_other_models_are_refused() -> None:
    model = transformers.BertForMaskedLM(transformers.BertConfig(**KINDS["BERT"].config))
    with pytest.raises(ValueError, match="BertForMaskedLM computes another loss from its labels"):
        in_chunks(model, "cls.predictions.decoder")
