"""The messages between stages of different ranks in one step.

Between two ranks, messages have one order, which follows from the schedule: sends start and
receives are posted in the order of the sender's row, so no message needs an identifier. What a
receiver must know before it can post is sent ahead, in a letter:

- with the first outputs of a stage that a rank reads in a step, the sender's digest of the
  schedule, the step's number, and the id of each microbatch's shapes;
- with the first outputs of an id, its signature;
- with the first gradients of an id, which are None; with all later ones too if some were;
- with all outputs that have any, constants.

Both sides know from earlier steps which messages have a letter. A step like an earlier one has one
letter for each stage and reading rank.

Posting a receive never blocks. If its letter has not arrived, it and all later receives from that
rank are posted when something waits for them. On Gloo each receive sends its sender a message that
wakes a thread there, so receives of small messages are posted early, several together.

Ranks of torch's fake process group are not processes and send nothing. A stage then reads zeros of
the shapes that were declared or traced, and every value that can have a gradient gets one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch

from meshwright.comm import Communicator, Pending, start_together
from meshwright.errors import CollectiveMismatchError, PipeliningShapeError
from meshwright.pipelining.messages.batch import Identities
from meshwright.pipelining.messages.known_signatures import Agreed
from meshwright.pipelining.messages.lanes import Lanes
from meshwright.pipelining.messages.letters import Contents, Letter, Letters
from meshwright.pipelining.messages.metadata import (
    Signature,
    TensorMeta,
    Values,
    differences,
    digest,
    read,
    written,
)
from meshwright.pipelining.stage import PipelineStage
from meshwright.pipelining.stepping.program import Leg
from meshwright.schedule import messages
from meshwright.schedule.actions import SEND_F, Schedule

_AHEAD = 16
"""The number of posted receives up to which more are posted early."""
_SMALL = 1 << 16
"""Bytes of a message up to which the receive behind it is posted early."""
_MODES = ("an evaluation", "a training step")
_ALIKE = "every rank has to call step() and eval() equally often and in the same order"


class Overseer(Protocol):
    """Knows the step that this rank is in, and sees failures of other ranks."""

    steps: int
    """The number of the step."""
    plan: int
    """A digest of what all ranks must agree on."""

    def look(self, step: int | None = None, beginner: int | None = None) -> None:
        """Raise when a peer failed or this step, or another ``step``, was refused."""

    def disagreement(self, rank: int) -> str:
        """Describe how the plan of ``rank`` differs from this rank's."""


class Carrier:
    """One rank's lanes and letters for the messages of one schedule, and the known signatures."""

    def __init__(
        self,
        communicator: Communicator,
        schedules: Iterable[Schedule],
        tied: Iterable[tuple[int, int]],
        number: int,
    ) -> None:
        """``schedules`` have the same stages; ``tied`` are pairs of stages, either way round."""
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
        self.lanes = Lanes(communicator, pairs, number)
        self.letters = Letters(communicator, number)
        self.known = Agreed()
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
    letter: Letter | None = None
    """The letter that has the constants."""


