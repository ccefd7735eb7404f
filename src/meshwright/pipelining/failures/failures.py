"""The way in which a rank that fails in a step tells the others, whichever step they are in.

Two kinds of notices of a schedule stand in the store. ``failed`` is the first failure that ends the
schedule: whoever is in that step or a later one raises, for what it waits for will not come. Ranks
that are still in an earlier step finish it. ``refused N`` says that step N could not begin on a
rank. It counts as a step there, so a schedule on whose ranks all refuse it goes on with the next;
a rank that has begun it raises, and the schedule has failed. Data-parallel ranks of a stage are no
ranks of the pipeline: the board of the run tells them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshwright.comm import Communicator
from meshwright.comm.failures.notices import Notices
from meshwright.comm.failures.whereabouts import object_of
from meshwright.comm.groups.registry import PROCESS
from meshwright.errors import PipelinePeerError, PipeliningShapeError

_FAILED = "failed"

_SHAPE: Mapping[str, type] = {
    **dict.fromkeys(("step", "by", "rank", "stage"), int),
    **dict.fromkeys(("action", "type", "name", "text"), str),
}
"""What a notice holds."""


class Failures:
    """The failures of the steps of one schedule, as one rank tells and sees them."""

    def __init__(self, communicator: Communicator, notices: Notices, *, has_replicas: bool) -> None:
        self._notices = notices
        self._has_replicas = has_replicas
        self._rank = communicator.ranks[communicator.rank]
        self._seen: Mapping[str, Any] | None = None
        """Another rank's failure, which has ended a step of this one."""

    def tell(
        self, step: int, error: BaseException, stage: int, action: str, *, for_good: bool
    ) -> None:
        """Tell that this rank has failed in ``step``, on its own or because another has.

        Not ``for_good``: it has refused the step before anything of it was sent or received.
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
        if for_good and self._has_replicas and self._seen is None and PROCESS.monitor is not None:
            PROCESS.monitor.publish(error)

    def look(self, step: int) -> None:
        """Raise when another rank has refused ``step``, or failed in it or in an earlier one."""
        for key in (_FAILED, _refused(step)):
            found = object_of(self._notices.read(key), _SHAPE)
            if found is None or found["step"] > step or found["by"] == self._rank:
                continue
            self._seen = found
            begun = ""
            if found["rank"] == self._rank:
                begun = f"rank {found['by']} had begun a step that this rank refused: "
            raise _KINDS.get(found["type"], PipelinePeerError)(
                f"{begun}rank {found['rank']} stage {found['stage']} failed in {found['action']}: "
                f"{found['name']}: {found['text']}"
            )


def _refused(step: int) -> str:
    return f"refused {step}"


class _PeerShapeError(PipeliningShapeError, PipelinePeerError):
    """Another rank found a value of another shape."""


class _PeerValueError(PipelinePeerError, ValueError):
    """Another rank was given a wrong value."""


_KINDS: Mapping[str, type[Exception]] = {"shape": _PeerShapeError, "value": _PeerValueError}


def _kind(error: BaseException) -> str:
    if isinstance(error, PipeliningShapeError):
        return "shape"
    return "value" if isinstance(error, ValueError) else ""
