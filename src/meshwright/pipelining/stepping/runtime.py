"""One interpreter for all schedules: it runs this rank's row, action by action."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.comm import Communicator
from meshwright.comm.failures.sameness import first_difference
from meshwright.comm.failures.status import object_of
from meshwright.comm.failures.store import Notices
from meshwright.errors import CommunicationError, InternalError, PipelinePeerError
from meshwright.pipelining.failures import Failures, Turns
from meshwright.pipelining.messages.batch import Identities, Known, Microbatches
from meshwright.pipelining.messages.metadata import detached, digest, signature_of
from meshwright.pipelining.messages.transfers import Carrier, Transfers, UnansweredTransfers
from meshwright.pipelining.stage import PipelineStage, StepOfStage
from meshwright.pipelining.stepping.custom import call
from meshwright.pipelining.stepping.listener import Listener
from meshwright.pipelining.stepping.losses import Losses
from meshwright.pipelining.stepping.program import CustomFunction, Entry, program
from meshwright.pipelining.stepping.residency import Several
from meshwright.pipelining.stepping.ties import Tie, TiedParameters, tied_pairs
from meshwright.schedule.actions import (
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    B,
    F,
    I,
    Operation,
    Schedule,
    W,
)


class Runtime:
    """Runs one lowered schedule on the stages of this rank, step after step."""

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        training: Schedule,
        evaluation: Schedule,
        communicator: Communicator,
        loss_fn: Callable[..., Any] | None,
        residencies: Mapping[int, Several],
        number: int,
    ) -> None:
        """Both schedules are lowered, over the same stages; ``number`` is theirs in the group."""
        self.schedules = {True: training, False: evaluation}
        self.stages = stages
        self.steps = 0
        """Steps that have ended on this rank, or that it has refused."""
        self.broken: BaseException | None = None
        self._has_refused = False
        self._communicator = communicator
        self._losses = None if loss_fn is None else Losses(loss_fn)
        self._residencies = residencies
        self._rank = communicator.rank
        self._custom: dict[Operation, CustomFunction] = {}
        self._compile()
        self._ids: Known = {}
        self._notices = Notices(communicator, f"schedule {number}")
        has_replicas = any(residencies.values())
        self._failures = Failures(communicator, self._notices, has_replicas=has_replicas)
        ties = next(iter(stages.values())).ties
        modules = {index: stage.submod for index, stage in stages.items()}
        self._tied = TiedParameters(modules, ties, training.stage_ranks, residencies)
        self._carrier = Carrier(communicator, self.schedules.values(), tied_pairs(ties), number)
        split = getattr(next(iter(stages.values())), "split", 0)
        self._own = json.dumps({**_facts(training, loss_fn is not None, ties), "split": split})
        self.plan = digest(self._own)
        """A digest of the facts that all ranks of the pipeline must agree on."""
        self._notices.post(f"plan/{self._rank}", self._own)
        self._what = f"{training.name} with {training.microbatches} microbatches ({self.plan:x})"
        self._turns = Turns(communicator, Notices(communicator, "turns"), number, self._what)

    def _compile(self) -> None:
        self._programs = {
            mode: program(schedule, self._rank, self.stages, self._residencies, self._custom)
            for mode, schedule in self.schedules.items()
        }

    def register(self, functions: Mapping[Operation, CustomFunction]) -> None:
        """Register functions of the user to run in place of actions, from the next step on."""
        self._custom.update(functions)
        self._compile()

    def run(self, batch: Microbatches, *, training: bool) -> None:
        """Run one step on a batch that has been checked.

        Raises what a stage of this rank raises; for a failure on another rank, an error that
        names rank, stage and action. After a failure that ended the schedule it raises at once.
        """
        if self.broken is not None:
            raise PipelinePeerError(
                f"this schedule is unusable since an earlier step failed: {self.broken}"
            ) from self.broken
        self._turns.begin()
        step = _Step(self, batch, training=training)
        what = f"{'a step' if training else 'an evaluation'} of {self._what}"
        residencies = [residency for residency in self._residencies.values() if residency]
        try:
            if self._has_refused:  # others may have begun that step, failed, and left
                self._failures.look(self.steps, is_final=True)
                self._has_refused = False
            for residency in residencies:
                residency.begin(what, training=training)
            step.transfers.open()
            self._tied.send_values(step.transfers)
            if training:
                self._tied.begin()
            step.run(self._programs[training])
            step.finish()
            for residency in residencies:
                residency.finish()
            step.end()
        except BaseException as error:
            self._tied.restore()
            self._failed(step, error)
            for residency in residencies:
                residency.drop()
            raise
        finally:
            for stage in self.stages.values():
                stage.end_step()
        self._carrier.known.keep(step.ids.known)
        self._turns.end(self.steps)
        self.steps += 1

    def disagreement(self, rank: int) -> str:
        """Describe how the schedule of ``rank`` differs from this rank's."""
        mine, both = json.loads(self._own), [self._rank, rank]
        theirs = object_of(self._notices.read(f"plan/{rank}"), {}) or {}
        return f"the ranks of the pipeline disagree: {first_difference(both, [mine, theirs])}"

    def _failed(self, step: _Step, error: BaseException) -> None:
        entry = step.entry
        may_go_on = self._failures.has_seen_refusal or not isinstance(error, CommunicationError)
        if may_go_on and not step.transfers.has_begun:
            self._carrier.known.drop()
            self._refuse(error, entry.index, entry.where)
            return
        self.broken = error
        self._failures.tell(self.steps, error, entry.index, entry.where, for_good=True)
        self._turns.end(self.steps, error)
        self.steps += 1

    def refused(self, error: Exception) -> None:
        """Report to the ranks in this step that it could not begin here."""
        if self.broken is None:
            self._refuse(error, min(self.stages), "step()")

    def _refuse(self, error: BaseException, stage: int, action: str) -> None:
        self._failures.tell(self.steps, error, stage, action, for_good=False)
        self._has_refused = True
        self._turns.end(self.steps)
        self.steps += 1

    def look(self, step: int | None = None, beginner: int | None = None) -> None:
        """Raise when another rank has failed in this step or an earlier one, or has refused it.

        See `Failures.look` for another ``step`` and its ``beginner``.
        """
        self._failures.look(self.steps if step is None else step, beginner)
        self._turns.look(self.steps)


