"""Weights of ranks that train, moved to ranks that generate, each side in a layout of its own.

One process group holds both sides. One transfer, made by all its ranks::

    both sides              say their versions and, where they have changed, names, shapes, dtypes
                            and boxes, from which each rank computes the same overlaps
    publisher -> receiver   each overlap of two boxes, from one rank
    both sides              compare digests of all that was sent and received
    receiver                takes over the new weights

Until the last line a receiver has its old weights, and keeps what has come in memory of the host.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint import pieces
from meshwright.checkpoint.manifest import covers
from meshwright.checkpoint.tensor_file import item_size
from meshwright.checkpoint.training.loops import Model, model_state
from meshwright.checkpoint.training.wrapped import ModelState
from meshwright.comm import Communicator, Transfer, communicator, held_boxes, phase, settle
from meshwright.errors import TransferError
from meshwright.gradients import digests_of
from meshwright.layout import Box

__all__ = ["Publisher", "Receipt", "Receiver"]

_log = logging.getLogger(__name__)

_Place = tuple[str, Box]
"""The first name of a tensor, and a box that a rank holds of it."""
_Memory = Mapping[_Place, Tensor]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What all ranks of a transfer have confirmed."""

    version: int
    digest: str
    """Of the bytes of all messages: equal on all ranks, and for equal weights in equal layouts."""
    moved: int
    """Bytes of weights that this rank has sent or received."""


class _Overlap(NamedTuple):
    """Elements that travel from a box of one rank to a box of another."""

    box: Box
    dtype: str
    source: _Place
    target: _Place
    sender: int
    receiver: int
    round: int

    @property
    def size(self) -> int:  # bytes
        return self.box.numel * item_size(self.dtype)


