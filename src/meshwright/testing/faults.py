"""Faults injected at a chosen place and step, for tests of what the other ranks see.

Hooks on the user's own module and optimizer inject a fault, so the library needs no code for it:
``arm(Fault.parse("backward:rank=1:step=3:kill"), rank=world.rank, module=model)``.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast, get_args

from torch import nn
from torch.optim import Optimizer

FaultPlace = Literal["forward", "backward", "optimizer", "save"]
FaultKind = Literal["raise", "kill", "stop", "exit", "sleep"]

EXIT_CODE = 17
"""Exit code of the kind ``exit``."""


class InjectedError(RuntimeError):
    """The error that a fault of the kind ``raise`` raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of one rank, with its place and time."""

    place: FaultPlace
    rank: int
    kind: FaultKind
    step: int = 0
    """The number of times that the place is passed before the fault."""
    seconds: float = 60.0
    """The duration of the kind ``sleep``."""

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse ``place:rank=R[:step=K][:seconds=S]:kind``. Raises ValueError for anything else."""
        place, _, rest = text.partition(":")
        *settings, kind = rest.split(":")
        values = {name: value for name, _, value in (item.partition("=") for item in settings)}
        if (
            place not in get_args(FaultPlace)
            or kind not in get_args(FaultKind)
            or "rank" not in values
            or not values.keys() <= {"rank", "step", "seconds"}
        ):
            raise ValueError(
                f"expected PLACE:rank=R[:step=K][:seconds=S]:KIND with PLACE one of "
                f"{', '.join(get_args(FaultPlace))} and KIND one of "
                f"{', '.join(get_args(FaultKind))}; found {text!r}"
            )
        return cls(
            place=cast("FaultPlace", place),
            rank=int(values["rank"]),
            kind=cast("FaultKind", kind),
            step=int(values.get("step", 0)),
            seconds=float(values.get("seconds", 60.0)),
        )

    def __str__(self) -> str:
        return f"{self.place}:rank={self.rank}:step={self.step}:{self.kind}"

    def strike(self) -> None:
        """Inject the fault into this process, now."""
        match self.kind:
            case "raise":
                raise InjectedError(f"injected fault {self}")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                os._exit(EXIT_CODE)
            case "sleep":
                time.sleep(self.seconds)


def _countdown(fault: Fault) -> Callable[..., None]:
    """Make a function that injects the fault once, in its call number ``fault.step`` from 0."""
    left = itertools.count(fault.step, -1)

    def pass_by(*_: object) -> None:
        if next(left) == 0:
            fault.strike()

    return pass_by


def arm(
    fault: Fault,
    *,
    rank: int,
    module: nn.Module | None = None,
    optimizer: Optimizer | None = None,
) -> Callable[[], None]:
    """Arm this process with ``fault``, if ``rank`` is its rank.

    It strikes before the forward pass of ``module``, when the gradient of its first parameter is
    computed, or before a step of ``optimizer``. For the place ``save``, the test calls the returned
    function where saving should fail; for the other places, that function does nothing.

    Raises ValueError when the module or the optimizer that the place needs is not given.
    """
    if fault.rank != rank:
        return _nothing
    countdown = _countdown(fault)
    if fault.place == "save":
        return countdown
    if fault.place == "forward" and module is not None:
        module.register_forward_pre_hook(countdown)
    elif fault.place == "backward" and module is not None:
        first = next(p for p in module.parameters() if p.requires_grad)
        first.register_hook(countdown)
    elif fault.place == "optimizer" and optimizer is not None:
        optimizer.register_step_pre_hook(countdown)
    else:
        needed = "an optimizer" if fault.place == "optimizer" else "a module"
        raise ValueError(f"fault {fault} needs {needed} to wait in; pass it to arm()")
    return _nothing


def _nothing() -> None:
    """Do nothing: the fault is in a hook, or another rank's."""
