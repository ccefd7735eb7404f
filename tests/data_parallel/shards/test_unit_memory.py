"""What units hold: nothing whole at rest, two whole units at most, gradients of two at most."""

from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch
from torch import nn

from meshwright.comm import Mark, communicator, observe
from meshwright.data_parallel import fully_shard
from meshwright.fsdp import FullyShardedDataParallel, fsdp_units
from meshwright.fsdp.wrap import ModuleWrapPolicy
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.internals.comm import local_of
from support.internals.data_parallel import FlatBuffer, GradientLine, KeptLine, Unit
from support.internals.layout import ChunkedLayout, FlatLayout
from support.internals.timeline import Collective

CPU = torch.device("cpu")


def layouts() -> list[FlatLayout | ChunkedLayout]:
    shapes = [(4, 3), (6,), (2, 5)]
    return [
        FlatLayout.chunked(list("abc"), shapes, "float32", 2),
        FlatLayout.chunked(list("abc"), [(5, 3), (6,), (3, 4)], "float32", 2),
        FlatLayout.chunked(list("abc"), [(4, 6), (6,), (3, 4)], "float32", 2, dims=[1, 0, 1]),
        FlatLayout.pack(list("abc"), shapes, "float32", 3),
        FlatLayout.pack(list("abc"), shapes, "float32", 2, tensor_alignment=4),
    ]


