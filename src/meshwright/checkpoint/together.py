"""Runs one step of a save or load on all ranks; if one fails, all raise."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from meshwright import comm, errors
from meshwright.checkpoint.document import JSON
from meshwright.checkpoint.storage import advice, reason
from meshwright.comm import Communicator
from meshwright.errors import CheckpointClaimedError, CheckpointError, CommunicationError

STORAGE_LIMIT = 3600.0
"""Seconds that one step may take on one rank while the others wait for it."""

_T = TypeVar("_T")
_ANSWER, _ERROR = b"+", b"-"


class Alone:
    """The group of one process."""

    rank = 0
    size = 1

    def gather_bytes(self, payload: bytes, *, label: str) -> list[bytes]:
        return [payload]

    def start_equal(self, payload: bytes, label: str) -> Callable[[], bytes]:
        return lambda: payload


Group = Communicator | Alone


def everyone() -> Group:
    """The ranks of the run, or this process alone without one."""
    try:
        return comm.communicator()
    except CommunicationError:
        return Alone()


def attempt(
    group: Group,
    name: str,
    action: Callable[[], tuple[_T, JSON]],
    *,
    label: str,
    step: int | None = None,
) -> tuple[tuple[_T, list[bytes]] | Exception, dict[int, dict[str, Any]]]:
    """Run ``action`` on every rank; returns its result or error, and the errors by rank.

    Its result comes with those of all ranks as JSON texts, unparsed: they may grow with the
    tensors, and most ranks do not need them.
    """
    outcome: tuple[_T, JSON] | Exception
    # Catch errors inside the phase, which would publish them: they are exchanged below.
    with comm.phase(f"checkpoint: {name}", step, limit=STORAGE_LIMIT):
        try:
            outcome = action()
            payload = _ANSWER + json.dumps(outcome[1]).encode()
        except Exception as error:
            outcome = error
            told = {
                "kind": type(error).__name__,
                "text": str(error),
                "error": reason(error),
                "advice": advice(error),
                "claimed": isinstance(error, CheckpointClaimedError),
            }
            payload = _ERROR + json.dumps(told).encode()
    rows = group.gather_bytes(payload, label=label)
    failed = {rank: json.loads(row[1:]) for rank, row in enumerate(rows) if row[:1] == _ERROR}
    if isinstance(outcome, Exception):
        return outcome, failed
    return (outcome[0], [row[1:] for row in rows]), failed


def together(
    group: Group, name: str, action: Callable[[], tuple[_T, JSON]]
) -> tuple[_T, list[Any]]:
    """Run ``action`` on every rank; returns its own result and those of all.

    A rank on which it fails raises its own error, and the others raise one of the same kind that
    names the first such rank.
    """
    # If one rank alone saves, errors show this label next to the others' operation.
    outcome, failed = attempt(group, name, action, label=f"checkpoint of all ranks: {name}")
    if isinstance(outcome, Exception):
        raise outcome
    for rank, told in failed.items():
        kind = getattr(errors, told["kind"], CheckpointError)
        is_ours = isinstance(kind, type) and issubclass(kind, CheckpointError)
        raise (kind if is_ours else CheckpointError)(f"rank {rank}: {told['text']}")
    return outcome[0], [json.loads(row) for row in outcome[1]]
