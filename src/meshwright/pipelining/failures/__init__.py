"""Failures of a step, and ranks that are in different steps.

Bottom-up:

    call_numbers          the call of a step that a message belongs to
    schedule_order_check  ranks that call schedules in different orders
    failures              how a rank that fails tells the others
"""

from __future__ import annotations

__all__: list[str] = []
