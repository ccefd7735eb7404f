"""Which keys a query sees, in words: a mask of the whole sequence is never made."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class MaskWords:
    """A mask as a product of conditions on positions and documents.

    A query sees keys of its own document, and of these what the words leave.
    """

    causal: bool = True
    """Keys at the query's position and before."""
    window: int | None = None
    """Only keys fewer than so many positions before the query (and after it, unless causal)."""
    chunk: int | None = None
    """Only keys of the query's own chunk of so many positions of its document."""
    padding: torch.Tensor | None = None
    """True for tokens, False for padding, which no query sees: (rows, length), on the host."""

    def seen_from(
        self, queries: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first key that each query sees, and the one after the last, without padding.

        ``begins`` and ``ends`` are those of the queries' documents. Each condition leaves a range
        of the keys, so all of them do. Both results rise with the position.
        """
        first, stop = begins, queries + 1 if self.causal else ends
        if self.window is not None:
            first = torch.maximum(first, queries - self.window + 1)
            if not self.causal:
                stop = torch.minimum(stop, queries + self.window)
        if self.chunk is not None:
            start = begins + (queries - begins) // self.chunk * self.chunk
            first = torch.maximum(first, start)
            stop = torch.minimum(stop, start + self.chunk)
        return first, torch.maximum(first, stop)
