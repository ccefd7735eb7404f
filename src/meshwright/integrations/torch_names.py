"""Meshwright under the names of torch's modules, for programs whose imports cannot change.

::

    from meshwright.integrations import torch_names

    torch_names.install()
    import client  # its ``fully_shard`` is Meshwright's, whatever name it imports it by

`install` replaces each module of `BRIDGED` by a stand-in, in ``sys.modules`` and as an attribute of
its parent. Code loaded afterwards imports and constructs our classes and tests ``isinstance``
against them. Names that only torch has raise `ImportError` or `AttributeError`, so that nobody
mixes the two silently, and so do other modules inside those packages (see `Bridge.keeps_others`).

Torch's own code still gets torch's names: a stand-in looks at the calling frame. Code imported
before keeps what it has. `uninstall` restores the modules.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple


class Bridge(NamedTuple):
    """Our module that stands for one of torch's."""

    ours: str
    names: tuple[str, ...] | None = None
    """The names that it provides; by default all public ones."""
    keeps_others: bool = False
    """True where every other name is still torch's."""


_DDP = ("DistributedDataParallel",)

BRIDGED: Mapping[str, Bridge] = MappingProxyType(
    {
        "torch.distributed._composable": Bridge(
            "meshwright.data_parallel", ("replicate",), keeps_others=True
        ),
        "torch.distributed._composable.fsdp": Bridge("meshwright.fsdp"),
        "torch.distributed._composable.fsdp.fully_shard": Bridge("meshwright.fsdp"),
        "torch.distributed._composable.replicate": Bridge(
            "meshwright.data_parallel", ("replicate",)
        ),
        "torch.distributed._composable.replicate_with_fsdp": Bridge("meshwright.data_parallel", ()),
        "torch.distributed.fsdp": Bridge("meshwright.fsdp"),
        "torch.distributed.fsdp._fully_shard": Bridge("meshwright.fsdp"),
        "torch.distributed.fsdp._init_utils": Bridge("meshwright.fsdp"),
        "torch.distributed.fsdp._traversal_utils": Bridge("meshwright.fsdp"),
        "torch.distributed.fsdp.api": Bridge("meshwright.fsdp"),
        "torch.distributed.fsdp.fully_sharded_data_parallel": Bridge("meshwright.fsdp"),
        "torch.distributed.fsdp.sharded_grad_scaler": Bridge("meshwright.fsdp"),
        "torch.distributed.fsdp.wrap": Bridge("meshwright.fsdp.wrap"),
        "torch.distributed.pipelining": Bridge("meshwright.pipelining"),
        "torch.distributed.pipelining._utils": Bridge("meshwright.pipelining"),
        "torch.distributed.pipelining.microbatch": Bridge("meshwright.pipelining.microbatch"),
        "torch.distributed.pipelining.schedules": Bridge("meshwright.pipelining.schedules"),
        "torch.distributed.pipelining.stage": Bridge("meshwright.pipelining.stage"),
        "torch.distributed.tensor.parallel": Bridge("meshwright.tensor_parallel"),
        "torch.distributed.tensor.parallel.api": Bridge("meshwright.tensor_parallel"),
        "torch.distributed.tensor.parallel.loss": Bridge("meshwright.tensor_parallel"),
        "torch.distributed.tensor.parallel.style": Bridge("meshwright.tensor_parallel"),
        "torch.nn.parallel": Bridge("meshwright.data_parallel", _DDP, keeps_others=True),
        "torch.nn.parallel.distributed": Bridge("meshwright.data_parallel", _DDP),
    }
)
"""The bridge of each of torch's modules."""


class StandIn(ModuleType):
    """A module of torch whose names are ours, for all code but torch's own."""

    def __init__(self, real: ModuleType, bridge: Bridge | None) -> None:
        """Stand for ``real``; without a ``bridge``, only torch's own code gets its names."""
        super().__init__(real.__name__)
        self._meshwright_real = real
        self._meshwright_bridge = bridge
        self.__file__ = __file__  # shown in import errors
        if hasattr(real, "__path__"):
            keeps_others = bridge is not None and bridge.keeps_others
            self.__path__ = list(real.__path__) if keeps_others else []

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - an attribute of any module
        real, bridge = self._meshwright_real, self._meshwright_bridge
        asking = sys._getframe(1).f_globals.get("__name__") or ""
        if asking == "torch" or asking.startswith("torch."):
            return getattr(real, name)
        if bridge is not None and (name == "__all__" or not name.startswith("__")):
            ours = import_module(bridge.ours)
            names = ours.__all__ if bridge.names is None else bridge.names
            if name == "__all__":
                return list(getattr(real, name, names) if bridge.keeps_others else names)
            # A private name of torch's is provided where our module has the same.
            is_same = name.startswith("_") and bridge.names is None and hasattr(real, name)
            if name in names or (is_same and hasattr(ours, name)):
                return getattr(ours, name)
        inner = sys.modules.get(f"{self.__name__}.{name}")
        if type(inner) is StandIn:
            return inner
        if bridge is not None and bridge.keeps_others:
            return getattr(real, name)
        theirs = "nothing" if bridge is None else bridge.ours
        raise AttributeError(
            f"{self.__name__} has no {name!r} while the names of torch are meshwright's: {theirs} "
            f"stands for it. {__name__}.BRIDGED lists what there is; uninstall() there brings "
            "torch's back"
        )


def install() -> None:
    """Replace the modules of `BRIDGED` for code that is loaded from now on.

    Imports torch's modules of these names. A second call does nothing.
    """
    found: dict[str, ModuleType] = {}
    for name in BRIDGED:
        with contextlib.suppress(ModuleNotFoundError):  # another torch may lack it
            found[name] = import_module(name)
    whole = tuple(f"{name}." for name in found if not BRIDGED[name].keeps_others)
    found |= {name: module for name, module in sys.modules.items() if name.startswith(whole)}
    for name, real in found.items():
        if type(real) is not StandIn:
            _put(name, real, StandIn(real, BRIDGED.get(name)))


def uninstall() -> None:
    """Restore the modules that `install` replaced. Does nothing without it."""
    for name, module in list(sys.modules.items()):
        if type(module) is StandIn:
            _put(name, module, module._meshwright_real)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """`install` for code that is loaded in the block; `uninstall` after it."""
    install()
    try:
        yield
    finally:
        uninstall()


def _put(name: str, before: ModuleType, module: ModuleType) -> None:
    """Replace ``before`` by ``module`` under ``name``."""
    sys.modules[name] = module
    around, _, own = name.rpartition(".")
    # Inside a bridged package nothing is set: a stand-in finds stand-ins within it in sys.modules,
    # and torch's code must still find torch's modules as attributes of the real package.
    if not around.startswith(tuple(BRIDGED)) and vars(sys.modules[around]).get(own) is before:
        setattr(sys.modules[around], own, module)
