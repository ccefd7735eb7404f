"""The messages between stages of different ranks, in one step.

Between two ranks, messages have one order, which follows from the schedule: sends start and
receives are posted in the order of the sender's row, so no message needs an identifier. What a
receiver must know before it can post goes ahead, in a control message:

- with the first outputs of a stage that a rank reads in a step, the sender's digest of the
  schedule, the step's number, and the id of each microbatch's shapes;
- with the first outputs of an id, its signature;
- with the first gradients of an id, which are None; with all later ones too if some were;
- with all outputs that have any, constants.

Both sides know from earlier steps which messages have one. A step like an earlier one has one
control message for each stage and reading rank.

Posting a receive never blocks. If its control message has not arrived, it and all later receives
from that rank are posted when something waits for them. On Gloo each receive sends its sender a
message that wakes a thread there, so receives of small messages are posted early, several together.

Ranks of torch's fake process group are not processes and send nothing. A stage then reads zeros of
the shapes that were declared or traced, and every value that can have a gradient gets one.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch

from meshwright.comm import Communicator, Pending, Transfer, apart, start_together
from meshwright.errors import CollectiveMismatchError, PipeliningShapeError
from meshwright.pipelining.microbatch import Microbatches
from meshwright.pipelining.signature import (
    KnownSignature,
    Signature,
    SignatureCache,
    TensorMeta,
    Values,
    differences,
    digest,
    read_constants,
    write_constants,
)
from meshwright.pipelining.stage import PipelineStage
from meshwright.schedule import messages
from meshwright.schedule.actions import SEND_F, Schedule

Contents = dict[str, Any]
Sent = list[tuple[Pending, torch.Tensor]]
"""Sends in flight, each with the memory that it reads from."""
IdCache = dict[object, tuple[int, ...]]
"""The ids of a stage's outputs by microbatch, by what they follow from."""

ROOM = 512
"""Bytes in a control message."""
_COUNT = 8
"""Bytes at its start that hold the length of the text."""
_FIRST_TAG = 1 << 29
# A receive on Gloo wakes a thread of its sender, so small ones are posted and awaited together.
_AHEAD = 16
"""The number of posted receives up to which more are posted early."""
_SMALL = 1 << 16
"""Bytes of a message up to which the receive behind it is posted early."""
_KEPT = 256
"""The number of kinds of batches that are remembered."""
_PLAIN = (bool, int, float, str, type(None))
_MODES = ("an evaluation", "a training step")
_ALIKE = "every rank has to call step() and eval() equally often and in the same order"


@dataclass(slots=True, eq=False)
class P2POperation:
    """One message from or to this rank, with its label."""

    message: messages.Message
    label: str
    peer: int
    """The other rank."""
    readers: tuple[PipelineStage, ...] = ()
    """For an incoming message, the stages of this rank that read it."""
    following: P2POperation | None = None
    """For an incoming message, the next one from the same rank."""


# ------------------------------------------------------------------------------- channels


