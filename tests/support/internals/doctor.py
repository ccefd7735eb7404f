"""Names inside of `meshwright.doctor`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.doctor": "calibration, collectives",
        "meshwright.doctor.calibration": "rates",
        "meshwright.doctor.collectives": "findings_of_gpus, medians_on_device",
        "meshwright.doctor.survey": "devices, gloo_interface, nccl_interface, way_out",
        "meshwright.doctor.machine": "Gpu, Interface, Machine",
    }
)
