"""The command line: ``meshwright train``, ``compare``, ``report``, ``doctor``, ``plan``,
``simulate``, ``checkpoint verify``, ``show``, ``diff``, ``export``, ``import``.

Exit status: 0 for success, 1 when a run or a check failed or two runs differ, 2 when a command or a
configuration is wrong (before any process starts), 128 plus the signal's number when a signal ended
the run.

Bottom-up:

    words       options of a command, and mistakes in them
    doctor      the command `doctor`, and so on for each of the next
    plan
    train
    compare
    report
    simulate
    checkpoint
    commands    all of them by name
"""

from __future__ import annotations

from meshwright.cli.commands import main

__all__ = ["main"]
