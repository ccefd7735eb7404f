"""Loads the harness where the package is used from its source tree without being installed."""

from __future__ import annotations

from importlib.metadata import entry_points

if not any(entry.value == "meshwright.testing.plugin" for entry in entry_points(group="pytest11")):
    pytest_plugins = ["meshwright.testing.plugin"]
