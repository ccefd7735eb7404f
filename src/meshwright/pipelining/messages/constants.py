"""The constants that cross stages beside tensors, as JSON in a message of a fixed size.

They may differ from microbatch to microbatch, so they travel with each. Both sides know the size of
the message before it is sent; what does not fit follows in a second one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch

CONSTANTS = frozenset({bool, int, float, str, torch.dtype, type(None)})
"""The very types that travel: a subclass would arrive as something else."""

_COUNT = 8
"""Bytes that say how many follow."""
_LEAST_ROOM = 64


def refusal(leaf: object, where: str) -> str:
    """Explain that ``leaf`` cannot go to another stage, and what can."""
    kind = type(leaf)
    return (
        f"{where} is of type {kind.__module__}.{kind.__qualname__}; expected a tensor, None, bool, "
        "int, float, str or dtype: only those go from stage to stage"
    )


def named(dtype: torch.dtype) -> str:
    """Find the name of ``dtype`` in torch."""
    return str(dtype).removeprefix("torch.")


def room_for(constants: Sequence[object]) -> int:
    """Bytes of the message for ``constants`` and others like them, which may be longer."""
    needed = 2 * (_COUNT + len(_encoded(constants)))
    return max(_LEAST_ROOM, 1 << needed.bit_length())


def packed(constants: Sequence[object], room: int) -> list[torch.Tensor]:
    """Make a message of ``room`` bytes, and a second one with what has not fitted."""
    text = _encoded(constants)
    whole = len(text).to_bytes(_COUNT, "little") + text
    parts = [whole[:room].ljust(room), whole[room:]]
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts if part]


def unpacked(message: torch.Tensor, receive: Callable[[torch.Tensor], None]) -> list[object]:
    """List the constants of a message; ``receive`` fills a buffer with what has not fitted into
    it.
    """
    first = bytes(message.numpy())
    count = int.from_bytes(first[:_COUNT], "little")
    text = first[_COUNT : _COUNT + count]
    if len(text) < count:
        rest = torch.empty(count - len(text), dtype=torch.uint8)
        receive(rest)
        text += bytes(rest.numpy())
    found = json.loads(text)
    return [getattr(torch, c["dtype"]) if isinstance(c, dict) else c for c in found]


def _encoded(constants: Sequence[object]) -> bytes:
    listed = [{"dtype": named(c)} if isinstance(c, torch.dtype) else c for c in constants]
    return json.dumps(listed).encode()
