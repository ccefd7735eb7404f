"""Names inside of `meshwright.torch_internals`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.torch_internals": (
            "autograd, distributed, modules, simulation, tensors, tracing, trees"
        ),
        "meshwright.torch_internals.distributed": "default_store, living_groups, make_group",
        "meshwright.torch_internals.required": "required, variable_of",
    }
)
