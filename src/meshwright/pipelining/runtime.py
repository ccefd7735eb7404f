"""One interpreter for all schedules: it runs this rank's row, action by action.

All lookups that do not change between steps are done once: a `ScheduledAction` has its stage, the
messages that it waits for, posts or sends, and the stages of this rank that read its results.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch.profiler import record_function

from meshwright.comm import Clock, Communicator, Mark, hears_actions, tell_ran
from meshwright.comm.failures.sameness import first_difference
from meshwright.comm.failures.status import object_of
from meshwright.comm.failures.store import Notices
from meshwright.errors import CommunicationError, InternalError, PipelinePeerError
from meshwright.pipelining.edges import Tie
from meshwright.pipelining.failures import Failures, Turns
from meshwright.pipelining.microbatch import Microbatches, check_loss
from meshwright.pipelining.p2p import (
    P2POperation,
    P2PTransfers,
    StepIds,
    Transport,
    UnansweredTransfers,
)
from meshwright.pipelining.residency import Residencies, Residency
from meshwright.pipelining.signature import detached, digest, signature_of
from meshwright.pipelining.stage import BackwardStart, PipelineStage, StepOfStage
from meshwright.pipelining.ties import TiedParameters, tied_pairs
from meshwright.schedule.actions import (
    BACKWARD,
    COMPUTE,
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
    dependencies,
)
from meshwright.schedule.messages import Message, parts_of, read, received, sent
from meshwright.torch_internals.autograd import is_profiled

CustomFunction = Callable[[Action, Any], object]
"""Runs in place of an action; its second argument is a `PipelineContext`."""


@dataclass(slots=True, eq=False)
class ScheduledAction:
    """One action of the row, or one part of an overlap."""

    action: Action
    """The action in the row, for error messages."""
    part: Action
    """The action, or the part of it."""
    text: str
    """The text of ``part``."""
    operation: Operation
    index: int
    microbatch: int
    stage: PipelineStage
    residencies: Residencies
    """Those of the stage; empty for a plain one."""
    reads: tuple[P2POperation, ...] = ()
    """Receives that a compute action waits for, and no earlier action of the row has waited for."""
    posts: tuple[P2POperation, ...] = ()
    sends: tuple[P2POperation, ...] = ()
    targets: tuple[PipelineStage, ...] = ()
    """The stages of this rank that read a forward's outputs."""
    sources: tuple[PipelineStage, ...] = ()
    """The stages of this rank that a backward gives gradients to."""
    custom: CustomFunction | None = None
    """The function of the user that runs instead."""
    parts: tuple[ScheduledAction, ...] = ()
    """For an overlap that a function of the user runs."""
    waits: bool = field(init=False)
    """True when it must wait for messages or parameters before it runs."""

    def __post_init__(self) -> None:
        computes = self.operation is F or self.operation in BACKWARD
        self.waits = computes and bool(self.reads or self.residencies)

    @property
    def where(self) -> str:
        """Its name in error messages; for a part of an overlap, with the overlap."""
        return self.text if self.part is self.action else f"{self.text} of {self.action}"


