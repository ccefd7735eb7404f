"""Names inside of `meshwright.gradients`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.gradients": "norm",
        "meshwright.gradients.optimizer_list": "OptimizerList, as_one",
    }
)
