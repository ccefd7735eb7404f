"""Signatures of outputs that sender and receiver both know, so that none is sent twice.

Each stage announces an id for every microbatch. A rank knows the signatures that it has sent or
received itself, or has learned from its own stages. Each stage keeps the ids used last; older ones
are dropped at the end of a step. The sender and the readers of its outputs see the same ids in the
same steps, so they drop the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.pipelining.messages.metadata import Signature

KEPT = 256
"""The number of ids that are kept for each stage."""


class Agreed:
    """The signatures known for this rank's stages, and for those whose outputs it reads."""

    def __init__(self) -> None:
        self._stages: dict[int, _Stage] = {}
        self._learned: list[tuple[_Stage, int]] = []

    def __getitem__(self, stage: int) -> _Stage:
        found = self._stages.get(stage)
        if found is None:
            found = self._stages[stage] = _Stage()
        return found

    def learn(self, stage: int, identity: int, signature: Signature) -> None:
        """Note what a stage of this rank has made; `drop` takes it back if the step is refused."""
        known = self[stage]
        known.outputs[identity] = signature
        self._learned.append((known, identity))

    def keep(self, used: Mapping[int, tuple[int, ...]]) -> None:
        """Keep what a successful step has learned; ``used`` are its ids by stage."""
        self._learned.clear()
        for stage, ids in used.items():
            self[stage].use(ids)

    def drop(self) -> None:
        """Drop what a step has learned that failed before any message was sent or received."""
        for known, identity in self._learned:
            known.outputs.pop(identity, None)
        self._learned.clear()


class _Stage:
    """What is known of the outputs of one stage."""

    def __init__(self) -> None:
        self.outputs: dict[int, Signature] = {}
        """By id."""
        self.told: dict[int, set[int]] = {}
        """By id, the ranks that its signature has been sent to."""
        self.complete: dict[int, dict[int, bool]] = {}
        """By id and reading stage, whether all outputs had gradients in the first microbatch."""
        self._order: dict[int, None] = {}
        """Ids, the one used last at the end."""
        self._last: tuple[int, ...] = ()

    def is_news(self, identity: int, rank: int) -> bool:
        """Note that ``rank`` is sent a signature; True if it did not know it."""
        ranks = self.told.setdefault(identity, set())
        if rank in ranks:
            return False
        ranks.add(rank)
        return True

    def use(self, ids: tuple[int, ...]) -> None:
        """Mark ``ids`` as used last, and drop the least recently used beyond `KEPT`."""
        if ids == self._last:
            return
        self._last = ids
        for identity in dict.fromkeys(ids):
            self._order.pop(identity, None)
            self._order[identity] = None
        while len(self._order) > KEPT:
            identity = next(iter(self._order))
            del self._order[identity]
            for kept in (self.outputs, self.told, self.complete):
                kept.pop(identity, None)
