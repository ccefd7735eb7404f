"""The simulated device's memory and order, without any rank."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshwright.testing.simulated import (
    DEVICE,
    SimulatedDevice,
    SimulationError,
    WorkLine,
    simulated,
)
from support.internals.comm import beginning_storage
from support.internals.testing import Extent


def kinds(device: SimulatedDevice) -> list[str]:
    """The faults so far, which are taken away."""
    found = [fault.kind for fault in device.faults]
    device.faults.clear()
    return found


def test_two_streams_need_a_wait() -> None:
    with simulated() as device:
        x, side = torch.ones(8), WorkLine("side")
        with device.use(side):
            x.mul_(2)
        assert kinds(device) == ["unordered"]
        side.wait_for(device.current)
        with device.use(side):
            x.mul_(2)
        assert not kinds(device)
        y = x + 1
        assert kinds(device) == ["unordered"]
        device.current.wait_for(side)
        assert torch.equal(x + 1, y)
        assert not kinds(device)


def test_two_reads_need_none() -> None:
    with simulated() as device:
        x, side = torch.ones(8), WorkLine("side")
        side.wait_for(device.current)
        x.sum()
        with device.use(side):
            x.sum()
        assert not kinds(device)
        x.zero_()
        assert kinds(device) == ["unordered"]


def test_parts_that_share_no_byte_are_no_fault() -> None:
    with simulated() as device:
        x, side = torch.ones(4, 6), WorkLine("side")
        side.wait_for(device.current)
        x[:, ::2].zero_()
        with device.use(side):
            x[:, 1::2].zero_()
            assert not kinds(device)
            x[1:2].zero_()
            assert kinds(device) == ["unordered"]


def test_a_storage_on_a_part_of_another_is_its_memory() -> None:
    with simulated() as device:
        x, side = torch.ones(4, 6), WorkLine("side")
        side.wait_for(device.current)
        allocated = device.memory.allocated
        row = beginning_storage(x[1])
        assert row.storage_offset() == 0
        assert device.memory.allocated == allocated
        x[1].zero_()
        with device.use(side):
            x[2].sum()
            row.view(2, 3)
            assert not kinds(device)
            row.sum()
            assert kinds(device) == ["unordered"]
        del row
        side.wait_for(device.current)
        assert device.memory.allocated == allocated


def test_an_event_orders_what_was_queued_before_it_alone() -> None:
    with simulated() as device:
        x, y, side = torch.ones(8), torch.ones(8), WorkLine("side")
        side.wait_for(device.current)
        with device.use(side):
            x.zero_()
            event = device.record("x is written")
            y.zero_()
        device.current.wait_until(event.clock)
        x.sum()
        assert not kinds(device)
        y.sum()
        assert kinds(device) == ["unordered"]


def test_memory_goes_back_after_its_last_use() -> None:
    with simulated() as device:
        x, side = torch.ones(1024), WorkLine("side")
        side.wait_for(device.current)
        with device.use(side):
            x.mul_(2)
        x.untyped_storage().resize_(0)
        assert kinds(device) == ["early free"]
        x.add_(1) if False else device.launch("reads", [x])
        assert kinds(device) == ["no memory"]
        x.untyped_storage().resize_(4096)
        device.launch("writes", writes=[x])
        assert not kinds(device)
        with device.use(side):
            side.wait_for(WorkLine("another"))
            device.launch("reads late", [x])
        assert kinds(device) == ["unordered"]
        del x
        assert kinds(device) == ["early free"]


def test_memory_in_use_is_counted() -> None:
    with simulated() as device:
        before = device.memory.allocated
        x = torch.ones(1024)
        y = x * 2
        assert device.memory.allocated - before == 8192
        del x
        assert device.memory.allocated - before == 4096
        assert device.memory.peak - before == 8192
        del y
        assert device.memory.allocated == before


def test_memory_made_like_a_tensor_is_where_that_is() -> None:
    with simulated():
        here, there = torch.ones(4, device="cpu"), torch.ones(4)
        makers: list[Callable[[torch.Tensor], torch.Tensor]] = [
            torch.empty_like,
            lambda x: x.new_empty(2),
            lambda x: x.new_zeros(2),
            copy.deepcopy,
        ]
        for make in makers:
            assert make(here).device == torch.device("cpu")
            assert make(there).device == DEVICE
            assert torch.empty_like(here, device=DEVICE).device == DEVICE


def test_waits_of_the_host_are_counted() -> None:
    with simulated() as device:
        x = torch.ones(4)
        with device.forbid_stops():
            y = (x * 2).sum()
            x[x.new_zeros(2, dtype=torch.int64)]
        reads = [
            lambda: y.item(),
            lambda: bool(y > 0),
            lambda: y.tolist(),
            lambda: y.cpu(),
            lambda: y.to("cpu"),
            lambda: x.nonzero(),
            lambda: x[x > 0],
            lambda: torch.equal(x, x),
            lambda: torch.tensor([1.0], device="cpu").to(DEVICE),
        ]
        for read in reads:
            with pytest.raises(SimulationError, match="1 host stops"), device.forbid_stops():
                read()


def test_devices_are_told_apart() -> None:
    with simulated() as device:
        x, there = torch.ones(4), torch.ones(4, device="cpu")
        assert x.device == DEVICE != there.device
        assert torch.zeros(2, device=x.device).device == DEVICE
        assert torch.zeros(2, device=there.device).device == there.device
        assert x.cpu().device == there.device
        assert there.to(x.device).device == DEVICE
        assert (there + 1).device == there.device
        assert torch.frombuffer(bytearray(4), dtype=torch.uint8).device == there.device
        assert torch.zeros(3, device="meta").device.type == "meta"
        assert not kinds(device)
        x + there
        assert kinds(device) == ["mixed devices"]
        x * torch.tensor(2.0, device="cpu")
        assert not kinds(device)


def test_copies_that_are_not_waited_for_are_read_later() -> None:
    with simulated(lag=5) as device:
        x = torch.ones(4)
        home = torch.empty(4, device="cpu", pin_memory=False).pin_memory()
        with device.forbid_stops():
            home.copy_(x, non_blocking=True)
            event = device.record("copied")
            assert not device.is_passed(event)
            home.tolist()
            assert kinds(device) == ["unordered"]
            while not device.is_passed(event):
                x.add_(1)
            assert home.tolist() == [1.0] * 4
        assert not kinds(device)
        home.copy_(x, non_blocking=True)
        event = device.record("copied")
        device.synchronize(event)
        home.tolist()
        assert [stop.what for stop in device.stops] == ["wait for copied"]


def test_gradients_cross_where_values_do() -> None:
    with simulated() as device:
        x = torch.ones(4, requires_grad=True)
        (x.cpu() * 3).sum().backward()
        assert x.grad is not None
        assert x.grad.device == DEVICE
        assert x.grad.tolist() == [3.0] * 4
        assert not kinds(device)


def test_a_model_trains_without_a_fault_or_a_stop() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2))
    x = torch.randn(6, 4)
    with simulated() as device:
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)
        with device.forbid_stops():
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), x[:, :2]).backward()
                optimizer.step()


@given(st.data())
def test_extents_overlap_where_a_byte_is_in_both(data: st.DataObject) -> None:
    storage = torch.zeros(64, dtype=torch.int16)

    def view() -> torch.Tensor:
        dims = data.draw(st.integers(0, 3))
        shape = [data.draw(st.integers(0, 3)) for _ in range(dims)]
        strides = [data.draw(st.integers(0, 6)) for _ in range(dims)]
        return storage.as_strided(shape, strides, data.draw(st.integers(0, 20)))

    one, other = view(), view()
    marked = []
    for each in (one, other):
        storage.zero_()
        each.fill_(1)
        marked.append(storage.clone().bool())
    assert Extent.of(one).overlaps(Extent.of(other)) == bool((marked[0] & marked[1]).any())
    if Extent.of(one).covers(Extent.of(other)):
        assert bool((marked[0] | ~marked[1]).all())


def test_a_backward_runs_in_a_second_thread_on_the_stream_that_is_current() -> None:
    threads, lines = [], []

    class Hooked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            threads.append(threading.current_thread())
            lines.append((device.current, device.host))
            return gradient * 2

    with simulated() as device:
        x, side = torch.ones(4, requires_grad=True), WorkLine("side")
        side.wait_for(device.current)
        with device.use(side):
            Hooked.apply(x).sum().backward()
        device.current.wait_for(side)
        assert x.grad is not None
        assert x.grad.tolist() == [2.0] * 4
        (thread,), ((line, host),) = threads, lines
        assert thread is not threading.current_thread()
        assert line is side
        assert host is not device.host
        x.register_hook(lambda _: 1 / 0)
        loss = (x * 2).sum()
        with pytest.raises(ZeroDivisionError):
            loss.backward()
