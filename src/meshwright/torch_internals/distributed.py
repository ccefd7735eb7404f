"""Private parts of process groups, backends, meshes and DTensors. For the package `comm` only."""

from __future__ import annotations

import contextlib
import importlib
import json
import threading
import time
from collections.abc import Container, Iterable, Iterator
from functools import cache, partial
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as bindings
from torch._C._distributed_c10d import Work

# Imported for its effect, too: c10d's operators for graphs exist from then on.
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.tensor import DTensor, placement_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from meshwright.torch_internals.required import required

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

__all__ = [
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "ShardedTensor",
    "StridedShard",
    "TensorMeta",
    "TensorShard",
    "Work",
]

_C10D = "torch.distributed.distributed_c10d"
default_store = required(f"{_C10D}._get_default_store", "reports failures on the store of a run")
default_group = required(f"{_C10D}._get_default_group", "finds the group of all ranks")
_make_group = required(f"{_C10D}._new_process_group_helper", "makes groups by their own ranks")
_local_results = required(
    "torch.distributed.tensor.DTensor._op_dispatcher._dispatch_get_local_results_slow_path",
    "sees what DTensors are gathered for",
)
_MOVES = "differentiates moves of DTensors as often as is asked"
Redistribute = required("torch.distributed.tensor._redistribute.Redistribute", _MOVES)
ToTorchTensor = required("torch.distributed.tensor._api._ToTorchTensor", _MOVES)
FromTorchTensor = required("torch.distributed.tensor._api._FromTorchTensor", _MOVES)
global_tensor_info = required(
    "torch.distributed.tensor._utils.compute_global_tensor_info",
    "knows the strides of a DTensor from those of a part",
)
graph_operators = required("torch.ops._c10d_functional", "communicates inside of graphs")
"""c10d's operators that graphs may hold."""
mesh_resources = _mesh_resources
_STRATEGIES = "torch.distributed.tensor._ops.single_dim_strategy"
_FILL = "_fill_single_dim_strategy_placeholders"
_OFFSETS: Any = getattr(placement_types, "_StridedShardOffsetMode", None)

all_gather_single_of = attrgetter("_allgather_base")
"""The method of a group that gathers equal shares: output, tensor, options; it returns the work."""
reduce_scatter_single_of = attrgetter("_reduce_scatter_base")
"""The method that reduces to equal shares: output, tensor, options; it returns the work."""
group_of = attrgetter("_process_group")
"""The group of a ShardedTensor's ranks."""
spec_of = attrgetter("_spec")
device_types_of = attrgetter("_device_types")
"""The devices that a process group has a backend for."""
timeout_of = attrgetter("_timeout")
"""The timeout that options of a backend hold."""


FORMER_METHODS = MappingProxyType(
    {"_allgather_base": "all_gather_single", "_reduce_scatter_base": "reduce_scatter_single"}
)
"""Methods of groups: their names up to torch 2.12, with today's names."""


def living_groups() -> Container[Any]:
    """Return c10d's own table of the existing groups; it stays up to date."""
    return required(f"{_C10D}._world", "sees groups that were destroyed").pg_map


def make_group(name: str, ranks: Sequence[int], timeout: timedelta, backend: str = "") -> Any:  # noqa: ANN401
    """Make a process group of ``ranks`` (of the world, ascending); only these ranks call it.

    They pass the same ``name``; ``backend`` defaults to the default group's. torch would name such
    a group by the number of groups in the process, which differs between ranks; and it would split
    a default group that is bound to a device, which all its ranks would have to enter.
    """
    known, default = required(f"{_C10D}._world", "notes the ranks of a group"), default_group()
    usual, store = known.pg_map[default]
    with _unbound(default):
        group, _ = _make_group(
            len(ranks),
            ranks.index(default.rank()),
            list(ranks),
            torch.distributed.Backend(backend) if backend else usual,
            store,
            name,
            timeout=timeout,
            group_desc=name,
        )
    known.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group


@contextlib.contextmanager
def _unbound(group: Any) -> Iterator[None]:  # noqa: ANN401
    """Hide in the block that ``group`` is bound to a device."""
    bound, bind = group.bound_device_id, partial(setattr, group, "bound_device_id")
    bind(None)
    try:
        yield
    finally:
        bind(bound)


def set_spec(tensor: DTensor, spec: DTensorSpec) -> None:
    """Replace mesh and placements of a DTensor; this rank's part stays the same."""
    tensor._spec = spec


class _Handlers(dict[Any, Any]):
    """torch's table of functions that replace operators on DTensors.

    torch's `loss_parallel` adds handlers by `update` and pops them at its end: `pop` then restores
    those that were set one by one. These also go into torch's own table, which others may hold.
    """

    def __init__(self, table: dict[Any, Any]) -> None:
        super().__init__(table)
        self._table = table
        self._own = dict(table)

    def __setitem__(self, op: Any, function: Any) -> None:  # noqa: ANN401
        super().__setitem__(op, function)
        self._table[op] = self._own[op] = function

    def setdefault(self, op: Any, function: Any = None) -> Any:  # noqa: ANN401
        if op not in self:
            self[op] = function
        return self[op]

    def pop(self, op: Any, *default: Any) -> Any:  # noqa: ANN401
        found = super().pop(op, *default)
        if op in self._own:
            super().__setitem__(op, self._own[op])
        return found