def program(
    schedule: Schedule,
    rank: int,
    stages: Mapping[int, PipelineStage],
    residencies: Mapping[int, Residencies],
    custom: Mapping[Operation, CustomFunction],
) -> list[ScheduledAction]:
    """Return the scheduled actions of the row of ``rank``; ``custom`` has the user's functions.

    Gathers and reductions of plain stages are left out unless a function replaces them. An overlap
    is one action if a function runs it and no part needs another; otherwise its parts are.
    """
    incoming = received(schedule, rank)
    operations: dict[Message, P2POperation] = {}
    last: dict[int, P2POperation] = {}  # by rank, its last message so far
    waited: set[Message] = set()

    def here(indices: Iterable[int]) -> tuple[PipelineStage, ...]:
        return tuple(stages[index] for index in indices if index in stages)

    def operation_of(message: Message) -> P2POperation:
        if message not in operations:
            kind, stage, target, k, source, reader = message
            is_back, arrives = kind is SEND_B, reader == rank
            readers = (target,) if is_back else schedule.targets[stage]
            mine = here(readers) if arrives else ()
            at = stage if not arrives else mine[0].stage_index if mine else readers[0]
            label = f"{at}{'RECV_' if arrives else 'SEND_'}{'B' if is_back else 'F'}{k}"
            peer = source if arrives else reader
            operations[message] = P2POperation(message, label, peer, mine)
        return operations[message]

    def first_reads(action: Action) -> tuple[P2POperation, ...]:
        new = [message for message in read(action, schedule) if message not in waited]
        waited.update(new)
        return tuple(map(operation_of, new))

    def scheduled(action: Action, part: Action) -> ScheduledAction:
        index, operation, microbatch, _ = part
        reads, posts, sends, targets, sources = (), (), (), (), ()
        if operation is F:
            reads = first_reads(part._replace(operation=RECV_F))
            targets = here(schedule.targets[index])
        elif operation is B or operation is I:
            reads = first_reads(part._replace(operation=RECV_B))
            sources = here(schedule.sources[index])
        elif operation is RECV_F or operation is RECV_B:
            posts = tuple(map(operation_of, incoming[action]))
            for each in posts:
                if each.peer in last:
                    last[each.peer].following = each
                last[each.peer] = each
        elif operation is SEND_F or operation is SEND_B:
            sends = tuple(map(operation_of, sent(part, schedule)))
        return ScheduledAction(
            action,
            part,
            str(part),
            operation,
            index,
            microbatch or 0,
            stages[index],
            residencies[index],
            reads,
            posts,
            sends,
            targets,
            sources,
            custom.get(operation),
        )

    found: list[ScheduledAction] = []
    for action in schedule.actions(rank):
        parts = [
            scheduled(action, part)
            for part in parts_of(action)
            if residencies[part.stage]
            or part.operation in custom
            or part.operation not in (UNSHARD, RESHARD, REDUCE_GRAD)
        ]
        needs = {need for part in action.parts for need in dependencies(part, schedule)}
        if action.operation in custom and action.parts and needs.isdisjoint(action.parts):
            first, operation = parts[0], action.operation
            overlap = ScheduledAction(
                action,
                action,
                str(action),
                operation,
                first.index,
                first.microbatch,
                first.stage,
                (),
            )
            overlap.custom, overlap.parts = custom[operation], tuple(parts)
            overlap.waits = any(part.waits for part in parts)
            parts = [overlap]
        found += parts
    return found


_KEPT = 256
"""The number of seeds of losses that are kept."""
_CUSTOM = COMPUTE | {UNSHARD, RESHARD, REDUCE_GRAD}
"""Operations that a function of the user may replace."""


