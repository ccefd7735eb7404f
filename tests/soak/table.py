"""The table that an endurance program prints, row by row, and what it says at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

__all__ = ["Table"]


class Table:
    """Rows with a name each; one whose check returns a text, or raises, is missed."""

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self._missed: list[str] = []
        self._count = 0
        print(title, flush=True)
        print(f"{'':38} {'seconds':>8}  {'  '.join(columns)}", flush=True)

    def row(self, name: str, check: Callable[[], tuple[str, str]]) -> None:
        """Run ``check``, which returns what to print and why the row is missed, "" if it is not."""
        begun = time.monotonic()
        try:
            shown, problem = check()
        except Exception as error:
            shown, problem = "", f"{type(error).__name__}: {error}"
        self._count += 1
        first = problem.strip().splitlines()[0] if problem else ""
        print(f"{name:38} {time.monotonic() - begun:8.1f}  {shown or first[:160]}", flush=True)
        if problem:
            print(f"    MISSED: {problem}", flush=True)
            self._missed.append(name)

    def end(self) -> int:
        """Say how many rows held; the exit status."""
        held = self._count - len(self._missed)
        missed = f"; missed: {', '.join(self._missed)}" if self._missed else ""
        print(f"{held} of {self._count} rows held{missed}", flush=True)
        sys.stdout.flush()
        return 1 if self._missed or not self._count else 0
