"""A model with dropout on two ranks trains as one process does that draws by position too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.comm import communicator
from meshwright.data_parallel import fully_shard, replicate
from meshwright.mesh import init_device_mesh
from meshwright.randomness import DimPart, Draws, RandomOperators, replace_dropout
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from meshwright.testing import Ranks
from support.internals.comm import whole

BATCH, STEPS = 12, 3


class Block(nn.Module):
    def __init__(self, is_recomputed: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.2))
        self.is_recomputed = is_recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_recomputed:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)


def weights_after(
    strategy: Callable[[nn.Module], nn.Module], ranks: int, rank: int, microbatches: int
) -> dict[str, torch.Tensor]:
    """Weights after some steps on this rank's share of each batch."""
    torch.manual_seed(0)
    recomputed = microbatches > 1
    model = nn.Sequential(Block(recomputed), Block(recomputed), nn.Linear(7, 5)).double()
    batches = torch.randn(STEPS, BATCH, 4, 7, dtype=torch.float64)
    draws = Draws(seed=7)
    assert len(replace_dropout(model, draws)) == 4
    model = strategy(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    share = BATCH // ranks
    # Other generators than those of dropout may differ between ranks.
    torch.manual_seed(100 + rank)
    for step, batch in enumerate(batches):
        draws.begin_step(step)
        rows = torch.arange(rank * share, (rank + 1) * share)
        for number, part in enumerate(rows.chunk(microbatches)):
            with draws.microbatch(number, part), RandomOperators(model, draws):
                (model(batch[part]).square().mean() / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(value).clone() for name, value in model.state_dict().items()}


def body(kind: Literal["replicate", "shard"]) -> list[dict[str, torch.Tensor]]:
    axis = communicator()

    def strategy(model: nn.Module) -> nn.Module:
        if kind == "replicate":
            return replicate(model)
        for part in model[:2]:  # type: ignore[index]
            fully_shard(part)
        return fully_shard(model)

    return [weights_after(strategy, axis.size, axis.rank, n) for n in (1, 3)]


def gradients_of_mlp(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Of two layers that are cut by columns and by rows where there are several ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 6), nn.Dropout(0.5)
    ).double()
    data = torch.randn(3, 5, 6, dtype=torch.float64)
    draws = Draws(seed=7)
    replace_dropout(model, draws)
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
        # The first dropout sees a part of the hidden dim; the second sees what all ranks hold.
        model[2].parts = (DimPart(dim=-1, index=rank, parts=ranks),)
    torch.manual_seed(100 + rank)
    with draws.microbatch(0, range(3)):
        model(data).square().sum().backward()
    return {
        name: whole(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def body_tensor() -> dict[str, torch.Tensor]:
    axis = communicator()
    return gradients_of_mlp(axis.rank, axis.size)


def test_parts_of_a_hidden_dim_drop_what_one_process_drops(ranks: Ranks) -> None:
    expected = gradients_of_mlp(0, 1)
    assert len(expected) == 4
    for found in ranks(2, body_tensor):
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_dropout_trains_as_in_one_process(
    ranks: Ranks, kind: Literal["replicate", "shard"]
) -> None:
    expected = weights_after(lambda model: model, 1, 0, 1)
    for found in [each for results in ranks(2, body, kind) for each in results]:
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)
