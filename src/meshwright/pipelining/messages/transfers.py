"""The messages between stages of different ranks in one step.

In front of the first payload between a stage and a rank that reads it goes one header: what the
sender takes the schedule to be, the step's number, and an id of each microbatch's signature, which
follows from the inputs before anything is computed (as one digest of the list, which follows where
it is new). Where an id is known the receive is posted at once. The
first microbatch of an unknown one carries its signature in front of its payload. Gradients have the
signature of the outputs they belong to; which of them are none is told once for each id. Constants
are known only when they have been computed: where there are any, each microbatch has a small
message for them.

A receive never blocks when it is posted: what it needs to know may not be there yet, and then it is
posted by whoever waits for it.

From ranks of torch's fake process group, which are no processes, nothing comes. A stage then reads
zeros of the shapes that it is declared to take, or that the trace has seen, and every value that
can have a gradient gets one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.comm import Communicator, Pending, start_together
from meshwright.errors import CollectiveMismatchError, PipeliningShapeError
from meshwright.pipelining.messages.known_signatures import Agreed
from meshwright.pipelining.messages.metadata import (
    Signature,
    TensorMeta,
    Values,
    differences,
    digest,
    packed,
    unpacked,
)
from meshwright.pipelining.stage import PipelineStage
from meshwright.pipelining.stepping.program import PAYLOAD, Leg, tag_of
from meshwright.schedule.actions import SEND_F, Schedule

_HEADER, _IDS, _LENGTH, _SIGNATURE, _MASK, _CONSTANTS, _REST = range(PAYLOAD)
_NAMES = (
    "header",
    "ids",
    "length of the signature",
    "signature",
    "gradients",
    "constants",
    "more constants",
)
_HEADER_SIZE = 4
_TIED = PAYLOAD + 1
_TIED_MESSAGES = 4096
"""More than one stage has for another of tied parameters in one step."""

_MODES = ("an evaluation", "a training step")
_ALIKE = "every rank has to call step() and eval() equally often and in the same order"
_TAGS = 1 << 31
"""Tags that Gloo has."""


Ids = Callable[..., tuple[int, ...] | None]
"""Finds the ids of what a ``stage`` makes, one for each microbatch; None when they are not known
and ``wait`` is false. For one of this rank it is handed ``incoming``, for those of other ranks,
with each call, so that nothing of a step waits for the garbage collector."""


@dataclass(slots=True)
class _Receive:
    """A message on its way to this rank."""

    pendings: list[Pending]
    buffers: list[torch.Tensor]
    signature: Signature
    mask: tuple[bool, ...] | None = None
    constants: tuple[Pending, torch.Tensor] | None = None


class Transfers:
    """The messages of one step on one rank."""

    def __init__(
        self,
        communicator: Communicator,
        schedule: Schedule,
        step: int,
        agreed: Agreed,
        ids: Ids,
        watch: Callable[..., None],
        plan: int,
        disagreement: Callable[[int], str],
        first_tag: int,
    ) -> None:
        """``watch`` is called while this rank waits, and with the step and the rank of a header of
        another step: it raises when a peer failed or a step was refused. ``plan`` is twice a
        digest of what all ranks must agree on, plus one in training; ``disagreement`` tells how a
        rank's differs; tags begin at ``first_tag``."""
        self.has_begun = False
        """Whether anything of this step has left this rank or come to it."""
        self._communicator = communicator
        self._schedule = schedule
        self._step = step
        self._agreed = agreed
        self._ids = ids
        self._watch = watch
        self._plan = plan
        self._disagreement = disagreement
        self._header_tag = first_tag
        """One for all steps."""
        self._first_tag = first_tag + step % 2
        self._can_look = communicator.backend != "gloo"
        """Whether it costs nothing to see that a message has left."""
        self._sent: deque[tuple[Pending, torch.Tensor]] = deque()
        self._announced: set[tuple[int, int]] = set()
        """(stage, rank that reads its outputs)."""
        self.came: dict[int, tuple[int, ...]] = {}
        """By stage of another rank the ids of its outputs."""
        self._posted: dict[Leg, _Receive] = {}
        self._awaited: set[Leg] = set()
        """Those that were waited for before they could be posted."""

    # ------------------------------------------------------------------------ headers

    def incoming(self, stage: int, *, wait: bool) -> tuple[int, ...] | None:
        """List the ids of the outputs of another rank's ``stage``; None until they come."""
        found = self.came.get(stage)
        if found is not None:
            return found
        headers = self._agreed.headers
        if stage not in headers:
            buffer = torch.empty(_HEADER_SIZE, dtype=torch.int64)
            headers[stage] = (self._hear(buffer, stage, _HEADER, stage, 0), buffer)
        pending, buffer = headers[stage]
        if not wait and not pending.is_completed():
            return None
        pending.wait(watch=self._watch)
        plan, step, combined, count = buffer.tolist()
        if step != self._step:
            self._refuse_step(stage, step)
        self.has_begun = True
        if plan // 2 != self._plan // 2:
            raise CollectiveMismatchError(self._disagreement(self._schedule.stage_ranks[stage]))
        if plan != self._plan:
            raise CollectiveMismatchError(
                f"rank {self._schedule.stage_ranks[stage]} is in {_MODES[plan % 2]} and rank "
                f"{self._communicator.rank} in {_MODES[self._plan % 2]}: {_ALIKE}"
            )
        known = self._agreed[stage]
        ids = known.lists.get(combined)
        if ids is None:
            if not wait:
                return None
            rest = torch.empty(count, dtype=torch.int64)
            self._hear(rest, stage, _IDS, stage, 0).wait(watch=self._watch)
            ids = tuple(rest.tolist())
            known.digest_of(ids)
        del headers[stage]
        self.came[stage] = ids
        return ids

    def _refuse_step(self, stage: int, step: int) -> None:
        """Raise for a header of ``stage`` that is of another ``step`` than this one.

        Who sends one of a later step has refused this one: it is kept until this rank comes there.
        One of an earlier step has begun what this rank has refused.
        """
        rank = self._schedule.stage_ranks[stage]
        self.has_begun = self.has_begun or step < self._step
        self._watch(min(step, self._step), self._communicator.ranks[rank])
        self.has_begun = True
        raise CollectiveMismatchError(
            f"stage {stage} on rank {rank} is in step {step} of "
            f"this schedule, and rank {self._communicator.rank} in step {self._step}: {_ALIKE}"
        )

    def _announce(self, stage: int, rank: int) -> tuple[int, ...]:
        """Send the header of ``stage`` to ``rank`` unless it has been sent; its ids."""
        ids = self._ids(stage, self.incoming, wait=True)
        if ids is None:
            raise PipeliningShapeError(f"stage {stage} does not know what it will send")
        if (stage, rank) not in self._announced:
            self._announced.add((stage, rank))
            combined = self._agreed[stage].digest_of(ids)
            header = [self._plan, self._step, combined, len(ids)]
            self._tell(torch.tensor(header), rank, _HEADER, stage, stage, 0)
            listed = self._agreed[stage].listed.setdefault(combined, set())
            if rank not in listed:
                listed.add(rank)
                self._tell(torch.tensor(ids), rank, _IDS, stage, stage, 0)
        return ids

    # ------------------------------------------------------------------------ sending

    def send_outputs(self, leg: Leg, values: Values) -> None:
        """Send the outputs of one microbatch to one rank."""
        _, stage, rank, k, _, _ = leg.message
        ids = self._announce(stage, rank)
        identity, known = ids[k], self._agreed[stage]
        signature = known.outputs[identity]
        told = known.told.setdefault(identity, set())
        if rank not in told:
            told.add(rank)
            first = ids.index(identity)
            payload = torch.frombuffer(bytearray(signature.to_bytes()), dtype=torch.uint8)
            length = torch.tensor([payload.numel()], dtype=torch.int64)
            self._tell(length, rank, _LENGTH, stage, rank, first)
            self._tell(payload, rank, _SIGNATURE, stage, rank, first)
        if signature.room:
            parts = packed(values.constants(), signature.room)
            for kind, part in zip((_CONSTANTS, _REST), parts, strict=False):
                self._tell(part, rank, kind, stage, rank, k)
        for tensor in values.tensors():
            self._send(tensor.detach(), leg)

    def send_gradients(self, leg: Leg, gradients: Sequence[torch.Tensor | None]) -> None:
        """Send the gradients of what one stage has read from another, leaf by leaf.

        Raises ``PipeliningShapeError`` where one has another shape or dtype than the output it
        belongs to, or is there for one microbatch and not for another.
        """
        _, stage, source, k, _, rank = leg.message
        ids = self.incoming(source, wait=True) or ()
        signature = self._agreed[source].outputs[ids[k]]
        mask = tuple([gradients[number] is not None for number in signature.wanted])
        masks = self._agreed[source].masks.setdefault(ids[k], {})
        known = masks.get(stage)
        if known is None:
            masks[stage] = mask
            if mask:
                flags = torch.tensor([int(flag) for flag in mask], dtype=torch.int64)
                first = ids.index(ids[k])
                self._tell(flags, rank, _MASK, stage, source, first, backward=True)
        elif known != mask:
            both = zip(signature.wanted, known, mask, strict=True)
            raise PipeliningShapeError(
                f"[Stage {stage}] microbatch {k}: the outputs {[n for n, a, b in both if a != b]} "
                f"of stage {source} got gradients in one microbatch and none in another of the "
                "same shapes; make the stage use the same inputs in all microbatches"
            )
        for number in signature.wanted:
            gradient, meta = gradients[number], signature.leaves[number]
            if gradient is None or not isinstance(meta, TensorMeta):
                continue
            if gradient.shape != meta.shape or gradient.dtype is not meta.dtype:
                where = f"[Stage {stage}] gradient for value {number} of stage {source}"
                text = differences(Signature((meta,)), Values([gradient]), where)
                raise PipeliningShapeError(text)
            self._send(gradient, leg)

    def _send(self, tensor: torch.Tensor, leg: Leg) -> None:
        self.has_begun = True
        payload = tensor.contiguous()
        if payload.numel():
            tag = leg.tag + self._first_tag
            sent = self._communicator.send(payload, leg.peer, tag=tag, label=leg.label)
            self._sent.append((sent, payload))
            if self._can_look:
                self.let_go()

    def _tell(
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
        """Send what goes ahead of payloads."""
        self.has_begun = True
        tag = self._header_tag if kind == _HEADER else self._first_tag
        tag += tag_of(self._schedule, kind, stage, target, microbatch, backward=backward)
        label = f"{_NAMES[kind]} of stage {stage}"
        sent = self._communicator.send(tensor, rank, tag=tag, label=label)
        self._sent.append((sent, tensor))

    def let_go(self) -> None:
        """Give back the memory of what has left, oldest first, without waiting."""
        sent = self._sent
        while sent and sent[0][0].is_completed():
            sent.popleft()[0].wait(watch=self._watch)

    # ---------------------------------------------------------------------- receiving

    def post(self, legs: Sequence[Leg]) -> list[Leg]:
        """Post receives; returns those that cannot be posted before something has come."""
        return [leg for leg in legs if self._post(leg, wait=False) is None]

    def post_rest(self, legs: Sequence[Leg]) -> list[Leg]:
        """Post those of ``legs`` that could not be posted before, but for those awaited."""
        return self.post([leg for leg in legs if leg not in self._awaited])

    def take_outputs(self, leg: Leg) -> Values:
        """Wait for the outputs of another rank's stage, for one microbatch."""
        received = self._wait(leg)
        signature = received.signature
        for number in signature.strided:
            meta = signature.tensors[number]
            received.buffers[number] = meta.laid_out(received.buffers[number])
        constants = iter(self._take_constants(leg, received))
        if len(received.buffers) == len(signature.leaves):
            for number in signature.wanted:
                received.buffers[number].requires_grad_()
            return Values(list(received.buffers), signature.spec)
        tensors = iter(received.buffers)
        leaves: list[object] = []
        for meta in signature.leaves:
            if meta is None:
                leaves.append(next(constants))
            else:
                tensor = next(tensors)
                leaves.append(tensor.requires_grad_() if meta.requires_grad else tensor)
        return Values(leaves, signature.spec)

    def _take_constants(self, leg: Leg, received: _Receive) -> list[object]:
        """Wait for what came beside the tensors."""
        if received.constants is None:
            return []
        _, stage, rank, k, _, _ = leg.message
        pending, buffer = received.constants
        pending.wait(watch=self._watch)

        def receive(rest: torch.Tensor) -> None:
            self._hear(rest, stage, _REST, rank, k).wait(watch=self._watch)

        return unpacked(buffer, receive)

    def take_gradients(self, leg: Leg) -> list[torch.Tensor | None]:
        """Wait for the gradients of a stage of this rank, for one microbatch, leaf by leaf."""
        received = self._wait(leg)
        leaves = received.signature.leaves
        if len(received.buffers) == len(leaves):
            return list(received.buffers)
        tensors = iter(received.buffers)
        found: list[torch.Tensor | None] = [None] * len(leaves)
        for number, flag in zip(received.signature.wanted, received.mask or (), strict=True):
            if flag:
                found[number] = next(tensors)
        return found

    def _wait(self, leg: Leg) -> _Receive:
        received = self._posted.pop(leg, None)
        if received is None:
            self._awaited.add(leg)
            received = self._post(leg, wait=True)
            if received is None:
                raise PipeliningShapeError(f"{leg.label} cannot be received")
            del self._posted[leg]
        for pending in received.pendings:
            pending.wait(watch=self._watch)
        return received

    def _post(self, leg: Leg, *, wait: bool) -> _Receive | None:
        found = self._posted.get(leg)
        if found is not None:
            return found
        if leg.message.operation is SEND_F:
            found = self._post_outputs(leg, wait=wait)
        else:
            found = self._post_gradients(leg, wait=wait)
        if found is not None:
            self._posted[leg] = found
        return found

    def _post_outputs(self, leg: Leg, *, wait: bool) -> _Receive | None:
        _, stage, rank, k, _, _ = leg.message
        ids = self.incoming(stage, wait=wait)
        if ids is None:
            return None
        outputs = self._agreed[stage].outputs
        signature = outputs.get(ids[k])
        if signature is None:
            if not wait:
                return None
            signature = outputs[ids[k]] = self._learn(stage, rank, ids.index(ids[k]))
        found = self._open(leg, signature.tensors, signature)
        if signature.room:
            buffer = torch.empty(signature.room, dtype=torch.uint8)
            heard = self._hear(buffer, stage, _CONSTANTS, rank, k)
            return replace(found, constants=(heard, buffer))
        return found

    def _learn(self, stage: int, rank: int, first: int) -> Signature:
        """Receive a signature. Its tag has the first microbatch that the header names it for."""
        length = torch.empty(1, dtype=torch.int64)
        self._hear(length, stage, _LENGTH, rank, first).wait(watch=self._watch)
        payload = torch.empty(int(length), dtype=torch.uint8)
        self._hear(payload, stage, _SIGNATURE, rank, first).wait(watch=self._watch)
        return Signature.from_bytes(bytes(payload.numpy()))

    def _post_gradients(self, leg: Leg, *, wait: bool) -> _Receive | None:
        _, stage, source, k, _, _ = leg.message
        ids = self._ids(source, self.incoming, wait=wait)
        # Of the first step the forward has to have run.
        signature = None if ids is None else self._agreed[source].outputs.get(ids[k])
        if ids is None or signature is None:
            return None
        masks = self._agreed[source].masks.setdefault(ids[k], {})
        mask = masks.get(stage)
        if mask is None:
            count = len(signature.wanted)
            if count and not wait:
                return None
            flags = torch.empty(count, dtype=torch.int64)
            if count:
                first = ids.index(ids[k])
                pending = self._hear(flags, stage, _MASK, source, first, backward=True)
                pending.wait(watch=self._watch)
            mask = masks[stage] = tuple(bool(flag) for flag in flags.tolist())
        metas = [
            signature.leaves[n] for n, flag in zip(signature.wanted, mask, strict=True) if flag
        ]
        return self._open(leg, [m for m in metas if isinstance(m, TensorMeta)], signature, mask)

    def _open(
        self,
        leg: Leg,
        metas: Sequence[TensorMeta],
        signature: Signature,
        mask: tuple[bool, ...] | None = None,
    ) -> _Receive:
        """Post the receive of one message."""
        self.has_begun = True
        communicator, tag = self._communicator, leg.tag + self._first_tag
        buffers = [meta.empty(communicator.device) for meta in metas]
        pendings = [
            communicator.recv(buffer, leg.peer, tag=tag, label=leg.label)
            for buffer in buffers
            if buffer.numel()
        ]
        return _Receive(pendings, buffers, signature, mask)

    def _hear(
        self,
        buffer: torch.Tensor,
        stage: int,
        kind: int,
        target: int,
        microbatch: int,
        *,
        backward: bool = False,
    ) -> Pending:
        """Post the receive of what goes ahead of payloads."""
        tag = self._header_tag if kind == _HEADER else self._first_tag
        tag += tag_of(self._schedule, kind, stage, target, microbatch, backward=backward)
        label = f"{_NAMES[kind]} of stage {stage}"
        rank = self._schedule.stage_ranks[stage]
        return self._communicator.recv(buffer, rank, tag=tag, label=label)

    # --------------------------------------------------------------- tied parameters

    def send_tied(self, tensor: torch.Tensor, stage: int, target: int, number: int) -> None:
        """Send message ``number`` about tied parameters to stage ``target`` of another rank."""
        self.has_begun = True
        payload = tensor.contiguous()
        rank, tag = self._schedule.stage_ranks[target], self._tied_tag(stage, target, number)
        label = f"stage {stage} tied {number}"
        sent = self._communicator.send(payload, rank, tag=tag, label=label)
        self._sent.append((sent, payload))

    def recv_tied(self, tensor: torch.Tensor, stage: int, target: int, number: int) -> None:
        """Wait for message ``number`` about tied parameters from ``stage`` of another rank."""
        rank, tag = self._schedule.stage_ranks[stage], self._tied_tag(stage, target, number)
        label = f"stage {stage} tied {number}"
        self.has_begun = True
        self._communicator.recv(tensor, rank, tag=tag, label=label).wait(watch=self._watch)

    def _tied_tag(self, stage: int, target: int, number: int) -> int:
        start = tag_of(self._schedule, _TIED, 0, 0, 0, backward=False)
        pair = stage * self._schedule.stages + target
        return start + 2 * (pair * _TIED_MESSAGES + number) + self._first_tag

    # --------------------------------------------------------------------------- both

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        start_together(pending for pending, _ in self._sent)
        while self._sent:
            self._sent.pop()[0].wait(watch=self._watch)


def first_tag(schedule: Schedule, number: int) -> int:
    """Compute the first tag of schedule ``number`` of a group.

    A schedule that has failed may have left messages, which no later one must take for its own.
    Beginnings lie far apart, whatever the sizes of the schedules: number times the golden ratio.
    """
    last = tag_of(schedule, _TIED, 0, 0, 0, backward=False)
    own = last + 2 * (schedule.stages * schedule.stages * _TIED_MESSAGES + 1)
    return number * 2_654_435_761 % max(_TAGS - own, 1)


class UnansweredTransfers(Transfers):
    """Transfers of which none is answered."""

    def __init__(self, stages: Mapping[int, PipelineStage], *args: Any) -> None:
        """``stages`` are those of this rank; ``args`` as `Transfers` has them."""
        super().__init__(*args)
        self._stages = stages

    def incoming(self, stage: int, *, wait: bool) -> tuple[int, ...]:
        """See `Transfers`."""
        found = self.came.get(stage)
        if found is None:
            identity = digest("not told", stage)
            self._agreed[stage].outputs[identity] = self._declared(stage)
            found = self.came[stage] = (identity,) * self._schedule.microbatches
        return found

    def recv_tied(self, tensor: torch.Tensor, stage: int, target: int, number: int) -> None:
        """See `Transfers`."""
        super().recv_tied(tensor.zero_(), stage, target, number)

    def _declared(self, stage: int) -> Signature:
        """Find what the stages of this rank that read ``stage`` say of its outputs."""
        readers = [mine for mine in self._stages.values() if stage in mine.edges.sources()]
        found = next((s for mine in readers if (s := mine.takes_of(stage)) is not None), None)
        if found is None or found.room:
            raise PipeliningShapeError(
                f"{readers[0].name} does not know what stage {stage} sends, and the ranks of a "
                "fake process group tell nothing: give PipelineStage input_args of tensors, as "
                "one microbatch has them, or cut a traced model"
            )
        leaves = [
            TensorMeta(m.shape, m.stride, m.dtype, m.dtype.is_floating_point or m.dtype.is_complex)
            for m in found.tensors
        ]
        return Signature(tuple(leaves), found.spec)

    def _wait(self, leg: Leg) -> _Receive:
        received = super()._wait(leg)
        for buffer in received.buffers:
            buffer.zero_()
        return received

    def _hear(self, buffer: torch.Tensor, *args: Any, **kwargs: Any) -> Pending:
        return super()._hear(buffer.fill_(1), *args, **kwargs)
