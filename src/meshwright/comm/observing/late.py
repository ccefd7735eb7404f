"""Deferred host reads: numbers on a device, checked once they are computed.

::

    a step         look     copies the numbers to host memory, after the queued work
    the next one   settle   checks them, before the step sends anything

Nobody waits in between. On the host, numbers are checked at once. Before a checkpoint, a state or a
digest leaves this process, `settle` has checked all numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from meshwright.comm.groups.registry import PROCESS, Outstanding
from meshwright.comm.streams import DeviceEvent, is_host, record

Judge = Callable[[list[float]], object]
"""Raises where the numbers say so."""

Rows = list[tuple[float, ...]]
"""The numbers of each rank, in rank order."""


class LateNumbers:
    """Numbers that were copied in one step, and are checked in the next."""

    def __init__(self, name: str = "") -> None:
        """``name`` is the key by which `known` finds it as long as something is outstanding."""
        self._key = name or str(id(self))
        self.coming: list[Callable[[], object]] = []
        """Judgments still to be made; each first waits for the device or for other ranks."""

    @classmethod
    def known(cls, name: str) -> LateNumbers:
        """Return the numbers outstanding under ``name``, or new ones."""
        found = PROCESS.outstanding.get(name)
        return found if isinstance(found, LateNumbers) else cls(name)

    def look(self, numbers: torch.Tensor, judge: Judge, *, is_late: bool = False) -> None:
        """Have 1-D ``numbers`` judged: the host's at once, a device's at the next `settle`.

        The caller may overwrite them at once. With ``is_late`` the host's wait, too: judges that
        communicate have to run in one order on all ranks.
        """
        if is_host(numbers.device):
            judged = partial(judge, numbers.tolist())
            if is_late:
                self._note(judged)
            else:
                judged()
            return
        here = numbers.detach().to("cpu", non_blocking=True)  # pinned, as torch makes it for this
        self._note(partial(_read, here, record(numbers.device), judge))

    def compare(
        self,
        started: Callable[[], Rows],
        judge: Callable[[Rows], None],
        *,
        is_late: bool,
    ) -> None:
        """Have the rows of a ``started`` gather judged, at the next `settle` if ``is_late``."""
        if is_late:
            self._note(lambda: judge(started()))
        else:
            judge(started())

    def _note(self, judged: Callable[[], object]) -> None:
        self.coming.append(judged)
        note(self, self._key)

    def settle(self) -> None:
        """Judge the outstanding numbers. Raises the first error and drops the rest."""
        PROCESS.outstanding.pop(self._key, None)
        coming = self.coming.copy()
        self.coming.clear()
        for judge in coming:
            judge()


def _read(here: torch.Tensor, event: DeviceEvent, judge: Judge) -> None:
    if not event.query():
        event.synchronize()
    judge(here.tolist())


def note(check: Outstanding, key: str) -> None:
    """Register ``check`` under ``key``, once, for the next `settle`."""
    PROCESS.outstanding.setdefault(key, check)


def settle(*_: object) -> None:
    """Run all outstanding checks of this process. Raises the first error.

    It sends nothing if they pass. It can be registered as a hook of state dicts.
    """
    while PROCESS.outstanding:
        PROCESS.outstanding.pop(next(iter(PROCESS.outstanding))).settle()
