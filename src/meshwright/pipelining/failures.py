"""Failures in a step, and ranks in different steps: how the other ranks learn of them.

The store holds two kinds of notices of a schedule. ``failed`` is the first failure, which ends the
schedule: each rank in that step or a later one raises, because what it waits for will not come.
Ranks still in an earlier step finish it. ``refused N`` says that step N could not begin on a rank,
which counts it as a step. A rank that waits in step N for its first message raises and counts it
too, so the schedule continues with the next step if nothing of this one was sent. If a rank has
sent or received any of it, that rank raises and the schedule has failed. Data-parallel ranks of a
stage are not ranks of the pipeline: they learn of a failure from the board of the run.

Messages and notices belong to one schedule. A rank in a schedule that another rank has not built,
or reaches later, would wait until its timeout. So a rank that has waited for a while posts a note:
the step it is in, and the steps it has ended. A rank that fails for good does the same. Two notes
are compared: if each rank is in a step that the other has not reached, their programs differ. A
note stays true after its rank has continued, so none is ever withdrawn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from meshwright.comm import Communicator
from meshwright.comm.failures.status import object_of
from meshwright.comm.failures.store import Notices
from meshwright.comm.groups.registry import PROCESS
from meshwright.errors import CollectiveMismatchError, PipelinePeerError, PipeliningShapeError

_FAILED = "failed"

_SHAPE: Mapping[str, type] = {
    **dict.fromkeys(("step", "by", "rank", "stage"), int),
    **dict.fromkeys(("action", "type", "name", "text"), str),
}
"""The types of the fields of a notice."""


class Failures:
    """The failures in steps of one schedule, as one rank reports and sees them."""

    def __init__(self, communicator: Communicator, notices: Notices, *, has_replicas: bool) -> None:
        self._notices = notices
        self._has_replicas = has_replicas
        self._rank = communicator.ranks[communicator.rank]
        self._seen: Mapping[str, Any] | None = None
        """Another rank's failure, which ends the step that this one is in."""
        self.has_seen_refusal = False
        """True when that is another rank's refusal, which leaves the schedule usable."""

    def tell(
        self, step: int, error: BaseException, stage: int, action: str, *, for_good: bool
    ) -> None:
        """Report that this rank has failed in ``step``, on its own or because another has.

        Not ``for_good``: it has refused the step before any message of it was sent or received.
        """
        notice = self._seen or {
            "rank": self._rank,
            "stage": stage,
            "action": action,
            "type": _kind(error),
            "name": type(error).__name__,
            "text": str(error),
        }
        text = json.dumps({**notice, "step": step, "by": self._rank})
        self._notices.post(_FAILED if for_good else _refused(step), text)
        if not for_good:
            if self.has_seen_refusal and PROCESS.monitor is not None:
                # The schedule continues: deferred checks are still due when this rank leaves.
                PROCESS.monitor.has_raised = False
            self._seen, self.has_seen_refusal = None, False
        if for_good and self._has_replicas and self._seen is None and PROCESS.monitor is not None:
            PROCESS.monitor.publish(error)

    def look(self, step: int, beginner: int | None = None, *, is_final: bool = False) -> None:
        """Raise when another rank has refused ``step``, or failed in it or in an earlier one.

        Also when this rank has refused it and another, the ``beginner``, is known to have begun it.
        With ``is_final``, only for a failure that has ended the schedule.
        """
        for key in (_FAILED,) if is_final else (_FAILED, _refused(step)):
            found = object_of(self._notices.read(key), _SHAPE)
            if found is None or found["step"] > step:
                continue
            by = found["by"] if found["by"] != self._rank else beginner
            if by is None:
                continue
            self._seen, self.has_seen_refusal = found, key != _FAILED
            begun = ""
            if found["rank"] == self._rank:
                begun = f"rank {by} had begun a step that this rank refused: "
            raise _KINDS.get(found["type"], PipelinePeerError)(
                f"{begun}rank {found['rank']} stage {found['stage']} failed in {found['action']}: "
                f"{found['name']}: {found['text']}"
            )


def _refused(step: int) -> str:
    return f"refused {step}"


class _PeerShapeError(PipeliningShapeError, PipelinePeerError):
    """Another rank found a value of another shape."""


class _PeerValueError(PipelinePeerError, ValueError):
    """Another rank got a wrong value."""


_KINDS: Mapping[str, type[Exception]] = {"shape": _PeerShapeError, "value": _PeerValueError}


def _kind(error: BaseException) -> str:
    if isinstance(error, PipeliningShapeError):
        return "shape"
    return "value" if isinstance(error, ValueError) else ""


WORD_AFTER = 2.0
"""Seconds in a step after which a rank that waits posts a note."""
_PREFIX = "steps ended of schedule "
_WORD: Mapping[str, type] = {"schedule": int, "step": int, "what": str, "error": str, "ended": dict}


class Turns:
    """The steps of one schedule on one rank, among those of the other schedules of its group."""

    def __init__(
        self, communicator: Communicator, notices: Notices, number: int, what: str
    ) -> None:
        """``notices`` are those of the group, for all schedules."""
        self._notices = notices
        self._ranks = communicator.ranks
        self._rank = communicator.rank
        self._ended = communicator.counts
        """Of all schedules of the group, by `_PREFIX` and number."""
        self._number = number
        self._what = what
        self._since = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._since = time.monotonic()

    def end(self, step: int, error: BaseException | None = None) -> None:
        """End ``step``, whether it succeeded, failed or could not begin.

        An ``error`` leaves the schedule unusable. For a `CollectiveMismatchError` the note has been
        posted already.
        """
        if error is not None and not isinstance(error, CollectiveMismatchError):
            self._leave_word(step, f"{type(error).__name__}: {error}")
        self._ended[f"{_PREFIX}{self._number}"] = step + 1

    def look(self, step: int) -> None:
        """Compare this rank, waiting in ``step``, with the notes of others.

        Raises `CollectiveMismatchError` when each of two ranks is in a step that the other has not
        reached.
        """
        if time.monotonic() - self._since < WORD_AFTER:
            return
        self._leave_word(step, "")
        for rank in range(len(self._ranks)):
            word = None if rank == self._rank else object_of(self._notices.read(str(rank)), _WORD)
            if word is None:
                continue
            key, own = f"{_PREFIX}{word['schedule']}", f"{_PREFIX}{self._number}"
            if key == own or self._ended.get(key, 0) > word["step"]:
                continue
            if word["ended"].get(own, 0) > step:
                continue
            state = f"failed ({word['error']})" if word["error"] else "waits"
            raise CollectiveMismatchError(
                f"rank {self._ranks[rank]} {state} in step {word['step']} of schedule "
                f"{word['schedule']} of this group, {word['what']}, and rank "
                f"{self._ranks[self._rank]} waits in step {step} of schedule {self._number}, "
                f"{self._what}; neither has come to the other's: every rank has to build the same "
                "schedules on a group in the same order, and to call step() and eval() equally "
                "often"
            )

    def _leave_word(self, step: int, error: str) -> None:
        ended = {name: count for name, count in self._ended.items() if name.startswith(_PREFIX)}
        word = {
            "schedule": self._number,
            "step": step,
            "what": self._what,
            "error": error,
            "ended": ended,
        }
        self._notices.replace(str(self._rank), json.dumps(word))