def expected(layout: FlatLayout | ChunkedLayout, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The line, by definition: zeros where no tensor is."""
    line = torch.zeros(layout.padded_size)
    for part in range(layout.parts):
        shard = line.view(layout.parts, -1)[part]
        if isinstance(layout, FlatLayout):
            for piece in layout.owned(part):
                source = tensors[piece.index].reshape(-1)[piece.start : piece.stop]
                shard[piece.offset : piece.offset + piece.numel] = source
            continue
        for index in range(len(tensors)):
            box = layout.box(index, part)
            start = layout.offsets[index]
            shard[start : start + box.numel] = tensors[index][box.slices()].reshape(-1)
    return line


@pytest.mark.parametrize("missing", [None, 1])
@pytest.mark.parametrize("number", range(5))
def test_a_line_holds_gradients_in_the_order_of_the_shards(
    number: int, missing: int | None
) -> None:
    layout = layouts()[number]
    line = GradientLine(layout, range(3), torch.float32, CPU)
    tensors = [torch.randn(shape) for shape in layout.shapes]
    given = [None if index == missing else t for index, t in enumerate(tensors)]
    if missing is not None:
        tensors[missing].zero_()
    assert not line.has_gradient
    line.take(given)
    torch.testing.assert_close(line.tensor, expected(layout, tensors), rtol=0, atol=0)
    line.take(given)
    torch.testing.assert_close(line.tensor, 2 * expected(layout, tensors), rtol=0, atol=0)
    found = [sum(part.numel() for part in parts) for parts in line.parts()]
    assert found == [t.numel() for t in tensors]
    line.release()
    assert not line.has_gradient
    assert line._memory.is_free


def test_a_gradient_that_fills_a_line_stays_where_it_is() -> None:
    layout = FlatLayout.chunked(["a"], [(4, 3)], "float32", 2)
    gradient = torch.randn(4, 3)
    line = GradientLine(layout, range(1), torch.float32, CPU)
    line.take([gradient])
    assert line.tensor.data_ptr() == gradient.data_ptr()
    line.take([gradient])
    assert line.tensor.data_ptr() != gradient.data_ptr()
    torch.testing.assert_close(line.tensor, 2 * gradient.view(-1), rtol=0, atol=0)
    for other in (torch.randn(3, 4).t(), gradient.double(), gradient.half()):
        line = GradientLine(layout, range(1), torch.float32, CPU)
        line.take([other])
        assert line.tensor.data_ptr() != other.data_ptr()


def test_a_line_is_kept_until_somebody_else_holds_it() -> None:
    kept = KeptLine()
    take = (6, torch.float32, CPU)
    first = kept.take(*take).data_ptr()
    assert kept.take(*take).data_ptr() == first
    for hold in (lambda line: line, lambda line: line[2:4], lambda line: line.detach()):
        held = hold(kept.take(*take))
        other = kept.take(*take)
        assert not kept.holds(held[:1]) and other.data_ptr() != held.untyped_storage().data_ptr()
        del held, other
    assert kept.take(7, torch.float32, CPU).numel() == 7
    assert kept.take(7, torch.float64, CPU).dtype == torch.float64


def whole_bytes(units: list[Unit]) -> tuple[int, int]:
    """How many units are whole, and the bytes of whole gradients."""
    groups = [group for unit in units for group in unit.groups]
    alive = sum(any(not is_at_rest(g.buffer) for g in unit.groups) for unit in units)
    lines = {
        line.tensor.data_ptr(): line.tensor.untyped_storage().size()
        for group in groups
        for line in group.lines
        if line.has_gradient
    }
    for slot in itertools.chain.from_iterable(unit.slots for unit in units):
        if slot.full.grad is not None:
            lines[slot.full.grad.data_ptr()] = slot.full.grad.untyped_storage().size()
    return alive, sum(lines.values())


def is_at_rest(buffer: FlatBuffer) -> bool:
    return buffer._whole is None or buffer._whole.is_free


class Watcher:
    """Looks at the units whenever a collective is issued, and in hooks of the modules."""

    def __init__(self, units: list[Unit], model: nn.Module) -> None:
        self.units = units
        self.alive = self.gradients = 0
        for part in model.modules():
            part.register_forward_hook(lambda module, args, output: self.look())
        for slot in itertools.chain.from_iterable(unit.slots for unit in units):
            slot.full.register_post_accumulate_grad_hook(lambda parameter: self.look())

    def look(self) -> None:
        alive, gradients = whole_bytes(self.units)
        self.alive, self.gradients = max(self.alive, alive), max(self.gradients, gradients)

    def issued(self, collective: Collective) -> None:
        self.look()

    def completed(self, collective: Collective, start: Mark, end: Mark) -> None:
        self.look()


def body_bounds(way: str) -> None:
    size, layers = 600, 6
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(size, size) for _ in range(layers)))
    if way == "fully_shard":
        for layer in model:  # pyrefly: ignore[not-iterable]
            fully_shard(layer)
        fully_shard(model)
        units = [fully_shard.state(layer).unit for layer in model]
    else:
        policy = ModuleWrapPolicy({nn.Linear})
        model = FullyShardedDataParallel(
            model,
            device_id=communicator().device,
            auto_wrap_policy=policy,
            use_orig_params=way == "orig",
        )
        units = fsdp_units(model)
    units = [unit for unit in units if unit is not None]
    unit_bytes = (size * size + size) * 4
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watcher = Watcher(units, model)
    assert len(units) == layers
    for _ in range(3):
        with observe(watcher):
            model(torch.randn(2, size)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert whole_bytes(units) == (0, 0)
        for group in (group for unit in units for group in unit.groups):
            staging = group.buffer._staging
            assert staging.is_free or not staging.tensor.numel()
            assert all(line._memory.is_free for line in group.lines)
    # The running unit and the one gathered ahead.
    assert watcher.alive == 2
    # The unit that travels, and the one whose gradients come: a weight, in its own memory or on
    # its way into the line, where a device has each bias of 300 in memory for 304.
    padded = unit_bytes + 2 * 4 * 4 * (not communicator().is_on_host)
    assert unit_bytes <= watcher.gradients <= unit_bytes + padded


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["fully_shard", "flat", "orig"])
def test_memory_of_a_step(ranks: Ranks, way: str) -> None:
    ranks(2, body_bounds, way)


def body_gradients_are_left_to_who_holds_them() -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 6))

    def step() -> list[torch.Tensor]:
        model(torch.randn(2, 8)).square().mean().backward()
        return [p.grad for p in model.parameters()]  # pyrefly: ignore[bad-return]

    def places() -> list[int]:
        return [local_of(p.grad).data_ptr() for p in model.parameters()]

    step()
    first = places()
    model.zero_grad()
    step()
    assert places() == first, "memory that nobody holds is used again"
    holds = (
        lambda gradient: gradient,
        local_of,
        lambda gradient: gradient.to_local(),
        lambda gradient: local_of(gradient).view(-1)[:1],
        lambda gradient: gradient.detach(),
        lambda gradient: local_of(gradient).untyped_storage(),
    )
    for hold, index in itertools.product(holds, (0, 1)):
        model.zero_grad()
        held = hold(step()[index])
        if isinstance(held, torch.UntypedStorage):
            held = torch.empty(0).set_(held)
        before = local_of(held).clone()
        model.zero_grad()
        step()
        assert torch.equal(local_of(held), before), "a gradient that somebody holds changed"
        del held
    model.zero_grad()
    step()
    once = [local_of(p.grad).clone() for p in model.parameters()]
    given = [p.grad for p in model.parameters()]
    step()
    for parameter, before, gradient in zip(model.parameters(), once, given, strict=True):
        assert parameter.grad is gradient, "a gradient that is there is added to"
        assert not torch.equal(local_of(parameter.grad), before)


@pytest.mark.devices("host", reason="memory of gradients is kept on hosts alone")
def test_gradients_are_left_to_who_holds_them(ranks: Ranks) -> None:
    ranks(2, body_gradients_are_left_to_who_holds_them)


def objects_of_units(kind: str) -> float:
    """Count the objects that the collector goes through, for each unit of 12 parameters."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    mesh = init_device_mesh("cpu", (2,))
    options = {"mesh": mesh} if kind == "fully_shard" else {"device_mesh": mesh}
    kinds = {"fully_shard": fully_shard, "class": FullyShardedDataParallel}
    counts: list[int] = []
    for made in (1, 9):
        layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(made))
        gc.collect()
        before = len(gc.get_objects())
        held = [kinds[kind](each, **options) for each in layers]
        gc.collect()
        counts.append(len(gc.get_objects()) - before)
        del held
    return (counts[1] - counts[0]) / 8


@pytest.mark.parametrize(("kind", "most"), [("fully_shard", 220), ("class", 170)])
def test_a_unit_leaves_few_objects_to_the_collector(ranks: Ranks, kind: str, most: int) -> None:
    """With many, the collector takes longer for each unit the more units there are."""
    assert max(ranks(2, objects_of_units, kind)) <= most