class Transfers:
    """The messages of one step on one rank."""

    def __init__(
        self, carrier: Carrier, ids: Identities, overseer: Overseer, *, training: bool
    ) -> None:
        self.has_begun = False
        """True when any message of this step was sent or received by this rank."""
        self.unposted: dict[int, deque[Leg]] = {}
        """By rank, receives whose letter has not arrived, and those behind them."""
        self._carrier = carrier
        self._letters = carrier.letters
        self._known = carrier.known
        self._ids = ids
        self._overseer = overseer
        self._plan = 2 * overseer.plan + training
        self._step = overseer.steps
        self._watch = overseer.look
        self._sent: deque[tuple[Pending, Any]] = deque()
        """Sends in flight, each with the memory that it reads from."""
        self._announced: set[tuple[int, int]] = set()
        """(stage, rank that reads its outputs)."""
        self._posted: dict[Leg, _Receive] = {}

    # ------------------------------------------------------------------------ sending

    def send_outputs(self, leg: Leg, values: Values) -> None:
        """Send the outputs of one microbatch to one rank."""
        _, stage, rank, k, _, _ = leg.message
        ids, known = self._ids.of(stage), self._known[stage]
        if ids is None:
            raise PipeliningShapeError(f"stage {stage} does not know what it will send")
        signature = known.outputs[ids[k]]
        letter: Contents = {}
        if (stage, rank) not in self._announced:
            self._announced.add((stage, rank))
            runs = [[identity, len(list(run))] for identity, run in groupby(ids)]
            letter["step"] = [self._plan, self._step, runs]
        if known.is_news(ids[k], rank):
            letter["signature"] = signature.to_json()
        if signature.has_constants:
            letter["constants"] = written(values.constants())
        if letter:
            self._write(letter, rank, f"{' and '.join(letter)} of stage {stage}")
        self._send(list(map(torch.Tensor.detach, values.tensors())), leg)

    def send_gradients(self, leg: Leg, gradients: Sequence[torch.Tensor | None]) -> None:
        """Send the gradients of what one stage has read from another, leaf by leaf.

        If no gradient was None in the first microbatch of these shapes, zeros replace any that is
        None later; otherwise each message is preceded by a letter that says which are.

        Raises ``PipeliningShapeError`` where one has another shape or dtype than the output it
        belongs to.
        """
        _, stage, source, k, _, rank = leg.message
        ids = self._ids.known[source]
        signature = self._known[source].outputs[ids[k]]
        mask = tuple([gradients[number] is not None for number in signature.wanted])
        complete = self._known[source].complete.setdefault(ids[k], {})
        if not complete.get(stage) and mask:
            self._write({"gradients": mask}, rank, f"gradients of stage {stage}")
        is_complete = complete.setdefault(stage, all(mask))
        found: list[torch.Tensor] = []
        for number in signature.wanted:
            gradient, meta = gradients[number], signature.leaves[number]
            if not isinstance(meta, TensorMeta) or (gradient is None and not is_complete):
                continue
            if gradient is None:
                gradient = torch.zeros(meta.shape, dtype=meta.dtype, device=self._carrier.device)
            if gradient.shape != meta.shape or gradient.dtype is not meta.dtype:
                where = f"[Stage {stage}] gradient for value {number} of stage {source}"
                text = differences(Signature((meta,)), Values([gradient]), where)
                raise PipeliningShapeError(text)
            found.append(gradient)
        self._send(found, leg)

    def _send(self, tensors: Sequence[torch.Tensor], leg: Leg) -> None:
        self.has_begun = True
        # Lazy conjugate and negative views would send their memory without the conjugation or sign.
        payloads = [t.resolve_conj().resolve_neg().contiguous() for t in tensors if t.numel()]
        if payloads:
            sent = self._carrier.lanes.send(payloads, leg.peer, leg.label)
            self._sent.extend(zip(sent, payloads, strict=True))
            if self._carrier.can_look:
                self.let_go()

    def _write(self, letter: Contents, rank: int, label: str) -> None:
        self.has_begun = True
        self._sent.extend(self._letters.send(letter, rank, label))

    def let_go(self) -> None:
        """Release the memory of completed sends, oldest first, without waiting."""
        sent = self._sent
        while sent and sent[0][0].is_completed():
            sent.popleft()[0].wait(watch=self._watch)

    def finish(self) -> None:
        """Wait for all sends."""
        start_together(pending for pending, _ in self._sent)
        while self._sent:
            self._sent.pop()[0].wait(watch=self._watch)

    # ---------------------------------------------------------------------- receiving

    def open(self) -> None:
        """Open the lanes, in the first step: all ranks have reached it then."""
        self._carrier.lanes.open(self._watch)

    def post(self, legs: Iterable[Leg]) -> None:
        """Post receives, now or once it is their turn and their sizes are known."""
        for leg in legs:
            if leg in self._posted:
                continue
            queue = self.unposted.get(leg.peer)
            if queue is not None:
                queue.append(leg)
            elif not self._post(leg, wait=False):
                self.unposted[leg.peer] = deque([leg])

    def post_rest(self) -> None:
        """Post what could not be posted before."""
        for rank, queue in list(self.unposted.items()):
            while queue and self._post(queue[0], wait=False):
                queue.popleft()
            if not queue:
                del self.unposted[rank]

    def take_outputs(self, leg: Leg) -> Values:
        """Wait for the outputs of another rank's stage, for one microbatch."""
        received = self._wait(leg)
        signature = received.signature
        for number in signature.strided:
            meta = signature.tensors[number]
            received.buffers[number] = meta.laid_out(received.buffers[number])
        if not signature.has_constants:
            for number in signature.wanted:
                received.buffers[number].requires_grad_()
            return Values(list(received.buffers), signature.spec)
        constants = iter(self._constants(received))
        tensors = iter(received.buffers)
        leaves: list[object] = []
        for meta in signature.leaves:
            if meta is None:
                leaves.append(next(constants))
            else:
                tensor = next(tensors)
                leaves.append(tensor.requires_grad_() if meta.requires_grad else tensor)
        return Values(leaves, signature.spec)

    def _constants(self, received: _Receive) -> list[object]:
        if received.letter is None:
            return []
        return read(self._letters.read(received.letter, self._watch)["constants"])

    def take_gradients(self, leg: Leg) -> list[torch.Tensor | None]:
        """Wait for the gradients of a stage of this rank, for one microbatch, leaf by leaf."""
        received = self._wait(leg)
        leaves = received.signature.leaves
        if len(received.buffers) == len(leaves):
            return list(received.buffers)
        tensors = iter(received.buffers)
        found: list[torch.Tensor | None] = [None] * len(leaves)
        for number, flag in zip(received.signature.wanted, received.mask, strict=True):
            if flag:
                found[number] = next(tensors)
        return found

    def _wait(self, leg: Leg) -> _Receive:
        received = self._posted.pop(leg, None)
        if received is None:
            queue = self.unposted.get(leg.peer, ())
            while leg not in self._posted:
                if not queue or not self._post(queue[0], wait=True):
                    raise PipeliningShapeError(f"{leg.label} cannot be received")
                while queue and queue[0] in self._posted:
                    queue.popleft()
            received = self._posted.pop(leg)
        for pending in received.pendings:
            pending.wait(watch=self._watch)
        return received

    def _post(self, leg: Leg, *, wait: bool) -> bool:
        """Post the receive of a message, unless it needs a letter that has not arrived.

        Receives of small messages behind it may be posted with it. Returns whether it was posted.
        """
        posted, following = self._posted, leg
        begun: list[Pending] = []
        while following is not None and following not in posted:
            is_output = following.message.operation is SEND_F
            post = self._post_outputs if is_output else self._post_gradients
            found = post(following, wait=wait and following is leg)
            if found is None:
                break
            posted[following] = found
            if not self._carrier.posts_ahead:
                return True
            begun += found.pendings
            is_small = sum(buffer.nbytes for buffer in found.buffers) <= _SMALL
            following = following.following if is_small and len(posted) < _AHEAD else None
        if begun:
            start_together(begun)
        return leg in posted

    def _post_outputs(self, leg: Leg, *, wait: bool) -> _Receive | None:
        _, stage, _, k, _, _ = leg.message
        ids, known = self._ids.known.get(stage), self._known[stage]
        signature = None if ids is None else known.outputs.get(ids[k])
        letter = None
        if signature is None:
            letter = self._awaited(leg, f"letter of stage {stage}", wait=wait)
            if letter is None:
                return None
            told = self._letters.read(letter, self._watch)
            if ids is None:
                ids = self._learn_ids(stage, leg.peer, told)
            self._letters.accept(letter)
            signature = known.outputs.get(ids[k])
            if signature is None:
                signature = known.outputs[ids[k]] = Signature.from_json(told["signature"])
        elif signature.has_constants:
            letter = self._letters.expect(leg.peer, f"letter of stage {stage}")
        return self._open(leg, signature.tensors, signature, letter=letter)

    def _learn_ids(self, stage: int, rank: int, told: Contents) -> tuple[int, ...]:
        """Learn the ids of all microbatches of ``stage``, where its rank is in the same step."""
        plan, step, runs = told["step"]
        if step != self._step:
            self._refuse_step(stage, rank, step)
        self.has_begun = True
        if plan // 2 != self._plan // 2:
            raise CollectiveMismatchError(self._overseer.disagreement(rank))
        if plan != self._plan:
            raise CollectiveMismatchError(
                f"rank {rank} is in {_MODES[plan % 2]} and rank {self._carrier.rank} in "
                f"{_MODES[self._plan % 2]}: {_ALIKE}"
            )
        ids = tuple(identity for identity, count in runs for _ in range(count))
        self._ids.told(stage, ids)
        return ids

    def _refuse_step(self, stage: int, rank: int, step: int) -> None:
        """Raise for outputs of ``stage`` from another ``step`` than this one.

        A sender in a later step has refused this one: its letter is kept until this rank gets
        there. A sender in an earlier step has begun what this rank has refused.
        """
        self.has_begun = self.has_begun or step < self._step
        self._watch(min(step, self._step), self._carrier.ranks[rank])
        self.has_begun = True
        raise CollectiveMismatchError(
            f"stage {stage} on rank {rank} is in step {step} of this schedule, and rank "
            f"{self._carrier.rank} in step {self._step}: {_ALIKE}"
        )

    def _post_gradients(self, leg: Leg, *, wait: bool) -> _Receive | None:
        _, stage, source, k, _, _ = leg.message
        ids = self._ids.of(source)
        # In the first step the signature is known only once the forward has run.
        signature = None if ids is None else self._known[source].outputs.get(ids[k])
        if ids is None or signature is None:
            return None
        complete = self._known[source].complete.setdefault(ids[k], {})
        mask = (True,) * len(signature.wanted)
        if not complete.get(stage) and mask:
            letter = self._awaited(leg, f"gradients of stage {stage}", wait=wait)
            if letter is None:
                return None
            mask = tuple(self._letters.read(letter, self._watch)["gradients"])
            self._letters.accept(letter)
        complete.setdefault(stage, all(mask))
        metas: list[TensorMeta] = []
        for number, flag in zip(signature.wanted, mask, strict=True):
            meta = signature.leaves[number]
            if flag and isinstance(meta, TensorMeta):
                metas.append(meta)
        return self._open(leg, metas, signature, mask)

    def _awaited(self, leg: Leg, label: str, *, wait: bool) -> Letter | None:
        """Return the letter ahead of a message; without ``wait`` None until it has arrived."""
        letter = self._letters.awaited(leg.peer, label)
        return letter if wait or letter.has_come else None

    def _open(
        self,
        leg: Leg,
        metas: Sequence[TensorMeta],
        signature: Signature,
        mask: tuple[bool, ...] = (),
        letter: Letter | None = None,
    ) -> _Receive:
        self.has_begun = True
        buffers: list[torch.Tensor] = []
        filled: list[torch.Tensor] = []
        for meta in metas:
            buffer = meta.empty(self._carrier.device)
            buffers.append(buffer)
            if buffer.numel():
                filled.append(buffer)
        pendings = self._carrier.lanes.recv(filled, leg.peer, leg.label) if filled else ()
        return _Receive(pendings, buffers, signature, mask, letter)

    # --------------------------------------------------------------- tied parameters

    def tell(self, facts: Sequence[int], stage: int, target: int) -> None:
        """Tell stage ``target`` of another rank what ``stage`` has of tied parameters."""
        rank = self._carrier.stage_ranks[target]
        self._write({"tied": list(facts)}, rank, f"tied parameters of stage {stage}")

    def hear(self, count: int, stage: int) -> list[int]:
        """Wait for the ``count`` facts that ``stage`` of another rank tells one of this rank."""
        rank = self._carrier.stage_ranks[stage]
        letter = self._letters.awaited(rank, f"tied parameters of stage {stage}")
        found: list[int] = self._letters.read(letter, self._watch)["tied"]
        self._letters.accept(letter)
        self.has_begun = True
        return found

    def send_tied(self, tensor: torch.Tensor, stage: int, target: int) -> None:
        """Send a tied parameter or its gradient to stage ``target`` of another rank."""
        self.has_begun = True
        payload = tensor.resolve_conj().resolve_neg().contiguous()
        rank = self._carrier.stage_ranks[target]
        sent = self._carrier.lanes.send([payload], rank, f"stage {stage} tied")
        self._sent.append((sent[0], payload))

    def recv_tied(self, tensor: torch.Tensor, stage: int) -> None:
        """Wait for what `send_tied` sends from ``stage`` of another rank."""
        rank = self._carrier.stage_ranks[stage]
        for pending in self._carrier.lanes.recv([tensor], rank, f"stage {stage} tied"):
            pending.wait(watch=self._watch)


