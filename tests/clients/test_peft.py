"""LoRA of PEFT on two ranks, sharded: trained, saved as an adapter, loaded, trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.comm import communicator
from meshwright.testing import Ranks
from support.clients import WORDS, assert_same, gpt2, needs

needs("peft", "transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def adapted() -> Any:
    import peft

    found = gpt2()
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(found, config, autocast_adapter_dtype=False)
    return model.double()


def sharded(model: Any) -> Any:
    for block in model.base_model.model.transformer.h:
        mw.fully_shard(block)
    return mw.fully_shard(model)


def train(model: Any, steps: range, rank: int, size: int) -> None:
    draw = torch.Generator().manual_seed(2)
    batches = torch.randint(0, WORDS, (8, 4, 10), generator=draw)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    for step in steps:
        rows = batches[step][rank::size]
        logits = model(input_ids=rows).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


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
