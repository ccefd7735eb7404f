"""Messages between stages: values, and the metadata that ranks exchange or already share.

Bottom-up:

    nesting           how a value is nested, as JSON
    metadata          shapes, strides and dtypes of values, and those that are no tensors
    batch             the arguments of a step, and the ids of the values made of them
    inbox             values that a stage has received
    known_signatures  signatures that sender and receiver both know already
    lanes             one-way transfers between two ranks, matched by their order alone
    letters           headers sent ahead of payloads, on the control channel
    transfers         the messages of one step
"""

from __future__ import annotations

__all__: list[str] = []