class Runtime:
    """Runs one lowered schedule on the stages of this rank, step after step."""

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        training: Schedule,
        evaluation: Schedule,
        communicator: Communicator,
        loss_fn: Callable[..., Any] | None,
        residencies: Mapping[int, Residencies],
        number: int,
        custom: Mapping[Operation, CustomFunction],
    ) -> None:
        """Both schedules are lowered, over the same stages; ``number`` is theirs in the group.

        ``custom`` are functions of the user, see `register`.
        """
        self.schedules = {True: training, False: evaluation}
        self.stages = stages
        self.steps = 0
        """Steps that have ended on this rank, or that it has refused."""
        self.broken: BaseException | None = None
        self.loss_fn = loss_fn
        self.seeds: dict[object, torch.Tensor] = {}
        """The gradients that losses start with, by weight, dtype and device."""
        self.residencies = residencies
        self.communicator = communicator
        self._has_refused = False
        self._custom: dict[Operation, CustomFunction] = {}
        self.register(custom)
        self._notices = Notices(communicator, f"schedule {number}")
        self._driven = [each for listed in residencies.values() for each in listed]
        # Ranks of other pipelines wait for this one in reductions of its stages: tell them, too.
        self._failures = Failures(communicator, self._notices, has_replicas=bool(self._driven))
        ties = next(iter(stages.values())).ties
        modules = {index: stage.submod for index, stage in stages.items()}
        ranks, trains = training.stage_ranks, loss_fn is not None
        tied = TiedParameters(modules, ties, ranks, residencies, trains=trains)
        self.tied = tied if tied.stages else None
        """The tied parameters of this rank's stages; None without any."""
        self.transport = Transport(communicator, self.schedules.values(), tied_pairs(ties), number)
        split = getattr(next(iter(stages.values())), "split", 0)
        self._own = json.dumps({**_facts(training, loss_fn is not None, ties), "split": split})
        self.plan = digest(self._own)
        """A digest of the facts that all ranks of the pipeline must agree on."""
        self._notices.post(f"plan/{communicator.rank}", self._own)
        self._what = f"{training.name} with {training.microbatches} microbatches ({self.plan:x})"
        self._turns = Turns(communicator, Notices(communicator, "turns"), number, self._what)

    def register(self, functions: Mapping[Operation, CustomFunction]) -> None:
        """Register functions of the user to run in place of actions, from the next step on."""
        self._custom.update(functions)
        rank = self.communicator.rank
        self.programs = {
            mode: program(schedule, rank, self.stages, self.residencies, self._custom)
            for mode, schedule in self.schedules.items()
        }

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
        step = _StepRun(self, batch, training=training)
        what = f"{'a step' if training else 'an evaluation'} of {self._what}"
        try:
            if self._has_refused:  # others may have begun that step, failed, and left
                self._failures.look(self.steps, is_final=True)
                self._has_refused = False
            for residency in self._driven:
                residency.begin(what, training=training)
            if self.transport.channels.closed:  # in the first step, which all ranks have reached
                self.transport.channels.open(self.look)
            if self.tied is not None:
                self.tied.send_values(step.transfers)
                if training:
                    self.tied.begin()
            step.run(self.programs[training])
            if self.tied is not None and training:
                self.tied.add_up(step.transfers)
            # Only now: shards of a tied parameter's gradient are parts of the sum over its holders.
            for residency in step.late:
                residency.reduce()
            # Sends still read outputs and gradients, which the caller may write to after the step.
            step.transfers.finish()
            for residency in self._driven:
                residency.finish()
            if step.listener is not None:
                step.listener.end()
        # Also for an interrupt from the keyboard: the other ranks wait for this one's messages.
        except BaseException as error:
            if self.tied is not None:
                self.tied.restore()
            # Told before anything is dropped here, so that no rank waits for as long as that takes.
            self._failed(step, error)
            for residency in self._driven:
                residency.drop()
            raise
        finally:
            for stage in self.stages.values():
                stage.end_step()
        self.transport.signatures.keep(step.ids.known)
        self._turns.end(self.steps)
        self.steps += 1

    def disagreement(self, rank: int) -> str:
        """Describe how the schedule of ``rank`` differs from this rank's."""
        mine, both = json.loads(self._own), [self.communicator.rank, rank]
        theirs = object_of(self._notices.read(f"plan/{rank}"), {}) or {}
        return f"the ranks of the pipeline disagree: {first_difference(both, [mine, theirs])}"

    def _failed(self, step: _StepRun, error: BaseException) -> None:
        entry = step.entry
        may_go_on = self._failures.has_seen_refusal or not isinstance(error, CommunicationError)
        if may_go_on and not step.transfers.has_begun:
            self.transport.signatures.drop()
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