def dtensor_handlers() -> dict[Any, Any]:
    """Return the table of functions that replace operators on DTensors; it may be written to."""
    dispatcher = DTensor._op_dispatcher
    if not isinstance(dispatcher._custom_op_handlers, _Handlers):
        vars(dispatcher)["_custom_op_handlers"] = _Handlers(dispatcher._custom_op_handlers)
    return cast("dict[Any, Any]", dispatcher._custom_op_handlers)


def without_handler(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Call an operator on DTensors as torch would without the function that replaces it."""
    handlers = dtensor_handlers()
    # Another thread that calls it meanwhile has torch's rule, and may have taken the function away.
    handler = dict.pop(handlers, op, None)
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            dict.__setitem__(handlers, op, handler)


def on_gathered_views(
    seen: Callable[[Any, DTensor, torch.Tensor, DTensorSpec], None],
) -> None:
    """Call ``seen`` after each operator that returned a view of a DTensor it had to gather first.

    ``seen`` gets the operator, the DTensor, this rank's part of the copy, and the copy's spec.
    """
    before = _local_results

    def results(op: Any, args: tuple[Any, ...], op_info: Any) -> object:  # noqa: ANN401
        found = before(op, args, op_info)
        gathered = op_info.output_sharding.redistribute_schema
        first = op._schema.arguments[0].alias_info
        if gathered is not None and first is not None and not first.is_write:
            seen(op, args[0], op_info.local_args[0], gathered.args_schema[0])
        return found

    vars(DTensor._op_dispatcher)["_dispatch_get_local_results_slow_path"] = results


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Join slices of one mesh into one mesh with the dims of all."""
    return DeviceMesh._concatenate(list(meshes))


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Flatten all dims of ``mesh`` into one dim, ``name``. Collective."""
    return mesh._flatten(name)


def root_mesh(mesh: Any) -> Any:  # noqa: ANN401 - also a stand-in for a mesh
    """Return the mesh that ``mesh`` was sliced from, or ``mesh`` itself."""
    return getattr(mesh, "_get_root_mesh", lambda: mesh)()


def asks_for_size_alone(*mode: object, **modes: object) -> bool:
    """Check whether torch asks a strided placement for the size of a part only, not for offsets.

    ``mode`` and ``modes`` say which offsets it wants: until torch 2.12 whether only the first one,
    which it then ignores; from 2.13 on one of three modes.
    """
    asked = [*mode, *modes.values()]
    if _OFFSETS is None:
        return asked[:1] != [False]
    return asked[:1] == [_OFFSETS.NONE]


@cache
def keep_strided_classes() -> None:
    """Make operators on DTensors keep the class of the strided placements in their inputs.

    torch rebuilds these as its own class, from 2.14 on even where a tensor is merely detached.
    """
    fill = required(f"{_STRATEGIES}.{_FILL}", "keeps what is known of strided placements")

    def filled(given: Iterable[Any], *arguments: Any) -> list[list[Any]]:
        own = {p.split_factor: type(p) for p in given if isinstance(p, StridedShard)}

        def kept(placement: Any) -> Any:  # noqa: ANN401
            if type(placement) is not StridedShard:
                return placement
            factor = placement.split_factor
            return own.get(factor, StridedShard)(placement.dim, split_factor=factor)

        return [list(map(kept, row)) for row in fill(given, *arguments)]

    setattr(importlib.import_module(_STRATEGIES), _FILL, filled)


def backend_of(group: Any, device: torch.device) -> Any:  # noqa: ANN401
    """Return the backend by which a process group moves tensors of ``device``."""
    return group._get_backend(device)


def set_timeout(backend: Any, timeout: timedelta) -> None:  # noqa: ANN401
    """Change the timeout of a backend."""
    backend._set_default_timeout(timeout)


def can_abort(group: Any, device: torch.device) -> bool:  # noqa: ANN401
    """Check whether operations of a group on ``device`` can be aborted with other groups'."""
    types = {each.type for each in device_types_of(group)} - {"cpu"}
    return device.type in types and hasattr(backend_of(group, device), "_group_start")


def groups_to_abort() -> list[tuple[Any, torch.device]]:
    """List the existing groups that can be aborted, each with its kind of device."""
    groups = list(required(f"{_C10D}._world", "aborts groups").pg_map)
    pairs = [(group, device) for group in groups for device in device_types_of(group)]
    return [(group, device) for group, device in pairs if can_abort(group, device)]


def abort_together(groups: Sequence[tuple[Any, torch.device]], seconds: float) -> None:
    """Abort ``groups`` at once, within ``seconds``: one alone may wait for another's operation."""
    backends = [backend_of(group, device) for group, device in groups]
    threads = [
        threading.Thread(target=backend.abort, name="meshwright-abort", daemon=True)
        for backend in backends
    ]
    backends[0]._group_start()
    try:
        for thread in threads:
            thread.start()
        until = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
    finally:
        backends[0]._group_end()


def recorded_operations(limit: int) -> list[str]:
    """List operations in flight from c10d's flight recorder, at most ``limit`` of them.

    Empty if it is off, or if this torch has none.
    """
    dump = getattr(bindings, "_dump_fr_trace_json", None)
    if dump is None:
        return []
    said = json.loads(dump(includeCollectives=True, onlyActive=True))
    entries = [entry for entry in said.get("entries", ()) if not entry.get("retired")]
    return [
        f"{entry['profiling_name']} #{entry['op_id']} of group {'/'.join(entry['process_group'])}: "
        f"{entry['state']}"
        for entry in entries[:limit]
    ]


def add_backend(group: Any, device: torch.device, kind: Any, backend: Any) -> None:  # noqa: ANN401
    """Set ``backend`` as the backend of ``group`` for ``device``, and as its default."""
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)


