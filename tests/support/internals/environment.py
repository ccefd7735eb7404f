"""Names inside of `meshwright.environment`."""

from __future__ import annotations

from support.internals import lookup

__getattr__ = lookup(
    {
        "meshwright.environment": (
            "Cluster, LOCAL_NETWORK, cluster, first_host, is_launched, torchrun_variables"
        ),
    }
)
