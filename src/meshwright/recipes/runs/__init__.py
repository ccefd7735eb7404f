"""A run: its folder, its reports, its state, and its end.

Bottom-up:

    metrics     a line of JSON a step, and progress
    run_folder  where a run writes, and where it resumes from
    snapshot    the state of a run as a checkpoint
    stopping    stopping on request
    tracing     the last steps as a timeline
"""

from __future__ import annotations

__all__: list[str] = []
