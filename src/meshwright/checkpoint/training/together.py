"""One step of a load on all ranks: its answers on all of them, or one error on all."""

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
    """Find the ranks of the run, or this process alone where it has joined none."""
    try:
        return comm.communicator()
    except CommunicationError:
        return Alone()


def together(
    group: Group, name: str, action: Callable[[], tuple[_T, JSON]]
) -> tuple[_T, list[Any]]:
    """Do ``action`` on every rank; return its own result and the answers of all.

    A rank on which it fails raises its own error, and the others raise one of the same kind that
    names the first such rank.
    """
    result: tuple[_T, JSON] | None = None
    failure: Exception | None = None
    # An error is for the exchange below, so it must not leave the phase, which would publish it.
    with comm.phase(f"checkpoint: {name}", limit=STORAGE_LIMIT):
        try:
            result = action()
            told: dict[str, JSON] = {"answer": result[1]}
        except Exception as error:
            failure = error
            told = {"kind": type(error).__name__, "text": str(error)}
    # Where one rank alone saves, the others' own operation is shown beside this label.
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
