"""Assignments of a traced forward to modules: buffers given anew, and tensors that are none.

A graph keeps what it writes to the buffers of its root module alone, so what the forward gives
buffers of other modules is copied into them at its end. Tensors that are plain attributes stay what
they were in the trace: a forward that reads and writes one is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from meshwright.pipelining.splitting.module_hooks import key_in_trace


@contextlib.contextmanager
def assignments(model: nn.Module) -> Iterator[set[str]]:
    """Make the forward of ``model`` copy what it has given buffers of inner modules into them.

    Yields what will have the names of the attributes that it has given other tensors. Raises
    ValueError, behind the block, for another shape or dtype than a buffer has.
    """
    names = {part: f"{name}." for name, part in model.named_modules() if part is not model}
    names[model] = ""
    parts = {key_in_trace(part): part for part in names}
    held: dict[tuple[nn.Module, str], tuple[torch.Tensor, torch.Tensor]] = {}
    wrong: dict[str, None] = {}
    before: dict[nn.Module, dict[str, Any]] = {}
    replaced: set[str] = set()

    def begin(*_: object) -> None:
        held.clear()
        before.update((part, dict(vars(part))) for part in names)

    def note(part: nn.Module, key: str, value: Any) -> None:  # noqa: ANN401
        buffer, own = part._buffers.get(key), parts.get(key_in_trace(part))
        if own is None or own is model or buffer is None or value is None:
            return
        part = own
        buffer, _ = held.get((part, key), (buffer, None))
        if buffer.shape != value.shape or buffer.dtype != value.dtype:
            wrong[
                f"{names[part]}{key} had shape {tuple(buffer.shape)} and {buffer.dtype}, and "
                f"forward gives it {tuple(value.shape)} and {value.dtype}"
            ] = None
            return
        # Detached where it is assigned, so that the stage is known that has computed it.
        held[part, key] = buffer, value.detach() if value.requires_grad else value

    def end(*_: object) -> None:
        for (part, key), (buffer, value) in held.items():
            buffer.copy_(value)
            part._buffers[key] = buffer
        for part, had in before.items():
            now = vars(part)
            replaced.update(
                f"{names[part]}{key}"
                for key, value in had.items()
                if isinstance(value, torch.Tensor) and now.get(key) is not value
            )

    handles = [
        register_module_buffer_registration_hook(note),
        model.register_forward_pre_hook(begin),
        model.register_forward_hook(end),
    ]
    try:
        yield replaced
    finally:
        for handle in handles:
            handle.remove()
    if wrong:
        raise ValueError(
            f"a traced stage keeps the sizes of buffers, but {'; '.join(wrong)}. Register it with "
            "the shape and dtype that forward gives it"
        )


def refuse_remembered(replaced: Iterable[str], constants: Collection[str]) -> None:
    """Raise ValueError for attributes that were ``replaced``, where a graph reads the old one."""
    found = sorted({*replaced} & {*constants})
    if found:
        raise ValueError(
            f"each forward reads the tensor {found[0]!r} and gives the attribute another one, but "
            "in a traced stage it would stay as it was: register it as a buffer"
        )
