"""Options of `FullyShardedDataParallel`: strategies, precision, kinds of state dicts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from meshwright.data_parallel.shards.unit import Unit
from meshwright.torch_internals.modules import AnyBatchNorm


class ShardingStrategy(Enum):
    """What is sharded over the ranks, and how long parameters stay unsharded."""

    FULL_SHARD = 1
    """Parameters, gradients and optimizer; parameters are whole only while they compute."""
    SHARD_GRAD_OP = 2
    """As `FULL_SHARD`, but parameters stay whole from the forward to the end of the backward."""
    NO_SHARD = 3
    """Nothing: every rank holds all, gradients are all-reduced."""
    HYBRID_SHARD = 4
    """`FULL_SHARD` within a node, equal copies over the nodes."""
    _HYBRID_SHARD_ZERO2 = 5
    """`SHARD_GRAD_OP` within a node, equal copies over the nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRow:
    """A strategy as the engine sees it."""

    is_sharded: bool = True
    is_hybrid: bool = False
    keeps_full: bool = False
    """True when parameters stay whole after the forward, until the backward has used them."""


_ROWS = MappingProxyType(
    {
        ShardingStrategy.FULL_SHARD: StrategyRow(),
        ShardingStrategy.SHARD_GRAD_OP: StrategyRow(keeps_full=True),
        ShardingStrategy.NO_SHARD: StrategyRow(is_sharded=False, keeps_full=True),
        ShardingStrategy.HYBRID_SHARD: StrategyRow(is_hybrid=True),
        ShardingStrategy._HYBRID_SHARD_ZERO2: StrategyRow(is_hybrid=True, keeps_full=True),
    }
)

HYBRID_SHARDING_STRATEGIES = tuple(s for s, row in _ROWS.items() if row.is_hybrid)
"""The strategies that shard within a node and replicate over the nodes."""


def row_of(strategy: ShardingStrategy) -> StrategyRow:
    """The engine's settings for ``strategy``."""
    return _ROWS[strategy]


class BackwardPrefetch(Enum):
    """When the backward gathers the parameters that it needs next."""

    BACKWARD_PRE = 1
    """Before the gradients of the current unit are computed: most overlap, most memory."""
    BACKWARD_POST = 2
    """After they are computed: less overlap, less memory."""


PREFETCHES: Mapping[BackwardPrefetch | None, Literal["before", "after"] | None] = MappingProxyType(
    {BackwardPrefetch.BACKWARD_PRE: "before", BackwardPrefetch.BACKWARD_POST: "after", None: None}
)
"""Their meaning for the engine."""


class TrainingState(Enum):
    """The values of a unit's ``training_state``."""

    IDLE = 1
    FORWARD_BACKWARD = 2
    SUMMON_FULL_PARAMS = 3


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of computation, of the reduction and of buffers; None does not change them.

    Shards stay in the dtype of the parameters. Floating-point inputs of the root are cast unless
    ``cast_root_forward_inputs`` is off, those of every unit if ``cast_forward_inputs`` is on.
    Complex parameters, buffers and inputs keep their dtypes.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    """That of the computation when None."""
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (AnyBatchNorm,)
    """Modules of these classes become units of their own, in full precision."""


@dataclass
class CPUOffload:
    """Whether shards, gradients and optimizer state are on the CPU."""

    offload_params: bool = False


class StateDictType(Enum):
    """The kind of dict that ``state_dict`` returns."""

    FULL_STATE_DICT = 1
    """Whole tensors under the names of the module before it was wrapped."""
    LOCAL_STATE_DICT = 2
    """This rank's flat shard of each unit."""
    SHARDED_STATE_DICT = 3
    """The names of the module; each value knows the whole shape and holds this rank's part."""