class P2PChannels:
    """One-way channels between pairs of ranks, in which messages match by their order alone.

    On a device a communicator has one queue: its k-th send to a rank matches that rank's k-th
    receive from here, whatever their tags, and an unmatched one blocks everything issued after it.
    So each pair of ranks and direction has its own communicator there, and no order among channels
    can deadlock. Host transports do not block: there all channels of one ``number`` use the group
    itself, under one tag.
    """

    def __init__(
        self, communicator: Communicator, pairs: Iterable[tuple[int, int]], number: int
    ) -> None:
        """``pairs`` of (sender, receiver) are equal on all ranks; others' are ignored."""
        self._communicator = communicator
        self._number = number
        mine = (pair for pair in set(pairs) if communicator.rank in pair)
        # In this order of opening, ranks never wait for each other in a circle.
        self.closed = deque(sorted(mine, key=lambda pair: (min(pair), max(pair), pair)))
        self._greeting: list[Pending] = []
        """Handshake with the other rank of the first channel that is not open yet."""
        self._tag = _FIRST_TAG + number if communicator.is_on_host else 0
        self._sends: dict[int, tuple[Communicator, int]] = {}
        """By the other rank, the communicator to it, and the rank's number there."""
        self._receives: dict[int, tuple[Communicator, int]] = {}
        while self.closed and communicator.is_on_host:
            self._open(communicator, communicator.ranks)

    def open(self, watch: Callable[[], None]) -> None:
        """Create the communicators of the channels. Both ranks of a channel must call this.

        ``watch`` is called while this rank waits for another. If it raises, the next call
        continues where this one stopped.
        """
        parent = self._communicator
        while self.closed:
            source, target = self.closed[0]
            peer = target if parent.rank == source else source
            # First over the control channel, whose waits are watched, so that both ranks are here
            # when the communicator is created.
            if not self._greeting:
                # Both begin before either is waited for: a send may end with the peer's receive.
                for begin in (parent.control.recv, parent.control.send):
                    # The device is named wherever control data is made: torch.set_default_device
                    # may be another.
                    word, label = torch.zeros(1, device="cpu"), f"lane {source} to {target}"
                    self._greeting.append(begin(word, peer, tag=2 * self._number, label=label))
            for pending in self._greeting:
                pending.wait(watch=watch)
            ranks = sorted((parent.ranks[source], parent.ranks[target]))
            name = f"{parent.name}: lane {source} to {target} of schedule {self._number}"
            self._open(apart(parent, ranks, name), ranks)
            self._greeting.clear()

    def _open(self, channel: Communicator, ranks: Sequence[int]) -> None:
        source, target = self.closed.popleft()
        whole = self._communicator.ranks
        if self._communicator.rank == source:
            self._sends[target] = channel, ranks.index(whole[target])
        else:
            self._receives[source] = channel, ranks.index(whole[source])

    def send(self, tensors: Iterable[torch.Tensor], peer: int, label: str) -> list[Pending]:
        """Send to rank ``peer``, as one operation where the transport can."""
        channel, number = self._sends[peer]
        transfer = partial(Transfer, "send", peer=number, tag=self._tag, label=label)
        return channel.batch(list(map(transfer, tensors)))

    def recv(self, tensors: Iterable[torch.Tensor], peer: int, label: str) -> list[Pending]:
        """Receive from rank ``peer`` into ``tensors`` what it sends with one `send`."""
        channel, number = self._receives[peer]
        transfer = partial(Transfer, "recv", peer=number, tag=self._tag, label=label)
        return channel.batch(list(map(transfer, tensors)))


# ------------------------------------------------------------------------ control messages


@dataclass(slots=True, eq=False)
class ControlMessage:
    """A control message from rank ``rank``, awaited or arrived."""

    rank: int
    label: str
    pending: Pending
    memory: bytearray
    contents: Contents | None = None
    """None until it is read."""

    @property
    def has_come(self) -> bool:
        """True when it can be read without waiting."""
        return self.contents is not None or self.pending.is_completed()


class ControlMessages:
    """The control messages of one schedule on one rank, as JSON over the control channel.

    Two ranks write and read each other's in the order of the payloads. Each has a fixed size, so
    that its receive can be posted before its contents are known; what does not fit follows in a
    second message.
    """

    def __init__(self, communicator: Communicator, number: int) -> None:
        self._control = communicator.control
        self._tags = 2 * number, 2 * number + 1
        """Tags of messages and of what did not fit in them; other schedules have other tags."""
        self._unread: defaultdict[int, deque[ControlMessage]] = defaultdict(deque)
        """By rank, oldest first."""
        self._awaited: dict[int, ControlMessage] = {}
        """By rank, the one that all else waits for. If a refused step leaves one, the next step
        takes it over: a posted receive cannot be withdrawn."""

    def send(self, contents: Contents, rank: int, label: str) -> Sent:
        """Send ``contents`` to ``rank``; returns the sends in flight."""
        text = json.dumps(contents).encode()
        whole = bytearray(len(text).to_bytes(_COUNT, "little") + text)
        sent: Sent = []
        for part, tag, name in (
            (whole[:ROOM].ljust(ROOM), self._tags[0], label),
            (whole[ROOM:], self._tags[1], f"rest: {label}"),
        ):
            if part:
                # It shares the bytes and keeps them alive, and is kept itself until its send has
                # ended.
                buffer = torch.frombuffer(part, dtype=torch.uint8)
                sent.append((self._control.send(buffer, rank, tag=tag, label=name), buffer))
        return sent

    def expect(self, rank: int, label: str) -> ControlMessage:
        """Post the receive of the next message from ``rank``."""
        memory = bytearray(ROOM)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        pending = self._control.recv(buffer, rank, tag=self._tags[0], label=label)
        message = ControlMessage(rank, label, pending, memory)
        self._unread[rank].append(message)
        return message

    def awaited(self, rank: int, label: str) -> ControlMessage:
        """Expect a message that must be read first: the same one until `accept`."""
        found = self._awaited.get(rank)
        if found is None:
            found = self._awaited[rank] = self.expect(rank, label)
        return found

    def accept(self, message: ControlMessage) -> None:
        """Release an `awaited` message that was read for this step: the next one is expected."""
        del self._awaited[message.rank]

    def read(self, message: ControlMessage, watch: Callable[[], None]) -> Contents:
        """Wait for a message, and for those before it; ``watch`` is called meanwhile."""
        unread = self._unread[message.rank]
        while unread and message.contents is None:
            oldest = unread[0]
            oldest.pending.wait(watch=watch)
            first = oldest.memory
            count = int.from_bytes(first[:_COUNT], "little")
            text = first[_COUNT : _COUNT + count]
            if len(text) < count:
                rest = bytearray(count - len(text))
                buffer = torch.frombuffer(rest, dtype=torch.uint8)
                tag, label = self._tags[1], f"rest: {oldest.label}"
                self._control.recv(buffer, oldest.rank, tag=tag, label=label).wait(watch=watch)
                text += rest
            oldest.contents = json.loads(text)
            unread.popleft()
        return message.contents or {}


