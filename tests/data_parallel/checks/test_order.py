"""The order of units: what is recorded, compared, published, warned of and raised."""

from __future__ import annotations

import logging
import re
import time
import warnings
from collections.abc import Callable

import pytest
import torch

from meshwright import comm
from meshwright.comm import Recorder, observe, settle
from meshwright.errors import CollectiveMismatchError, CommunicationError, RankFailedError
from meshwright.testing import Ranks
from support.internals.comm import GroupEvent, registry
from support.internals.data_parallel import Ledger, OrderedUnit, digest_of
from support.late import as_on_a_host, raises_by_now

UNITS = [
    OrderedUnit(name="root", parameters=("layer0.weight", "layer0.bias"), payload=(18,)),
    OrderedUnit(name="layer1", parameters=("layer1.weight",), payload=(18,)),
    OrderedUnit(name="layer2", parameters=("layer2.0.weight", "layer2.2.weight"), payload=(18,)),
    OrderedUnit(name="layer3", parameters=("layer3.weight",), payload=(18,)),
    OrderedUnit(name="tower", parameters=("tower.weight",), payload=(50,)),
]


class Root:
    """A root whose units gather eight numbers each, and whose backward does nothing."""

    def __init__(self, *, in_detail: bool = False) -> None:
        self.world = comm.communicator()
        self.ledger = Ledger(self.world, UNITS, in_detail=in_detail, root="Model")

    def begin(self, *, training: bool = True) -> None:
        kind = "training" if training else "evaluation"
        self.ledger.happens(GroupEvent(f"a forward pass in {kind}"))
        self.ledger.begin(training=training)

    def forward(self, order: list[int], *, training: bool = True) -> None:
        registry.go_on()
        self.begin(training=training)
        for unit in order:
            self.ledger.record(unit)
            output = torch.empty(8 * self.world.size)
            self.world.all_gather(output, torch.zeros(8), label="unshard").wait()
        self.ledger.end_forward()

    def step(self, order: list[int]) -> None:
        self.forward(order)
        self.ledger.finish()

    def finish(self) -> None:
        """End the backward, and take in what a device compares late."""
        self.ledger.finish()
        settle()


def both(one: list[int], other: list[int]) -> list[int]:
    """``other`` on the last rank, ``one`` on the rest."""
    world = comm.communicator()
    return other if world.rank == world.size - 1 else one


def test_digests_of_orders_differ() -> None:
    assert digest_of((0, 1, 2)) == digest_of([0, 1, 2])
    digests = {digest_of(order) for order in ((), (0,), (0, 0), (1,), (0, 1), (1, 0))}
    assert len(digests) == 6
    assert all(-(2**63) <= digest < -1 for digest in digests)


@pytest.mark.few(1)
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
        assert {c.bytes for c in recorder.collectives if c.label == "order"} == {24 * size}
        assert root.ledger.forwards == 3
        assert root.ledger.reference == [0, 1, 2]

    ranks(size, body)


# ------------------------------------------------------------------------ the first forward


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, 4])
def test_a_first_forward_that_differs_under_detail(ranks: Ranks, size: int) -> None:
    def body() -> None:
        root = Root(in_detail=True)
        text = (
            r"Forward order differs across ranks: rank 0 is all-gathering parameters for "
            rf"\['layer1.weight'\] while rank {size - 1} is all-gathering parameters for "
            r"\['layer2.0.weight', 'layer2.2.weight'\]"
        )
        with pytest.raises(RuntimeError, match=f"^{text}"):
            root.step(both([0, 1], [0, 2]))
        root.step([0, 1])
        recorder = Recorder()
        with observe(recorder):
            root.step([0, 1])
        assert recorder.kinds().count(("all_gather", "order")) == 1
        with pytest.raises(RuntimeError, match=rf"rank 0 is .* while rank {size - 1} ends its"):
            Root(in_detail=True).step(both([0, 1], [0]))

    ranks(size, body)


CHANGES = {
    "another": ([0, 1, 2], [0, 2, 1]),
    "more": ([0, 1], [0, 1, 2]),
    "fewer": ([0, 1, 2], [0, 1]),
    "skipped": ([0, 1, 2], [0, 2]),
}


