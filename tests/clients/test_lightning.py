"""Lightning Fabric on two ranks, with the strategies of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.comm import connect
from meshwright.data_parallel import FSDPModule
from meshwright.testing import Ranks
from support.clients import adam, alone, assert_same, model, needs, rows, whole

needs("lightning")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def fabric(kind: str, **options: Any) -> Any:
    connect()
    from lightning.fabric import Fabric

    from support.internals.integrations import lightning

    if kind == "replicated":
        strategy = lightning.replicated(broadcast_buffers=False)
    else:
        strategy = lightning.sharded(lambda plain: [plain[0], plain[2]], **options)
    found = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    found.launch()
    return found


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_a_loop_of_fabric(ranks: Ranks, kind: str) -> None:
    def body() -> dict[str, torch.Tensor]:
        found = fabric(kind)
        prepared = found.setup_module(model())
        optimizer = found.setup_optimizers(adam(prepared.parameters()))
        data = found.setup_dataloaders(torch.utils.data.DataLoader(rows(), batch_size=4))
        for number, (x, y) in enumerate(list(data)[:8]):
            is_last = number % 2 == 1
            with found.no_backward_sync(prepared, enabled=not is_last):
                found.backward(F.mse_loss(prepared(x), y) / 2)
            if is_last:
                found.clip_gradients(prepared, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert isinstance(prepared.module, FSDPModule) is (kind == "sharded")
        return whole(prepared)

    results = ranks(2, body, timeout=300, connected=False)
    assert_same(results, alone(batch=16, clip=1.0))


@pytest.mark.parametrize("kind", ["replicated", "sharded", "sharded to one file"])
def test_fabric_saves_and_loads(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    def body() -> list[dict[str, torch.Tensor]]:
        one_file = {"save_distributed_checkpoint": False} if "one file" in kind else {}
        found = fabric(kind, **one_file)
        prepared = found.setup_module(model())
        optimizer = found.setup_optimizers(adam(prepared.parameters()))
        data = list(found.setup_dataloaders(torch.utils.data.DataLoader(rows(), batch_size=4)))
        state = {"model": prepared, "optimizer": optimizer, "step": 2}

        def train(batches: list[Any]) -> None:
            for x, y in batches:
                found.backward(F.mse_loss(prepared(x), y))
                optimizer.step()
                optimizer.zero_grad()

        train(data[:2])
        found.save(tmp_path / "kept", state)
        found.barrier()
        after = []
        for _ in range(2):
            train(data[2:4])
            after.append(whole(prepared))
            found.load(tmp_path / "kept", state)
        return after

    results = ranks(2, body, timeout=300, connected=False)
    for number in range(2):
        assert_same([result[number] for result in results], alone())
