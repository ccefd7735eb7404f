"""Bytes of tensors on their way into a file."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from meshwright.checkpoint import ShardedPiece
from meshwright.testing.simulated import simulated
from support.internals.checkpoint import byte_views, describe, marked
from support.internals.layout import Box


def test_the_next_tensor_of_a_device_is_copied_while_one_is_used() -> None:
    with simulated() as device:
        started: list[int] = []

        def made() -> Iterator[torch.Tensor]:
            for number in range(3):
                started.append(number)
                yield torch.full((4,), number, dtype=torch.uint8)

        views = byte_views(made())
        for number, ahead in ((0, 2), (1, 3), (2, 3)):
            assert bytes(next(views)) == bytes([number] * 4)
            assert len(started) == ahead
        assert [stop.what for stop in device.stops] == ["wait for an event"] * 3


def test_what_lies_on_the_host_is_not_copied() -> None:
    values = torch.arange(4, dtype=torch.uint8)
    (view,) = byte_views([values])
    values[0] = 7
    assert bytes(view) == b"\7\1\2\3"


def test_bytes_are_those_of_the_values_however_a_tensor_lies() -> None:
    complex_values = torch.tensor([1 + 2j, 3 - 4j])
    tensors = [
        torch.arange(6, dtype=torch.int16).view(2, 3).t(),
        torch.arange(8.0)[::2].requires_grad_(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor(5.0),
        complex_values.conj(),
        complex_values[:1].conj().imag,  # contiguous, and to be read with another sign
    ]
    for tensor, view in zip(tensors, byte_views(tensors), strict=True):
        plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        assert bytes(view) == bytes(plain.view(-1).view(torch.uint8).tolist())


def test_copies_that_differ_have_other_marks_however_they_lie() -> None:
    def marks(value: torch.Tensor | ShardedPiece) -> tuple[int, ...]:
        return marked(describe("t", value), value).marks

    plain = torch.arange(4096.0).view(64, 64)
    assert marks(plain) == marks(plain.clone()) != marks(plain + 1)
    assert marks(plain.t()) == marks(plain.t().clone()) != marks((plain + 1).t())
    late = torch.zeros(1 << 18)
    late[-1] = 1.0
    assert marks(late) != marks(torch.zeros(1 << 18))
    assert len(marks(torch.tensor(5.0))) == 1 and marks(torch.empty(0, 3)) == ()
    boxes = (Box((0,), (2,)), Box((4,), (0,)), Box((6,), (1,)))
    first, second = (
        marks(ShardedPiece(global_shape=(8,), boxes=boxes, tensor=torch.tensor([1.0, 2.0, last])))
        for last in (3.0, 4.0)
    )
    assert first[0] == second[0] and first[1] != second[1] and len(first) == 2
