"""Memory that comes and goes: lines, and the pages that move between them."""

from __future__ import annotations

import itertools
import resource
import threading

import pytest
import torch

from support.internals.comm import BLOCK, LARGE, PROCESS, PagePool, pages
from support.internals.comm import reusable_storage_line_of as line_of

CPU = torch.device("cpu")


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


@pytest.mark.parametrize("nbytes", [0, 4, LARGE - 4, LARGE, 3 * BLOCK + 4])
def test_views_of_a_line_stay_valid(nbytes: int) -> None:
    line = line_of(nbytes // 4, torch.float32, CPU)
    view, half = line.tensor[1:].detach(), line.tensor[: nbytes // 8]
    for value in (1.0, 2.0):
        line.restore()
        assert not line.is_free
        line.tensor.fill_(value)
        assert view.sum().item() == value * view.numel()
        assert half.eq(value).all()
        line.restore()  # it keeps what it holds
        assert line.tensor.eq(value).all()
        start, empty = line.tensor.data_ptr(), PROCESS.pages.empty_windows
        assert start not in empty
        line.free()
        assert line.is_free
        assert (start in empty) == (nbytes >= LARGE)
        line.free()


def test_autograd_finds_what_it_saved_of_a_line_again() -> None:
    line = line_of(1024 * 1024, torch.float32, CPU)
    weight = torch.nn.Parameter(line.tensor.view(1024, 1024).data)
    torch.manual_seed(0)
    x = torch.randn(2, 1024, requires_grad=True)
    values = torch.randint(-9, 9, (1024, 1024)).float()
    with torch.no_grad():
        weight.data.copy_(values)
    y = torch.nn.functional.linear(x, weight)
    line.free()
    line.restore()
    line.tensor.copy_(values.view(-1))
    y.sum().backward()
    assert x.grad is not None and weight.grad is not None
    torch.testing.assert_close(x.grad, values.sum(0).expand(2, -1))


def test_lines_in_turn_use_the_same_pages() -> None:
    sizes = [5 * BLOCK, 2 * BLOCK - 4096, 3 * BLOCK]
    lines = [line_of(size, torch.uint8, CPU) for size in sizes]
    for line in lines:
        line.free()
    pool = PROCESS.pages
    before, at_most = pool.nbytes, faults()
    for round_ in range(20):
        for line in lines:
            line.restore()
            if round_ == 1:
                at_most = faults()
            line.tensor.fill_(round_)
            line.free()
        for line in lines[1:]:  # both in what the first has left
            line.restore()
            line.tensor.fill_(round_)
        for line in lines[1:]:
            line.free()
    assert faults() - at_most < 16
    assert pool.nbytes == before
    lines[0].restore(), lines[1].restore()
    lines[0].tensor.fill_(1), lines[1].tensor.fill_(2)
    assert lines[0].tensor.eq(1).all() and lines[1].tensor.eq(2).all()


def test_a_pool_holds_what_was_used_at_one_time_and_no_longer_than_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = PagePool()
    if not pool.is_available:
        pytest.skip("pages cannot be moved here")
    windows = [pool.open(BLOCK * (n + 1)) for n in range(4)]
    for _ in range(3):
        for window in reversed(windows):  # one at a time
            pool.fill(window)
            pool.empty(window)
            pool.empty(window)
    assert pool.nbytes == 4 * BLOCK
    for window in windows:
        pool.fill(window)
        pool.fill(window)
    assert pool.nbytes == 0
    homes = sorted((extent.home, extent.nbytes) for w in windows for extent in w.extents)
    assert sum(nbytes for _, nbytes in homes) == 10 * BLOCK
    assert all(a + nbytes <= b for (a, nbytes), (b, _) in itertools.pairwise(homes))
    for window in windows[1:]:
        pool.empty(window)
    assert pool.nbytes == 9 * BLOCK
    now = pages.time.monotonic()
    monkeypatch.setattr(pages.time, "monotonic", lambda: now + pages.KEPT_SECONDS + 1)
    pool.empty(windows[0])
    assert pool.nbytes == BLOCK
    for window in windows:
        pool.close(window)
    assert pool.nbytes == 0


def test_lines_that_are_dropped_give_their_pages_back() -> None:
    pool = PROCESS.pages
    kept = line_of(BLOCK, torch.uint8, CPU)
    line = line_of(7 * BLOCK, torch.uint8, CPU)
    view = line.tensor[:1]
    line.tensor.fill_(7)
    del line
    before = pool.nbytes
    assert view.item() == 7  # whoever holds a view holds the memory
    del view
    assert pool.nbytes == before + 7 * BLOCK
    del kept


def test_a_line_that_the_collector_drops_while_pages_move_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = PagePool()
    if not pool.is_available:
        pytest.skip("pages cannot be moved here")
    first, second, dropped = (pool.open(n * BLOCK) for n in (4, 1, 2))
    for window in (first, dropped):
        pool.fill(window)
    pool.empty(first)  # four blocks at home, two in the window that is dropped
    make, to_drop = pages._Extent, [dropped]

    def extent(*args: float) -> object:
        while to_drop:
            pool.close(to_drop.pop())
            # Its pages come home only when those that are on their way have arrived.
            assert dropped.extents
        return make(*args)

    monkeypatch.setattr(pages, "_Extent", extent)
    pool.fill(second)
    assert not to_drop
    assert not dropped.extents
    assert pool.nbytes == 5 * BLOCK
    for window in (first, second):
        pool.close(window)
    assert pool.nbytes == 0


def test_threads_do_not_disturb_each_other() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        line = line_of(2 * BLOCK, torch.uint8, CPU)
        for _ in range(50):
            line.restore()
            line.tensor.fill_(number)
            if not line.tensor.eq(number).all():
                wrong.append(number)
            line.free()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
