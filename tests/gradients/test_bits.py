"""Checksums of tensors, where they lie."""

from __future__ import annotations

import pytest
import torch

from meshwright.gradients import checksum
from support.internals.gradients import bits


def other_orders(values: torch.Tensor) -> list[torch.Tensor]:
    return [values.flip(0), values.roll(1), values.clone().index_fill_(0, torch.tensor(3), 9)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64])
def test_a_checksum_depends_on_each_element_and_its_place(dtype: torch.dtype) -> None:
    values = torch.arange(20).to(dtype)
    found = checksum(values).tolist()
    assert checksum(values.clone().view(4, 5)).tolist() == found
    assert all(checksum(other).tolist() != found for other in other_orders(values))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 20])
def test_a_checksum_in_parts_is_that_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    values = [torch.arange(size), torch.zeros(size), torch.tensor([0.0] * 8 + [1.0])[:size]]
    whole = [checksum(each).tolist() for each in values]
    monkeypatch.setattr(bits, "CHUNK", 7)
    assert [checksum(each).tolist() for each in values] == whole