def _overlaps(owns: Mapping[int, Mapping[str, Any]]) -> list[_Overlap]:
    """List what travels, from what each rank of the world tells; the same on all ranks.

    The rank that has fewest bytes to send so far sends a box that several hold, and the first a
    buffer, whose values may differ. No rank sends or receives more in a round than the bytes of the
    largest tensor. Rounds grow along the list, so ranks that go through theirs in order never wait
    in a circle. Raises `TransferError` with a line for each tensor that does not fit.
    """
    problems: list[str] = []
    first: dict[str, str] = {}
    forms: dict[str, tuple[pieces.Held, int]] = {}
    holders: defaultdict[str, defaultdict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    wanted: list[tuple[str, _Place, int]] = []
    received: set[str] = set()
    for rank, own in sorted(owns.items(), key=lambda item: not item[1]["publishes"]):
        ties, is_publisher = own["ties"], own["publishes"]
        tensors = pieces.held_from_rows(own["tensors"])
        if is_publisher:
            first |= {held.name: held.name for held in tensors} | ties
        for held in tensors:
            names = (held.name, *(name for name, one in ties.items() if one == held.name))
            sources = {held.name} if is_publisher else {first[n] for n in names if n in first}
            received |= set() if is_publisher else sources
            if len(sources) != 1:
                there = " and ".join(map(repr, sorted(sources))) or "none"
                text = f"one tensor on the receiver of rank {rank} and {there} on the publishers"
                problems.append(f"{held.name!r} is {text}")
                continue
            (source,) = sources
            form, one = forms.setdefault(source, (held, rank))
            if (held.shape, held.dtype) != (form.shape, form.dtype):
                text = f"{form.dtype} {form.shape} from rank {one} and {held.dtype} {held.shape}"
                problems.append(f"{held.name!r} is {text} on rank {rank}")
            for box in held.boxes:
                if is_publisher:
                    holders[source][box].append(rank)
                else:
                    wanted.append((source, (held.name, box), rank))
    for name, (form, rank) in forms.items():
        if name not in received:
            problems.append(f"{name!r} is on the publisher of rank {rank} and on no receiver")
        try:
            covers(form.shape, [*holders[name]])
        except ValueError as error:
            problems.append(f"{name!r} is not on the publishers once: {error}")
    if problems:
        advice = "dtype= of Publisher casts before sending, dtype= of Receiver on arrival"
        raise TransferError("\n  ".join(["the two sides do not fit:", *problems, advice]))
    buffers = {name for own in owns.values() if own["publishes"] for name in own["buffers"]}
    order = {name: number for number, name in enumerate(forms)}
    limit = max([0, *(Box.whole(f.shape).numel * item_size(f.dtype) for f, _ in forms.values())])
    load: defaultdict[int, int] = defaultdict(int)
    last: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    result: list[_Overlap] = []
    for source, target, receiver in sorted(wanted, key=lambda each: order[each[0]]):
        for place, ranks in holders[source].items():
            if (box := target[1].intersect(place)) is None:
                continue
            sender = ranks[0] if source in buffers else min(ranks, key=lambda r: (load[r], r))
            ends = sender, receiver
            number = max(last[rank][0] for rank in ends)
            each = _Overlap(box, forms[source][0].dtype, (source, place), target, *ends, number)
            loads = [last[rank][1] if last[rank][0] == number else 0 for rank in ends]
            if max(loads) + each.size > limit:
                each, loads = each._replace(round=number + 1), [0, 0]
            last |= {r: (each.round, n + each.size) for r, n in zip(ends, loads, strict=True)}
            load[sender] += each.size
            result.append(each)
    return result


def _write(memory: _Memory, each: _Overlap, line: Tensor) -> None:
    memory[each.target][each.box.slices(each.target[1])].copy_(line.view(each.box.shape))


def _hash(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


class _Side:
    """One rank's end of the transfers of a group."""

    _publishes = True

    def __init__(
        self,
        model: Model,
        *,
        group: Any = None,  # noqa: ANN401 - c10d's type stays in comm
        names: Literal["model"] | Callable[[str], str] = "model",
        dtype: torch.dtype | None = None,
    ) -> None:
        if names != "model" and not callable(names):
            raise ValueError(f"names: expected 'model' or a function of a name, found {names!r}")
        self.version: int | None = None
        """The version that this rank has published or received last; None before the first."""
        self._model, self._group, self._dtype = model, group, dtype
        self._name = names if callable(names) else str
        self._rounds: list[list[_Overlap]] = []
        self._known = ""  # a digest of what all ranks held when the rounds were computed

    @torch.no_grad()
    def _transfer(self, version: int | None, timeout: float, *, in_place: bool = False) -> Receipt:
        settle()  # late checks of a device may still find these weights wrong
        world = communicator(self._group)
        control, world = world.control.along("transfer"), world.along("transfer")
        control.timeout = world.timeout = timeout
        # An error in a phase ends the other ranks, too. What all find alike is raised outside.
        with phase("transfer of weights"):
            weights = model_state(self._model)
            memory, own = self._holdings(weights)
            row = [self._publishes, version, self.version, _hash(own), self._known]
            rows = control.gather_values(row, label="transfer: versions")
        version = _agreed(dict(zip(world.ranks, rows, strict=True)))
        now = _hash([row[3] for row in rows])
        if {row[4] for row in rows} != {now}:
            with phase("transfer of weights"):
                owns = control.gather_values(own, label="transfer: tensors")
            found = _overlaps(dict(zip(world.ranks, owns, strict=True)))
            mine = [o for o in found if world.ranks[world.rank] in (o.sender, o.receiver)]
            self._rounds = [[*some] for _, some in groupby(mine, lambda each: each.round)]
            self._known = now
        with phase("transfer of weights"):
            moved = [o for some in self._rounds for o in self._move(some, memory, world, in_place)]
            bits: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
            for each, _, digest in moved:
                bits[each.sender, each.receiver].append(int(digest or 0))
            told = [[*ends, _hash(digests)] for ends, digests in bits.items()]
            rows = control.gather_values(told, label="transfer: digests")
        # What went from one rank to another is told by both.
        pairs = Counter(tuple(pair) for row in rows for pair in row)
        for (sender, receiver, _), count in pairs.items():
            if count != 2:
                text = f"rank {receiver} has received other bytes than rank {sender} sent"
                raise TransferError(f"{text}: publish again; if it repeats, test the hardware")
        for each, line, _ in moved:
            if line is not None:
                _write(memory, each, line)
        if not self._publishes:
            weights.load()
        self.version, bytes_moved = version, sum(each.size for each, *_ in moved)
        _log.info("weights of version %d: %d bytes moved", version, bytes_moved)
        return Receipt(version, _hash(sorted(pairs)), bytes_moved)

    def _holdings(self, weights: ModelState) -> tuple[dict[_Place, Tensor], dict[str, Any]]:
        """Return the memory of this rank's boxes, and what it tells the others of them."""
        if self._publishes:
            weights.check_copies()
        called = {name: self._name(name) for name in weights.names()}
        if len({*called.values()}) < len(called):
            raise ValueError(f"names: expected another name for each tensor, found {called}")
        memory: dict[_Place, Tensor] = {}
        tensors: list[pieces.Held] = []
        for name, tensor in weights.tensors.items():
            if tensor.is_meta:
                raise ValueError(f"{name!r} is on the meta device: give it memory, as by to_empty")
            boxes = {box: part for box, part in held_boxes(tensor, name) if box.numel}
            memory |= {(called[name], box): part for box, part in boxes.items()}
            dtype = self._dtype if self._dtype and tensor.is_floating_point() else tensor.dtype
            form = pieces.dtype_name(dtype), tuple(tensor.shape)
            tensors.append(pieces.Held(called[name], *form, tuple(boxes)))
        return memory, {
            "publishes": self._publishes,
            "tensors": pieces.held_to_rows(tensors),
            "ties": {called[name]: called[first] for name, first in weights.ties.items()},
            "buffers": [called[n] for n in weights.tensors if n not in weights.parameters],
        }

    def _move(
        self, some: Sequence[_Overlap], memory: _Memory, world: Communicator, in_place: bool
    ) -> list[tuple[_Overlap, Tensor | None, Tensor | None]]:
        """Send or receive one round; returns each overlap, what is to be written, its digest."""
        direction: Literal["send", "recv"] = "send" if self._publishes else "recv"
        transfers: list[Transfer] = []
        for each in some:
            dtype = pieces.torch_dtype(each.dtype)
            if self._publishes:
                part = memory[each.source][each.box.slices(each.source[1])]
                line = part.to(world.device, dtype).contiguous().view(-1)
            else:
                line = torch.empty(each.box.numel, dtype=dtype, device=world.device)
            peer = world.ranks.index(each.receiver if self._publishes else each.sender)
            transfers.append(Transfer(direction, line, peer, label=f"weights, round {each.round}"))
        for pending in world.batch(transfers):
            pending.wait()
        lines = [transfer.tensor for transfer in transfers]
        for each, line in zip(some, lines, strict=True) if in_place else ():
            _write(memory, each, line)
        kept = [None if in_place or self._publishes else line.cpu() for line in lines]
        return list(zip(some, kept, digests_of(lines), strict=True))


def _agreed(said: Mapping[int, Sequence[Any]]) -> int:
    """Return the version that is published. Raises `TransferError`, alike on all ranks."""
    published = {rank: row[1] for rank, row in said.items() if row[0]}
    if len(published) in (0, len(said)):
        missing = "Receiver" if published else "Publisher"
        raise TransferError(f"no rank of {[*said]} has a {missing}: give a group with both sides")
    first, version = next(iter(published.items()))
    for rank, (publishes, other, held, *_) in said.items():
        if other not in (None, version):
            text = f"{'publishes' if publishes else 'asks for'} version {other}"
        elif not publishes and held is not None and held > version:
            text = f"has version {held} and takes no older one"
        else:
            continue
        raise TransferError(f"rank {first} publishes version {version}, and rank {rank} {text}")
    return int(version)


class Publisher(_Side):
    """The end of a rank that trains.

    ``model``: a module under any wrapper, this rank's stages, or a `Trainable`. ``group``: the
    process group of all publishers and receivers (None: all ranks), each rank with one of them.
    ``names``: ``"model"`` for the names of the plain model, or a function from these to the names
    that the other side uses. ``dtype``: floating-point tensors are cast to it before they travel
    (None: each travels in its own). Parameters and persistent buffers travel; the extra state of
    modules does not.
    """

    def publish(self, version: int, timeout: float = 60.0) -> Receipt:
        """Send the weights as ``version``; returns when every receiver has confirmed them.

        All publishers call this, and all receivers `Receiver.receive`. A rank waits ``timeout``
        seconds for another. Raises on both sides: `TransferError` for names, shapes, dtypes or
        versions that do not fit, after which the group goes on; `RankFailedError` for a rank that
        is lost and `CollectiveTimeoutError` for one that does not come, after which it does not.
        """
        return self._transfer(int(version), timeout)


class Receiver(_Side):
    """The end of a rank that generates; arguments as for `Publisher`.

    ``dtype``: floating-point tensors are cast from it when they arrive (None: from each's own).
    """

    _publishes = False

    def receive(
        self, version: int | None = None, timeout: float = 60.0, *, in_place: bool = False
    ) -> Receipt:
        """Take over ``version``, or with None the next one; raises as `Publisher.publish`.

        Until all ranks have confirmed them, new weights wait on the host, in as many bytes as this
        rank's weights; a transfer that fails leaves the old ones. With ``in_place`` they are
        written as they arrive, and a transfer that fails leaves a mixture.
        """
        return self._transfer(version, timeout, in_place=in_place)
