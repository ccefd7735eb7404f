"""Fingerprints of the calls of ranks, compared before data moves."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.comm.failures.status import users_line
from meshwright.errors import CommunicationError
from meshwright.torch_internals.tensors import may_be_rewritten

CONTROL_TAGS = 1 << 30
"""The first tag of control data, which on CPUs shares its group with payloads."""


@functools.lru_cache(maxsize=1024)
def digest(text: str) -> int:
    """Hash ``text`` to a positive number of 62 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that all ranks, or both sides of a message, must make in the same way."""

    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    reduction: str = ""
    root: int | None = None
    """The root's number in the world."""
    more: str = ""
    """Anything else that has to be the same, in words."""
    label: str = ""

    def __str__(self) -> str:
        return f'{self.form} "{self.label}"' if self.label else self.form

    @property
    def form(self) -> str:
        """The call in one phrase, without its label."""
        parts = [self.kind]
        if self.reduction:
            parts.append(self.reduction)
        if self.dtype is not None:
            parts.append(f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}")
        if self.root is not None:
            parts.append(f"root rank {self.root}")
        if self.more:
            parts.append(self.more)
        return " ".join(parts)


def call_of(kind: str, tensors: Sequence[torch.Tensor], **more: Any) -> Call:
    """Describe a call on ``tensors``; each tensor of a list is described."""
    first, rest = (tensors[0], tensors[1:]) if tensors else (None, ())
    others = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in rest)
    if others:
        more["more"] = f"and {others}"
    if first is None:
        return Call(kind=kind, **more)
    return Call(kind=kind, shape=tuple(first.shape), dtype=first.dtype, **more)


def overwrite(kind: str, tensors: Iterable[torch.Tensor]) -> None:
    """Make a backward through values that a collective has written to ``tensors`` raise.

    Autograd does not see the write: gradients would be those of this rank's value alone. Results
    computed from the earlier values keep their graph.
    """
    for tensor in tensors:
        if tensor.grad_fn is not None and torch.is_grad_enabled():
            line = users_line(sys._getframe(1))
            if may_be_rewritten(tensor):
                OverwrittenByCollective.apply(tensor, kind, line)
            else:  # a view of a parameter, or of `split`
                tensor.register_hook(functools.partial(_refuse_backward, kind, line))


class OverwrittenByCollective(torch.autograd.Function):
    """Autograd history that marks a tensor as written by a collective."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        tensor: torch.Tensor,
        kind: str,
        line: str,
    ) -> torch.Tensor:
        """Return the tensor itself, marked as written in place."""
        ctx.mark_dirty(tensor)
        ctx.kind, ctx.line = kind, line
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:  # noqa: ANN401
        """Raise the error that names the collective."""
        _refuse_backward(ctx.kind, ctx.line, gradients[0])


def _refuse_backward(kind: str, line: str, gradient: torch.Tensor) -> None:
    raise CommunicationError(
        f"a backward runs through a tensor of shape {list(gradient.shape)} that {kind} has "
        f"overwritten, called at {line}. Autograd does not see that: the gradient would lack what "
        "other ranks add. To log a loss, reduce loss.detach().clone(), or reduce the loss after "
        "its backward. To train on the sum, call torch.distributed.nn.functional.all_reduce, or "
        "do not reduce the loss and scale it by the world size where gradients are averaged"
    )