# ------------------------------------------------------------------------------------- ids


class StepIds:
    """The ids of one step on one rank.

    An id stands for the shapes, strides and dtypes of a stage's outputs for one microbatch.
    """

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        schedule: Schedule,
        batch: Microbatches,
        cache: IdCache,
        *,
        training: bool,
    ) -> None:
        self._stages = stages
        self._schedule = schedule
        self._batch = batch
        self._cache = cache
        self._training = training
        self.known: dict[int, tuple[int, ...]] = {}
        """By stage: received from other ranks, computed on request for this rank's own."""

    @property
    def microbatches(self) -> int:
        return self._schedule.microbatches

    def of(self, stage: int) -> tuple[int, ...] | None:
        """Return the ids of the outputs of ``stage``, by microbatch.

        None where they depend on ids that another rank has not sent yet.
        """
        found = self.known.get(stage)
        if found is not None or stage not in self._stages:
            return found
        before: list[tuple[int, ...]] = []
        for source in self._schedule.sources[stage]:
            theirs = self.of(source)
            if theirs is None:
                return None
            before.append(theirs)
        own, batch = self._stages[stage], self._batch
        reads_batch = own.takes_batch or bool(batch.kwargs)
        # Which outputs require gradients depends on which parameters do.
        flags = self._training and tuple([p.requires_grad for p in own.submod.parameters()])
        given: Any = ()
        if reads_batch:
            given = self._describe(own) if batch.key is None else batch.key
        key = (stage, flags, *before, given)
        found = self._cache.get(key)
        if found is None:
            texts = self._describe(own) if reads_batch else ("",) * self.microbatches
            rows = zip(*before, strict=True) if before else [()] * self.microbatches
            found = tuple(
                digest(stage, flags, list(row), text) for row, text in zip(rows, texts, strict=True)
            )
            if len(self._cache) >= _KEPT:
                self._cache.clear()
            self._cache[key] = found
        self.known[stage] = found
        return found

    def _describe(self, stage: PipelineStage) -> tuple[str, ...]:
        """Describe this rank's own arguments for ``stage``, by microbatch."""
        batch = self._batch
        found: list[str] = []
        for k in range(self.microbatches):
            args = batch.args[k] if stage.takes_batch else ()
            leaves = Values.of((args, batch.kwargs[k] if batch.kwargs else {})).leaves
            described = [
                (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
                if isinstance(leaf, torch.Tensor)
                else (type(leaf).__name__, leaf if isinstance(leaf, _PLAIN) else "")
                for leaf in leaves
            ]
            found.append(repr(described))
        return tuple(found)


# ------------------------------------------------------------------------------- transfers


class Transport:
    """What one rank uses to send and receive the messages of one schedule, in all steps."""

    def __init__(
        self,
        communicator: Communicator,
        schedules: Iterable[Schedule],
        tied: Iterable[tuple[int, int]],
        number: int,
    ) -> None:
        """``schedules`` have the same stages; ``tied`` are pairs of stages, in either order."""
        pairs: set[tuple[int, int]] = set()
        self.stage_ranks: tuple[int, ...] = ()
        for schedule in schedules:
            self.stage_ranks = schedule.stage_ranks
            pairs.update(messages.lanes(schedule))
        ends = [(self.stage_ranks[one], self.stage_ranks[other]) for one, other in tied]
        pairs.update((one, other) for one, other in ends if one != other)
        self.device = communicator.device
        self.rank = communicator.rank
        self.ranks = communicator.ranks
        self.channels = P2PChannels(communicator, pairs, number)
        self.control = ControlMessages(communicator, number)
        self.signatures = SignatureCache()
        self.ids: IdCache = {}
        # On Gloo a look hands the transfer to a waiting thread.
        self.can_look = communicator.backend != "gloo"
        """True when checking that a send has completed is cheap."""
        self.posts_ahead = communicator.is_on_host and not self.can_look
        """True when receives may be posted, in their order, before the row says so."""


@dataclass(slots=True)
class _Receive:
    """A message on its way to this rank."""

    pendings: Sequence[Pending]
    buffers: list[torch.Tensor]
    signature: Signature
    mask: tuple[bool, ...] = ()
    control: ControlMessage | None = None
    """The control message that has the constants."""


class P2PTransfers:
    """The messages of one step on one rank."""

    def __init__(
        self,
        transport: Transport,
        ids: StepIds,
        step: int,
        plan: int,
        look: Callable[..., None],
        disagreement: Callable[[int], str],
    ) -> None:
        """``plan`` is a digest of what all ranks must agree on.

        ``look(step, beginner)`` raises when another rank has failed in this step, or has refused
        it or another ``step``; ``disagreement`` says how the plan of a rank differs.
        """
        self.has_begun = False
        """True when any message of this step was sent or received by this rank."""
        self.unposted: dict[int, deque[P2POperation]] = {}
        """By rank, receives whose control message has not arrived, and those behind them."""
        self._transport = transport
        self._control = transport.control
        self._known = transport.signatures.stages
        self._ids = ids
        self._step = step
        self._plan = plan
        self._watch = look
        self._disagreement = disagreement
        self._sent: deque[tuple[Pending, Any]] = deque()
        """Sends in flight, each with the memory that it reads from."""
        self._announced: set[tuple[int, int]] = set()
        """(stage, rank that reads its outputs)."""
        self._posted: dict[P2POperation, _Receive] = {}

    # ------------------------------------------------------------------------ sending

    def send_outputs(self, operation: P2POperation, values: Values) -> None:
        """Send the outputs of one microbatch to one rank."""
        _, stage, rank, k, _, _ = operation.message
        ids = self._ids.known[stage]  # the forward has computed them
        known = self._known[stage][ids[k]]
        contents: Contents = {}
        if (stage, rank) not in self._announced:
            self._announced.add((stage, rank))
            runs = [[identity, len(list(run))] for identity, run in groupby(ids)]
            contents["step"] = [self._plan, self._step, runs]
        if rank not in known.told:
            known.told.add(rank)
            contents["signature"] = known.signature.to_json()
        tensors = values.leaves
        if known.signature.has_constants:
            tensors = [leaf for leaf in values.leaves if isinstance(leaf, torch.Tensor)]
            constants = [leaf for leaf in values.leaves if not isinstance(leaf, torch.Tensor)]
            contents["constants"] = write_constants(constants)
        if contents:
            self._write(contents, rank, f"{' and '.join(contents)} of stage {stage}")
        self._send(tensors, operation)

    def send_gradients(
        self, operation: P2POperation, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Send the gradients of what one stage has read from another, leaf by leaf.

        If no gradient was None in the first microbatch of these shapes, zeros replace any that is
        None later; otherwise each message is preceded by one that says which are.

        Raises ``PipeliningShapeError`` where one has another shape or dtype than the output it
        belongs to.
        """
        _, stage, source, k, _, rank = operation.message
        known = self._known[source][self._ids.known[source][k]]
        signature = known.signature
        mask = tuple([gradients[number] is not None for number in signature.wanted])
        if mask and not known.complete.get(stage):
            self._write({"gradients": mask}, rank, f"gradients of stage {stage}")
        is_complete = known.complete.setdefault(stage, all(mask))
        found: list[torch.Tensor] = []
        for number in signature.wanted:
            gradient, meta = gradients[number], signature.leaves[number]
            if meta is None or (gradient is None and not is_complete):
                continue
            if gradient is None:
                gradient = torch.zeros(meta.shape, dtype=meta.dtype, device=self._transport.device)
            if gradient.shape != meta.shape or gradient.dtype is not meta.dtype:
                where = f"[Stage {stage}] gradient for value {number} of stage {source}"
                text = differences(Signature((meta,)), Values([gradient]), where)
                raise PipeliningShapeError(text)
            found.append(gradient)
        self._send(found, operation)

    def _send(self, tensors: Sequence[torch.Tensor], operation: P2POperation) -> None:
        self.has_begun = True
        # Lazy conjugate and negative views would send their memory without the conjugation or sign.
        payloads = [
            t.detach().resolve_conj().resolve_neg().contiguous() for t in tensors if t.numel()
        ]
        if payloads:
            channels = self._transport.channels
            # Payloads are kept until their sends have ended: the transport reads their memory, and
            # an allocator would give it away.
            sent = channels.send(payloads, operation.peer, operation.label)
            self._sent.extend(zip(sent, payloads, strict=True))
            if self._transport.can_look:
                self.let_go()

    def _write(self, contents: Contents, rank: int, label: str) -> None:
        self.has_begun = True
        self._sent.extend(self._control.send(contents, rank, label))

    def let_go(self) -> None:
        """Release the memory of completed sends, oldest first, without waiting."""
        sent = self._sent
        while sent and sent[0][0].is_completed():
            # It has ended; the wait raises its error, and reports its end to observers.
            sent.popleft()[0].wait(watch=self._watch)

    def finish(self) -> None:
        """Wait for all sends."""
        # The last send first: by its end most of the others have ended, and their waits return at
        # once.
        start_together([pending for pending, _ in self._sent])
        while self._sent:
            self._sent.pop()[0].wait(watch=self._watch)

    # ---------------------------------------------------------------------- receiving

    def post(self, operations: Iterable[P2POperation]) -> None:
        """Post receives, now or once it is their turn and their sizes are known."""
        for operation in operations:
            if operation in self._posted:
                continue
            queue = self.unposted.get(operation.peer)
            if queue is not None:
                queue.append(operation)
            elif not self._post(operation, wait=False):
                self.unposted[operation.peer] = deque([operation])

    def post_rest(self) -> None:
        """Post what could not be posted before."""
        for rank, queue in list(self.unposted.items()):
            while queue and self._post(queue[0], wait=False):
                queue.popleft()
            if not queue:
                del self.unposted[rank]

    def take_outputs(self, operation: P2POperation) -> Values:
        """Wait for the outputs of another rank's stage, for one microbatch."""
        received = self._wait(operation)
        signature, buffers = received.signature, received.buffers
        for number in signature.strided:
            buffers[number] = signature.tensors[number].laid_out(buffers[number])
        leaves: list[Any] = list(buffers)
        if signature.has_constants and received.control is not None:
            contents = self._control.read(received.control, self._watch)
            tensors, constants = iter(buffers), iter(read_constants(contents["constants"]))
            leaves = [next(constants if meta is None else tensors) for meta in signature.leaves]
        for number in signature.wanted:
            leaves[number].requires_grad_()
        return Values(leaves, signature.spec)

    def take_gradients(self, operation: P2POperation) -> list[torch.Tensor | None]:
        """Wait for the gradients of a stage of this rank, for one microbatch, leaf by leaf."""
        received = self._wait(operation)
        leaves = received.signature.leaves
        if len(received.buffers) == len(leaves):
            return list(received.buffers)
        tensors = iter(received.buffers)
        found: list[torch.Tensor | None] = [None] * len(leaves)
        for number, flag in zip(received.signature.wanted, received.mask, strict=True):
            if flag:
                found[number] = next(tensors)
        return found

    def _wait(self, operation: P2POperation) -> _Receive:
        received = self._posted.pop(operation, None)
        if received is None:
            queue = self.unposted.get(operation.peer, ())
            while operation not in self._posted:
                if not queue or not self._post(queue[0], wait=True):
                    raise PipeliningShapeError(f"{operation.label} cannot be received")
                while queue and queue[0] in self._posted:
                    queue.popleft()
            received = self._posted.pop(operation)
        for pending in received.pendings:
            pending.wait(watch=self._watch)
        return received

    def _post(self, operation: P2POperation, *, wait: bool) -> bool:
        """Post the receive of a message, unless it needs a control message that has not arrived.

        Receives of small messages behind it may be posted with it. Returns whether it was posted.
        """
        posted, following = self._posted, operation
        begun: list[Pending] = []
        while following is not None and following not in posted:
            is_output = following.message.operation is SEND_F
            post = self._post_outputs if is_output else self._post_gradients
            found = post(following, wait=wait and following is operation)
            if found is None:
                break
            posted[following] = found
            # A device's receive ahead of the row's order would hold up its queue.
            if not self._transport.posts_ahead:
                return True
            begun += found.pendings
            is_small = sum(buffer.nbytes for buffer in found.buffers) <= _SMALL
            following = following.following if is_small and len(posted) < _AHEAD else None
        if begun:
            start_together(begun)
        return operation in posted

    def _post_outputs(self, operation: P2POperation, *, wait: bool) -> _Receive | None:
        _, stage, _, k, _, _ = operation.message
        ids, known = self._ids.known.get(stage), self._known[stage]
        found = None if ids is None else known.get(ids[k])
        control = None
        if found is None:
            control = self._awaited(operation, f"metadata of stage {stage}", wait=wait)
            if control is None:
                return None
            contents = self._control.read(control, self._watch)
            if ids is None:
                ids = self._learn_ids(stage, operation.peer, contents)
            self._control.accept(control)
            found = known.get(ids[k])
            if found is None:
                signature = Signature.from_json(contents["signature"])
                # Kept under the sender's id: both sides drop the same ids at the end of a step.
                found = known[ids[k]] = KnownSignature(signature)
        elif found.signature.has_constants:
            control = self._control.expect(operation.peer, f"metadata of stage {stage}")
        return self._open(operation, found.signature.tensors, found.signature, control=control)

    def _learn_ids(self, stage: int, rank: int, contents: Contents) -> tuple[int, ...]:
        """Store the ids of all microbatches of ``stage``; raises if its rank is in another step."""
        plan, step, runs = contents["step"]
        if step != self._step:
            self._refuse_step(stage, rank, step)
        self.has_begun = True
        if plan // 2 != self._plan // 2:
            raise CollectiveMismatchError(self._disagreement(rank))
        if plan != self._plan:
            raise CollectiveMismatchError(
                f"rank {rank} is in {_MODES[plan % 2]} and rank {self._transport.rank} in "
                f"{_MODES[self._plan % 2]}: {_ALIKE}"
            )
        ids = tuple(identity for identity, count in runs for _ in range(count))
        self._ids.known[stage] = ids
        return ids

    def _refuse_step(self, stage: int, rank: int, step: int) -> None:
        """Raise for outputs of ``stage`` from another ``step`` than this one.

        A sender in a later step has refused this one: its message is kept until this rank gets
        there. A sender in an earlier step has begun what this rank has refused.
        """
        self.has_begun = self.has_begun or step < self._step
        self._watch(min(step, self._step), self._transport.ranks[rank])
        self.has_begun = True
        raise CollectiveMismatchError(
            f"stage {stage} on rank {rank} is in step {step} of this schedule, and rank "
            f"{self._transport.rank} in step {self._step}: {_ALIKE}"
        )

    def _post_gradients(self, operation: P2POperation, *, wait: bool) -> _Receive | None:
        _, stage, source, k, _, _ = operation.message
        ids = self._ids.known.get(source) or self._ids.of(source)
        # In the first step the signature is known only once the forward has run.
        known = None if ids is None else self._known[source].get(ids[k])
        if known is None:
            return None
        signature, metas = known.signature, known.signature.wanted_tensors
        mask = (True,) * len(metas)
        if mask and not known.complete.get(stage):
            control = self._awaited(operation, f"gradients of stage {stage}", wait=wait)
            if control is None:
                return None
            mask = tuple(self._control.read(control, self._watch)["gradients"])
            self._control.accept(control)
            metas = [meta for meta, has_gradient in zip(metas, mask, strict=True) if has_gradient]
        known.complete.setdefault(stage, all(mask))
        return self._open(operation, metas, signature, mask)

    def _awaited(self, operation: P2POperation, label: str, *, wait: bool) -> ControlMessage | None:
        """Return the control message that precedes a payload; None unless ``wait`` or arrived."""
        message = self._control.awaited(operation.peer, label)
        return message if wait or message.has_come else None

    def _open(
        self,
        operation: P2POperation,
        metas: Sequence[TensorMeta],
        signature: Signature,
        mask: tuple[bool, ...] = (),
        control: ControlMessage | None = None,
    ) -> _Receive:
        self.has_begun = True
        buffers: list[torch.Tensor] = []
        filled: list[torch.Tensor] = []
        for meta in metas:
            # Contiguous, as values are sent; `take_outputs` copies to other strides.
            buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self._transport.device)
            buffers.append(buffer)
            if buffer.numel():
                filled.append(buffer)
        pendings = (
            self._transport.channels.recv(filled, operation.peer, operation.label) if filled else ()
        )
        return _Receive(pendings, buffers, signature, mask, control)

    # --------------------------------------------------------------- tied parameters

    def tell(self, facts: Sequence[int], stage: int, target: int) -> None:
        """Send stage ``target`` of another rank the facts of ``stage`` about tied parameters."""
        rank = self._transport.stage_ranks[target]
        self._write({"tied": list(facts)}, rank, f"tied parameters of stage {stage}")

    def hear(self, count: int, stage: int) -> list[int]:
        """Wait for the ``count`` facts that ``stage`` of another rank sends to one of this rank."""
        rank = self._transport.stage_ranks[stage]
        message = self._control.awaited(rank, f"tied parameters of stage {stage}")
        found: list[int] = self._control.read(message, self._watch)["tied"]
        self._control.accept(message)
        self.has_begun = True
        return found

    def send_tied(self, tensor: torch.Tensor, stage: int, target: int) -> None:
        """Send a tied parameter or its gradient to stage ``target`` of another rank."""
        self.has_begun = True
        payload = tensor.resolve_conj().resolve_neg().contiguous()
        rank = self._transport.stage_ranks[target]
        sent = self._transport.channels.send([payload], rank, f"stage {stage} tied")
        self._sent.append((sent[0], payload))

    def recv_tied(self, tensor: torch.Tensor, stage: int) -> None:
        """Wait for what `send_tied` sends from ``stage`` of another rank."""
        rank = self._transport.stage_ranks[stage]
        for pending in self._transport.channels.recv([tensor], rank, f"stage {stage} tied"):
            pending.wait(watch=self._watch)


class UnansweredTransfers(P2PTransfers):
    """P2PTransfers in a fake process group: sends go nowhere, and every receive gives zeros."""

    def __init__(self, stages: Mapping[int, PipelineStage], *args: Any, **kwargs: Any) -> None:
        """``stages`` are those of this rank; the rest as `P2PTransfers` has it."""
        super().__init__(*args, **kwargs)
        self._stages = stages

    def _post_outputs(self, operation: P2POperation, *, wait: bool) -> _Receive | None:
        stage = operation.message.stage
        if stage not in self._ids.known:
            identity = digest("not told", stage)
            if identity not in self._known[stage]:
                self._known[stage][identity] = KnownSignature(self._declared(stage))
            self._ids.known[stage] = (identity,) * self._ids.microbatches
        return super()._post_outputs(operation, wait=wait)

    def _post_gradients(self, operation: P2POperation, *, wait: bool) -> _Receive | None:
        _, stage, source, k, _, _ = operation.message
        ids = self._ids.of(source)
        known = None if ids is None else self._known[source].get(ids[k])
        if known is not None:
            known.complete.setdefault(stage, True)
        return super()._post_gradients(operation, wait=wait)

    def let_go(self) -> None:
        self.finish()

    def hear(self, count: int, stage: int) -> list[int]:
        return [0] * count

    def recv_tied(self, tensor: torch.Tensor, stage: int) -> None:
        super().recv_tied(tensor.zero_(), stage)

    def _declared(self, stage: int) -> Signature:
        """The signature of the outputs of ``stage``, as its readers on this rank declare it."""
        readers = [mine for mine in self._stages.values() if stage in mine.edges.sources()]
        found = next((s for mine in readers if (s := mine.takes_of(stage)) is not None), None)
        if found is None or found.has_constants:
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

    def _wait(self, operation: P2POperation) -> _Receive:
        received = super()._wait(operation)
        for buffer in received.buffers:
            buffer.zero_()
        return received