class _StepRun:
    """One step on one rank."""

    def __init__(self, runtime: Runtime, batch: Microbatches, *, training: bool) -> None:
        self.runtime = runtime
        self.batch = batch
        self.training = training
        self.entry = runtime.programs[training][0]
        """The action that is running, or has failed."""
        self.late: list[Residency] = []
        """Those of stages with tied parameters, whose gradients are reduced after the row."""
        self.listener: Listener | None = None
        self._reduced: set[int] = set()
        schedule = runtime.schedules[training]
        self.ids = StepIds(
            runtime.stages, schedule, batch, runtime.transport.ids, training=training
        )
        # A fake group has this rank alone: nobody sends what its stages read.
        is_fake = runtime.communicator.backend == "fake"
        kind = functools.partial(UnansweredTransfers, runtime.stages) if is_fake else P2PTransfers
        self.transfers = kind(
            runtime.transport,
            self.ids,
            runtime.steps,
            # The mode is the lowest bit: another mode is a mistake of its own, not another plan.
            2 * runtime.plan + training,
            runtime.look,
            runtime.disagreement,
        )
        told = StepOfStage(training, batch.is_scaled, self.reduce_stage, schedule.microbatches)
        for stage in runtime.stages.values():
            stage.begin_step(told)

    def run(self, entries: Sequence[ScheduledAction]) -> None:
        """Run the row. A listener hears each action without the time that it waits."""
        listener = self.listener = Listener.attached(self.runtime.communicator.clock)
        for entry in entries:
            self.entry = entry
            if entry.waits:
                self.wait_for(entry)
                if listener is not None:
                    listener.waited(entry)
            with _SILENT if listener is None else listener.action(entry):
                if entry.custom is None:
                    run, after = _HANDLERS[entry.operation]
                    run(self, entry)
                    if after is not None:
                        after(self, entry)
                else:
                    self.call(entry)
            # Control messages that have come meanwhile may give the sizes of receives left behind.
            if self.transfers.unposted:
                self.transfers.post_rest()
            # Reports each send near its end, not with the next send or at the end of the step.
            if listener is not None:
                self.transfers.let_go()

    # ------------------------------------------------------------------------ compute

    def wait_for(self, entry: ScheduledAction) -> None:
        """Wait for what a compute action reads, and for the stage's parameters."""
        for part in entry.parts:
            self.wait_for(part)
        for operation in entry.reads:
            _, source, _, k, _, _ = operation.message
            if entry.operation is F:
                values = self.transfers.take_outputs(operation)
                for stage in operation.readers:
                    stage.put_outputs(k, source, values)
            else:
                entry.stage.put_gradients(k, source, self.transfers.take_gradients(operation))
        for residency in entry.residencies:
            residency.wait_unshard()

    def forward(self, entry: ScheduledAction) -> None:
        k, stage, batch = entry.microbatch, entry.stage, self.batch
        args = batch.args[k] if stage.takes_batch else ()
        stage.forward_one_chunk(k, args, batch.kwargs[k] if batch.kwargs else None)

    def pass_outputs(self, entry: ScheduledAction) -> None:
        """Pass the outputs of a forward on: to the loss, or to the stages that read them."""
        k, stage = entry.microbatch, entry.stage
        values = stage.chunks[k].values
        if stage.is_last:
            self._lose(stage, k)
            return
        # The ids that this one depends on came with the inputs.
        ids = self.ids.known.get(entry.index) or self.ids.of(entry.index)
        if ids is None or values is None:
            raise InternalError(f"{entry.where} runs before its inputs have arrived")
        signatures = self.runtime.transport.signatures
        known = signatures.stages[entry.index].get(ids[k])
        if known is None:
            where = f"{stage.name} output of microbatch {k}"
            signatures.learn(entry.index, ids[k], signature_of(values, where))
        else:
            known.signature.check_outputs(values, entry.index, k, gradients=True)
        for target in entry.targets:
            target.put_outputs(k, entry.index, values)

    def _lose(self, stage: PipelineStage, k: int) -> None:
        """Compute the loss of the last stage's outputs, and what its backward starts from.

        A loss is weighted by the gradient that its backward starts with: accumulated gradients are
        never scaled, and reported losses are those of the user's function.
        """
        batch, function, seeds = self.batch, self.runtime.loss_fn, self.runtime.seeds
        if function is None or batch.targets is None:
            return
        loss = function(stage.results[k], batch.targets[k], **batch.loss_kwargs)
        check_loss(loss, stage.results, batch.targets, k, is_weighed=bool(batch.weights))
        # By microbatch, in whichever order the row runs them; None stands for those to come.
        batch.losses += [None] * (len(batch.args) - len(batch.losses))
        batch.losses[k] = loss
        if not self.training:
            return
        first = loss[0] if isinstance(loss, tuple) else loss
        start = BackwardStart(first, batch.weights[k] if batch.weights else 1.0)
        # A kept seed spares each microbatch a kernel. A subclass, such as a DTensor, cannot start
        # from a plain tensor: its loss is multiplied by the weight instead.
        if type(first) is torch.Tensor and not first.dim() and first.is_floating_point():
            key = (start.weight, first.dtype, first.device)
            start.seed = seeds.get(key)
            if start.seed is None:
                if len(seeds) >= _KEPT:
                    seeds.clear()
                start.seed = seeds[key] = torch.full(
                    (), start.weight, dtype=first.dtype, device=first.device
                )
        stage.chunks[k].start = start

    def backward(self, entry: ScheduledAction) -> None:
        entry.stage.backward_one_chunk(entry.microbatch, None, entry.operation is B)

    def pass_gradients(self, entry: ScheduledAction) -> None:
        """Pass the gradients of a backward to stages of this rank; after a full one, accumulate."""
        if entry.operation is B:
            for residency in entry.residencies:
                residency.accumulate()
        for source in entry.sources:
            gradients = entry.stage.take_gradients(entry.microbatch, source.stage_index)
            source.put_gradients(entry.microbatch, entry.index, gradients)

    def weight_half(self, entry: ScheduledAction) -> None:
        entry.stage.backward_weight_one_chunk(entry.microbatch)

    def accumulate(self, entry: ScheduledAction) -> None:
        """Accumulate after a weight half; detach results and losses, which keep its graph alive."""
        if entry.stage.is_last:
            k, results, losses = entry.microbatch, entry.stage.results, self.batch.losses
            if k in results:
                results[k] = detached(results[k])
            if k < len(losses):
                losses[k] = detached(losses[k])
        for residency in entry.residencies:
            residency.accumulate()

    # ---------------------------------------------------------------------- transfers

    def send_outputs(self, entry: ScheduledAction) -> None:
        values = entry.stage.chunks[entry.microbatch].values
        if values is None:
            raise InternalError(f"{entry.where} runs before its forward")
        for operation in entry.sends:
            self.transfers.send_outputs(operation, values)

    def send_gradients(self, entry: ScheduledAction) -> None:
        for operation in entry.sends:
            gradients = entry.stage.take_gradients(entry.microbatch, operation.message.target)
            self.transfers.send_gradients(operation, gradients)

    def post(self, entry: ScheduledAction) -> None:
        """Post receives now, or as soon as the sizes are known."""
        self.transfers.post(entry.posts)

    def unshard(self, entry: ScheduledAction) -> None:
        for residency in entry.residencies:
            residency.unshard()

    def reshard(self, entry: ScheduledAction) -> None:
        for residency in entry.residencies:
            residency.reshard()

    def reduce(self, entry: ScheduledAction) -> None:
        self.reduce_stage(entry.index)

    def reduce_stage(self, index: int) -> None:
        """Start to sum gradients; for a stage with tied parameters, only after the row."""
        self._reduced.add(index)
        residencies, tied = self.runtime.residencies[index], self.runtime.tied
        if tied is not None and index in tied.stages:
            self.late += residencies
            return
        for residency in residencies:
            residency.reduce()

    # --------------------------------------------------------------- functions of the user

    def call(self, entry: ScheduledAction) -> None:
        """Run a function of the user in place of the action, or of both parts of an overlap.

        The interpreter has waited for its inputs, and passes its results on; the function computes,
        by the stage's methods or by `PipelineContext.run`. Raises ``RuntimeError`` for an action
        that it has not done, because other ranks rely on the results.
        """
        parts = entry.parts or (entry,)

        def run(action: Action) -> None:
            chosen = [part for part in parts if action in (part.part, entry.part)]
            if not chosen:
                raise ValueError(f"{action} is no part of {entry.text}, which runs now")
            for part in chosen:
                self.entry = part
                _HANDLERS[part.operation][0](self, part)

        batch = self.batch
        context = PipelineContext(
            batch.schedule_ref,
            list(batch.args),
            list(map(dict, batch.kwargs)) or [{} for _ in batch.args],
            None if batch.targets is None else list(batch.targets),
            batch.losses,
            run,
        )
        if entry.custom is not None:
            entry.custom(entry.part, context)
        for part in parts:
            is_left = part.stage.has_left(part.operation, part.microbatch)
            if part.operation is REDUCE_GRAD:
                is_left = bool(part.residencies) and part.index not in self._reduced
            if is_left:
                raise RuntimeError(
                    f"the custom function for {entry.operation.name} has left {part.text} undone: "
                    f"call the method of stage {part.index} that does it, or ctx.run(action)"
                )
        self.entry = entry
        for part in parts:
            after = _HANDLERS[part.operation][1]
            if after is not None:
                after(self, part)


