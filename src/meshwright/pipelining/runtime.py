"""One interpreter for all schedules: it goes through this rank's row, action by action."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.comm import Communicator, Pending
from meshwright.comm.notices import Notices
from meshwright.errors import PipelinePeerError, PipeliningShapeError
from meshwright.pipelining.metadata import Values, digest, signature_of
from meshwright.pipelining.residency import Several
from meshwright.pipelining.stage import PipelineStage
from meshwright.pipelining.transfers import Memory, Transfers
from meshwright.schedule.actions import (
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    Action,
    B,
    F,
    I,
    Operation,
    Schedule,
    W,
)
from meshwright.schedule.messages import Message, parts_of, read, received, sent

__all__ = ["Microbatches", "Runtime"]


@dataclass(slots=True)
class Microbatches:
    """What a step was given, cut into microbatches, on this rank."""

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[Mapping[str, Any]]
    targets: Sequence[Any] | None = None
    weights: Sequence[float] = ()
    """By microbatch, what its loss counts in the gradient."""
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    losses: list[Any] = field(default_factory=list)
    """Filled by the last stage, unscaled."""


class Runtime:
    """Runs one lowered schedule on the stages of this rank, again and again."""

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        training: Schedule,
        evaluation: Schedule,
        communicator: Communicator,
        loss_fn: Callable[..., Any] | None,
        residencies: Mapping[int, Several],
        name: str,
    ) -> None:
        """``training`` and ``evaluation`` are lowered, over the same stages."""
        self.schedules = {True: training, False: evaluation}
        self.stages = stages
        self.steps = 0
        """Steps that have come as far as their first message."""
        self.broken: BaseException | None = None
        self._communicator = communicator
        self._loss_fn = loss_fn
        self._residencies = residencies
        self._rank = communicator.rank
        self._rows = {mode: tuple(s.actions(self._rank)) for mode, s in self.schedules.items()}
        self._received = {mode: received(s, self._rank) for mode, s in self.schedules.items()}
        self._memory = Memory()
        self._headers: dict[tuple[int, int], tuple[Pending, torch.Tensor]] = {}
        self._notices = Notices(communicator, name)
        self._noticed = ""
        self._own = json.dumps(_facts(training, loss_fn is not None))
        self.plan = digest(self._own)
        """What all ranks of the pipeline must agree on, as a number."""
        self._notices.post(f"plan/{self._rank}", self._own)
        self._what = f"{training.name} with {training.microbatches} microbatches ({self.plan:x})"
        self._handlers: Mapping[Operation, Callable[[_Step, Action], None]] = {
            F: _Step.forward,
            B: _Step.backward,
            I: _Step.backward,
            W: _Step.weight,
            SEND_F: _Step.send_outputs,
            SEND_B: _Step.send_gradients,
            RECV_F: _Step.post,
            RECV_B: _Step.post,
            UNSHARD: _Step.unshard,
            RESHARD: _Step.reshard,
            REDUCE_GRAD: _Step.reduce,
        }

    def run(self, batch: Microbatches, *, training: bool) -> None:
        """Run one step. What the batch is has been checked before.

        Raises what a stage of this rank raises; for a failure on another rank, an error that
        names rank, stage and action; at once, when an earlier step has left messages behind.
        """
        if self.broken is not None:
            raise PipelinePeerError(
                f"this schedule is unusable since an earlier step failed: {self.broken}"
            ) from self.broken
        if self._noticed:
            self._notices.withdraw(self._noticed)
            self._noticed = ""
        step = _Step(self, batch, training=training)
        what = f"a step of {self._what}" if training else f"an evaluation of {self._what}"
        residencies = [residency for residency in self._residencies.values() if residency]
        try:
            for residency in residencies:
                residency.begin(what, training=training)
            for action in self._rows[training]:
                step.action = action
                for part in parts_of(action):
                    self._handlers[part.operation](step, part)
                if step.unposted:
                    step.post_rest()
            step.transfers.finish()
            for residency in residencies:
                residency.finish()
        except BaseException as error:
            self._failed(step, error)
            for residency in residencies:
                residency.drop()
            raise
        self._memory = step.memory
        self.steps += 1

    def disagreement(self, rank: int) -> str:
        """How the schedule of ``rank`` differs from that of this rank."""
        mine = json.loads(self._own)
        theirs = json.loads(self._notices.read(f"plan/{rank}") or "{}")
        parts = [
            f"{name} is {value!r} on rank {self._rank} and {theirs.get(name)!r} on rank {rank}"
            for name, value in mine.items()
            if theirs.get(name) != value
        ]
        return "the ranks of the pipeline disagree: " + "; ".join(parts)

    def _failed(self, step: _Step, error: BaseException) -> None:
        if step.transfers.has_sent or step.transfers.has_posted:
            self.broken = error
            self.steps += 1
        if not isinstance(error, Exception) or step.failure is not None:
            return
        key = str(step.number)
        text = json.dumps(
            {
                "rank": self._communicator.ranks[self._rank],
                "stage": step.action.stage,
                "action": str(step.action),
                "type": _kind(error),
                "name": type(error).__name__,
                "text": str(error),
            }
        )
        if self._notices.post(key, text) and not step.transfers.has_sent:
            self._noticed = key

    def peer_error(self, number: int) -> Exception | None:
        """The failure of another rank in step ``number``, as an error of this one."""
        text = self._notices.read(str(number))
        if text is None:
            return None
        found = json.loads(text)
        if found["rank"] == self._communicator.ranks[self._rank]:
            return None
        kind = _KINDS.get(found["type"], PipelinePeerError)
        return kind(
            f"rank {found['rank']} stage {found['stage']} failed in {found['action']}: "
            f"{found['name']}: {found['text']}"
        )


def _facts(schedule: Schedule, has_loss: bool) -> dict[str, Any]:
    """What all ranks must agree on, in words."""
    return {
        "schedule": schedule.name,
        "microbatches": schedule.microbatches,
        "stages": schedule.stages,
        "ranks of the stages": list(schedule.stage_ranks),
        "edges": [list(edge) for edge in schedule.edges],
        "loss": has_loss,
        "order": digest([[str(action) for action in row] for row in schedule.rows]),
    }


class _PeerShapeError(PipeliningShapeError, PipelinePeerError):
    """Another rank found a value of another shape."""


class _PeerValueError(PipelinePeerError, ValueError):
    """Another rank was given a wrong value."""


_KINDS: Mapping[str, type[Exception]] = {"shape": _PeerShapeError, "value": _PeerValueError}


def _kind(error: Exception) -> str:
    if isinstance(error, PipeliningShapeError):
        return "shape"
    return "value" if isinstance(error, ValueError) else ""


class _Step:
    """One step on one rank."""

    def __init__(self, runtime: Runtime, batch: Microbatches, *, training: bool) -> None:
        self.runtime = runtime
        self.batch = batch
        self.training = training
        self.number = runtime.steps
        self.schedule = runtime.schedules[training]
        self.action = runtime._rows[training][0]
        self.failure: Exception | None = None
        """Another rank's failure, which has ended this step."""
        self.memory = runtime._memory.copy()
        self.unposted: list[tuple[Message, ...]] = []
        self._ids: dict[int, list[int]] = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._arrived: set[Message] = set()
        self.transfers = Transfers(
            runtime._communicator,
            self.schedule,
            self.number,
            self.memory,
            runtime._headers,
            self.ids,
            self._watch,
            runtime.plan,
            runtime.disagreement,
        )
        for stage in runtime.stages.values():
            stage.clear_runtime_states()
            stage.has_backward = training

    def _watch(self) -> None:
        error = self.runtime.peer_error(self.number)
        if error is not None:
            self.failure = error
            raise error

    # -------------------------------------------------------------------- signatures

    def ids(self, stage: int, *, wait: bool) -> Sequence[int] | None:
        """The ids of what ``stage`` of this rank makes, by microbatch."""
        found = self._ids.get(stage)
        if found is not None:
            return found
        schedule = self.schedule
        before: list[Sequence[int]] = []
        for source in schedule.sources[stage]:
            is_local = source in self.runtime.stages
            ask = self.ids if is_local else self.transfers.incoming
            theirs = ask(source, wait=wait)
            if theirs is None:
                return None
            before.append(theirs)
        count = schedule.microbatches
        found = self._ids[stage] = [
            digest(
                stage,
                self.training,
                [ids[k] for ids in before],
                self._given(stage, k),
            )
            for k in range(count)
        ]
        return found

    def _given(self, stage: int, microbatch: int) -> str:
        """What this rank's own arguments of one microbatch look like."""
        values: list[Any] = []
        here = self.runtime.stages[stage]
        if here.takes_batch:
            values.append(self.batch.args[microbatch])
        if self.batch.kwargs:
            values.append(self.batch.kwargs[microbatch])
        leaves = Values.of(tuple(values)).leaves
        return repr(
            [
                (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
                if isinstance(leaf, torch.Tensor)
                else (type(leaf).__name__, leaf if isinstance(leaf, _PLAIN) else "")
                for leaf in leaves
            ]
        )

    # ------------------------------------------------------------------------ compute

    def forward(self, action: Action) -> None:
        """F: wait for what the stage reads, run it, hand over to stages of this rank."""
        index, _, k, _ = action
        k = k or 0
        stage, schedule = self.runtime.stages[index], self.schedule
        if schedule.remote_sources[index]:
            for message in read(action._replace(operation=RECV_F), schedule):
                self._receive_outputs(message)
        ids = self.ids(index, wait=True) or ()
        known = self.memory.outputs.get((index, ids[k]))
        if known is not None:
            stage.expected[k] = known
        self.runtime._residencies[index].wait_unshard()
        args = self.batch.args[k] if stage.takes_batch else ()
        kwargs = self.batch.kwargs[k] if self.batch.kwargs else {}
        result = stage.forward_one_chunk(k, args, kwargs)
        values = stage.take_outputs(k)
        if known is None and not stage.is_last:
            where = f"{stage.name} output of microbatch {k}"
            self.memory.outputs[index, ids[k]] = signature_of(values, where)
        for target in schedule.targets[index]:
            if target in self.runtime.stages:
                self.runtime.stages[target].put_outputs(k, index, values)
        if stage.is_last:
            self._lose(k, result)

    def _lose(self, microbatch: int, output: object) -> None:
        loss_fn, targets = self.runtime._loss_fn, self.batch.targets
        if loss_fn is None or targets is None:
            return
        loss = loss_fn(output, targets[microbatch], **self.batch.loss_kwargs)
        self.batch.losses.append(loss)
        if self.training:
            start = loss[0] if isinstance(loss, tuple) else loss
            weight = self.batch.weights[microbatch] if self.batch.weights else 1.0
            self._losses[microbatch] = start if weight == 1.0 else start * weight

    def _receive_outputs(self, message: Message) -> None:
        if message in self._arrived:
            return
        self._arrived.add(message)
        values = self.transfers.take_outputs(message)
        for target in self.schedule.targets[message.stage]:
            if target in self.runtime.stages:
                stage = self.runtime.stages[target]
                stage.put_outputs(message.microbatch, message.stage, values)

    def backward(self, action: Action) -> None:
        """B or I: wait for the gradients of what the stage has made, run it, hand over."""
        index, operation, k, _ = action
        k = k or 0
        stage, schedule = self.runtime.stages[index], self.schedule
        if schedule.remote_targets[index]:
            for message in read(action._replace(operation=RECV_B), schedule):
                self._arrived.add(message)
                gradients = self.transfers.take_gradients(message)
                stage.put_gradients(k, message.stage, gradients)
        self.runtime._residencies[index].wait_unshard()
        stage.backward_one_chunk(
            k,
            loss=self._losses.pop(k, None) if stage.is_last else None,
            full_backward=operation is B,
        )
        if operation is B:
            self.runtime._residencies[index].accumulate()
        for source in schedule.sources[index]:
            if source in self.runtime.stages:
                gradients = stage.take_gradients(k, source)
                self.runtime.stages[source].put_gradients(k, index, gradients)

    def weight(self, action: Action) -> None:
        """W: the weight half."""
        residency = self.runtime._residencies[action.stage]
        residency.wait_unshard()
        self.runtime.stages[action.stage].backward_weight_one_chunk(action.microbatch or 0)
        residency.accumulate()

    # ---------------------------------------------------------------------- transfers

    def send_outputs(self, action: Action) -> None:
        """SEND_F."""
        values = self.runtime.stages[action.stage].take_outputs(action.microbatch or 0)
        for message in sent(action, self.schedule):
            self.transfers.send_outputs(message, values)

    def send_gradients(self, action: Action) -> None:
        """SEND_B."""
        stage = self.runtime.stages[action.stage]
        for message in sent(action, self.schedule):
            gradients = stage.take_gradients(message.microbatch, message.target)
            self.transfers.send_gradients(message, gradients)

    def post(self, action: Action) -> None:
        """RECV_F and RECV_B: post now, or as soon as the sizes are known."""
        messages = self.runtime._received[self.training][action]
        if not self.transfers.post(messages):
            self.unposted.append(messages)

    def post_rest(self) -> None:
        """Try again to post what could not be posted."""
        self.unposted = [messages for messages in self.unposted if not self._is_posted(messages)]

    def _is_posted(self, messages: tuple[Message, ...]) -> bool:
        return self.transfers.post([m for m in messages if m not in self._arrived])

    # ---------------------------------------------------------------------- residency

    def unshard(self, action: Action) -> None:
        """UNSHARD."""
        self.runtime._residencies[action.stage].unshard()

    def reshard(self, action: Action) -> None:
        """RESHARD."""
        self.runtime._residencies[action.stage].reshard()

    def reduce(self, action: Action) -> None:
        """REDUCE_GRAD."""
        self.runtime._residencies[action.stage].reduce()


_PLAIN = (bool, int, float, str, type(None))
