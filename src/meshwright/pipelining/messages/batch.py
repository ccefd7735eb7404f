"""The arguments of a step on this rank, and the ids of the values that its stages make of them.

An id stands for the shapes, strides and dtypes of a stage's outputs for one microbatch. It follows
from the stage's inputs, so it is known before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.errors import PipeliningShapeError
from meshwright.pipelining.messages.metadata import TensorMeta, Values, digest, trained
from meshwright.pipelining.microbatch import cut_dims
from meshwright.pipelining.stage import PipelineStage
from meshwright.pipelining.stepping.custom import PipelineContext
from meshwright.schedule.actions import Action, Schedule

Known = dict[object, tuple[int, ...]]
"""A stage's ids, by its inputs."""
_KEPT = 256
"""The number of kinds of batches that are remembered."""
_OF_EACH: Mapping[str, type] = {"arg_mbs": tuple, "kwarg_mbs": Mapping}
_PLAIN = (bool, int, float, str, type(None))


@dataclass(slots=True)
class Microbatches:
    """The arguments of a step on this rank, split into microbatches."""

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[Mapping[str, Any]]
    targets: Sequence[Any] | None = None
    weights: Sequence[float] = ()
    """By microbatch, the weight of its loss in the gradient."""
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    losses: list[Any] = field(default_factory=list)
    """By microbatch, filled by the last stage, unscaled."""
    schedule_ref: object = None
    """The schedule, for functions of the user."""
    is_scaled: bool = False
    """True when each loss is weighted by its microbatch's share before the backward."""
    key: object = None
    """Stands for the shapes, strides and dtypes of all arguments; None where none was computed."""

    def keep_loss(self, microbatch: int, loss: object) -> None:
        """Store the loss of a microbatch; microbatches may come in any order."""
        self.losses += [None] * (len(self.args) - len(self.losses))
        self.losses[microbatch] = loss

    def all_losses(self) -> list[Any]:
        """Return the losses of a step that has ended.

        Raises ``RuntimeError`` where a function of the user has added or removed some.
        """
        count = len(self.args)
        own = "the schedule fills ctx.losses itself, and functions of the user only read it"
        if self.losses and len(self.losses) != count:
            raise RuntimeError(f"Expecting {count} losses but got {len(self.losses)}: {own}")
        for microbatch, loss in enumerate(self.losses):
            if loss is None:
                raise RuntimeError(f"Loss for microbatch {microbatch} is not available: {own}")
        return self.losses

    def context(self, run: Callable[[Action], None]) -> PipelineContext:
        """Make the context of this step for a function of the user."""
        return PipelineContext(
            self.schedule_ref,
            list(self.args),
            list(map(dict, self.kwargs)) or [{} for _ in self.args],
            None if self.targets is None else list(self.targets),
            self.losses,
            run,
        )


def check_cut(given: Mapping[str, object], microbatches: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless each value is a list of ``microbatches``."""
    for name, values in given.items():
        if values is None:
            continue
        if not isinstance(values, list):
            raise TypeError(f"{name} must be a list but got a {type(values)}")
        if len(values) != microbatches:
            raise ValueError(f"Expecting {microbatches} {name} but got {len(values)}")
        kind = _OF_EACH.get(name, object)
        for microbatch, value in enumerate(values):
            if not isinstance(value, kind):
                raise TypeError(
                    f"{name} must have a {kind.__name__.lower()} of arguments for each microbatch, "
                    f"but has a {type(value).__name__} for microbatch {microbatch}"
                )


def check_declared(
    stage: PipelineStage, args: tuple[Any, ...], specs: object, microbatches: int
) -> None:
    """Compare the first chunk of the batch with the declared inputs, before it is cut."""
    declared = stage.declared_inputs
    if declared is None or not args:
        return
    leaves, dims = Values.of(args).leaves, cut_dims(args, specs)
    problems = []
    for number, (meta, leaf, dim) in enumerate(zip(declared.leaves, leaves, dims, strict=False)):
        if not isinstance(meta, TensorMeta) or not isinstance(leaf, torch.Tensor):
            continue
        what = f"{stage.name} argument {number}"
        got = list(leaf.shape)
        if dim is not None:
            got[dim] = -(-got[dim] // microbatches)
        if list(meta.shape) != got:
            problems.append(
                f"{what} has a shape mismatch: expected {list(meta.shape)} actual {got}"
            )
        if meta.dtype is not leaf.dtype:
            problems.append(
                f"{what} has a dtype mismatch: expected {meta.dtype} actual {leaf.dtype}"
            )
    if problems:
        raise PipeliningShapeError("; ".join(problems))


class Identities:
    """The ids of one step on one rank."""

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        schedule: Schedule,
        batch: Microbatches,
        known: Known,
        *,
        training: bool,
    ) -> None:
        self._stages = stages
        self._schedule = schedule
        self._batch = batch
        self._known = known
        self._training = training
        self.known: dict[int, tuple[int, ...]] = {}
        """By stage: received from other ranks, computed on request for this rank's own."""

    @property
    def microbatches(self) -> int:
        return self._schedule.microbatches

    def told(self, stage: int, ids: tuple[int, ...]) -> None:
        """Store the ids of a stage of another rank."""
        self.known[stage] = ids

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
        given = self._given(stage)
        flags = self._training and trained(self._stages[stage].submod)
        key = (stage, flags, *before, given)
        found = self._known.get(key)
        if found is None:
            texts = self._texts(stage) if given is self._batch.key else given
            count = self._schedule.microbatches
            rows = [[ids[k] for ids in before] for k in range(count)]
            found = tuple(
                digest(stage, flags, row, texts[k] if texts else "") for k, row in enumerate(rows)
            )
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[key] = found
        self.known[stage] = found
        return found

    def _given(self, stage: int) -> Any:  # noqa: ANN401 - anything that can be a key
        """Describe this rank's own arguments for ``stage``; empty without any."""
        if not self._stages[stage].takes_batch and not self._batch.kwargs:
            return ()
        return self._texts(stage) if self._batch.key is None else self._batch.key

    def _texts(self, stage: int) -> tuple[str, ...]:
        return tuple(self._text(stage, k) for k in range(self._schedule.microbatches))

    def _text(self, stage: int, microbatch: int) -> str:
        values: list[Any] = []
        if self._stages[stage].takes_batch:
            values.append(self._batch.args[microbatch])
        if self._batch.kwargs:
            values.append(self._batch.kwargs[microbatch])
        leaves = Values.of(tuple(values)).leaves
        return repr(
            [
                (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
                if isinstance(leaf, torch.Tensor)
                else (type(leaf).__name__, leaf if isinstance(leaf, _PLAIN) else "")
                for leaf in leaves
            ]
        )
