"""Hugging Face's Accelerate on two ranks: our class by ``prepare``, and models wrapped before."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright.comm import connect
from meshwright.testing import Ranks
from support.clients import adam, alone, assert_same, model, needs, rows, whole

needs("accelerate")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def accelerator(**options: Any) -> Any:
    connect()
    from support.internals.integrations import accelerate as bridge

    bridge.install()
    import accelerate

    return accelerate.Accelerator(cpu=True, **options)


def loader() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(rows(), batch_size=4)


def train(accelerator: Any, prepared: nn.Module, optimizer: Any, batches: list[Any]) -> None:
    for x, y in batches:
        with accelerator.accumulate(prepared):
            accelerator.backward(F.mse_loss(prepared(x), y))
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def test_prepare_wraps_in_our_class(ranks: Ranks) -> None:
    def body() -> dict[str, torch.Tensor]:
        found = accelerator()
        plain = model()
        prepared, optimizer, data = found.prepare(plain, adam(plain.parameters()), loader())
        assert type(prepared) is mw.DistributedDataParallel
        assert found.unwrap_model(prepared) is plain
        train(found, prepared, optimizer, list(data)[:4])
        return whole(prepared)

    expected = alone(clip=1.0)
    assert_same(ranks(2, body, timeout=300, connected=False), expected)


def test_accumulated_passes_are_one_step(ranks: Ranks) -> None:
    def body() -> dict[str, torch.Tensor]:
        found = accelerator(gradient_accumulation_steps=2)
        plain = model()
        prepared, optimizer, data = found.prepare(plain, adam(plain.parameters()), loader())
        for x, y in list(data)[:6]:
            with found.accumulate(prepared):
                found.backward(F.mse_loss(prepared(x), y))
                optimizer.step()
                optimizer.zero_grad()
        return whole(prepared)

    assert_same(ranks(2, body, timeout=300, connected=False), alone(batch=16, steps=3))


@pytest.mark.parametrize("wrapper", ["class", "replicate"])
def test_a_backward_reduces_what_ran_without(ranks: Ranks, wrapper: str) -> None:
    """``trigger_sync_in_backward``: both passes ran under ``no_sync``, the second is reduced."""

    def body() -> list[torch.Tensor]:
        found = accelerator()
        prepared = found.prepare(WRAPPERS[wrapper](model()))
        x, y = (part[found.process_index :: 2] for part in rows().tensors)
        for _ in range(2):
            prepared.zero_grad()
            with found.no_sync(prepared):
                first = F.mse_loss(prepared(x[:8]), y[:8])
                second = F.mse_loss(prepared(x[8:16]), y[8:16])
            found.backward(first)
            with found.trigger_sync_in_backward(prepared):
                found.backward(second)
        return [parameter.grad for parameter in prepared.parameters()]

    plain, (x, y) = model(), rows().tensors
    (2 * F.mse_loss(plain(x[:32]), y[:32])).backward()
    for gradients in ranks(2, body, timeout=300, connected=False):
        torch.testing.assert_close(gradients, [p.grad for p in plain.parameters()])


def shard_all(plain: nn.Sequential) -> nn.Module:
    mw.fully_shard(plain[0])
    mw.fully_shard(plain[2])
    return mw.fully_shard(plain)


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "class": mw.DistributedDataParallel,
    "replicate": mw.replicate,
    "fully_shard": shard_all,
    "flat": mw.FullyShardedDataParallel,
    "original": lambda plain: mw.FullyShardedDataParallel(plain, use_orig_params=True),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_model_of_ours_is_left_saved_and_loaded(
    ranks: Ranks, wrapper: str, tmp_path: Path
) -> None:
    def body() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        found = accelerator()
        wrapped = WRAPPERS[wrapper](model())
        schedule = torch.optim.lr_scheduler.StepLR
        optimizer = adam(wrapped.parameters())
        prepared, optimizer, data, scheduler = found.prepare(
            wrapped, optimizer, loader(), schedule(optimizer, 1, gamma=1.0)
        )
        assert prepared is wrapped
        assert type(found.unwrap_model(prepared)).__name__ != "DistributedDataParallel"
        batches = list(data)[:4]
        train(found, prepared, optimizer, batches[:2])
        scheduler.step()
        found.save_state(str(tmp_path / "state"))
        after = []
        for _ in range(2):
            train(found, prepared, optimizer, batches[2:])
            after.append(whole(prepared))
            found.load_state(str(tmp_path / "state"))
        found.wait_for_everyone()  # Accelerate writes on one rank, and others read meanwhile
        found.save_state(str(tmp_path / "state"))  # once more, to the same folder
        found.wait_for_everyone()
        found.load_state(str(tmp_path / "state"))
        state = found.get_state_dict(prepared)
        found.save_model(prepared, str(tmp_path / "weights"))
        return after[0], after[1], whole(state)

    results = ranks(2, body, timeout=100, connected=False)
    for number in range(2):
        assert_same([result[number] for result in results], alone(clip=1.0))
    halfway = alone(steps=2, clip=1.0)
    assert_same([results[0][2]], halfway)

    from safetensors.torch import load_file

    assert_same([load_file(tmp_path / "weights" / "model.safetensors")], halfway)


def test_several_sharded_models_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    def body() -> None:
        found = accelerator()
        found.prepare(shard_all(model()), shard_all(model()))
        with pytest.raises(ValueError, match="2 models, 2 of them sharded"):
            found.save_state(str(tmp_path))

    ranks(2, body, timeout=300, connected=False)


def test_other_arguments_are_refused_by_name(ranks: Ranks) -> None:
    def body() -> None:
        import accelerate

        from support.internals.integrations import accelerate as bridge

        before = dict(vars(accelerate.Accelerator))
        bridge.install()
        bridge.install()
        bridge.uninstall()
        assert dict(vars(accelerate.Accelerator)) == before
        accelerate.Accelerator.get_state_dict = lambda self, model: None
        with pytest.raises(RuntimeError, match=r"get_state_dict takes \('self', 'model'\)"):
            bridge.install()

    ranks(1, body, timeout=300, connected=False)


@pytest.mark.parametrize("script", ["test_sync", "test_ops", "test_script"])
def test_a_script_of_its_own_passes(ranks: Ranks, script: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def body() -> None:
        from support.internals.integrations import accelerate as bridge

        connect()
        bridge.install()
        importlib.import_module(f"accelerate.test_utils.scripts.{script}").main()

    ranks(2, body, timeout=600, connected=False)
