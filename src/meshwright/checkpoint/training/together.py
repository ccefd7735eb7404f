"""One step of a load on all ranks: answers of all, or an error on all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from meshwright import comm, errors
from meshwright.checkpoint.document import JSON
from meshwright.checkpoint.writing import STORAGE_LIMIT, Alone
from meshwright.comm import Communicator
from meshwright.errors import CheckpointError, CommunicationError

_T = TypeVar("_T")

Group = Communicator | Alone


def everyone() -> Group:
    """The ranks of the run, or this process alone without one."""
    try:
        return comm.communicator()
    except CommunicationError:
        return Alone()


def together(
    group: Group, name: str, action: Callable[[], tuple[_T, JSON]]
) -> tuple[_T, list[Any]]:
    """Run ``action`` on every rank; returns its own result and the answers of all.

    A rank on which it fails raises its own error, and the others raise one of the same kind that
    names the first such rank.
    """
    result: tuple[_T, JSON] | None = None
    failure: Exception | None = None
    # Catch errors inside the phase, which would publish them: they are exchanged below.
    with comm.phase(f"checkpoint: {name}", limit=STORAGE_LIMIT):
        try:
            result = action()
            told: dict[str, JSON] = {"answer": result[1]}
        except Exception as error:
            failure = error
            told = {"kind": type(error).__name__, "text": str(error)}
    # If one rank alone saves, errors show this label next to the others' operation.
    label = f"checkpoint of all ranks: {name}"
    rows = group.gather_bytes(json.dumps(told).encode(), label=label)
    if failure is not None:
        raise failure
    answers = [json.loads(row) for row in rows]
    for rank, row in enumerate(answers):
        if "kind" in row:
            kind = getattr(errors, row["kind"], CheckpointError)
            is_ours = isinstance(kind, type) and issubclass(kind, CheckpointError)
            raise (kind if is_ours else CheckpointError)(f"rank {rank}: {row['text']}")
    assert result is not None
    return result[0], [row["answer"] for row in answers]
