"""Which parameters go into which bucket."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.gradients import NonFiniteValues
from support.internals.data_parallel import Bucket, GradientSlot, plan_buckets


def slot(index: int, numel: int, dtype: torch.dtype = torch.float32) -> GradientSlot:
    return GradientSlot(index=index, name=f"p{index}", shape=(numel,), dtype=dtype)


def members(slots: list[GradientSlot], first: int, cap: int) -> list[list[int]]:
    layouts = plan_buckets(slots, first_bytes=first, cap_bytes=cap)
    assert [layout.index for layout in layouts] == list(range(len(layouts)))
    return [[s.index for s in layout.slots] for layout in layouts]


def test_last_parameters_first_and_first_bucket_small() -> None:
    slots = [slot(i, 10) for i in range(8)]
    assert members(slots, 80, 120) == [[7, 6], [5, 4, 3], [2, 1, 0]]


def test_a_large_gradient_closes_its_bucket() -> None:
    slots = [slot(0, 10), slot(1, 1000), slot(2, 10)]
    assert members(slots, 40, 400) == [[2], [1], [0]]


def test_dtypes_do_not_mix() -> None:
    slots = [slot(i, 10, torch.float32 if i % 2 else torch.bfloat16) for i in range(6)]
    assert members(slots, 10**6, 10**6) == [[5, 3, 1], [4, 2, 0]]


@given(st.lists(st.integers(0, 60), max_size=30), st.integers(1, 200), st.integers(1, 400))
def test_every_parameter_has_one_place(sizes: list[int], first: int, cap: int) -> None:
    slots = [slot(i, n) for i, n in enumerate(sizes)]
    layouts = plan_buckets(slots, first_bytes=first, cap_bytes=cap)
    assert sorted(s.index for x in layouts for s in x.slots) == list(range(len(sizes)))
    for layout in layouts:
        assert layout.numel == sum(s.shape[0] for s in layout.slots) + len(layout.slots)
        assert layout.bytes == 4 * layout.numel


def bucket_of(parameters: list[torch.nn.Parameter], dtype: torch.dtype) -> Bucket:
    slots = [
        GradientSlot(index=i, name=f"p{i}", shape=tuple(p.shape), dtype=dtype)
        for i, p in enumerate(parameters)
    ]
    (layout,) = plan_buckets(slots, first_bytes=10**9, cap_bytes=10**9)
    held = [parameters[s.index] for s in layout.slots]
    buffer = torch.full((layout.numel,), 7.0, dtype=dtype)
    return Bucket(layout, held, buffer, is_gradient_view=False)


def test_fill_scales_and_counts() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    parameters[0].grad, parameters[2].grad = torch.ones(3), torch.full((3,), 4.0)
    bucket = bucket_of(parameters, torch.float32)
    bucket.fill(0.5)
    assert bucket.buffer.tolist() == [2, 2, 2, 0, 0, 0, 0.5, 0.5, 0.5, 1, 0, 1]
    assert torch.equal(parameters[0].grad, torch.ones(3)), "the gradient itself is not touched"


def test_a_narrow_reduction_scales_before_the_cast() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 1e6)
    bucket = bucket_of([parameter], torch.float16)
    bucket.fill(1e-3)
    torch.testing.assert_close(bucket.views[0], torch.full((4,), 1e3, dtype=torch.float16))


def test_a_wide_reduction_scales_after_the_cast() -> None:
    parameter = torch.nn.Parameter(torch.zeros(20000, dtype=torch.bfloat16))
    parameter.grad = torch.full((20000,), 1.0, dtype=torch.bfloat16)
    bucket = bucket_of([parameter], torch.float32)
    bucket.fill(1 / 3)
    assert bucket.views[0][0].item() == torch.tensor(1 / 3).item()


def test_views_keep_the_parameters_strides() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    parameter.grad = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    bucket = bucket_of([parameter], torch.float32)
    bucket.fill(1.0)
    assert bucket.views[0].stride() == parameter.stride()
    assert torch.equal(bucket.views[0], parameter.grad)


def test_what_is_not_finite_is_named() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    bucket = bucket_of(parameters, torch.float32)
    bucket.fill(1.0)
    values = NonFiniteValues()
    bucket.look(values)
    assert values.names() == []
    parameters[1].grad[2] = torch.inf
    bucket.fill(1.0)
    bucket.look(values)
    assert values.names() == ["p1"]
    parameters[1].grad[2], parameters[2].grad[0] = 3e38, 3e38
    parameters[0].grad[0] = 3e38
    bucket.fill(1.0)
    values.clear()
    bucket.look(values)
    assert values.names() == []  # a sum that overflows is none of them
