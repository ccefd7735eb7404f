"""Device meshes: torch's own type and constructor, under the name Meshwright's functions expect."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
