"""The engine by itself: units with a flat exposure, their phases, and parity with one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from meshwright.comm import Communicator, Recorder, communicator, observe, subgroup
from meshwright.testing import Ranks
from support.internals.data_parallel import (
    BufferTypes,
    DataAxes,
    Driver,
    Exposure,
    ParameterGroup,
    Phase,
    Unit,
    UnitSettings,
    attach,
    collect_slots,
    group_slots,
)
from support.internals.layout import FlatLayout


class FlatExposure(Exposure):
    """One flat parameter for each group; modules have none while sharded."""

    def __init__(self) -> None:
        self.flats: dict[int, nn.Parameter] = {}

    def show_sharded(self, unit: Unit) -> None:
        for group in unit.groups:
            self.flats.setdefault(id(group), nn.Parameter(group.buffer.shard))
            for slot in group.slots:
                for module, name in slot.places:
                    module._parameters.pop(name, None)

    def show_full(self, unit: Unit) -> None:
        for slot in unit.slots:
            slot.show(slot.full)

    def refresh(self, unit: Unit) -> None:
        """Nobody puts anything in the place of parameters here."""

    def parameters(self, unit: Unit) -> list[nn.Parameter]:
        return [self.flats[id(group)] for group in unit.groups]

    def version(self, unit: Unit) -> int:
        return sum(flat._version for flat in self.parameters(unit))

    def trains(self, unit: Unit, group: ParameterGroup) -> list[bool]:
        return [slot.full.requires_grad for slot in group.slots]

    def has_gradients(self, unit: Unit) -> bool:
        return any(self.flats[id(group)].grad is not None for group in unit.groups)

    def set_gradients(
        self, unit: Unit, group: ParameterGroup, reduced: torch.Tensor, used: Sequence[bool]
    ) -> None:
        flat = self.flats[id(group)]
        flat.grad = reduced if flat.grad is None else flat.grad.add_(reduced)


def flat_unit(
    modules: Sequence[tuple[str, nn.Module]],
    axes: DataAxes,
    settings: UnitSettings,
    exposure: FlatExposure,
) -> Unit:
    groups = []
    for slots in group_slots(collect_slots(modules)):
        dtype = slots[0].original.dtype
        layout = FlatLayout.pack(
            [slot.name for slot in slots],
            [slot.original.shape for slot in slots],
            str(dtype).removeprefix("torch."),
            axes.parts,
        )
        types = BufferTypes(master=dtype, compute=dtype, reduce=dtype)
        groups.append(ParameterGroup(slots, layout, axes, types, slots[0].original.device))
    return Unit(modules[0][0] or "root", groups, exposure, settings)


def drive(module: nn.Module, unit: Unit | None, name: str) -> None:
    driver = Driver(unit, name)
    attach(module, driver)
    module.register_forward_pre_hook(driver.before_forward, with_kwargs=True)
    module.register_forward_hook(driver.after_forward)


def shard(model: nn.Sequential, axes: DataAxes, settings: UnitSettings) -> list[nn.Parameter]:
    """Every layer with parameters is a unit; the root has none of its own."""
    flats: list[nn.Parameter] = []
    for name, layer in model.named_children():
        if list(layer.parameters()):
            exposure = FlatExposure()
            drive(layer, flat_unit([(name, layer)], axes, settings, exposure), name)
            flats += exposure.flats.values()
    drive(model, None, "root")
    return flats


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 3)
    ).double()


def train(
    model: nn.Module, parameters: Sequence[nn.Parameter], inputs: Callable[[int], torch.Tensor]
) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    losses = []
    for step in range(4):
        loss = model(inputs(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def axes_of(world: Communicator, row: str) -> DataAxes:
    if row == "replicate":
        return DataAxes(replicate=world)
    if row == "hybrid":
        pairs, across = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
        return DataAxes(
            shard=subgroup(world, pairs, "shard"), replicate=subgroup(world, across, "replicate")
        )
    return DataAxes(shard=world)


def body_trains_as_one_process(row: str) -> None:
    world = communicator()
    axes = axes_of(world, row)
    one = build()
    model = copy.deepcopy(one)
    settings = UnitSettings(keep_full_after_forward=row == "grad_op", forward_prefetch=True)
    flats = shard(model, axes, settings)
    size = 8 // world.size
    train(model, flats, lambda step: batch(step)[world.rank * size : (world.rank + 1) * size])
    train(one, list(one.parameters()), batch)
    expected = [
        torch.cat([p.detach().reshape(-1) for p in layer.parameters()])
        for layer in one
        if list(layer.parameters())
    ]
    for flat, whole in zip(flats, expected, strict=True):
        padded = torch.cat([whole, whole.new_zeros(flat.numel() * axes.parts - whole.numel())])
        mine = padded.view(axes.parts, -1)[axes.part]
        torch.testing.assert_close(flat.detach(), mine, rtol=1e-10, atol=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("row", ["full", "grad_op", "replicate"])
def test_trains_as_one_process(ranks: Ranks, row: str) -> None:
    ranks(2, body_trains_as_one_process, row)


def test_hybrid_trains_as_one_process(ranks: Ranks) -> None:
    ranks(4, body_trains_as_one_process, "hybrid")


def body_collectives(row: str) -> list[tuple[str, str]]:
    world = communicator()
    model = build()
    shard(model, axes_of(world, row), UnitSettings(keep_full_after_forward=row == "grad_op"))
    recorder = Recorder()
    with observe(recorder):
        model(batch(0)).sum().backward()
    return recorder.kinds()


def test_collectives_of_a_step(ranks: Ranks) -> None:
    found = ranks(2, body_collectives, "full")[0]
    assert found == [
        ("all_gather", "compare parameters"),
        ("all_gather", "compare starting values"),
        ("all_gather", "unshard 0"),
        ("all_gather", "unshard 2"),
        ("all_gather", "unshard 4"),
        ("all_gather", "order"),
        ("all_gather", "unshard 4"),
        ("all_gather", "unshard 2"),
        ("reduce_scatter", "reduce 4"),
        ("all_gather", "unshard 0"),
        ("reduce_scatter", "reduce 2"),
        ("reduce_scatter", "reduce 0"),
        ("all_gather", "use counts"),
    ]


def test_phases() -> None:
    unit = flat_unit([("layer", nn.Linear(2, 2))], DataAxes(), UnitSettings(), FlatExposure())
    assert unit.phase is Phase.SHARDED
    unit.unshard()
    assert unit.phase is Phase.GATHERING
    unit.wait_unshard()
    assert unit.phase is Phase.FULL
    unit.reshard()
    assert unit.phase is Phase.SHARDED
