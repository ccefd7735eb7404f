"""Names inside of `meshwright.integrations`."""

from __future__ import annotations

from support.internals import lookup

__getattr__ = lookup(
    {
        "meshwright.integrations": "accelerate, lightning, ray, torch_names, transformers",
        "meshwright.integrations.torch_names": "BRIDGED",
        "meshwright.integrations.trackers": "TRACKERS, Tracker, flat, tracker_of",
    }
)
