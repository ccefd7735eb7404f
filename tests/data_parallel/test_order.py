"""The order of units: what is recorded, compared, published, warned of and raised."""

from __future__ import annotations

import logging
import time
import warnings

import pytest
import torch

from meshwright import comm
from meshwright.comm import Recorder, observe
from meshwright.comm.registry import PROCESS
from meshwright.data_parallel.order import OrderCheck, OrderedUnit, OrderOptions, OrderRecord
from meshwright.errors import CollectiveMismatchError, RankFailedError
from meshwright.testing import Ranks

UNITS = [
    OrderedUnit(name="root", parameters=("layer0.weight", "layer0.bias")),
    OrderedUnit(name="layer1", parameters=("layer1.weight",)),
    OrderedUnit(name="layer2", parameters=("layer2.0.weight", "layer2.2.weight")),
    OrderedUnit(name="layer3", parameters=("layer3.weight",)),
]
FACADE = OrderOptions(action="warn")
DETAIL = OrderOptions(action="warn", warn_at_once=True, exchange_first=True)
STRICT = OrderOptions(exchange_first=True)


class Root:
    """A root whose units gather eight numbers each, and whose backward does nothing."""

    def __init__(self, options: OrderOptions | None = None) -> None:
        self.world = comm.communicator()
        self.check = OrderCheck(self.world, UNITS, options, root="Model")

    def forward(self, order: list[int], *, training: bool = True) -> None:
        self.check.begin(training=training)
        for unit in order:
            self.check.record(unit)
            output = torch.empty(8 * self.world.size)
            self.world.all_gather(output, torch.zeros(8), label="unshard").wait()
        self.check.end_forward()

    def step(self, order: list[int]) -> None:
        self.forward(order)
        self.check.finish()


def both(one: list[int], other: list[int]) -> list[int]:
    """``other`` on the last rank, ``one`` on the rest."""
    world = comm.communicator()
    return other if world.rank == world.size - 1 else one


def test_records_differ() -> None:
    record = OrderRecord((0, 1, 2))
    assert record.differs_at(OrderRecord((0, 1, 2))) is None
    assert record.differs_at(OrderRecord((0, 2, 1))) == 1
    assert record.differs_at(OrderRecord((0, 1))) == 2
    assert record.digest() == OrderRecord((0, 1, 2)).digest()
    digests = {OrderRecord(order).digest() for order in ((), (0,), (0, 0), (1,), (0, 1), (1, 0))}
    assert len(digests) == 6
    assert all(-(2**63) <= digest < -1 for digest in digests)
    assert record.digest(record.digest()) != record.digest()


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="every >= 1, found 0"):
        OrderOptions(every=0)


@pytest.mark.parametrize("size", [2, 4])
def test_equal_orders_cost_one_small_gather_a_forward(ranks: Ranks, size: int) -> None:
    def body() -> None:
        root = Root()
        recorder = Recorder()
        with observe(recorder):
            for _ in range(3):
                root.step([0, 1, 2])
        step = [("all_gather", "unshard")] * 3 + [("all_gather", "order")]
        assert recorder.kinds() == step * 3
        assert {c.bytes for c in recorder.collectives if c.label == "order"} == {16 * size}
        assert root.check.iteration == 3
        assert root.check.reference == OrderRecord((0, 1, 2))

    ranks(size, body)


@pytest.mark.parametrize("size", [2, 4])
def test_a_first_forward_that_differs(ranks: Ranks, size: int) -> None:
    def body() -> None:
        root = Root(STRICT)
        text = (
            r"Forward order differs across ranks: rank 0 is all-gathering parameters for "
            rf"\['layer1.weight'\] while rank {size - 1} is all-gathering parameters for "
            r"\['layer2.0.weight', 'layer2.2.weight'\]"
        )
        with pytest.raises(RuntimeError, match=f"^{text}"):
            root.step(both([0, 1], [0, 2]))
        root.step([0, 1])
        with pytest.raises(RuntimeError, match="^Forward order differs across ranks"):
            Root(STRICT).step(both([0, 1], [0]))

    ranks(size, body)