class UnansweredTransfers(Transfers):
    """Transfers in a fake process group: sends go nowhere, and every receive gives zeros."""

    def __init__(self, stages: Mapping[int, PipelineStage], *args: Any, **kwargs: Any) -> None:
        """``stages`` are those of this rank; the rest as `Transfers` has it."""
        super().__init__(*args, **kwargs)
        self._stages = stages

    def _post_outputs(self, leg: Leg, *, wait: bool) -> _Receive | None:
        stage = leg.message.stage
        if stage not in self._ids.known:
            identity = digest("not told", stage)
            self._known[stage].outputs[identity] = self._declared(stage)
            self._ids.told(stage, (identity,) * self._ids.microbatches)
        return super()._post_outputs(leg, wait=wait)

    def _post_gradients(self, leg: Leg, *, wait: bool) -> _Receive | None:
        _, stage, source, k, _, _ = leg.message
        ids = self._ids.of(source)
        signature = None if ids is None else self._known[source].outputs.get(ids[k])
        if ids is not None and signature is not None:
            self._known[source].complete.setdefault(ids[k], {}).setdefault(stage, True)
        return super()._post_gradients(leg, wait=wait)

    def hear(self, count: int, stage: int) -> list[int]:
        """See `Transfers`."""
        return [0] * count

    def recv_tied(self, tensor: torch.Tensor, stage: int) -> None:
        """See `Transfers`."""
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

    def _wait(self, leg: Leg) -> _Receive:
        received = super()._wait(leg)
        for buffer in received.buffers:
            buffer.zero_()
        return received
