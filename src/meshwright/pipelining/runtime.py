"""One interpreter for all schedules: it goes through this rank's row, action by action."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.comm import Communicator, Pending
from meshwright.comm.notices import Notices
from meshwright.errors import PipelinePeerError
from meshwright.pipelining.agreed import Agreed
from meshwright.pipelining.failures import Failures
from meshwright.pipelining.listener import Listener
from meshwright.pipelining.metadata import Values, digest, signature_of, trained
from meshwright.pipelining.microbatch import check_loss
from meshwright.pipelining.program import Entry, Leg, program
from meshwright.pipelining.residency import Several
from meshwright.pipelining.stage import PipelineStage
from meshwright.pipelining.ties import Tie, TiedParameters
from meshwright.pipelining.transfers import Transfers, first_tag
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
    key: object = None
    """Stands for the shapes, strides and dtypes of all arguments; None: nobody has noted them."""


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
        number: int,
    ) -> None:
        """Both schedules are lowered, over the same stages; the group gave this one ``number``."""
        self.schedules = {True: training, False: evaluation}
        self.stages = stages
        self.steps = 0
        """Steps that have come as far as their first message."""
        self.broken: BaseException | None = None
        self._communicator = communicator
        self._loss_fn = loss_fn
        self._residencies = residencies
        self._rank = communicator.rank
        self._programs = {
            mode: program(s, self._rank, stages, residencies) for mode, s in self.schedules.items()
        }
        self._agreed = Agreed()
        self._first_tag = first_tag(training, number)
        self._ids: dict[object, tuple[int, ...]] = {}
        self._weights: dict[object, torch.Tensor] = {}
        self._headers: dict[tuple[int, int], tuple[Pending, torch.Tensor]] = {}
        self._notices = Notices(communicator, f"schedule {number}")
        has_replicas = any(residencies.values())
        self._failures = Failures(communicator, self._notices, has_replicas=has_replicas)
        ties = next(iter(stages.values())).ties
        modules = {index: stage.submod for index, stage in stages.items()}
        self._tied = TiedParameters(modules, ties, training.stage_ranks, residencies)
        split = getattr(next(iter(stages.values())), "split", 0)
        self._own = json.dumps({**_facts(training, loss_fn is not None, ties), "split": split})
        self.plan = digest(self._own)
        """What all ranks of the pipeline must agree on, as a number."""
        self._notices.post(f"plan/{self._rank}", self._own)
        self._what = f"{training.name} with {training.microbatches} microbatches ({self.plan:x})"

    def run(self, batch: Microbatches, *, training: bool) -> None:
        """Run one step. What the batch is has been checked before.

        Raises what a stage of this rank raises; for a failure on another rank, an error that
        names rank, stage and action; at once, when an earlier step has left messages behind.
        """
        if self.broken is not None:
            raise PipelinePeerError(
                f"this schedule is unusable since an earlier step failed: {self.broken}"
            ) from self.broken
        self._failures.begin(self.steps)
        step = _Step(self, batch, training=training)
        what = f"a step of {self._what}" if training else f"an evaluation of {self._what}"
        residencies = [residency for residency in self._residencies.values() if residency]
        try:
            for residency in residencies:
                residency.begin(what, training=training)
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
        self._agreed.keep(step.transfers.came)
        self._agreed.keep(step.made)
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
        has_begun = step.transfers.has_begun
        if has_begun:
            self.broken = error
        else:
            self._agreed.drop()
        action = step.entry.action
        self._failures.tell(self.steps, error, action.stage, str(action), for_good=has_begun)

    def refused(self, error: Exception) -> None:
        """A step could not begin on this rank: tell those that wait for it, until it can."""
        if self.broken is None:
            self._failures.tell(self.steps, error, min(self.stages), "step()", for_good=False)

    def look(self) -> None:
        """Raise when another rank has failed in this step or an earlier one."""
        self._failures.look(self.steps)


def _facts(schedule: Schedule, has_loss: bool, ties: Sequence[Tie]) -> dict[str, Any]:
    """What all ranks must agree on, in words."""
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
        """The action that runs, or has failed."""
        self._unposted: list[Leg] = []
        self._listener: Listener | None = None
        self.made: dict[int, tuple[int, ...]] = {}
        """By stage of this rank the ids of its outputs."""
        self._losses: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._late: list[Several] = []
        """What is reduced when the row has been run."""
        self.transfers = Transfers(
            runtime._communicator,
            self.schedule,
            runtime.steps,
            runtime._agreed,
            runtime._headers,
            self.ids,
            runtime.look,
            2 * runtime.plan + training,
            runtime.disagreement,
            runtime._first_tag,
        )
        for stage in runtime.stages.values():
            stage.clear_runtime_states()
            stage.has_backward = training

    def run(self, entries: Sequence[Entry]) -> None:
        """Go through the row."""
        self._listener = Listener.attached(self.runtime._communicator.clock)
        if self._listener is not None:
            self._run_heard(entries, self._listener)
            return
        for entry in entries:
            self.entry = entry
            if entry.waits:
                self.wait_for(entry)
            _HANDLERS[entry.operation](self, entry)
            if self._unposted:
                self._unposted = self.transfers.post_rest(self._unposted)

    def _run_heard(self, entries: Sequence[Entry], listener: Listener) -> None:
        """Go through the row and tell of each action, without what it waits for."""
        for entry in entries:
            self.entry = entry
            if entry.waits:
                self.wait_for(entry)
                listener.waited(entry)
            with listener.action(entry):
                _HANDLERS[entry.operation](self, entry)
            if self._unposted:
                self._unposted = self.transfers.post_rest(self._unposted)
            self.transfers.let_go()

    def end(self) -> None:
        """All has been waited for."""
        if self._listener is not None:
            self._listener.end()

    # -------------------------------------------------------------------- signatures

    def ids(self, stage: int, *, wait: bool) -> tuple[int, ...] | None:
        """The ids of what ``stage`` of this rank makes, by microbatch."""
        found = self.made.get(stage)
        if found is not None:
            return found
        before: list[tuple[int, ...]] = []
        for source in self.schedule.sources[stage]:
            is_local = source in self.runtime.stages
            ask = self.ids if is_local else self.transfers.incoming
            theirs = ask(source, wait=wait)
            if theirs is None:
                return None
            before.append(theirs)
        count, cache = self.schedule.microbatches, self.runtime._ids
        given = self._given(stage)
        flags = self.training and trained(self.runtime.stages[stage].submod)
        key = (stage, flags, *before, given)
        found = cache.get(key)
        if found is None:
            texts = self._texts(stage) if given is self.batch.key else given
            rows = [[ids[k] for ids in before] for k in range(count)]
            found = tuple(
                digest(stage, flags, row, texts[k] if texts else "") for k, row in enumerate(rows)
            )
            if len(cache) >= _KEPT:
                cache.clear()
            cache[key] = found
        self.made[stage] = found
        return found

    def _given(self, stage: int) -> Any:  # noqa: ANN401 - anything that can be a key
        """What this rank's own arguments for ``stage`` look like; empty without any."""
        if not self.runtime.stages[stage].takes_batch and not self.batch.kwargs:
            return ()
        return self._texts(stage) if self.batch.key is None else self.batch.key

    def _texts(self, stage: int) -> tuple[str, ...]:
        return tuple(self._text(stage, k) for k in range(self.schedule.microbatches))

    def _text(self, stage: int, microbatch: int) -> str:
        values: list[Any] = []
        if self.runtime.stages[stage].takes_batch:
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

    def wait_for(self, entry: Entry) -> None:
        """Wait for what a compute action reads, and for the stage's parameters."""
        is_forward = entry.operation is F
        for leg in entry.reads:
            _, source, _, k, _, _ = leg.message
            if is_forward:
                values = self.transfers.take_outputs(leg)
                for stage in leg.readers:
                    stage.put_outputs(k, source, values)
            else:
                entry.stage.put_gradients(k, source, self.transfers.take_gradients(leg))
        if entry.residency is not None:
            entry.residency.wait_unshard()

    def forward(self, entry: Entry) -> None:
        """F: run the stage, hand over to stages of this rank."""
        index, k, stage, batch = entry.index, entry.microbatch, entry.stage, self.batch
        ids = self.ids(index, wait=True) or ()
        known = self.runtime._agreed[index].outputs.get(ids[k])
        if known is not None:
            stage.expected[k] = known
        args = batch.args[k] if stage.takes_batch else ()
        result = stage.forward_one_chunk(k, args, batch.kwargs[k] if batch.kwargs else None)
        if stage.is_last:
            self._lose(k, result)
        values = stage.take_outputs(k)
        if known is None and not stage.is_last:
            where = f"{stage.name} output of microbatch {k}"
            self.runtime._agreed.learn(index, ids[k], signature_of(values, where))
        elif known is not None:
            known.check_gradients(values, f"{stage.name} output of microbatch {k}")
        for target in entry.targets:
            target.put_outputs(k, index, values)

    def _lose(self, microbatch: int, output: object) -> None:
        loss_fn, targets = self.runtime._loss_fn, self.batch.targets
        if loss_fn is None or targets is None:
            return
        loss = loss_fn(output, targets[microbatch], **self.batch.loss_kwargs)
        outputs = self.runtime.stages[max(self.runtime.stages)].output_chunks
        check_loss(loss, outputs, targets, microbatch, is_weighed=bool(self.batch.weights))
        self.batch.losses.append(loss)
        if self.training:
            start = loss[0] if isinstance(loss, tuple) else loss
            weight = self.batch.weights[microbatch] if self.batch.weights else 1.0
            seed = self._seed(start, weight)
            if seed is None and weight != 1.0:
                start = start * weight
            self._losses[microbatch] = start, seed

    def _seed(self, loss: torch.Tensor, weight: float) -> torch.Tensor | None:
        """The gradient with which the backward of ``loss`` starts; None where it must tell."""
        if type(loss) is not torch.Tensor or loss.dim() or not loss.is_floating_point():
            return None
        key = (weight, loss.dtype, loss.device)
        found = self.runtime._weights.get(key)
        if found is None:
            found = torch.full((), weight, dtype=loss.dtype, device=loss.device)
            if len(self.runtime._weights) >= _KEPT:
                self.runtime._weights.clear()
            self.runtime._weights[key] = found
        return found

    def backward(self, entry: Entry) -> None:
        """B or I: run it, hand over."""
        k, stage = entry.microbatch, entry.stage
        loss, seed = self._losses.pop(k, _NO_LOSS) if stage.is_last else _NO_LOSS
        stage.backward_one_chunk(k, loss, entry.operation is B, seed=seed)
        if entry.residency is not None and entry.operation is B:
            entry.residency.accumulate()
        for source in entry.sources:
            gradients = stage.take_gradients(k, source.stage_index)
            source.put_gradients(k, entry.index, gradients)

    def weight(self, entry: Entry) -> None:
        """W: the weight half."""
        entry.stage.backward_weight_one_chunk(entry.microbatch)
        if entry.residency is not None:
            entry.residency.accumulate()

    # ---------------------------------------------------------------------- transfers

    def send_outputs(self, entry: Entry) -> None:
        """SEND_F."""
        values = entry.stage.take_outputs(entry.microbatch)
        for leg in entry.sends:
            self.transfers.send_outputs(leg, values)

    def send_gradients(self, entry: Entry) -> None:
        """SEND_B."""
        for leg in entry.sends:
            gradients = entry.stage.take_gradients(entry.microbatch, leg.message.target)
            self.transfers.send_gradients(leg, gradients)

    def post(self, entry: Entry) -> None:
        """RECV_F and RECV_B: post now, or as soon as the sizes are known."""
        self._unposted += self.transfers.post(entry.posts)

    def unshard(self, entry: Entry) -> None:
        """UNSHARD."""
        if entry.residency is not None:
            entry.residency.unshard()

    def reshard(self, entry: Entry) -> None:
        """RESHARD."""
        if entry.residency is not None:
            entry.residency.reshard()

    def reduce(self, entry: Entry) -> None:
        """REDUCE_GRAD. A stage with tied parameters waits for the other holders until the end."""
        if entry.residency is None:
            return
        if entry.index in self.runtime._tied.stages:
            self._late.append(entry.residency)
        else:
            entry.residency.reduce()

    def finish(self) -> None:
        """The row has been run: tied gradients, what waits for them, and what is being sent."""
        if self.training:
            self.runtime._tied.add_up(self.transfers)
        for residency in self._late:
            residency.reduce()
        self.transfers.finish()


_HANDLERS: Mapping[Operation, Callable[[_Step, Entry], None]] = {
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
_NO_LOSS = (None, None)
_KEPT = 256
"""How many kinds of batches, or weights of losses, are kept in mind."""
_PLAIN = (bool, int, float, str, type(None))
