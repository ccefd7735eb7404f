"""Messages between stages: values, and what ranks know of them before.

Bottom-up:

    nesting           how a value is nested, as JSON
    metadata          shapes, strides and dtypes of values, and those that are no tensors
    batch             the arguments of a step, and the ids of the values made of them
    inbox             values that a stage has received
    known_signatures  what sender and receiver both know already
    lanes             one-way transfers between two ranks, which meet by their order alone
    letters           what goes ahead of payloads, on the control channel
    transfers         the messages of one step
"""

from __future__ import annotations

__all__: list[str] = []
