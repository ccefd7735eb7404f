"""A run: its folder, its reports, its state, and its end.

Bottom-up:

    metrics     a line of JSON a step, progress, and the last steps as a timeline
    run_folder  where a run writes, what it resumes from, and its state as a checkpoint
    stopping    stopping on request
"""

from __future__ import annotations

__all__: list[str] = []