def caught(step: Callable[[], None]) -> str:
    """The text of the error of our own tree that ``step`` raises, soon."""
    begun = time.monotonic()
    with raises_by_now(CommunicationError) as raised:
        step()
    assert as_on_a_host(time.monotonic() - begun) < 5.0
    assert isinstance(raised.value, CollectiveMismatchError | RankFailedError)
    return str(raised.value)


@pytest.mark.few(3)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("forwards_before", [0, 5])
def test_a_difference_is_an_error_before_anything_is_issued(
    ranks: Ranks, size: int, change: str, forwards_before: int
) -> None:
    def body() -> str:
        root = Root()
        one, other = CHANGES[change]
        for _ in range(forwards_before):
            root.step(one)
        text = caught(lambda: root.step(both(one, other)))
        assert f"forward {forwards_before + 1}, position" in text
        assert "Every rank must run the same units in the same order" in text
        return text

    texts = ranks(size, body)
    own = [text for text in texts if text.startswith("Forward order differs across ranks: rank")]
    assert own
    if forwards_before:
        assert f"rank {size - 1} in forward 6" in own[-1]
        assert "; in the forward before: root, layer1" in own[-1]
    at, names = {
        "another": (1, {"layer1", "layer2"}),
        "more": (2, {"the end of the forward", "layer2"}),
        "fewer": (2, {"the end of the forward", "layer2"}),
        "skipped": (1, {"layer1", "layer2"}),
    }[change]
    for text in own:
        assert f"position {at}: " in text
        assert all(name in text for name in names)


def test_training_goes_on_after_an_error_in_the_first_forward(ranks: Ranks) -> None:
    def body() -> None:
        root = Root()
        caught(lambda: root.step(both([0, 1], [0, 2])))
        for _ in range(2):
            root.step([0, 1])

    ranks(2, body)


# --------------------------------------------------------------------- changes made together


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, 4])
def test_a_change_made_together_is_silent(ranks: Ranks, size: int) -> None:
    def body() -> None:
        root = Root()
        for order in ([0, 1], [0, 1], [0, 2, 1], [0, 2, 1], [0], [3, 2, 1, 0], [1], [2], [3, 3]):
            root.step(order)
            assert root.ledger.reference == order
        monitor = registry.PROCESS.monitor
        assert monitor is not None
        settle()
        root.world.barrier()
        monitor.read()
        assert monitor.said() == []

    ranks(size, body)


def test_a_change_made_together_on_the_second_unit_only(ranks: Ranks) -> None:
    def body() -> None:
        root = Root()
        root.step([0, 1, 2, 3])
        text = caught(lambda: root.step(both([1, 0, 2, 3], [1, 0, 3, 2])))
        assert "position 2" in text

    ranks(2, body)


def test_what_is_not_recorded(ranks: Ranks) -> None:
    def body() -> None:
        root = Root()
        root.step([0, 1])
        recorder = Recorder()
        with observe(recorder):
            root.forward([1, 0], training=False)
            root.forward(both([0, 2], [2, 0]), training=False)
            root.ledger.record(3)
            root.ledger.end_forward()
            root.ledger.finish()
        assert ("all_gather", "order") not in recorder.kinds()
        assert root.ledger.forwards == 1
        root.step([0, 1])
        assert root.ledger.forwards == 2

    ranks(2, body)


def test_forwards_without_a_backward_and_several_before_one(ranks: Ranks) -> None:
    def body() -> None:
        root = Root()
        for _ in range(20):
            root.forward([0, 1])
        root.ledger.finish()
        root.forward([0, 1])
        root.begin()
        root.ledger.record(0)  # an exception ends this forward
        root.forward([0, 1])
        root.ledger.finish()

    ranks(2, body)


# ------------------------------------------------------------------------------- warnings


@pytest.mark.few(2)
@pytest.mark.parametrize(("one", "other"), [([0, 1, 2], [0, 4, 2]), ([0, 1], [0]), ([0], [0, 1])])
def test_what_could_not_mix_up_is_an_error_also_where_others_warn(
    ranks: Ranks, one: list[int], other: list[int]
) -> None:
    def body() -> None:
        root = Root(in_detail=True)
        for _ in range(2):
            root.step(one)
        text = caught(lambda: root.step(both(one, other)))
        assert "Forward order differs across ranks: rank 1 in forward 3, position" in text

    ranks(2, body)


