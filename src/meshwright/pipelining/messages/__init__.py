"""Messages between stages: values, and what ranks know of them before.

Bottom-up:

    constants         values that are no tensors, as JSON
    metadata          shapes, strides and dtypes of values
    batch             the arguments of a step, and the ids of the values made of them
    inbox             values that a stage has received
    known_signatures  what sender and receiver both know already
    transfers         the messages of one step
    unanswered        the same where the other ranks are no processes
"""

from __future__ import annotations

__all__: list[str] = []
