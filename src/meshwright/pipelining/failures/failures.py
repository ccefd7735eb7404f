"""The way in which a rank that fails in a step tells the others, whichever step they are in.

Two notices of a schedule stand in the store. ``failed`` is the first failure that left messages
behind: whoever is in that step or a later one raises, for what it waits for will not come. Ranks
that are still in an earlier step finish it. ``refused`` is a step that could not begin on a rank,
which takes the notice back when it tries again; ranks that have given the step up as often need
not heed it, and one that has missed it learns of it from the first message (`Call`). A rank that
had begun such a step cannot begin it again, and says so in its turn. Data-parallel ranks of a stage
are no ranks of the pipeline: the board of the run tells them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from meshwright.comm import Communicator
from meshwright.comm.failures.notices import Notices
from meshwright.comm.failures.whereabouts import object_of
from meshwright.comm.groups.registry import PROCESS
from meshwright.errors import PipelinePeerError, PipeliningShapeError
from meshwright.pipelining.failures.call_numbers import Call

_FAILED, _REFUSED = "failed", "refused"

_SHAPE: Mapping[str, type] = {
    **dict.fromkeys(("step", "times", "by", "rank", "stage"), int),
    **dict.fromkeys(("action", "type", "name", "text"), str),
}
"""What a notice holds."""


class Failures:
    """Those of one schedule, as one rank tells and sees them."""

    def __init__(self, communicator: Communicator, notices: Notices, *, has_replicas: bool) -> None:
        self._notices = notices
        self._has_replicas = has_replicas
        self._rank = communicator.ranks[communicator.rank]
        self._has_refused = False
        self._refusal = ""
        """The last notice of a step that could not begin on this rank."""
        self._given_up = (0, 0, 0)
        """A step, how often it has ended on this rank before it had begun, and when it did last."""
        self.call = Call()
        """The call of a step that this rank is in."""
        self._seen: Mapping[str, Any] | None = None
        """Another rank's failure, which has ended a step of this one."""

    def tell(
        self, step: int, error: BaseException, stage: int, action: str, *, for_good: bool
    ) -> None:
        """This rank has failed in ``step``, on its own or because another has."""
        times = self._times(step) + (not for_good)
        self._given_up = step, times, time.time_ns()
        notice = self._seen or {
            "rank": self._rank,
            "stage": stage,
            "action": action,
            "type": _kind(error),
            "name": type(error).__name__,
            "text": str(error),
        }
        text = json.dumps({**notice, "step": step, "times": times, "by": self._rank})
        if for_good:
            self._notices.post(_FAILED, text)
            if self._has_replicas and self._seen is None and PROCESS.monitor is not None:
                PROCESS.monitor.publish(error)
        elif self._seen is None and not self._has_refused:
            self._has_refused, self._refusal = self._notices.post(_REFUSED, text), text

    def begin(self, step: int) -> None:
        """``step`` begins: what this rank has refused it tries again.

        Raises when another rank cannot.
        """
        self._seen = None
        if self._has_refused:
            self._has_refused = False
            self._notices.replace(f"{_REFUSED} before/{self._rank}", self._refusal)
            self._notices.withdraw(_REFUSED)
        self.call = Call(self._times(step), self._given_up[2])
        if self._times(step):
            self.look(step)

    def look(self, step: int) -> None:
        """Raise when another rank has failed in ``step`` or in an earlier one."""
        for key in (_FAILED, _REFUSED):
            found = object_of(self._notices.read(key), _SHAPE)
            if found is None:
                continue
            if found["step"] > step or found["by"] == self._rank:
                continue
            if key == _REFUSED and found["times"] <= self._times(found["step"]):
                continue
            again = ""
            if found["rank"] == self._rank:
                again = f"rank {found['by']} cannot run a step again that had ended: "
            self._raise(found, again)

    def compare(self, rank: int, theirs: Call) -> None:
        """Raise when what ``rank`` sends, and this rank waits for, belong to different calls."""
        if self.call.ended_below(theirs):
            found = object_of(self._notices.read(f"{_REFUSED} before/{rank}"), _SHAPE)
            if found is not None:
                self._raise(found, "")
            self._seen = {}
            raise PipelinePeerError(
                f"rank {rank} has ended the step that this rank is in, before it had begun there"
            )
        if theirs.ended_below(self.call):
            cause = json.loads(self._refusal or "{}")
            raise PipelinePeerError(
                f"rank {rank} is in a step that rank {self._rank} could not begin "
                f"({cause.get('name')}: {cause.get('text')}); what it sends is not for the batch "
                f"that rank {self._rank} was given since"
            )

    def _raise(self, found: Mapping[str, Any], again: str) -> NoReturn:
        self._seen = found
        raise _KINDS.get(found["type"], PipelinePeerError)(
            f"{again}rank {found['rank']} stage {found['stage']} failed in {found['action']}: "
            f"{found['name']}: {found['text']}"
        )

    def _times(self, step: int) -> int:
        return self._given_up[1] if self._given_up[0] == step else 0


class _PeerShapeError(PipeliningShapeError, PipelinePeerError):
    """Another rank found a value of another shape."""


class _PeerValueError(PipelinePeerError, ValueError):
    """Another rank was given a wrong value."""


_KINDS: Mapping[str, type[Exception]] = {"shape": _PeerShapeError, "value": _PeerValueError}


def _kind(error: BaseException) -> str:
    if isinstance(error, PipeliningShapeError):
        return "shape"
    return "value" if isinstance(error, ValueError) else ""
