"""Memory that is kept from pass to pass, and left to whoever holds it."""

from __future__ import annotations

import torch

from support.internals.data_parallel import KeptMemory

CPU = torch.device("cpu")


def plain(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype)


def test_memory_is_used_again_unless_somebody_holds_it() -> None:
    memory = KeptMemory(6, torch.float64, plain)
    first = memory.tensor((2, 3), (1, 2), CPU)
    assert first is not None
    assert (first.shape, first.stride(), first.dtype) == ((2, 3), (1, 2), torch.float64)
    place = first.data_ptr()
    del first
    second = memory.tensor((6,), (1,), CPU)
    assert second is not None
    assert second.data_ptr() == place
    assert not second._is_view()
    part = second[2:].fill_(7)
    del second
    third = memory.tensor((6,), (1,), CPU)
    assert third is not None
    third.zero_()
    assert part.tolist() == [7] * 4


def test_memory_that_is_never_free_is_not_given() -> None:
    base = torch.empty(6)
    assert KeptMemory(6, torch.float32, lambda numel, dtype: base).tensor((6,), (1,), CPU) is None
