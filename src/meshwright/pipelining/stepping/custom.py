"""Functions of the user that run in place of a schedule's own actions.

The interpreter still waits for what an action reads, and passes on what it has made; the function
does the computation, by the stage's methods or by `PipelineContext.run`. Leaving it undone is an
error, so that no gradient is lost silently.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from meshwright.pipelining.stepping.program import Entry
from meshwright.schedule.actions import COMPUTE, REDUCE_GRAD, RESHARD, UNSHARD, Action, Operation

CUSTOM = COMPUTE | {UNSHARD, RESHARD, REDUCE_GRAD}
"""Operations that a function may replace."""


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
    if isinstance(operation, Operation) and operation in CUSTOM:
        return operation
    allowed = ", ".join(found.name for found in Operation if found in CUSTOM)
    raise ValueError(f"Invalid computation type {operation}. Only {allowed} are supported.")


def call(
    entry: Entry,
    context: Callable[[Callable[[Action], None]], PipelineContext],
    run_part: Callable[[Entry], None],
    reduced: Container[int],
) -> None:
    """Run the user's function for ``entry``.

    ``context`` makes its `PipelineContext`, ``run_part`` does what the schedule would do,
    ``reduced`` has the stages whose gradients are being summed. Raises ``RuntimeError`` if the
    function has left out what other ranks rely on.
    """
    parts = entry.parts or (entry,)

    def run(action: Action) -> None:
        chosen = [part for part in parts if action in (part.part, entry.part)]
        if not chosen:
            raise ValueError(f"{action} is no part of {entry.text}, which runs now")
        for part in chosen:
            run_part(part)

    if entry.custom is not None:
        entry.custom(entry.part, context(run))
    for part in parts:
        is_left = part.stage.has_left(part.operation, part.microbatch)
        if part.operation is REDUCE_GRAD:
            is_left = part.residency is not None and part.index not in reduced
        if is_left:
            raise RuntimeError(
                f"the custom function for {entry.operation.name} has left {part.text} undone: call "
                f"the method of stage {part.index} that does it, or ctx.run(action)"
            )
