"""How the ranks of a call ended, and the error that reports it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from meshwright.errors import RankFailedError


class Ending(StrEnum):
    """How a rank ended."""

    RETURNED = "returned"
    """The body returned and the process ended with exit code 0."""
    SKIPPED = "skipped"
    """The body called ``pytest.skip`` or ``pytest.xfail``."""
    RAISED = "raised"
    """The body, or connecting before it, raised."""
    DIED = "died"
    """The process ended without a message: by a signal, or ``os._exit``."""
    TEARDOWN = "failed in teardown"
    """The body returned, then the process died or did not end."""
    HUNG = "hung"
    """It was still running at the deadline and was killed."""
    ENDED = "ended"
    """It was still running at the end of the grace period after another rank's failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one rank."""

    rank: int
    ending: Ending
    seconds: float
    """From the start of the call until this rank ended or was killed."""
    order: float
    """The last time at which the rank had certainly not failed, to find the first failure."""
    exit_code: int | None = None
    """The process's exit code; negative for the number of a signal."""
    value: object = None
    """The value that the body returned."""
    exception: BaseException | None = None
    """The error that the body raised, without traceback; None also if it cannot be pickled."""
    traceback: str = ""
    stack: str = ""
    """The Python stack of each thread when the rank was killed or crashed."""
    output: str = ""
    """The end of what the rank wrote to stdout and stderr."""
    killed: bool = False
    """True when the harness killed the process at a time limit."""
    stopped: bool = False
    """True when the process was stopped (SIGSTOP) when it was killed."""

    @property
    def failed(self) -> bool:
        """True unless this rank returned and its process ended normally."""
        return self.ending != Ending.RETURNED

    @property
    def waited_for_others(self) -> bool:
        """True when another rank may be the cause: it was ended early, or had returned."""
        return self.ending == Ending.ENDED or (self.ending == Ending.TEARDOWN and self.killed)

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that ended the process, if one did."""
        if self.exit_code is None or self.exit_code >= 0:
            return None
        return signal.Signals(-self.exit_code)

    def headline(self) -> str:
        """Describe in one line what happened to this rank."""
        after = f"after {self.seconds:.2f} s"
        match self.ending:
            case Ending.RAISED:
                return f"raised {_last_line(self.traceback)} {after}"
            case Ending.DIED:
                return f"{_how_it_died(self.exit_code)} {after}, before its body returned"
            case Ending.TEARDOWN if self.killed:
                return f"returned, but its process had not ended {after}{self._stop_note()}"
            case Ending.TEARDOWN:
                how = _how_it_died(self.exit_code)
                return f"left with exit {self.exit_code} after its body returned: {how}"
            case Ending.HUNG:
                return f"hung: killed at the deadline {after}{self._stop_note()}"
            case Ending.ENDED:
                return f"was still running and was ended {after}{self._stop_note()}"
            case _:
                return f"{self.ending} {after}"

    def _stop_note(self) -> str:
        return "; it was stopped (SIGSTOP)" if self.stopped else ""

    def details(self) -> str:
        """Join traceback, stack and output, without empty ones."""
        parts = []
        if self.traceback:
            parts.append(self.traceback.rstrip())
        if self.stack:
            parts.append("Python stack when it ended:\n" + self.stack.rstrip())
        if self.output:
            parts.append("output:\n" + self.output.rstrip())
        return "\n".join(parts)


class RanksFailed(RankFailedError):  # noqa: N818 - reads as what happened in a test report
    """At least one rank of a call failed; ``rank`` is the number of the first.

    ``outcomes`` holds every rank's ending in rank order; ``first`` is the one that failed first.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes: tuple[Outcome, ...] = tuple(outcomes)
        self.first: Outcome = min(
            (outcome for outcome in self.outcomes if outcome.failed),
            key=lambda outcome: (outcome.waited_for_others, outcome.order),
        )
        super().__init__(_report(self.outcomes, self.first), self.first.rank)

    def __reduce__(self) -> tuple[type[RanksFailed], tuple[tuple[Outcome, ...]]]:
        return type(self), (self.outcomes,)


def _report(outcomes: Sequence[Outcome], first: Outcome) -> str:
    failed = [outcome for outcome in outcomes if outcome.failed]
    lines = [
        f"{len(failed)} of {len(outcomes)} ranks failed; "
        f"rank {first.rank} was first: it {first.headline()}"
    ]
    shown: dict[str, list[int]] = {}
    for outcome in sorted(failed, key=lambda outcome: (outcome is not first, outcome.order)):
        details = outcome.details()
        same = shown.setdefault(details, [])
        lines += ["", f"--- rank {outcome.rank} {outcome.headline()}"]
        if details:
            lines.append(f"(the same as rank {same[0]})" if same else details)
        same.append(outcome.rank)
    well = [outcome for outcome in outcomes if not outcome.failed]
    if well:
        lines.append("")
    for outcome in well:
        lines.append(f"--- rank {outcome.rank} {outcome.headline()}")
        if outcome.output:
            lines.append(outcome.details())
    return "\n".join(lines)


def _last_line(text: str) -> str:
    """The line of a traceback that names the exception: the first after the last frame."""
    lines = text.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    named = [line for line in lines[max(frames, default=0) :] if line[:1].strip()]
    if not named:
        return "an exception"
    return named[0] if frames else named[-1]


def _how_it_died(code: int | None) -> str:
    if code is None:
        return "vanished"
    if code < 0:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"left with exit code {code}"
