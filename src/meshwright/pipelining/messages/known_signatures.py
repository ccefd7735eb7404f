"""The outputs of stages as sender and receiver both know them, so that they need not send it again.

Each stage announces an id for every microbatch. What a rank knows of them it has sent or received
itself, or has learned from its own stages. Of each stage the ids used last are kept, and forgotten
at the end of a step: who makes its outputs and who reads them see the same ids in the same steps,
and so forget the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.pipelining.messages.metadata import Signature

KEPT = 256
"""The number of ids that are kept of each stage."""


class Agreed:
    """The knowledge of this rank of its own stages, and of those whose outputs it reads."""

    def __init__(self) -> None:
        self._stages: dict[int, _Stage] = {}
        self._learned: list[tuple[_Stage, int]] = []

    def __getitem__(self, stage: int) -> _Stage:
        found = self._stages.get(stage)
        if found is None:
            found = self._stages[stage] = _Stage()
        return found

    def learn(self, stage: int, identity: int, signature: Signature) -> None:
        """Note what a stage of this rank has made. Counts once the step has succeeded."""
        known = self[stage]
        known.outputs[identity] = signature
        self._learned.append((known, identity))

    def keep(self, used: Mapping[int, tuple[int, ...]]) -> None:
        """Keep what a step has taught that succeeded, with outputs of these ids of the stages."""
        self._learned.clear()
        for stage, ids in used.items():
            self[stage].use(ids)

    def drop(self) -> None:
        """Drop what a step has taught that failed before anything of it was sent or had come."""
        for known, identity in self._learned:
            known.outputs.pop(identity, None)
        self._learned.clear()


class _Stage:
    """The knowledge of the outputs of one stage."""

    def __init__(self) -> None:
        self.outputs: dict[int, Signature] = {}
        """By id."""
        self.told: dict[int, set[int]] = {}
        """By id, the ranks that its signature has been sent to."""
        self.complete: dict[int, dict[int, bool]] = {}
        """By id and reading stage, whether all outputs had gradients in the first microbatch."""
        self._order: dict[int, None] = {}
        """Ids. The one used last stands last."""
        self._last: tuple[int, ...] = ()

    def is_news(self, identity: int, rank: int) -> bool:
        """Note that ``rank`` is told a signature, and tell whether it did not know it."""
        ranks = self.told.setdefault(identity, set())
        if rank in ranks:
            return False
        ranks.add(rank)
        return True

    def use(self, ids: tuple[int, ...]) -> None:
        """They were used last: forget what was not used for longest."""
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