@contextlib.contextmanager
def coalesced(group: Any, device: torch.device) -> Iterator[list[Work]]:  # noqa: ANN401
    """Launch the operations of the block as one; the list gets their work when the block ends."""
    works: list[Work] = []
    group._start_coalescing(device)
    try:
        yield works
    finally:
        work = group._end_coalescing(device)
        if work is not None:
            works.append(work)


def number_operations(backend: Any) -> None:  # noqa: ANN401
    """Number the operations of ``backend`` from the same number on all ranks. Collective."""
    backend._set_sequence_number_for_group()


def fake_backend(rank: int, size: int) -> Any:  # noqa: ANN401
    """Make a backend that sends nothing."""
    return bindings.FakeProcessGroup._create_internal(rank, size)


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Be ``rank`` of a world of backend ``fake`` in the block: nobody sends, waits end at once."""
    why = "runs one rank of many"
    # DTensors take meshes of the same ranks for equal, whatever their groups are.
    forget = required("torch.distributed.tensor.debug._clear_sharding_prop_cache", why)
    store = required("torch.testing._internal.distributed.fake_pg.FakeStore", why)()
    forget()
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget()


@contextlib.contextmanager
def named_group(name: str, group: Any) -> Iterator[None]:  # noqa: ANN401
    """Register ``group`` with operators of graphs, under ``name``, within the block."""
    bindings._register_process_group(name, group)  # pyrefly: ignore[bad-argument-type]
    try:
        yield
    finally:
        bindings._unregister_process_group(name)  # pyrefly: ignore[bad-argument-type]


def known_backends() -> dict[str, Any]:
    """Look up backends that were registered outside of torch, by upper-case names."""
    return torch.distributed.Backend._plugins


_FUNCTIONAL = MappingProxyType(
    {
        "all_reduce": ("allreduce", (0, 1)),
        "all_reduce_": ("allreduce", (0, 1)),
        "all_reduce_coalesced": ("allreduce", (0, 1)),
        "all_reduce_coalesced_": ("allreduce", (0, 1)),
        "broadcast": ("broadcast", (0, 1)),
        "broadcast_": ("broadcast", (0, 1)),
        "all_gather_into_tensor": ("all_gather_single", (0, 0)),
        "all_gather_into_tensor_coalesced": ("all_gather_single", (0, 0)),
        "all_gather_into_tensor_out": ("all_gather_single", (0, 0)),
        "reduce_scatter_tensor": ("reduce_scatter_single", (0, 0, 1)),
        "reduce_scatter_tensor_coalesced": ("reduce_scatter_single", (0, 0, 1)),
        "reduce_scatter_tensor_out": ("reduce_scatter_single", (0, 0, 1)),
        "all_to_all_single": ("all_to_all_single", (0, 0, 1, 2)),
    }
)
"""Functional collectives: the equivalent method of a group, and the positions of the arguments that
it takes; for an output that does not exist yet, that of the input."""


def watch_functional_operators(
    seen: Callable[[Any, str, list[Any], Callable[[], Any]], Any],
) -> Callable[[], None]:
    """Route functional collectives through ``seen``; returns a function that ends that.

    ``seen`` gets the group, the name of the equivalent method, its arguments, and the call to
    make. Operators that are traced or run in inference mode are not routed.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")
    below = required("torch._C._AutoDispatchBelowAutograd", "compares functional collectives")
    named = required("torch._C._distributed_c10d._resolve_process_group", "finds a group")

    def kernel(name: str) -> Callable[..., Any]:
        operator = getattr(graph_operators, name).default
        method, places = _FUNCTIONAL[name]

        def run(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - whatever the operator takes
            def go() -> Any:  # noqa: ANN401
                with below():
                    return operator(*args, **options)

            *given, group = args
            first = given[0] if isinstance(given[0], list) else given[:1]
            if any(type(tensor) is not torch.Tensor for tensor in first):
                return go()
            found = named(group) if isinstance(group, str) else group
            return seen(found, method, [given[place] for place in places], go)

        return run

    for name in _FUNCTIONAL:
        for key in ("AutogradCPU", "AutogradCUDA"):
            library.impl(name, kernel(name), key)
    return library._destroy
