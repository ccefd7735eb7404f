"""Names inside of `meshwright.fsdp`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.fsdp.building": "deferred_parameters, resolve_device_id",
        "meshwright.fsdp.checks": "check_devices, check_parameters, choose_device",
        "meshwright.fsdp.exposures.exposure": "write_back",
        "meshwright.fsdp.options": "CONFIGS, own_config, own_member",
        "meshwright.fsdp.traversal": "clean_name",
        "meshwright.fsdp.wrap": "_or_policy",
    }
)