def _facts(schedule: Schedule, has_loss: bool, ties: Sequence[Tie]) -> dict[str, Any]:
    """The facts that all ranks must agree on, by name."""
    return {
        "schedule": schedule.name,
        "microbatches": schedule.microbatches,
        "stages": schedule.stages,
        "ranks of the stages": list(schedule.stage_ranks),
        "edges": [list(edge) for edge in schedule.edges],
        "loss": has_loss,
        "ties": [[tie.owner, [list(name) for name in tie.names]] for tie in ties],
        "order": digest([[str(action) for action in row] for row in schedule.rows]),
    }


class _Step:
    """One step on one rank."""

    def __init__(self, runtime: Runtime, batch: Microbatches, *, training: bool) -> None:
        self.runtime = runtime
        self.batch = batch
        self.training = training
        self.schedule = runtime.schedules[training]
        self.entry = runtime._programs[training][0]
        """The action that is running, or has failed."""
        self._listener: Listener | None = None
        self.ids = Identities(runtime.stages, self.schedule, batch, runtime._ids, training=training)
        self._reduced: set[int] = set()
        self._late: list[Several] = []
        """Residencies whose gradients are reduced after the row."""
        is_fake = runtime._communicator.backend == "fake"
        kind = functools.partial(UnansweredTransfers, runtime.stages) if is_fake else Transfers
        self.transfers = kind(runtime._carrier, self.ids, runtime, training=training)
        count = self.schedule.microbatches
        told = StepOfStage(training, batch.is_scaled, self.reduce_stage, count)
        for stage in runtime.stages.values():
            stage.begin_step(told)

    def run(self, entries: Sequence[Entry]) -> None:
        self._listener = Listener.attached(self.runtime._communicator.clock)
        if self._listener is not None:
            self._run_heard(entries, self._listener)
            return
        for entry in entries:
            self.entry = entry
            if entry.waits:
                self.wait_for(entry)
            self.execute(entry)
            if self.transfers.unposted:
                self.transfers.post_rest()

    def _run_heard(self, entries: Sequence[Entry], listener: Listener) -> None:
        """Run the row and report each action, without its waiting time."""
        for entry in entries:
            self.entry = entry
            if entry.waits:
                self.wait_for(entry)
                listener.waited(entry)
            with listener.action(entry):
                self.execute(entry)
            if self.transfers.unposted:
                self.transfers.post_rest()
            self.transfers.let_go()

    def execute(self, entry: Entry) -> None:
        if entry.custom is None:
            _WHOLE[entry.operation](self, entry)
        else:
            self.call(entry)

    def end(self) -> None:
        """End a step whose work is complete."""
        if self._listener is not None:
            self._listener.end()

    # ------------------------------------------------------------------------ compute

    def wait_for(self, entry: Entry) -> None:
        """Wait for what a compute action reads, and for the stage's parameters."""
        for part in entry.parts:
            self.wait_for(part)
        is_forward = entry.operation is F
        for leg in entry.reads:
            _, source, _, k, _, _ = leg.message
            if is_forward:
                values = self.transfers.take_outputs(leg)
                for stage in leg.readers:
                    stage.inbox.put_outputs(k, source, values)
            else:
                entry.stage.inbox.put_gradients(k, source, self.transfers.take_gradients(leg))
        if entry.residency is not None:
            entry.residency.wait_unshard()

    def forward(self, entry: Entry) -> None:
        """F: run the stage, pass its outputs to stages of this rank."""
        self._expect(entry)
        self.run_forward(entry)
        self._pass_outputs(entry)

    def _expect(self, entry: Entry) -> None:
        """Tell the stage the signature that its outputs must have, where it is known."""
        k = entry.microbatch
        known = self.runtime._carrier.known[entry.index].outputs.get(self._id_of(entry))
        if known is not None:
            entry.stage.expected[k] = known

    def _id_of(self, entry: Entry) -> int:
        """The id of a forward's outputs; the ids that it depends on came with the inputs."""
        ids = self.ids.of(entry.index)
        if ids is None:
            raise InternalError(f"{entry.where} runs before what it reads has come")
        return ids[entry.microbatch]

    def run_forward(self, entry: Entry) -> None:
        k, stage, batch = entry.microbatch, entry.stage, self.batch
        args = batch.args[k] if stage.takes_batch else ()
        stage.forward_one_chunk(k, args, batch.kwargs[k] if batch.kwargs else None)

    def _pass_outputs(self, entry: Entry) -> None:
        """Pass the outputs of a forward on: to the loss, or to the stages that read them."""
        k, stage = entry.microbatch, entry.stage
        known = stage.expected.get(k)
        if stage.is_last:
            self._lose(stage, k)
        values = stage.take_outputs(k)
        if known is None and not stage.is_last:
            where = f"{stage.name} output of microbatch {k}"
            identity, signature = self._id_of(entry), signature_of(values, where)
            self.runtime._carrier.known.learn(entry.index, identity, signature)
        elif known is not None:
            known.check_gradients(values, f"{stage.name} output of microbatch {k}")
        for target in entry.targets:
            target.inbox.put_outputs(k, entry.index, values)

    def _lose(self, stage: PipelineStage, microbatch: int) -> None:
        """Compute the loss of the last stage's outputs."""
        batch, losses = self.batch, self.runtime._losses
        if losses is None or batch.targets is None:
            return
        loss, start = losses.compute(
            stage.results, batch.targets, microbatch, batch.weights, batch.loss_kwargs
        )
        batch.keep_loss(microbatch, loss)
        if self.training:
            stage.put_start(microbatch, start)

    def backward(self, entry: Entry) -> None:
        """B or I: run it, pass gradients to stages of this rank."""
        self.run_backward(entry)
        self._pass_gradients(entry)

    def run_backward(self, entry: Entry) -> None:
        entry.stage.backward_one_chunk(entry.microbatch, None, entry.operation is B)

    def _pass_gradients(self, entry: Entry) -> None:
        """Pass the gradients of a backward to stages of this rank, and count a full one."""
        k, inbox = entry.microbatch, entry.stage.inbox
        if entry.operation is B:
            self._count(entry)
        for source in entry.sources:
            gradients = inbox.take_gradients(k, source.stage_index)
            source.inbox.put_gradients(k, entry.index, gradients)

    def weight(self, entry: Entry) -> None:
        """W: the weight half."""
        self.run_weight(entry)
        self._count(entry)

    def _count(self, entry: Entry) -> None:
        """Accumulate after a B or W; after a W of the last stage, also free the graph, of which
        results and losses would keep the weight half alive."""
        if entry.operation is W and entry.stage.is_last:
            k, results, losses = entry.microbatch, entry.stage.results, self.batch.losses
            if k in results:
                results[k] = detached(results[k])
            if k < len(losses):
                losses[k] = detached(losses[k])
        if entry.residency is not None:
            entry.residency.accumulate()

    def run_weight(self, entry: Entry) -> None:
        entry.stage.backward_weight_one_chunk(entry.microbatch)

    # ---------------------------------------------------------------------- transfers

    def send_outputs(self, entry: Entry) -> None:
        values = entry.stage.take_outputs(entry.microbatch)
        for leg in entry.sends:
            self.transfers.send_outputs(leg, values)

    def send_gradients(self, entry: Entry) -> None:
        for leg in entry.sends:
            gradients = entry.stage.inbox.take_gradients(entry.microbatch, leg.message.target)
            self.transfers.send_gradients(leg, gradients)

    def post(self, entry: Entry) -> None:
        """RECV_F and RECV_B: post now, or as soon as the sizes are known."""
        self.transfers.post(entry.posts)

    def unshard(self, entry: Entry) -> None:
        if entry.residency is not None:
            entry.residency.unshard()

    def reshard(self, entry: Entry) -> None:
        if entry.residency is not None:
            entry.residency.reshard()

    def reduce(self, entry: Entry) -> None:
        self.reduce_stage(entry.index)

    def reduce_stage(self, index: int) -> None:
        """Start to sum gradients; for a stage with tied parameters, only after the row."""
        residency = self.runtime._residencies[index]
        self._reduced.add(index)
        if index in self.runtime._tied.stages:
            self._late.append(residency)
        else:
            residency.reduce()

    def finish(self) -> None:
        """After the row: sum tied gradients, reduce what waited for them, wait for sends."""
        if self.training:
            self.runtime._tied.add_up(self.transfers)
        for residency in self._late:
            residency.reduce()
        self.transfers.finish()

    # --------------------------------------------------------------- functions of the user

    def call(self, entry: Entry) -> None:
        """Run a function of the user in place of the action, or of both parts of an overlap."""
        parts = entry.parts or (entry,)
        for part in parts:
            if part.operation is F:
                self._expect(part)
        call(entry, self.batch.context, self._run_part, self._reduced)
        self.entry = entry
        for part in parts:
            after = _HANDLERS[part.operation].after
            if after is not None:
                after(self, part)

    def _run_part(self, entry: Entry) -> None:
        """Do what the schedule would do for ``entry``, within a function of the user."""
        self.entry = entry
        _HANDLERS[entry.operation].run(self, entry)


class _Handler(NamedTuple):
    """The functions that run one kind of operation."""

    whole: Callable[[_Step, Entry], None]
    run: Callable[[_Step, Entry], None]
    """The part that a function of the user may replace."""
    after: Callable[[_Step, Entry], None] | None = None
    """The part that follows it."""


def _plain(whole: Callable[[_Step, Entry], None]) -> _Handler:
    return _Handler(whole, whole)


_BACKWARD = _Handler(_Step.backward, _Step.run_backward, _Step._pass_gradients)
_HANDLERS: Mapping[Operation, _Handler] = {
    F: _Handler(_Step.forward, _Step.run_forward, _Step._pass_outputs),
    B: _BACKWARD,
    I: _BACKWARD,
    W: _Handler(_Step.weight, _Step.run_weight, _Step._count),
    SEND_F: _plain(_Step.send_outputs),
    SEND_B: _plain(_Step.send_gradients),
    RECV_F: _plain(_Step.post),
    RECV_B: _plain(_Step.post),
    UNSHARD: _plain(_Step.unshard),
    RESHARD: _plain(_Step.reshard),
    REDUCE_GRAD: _plain(_Step.reduce),
}
_WHOLE = {operation: handler.whole for operation, handler in _HANDLERS.items()}
