"""LoRA of PEFT on two ranks: trained, saved as an adapter, loaded by ranks and by one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright import DistributedDataParallel as DDP  # noqa: N817
from meshwright.comm import communicator
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp.wrap import lambda_auto_wrap_policy, transformer_auto_wrap_policy
from meshwright.testing import Ranks
from support.clients import WORDS, assert_same, gpt2, needs
from support.internals.fsdp import _or_policy

needs("peft", "transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def adapted(**options: Any) -> Any:
    import peft

    found = gpt2()
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, **options)
    model = peft.get_peft_model(found, config, autocast_adapter_dtype=False)
    return model.double()


def sharded(model: Any) -> Any:
    for block in model.base_model.model.transformer.h:
        mw.fully_shard(block)
    return mw.fully_shard(model)


def train(model: Any, steps: range, rank: int, size: int) -> list[float]:
    draw = torch.Generator().manual_seed(2)
    batches = torch.randint(0, WORDS, (8, 4, 10), generator=draw)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    losses = []
    for step in steps:
        rows = batches[step][rank::size]
        logits = model(input_ids=rows).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model: Any) -> dict[str, torch.Tensor]:
    """The state of the adapter, by its names; collective."""
    import peft

    state = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }
    return peft.get_peft_model_state_dict(model, state_dict=state)


def test_an_adapter_is_trained_in_parts_saved_whole_and_loaded(
    ranks: Ranks, tmp_path: Path
) -> None:
    def body() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        import peft
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        world = communicator()
        folder = tmp_path / str(world.size)
        model = adapted()
        if world.size > 1:
            model = sharded(model)
        train(model, range(3), world.rank, world.size)
        halfway = {name: value.clone() for name, value in weights(model).items()}
        options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
        state = get_model_state_dict(model, options=options)
        if world.rank == 0:
            model.save_pretrained(folder, state_dict=state)
        world.barrier()
        again = peft.PeftModel.from_pretrained(
            gpt2(), folder, is_trainable=True, autocast_adapter_dtype=False
        )
        if world.size > 1:
            again = sharded(again)
        assert_same([weights(again)], halfway)
        train(again, range(3, 6), world.rank, world.size)
        return halfway, weights(again)

    ((first, last),) = ranks(1, body, timeout=300)
    for found in ranks(2, body, timeout=300):
        assert_same([found[0]], first)
        assert_same([found[1]], last)


def test_a_merged_adapter_gives_the_logits_of_the_sharded_model(ranks: Ranks) -> None:
    def body() -> None:
        world = communicator()
        model = sharded(adapted())
        train(model, range(3), world.rank, world.size)
        rows = torch.arange(10).view(1, 10)
        with torch.no_grad():
            expected = model(input_ids=rows).logits
        alone = adapted()
        whole = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in model.state_dict().items()
        }
        alone.load_state_dict(whole)
        merged = alone.merge_and_unload()
        with torch.no_grad():
            torch.testing.assert_close(merged(input_ids=rows).logits, expected)

    ranks(2, body, timeout=300)


def by_parts_that_train(model: Any) -> FSDP:
    """The policy of PEFT and llama-cookbook: each layer that trains is a unit, and each block."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    def trains(module: torch.nn.Module) -> bool:
        return not [*module.children()] and any(p.requires_grad for p in module.parameters())

    policies = [
        partial(lambda_auto_wrap_policy, lambda_fn=trains),
        partial(transformer_auto_wrap_policy, transformer_layer_cls={GPT2Block}),
    ]
    return FSDP(model, auto_wrap_policy=partial(_or_policy, policies=policies))


def save(model: Any, folder: Path, rank: int) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    if isinstance(model, DDP):
        if rank == 0:
            model.module.save_pretrained(folder)
        return
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if rank == 0 and isinstance(model, FSDP):
        # PEFT looks for its layers by name, and finds units: a plain model saves.
        plain = adapted(modules_to_save=["ln_f"])
        plain.load_state_dict(state)
        plain.save_pretrained(folder)
    elif rank == 0:
        kept = {name: value for name, value in state.items() if "lora_" in name or "ln_f" in name}
        model.save_pretrained(folder, state_dict=kept)


WRAPPERS = {"replicas": DDP, "shards": sharded, "the class": by_parts_that_train}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_adapter_of_each_wrapper_gives_one_process_its_logits(
    ranks: Ranks, tmp_path: Path, wrapper: str
) -> None:
    def body() -> list[float]:
        world = communicator()
        model = WRAPPERS[wrapper](adapted(modules_to_save=["ln_f"]))
        losses = torch.tensor(train(model, range(4), world.rank, world.size), dtype=torch.float64)
        save(model, tmp_path, world.rank)
        return (world.all_reduce(losses).wait() / world.size).tolist()

    def alone() -> tuple[list[float], torch.Tensor, torch.Tensor]:
        import peft

        rows = torch.arange(10).view(1, 10)
        model = adapted(modules_to_save=["ln_f"])
        losses = train(model, range(4), 0, 1)
        loaded = peft.PeftModel.from_pretrained(gpt2(), tmp_path, autocast_adapter_dtype=False)
        with torch.no_grad():
            return losses, model(input_ids=rows).logits, loaded(input_ids=rows).logits

    found = ranks(2, body, timeout=300)
    ((losses, expected, logits),) = ranks(1, alone, timeout=300)
    torch.testing.assert_close(found, [losses, losses], rtol=1e-9, atol=0.0)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-12)
