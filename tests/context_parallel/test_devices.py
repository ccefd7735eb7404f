"""On a device a step of axis context has no wait of the host; with experts one a layer.

Documents are read on the host: positions that lie on the device are the one wait of a batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from context_parallel.test_own_loop import Model, V
from matrix.cells import WIDTH, Attention, Placed, Routed
from meshwright import init_device_mesh
from meshwright.comm import communicator
from meshwright.composition import parallelize
from meshwright.context_parallel import context_parallel, global_mean
from meshwright.plan import ContextPlan, Plan, TrainPlan
from meshwright.testing import Ranks
from meshwright.testing.simulated import device_of
from support.context_parallel.hugging_face import dense
from support.expert_parallel.samples import Fused
from support.internals.axes import Axes
from support.internals.context_parallel import ContextSplit

LENGTH = 8


class Packed(Model):
    """Is given the places of tokens in their documents."""

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    losses = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return losses, (target >= 0).sum()


def stops_of(step: Any) -> list[str]:
    """The waits of the host in a steady step; accesses that are not ordered fail the test."""
    device = device_of(communicator())
    for _ in range(3):
        step()
    before = len(device.stops)
    step()
    return [str(stop) for stop in device.stops[before:]]


def laid(model: nn.Module, axes: dict[str, int], method: Any, example: Any) -> Any:
    return parallelize(
        model.to(communicator().device),
        Plan(
            axes=Axes.of(axes),
            context=ContextPlan(method=method),
            train=TrainPlan(clip_norm=0.5, recompute=()),
        ),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        loss=counted,
        example=example,
    )


def mixture() -> nn.Module:
    routed = (Routed(Fused(4, d=WIDTH), k, WIDTH) for k in (1, 2))
    return nn.Sequential(Placed(), Attention(), *routed, nn.Linear(WIDTH, V))


def body_plan(axes: dict[str, int], method: str) -> list[str]:
    device = communicator().device
    torch.manual_seed(0)
    made = mixture() if "expert" in axes else Model()
    ids, target = torch.randint(11, (2, 8, LENGTH), device=device)
    trained = laid(made, axes, method, (ids[:2],))
    mine = [x.chunk(trained.data_size)[trained.data_rank] for x in (ids, target)]
    return stops_of(lambda: trained.step(*mine))


@pytest.mark.devices("simulated", reason="a host waits for no device")
@pytest.mark.parametrize("method", ["all-to-all", pytest.param("ring", marks=pytest.mark.slow)])
def test_a_step_has_no_wait(ranks: Ranks, method: str) -> None:
    for found in ranks(2, body_plan, {"context": 2}, method):
        assert not found, found


@pytest.mark.devices("simulated", reason="a host waits for no device")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["all-to-all", "ring"])
@pytest.mark.parametrize("data", [{"shard": 2}, {"replicate": 2}], ids=str)
def test_a_step_beside_data_axes_has_no_wait(
    ranks: Ranks, data: dict[str, int], method: str
) -> None:
    for found in ranks(4, body_plan, {**data, "context": 2}, method):
        assert not found, found


@pytest.mark.devices("simulated", reason="a host waits for no device")
@pytest.mark.slow
def test_experts_wait_once_a_layer(ranks: Ranks) -> None:
    for found in ranks(4, body_plan, {"context": 2, "expert": 2}, "all-to-all"):
        assert len(found) == 2, found
        assert all("tolist" in text for text in found), found  # of the counts of rows


def body_packed(is_on_host: bool) -> list[str]:
    """Other documents in each step."""
    device = communicator().device
    torch.manual_seed(0)
    rows = ([3, 5], [8], [1, 7], [2, 2, 4])
    ids, target = torch.randint(V, (2, 4, LENGTH), device=device)

    def places(turn: int) -> torch.Tensor:
        found = ContextSplit.of(rows[turn % 4 :] + rows[: turn % 4], 1).places()
        return found if is_on_host else found.to(device)

    example = {"ids": ids[:1], "position_ids": torch.arange(LENGTH, device=device)[None]}
    trained = laid(Packed(), {"context": 2}, "ring", example)
    given = iter([places(turn) for turn in range(6)])
    return stops_of(lambda: trained.step({"ids": ids, "position_ids": next(given)}, target))


@pytest.mark.devices("simulated", reason="a host waits for no device")
@pytest.mark.parametrize("is_on_host", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_documents_are_read_by_the_host(ranks: Ranks, is_on_host: bool) -> None:
    for found in ranks(2, body_packed, is_on_host):
        if is_on_host:
            assert not found, found
        else:
            assert len(found) == 1 and "context_parallel/split.py" in found[0], found


class Llm(nn.Module):
    """A model of Hugging Face, on whose layers padding and positions come."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.model, self.counts = dense("llama").float(), counts

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        more = {} if self.counts else {"position_ids": places}
        return self.model(input_ids=ids, use_cache=False, **more).logits


def body_of_others(counts: bool, method: Any) -> list[str]:
    device = communicator().device
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("cp",))
    model = Llm(counts).to(device)
    ids, labels = (torch.randint(V, (2, LENGTH), device=device) for _ in range(2))
    places = torch.arange(LENGTH, device=device).repeat(2, 1)
    padding = torch.ones(2, LENGTH, dtype=torch.int64, device=device)
    padding[:, -2:] = 0

    def step() -> None:
        buffers = [ids, labels, places]
        with context_parallel(
            mesh,
            buffers=buffers,
            buffer_seq_dims=[1, 1, 1],
            attention_mask=padding,
            method=method,
        ):
            global_mean(*counted(model(ids, places), labels), mesh).backward()
        model.zero_grad()

    return stops_of(step)


@pytest.mark.devices("simulated", reason="a host waits for no device")
@pytest.mark.parametrize("method", ["all-to-all", pytest.param("ring", marks=pytest.mark.slow)])
def test_padding_is_read_once_a_batch(ranks: Ranks, method: str) -> None:
    for found in ranks(2, body_of_others, False, method):
        # The model itself asks whether its positions begin anew, and whether its masks are full.
        ours = [each for each in found if "_local_scalar_dense" not in each]
        assert len(ours) == 1 and "context_parallel/own_loop.py" in ours[0], found


@pytest.mark.devices("simulated", reason="a host raises in the step itself")
def test_models_that_count_positions_are_refused_in_the_next_step(ranks: Ranks) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="which the model has counted itself"):
            body_of_others(True, "all-to-all")

    ranks(2, run)


def body_loop() -> list[str]:
    device = communicator().device
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = Model().to(device)
    ids, labels = (torch.randint(V, (2, LENGTH), device=device) for _ in range(2))

    def step() -> None:
        with context_parallel(mesh, buffers=[ids, labels], buffer_seq_dims=[1, 1]):
            total, count = counted(model(ids), labels)
            global_mean(total, count, mesh).backward()
        model.zero_grad()

    return stops_of(step)


@pytest.mark.devices("simulated", reason="a host waits for no device")
def test_an_own_loop_has_no_wait(ranks: Ranks) -> None:
    for found in ranks(2, body_loop):
        assert not found, found
