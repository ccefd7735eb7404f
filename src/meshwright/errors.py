"""The exceptions of Meshwright, and its warnings.

::

    MeshwrightError
    ├── PlanError (ValueError)              a plan or configuration is wrong; lists every problem
    ├── LayoutError (ValueError)            shapes, boxes or ranks do not fit the declared layout
    ├── CommunicationError (RuntimeError)
    │   ├── CollectiveMismatchError         ranks issued different operations at one place
    │   ├── CollectiveTimeoutError (TimeoutError)   a wait passed its bound; names who is missing
    │   ├── RankFailedError                 another rank failed first; names it
    │   └── PipelinePeerError               another rank's stage failed; names it and its action
    ├── CheckpointError (RuntimeError)
    │   ├── CheckpointDamagedError          bytes differ from those written; names file and tensor
    │   ├── CheckpointMismatchError         the checkpoint belongs to another model or plan
    │   └── CheckpointWriteError (OSError)  it could not be written; the previous one is intact
    │       └── CheckpointClaimedError      another job saves to the folder; names it
    ├── TransferError (RuntimeError)        trainers and generators differ; names tensor and ranks
    ├── ScheduleError (AssertionError)      an order of actions is incomplete or never ends
    ├── PipeliningShapeError (RuntimeError) a stage's value has an unexpected shape or dtype
    ├── ParityError (RuntimeError)          numbers differ from one process; names the tensor
    ├── NonFiniteError (ArithmeticError)    a loss or gradient is not finite; rank and parameter
    ├── LaunchError (RuntimeError)          the ranks could not be started, or one of them failed
    └── InternalError (RuntimeError)        a bug of ours, never a user's mistake
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path


class MeshwrightError(Exception):
    """The base of Meshwright's errors, except ``TypeError`` and ``ValueError`` for arguments."""


class PlanError(MeshwrightError, ValueError):
    """A plan or a configuration is wrong.

    ``problems`` holds one line for each mistake; all of them are reported together.
    """

    def __init__(self, problems: Sequence[str] | str, source: str = "") -> None:
        given = (problems,) if isinstance(problems, str) else tuple(problems)
        # A problem stays one line, even if it quotes control characters from a file.
        self.problems: tuple[str, ...] = tuple(
            "".join(c if c.isprintable() else repr(c)[1:-1] for c in text) for text in given
        )
        self.source = source
        prefix = f"{source}: " if source else ""
        super().__init__("\n".join(prefix + problem for problem in self.problems))


class LayoutError(MeshwrightError, ValueError):
    """Shapes, boxes or ranks do not fit the declared layout."""


class CommunicationError(MeshwrightError, RuntimeError):
    """A collective or a transfer went wrong."""


class CollectiveMismatchError(CommunicationError):
    """Ranks issued different operations at the same point of their sequence."""


class CollectiveTimeoutError(CommunicationError, TimeoutError):
    """A wait exceeded its limit, or waits for a stalled rank or for something that can never
    arrive. The message names the missing ranks and where they are."""


class RankFailedError(CommunicationError):
    """Another rank failed first, or one that this process launched.

    ``rank`` is its rank in the world; -1 if the store failed.
    """

    def __init__(self, message: str, rank: int) -> None:
        self.rank = rank
        super().__init__(message)


class PipelinePeerError(CommunicationError):
    """A stage of another rank failed in this step of the pipeline."""


class CheckpointError(MeshwrightError, RuntimeError):
    """A checkpoint cannot be used."""


class CheckpointDamagedError(CheckpointError):
    """The bytes on disk differ from those written. The message names the file and the tensor."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint was written by another model, plan or configuration."""


class CheckpointWriteError(CheckpointError, OSError):
    """A checkpoint could not be written. Earlier checkpoints are untouched."""


class CheckpointClaimedError(CheckpointWriteError):
    """Another job saves to the folder. The message names its process, host and command."""


class TransferError(MeshwrightError, RuntimeError):
    """Weights cannot go from `Publisher` to `Receiver`: both sides raise it and go on."""


class ScheduleError(MeshwrightError, AssertionError):
    """A schedule is incomplete, out of order, or would never end. The message draws it."""


class PipeliningShapeError(MeshwrightError, RuntimeError):
    """A value that enters or leaves a stage has another shape, stride or dtype than expected."""


class ParityError(MeshwrightError, RuntimeError):
    """The parallel run and the one-process run differ. The message names the first tensor."""


class NonFiniteError(MeshwrightError, ArithmeticError):
    """A loss or a gradient is not finite. The message names the rank and the parameter."""


class LaunchError(MeshwrightError, RuntimeError):
    """The ranks could not be started, or one of them failed."""


class InternalError(MeshwrightError, RuntimeError):
    """A bug of Meshwright, never a mistake of its user."""


_INSIDE = (f"{Path(__file__).parent}/", f"{Path('site-packages', 'torch')}/", "/contextlib.py")


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of user code that led here, however deep in our code or torch's."""
    frame = inner = sys._getframe(1)
    while any(part in frame.f_code.co_filename for part in _INSIDE):
        if frame.f_back is None:
            frame = inner  # one of our threads: no user code is on its stack
            break
        frame = frame.f_back
    known = frame.f_globals
    warnings.warn_explicit(
        text,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        known.get("__name__"),
        known.setdefault("__warningregistry__", {}),
    )
