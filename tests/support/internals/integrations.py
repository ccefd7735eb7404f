"""Names inside of `meshwright.integrations`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.integrations": "accelerate, lightning, ray, torch_names, transformers",
        "meshwright.integrations.torch_names": "BRIDGED",
        "meshwright.integrations.trackers": "TRACKERS, Tracker, flat, tracker_of",
    }
)
