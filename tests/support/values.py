"""Comparison of values that lie on the host with those of a run's device."""

from __future__ import annotations

import functools

import torch

assert_close = functools.partial(torch.testing.assert_close, check_device=False)
"""`torch.testing.assert_close`, wherever the two lie."""


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare two tensors, on the host where they do not lie on the same device."""
    if one.device != other.device:
        one, other = one.cpu(), other.cpu()
    return torch.equal(one, other)
