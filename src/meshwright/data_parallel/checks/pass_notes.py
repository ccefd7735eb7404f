"""Notes of ranks to each other on a backward pass: numbers behind its gradients, summed with them.

Of replicas::

    | where the rank is among its passes | has left the path of its first pass | is not finite |
                  6 numbers                 1, of a static graph only             1, if asked for

So a pass that cannot be used costs no collective until one rank has something to say. Ranks of
sharded units tell each other after the sums, together with use counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from meshwright.comm import Communicator, union
from meshwright.data_parallel.checks.alignment import NOTES, Alignment
from meshwright.data_parallel.replicas.options import ReductionSettings
from meshwright.data_parallel.replicas.static_graph import StaticGraph
from meshwright.data_parallel.shards.unit import Unit
from meshwright.errors import NonFiniteError
from meshwright.gradients import NonFiniteValues, agree_on_non_finite, non_finite_error

STOPPED = "stop_on_non_finite: gradients of this backward pass are not finite"
"""What all ranks have seen that were to stop at such gradients."""


class PassNotes:
    """The notes of this rank on its backward passes, and what follows from the sums."""

    def __init__(
        self, named: Sequence[tuple[str, torch.nn.Parameter]], settings: ReductionSettings
    ) -> None:
        self.alignment = Alignment([parameter for _, parameter in named])
        self.static = StaticGraph([name for name, _ in named]) if settings.is_static else None
        self.values = NonFiniteValues() if settings.is_watched else None
        """This rank's own gradients that were not finite, in the last backward pass."""
        self.reduced = NonFiniteValues() if settings.stops_on_non_finite else None
        """What communication hooks have made of the gradients and is not finite."""

    @property
    def numel(self) -> int:
        """Count the numbers."""
        return NOTES + (self.static is not None) + (self.reduced is not None)

    def begin(self) -> None:
        """A backward pass that reduces begins."""
        self.alignment.begin_backward()
        for values in (self.values, self.reduced):
            if values is not None:
                values.clear()

    def write(self, notes: torch.Tensor) -> None:
        """Say what there is to say, once all gradients of this rank are known."""
        self.alignment.write(notes[:NOTES])
        if self.static is not None:
            notes[NOTES] = self.static.deviates()
        if self.values is not None and self.reduced is not None:
            self.values.add_to(notes[-1].zero_())

    def add_reduced(self, notes: torch.Tensor) -> None:
        """Say more, once communication hooks have reduced the gradients."""
        if self.reduced is not None:
            self.reduced.add_to(notes[-1])

    def refuse(
        self, notes: torch.Tensor, communicator: Communicator, *, is_own: bool
    ) -> Exception | None:
        """Make the error that every rank raises for a pass that is void, if one has said so.

        ``notes`` are the sums, so that all ranks ask alike, and nothing is sent where all is well.
        ``is_own`` says that this rank has reduced a pass of its own with those of the others.
        """
        if is_own and not self.alignment.agrees(notes[:NOTES]):
            error = self.alignment.refuse(communicator)
            if error is not None:
                return error
        if self.static is not None and notes[NOTES].real.item() > 0:
            return self.static.refuse(communicator)
        return None

    def refuse_non_finite(
        self, notes: torch.Tensor, communicator: Communicator, *, is_local: bool
    ) -> NonFiniteError | None:
        """Make the error that every rank raises for gradients that are not finite, if it is to.

        ``is_local`` says that a communication hook has left all gradients on their rank.
        """
        # This is the one place where a device is waited for to learn that all is finite.
        if self.values is None or self.reduced is None or notes[-1].real.item() == 0:
            return None
        found, sums = self.values.gradients(), self.reduced.gradients()
        if is_local:
            return non_finite_error({communicator.ranks[communicator.rank]: found}, STOPPED, sums)
        return agree_on_non_finite(communicator, found, what=STOPPED, sums=sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """Gradients that are not finite on this rank when the sums of sharded units have ended."""

    flags: tuple[bool, ...] = ()
    """True where there is something, where it is asked for: to be told to the other ranks."""
    found: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    axes: tuple[Communicator, ...] = ()
    """Whose ranks know that there is something on one of them."""

    @classmethod
    def of(cls, units: Sequence[Unit]) -> NonFinite:
        """Of ``units`` that are watched and whose gradients are not delivered yet."""
        values: list[str] = []
        sums = NonFiniteValues()
        for unit in reversed(units):
            values += unit.found_non_finite
            for group in unit.trainable_groups:
                if group.mean is not None:
                    sums.look(group.mean, partial(_whole_mean, unit.name, group.mean))
        found = tuple(f"the gradient of {name!r}" for name in values)
        in_sums = tuple(sums.names())
        return cls(flags=(bool(found or in_sums),), found=found, sums=in_sums)

    def error(self) -> NonFiniteError:
        """Make the error that every rank of `axes` raises; collective."""
        return agree_on_non_finite(union(self.axes), self.found, what=STOPPED, sums=self.sums)


def _whole_mean(name: str, mean: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [(f"unit {name!r}", mean)]


def sum_notes(notes: Sequence[torch.Tensor], communicator: Communicator) -> None:
    """Sum ``notes`` over the ranks, in place and in one collective, apart from the gradients."""
    mine = torch.cat([note.real if note.is_complex() else note for note in notes])
    mine = mine.to(torch.float32)
    everyone = mine.new_empty(communicator.size * mine.numel())
    communicator.all_gather_list(everyone, mine, label="use counts").wait()
    total = everyone.view(communicator.size, -1).sum(0)
    for note, part in zip(notes, total.split([len(note) for note in notes]), strict=True):
        note.copy_(part)
