"""Small models of every folder of transformers that has a tensor plan: random weights, no fetch."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import torch

from meshwright import parallelize
from meshwright.errors import PlanError
from meshwright.plan import ExpertPlan, PipelinePlan, Plan, TensorPlan, TrainPlan
from support.expert_parallel.hugging_face import OTHERWISE, TINY
from support.expert_parallel.wide import wide
from support.internals.axes import Axes
from support.internals.reference import first_difference, record, train_reference

__all__ = [
    "CLOSE", "LENGTH", "LOOSE", "carrying", "example_of", "folders", "outcomes", "small", "trained",
]  # fmt: skip

LENGTH, ROWS, STEPS = 6, 4, 2
CLOSE, LOOSE = 1e-9, 1e-6
"""Relative, in the wide mode; and for folders that compute in float32 whatever they are told."""

DENSE: dict[str, Any] = {
    **dict.fromkeys(("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(("hidden_dropout", "residual_dropout", "embedding_dropout", "dropout"), 0.0),
    "decoder_sparse_step": 1,
}
"""Beside those of `TINY`, what a configuration gets where it has it."""


def folders() -> list[str]:
    """Find the folders of transformers whose configurations have a tensor plan."""
    import transformers

    files = (Path(transformers.__file__).parent / "models").glob("*/*.py")
    own = (file for file in files if not file.name.startswith("modular_"))
    return sorted(
        {f.parent.name for f in own if re.search(r"\bbase_model_tp_plan\b", f.read_text())}
    )


def carrying(folder: str) -> Any:
    """Choose the class of ``folder``: with a head for words, else the text model, else any."""
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    ends = ("ForCausalLM", "TextModel", "Model")
    found = []
    for name, kind in vars(module).items():
        config = getattr(kind, "config_class", None)
        if not (isinstance(kind, type) and getattr(config, "base_model_tp_plan", None)):
            continue
        if "PreTrained" not in name and "Vision" not in name and name.endswith(ends):
            rank = next(n for n, end in enumerate(ends) if name.endswith(end))
            found.append((rank, name, kind))
    return min(found, key=lambda each: each[:2])[2]


def small(folder: str, **more: Any) -> Any:
    """Build a model of ``folder`` in float64, in training, each parameter moved off its start."""
    kind = carrying(folder)
    names = {field.name for field in dataclasses.fields(kind.config_class)}
    given = {key: value for key, value in {**TINY, **DENSE}.items() if key in names}
    if "kv_lora_rank" in names:  # a head of keys and values for each of queries
        given["num_key_value_heads"] = given["num_attention_heads"]
    config = kind.config_class(**{**given, **OTHERWISE.get(folder, {}), **more})
    config._experts_implementation = "batched_mm"  # the default raises in float64
    torch.manual_seed(0)
    model = kind(config).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.nan_to_num(0.0).clamp(-1, 1))  # some leave what memory had
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def example_of(model: Any, rows: int, seed: int = 3) -> dict[str, torch.Tensor]:
    """Make a batch of words."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(3, TINY["vocab_size"], (rows, LENGTH), generator=generator)
    return {"input_ids": words}


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    """A number that depends on every output, and is no plain sum."""
    found = output["logits"] if "logits" in output else output[0]
    return (found.sin().flatten(1).mean(1) - target).square().mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def batches(
    model: Any, parts: int, part: int
) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Two batches of which a rank has one part."""
    found = []
    for step in range(STEPS):
        given = {k: v.chunk(parts)[part] for k, v in example_of(model, ROWS, step).items()}
        target = torch.linspace(0.1, 0.9, ROWS, dtype=torch.float64)
        found.append((given, target.chunk(parts)[part]))
    return found


def plan_of(axes: dict[str, int]) -> Plan:
    """A plan that reads everything of the model."""
    piped = PipelinePlan(schedule="1f1b", microbatches=2, split="model")
    return Plan(
        axes=Axes.of(axes),
        tensor=TensorPlan(rules="model" if "tensor" in axes else None),
        pipeline=piped if "pipeline" in axes else PipelinePlan(),
        expert=ExpertPlan(modules="model", balance="none") if "expert" in axes else ExpertPlan(),
        train=TrainPlan(clip_norm=0.5),
    )


def trained(folder: str, axes: dict[str, int], by: float = CLOSE, **more: Any) -> str:
    """Train a model of ``folder`` on these ranks, and in one process: what differs, or empty."""
    with wide():
        model = small(folder, **more)
        whole = batches(model, 1, 0)
        expected = train_reference(
            small(folder, **more), whole, optimizer=adamw, loss=loss_of, clip_norm=0.5
        )
        laid = parallelize(
            model,
            plan_of(axes),
            optimizer=adamw,
            loss=loss_of,
            example=example_of(model, 2, 5),
        )
        found = record(laid, batches(model, laid.data_size, laid.data_rank))
    return str(first_difference(found, expected, by) or "")


def outcomes(names: list[str], axes: dict[str, int]) -> dict[str, str]:
    """Train models of ``names`` one after the other: what differs from one process, or raises."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = trained(name, axes)
        except PlanError as error:
            found[name] = f"refused: {error}"
    return found
