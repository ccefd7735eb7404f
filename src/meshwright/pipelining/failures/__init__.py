"""Failures of a step, and ranks that are in different steps.

Bottom-up:

    schedule_order_check  ranks that call schedules in different orders
    failures              how a rank that fails tells the others
"""

from __future__ import annotations

__all__: list[str] = []
