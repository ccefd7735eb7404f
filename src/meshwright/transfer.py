"""Weights of ranks that train, moved to ranks that generate, each side in a layout of its own.

One process group holds both sides. One transfer, made by all its ranks::

    both sides              say their versions and, where they have changed, names, shapes, dtypes
                            and boxes, from which each rank computes the same overlaps
    publisher -> receiver   each overlap of two boxes from one rank, in rounds of at most the bytes
                            of the largest tensor on any rank
    both sides              compare digests of all that was sent and received
    receiver                takes over the new weights

Until the last line a receiver has its old weights, and keeps what has come in memory of the host.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint.manifest import covers
from meshwright.checkpoint.pieces import (
    Held,
    dtype_name,
    form_of,
    held_from_rows,
    held_to_rows,
    torch_dtype,
)
from meshwright.checkpoint.tensor_file import item_size
from meshwright.checkpoint.training.loops import Model, model_state
from meshwright.checkpoint.training.wrapped import ModelState
from meshwright.comm import Communicator, Transfer, communicator, held_boxes, phase, settle
from meshwright.errors import TransferError
from meshwright.gradients import digests_of
from meshwright.layout import Box

__all__ = ["Publisher", "Receipt", "Receiver"]

_Own = Mapping[str, Any]
"""What a rank tells of its tensors; see `_End._holdings`."""
_Place = tuple[str, Box]
"""The first name of a tensor, and a box that a rank holds of it."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What all ranks of a transfer have confirmed."""

    version: int
    digest: str
    """Of the bytes of all messages; equal on all ranks, and for equal weights in equal layouts."""
    moved: int
    """Bytes of weights that this rank has sent or received."""


class Overlap(NamedTuple):
    """Elements that travel from a box of one rank to a box of another."""

    box: Box
    dtype: str
    source: _Place
    target: _Place
    sender: int
    receiver: int
    round: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.box.numel * item_size(self.dtype)


