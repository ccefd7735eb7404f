"""Models of Hugging Face under `parallelize`: tiny ones with random weights train as one process.

Nothing is fetched. Each rank imports their package, so these cases are slow.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.axes import Axes
from meshwright.plan import PipelinePlan, Plan, TensorPlan, TrainPlan
from meshwright.testing import Ranks, Sample, assert_same_training

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")

WORDS, LENGTH = 31, 6
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": False,
}
GPT2: dict[str, Any] = {
    "vocab_size": WORDS,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
}
CASES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mistral": {**SIZES, "sliding_window": 4},
    "qwen2": SIZES,
    "qwen3": {**SIZES, "head_dim": 8},
    "gpt2": GPT2,
}


def words(batch_size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, WORDS, (batch_size, LENGTH), generator=generator)


def next_word_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def sample_of(kind: str, **changes: Any) -> Sample:
    def build() -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(kind, **{**CASES[kind], **changes})
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            # Biases and scales start at zeros and ones, which hide what is done to them.
            if parameter.dim() == 1:
                nn.init.normal_(parameter, mean=float("norm" in name or "ln_" in name), std=0.3)
            else:
                nn.init.normal_(parameter, std=0.3)
        return model

    return Sample(name=kind, build=build, inputs=words, targets=words, loss=next_word_loss)


def plan_of(kind: str, clip_norm: float | None = 0.5, **axes: int) -> Plan:
    return Plan(
        axes=Axes.of(axes),
        tensor=TensorPlan(rules=kind if axes.get("tensor", 1) > 1 else None),
        train=TrainPlan(clip_norm=clip_norm),
        pipeline=PipelinePlan(schedule="1f1b", microbatches=2)
        if axes.get("pipeline", 1) > 1
        else PipelinePlan(),
    )


@pytest.mark.parametrize("kind", CASES)
def test_trains_over_tensor_ranks_as_one_process(ranks: Ranks, kind: str) -> None:
    assert_same_training(sample_of(kind), plan_of(kind, tensor=2), world=2, ranks=ranks)


PAIRS = (
    ("replicate", "shard"),
    ("replicate", "tensor"),
    ("shard", "tensor"),
    ("pipeline", "replicate"),
    ("pipeline", "shard"),
    ("pipeline", "tensor"),
)


@pytest.mark.parametrize("axes", PAIRS, ids="-".join)
def test_a_llama_trains_on_pairs_of_axes_as_one_process(
    ranks: Ranks, axes: tuple[str, str]
) -> None:
    sample = sample_of("llama", num_hidden_layers=4)
    plan = plan_of("llama", **dict.fromkeys(axes, 2))
    assert_same_training(sample, plan, world=4, batch_size=8, ranks=ranks)


@pytest.mark.parametrize("axes", [("shard", "tensor"), ("pipeline", "tensor")], ids="-".join)
def test_a_gpt2_trains_on_pairs_of_axes_as_one_process(ranks: Ranks, axes: tuple[str, str]) -> None:
    plan = plan_of("gpt2", **dict.fromkeys(axes, 2))
    assert_same_training(sample_of("gpt2"), plan, world=4, batch_size=8, ranks=ranks)


EXAMPLES = Path(__file__).parents[2] / "examples"


def losses_of_example(processes: int, *arguments: str) -> list[float]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / "llama.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent / "src")},
    )
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.M)]


def test_the_example_trains_the_same_model_on_two_layouts(tmp_path: Path) -> None:
    alone = tmp_path / "alone.toml"
    alone.write_text("[train]\nclip_norm = 1.0\n")
    expected = losses_of_example(1, str(alone))
    assert len(expected) == 10
    assert expected[-1] < 0.9 * expected[0]
    plan = str(EXAMPLES / "llama.toml")
    for overrides in ((), ("axes.shard=1", "axes.pipeline=2", "pipeline.microbatches=4")):
        assert losses_of_example(4, plan, *overrides) == pytest.approx(expected, rel=1e-4)
