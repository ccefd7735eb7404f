"""Attention of one process, to which parts are compared, and the cases of the grid."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshwright import comm
from support.internals.context_parallel import ContextSplit, MaskWords, SplitMethod, ring_attention

__all__ = ["CLOSE", "KINDS", "METHODS", "Case", "Inputs", "allowed", "by_blocks_of", "compare"]


def allowed(words: MaskWords, split: ContextSplit) -> torch.Tensor:
    """Which keys each query sees, without padding: (rows, queries, keys) of the whole."""
    places, documents = split.places(), split.documents()
    of_query, of_key = places.unsqueeze(-1), places.unsqueeze(-2)
    seen = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    if words.causal:
        seen &= of_key <= of_query
    if words.window is not None:
        seen &= of_key > of_query - words.window
        if not words.causal:
            seen &= of_key < of_query + words.window
    if words.chunk is not None:
        seen &= of_key // words.chunk == of_query // words.chunk
    return seen


CLOSE = {"rtol": 1e-12, "atol": 1e-12}
METHODS = ("contiguous", "zigzag", "documents")
KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "sliding": {"window": 5},
    "sliding, both sides": {"window": 4, "causal": False},
    "chunked": {"chunk": 6},
    "chunked, both sides": {"chunk": 9, "causal": False},
    "sliding, chunked": {"window": 4, "chunk": 7},
}
"""Words of masks."""


@dataclass(frozen=True)
class Case:
    """One attention. ``documents`` has a row for each of the batch, or one for all ``rows``."""

    documents: tuple[tuple[int, ...], ...]
    words: dict[str, Any]
    heads: tuple[int, int] = (4, 4)
    d: int = 8
    dv: int = 8
    rows: int = 2
    sinks: bool = False
    padded: tuple[int, ...] = ()
    """How many tokens at the end of each row are padding; if negative, at its beginning."""
    method: SplitMethod = "documents"
    blocks: int = 4
    """Queries of a block."""

    def __str__(self) -> str:
        return ", ".join(f"{k} = {v}" for k, v in dataclasses.asdict(self).items())


class Inputs:
    """The tensors of a case, equal on all ranks, and what one process makes of them."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float64) -> None:
        draw = torch.Generator().manual_seed(3)
        self.length = sum(case.documents[0])
        queries, keys = case.heads
        shapes = (queries, case.d), (keys, case.d), (keys, case.dv), (queries, case.dv)
        *self.given, self.weigh = (
            torch.randn(case.rows, heads, self.length, d, generator=draw).to(dtype)
            for heads, d in shapes
        )
        self.sinks = torch.randn(queries, generator=draw).to(dtype) if case.sinks else None
        # Of the host, also where tests have a simulated device.
        at = ContextSplit.of([[self.length]], 1).positions(0)[0]
        padding = None
        if case.padded:
            padding = torch.stack(
                [at < self.length - n if n >= 0 else at >= -n for n in case.padded]
            )
        self.words = MaskWords(**case.words, padding=padding)
        self.split = ContextSplit.of(
            case.documents, comm.communicator().size, case.method, max_share=0.4
        )
        self.mask = allowed(self.words, self.split).unsqueeze(1)
        if padding is not None:
            self.mask = self.mask & padding[:, None, None]
        self.mask = self.mask.to(comm.communicator().device)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention by the words themselves: zeros for a query that sees nothing."""
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        scores = q @ k.mT * 0.3
        scores = scores.masked_fill(~self.mask, torch.finfo(scores.dtype).min / 2)
        if sinks is not None:
            column = sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, column], 3)
        weights = scores.softmax(-1)[..., : k.shape[2]]
        return (weights * self.mask) @ v


def compare(case: Case, attention: Callable[..., torch.Tensor]) -> None:
    """Compare ``attention`` of this rank's part with one process: output, and all gradients."""
    world, inputs = comm.communicator(), Inputs(case)
    split, rank = inputs.split, world.rank
    leaves = [x.clone().requires_grad_() for x in inputs.given]
    own = [split.part(x, rank, 2).requires_grad_() for x in inputs.given]
    sinks = [None if inputs.sinks is None else inputs.sinks.clone() for _ in range(2)]
    if sinks[0] is not None and sinks[1] is not None:
        leaves.append(sinks[0].requires_grad_())
        own.append(sinks[1].requires_grad_())
    expected = inputs.attend(*leaves[:3], sinks[0])
    expected.backward(inputs.weigh)
    found = attention(inputs, *own[:3], sinks[1])
    found.backward(split.part(inputs.weigh, rank, 2))

    def check(found: torch.Tensor, whole: torch.Tensor | None, what: str) -> None:
        assert whole is not None
        part = whole if what == "sinks" else split.part(whole, rank, 2)
        torch.testing.assert_close(
            found, part, **CLOSE, msg=lambda text: f"{what} of {case}: {text}"
        )

    check(found.detach(), expected.detach(), "output")
    for x, leaf, what in zip(own, leaves, ("q", "k", "v", "sinks"), strict=False):
        assert x.grad is not None
        if what == "sinks":
            world.all_reduce(x.grad).wait()
        check(x.grad, leaf.grad, what)


def by_blocks_of(queries: int) -> None:
    """Have the ring compute with blocks of so many queries, in this process."""
    module: Any = sys.modules[ring_attention.__module__]
    module.HOST_QUERIES = module.DEVICE_QUERIES = queries
