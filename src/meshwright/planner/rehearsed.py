"""One step of one rank of many, in one process: the bytes of each category, as its run has them.

The rank lays the model out and trains by the code of every run, in a world whose other ranks are
missing. So shards with their padding, buckets, gathered units and messages have their sizes. Values
are wrong; no size depends on them, but for tokens that routers send away.
"""

from __future__ import annotations

import gc
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import meshwright
from meshwright.comm import fake_world
from meshwright.comm.groups.registry import PROCESS
from meshwright.comm.streams import is_host
from meshwright.composition import Loss, parallelize
from meshwright.errors import PlanError
from meshwright.gradients import cut_batch
from meshwright.gradients.optimizer_list import OptimizerFactory
from meshwright.plan import Plan
from meshwright.torch_internals.tensors import TorchDispatchMode, memory_of, storage_id
from meshwright.torch_internals.trees import tree_leaves

_SOURCE = f"{Path(meshwright.__file__).parent}/"
_SENDING = (
    *("data_parallel/replicas/", "data_parallel/shards/buffer.py"),
    *("data_parallel/shards/gradient_lines.py", "pipelining/p2p.py"),
)
"""Files whose tensors are buffers of communication."""
_PASSING = ("comm/shared_memory/", "comm/c10d/")
"""Files that see tensors of others, and memory that a transport has mapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Bytes of one rank's tensors in a step that is not its first; each storage counts once."""

    parameters: int
    """And buffers of the model."""
    gradients: int
    """After the backward."""
    optimizer: int
    communication: int
    """The most at a time of gathered units, messages, and gradients on their way in other buffers
    than their own."""
    activations: int
    """The most at a time of all that is none of these."""
    peak: int
    """The most of all tensors at a time."""
    resident: Mapping[str, int]
    """The memory of this process within 5 % of the peak, in parts that sum to it, on Linux: of
    ``files``; its own when it ``started`` to build the model; ``shared`` with other ranks; other
    ``tensors``; ``free`` pages that the library keeps; all ``other``, which is below 0 where
    tensors lie in what was free before, or were not written yet."""

    def __str__(self) -> str:
        names, parts = ("resident", "peak"), dict(self.resident)
        sizes = {name: size for name, size in asdict(self).items() if name not in names}
        lines = (("peak of tensors", self.peak, sizes), ("resident", sum(parts.values()), parts))
        return "\n".join(
            f"{what} {size / 2**20:,.3f} MiB: "
            + ", ".join(f"{name} {part / 2**20:,.3f}" for name, part in sizes.items())
            for what, size, sizes in lines
        )


class MemoryLedger(TorchDispatchMode):
    """Bytes of the storages that operators in the block read or make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}
        self._started, self._is_counting = _resident(), False

    def count_from_here(self, known: Sequence[torch.Tensor]) -> None:
        """Begin a step; ``known``: tensors that are there, neither activations nor messages."""
        self.resident: dict[str, int] = {}
        self._measured = self.peak = self.most_sent = self.most_made = 0
        gc.collect()  # what the model was laid out with, in circles
        self._see(known)
        ids, self._is_counting = storages(known), True
        self._known = [each for each in self.living() if storage_id(each[0]) in ids]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self._see((args, kwargs))
        found = func(*args, **(kwargs or {}))
        self._see(found)
        if self._is_counting:
            living = self.living()
            size, known = _size_of(living), _size_of(self._known)
            # Some of them lie in others, or in the same memory.
            sent = _size_of([*self._known, *filter(is_sent, living)])
            self.most_sent = max(self.most_sent, sent - known)
            self.most_made = max(self.most_made, size - sent)
            self.peak = max(self.peak, size)
            if self.peak > 1.05 * self._measured:
                self._measured, self.resident = size, _resident_parts(living, self._started)
        return found

    def living(self) -> list[Held]:
        """List the storages that are alive now, each with the file that made it."""
        return [
            (storage, made_in)
            for reference, made_in in list(self._alive.values())
            if (storage := reference()) is not None
            and not made_in.startswith(_PASSING)
            and storage.data_ptr() not in PROCESS.pages.empty_windows
        ]

    def _see(self, values: object) -> None:
        made_in = ""
        for tensor in tensors_of(values):
            if tensor.layout is torch.strided:
                storage = memory_of(tensor).untyped_storage()
                reference, before = self._alive.get(key := storage_id(storage), (None, _PASSING[0]))
                is_new = reference is None or reference() is not storage
                if is_new or before.startswith(_PASSING):
                    made_in = made_in or _file_of_library()
                    self._alive[key] = weakref.ref(storage), made_in


Held = tuple[torch.UntypedStorage, str]
"""A storage, and the file that made it."""


def is_sent(held: Held) -> bool:
    """Whether a storage is a buffer of communication."""
    return held[1].startswith(_SENDING)


def _size_of(held: Iterable[Held]) -> int:
    """Bytes of storages, of which some may lie in others."""
    size = end = 0
    for start, length in sorted((storage.data_ptr(), storage.nbytes()) for storage, _ in held):
        if length and start + length > end:
            size += start + length - max(start, end)
            end = start + length
    return size


def _file_of_library() -> str:
    """The innermost file of the library, of those that run; a text that is none without one.

    For what room `comm` makes it is the file that asks for it.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_SOURCE) and name != __file__:
            name = name.removeprefix(_SOURCE)
            if not name.startswith("comm/") or name.startswith(_PASSING):
                return name
        frame = frame.f_back
    return "-"


