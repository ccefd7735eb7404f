"""Digests of tensors, where they lie."""

from __future__ import annotations

import pytest
import torch

from meshwright.gradients import digest_of_all, digests_of


def other_orders(values: torch.Tensor) -> list[torch.Tensor]:
    return [values.flip(0), values.roll(1), values.clone().index_fill_(0, torch.tensor(3), 9)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64])
def test_a_digest_depends_on_each_element_and_its_place(dtype: torch.dtype) -> None:
    values = torch.arange(20).to(dtype)
    for digest in (lambda tensor: digests_of([tensor])[0], lambda tensor: digest_of_all([tensor])):
        found = digest(values)
        assert found is not None
        assert digest(values.clone().view(4, 5)) == found
        assert all(digest(other) != found for other in other_orders(values))
