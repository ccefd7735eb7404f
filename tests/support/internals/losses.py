"""Names inside of `meshwright.losses`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside({"meshwright.losses.linear": "LossOptions, Vocabulary, sum_and_count"})
