"""The Trainer of transformers on two ranks: on our class, and on ours sharded at load time."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.comm import connect
from meshwright.data_parallel import FSDPModule
from meshwright.testing import Ranks
from support.clients import assert_same, gpt2, llama, needs, texts, whole

needs("accelerate", "transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def install(size: int) -> None:
    """Put ours in, or take away what says that this process is a rank."""
    if size == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name)
        return
    connect()
    from support.internals.integrations import transformers as bridge

    bridge.install()


def loss(output: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The loss in float64: that of transformers is in float32."""
    logits, targets = output.logits[:, :-1], labels[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / (targets.numel() if num_items_in_batch is None else num_items_in_batch)


def trainer(model: Any, folder: Path, batch: int, steps: int = 4, **options: Any) -> Any:
    import transformers

    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=2,
        max_steps=steps,
        learning_rate=0.02,
        max_grad_norm=1.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        seed=7,
        **options,
    )
    given = None if "label_smoothing_factor" in options else loss
    return transformers.Trainer(
        model=model, args=settings, train_dataset=texts(), compute_loss_func=given
    )


def history(found: Any) -> list[float]:
    return [row["loss"] for row in found.state.log_history if "loss" in row]


def test_the_trainer_on_our_class_goes_on_after_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    def body(size: int) -> tuple[dict[str, torch.Tensor], list[float]]:
        install(size)
        folder = tmp_path / str(size)
        save = {"save_strategy": "steps", "save_steps": 2}
        first = trainer(gpt2(), folder, 4 // size, **save)
        first.train()
        if size > 1:
            assert type(first.model_wrapped) is mw.DistributedDataParallel
        again = trainer(gpt2(), folder, 4 // size, **save)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert_same([whole(again.model)], whole(first.model))
        return whole(first.model), history(first)

    ((expected, losses),) = ranks(1, body, 1, timeout=300, connected=False)
    results = ranks(2, body, 2, timeout=300, connected=False)
    assert_same([result[0] for result in results], expected)
    assert results[0][1] == pytest.approx(losses, rel=1e-3)  # rounded by the Trainer


@pytest.mark.parametrize("first", ["transformers", "install"])
def test_the_trainer_on_a_model_that_transformers_shards_by_ours(
    ranks: Ranks, tmp_path: Path, first: str
) -> None:
    """``from_pretrained(distributed_config=...)`` shards by the names of torch, which are ours."""

    def body(size: int) -> dict[str, torch.Tensor]:
        if first == "transformers":
            import transformers.distributed.fsdp
        install(size)
        import transformers

        options = {}
        if size > 1:
            config = transformers.DistributedConfig(fsdp_size=size)
            options = {"distributed_config": config}
        model = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path / "given", dtype=torch.float64, **options
        )
        found = trainer(model, tmp_path / str(size), 4 // size, save_strategy="no")
        found.train()
        if size > 1:
            assert isinstance(model, FSDPModule)
            assert isinstance(model.model.layers[0], FSDPModule)
        found.save_model(str(tmp_path / f"saved by {size}"))
        trained = whole(found.model)
        kept = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path / f"saved by {size}", dtype=torch.float64
        )
        assert_same([whole(kept)], trained)
        return trained

    def write() -> None:
        llama().save_pretrained(tmp_path / "given")

    ranks(1, write, timeout=300)
    (expected,) = ranks(1, body, 1, timeout=300, connected=False)
    for found in ranks(2, body, 2, timeout=300, connected=False):
        # Its norms and rotations are in float32.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_trainer_leaves_a_model_that_was_replicated_before(
    ranks: Ranks, tmp_path: Path
) -> None:
    def body(size: int) -> dict[str, torch.Tensor]:
        install(size)
        model = gpt2() if size == 1 else mw.replicate(gpt2())
        found = trainer(model, tmp_path, 4 // size, save_strategy="no")
        found.train()
        assert found.model_wrapped is model
        return whole(found.model)

    (expected,) = ranks(1, body, 1, timeout=300, connected=False)
    assert_same(ranks(2, body, 2, timeout=300, connected=False), expected)


def test_the_trainer_saves_and_resumes_a_model_that_was_sharded_before(
    ranks: Ranks, tmp_path: Path
) -> None:
    def sharded() -> Any:
        model = llama()
        for layer in model.model.layers:
            mw.fully_shard(layer)
        return mw.fully_shard(model)

    def body(size: int) -> dict[str, torch.Tensor]:
        install(size)
        import transformers

        make = llama if size == 1 else sharded
        folder = tmp_path / str(size)
        save = {"save_strategy": "steps", "save_steps": 2}
        first = trainer(make(), folder, 4 // size, **save)
        first.train()
        again = trainer(make(), folder, 4 // size, **save)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        trained = whole(first.model)
        assert_same([whole(again.model)], trained)
        kept = transformers.LlamaForCausalLM.from_pretrained(
            folder / "checkpoint-4", dtype=torch.float64
        )
        assert_same([whole(kept)], trained)
        return trained

    (expected,) = ranks(1, body, 1, timeout=300, connected=False)
    for found in ranks(2, body, 2, timeout=300, connected=False):
        # Its norms and rotations are in float32.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_wrapper_is_in_no_name_that_the_trainer_reads_or_writes(
    ranks: Ranks, tmp_path: Path
) -> None:
    """A smoothed loss is that of the next token for classes that transformers knows by name."""
    wrappers = {"plain": lambda model: model, "replicate": mw.replicate, "shard": mw.fully_shard}

    def body(kind: str) -> list[float]:
        install(1 if kind == "plain" else 2)
        model, folder = wrappers[kind](gpt2()), tmp_path / kind
        batch = 4 if kind == "plain" else 2
        options = {"save_strategy": "no", "label_smoothing_factor": 0.1}
        found = trainer(model, folder, batch, **options)
        name = type(model).__name__
        found.train()
        found.save_model(str(folder))
        assert type(model).__name__ == name
        return history(found)

    (expected,) = ranks(1, body, "plain", timeout=300, connected=False)
    for kind in ("replicate", "shard"):
        for losses in ranks(2, body, kind, timeout=300, connected=False):
            assert losses == pytest.approx(expected, rel=1e-3)
        written = json.loads((tmp_path / kind / "config.json").read_text())
        assert written["architectures"] == ["GPT2LMHeadModel"]


CUSTOM = """
from transformers import LlamaForCausalLM

class Custom(LlamaForCausalLM):
    pass
"""


def test_a_sharded_model_is_saved_under_the_name_of_its_class(ranks: Ranks, tmp_path: Path) -> None:
    """Custom code and adapters are found by it when they are loaded."""
    (tmp_path / "custom_model.py").write_text(CUSTOM)

    def body() -> None:
        sys.path.insert(0, str(tmp_path))
        install(2)
        import peft
        from transformers import AutoModelForCausalLM

        custom = importlib.import_module("custom_model").Custom
        custom.register_for_auto_class("AutoModelForCausalLM")
        model = mw.fully_shard(custom(llama().config))
        expected = whole(model)
        model.save_pretrained(tmp_path / "custom", state_dict=dict(expected))
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "custom", trust_remote_code=True)
        assert type(again).__name__ == "Custom"
        assert_same([whole(again)], expected)
        options = peft.LoraConfig(r=2, target_modules=["q_proj"])  # of a model of no known task
        adapted = mw.fully_shard(peft.get_peft_model(model, options))
        adapted.save_pretrained(tmp_path / "adapter", state_dict=whole(adapted))
        names = [type(found).__name__ for found in (model, adapted)]
        assert names == ["FSDPCustom", "FSDPPeftModel"]

    ranks(1, body, timeout=300, connected=False)
    config = json.loads((tmp_path / "custom" / "config.json").read_text())
    assert config["auto_map"] == {"AutoModelForCausalLM": "custom_model.Custom"}
    assert config["architectures"] == ["Custom"]
    adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert adapter["auto_mapping"]["base_model_class"] == "Custom"