_SILENT = contextlib.nullcontext()
_Handler = Callable[[_StepRun, ScheduledAction], None]
_HANDLERS: Mapping[Operation, tuple[_Handler, _Handler | None]] = MappingProxyType(
    {
        F: (_StepRun.forward, _StepRun.pass_outputs),
        B: (_StepRun.backward, _StepRun.pass_gradients),
        I: (_StepRun.backward, _StepRun.pass_gradients),
        W: (_StepRun.weight_half, _StepRun.accumulate),
        SEND_F: (_StepRun.send_outputs, None),
        SEND_B: (_StepRun.send_gradients, None),
        RECV_F: (_StepRun.post, None),
        RECV_B: (_StepRun.post, None),
        UNSHARD: (_StepRun.unshard, None),
        RESHARD: (_StepRun.reshard, None),
        REDUCE_GRAD: (_StepRun.reduce, None),
    }
)
"""By operation, the part that a function of the user may replace, and the part that follows it."""


@dataclass(frozen=True, slots=True)
class PipelineContext:
    """The arguments of a custom function besides its action, with torch's names."""

    schedule_ref: Any
    """The schedule."""
    arg_mbs: list[tuple[Any, ...]]
    """By microbatch, the positional arguments that this rank's step was given."""
    kwarg_mbs: list[dict[str, Any]]
    target_mbs: list[Any] | None
    losses: list[Any]
    """On the rank of the last stage by microbatch, unscaled; None for those to come."""
    run: Callable[[Action], None]
    """Does what the schedule itself would do for the action or a part of it."""


