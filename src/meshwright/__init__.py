"""Trains PyTorch models on several processes and reproduces the numbers of one process.

Public names are imported on first use, so the parts that need no torch start without it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.comm import connect
    from meshwright.composition import parallelize
    from meshwright.data_parallel import (
        DistributedDataParallel,
        flat_groups,
        fully_shard,
        own_matrices,
        replicate,
    )
    from meshwright.errors import (
        CheckpointClaimedError,
        CheckpointDamagedError,
        CheckpointError,
        CheckpointMismatchError,
        CheckpointWriteError,
        CollectiveMismatchError,
        CollectiveTimeoutError,
        CommunicationError,
        InternalError,
        LaunchError,
        LayoutError,
        MeshwrightError,
        NonFiniteError,
        ParityError,
        PipelinePeerError,
        PipeliningShapeError,
        PlanError,
        RankFailedError,
        ScheduleError,
        TransferError,
    )
    from meshwright.fsdp import FullyShardedDataParallel
    from meshwright.gradients import clip_grad_norm_, declare_element_wise
    from meshwright.launching.pool import launch
    from meshwright.mesh import init_device_mesh
    from meshwright.pipelining import pipeline
    from meshwright.plan import Plan
    from meshwright.tensor_parallel import parallelize_module

__version__ = "0.1.0"

__all__ = [
    "CheckpointClaimedError",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointWriteError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CommunicationError",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "InternalError",
    "LaunchError",
    "LayoutError",
    "MeshwrightError",
    "NonFiniteError",
    "ParityError",
    "PipelinePeerError",
    "PipeliningShapeError",
    "Plan",
    "PlanError",
    "RankFailedError",
    "ScheduleError",
    "TransferError",
    "__version__",
    "clip_grad_norm_",
    "connect",
    "declare_element_wise",
    "flat_groups",
    "fully_shard",
    "init_device_mesh",
    "launch",
    "own_matrices",
    "parallelize",
    "parallelize_module",
    "pipeline",
    "replicate",
]

_HOME = MappingProxyType(
    {
        "DistributedDataParallel": "data_parallel",
        "FullyShardedDataParallel": "fsdp",
        "Plan": "plan",
        "clip_grad_norm_": "gradients",
        "connect": "comm",
        "declare_element_wise": "gradients",
        "flat_groups": "data_parallel",
        "fully_shard": "data_parallel",
        "init_device_mesh": "mesh",
        "launch": "launching.pool",
        "own_matrices": "data_parallel",
        "parallelize": "composition",
        "parallelize_module": "tensor_parallel",
        "pipeline": "pipelining",
        "replicate": "data_parallel",
    }
)


def __getattr__(name: str) -> object:
    if name in __all__:
        value = getattr(import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)
        globals()[name] = value
        return value
    # A submodule. `import_module` binds it here, so this runs once for each.
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    own = (name for name in globals() if name.startswith("__"))
    modules = (found.name for found in iter_modules(__path__) if found.name != "__main__")
    return sorted({*own, *__all__, *modules})
