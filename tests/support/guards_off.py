"""Steps without the guards that compare ranks or refuse mistakes, see `tests/guards.toml`.

No public setting does this: what is left is what computes. Use flags and the stop at values that
are not finite stay, as do the checks inside of a transport.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from support.internals.comm import EventCheck, differing, require_equal
from support.internals.data_parallel import (
    Alignment,
    BatchBuffers,
    Driver,
    Iteration,
    Ledger,
    ModuleTree,
    SameWeights,
)
from support.internals.pipelining import Turns
from support.internals.tensor_parallel import Passes

__all__ = ["guards_off"]

IDLE: dict[type, str] = {
    Alignment: "begin_forward, before_step, stays_local, judge",
    SameWeights: "begin_pass",
    BatchBuffers: "note, compare",
    Driver: "refuse_transforms, check_materialized",
    EventCheck: "happens",
    Iteration: "_check_taken",
    Ledger: "begin_pass, begin, record, begin_graph, end_forward, finish, judge_copies",
    ModuleTree: "verify",
    Passes: "begin, step, declared_whole",
    Turns: "begin, look",
}
"""Methods that are to do nothing."""


def _nothing(*_: object, **__: object) -> None:
    return None


def _equal(*_: object, **__: object) -> list[Any]:
    return []


def _no_marks(alignment: object) -> tuple[int, ...]:
    return ()


def _everywhere(function: Callable[..., Any], other: Callable[..., Any]) -> Iterator[Any]:
    """Patch ``function`` in each module of the library that has it."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("meshwright."):
            for own in [key for key, value in vars(module).items() if value is function]:
                yield mock.patch.object(module, own, other)


@contextlib.contextmanager
def guards_off() -> Iterator[None]:
    """Run the block without guards, on all ranks."""
    with contextlib.ExitStack() as patches:
        for patch in (*_everywhere(require_equal, _nothing), *_everywhere(differing, _equal)):
            patches.enter_context(patch)
        for owner, names in IDLE.items():
            for name in names.split(", "):
                patches.enter_context(mock.patch.object(owner, name, _nothing))
        patches.enter_context(mock.patch.object(Alignment, "marks", _no_marks))
        yield
