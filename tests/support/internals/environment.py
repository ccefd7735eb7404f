"""Names inside of `meshwright.environment`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.environment": (
            "Cluster, LOCAL_NETWORK, cluster, first_host, is_launched, torchrun_variables"
        ),
    }
)