def _resident() -> list[int]:
    """Bytes of this process: its own, of files, shared; nothing where the system does not say."""
    status = Path("/proc/self/status")
    text = status.read_text() if status.exists() else ""
    return [1024 * int(kib) for kib in re.findall(r"Rss(?:Anon|File|Shmem):\s+(\d+)", text)]


def _resident_parts(held: Iterable[Held], started: Sequence[int]) -> dict[str, int]:
    """Name the parts of the resident memory: ``held`` lie in it, ``started`` is what was there."""
    if not started:
        return {}
    maps, free = Path("/proc/self/maps").read_text(), PROCESS.pages.nbytes
    mapped = [(int(a, 16), int(b, 16)) for a, b in re.findall(r"(?m)^(\w+)-(\w+) .*memfd:", maps)]

    def is_own(storage: torch.UntypedStorage) -> bool:
        at = storage.data_ptr()
        return is_host(storage.device) and not any(start <= at < end for start, end in mapped)

    own, files, shared = _resident()
    size = _size_of(each for each in held if is_own(each[0]))
    parts = {"files": files, "started": started[0], "shared": shared, "tensors": size, "free": free}
    return {**parts, "other": own - started[0] - size - free}


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of the storages of ``tensors``, by their numbers."""
    held = (memory_of(tensor).untyped_storage() for tensor in tensors)
    return {storage_id(storage): storage.nbytes() for storage in held}


def rank_bytes(
    build: Callable[[], nn.Module],
    plan: Plan,
    batch: object,
    target: object = None,
    *,
    loss: Loss,
    optimizer: OptimizerFactory,
    example: object = None,
) -> RankBytes:
    """Train two steps on this rank's ``batch``, and count its bytes in the second.

    All ranks call this. Arguments are those of `parallelize` and `Trainable.step`.
    """
    with MemoryLedger() as ledger:
        trainable = parallelize(build(), plan, optimizer=optimizer, loss=loss, example=example)
        trainable.step(batch, target)
        module, stepping = trainable.module, trainable.optimizer
        own = [*module.parameters(), *module.buffers()]
        state = [] if stepping is None else tensors_of([*stepping.state.values()])
        ledger.count_from_here([*own, *state, *tensors_of((batch, target))])
        trainable.forward_backward(batch, target)
        held = storages(own)
        reduced = storages(p.grad for p in module.parameters() if p.grad is not None)
        reduced = {key: size for key, size in reduced.items() if key not in held}
        sent = {storage_id(storage) for storage, _ in filter(is_sent, ledger.living())}
        trainable.optimizer_step()
    buckets = sum(size for key, size in reduced.items() if key in sent)
    return RankBytes(
        parameters=sum(held.values()),
        gradients=sum(reduced.values()),
        optimizer=sum(storages(state).values()),
        communication=max(0, ledger.most_sent - buckets),
        activations=ledger.most_made,
        peak=ledger.peak,
        resident=ledger.resident,
    )


def tensors_of(values: object) -> list[torch.Tensor]:
    """List the tensors of nested values."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def rehearse(
    rank: int,
    build: Callable[[], nn.Module],
    plan: Plan,
    batch: object,
    target: object = None,
    *,
    loss: Loss,
    optimizer: OptimizerFactory,
) -> RankBytes:
    """Count the bytes that ``rank`` of ``plan`` will hold in a step on its ``batch``.

    In one process that has joined no ranks; arguments are those of `rank_bytes`. Raises
    ``PlanError`` as `parallelize` does, and for a rank that ``plan`` has not.
    """
    size = plan.axes.world_size
    if not 0 <= rank < size:
        raise PlanError(f"rank: expected 0 to {size - 1} ({plan.axes}), found {rank}")
    parts = plan.train.accumulate * plan.pipeline.microbatches
    part = cut_batch(batch, None, parts)[0][0]
    example = part if isinstance(part, (dict, list, tuple)) else (part,)
    with fake_world(rank, size), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process is behind the group
        how = {"loss": loss, "optimizer": optimizer, "example": example}
        return rank_bytes(build, plan, batch, target, **how)
