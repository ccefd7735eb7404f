"""Names of dtypes and what follows from those left out."""

from __future__ import annotations

from typing import get_args

from support.internals.precision import FloatName, Precision, dtype_bytes


def test_what_is_left_out_follows_the_parameters() -> None:
    assert Precision(parameters="bfloat16").resolved() == Precision(
        parameters="bfloat16", compute="bfloat16", reduce="bfloat16", optimizer="bfloat16"
    )
    mixed = Precision(compute="bfloat16", optimizer="float64").resolved()
    assert (mixed.compute, mixed.reduce, mixed.optimizer) == ("bfloat16", "float32", "float64")
    assert mixed.resolved() == mixed


def test_mixed_and_scaled() -> None:
    assert not Precision().is_mixed
    assert not Precision(compute="float32").is_mixed
    assert Precision(compute="bfloat16").is_mixed
    assert not Precision(compute="bfloat16").needs_loss_scaling
    assert Precision(compute="float16").needs_loss_scaling
    assert Precision(parameters="float16").needs_loss_scaling


def test_every_name_is_a_dtype() -> None:
    assert [dtype_bytes(name) for name in get_args(FloatName)] == [2, 2, 4, 8]
