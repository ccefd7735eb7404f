"""One step of one rank of many, in one process: the bytes of each category, as its run has them.

The rank lays the model out and trains by the code of every run, in a world whose other ranks are
missing. So shards with their padding, buckets, gathered units and messages have their sizes. Values
are wrong; no size depends on them, but for tokens that routers send away.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import meshwright
from meshwright.comm import rehearsing
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
    """The most at a time of buckets that are not gradients themselves, gathered units, gradients
    that will be reduced, messages of a pipeline."""
    activations: int
    """The most at a time of all others: what the model makes."""
    peak: int
    """The most of all tensors at a time."""
    resident: Mapping[str, int]
    """The memory of this process when its tensors were within 5 % of the peak, on Linux:
    ``files`` that are mapped, such as torch's libraries; ``started``, its own before the model was
    built; ``shared`` with other processes, with tensors that lie there; all other ``tensors`` of
    the host; ``other``, what is left: graphs, threads, free blocks of the allocator. Below 0
    where tensors lie in what was free before, or were not written yet."""

    def __str__(self) -> str:
        fields = asdict(self)
        parts = fields.pop("resident")
        return f"tensors: {_mib(fields)}\nresident {sum(parts.values()) >> 20:,} MiB: {_mib(parts)}"


def _mib(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / 2**20:,.3f}" for name, size in sizes.items()) + " (MiB)"


class MemoryLedger(TorchDispatchMode):
    """Bytes of the storages that operators in the block read or make, while they live."""

    def __init__(self, known: Iterable[torch.Tensor], started: Iterable[int]) -> None:
        """``known``: tensors that are there before, which are no activations; ``started``: what
        `_resident` said before the model was built."""
        super().__init__()
        self.resident: dict[str, int] = {}
        self._started, self._measured = started, 0.0
        self.peak = self.most_sent = self.most_made = 0
        self._known = storages(known)
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}
        self._see(list(known))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self._see((args, kwargs))
        found = func(*args, **(kwargs or {}))
        self._see(found)
        living = self.living()
        sent = [held for held in living if held[1].startswith(_SENDING)]
        made = [h for h in living if h not in sent and storage_id(h[0]) not in self._known]
        self.peak = max(self.peak, _size_of(living))
        if self.peak > 1.05 * self._measured:
            self._measured = self.peak
            self.resident = _resident_parts(living, self._started)
        self.most_sent = max(self.most_sent, _size_of(sent))
        self.most_made = max(self.most_made, _size_of(made))
        return found

    def living(self) -> list[Held]:
        """List the storages that are alive now, each with the file that made it."""
        return [
            (storage, made_in)
            for reference, made_in in list(self._alive.values())
            if (storage := reference()) is not None and not made_in.startswith(_PASSING)
        ]

    def sends(self, key: int) -> bool:
        """Whether a storage is a buffer of communication."""
        return key in self._alive and self._alive[key][1].startswith(_SENDING)

    def _see(self, values: object) -> None:
        made_in = ""
        for leaf in tree_leaves(values):
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                continue
            storage = memory_of(leaf).untyped_storage()
            key = storage_id(storage)
            reference, before = self._alive.get(key, (None, ""))
            is_new = reference is None or reference() is not storage
            if is_new or before.startswith(_PASSING):
                made_in = made_in or _file_of_library()
                self._alive[key] = weakref.ref(storage), made_in


Held = tuple[torch.UntypedStorage, str]
"""A storage, and the file that made it."""


def _size_of(held: Iterable[Held]) -> int:
    """Bytes of storages, of which some may lie in others."""
    size = end = 0
    for start, length in sorted((storage.data_ptr(), storage.nbytes()) for storage, _ in held):
        if length and start + length > end:
            size += start + length - max(start, end)
            end = start + length
    return size


def _file_of_library() -> str:
    """The innermost file of the library, of those that run; a text that is none without one."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_SOURCE) and name != __file__:
            return name.removeprefix(_SOURCE)
        frame = frame.f_back
    return "-"


def _resident() -> tuple[int, ...]:
    """Bytes of this process: its own, of files, shared; nothing where the system does not say."""
    status = Path("/proc/self/status")
    found = re.findall(
        r"Rss(?:Anon|File|Shmem):\s+(\d+)", status.read_text() if status.exists() else ""
    )
    return tuple(1024 * int(kib) for kib in found)


def _resident_parts(held: Iterable[Held], started: Iterable[int]) -> dict[str, int]:
    """Name the parts of the resident memory: ``held`` lie in it, ``started`` is what was there."""
    if not (now := _resident()):
        return {}
    maps = Path("/proc/self/maps").read_text()
    shared = [(int(a, 16), int(b, 16)) for a, b in re.findall(r"(?m)^(\w+)-(\w+) .*memfd:", maps)]
    (before, *_), (own, files, between) = started, now
    size = _size_of(
        each
        for each in held
        if each[0].device.type == "cpu"
        and not any(start <= each[0].data_ptr() < end for start, end in shared)
    )
    parts = {"files": files, "started": before, "shared": between, "tensors": size}
    return {**parts, "other": own - before - size}


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
    started = _resident()
    trainable = parallelize(build(), plan, optimizer=optimizer, loss=loss, example=example)
    trainable.step(batch, target)
    module, stepping = trainable.module, trainable.optimizer
    own = [*module.parameters(), *module.buffers()]
    state = [] if stepping is None else [*tensors_of(stepping.state)]
    ledger = MemoryLedger([*own, *state, *tensors_of((batch, target))], started)
    with ledger:
        trainable.forward_backward(batch, target)
        held = storages(own)
        reduced = storages(p.grad for p in module.parameters() if p.grad is not None)
        trainable.optimizer_step()
    reduced = {key: size for key, size in reduced.items() if key not in held}
    buckets = sum(size for key, size in reduced.items() if ledger.sends(key))
    return RankBytes(
        parameters=sum(held.values()),
        gradients=sum(reduced.values()),
        optimizer=sum(storages(state).values()),
        communication=max(0, ledger.most_sent - buckets),
        activations=ledger.most_made,
        peak=ledger.peak,
        resident=ledger.resident,
    )


def tensors_of(values: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested values, as a dict of dicts."""
    for leaf in tree_leaves(list(values.values()) if isinstance(values, Mapping) else values):
        if isinstance(leaf, torch.Tensor):
            yield leaf


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
    with rehearsing(rank, size):
        how = {"loss": loss, "optimizer": optimizer, "example": example}
        return rank_bytes(build, plan, batch, target, **how)