@dataclass
class StateDictConfig:
    """The settings of a state dict; one class for each `StateDictType`."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """For `StateDictType.FULL_STATE_DICT`."""

    rank0_only: bool = False
    """True when ranks other than the first get an empty dict."""


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """For `StateDictType.LOCAL_STATE_DICT`."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """For `StateDictType.SHARDED_STATE_DICT`."""

    _use_dtensor: bool = False
    """True when values are DTensors, as they are when a mesh was given."""


@dataclass
class OptimStateDictConfig:
    """The settings of an optimizer's state dict; one class for each `StateDictType`."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """For `StateDictType.FULL_STATE_DICT`."""

    rank0_only: bool = False
    """True when ranks other than the first get an empty dict."""


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """For `StateDictType.LOCAL_STATE_DICT`."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """For `StateDictType.SHARDED_STATE_DICT`."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """The kind of state dict that a module returns, and its settings."""

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)

    @property
    def shares(self) -> bool:
        """True when parts share the memory of the model and the optimizer instead of copying it."""
        return isinstance(self, SharedParts)


@dataclass
class SharedParts(StateDictSettings):
    """Settings by which checkpoints read and write the local parts of a rank."""

    state_dict_type: StateDictType = StateDictType.SHARDED_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=ShardedStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(
        default_factory=lambda: ShardedOptimStateDictConfig(offload_to_cpu=False)
    )


CONFIGS = MappingProxyType(
    {
        StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
        StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
        StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    }
)
"""For each kind the class of its configuration, and that of an optimizer's."""


class OptimStateKeyType(Enum):
    """The keys of an optimizer's state: names or positions of parameters."""

    PARAM_NAME = 1
    PARAM_ID = 2


E = TypeVar("E", bound=Enum)


def own_member(kind: type[E], value: object) -> E:
    """Return the member of ``kind`` for ``value``: a member, or one of torch's enum of that name.

    Raises TypeError for anything else.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, Enum) and type(value).__name__ == kind.__name__:
        found = kind.__members__.get(value.name)
        if found is not None:
            return found
    names = ", ".join(kind.__members__)
    raise TypeError(f"expected a {kind.__name__} ({names}), found {value!r}")


def own_config(kind: type[Any], value: Any) -> Any:  # noqa: ANN401 - anything may have been given
    """Convert ``value`` to a ``kind`` if its dataclass has that name; else return it unchanged."""
    if isinstance(value, kind) or type(value).__name__ != kind.__name__:
        return value
    return kind(**{field.name: getattr(value, field.name) for field in fields(kind)})


class PrecisionMode:
    """Switches the dtypes of a unit and of its buffers between mixed and full precision."""

    def __init__(self, precision: MixedPrecision, unit: Unit | None) -> None:
        self.now = precision
        """The precision that inputs are cast by."""
        self._mixed = precision
        self._full = replace(precision, param_dtype=None, reduce_dtype=None, buffer_dtype=None)
        self._unit = unit
        self._casts_buffers = precision.buffer_dtype is not None
        self._buffers: dict[tuple[nn.Module, str], torch.dtype] = {}
        """The buffers that have been cast, with their dtypes before."""
        dtypes = (precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype)
        self.is_mixed = any(dtype is not None for dtype in dtypes)
        """True when there are two modes at all."""

    def enter(self, modules: Iterable[nn.Module], *, is_full: bool) -> None:
        """Switch to full precision, or to mixed precision, from this forward on."""
        wanted = self._full if is_full else self._mixed
        if self._casts_buffers and not is_full:
            self._cast_buffers(modules)
            self._casts_buffers = False
        if wanted is self.now:
            return
        self.now = wanted
        if is_full:
            self._restore_buffers()
        if self._unit is not None:
            self._unit.reshard()
            for group in self._unit.groups:
                group.compute_in(wanted.param_dtype, wanted.reduce_dtype)

    def _cast_buffers(self, modules: Iterable[nn.Module]) -> None:
        dtype: Any = self._mixed.buffer_dtype
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    self._buffers[module, name] = buffer.dtype
                    module._buffers[name] = buffer.to(dtype)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Show the buffers in their own dtypes inside the block, as state dicts hold them."""
        cast = {place: place[0]._buffers.get(place[1]) for place in self._buffers}
        for (module, name), dtype in self._buffers.items():
            buffer = cast[module, name]
            if buffer is not None:
                module._buffers[name] = buffer.to(dtype)
        try:
            yield
        finally:
            for (module, name), buffer in cast.items():
                if buffer is not None:
                    module._buffers[name] = buffer

    def _restore_buffers(self) -> None:
        for (module, name), dtype in self._buffers.items():
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = buffer.to(dtype)
        self._buffers.clear()
        self._casts_buffers = self._mixed.buffer_dtype is not None
