"""Any layout publishes to any other, to the last bit, and only what the receivers need travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from matrix.cells import ROWS, Cell, plan_of
from meshwright import fully_shard
from meshwright.comm import Recorder, communicator, held_boxes, observe
from meshwright.composition import parallelize
from meshwright.fsdp import FullyShardedDataParallel, ShardingStrategy
from meshwright.mesh import DeviceMesh
from meshwright.testing import Ranks
from meshwright.transfer import Publisher, Receipt, Receiver

LAYOUTS = (
    *("alone", "replicate=2", "shard=2", "shard=3", "tensor=2", "pipeline=2", "expert=2"),
    *("replicate=2,shard=2", "shard=2,tensor=2", "pipeline=2,shard=2", "shard=2,expert=2"),
    "pipeline=2,expert=2",
)
QUICK = (("shard=3", "tensor=2"), ("replicate=2", "pipeline=2"))
MODEL = "mixture"
"""Uneven sizes, and experts in two forms."""


def ranks_of(layout: str) -> int:
    return 1 if layout == "alone" else Cell(axes=layout, model=MODEL).world


def laid_out(layout: str, group: dist.ProcessGroup, seed: int) -> Any:
    torch.manual_seed(seed)
    sample = ROWS[MODEL].sample
    model = sample.build()
    if layout == "alone":
        return model
    cell = Cell(axes=layout, model=MODEL, schedule="1f1b" if "pipeline" in layout else "")
    batch, _ = sample.example_batch(4, torch.Generator().manual_seed(1))
    return parallelize(
        model, plan_of(cell), optimizer=None, loss=sample.loss, example=(batch,), group=group
    )


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return model.state_dict() if isinstance(model, nn.Module) else model.weights()


def bytes_of(model: Any) -> int:
    """Of this rank's parts."""
    state = (model if isinstance(model, nn.Module) else model.module).state_dict()
    return sum(part.nbytes for value in state.values() for _, part in held_boxes(value))


def body(trained: str, generated: str) -> tuple[Receipt, int, int, dict[str, torch.Tensor]]:
    """Publish twice; returns the receipt, bytes seen and held, and the weights that came."""
    world = communicator()
    sizes = ranks_of(trained), ranks_of(generated)
    sides = [range(sizes[0]), range(sizes[0], sum(sizes))]
    groups = [dist.new_group([*side]) for side in sides]
    number = int(world.rank in sides[1])
    model = laid_out((trained, generated)[number], groups[number], number)
    seen = Recorder()
    if number:
        receiver = Receiver(model)
        with observe(seen):
            receiver.receive()
        receipt = receiver.receive(5)
    else:
        publisher = Publisher(model)
        with observe(seen):
            publisher.publish(2)
        receipt = publisher.publish(5)
    moved = sum(each.bytes for each in seen.collectives if each.kind in ("send", "recv"))
    return receipt, moved, bytes_of(model), weights_of(model)


def check(ranks: Ranks, trained: str, generated: str) -> None:
    torch.manual_seed(0)
    expected = ROWS[MODEL].sample.build().state_dict()
    first = ranks_of(trained)
    results = ranks(first + ranks_of(generated), body, trained, generated, timeout=200)
    assert len({(receipt.version, receipt.digest) for receipt, *_ in results}) == 1
    assert results[0][0].version == 5
    for receipt, moved, _, weights in results:
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name
        assert receipt.moved == moved
    needed = sum(held for _, _, held, _ in results[first:])
    assert sum(receipt.moved for receipt, *_ in results[first:]) == needed
    assert sum(receipt.moved for receipt, *_ in results[:first]) == needed


@pytest.mark.parametrize(("trained", "generated"), QUICK)
def test_pairs_of_layouts(ranks: Ranks, trained: str, generated: str) -> None:
    check(ranks, trained, generated)


@pytest.mark.few(0, slow=10)
@pytest.mark.parametrize("trained", LAYOUTS)
@pytest.mark.parametrize("generated", LAYOUTS)
def test_every_pair_of_layouts(ranks: Ranks, trained: str, generated: str) -> None:
    check(ranks, trained, generated)


def test_the_flat_class_publishes_and_receives(ranks: Ranks) -> None:
    """Ranges of elements: several boxes of one tensor on a rank."""

    def pair() -> dict[str, torch.Tensor]:
        world = communicator()
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        side = world.rank // 2
        torch.manual_seed(side)
        plain = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
        expected = plain.state_dict()
        model = FullyShardedDataParallel(plain, process_group=halves[side])
        if side == 0:
            Publisher(model).publish(1)
            return {name: value.clone() for name, value in expected.items()}
        Receiver(model).receive()
        with FullyShardedDataParallel.summon_full_params(model):
            return {name: value.clone() for name, value in plain.state_dict().items()}

    results = ranks(4, pair)
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).state_dict()
    for found in results[2:]:
        assert len(found) == 4
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", ["fully_shard", "flat", "original"])
def test_parameters_that_stay_gathered_are_replaced(ranks: Ranks, kind: str) -> None:
    """After a forward that keeps whole parameters the next one has those that came."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def body() -> None:
        group = dist.new_group([1, 2])
        if communicator().rank == 0:
            for version in range(2):
                Publisher(build(version)).publish(version)
            return
        model = build(9)
        if kind == "fully_shard":
            mesh = DeviceMesh.from_group(group, "cpu")
            fully_shard(model, mesh=mesh, reshard_after_forward=False)
        else:
            model = FullyShardedDataParallel(
                model,
                process_group=group,
                sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
                use_orig_params=kind == "original",
            )
        receiver, x = Receiver(model), torch.ones(2, 6)
        for version in range(2):
            model(x)
            receiver.receive()
            assert torch.equal(model(x), build(version)(x))

    ranks(3, body)