def check_custom(operation: object) -> Operation:
    """Return ``operation`` if a custom function may replace it, else raise ``ValueError``."""
    if isinstance(operation, Operation) and operation in _CUSTOM:
        return operation
    allowed = ", ".join(found.name for found in Operation if found in _CUSTOM)
    raise ValueError(f"Invalid computation type {operation}. Only {allowed} are supported.")


class Listener:
    """Reports the actions of one step to observers of `comm` and to torch's profiler.

    Compute starts when all its inputs are there, so that waiting does not count as work. A gather
    lasts from its UNSHARD until the first compute that waits for it, a reduction until the end of
    the step. The communicator reports transfers, labeled by their actions.
    """

    def __init__(self, clock: Clock, *, is_profiled: bool) -> None:
        self._clock = clock
        self._is_profiled = is_profiled
        self._gathers: dict[int, tuple[ScheduledAction, Mark]] = {}
        self._reductions: list[tuple[ScheduledAction, Mark]] = []

    @classmethod
    def attached(cls, clock: Clock) -> Listener | None:
        """Make a listener if an observer or the profiler is active, else None."""
        has_profiler = is_profiled()
        if has_profiler or hears_actions():
            return cls(clock, is_profiled=has_profiler)
        return None

    @contextlib.contextmanager
    def action(self, entry: ScheduledAction) -> Iterator[None]:
        """Report the block as the action of ``entry``."""
        start = self._clock.mark()
        if self._is_profiled:
            with record_function(f"PP:{entry.text}"):
                yield
        else:
            yield
        operation = entry.operation
        if operation in COMPUTE:
            tell_ran(entry.text, "compute", operation.value, start, self._clock.mark())
        elif operation is UNSHARD:
            self._gathers[entry.index] = entry, start
        elif operation is RESHARD:
            tell_ran(entry.text, "gather", operation.value, start, self._clock.mark())
        elif operation is REDUCE_GRAD:
            self._reductions.append((entry, start))

    def waited(self, entry: ScheduledAction) -> None:
        """Report that all inputs of the compute action ``entry`` are there."""
        for part in entry.parts or (entry,):
            gather = self._gathers.pop(part.index, None)
            if gather is not None:
                opened, start = gather
                tell_ran(opened.text, "gather", opened.operation.value, start, self._clock.mark())

    def end(self) -> None:
        """Report the reductions of the step, each from its start until now."""
        for entry, start in self._reductions:
            tell_ran(entry.text, "reduce", entry.operation.value, start, self._clock.mark())