def overlaps(owns: Mapping[int, _Own]) -> list[Overlap]:
    """List what travels, from what each rank of the world tells; the same on all ranks.

    Of several ranks with one box, the one with the fewest bytes to send so far sends it; of ranks
    with one buffer, whose values may differ, the first. No rank sends or receives more in a round
    than the bytes of the largest tensor. On each rank rounds grow along the list, so ranks that go
    through theirs in order never wait in a circle.

    Raises `TransferError` with a line for each tensor that one side lacks or has otherwise.
    """
    problems: list[str] = []
    first: dict[str, str] = {}
    forms: dict[str, tuple[Held, int]] = {}
    holders: defaultdict[str, defaultdict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    wanted: list[tuple[str, _Place, int]] = []
    known: set[str] = set()
    for rank, own in sorted(owns.items(), key=lambda item: not item[1]["publishes"]):
        ties, is_publisher = own["ties"], own["publishes"]
        tensors = held_from_rows(own["tensors"])
        if is_publisher:
            first |= {held.name: held.name for held in tensors} | ties
        for held in tensors:
            names = [held.name, *(name for name, one in ties.items() if one == held.name)]
            sources = {held.name} if is_publisher else {first[n] for n in names if n in first}
            known |= set() if is_publisher else sources
            if len(sources) != 1:
                problems.append(
                    f"{held.name!r} is one tensor on the receiver of rank {rank} and "
                    f"{' and '.join(map(repr, sorted(sources))) or 'none'} on the publishers"
                )
                continue
            (source,) = sources
            form, one = forms.setdefault(source, (held, rank))
            if (held.shape, held.dtype) != (form.shape, form.dtype):
                problems.append(
                    f"{held.name!r} is {form.dtype} {form.shape} from rank {one} and {held.dtype} "
                    f"{held.shape} on rank {rank}"
                )
            for box in held.boxes:
                if is_publisher:
                    holders[source][box].append(rank)
                else:
                    wanted.append((source, (held.name, box), rank))
    for name, (form, rank) in forms.items():
        if name not in known:
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
    limit = max((math.prod(f.shape) * item_size(f.dtype) for f, _ in forms.values()), default=0)
    load: defaultdict[int, int] = defaultdict(int)
    last: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    found: list[Overlap] = []
    for source, target, receiver in sorted(wanted, key=lambda each: order[each[0]]):
        for held_box, ranks in holders[source].items():
            box = target[1].intersect(held_box)
            if box is None:
                continue
            sender = ranks[0] if source in buffers else min(ranks, key=lambda r: (load[r], r))
            ends = sender, receiver
            each = Overlap(box, forms[source][0].dtype, (source, held_box), target, *ends, 0)
            load[sender] += each.size
            number = max(last[rank][0] for rank in ends)
            loads = [last[rank][1] if last[rank][0] == number else 0 for rank in ends]
            if max(loads) + each.size > limit:
                number, loads = number + 1, [0, 0]
            last |= {rank: (number, n + each.size) for rank, n in zip(ends, loads, strict=True)}
            found.append(each._replace(round=number))
    return found


def _views(line: Tensor, message: Sequence[Overlap]) -> Iterator[tuple[Overlap, Tensor]]:
    """Yield the overlaps of a message, each with its place in ``line``."""
    start = 0
    for each in message:
        flat = line[start : (start := start + each.size)].view(torch_dtype(each.dtype))
        yield each, flat.view(each.box.shape)


def _take_over(memory: Mapping[_Place, Tensor], message: Sequence[Overlap], line: Tensor) -> None:
    for each, view in _views(line, message):
        memory[each.target][each.box.slices(each.target[1])].copy_(view)


def _hash(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


class _End:
    """One rank's end of the transfers of a group."""

    _publishes = True
    _in_place = False

    def __init__(
        self,
        model: Model,
        *,
        group: Any = None,  # noqa: ANN401 - c10d's type stays in comm
        names: Literal["model"] | Callable[[str], str] = "model",
        dtype: torch.dtype | None = None,
    ) -> None:
        if isinstance(names, str) and names != "model":
            raise ValueError(
                f"names: expected 'model' or a function of a name, found {names!r}; a model of "
                "transformers has Hugging Face's names already, as in an export to 'hf'"
            )
        self.version: int | None = None
        """The version that this rank has published or received last; None before the first."""
        self._model, self._group, self._dtype = model, group, dtype
        self._name = names if callable(names) else str
        self._known = ""
        """A digest of what all ranks held when the rounds were computed."""
        self._rounds: list[list[list[Overlap]]] = []
        """This rank's messages of each round, one for each peer."""

    @torch.no_grad()
    def _transfer(self, version: int | None, timeout: float) -> Receipt:
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
            self._known = ""
            self._plan(overlaps(dict(zip(world.ranks, owns, strict=True))), world)
            self._known = now
        try:
            with phase("transfer of weights"):
                moved = [each for some in self._rounds for each in self._move(some, memory, world)]
                told = [(m[0].sender, m[0].receiver, m[0].round, int(d or 0)) for m, _, d in moved]
                rows = control.gather_values(told, label="transfer: digests")
            # Each message is told by its sender and by its receiver.
            messages = Counter(tuple(message) for row in rows for message in row)
            for (sender, receiver, *_), count in messages.items():
                if count != 2:
                    raise TransferError(
                        f"rank {receiver} has received other bytes than rank {sender} sent: "
                        "publish again, and if that repeats, test memory and network"
                    )
        except BaseException as error:
            if self._in_place:
                error.add_note("in_place=True: the weights of this rank may be old and new mixed")
            raise
        for message, line, _ in moved:
            if line is not None:
                _take_over(memory, message, line)
        if not self._publishes:
            weights.load()
        self.version = version
        size = sum(each.size for message, *_ in moved for each in message)
        return Receipt(version, _hash(sorted(messages)), size)

    def _holdings(self, weights: ModelState) -> tuple[dict[_Place, Tensor], _Own]:
        """Return the memory of this rank's boxes, and what it tells the others of them."""
        if self._publishes:
            weights.check_copies()
        called = {name: self._name(name) for name in weights.names()}
        if len({*called.values()}) < len(called):
            raise ValueError(f"names: expected another name for each tensor, found {called}")
        memory: dict[_Place, Tensor] = {}
        tensors: list[Held] = []
        for name, tensor in weights.tensors.items():
            boxes = [(box, part) for box, part in held_boxes(tensor, name) if box.numel]
            for box, part in boxes:
                form_of(name, part)  # raises for what has no plain bytes
                memory[called[name], box] = part
            dtype = self._dtype if self._dtype and tensor.is_floating_point() else tensor.dtype
            held = tuple(box for box, _ in boxes)
            tensors.append(Held(called[name], dtype_name(dtype), tuple(tensor.shape), held))
        return memory, {
            "publishes": self._publishes,
            "tensors": held_to_rows(tensors),
            "ties": {called[name]: called[first] for name, first in weights.ties.items()},
            "buffers": [called[n] for n in weights.tensors if n not in weights.parameters],
        }

    def _plan(self, found: Sequence[Overlap], world: Communicator) -> None:
        """Keep this rank's messages."""
        me = world.ranks[world.rank]
        rounds: defaultdict[int, defaultdict[tuple[int, int], list[Overlap]]]
        rounds = defaultdict(lambda: defaultdict(list))
        # Large elements first: each tensor then begins at a multiple of its elements' bytes.
        for each in sorted(found, key=lambda each: -item_size(each.dtype)):
            if me in (each.sender, each.receiver):
                rounds[each.round][each.sender, each.receiver].append(each)
        self._rounds = [[*rounds[number].values()] for number in sorted(rounds)]

    def _move(
        self,
        messages: Sequence[list[Overlap]],
        memory: Mapping[_Place, Tensor],
        world: Communicator,
    ) -> list[tuple[list[Overlap], Tensor | None, Tensor | None]]:
        """Send or receive one round; returns each message, its bytes to take over, its digest."""
        transfers: list[Transfer] = []
        for message in messages:
            size = sum(each.size for each in message)
            line = torch.empty(size, dtype=torch.uint8, device=world.device)
            for each, view in _views(line, message) if self._publishes else ():
                view.copy_(memory[each.source][each.box.slices(each.source[1])])
            end = message[0]
            peer = world.ranks.index(end.receiver if self._publishes else end.sender)
            direction: Literal["send", "recv"] = "send" if self._publishes else "recv"
            transfers.append(Transfer(direction, line, peer, label=f"weights, round {end.round}"))
        for pending in world.batch(transfers):
            pending.wait()
        digests = digests_of([transfer.tensor for transfer in transfers])
        moved: list[tuple[list[Overlap], Tensor | None, Tensor | None]] = []
        for message, transfer, digest in zip(messages, transfers, digests, strict=True):
            if self._in_place:
                _take_over(memory, message, transfer.tensor)
            is_kept = not self._publishes and not self._in_place
            moved.append((message, transfer.tensor.cpu() if is_kept else None, digest))
        return moved


def _agreed(said: Mapping[int, Sequence[Any]]) -> int:
    """Return the version that is published. Raises `TransferError`, alike on all ranks."""
    published = {rank: row[1] for rank, row in said.items() if row[0]}
    if len(published) in (0, len(said)):
        missing = "Receiver" if published else "Publisher"
        raise TransferError(f"no rank of {[*said]} has a {missing}: give a group with both sides")
    first, version = next(iter(published.items()))
    for rank, (publishes, other, held, _) in said.items():
        text = ""
        if other not in (None, version):
            text = f"{'publishes' if publishes else 'asks for'} version {other}"
        elif not publishes and held is not None and held > version:
            text = f"has version {held} and takes no older one"
        if text:
            raise TransferError(f"rank {first} publishes version {version}, and rank {rank} {text}")
    return int(version)


class Publisher(_End):
    """The end of a rank that trains.

    ``model``: a module under any wrapper, this rank's stages, or a `Trainable`. ``group``: the
    process group of all publishers and receivers (None: all ranks), each rank with one of them.
    ``names``: ``"model"`` for the names of the plain model, or a function from these to the names
    that the receivers use. ``dtype``: floating-point tensors are cast to it before they travel
    (None: each travels in its own). Parameters and persistent buffers travel; the extra state of
    modules does not.
    """

    def publish(self, version: int, timeout: float = 60.0) -> Receipt:
        """Send the weights as ``version``; returns when every receiver has confirmed them.

        All publishers call this, and all receivers `Receiver.receive`. A rank waits ``timeout``
        seconds for another.

        Raises on both sides: `TransferError` for names, shapes, dtypes or versions that do not fit,
        after which the group goes on; `RankFailedError` for a rank that is lost and
        `CollectiveTimeoutError` for one that does not come, after which it does not.
        """
        return self._transfer(int(version), timeout)


class Receiver(_End):
    """The end of a rank that generates; arguments as for `Publisher`.

    ``dtype``: floating-point tensors travel in it, and are cast when they arrive (None: each
    travels in its own). Until all ranks have confirmed them, new weights wait on the host, in as
    many bytes as this rank's weights; a transfer that fails leaves the old ones. With ``in_place``
    they are written as they arrive, and a transfer that fails leaves a mixture.
    """

    _publishes = False

    def __init__(self, model: Model, *, in_place: bool = False, **options: Any) -> None:
        super().__init__(model, **options)
        self._in_place = in_place

    def receive(self, version: int | None = None, timeout: float = 60.0) -> Receipt:
        """Take over ``version``, or with None the next that is published.

        See `Publisher.publish` for what it raises.
        """
        return self._transfer(version, timeout)