BEFORE = (
    r"^Forward order differs from that of the first iteration on rank 1\. Collectives are "
    r"unchecked and may give incorrect results or hang\.\n"
)


@pytest.mark.parametrize("forwards_before", [1, 3])
def test_later_forwards_warn_under_detail_and_train_on(ranks: Ranks, forwards_before: int) -> None:
    def body() -> None:
        root = Root(in_detail=True)
        for _ in range(forwards_before):
            root.step([0, 1])
        if root.world.rank == 1:
            with pytest.warns(UserWarning, match=BEFORE) as found:
                root.forward([0, 2, 3])
            texts = [str(warning.message) for warning in found]
            assert len(texts) == 2
            assert re.search(
                BEFORE + r"Expected to all-gather for \['layer1.weight'\] but trying to all-gather "
                r"parameters for \['layer2.0.weight', 'layer2.2.weight'\]$",
                texts[0],
            )
            assert re.search(
                BEFORE
                + r"Expected to not all-gather any more parameters in the forward but trying "
                r"to all-gather parameters for \['layer3.weight'\]$",
                texts[1],
            )
        else:
            root.forward([0, 1, 3])
        root.ledger.finish()
        root.step(both([0, 1], [0, 2]))
        assert root.ledger.is_unchecked

    # The extra unit of rank 0 keeps the numbers of gathers equal; under detail it warns as well.
    def quiet() -> None:
        with warnings.catch_warnings():
            if comm.communicator().rank == 0:
                warnings.simplefilter("ignore")
            body()

    ranks(2, quiet)


class Log(logging.Handler):
    """Keeps what this rank logs."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        logging.getLogger("meshwright").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


def test_ranks_that_stay_are_silent_under_detail(ranks: Ranks) -> None:
    def body() -> None:
        log = Log()
        root = Root(in_detail=True)
        root.step([0, 1])
        order = both([0, 1], [0, 2])
        if root.world.rank == 1:
            with pytest.warns(UserWarning, match="Forward order differs from that of the first"):
                root.forward(order)
        else:
            root.forward(order)
        root.finish()  # warnings are errors here
        mine = f"rank {root.world.rank}: Forward order differs across ranks in forward 2"
        assert mine in log.text
        root.step(order)

    ranks(2, body)


def test_changes_made_together_warn_once_under_detail(ranks: Ranks) -> None:
    def body() -> None:
        root = Root(in_detail=True)
        root.step([0, 1])
        with pytest.warns(UserWarning, match="Expected to all-gather for"):
            root.step([0, 2])
        root.step([0, 1])
        root.step([0, 2])

    ranks(2, body)


def test_a_unit_that_the_check_was_not_told_of(ranks: Ranks) -> None:
    def body() -> None:
        root = Root(in_detail=True)
        root.step([0])
        text = "parameters for a newly-added parameter since construction time"
        with pytest.warns(UserWarning, match=text):
            root.step([0, 9])

    ranks(2, body)


# -------------------------------------------------------------------------------- the board


@pytest.mark.devices("host", reason="no host waits for a device's gather, and reports")
def test_a_hang_report_shows_who_left_its_order(ranks: Ranks) -> None:
    def body() -> None:
        log = Log()
        root = Root(in_detail=True)
        root.step([0, 1])
        monitor = registry.PROCESS.monitor
        assert monitor is not None
        monitor.hang_after = 1.0
        if root.world.rank == 1:
            root.begin()
            with pytest.warns(UserWarning, match=BEFORE):
                root.ledger.record(2)
            time.sleep(3.0)
            root.world.all_gather(torch.empty(16), torch.zeros(8), label="unshard").wait()
        else:
            root.begin()
            root.ledger.record(0)
            root.world.all_gather(torch.empty(16), torch.zeros(8), label="unshard").wait()
            text = "rank 1 had said: forward 2, position 0: expected root, got layer2"
            assert text in log.text

    ranks(2, body)
