"""What stages of different ranks tell each other in one step.

In front of the first payload between a stage and a rank that reads it goes one header: what the
sender takes the schedule to be, the step's number, and an id of each microbatch's signature, which
follows from the inputs before anything is computed (as one digest of the list, which follows where
it is new). Where an id is known the receive is posted at once. The first microbatch of
an unknown one carries its signature in front of its payload. Gradients have the signature of the
outputs they belong to; which of them are none is told once for each id.

A receive never blocks when it is posted: what it needs to know may not be there yet, and then it is
posted by whoever waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from meshwright.comm import Communicator, Pending
from meshwright.errors import CollectiveMismatchError, PipeliningShapeError
from meshwright.pipelining.metadata import (
    Signature,
    TensorMeta,
    Values,
    differences,
    digest,
    signature_of,
)
from meshwright.schedule.actions import SEND_F, Schedule
from meshwright.schedule.messages import Message

__all__ = ["Edge", "Ids", "Memory", "Transfers"]

_HEADER, _IDS, _LENGTH, _SIGNATURE, _MASK, _PAYLOAD = range(6)

Edge = tuple[int, int]
"""A stage, and the rank that reads its outputs."""


class Ids(Protocol):
    """Gives the ids of what a stage of this rank makes, once they are known."""

    def __call__(self, stage: int, *, wait: bool) -> Sequence[int] | None:
        """One id for each microbatch; None when they are not known and ``wait`` is false."""
        ...


@dataclass(slots=True)
class Memory:
    """What is known of signatures from steps that have succeeded."""

    lists: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """By stage and digest, the ids of all microbatches."""
    listed: set[tuple[int, int, int]] = field(default_factory=set)
    """(stage, rank, digest) of lists that have been sent."""
    outputs: dict[tuple[int, int], Signature] = field(default_factory=dict)
    """By stage and id, the outputs of that stage."""
    told: set[tuple[int, int, int]] = field(default_factory=set)
    """(stage, rank, id) of outputs whose signature has been sent or received."""
    masks: dict[tuple[int, int, int], tuple[bool, ...]] = field(default_factory=dict)
    """By (stage that read, stage that made, id), for each tensor whether it gets a gradient."""

    def copy(self) -> Memory:
        """The same, to be changed by a step that may fail."""
        return Memory(
            dict(self.lists),
            set(self.listed),
            dict(self.outputs),
            set(self.told),
            dict(self.masks),
        )


@dataclass(slots=True)
class _Receive:
    """A message on its way to this rank."""

    pendings: list[Pending]
    buffers: list[torch.Tensor]
    signature: Signature
    mask: tuple[bool, ...] | None = None


class Transfers:
    """The messages of one step on one rank."""

    def __init__(
        self,
        communicator: Communicator,
        schedule: Schedule,
        step: int,
        memory: Memory,
        headers: dict[tuple[int, int], tuple[Pending, torch.Tensor]],
        ids: Ids,
        watch: Callable[[], None],
        plan: int,
        disagreement: Callable[[int], str],
    ) -> None:
        """``headers`` keeps posted receives of headers, by step and stage, from one try of a step
        to the next; ``watch`` is called while this rank waits, and raises when a peer failed;
        ``plan`` is a digest of what all ranks must agree on, ``disagreement`` tells how a rank's
        differs."""
        self.has_sent = False
        """Whether anything of this step has left this rank."""
        self._communicator = communicator
        self._schedule = schedule
        self._step = step
        self._memory = memory
        self._headers = headers
        self._ids = ids
        self._watch = watch
        self._plan = plan
        self._disagreement = disagreement
        self._sent: list[Pending] = []
        self._kept: list[torch.Tensor] = []
        self._announced: set[Edge] = set()
        self._incoming: dict[int, Sequence[int]] = {}
        self._posted: dict[Message, _Receive] = {}

    # ------------------------------------------------------------------------ headers

    def incoming(self, stage: int, *, wait: bool) -> Sequence[int] | None:
        """The ids of the outputs of ``stage`` of another rank; None when they have not come."""
        found = self._incoming.get(stage)
        if found is not None:
            return found
        key = (self._step, stage)
        posted = self._headers.get(key)
        if posted is None:
            buffer = torch.empty(4, dtype=torch.int64)
            posted = self._headers[key] = (self._recv(buffer, stage, _HEADER, stage, 0), buffer)
        pending, buffer = posted
        if not wait and not pending.is_completed():
            return None
        pending.wait(watch=self._watch)
        plan, step, combined, count = buffer.tolist()
        if plan != self._plan:
            raise CollectiveMismatchError(self._disagreement(self._schedule.stage_ranks[stage]))
        if step != self._step:
            raise CollectiveMismatchError(
                f"stage {stage} on rank {self._schedule.stage_ranks[stage]} is in step {step} of "
                f"this schedule, and rank {self._communicator.rank} in step {self._step}: every "
                "rank has to call step() and eval() equally often and in the same order"
            )
        ids = self._memory.lists.get((stage, combined))
        if ids is None:
            if not wait:
                return None
            rest = torch.empty(count, dtype=torch.int64)
            self._recv(rest, stage, _IDS, stage, 0).wait(watch=self._watch)
            ids = self._memory.lists[stage, combined] = rest.tolist()
        del self._headers[key]
        self._incoming[stage] = ids
        return ids

    def _announce(self, stage: int, rank: int) -> Sequence[int]:
        """Send the header of ``stage`` to ``rank`` unless it has been sent; its ids."""
        ids = self._ids(stage, wait=True)
        if ids is None:
            raise PipeliningShapeError(f"stage {stage} does not know what it will send")
        if (stage, rank) not in self._announced:
            self._announced.add((stage, rank))
            combined = digest(list(ids))
            header = [self._plan, self._step, combined, len(ids)]
            self._send(torch.tensor(header), rank, _HEADER, stage, stage, 0)
            if (stage, rank, combined) not in self._memory.listed:
                self._memory.listed.add((stage, rank, combined))
                self._send(torch.tensor(ids), rank, _IDS, stage, stage, 0)
        return ids

    # ------------------------------------------------------------------------ sending

    def send_outputs(self, message: Message, values: Values) -> None:
        """Send the outputs of one microbatch to one rank."""
        stage, rank, k = message.stage, message.target_rank, message.microbatch
        ids = self._announce(stage, rank)
        identity, first = ids[k], ids.index(ids[k])
        known = self._memory.outputs.get((stage, identity))
        if known is None:
            where = f"[Stage {stage}] output of microbatch {k}"
            known = self._memory.outputs[stage, identity] = signature_of(values, where)
        if (stage, rank, identity) not in self._memory.told:
            self._memory.told.add((stage, rank, identity))
            payload = torch.frombuffer(bytearray(known.to_bytes()), dtype=torch.uint8)
            length = torch.tensor([payload.numel()], dtype=torch.int64)
            self._send(length, rank, _LENGTH, stage, rank, first)
            self._send(payload, rank, _SIGNATURE, stage, rank, first)
        for tensor in values.tensors():
            self._send(tensor.detach(), rank, _PAYLOAD, stage, rank, k)

    def send_gradients(self, message: Message, gradients: Sequence[torch.Tensor | None]) -> None:
        """Send the gradients of what one stage has read from another, leaf by leaf.

        Raises
        ``PipeliningShapeError`` where one has another shape or dtype than the output it belongs
        to, or is there for one microbatch and not for another.
        """
        stage, source, k = message.stage, message.target, message.microbatch
        ids = self.incoming(source, wait=True) or ()
        identity, first = ids[k], ids.index(ids[k])
        signature = self._memory.outputs[source, identity]
        rank = message.target_rank
        wanted = [
            (number, meta, gradients[number])
            for number, meta in enumerate(signature.leaves)
            if isinstance(meta, TensorMeta) and meta.requires_grad
        ]
        mask = tuple(gradient is not None for _, _, gradient in wanted)
        key = (stage, source, identity)
        known = self._memory.masks.get(key)
        if known is None:
            self._memory.masks[key] = mask
            if mask:
                flags = torch.tensor([int(flag) for flag in mask], dtype=torch.int64)
                self._send(flags, rank, _MASK, stage, source, first, backward=True)
        elif known != mask:
            numbers = [n for (n, _, _), a, b in zip(wanted, known, mask, strict=True) if a != b]
            raise PipeliningShapeError(
                f"[Stage {stage}] microbatch {k}: the outputs {numbers} of stage {source} got "
                "gradients in one microbatch and none in another of the same shapes; make the "
                "stage use the same inputs in all microbatches"
            )
        for number, meta, gradient in wanted:
            if gradient is None:
                continue
            if gradient.shape != meta.shape or gradient.dtype is not meta.dtype:
                where = f"[Stage {stage}] gradient for value {number} of stage {source}"
                text = differences(Signature((meta,)), Values([gradient]), where)
                raise PipeliningShapeError(text)
            self._send(gradient, rank, _PAYLOAD, stage, source, k, backward=True)

    def _send(
        self,
        tensor: torch.Tensor,
        rank: int,
        kind: int,
        stage: int,
        target: int,
        microbatch: int,
        *,
        backward: bool = False,
    ) -> None:
        self.has_sent = True
        payload = tensor.contiguous()
        if not payload.numel():
            return
        tag = self._tag(kind, stage, target, microbatch, backward)
        label = self._label(kind, stage, microbatch, backward)
        self._sent.append(self._communicator.send(payload, rank, tag=tag, label=label))
        self._kept.append(payload)

    # ---------------------------------------------------------------------- receiving

    def post(self, messages: Iterable[Message]) -> bool:
        """Post receives; False when one of them cannot be posted before something has come."""
        return None not in [self._post(message, wait=False) for message in messages]

    def take_outputs(self, message: Message) -> Values:
        """Wait for the outputs of another rank's stage, for one microbatch."""
        received = self._wait(message)
        tensors = iter(received.buffers)
        leaves: list[object] = []
        for meta in received.signature.leaves:
            if not isinstance(meta, TensorMeta):
                leaves.append(meta)
            else:
                tensor = next(tensors)
                leaves.append(tensor.requires_grad_() if meta.requires_grad else tensor)
        return Values(leaves, received.signature.spec)

    def take_gradients(self, message: Message) -> list[torch.Tensor | None]:
        """Wait for the gradients of a stage of this rank, for one microbatch, leaf by leaf."""
        received = self._wait(message)
        tensors, flags = iter(received.buffers), iter(received.mask or ())
        found: list[torch.Tensor | None] = []
        for meta in received.signature.leaves:
            has_one = isinstance(meta, TensorMeta) and meta.requires_grad and next(flags)
            found.append(next(tensors) if has_one else None)
        return found

    def _wait(self, message: Message) -> _Receive:
        received = self._post(message, wait=True)
        if received is None:
            raise PipeliningShapeError(f"{message} cannot be received")
        del self._posted[message]
        for pending in received.pendings:
            pending.wait(watch=self._watch)
        return received

    def _post(self, message: Message, *, wait: bool) -> _Receive | None:
        found = self._posted.get(message)
        if found is not None:
            return found
        if message.operation is SEND_F:
            found = self._post_outputs(message, wait=wait)
        else:
            found = self._post_gradients(message, wait=wait)
        if found is not None:
            self._posted[message] = found
        return found

    def _post_outputs(self, message: Message, *, wait: bool) -> _Receive | None:
        stage, rank, k = message.stage, message.target_rank, message.microbatch
        ids = self.incoming(stage, wait=wait)
        if ids is None:
            return None
        key = (stage, rank, ids[k])
        if key not in self._memory.told:
            if not wait:
                return None
            self._memory.outputs[stage, ids[k]] = self._learn(stage, rank, ids.index(ids[k]))
            self._memory.told.add(key)
        signature = self._memory.outputs[stage, ids[k]]
        buffers = [meta.empty(self._communicator.device) for meta in signature.tensors()]
        pendings = [
            self._recv(buffer, stage, _PAYLOAD, rank, k) for buffer in buffers if buffer.numel()
        ]
        return _Receive(pendings, buffers, signature)

    def _learn(self, stage: int, rank: int, first: int) -> Signature:
        """Receive a signature. Its tag has the first microbatch that the header names it for."""
        length = torch.empty(1, dtype=torch.int64)
        self._recv(length, stage, _LENGTH, rank, first).wait(watch=self._watch)
        payload = torch.empty(int(length), dtype=torch.uint8)
        self._recv(payload, stage, _SIGNATURE, rank, first).wait(watch=self._watch)
        return Signature.from_bytes(bytes(payload.numpy()))

    def _post_gradients(self, message: Message, *, wait: bool) -> _Receive | None:
        stage, source, k = message.stage, message.target, message.microbatch
        ids = self._ids(source, wait=True)
        if ids is None:
            return None
        signature = self._memory.outputs[source, ids[k]]
        wanted = [meta for meta in signature.tensors() if meta.requires_grad]
        key = (stage, source, ids[k])
        mask = self._memory.masks.get(key)
        if mask is None:
            if wanted and not wait:
                return None
            flags = torch.empty(len(wanted), dtype=torch.int64)
            if wanted:
                first = ids.index(ids[k])
                pending = self._recv(flags, stage, _MASK, source, first, backward=True)
                pending.wait(watch=self._watch)
            mask = self._memory.masks[key] = tuple(bool(flag) for flag in flags.tolist())
        metas = [meta for meta, flag in zip(wanted, mask, strict=True) if flag]
        buffers = [meta.empty(self._communicator.device) for meta in metas]
        pendings = [
            self._recv(buffer, stage, _PAYLOAD, source, k, backward=True)
            for buffer in buffers
            if buffer.numel()
        ]
        return _Receive(pendings, buffers, signature, mask)

    def _recv(
        self,
        buffer: torch.Tensor,
        stage: int,
        kind: int,
        target: int,
        microbatch: int,
        *,
        backward: bool = False,
    ) -> Pending:
        tag = self._tag(kind, stage, target, microbatch, backward)
        label = self._label(kind, stage, microbatch, backward)
        rank = self._schedule.stage_ranks[stage]
        return self._communicator.recv(buffer, rank, tag=tag, label=label)

    # --------------------------------------------------------------------------- both

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for pending in self._sent:
            pending.wait(watch=self._watch)
        self._sent.clear()
        self._kept.clear()

    @property
    def has_posted(self) -> bool:
        """Whether receives of payload are under way."""
        return bool(self._posted)

    def _tag(self, kind: int, stage: int, target: int, microbatch: int, backward: bool) -> int:
        stages = max(self._schedule.stages, self._schedule.ranks)
        tag = (kind * 2 + backward) * stages + stage
        tag = (tag * stages + target) * self._schedule.microbatches + microbatch
        return 2 * tag + self._step % 2

    def _label(self, kind: int, stage: int, microbatch: int, backward: bool) -> str:
        what = "header" if kind == _HEADER else f"{'B' if backward else 'F'}{microbatch}"
        return f"stage {stage} {what}"
