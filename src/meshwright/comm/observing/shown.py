"""Collectives as torch's tools see them: ranges of `torch.profiler`, calls of ``CommDebugMode``.

A collective that begins under a profiler appears as ranges::

    meshwright::all_reduce reduce bucket 0 on axis replicate           its launch
    meshwright::all_reduce reduce bucket 0 on axis replicate (wait)    the wait for it

The backend's work is inside, in the operator of c10d (``c10d::allreduce_``): ``gloo:all_reduce``,
``nccl:all_reduce``, and on shared memory ``meshwright:all_reduce``.

An operation does not always run as c10d's operator of that name: over Gloo some are built from
others, and shared memory uses none of c10d's. ``CommDebugMode`` may be entered on one rank alone,
so counting must not change what is sent. So under the mode an operation is first issued on a group
that sends nothing, on scratch tensors, and then runs hidden. Control data, a few bytes without a
counterpart in torch, is hidden, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.profiler import record_function

from meshwright.comm.pending import Launched, TransferWaiter, Work
from meshwright.torch_internals.distributed import (
    add_backend,
    all_gather_single_of,
    fake_backend,
    graph_operators,
    named_group,
    reduce_scatter_single_of,
)
from meshwright.torch_internals.tensors import (
    FakeTensor,
    dispatch_modes,
    skips_dispatch_modes,
    without_dispatch,
)

_NAME = "meshwright shown"
_OF_C10D: MappingProxyType[str, Callable[[Any, torch.Tensor, torch.Tensor], object]] = (
    MappingProxyType(
        {
            "all_reduce": lambda group, one, two: group.allreduce([one]),
            "all_gather": lambda group, one, two: all_gather_single_of(group)(
                two, one, c10d.AllgatherOptions()
            ),
            "reduce_scatter": lambda group, one, two: reduce_scatter_single_of(group)(
                one, two, c10d.ReduceScatterOptions()
            ),
            "broadcast": lambda group, one, two: group.broadcast([one]),
            "all_to_all": lambda group, one, two: group.alltoall_base(two, two.clone(), [], []),
        }
    )
)
_OPERATORS = graph_operators
_FUNCTIONAL: MappingProxyType[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = (
    MappingProxyType(
        {
            "all_reduce": lambda one, two: _OPERATORS.all_reduce(one, "sum", _NAME),
            "all_gather": lambda one, two: _OPERATORS.all_gather_into_tensor(one, 2, _NAME),
            "reduce_scatter": lambda one, two: _OPERATORS.reduce_scatter_tensor(
                two, "sum", 2, _NAME
            ),
            "all_to_all": lambda one, two: _OPERATORS.all_to_all_single(two, [1, 1], [1, 1], _NAME),
        }
    )
)


def is_counted(kind: str, tensor: torch.Tensor) -> bool:
    """Whether one of the modes is a ``CommDebugMode`` that counts ``kind`` on a real ``tensor``."""
    if kind not in _OF_C10D or skips_dispatch_modes():
        return False
    room = sys.modules.get("torch.distributed.tensor.debug")
    if room is None or isinstance(tensor, FakeTensor):
        return False
    modes = dispatch_modes()
    return any(isinstance(mode, room.CommDebugMode) for mode in modes)


def in_place_of(
    kind: str, launch: Callable[[Any], Launched], *, functional: bool
) -> Callable[[Any], Launched]:
    """Wrap ``launch`` so that the mode sees an operation of ``kind``, and the real one is hidden.

    The mode sees c10d's operation, or the functional one that replaces it in graphs.
    """

    def run(group: Any) -> Launched:  # noqa: ANN401 - as those of `collectives`
        _show(kind, functional=functional)
        with without_dispatch():
            return launch(group)

    return run


def _show(kind: str, *, functional: bool) -> None:
    group: Any = dist.ProcessGroup(dist.HashStore(), 0, 2)
    kind_of_backend = dist.ProcessGroup.BackendType.CUSTOM
    host = torch.device("cpu")
    add_backend(group, host, kind_of_backend, fake_backend(0, 2))
    one, two = torch.zeros(1, device=host), torch.zeros(2, device=host)
    if not functional or kind not in _FUNCTIONAL:
        _OF_C10D[kind](group, one, two)
        return
    with named_group(_NAME, group):
        _OPERATORS.wait_tensor(_FUNCTIONAL[kind](one, two))


class _InRange:
    """A work whose waits are ranges of the profiler."""

    __slots__ = ("_name", "_work")

    def __init__(self, work: Work, name: str) -> None:
        self._work = work
        self._name = name

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> object:
        with record_function(self._name):
            return self._work.wait() if timeout is None else self._work.wait(timeout)


def in_ranges(launch: Callable[[Any], Launched], name: str) -> Callable[[Any], Launched]:
    """Wrap ``launch`` in a profiler range ``name``; each wait for what it starts gets one, too."""

    def shown(group: Any) -> Launched:  # noqa: ANN401 - c10d's group
        with record_function(name):
            works, finish = launch(group)
        # Transfers are waited for in a thread of their own, which knows them by their class.
        return [
            work if isinstance(work, TransferWaiter) else _InRange(work, f"{name} (wait)")
            for work in works
        ], finish

    return shown
