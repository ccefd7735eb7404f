"""Checks that all ranks reduce gradients of the same pass, by a few numbers sent behind the
gradients.

Reductions are matched by their order alone. A rank that runs an extra backward pass, or skips one,
would silently average its gradients with those of another iteration. So each rank sends its
position: how often its weights have changed, and which backward pass of its last forward pass this
is, each modulo three::

    weights  backward        sums over four ranks, the last of which is one step behind
    0 1 0    0 1 0           1 3 0    0 4 0      two places of three

Sums of marks are above zero in any dtype, so the test is exact on any number of ranks. They are NaN
where a rank gave up its pass. Ranks may accumulate different numbers of passes without a reduction:
that is part of the mean's definition.

Equal counts may hide different changes. So some passes also send digests of the weights, see
`same_weights`. A rank whose weights had another number of writes than before sets a flag, and the
next pass then sends digests.

Optimizers that split the parameters among ranks change weights of a rank that does not see it.
Where counts differ, the weights themselves are compared; if they are equal, such a rank stops
marking its weights. On a device the comparison comes one step later, when such an optimizer has
made the weights equal again, so a digest of each pass is kept from then on.

The full notes of a replica::

    | where the rank is | lacks a gradient, was written otherwise | bits of a digest |
          6 numbers                     1 + 1                              2 x 16
    | has left the path of its first pass | is not finite |
          1, of a static graph only         1, if asked for

So the check costs no collective of its own until a rank reports a fault. Where the gradients are on
a device, the sums are read when the next pass begins, before it sends anything. Sharded units send
their notes after the sums, together with the use counts.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from meshwright.comm import Communicator, union
from meshwright.comm.dtensors.dtensor import is_dtensor, local_of
from meshwright.comm.failures.sameness import told
from meshwright.data_parallel.checks.same_weights import BITS, SameWeights, bits_of
from meshwright.data_parallel.checks.step_watch import Steps, StepWatch
from meshwright.data_parallel.replicas.options import ReductionSettings
from meshwright.data_parallel.replicas.static_graph import StaticGraph
from meshwright.data_parallel.shards.unit import Unit
from meshwright.errors import CollectiveMismatchError, NonFiniteError, warn
from meshwright.gradients import NonFiniteValues, agree_on_non_finite, non_finite_error
from meshwright.torch_internals.tensors import version_of

MARKS = 6
ODD = MARKS + 1
ONES = ODD + 1
ZEROS = ONES + BITS
NOTES = ZEROS + BITS
"""Numbers that travel behind the gradients: the marks, one where a gradient is lacking, one where
weights were written otherwise than before, and the bits of a digest of them."""


class PassPlace(NamedTuple):
    """The place of one rank in a backward pass that reduces."""

    weights: int
    """Changes of the weights before it."""
    backwards: int
    """Backward passes since, with this one."""
    digest: torch.Tensor | None = None
    """Of the weights, where it is kept."""


class Alignment:
    """This rank's position among its backward passes, compared with the other ranks'."""

    def __init__(
        self, named: Sequence[tuple[str, torch.Tensor]], *, is_alone: bool = False
    ) -> None:
        self._parameters = parameters = [parameter for _, parameter in named]
        self.copies = SameWeights(lambda: named)
        """The weights, to be compared."""
        self._is_alone = is_alone
        self.is_odd = False
        """True when other writes came before this pass than before the last that had some."""
        self._writes = 0
        self._distributed = [each for each in parameters if is_dtensor(each)]
        self._steps = StepWatch(lambda: parameters)
        self._local: set[int] = set()
        """Parameters with gradients of this rank alone, since the last reduction, by position."""
        self._has_warned = False
        self.has_parted = False
        """True when this rank has stepped by gradients of its own, after a warning: its weights
        have diverged."""
        self._weights = 0
        self._backwards = 0
        self.place = PassPlace(0, 0)
        """That of the last backward pass."""
        self._keeps_digests = False
        self._digest: torch.Tensor | None = None
        self._version = -1
        self._sees_changes = True
        """True when changes of this rank's weights can be noticed here."""

    def start_over(self) -> None:
        """Restart the counts, after all ranks were given the same weights."""
        self._weights, self._version, self._writes = 0, -1, 0
        self.has_parted = False
        self.copies.start_over()
        self._steps.take()

    def begin_forward(self) -> None:
        """Begin a forward pass: count a change of the weights since the previous one."""
        version = sum([version_of(parameter) for parameter in self._parameters])
        if self._distributed:  # a write to a DTensor is one to the memory below it
            version += sum([version_of(local_of(parameter)) for parameter in self._distributed])
        steps = self._steps.take()
        if version != self._version or self._steps.was_fused:
            if self._version >= 0:
                writes = version - self._version
                self.is_odd |= self._writes not in (0, writes)
                self._writes = writes
            self._version = version
            # Ranks whose step raised may have changed less than the others: they count apart.
            self._weights += 2 if steps is Steps.RAISED else 1
        self._backwards = 0
        if self._keeps_digests:
            self._digest = self.copies.digest_of_now()

    def stays_local(self, index: int) -> None:
        """Note a gradient that is not reduced, because the pass was in ``no_sync``."""
        if not self._local and not self._has_warned:
            self._look_before_step()
        self._local.add(index)

    def doubt(
        self, communicator: Communicator, *, is_in: bool = True
    ) -> CollectiveMismatchError | None:
        """Handle copies of the weights that seem to differ, see `SameWeights.doubt`."""
        error = self.copies.doubt(communicator, is_in=is_in and not self.has_parted)
        if self.copies.is_in_doubt:
            self._look_before_step()
        return error

    def _look_before_step(self) -> None:
        self._steps.ask(partial(_before_step, weakref.ref(self)))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare weights in doubt; warn, once, about a step with gradients of this rank alone."""
        self.copies.judge()
        if not self._has_warned:
            local = {id(p) for n in self._local if (p := self._parameters[n]).grad is not None}
            held = (id(p) for group in optimizer.param_groups for p in group["params"])
            self._has_warned = self.has_parted = any(each in local for each in held)
            if self.has_parted:
                warn(
                    "an optimizer steps with gradients of this rank alone, so that the copies of "
                    "the model part: the last backward pass was in no_sync. Run the last one of a "
                    "step outside of it; for steps of each rank by itself use post_localSGD_hook "
                    "of meshwright.data_parallel.comm_hooks, which brings the copies together "
                    "again"
                )
        if self._has_warned or not self._local:
            self._steps.ask(None)

    def begin_backward(self, *, parts_copies: bool = False) -> None:
        """Begin a backward pass that reduces; ``parts_copies``: gradients may differ by rank."""
        self._local.clear()
        self._backwards += 1
        compares = not (parts_copies or self._is_alone or self.has_parted)
        self.copies.begin_pass(compares=compares)
        self.place = PassPlace(self._weights, self._backwards, self._digest)

    def write(self, notes: torch.Tensor) -> None:
        """Write this rank's position and the digest of its weights into ``notes``."""
        notes.zero_()
        for place in self.marks():
            notes[place].fill_(1)  # to assign a number would wait for the device
        if self.is_odd:
            self.is_odd = False
            notes[ODD].fill_(1)
        if self.copies.digest is not None:
            notes[ONES:NOTES].add_(bits_of(self.copies.digest))

    def say(self) -> tuple[float, float]:
        """Return as numbers: the digest, and whether the number of writes has changed."""
        is_odd, self.is_odd = self.is_odd, False
        return self.copies.number(), float(is_odd)

    def refuse(
        self,
        communicator: Communicator,
        place: PassPlace | None = None,
        *,
        gave_up: bool = False,
    ) -> CollectiveMismatchError | None:
        """Make the error for ranks in different passes; collective. ``gave_up``: this rank raised.

        ``place`` is the judged pass, where this rank is already in the next one. Returns None, and
        lets ranks continue, where all have the same weights and are in the same pass.
        """
        weights, backwards, digest = place or PassPlace(self._weights, self._backwards)
        digest = self.copies.digest_of_now() if digest is None else digest
        values = "" if digest is None else str(digest.item())
        mine = [weights, backwards, gave_up, values]
        rows = communicator.gather_values(mine, label="alignment")
        if all(row[1:] == [backwards, False, values] for row in rows):
            most = max(row[0] for row in rows)
            self._sees_changes = self._sees_changes and weights == most
            self._keeps_digests = not communicator.is_on_host
            self._weights += most - weights
            return None
        found = (
            "a backward pass that raised and was given up,"
            if is_void
            else f"backward pass {backwards} of a forward pass, after {weights - 1} weight changes,"
            for weights, backwards, is_void, _ in rows
        )
        is_late = not communicator.is_on_host
        used = "One step of an optimizer may have" if is_late else "No optimizer has"
        return CollectiveMismatchError(
            f"axis {communicator.axis}: the ranks reduced gradients of different passes together: "
            f"{told(communicator.ranks, found)}. {used} used them. Run as many backward passes on "
            "every rank for each optimizer step, write weights on all ranks or on none, or use "
            "join() where ranks run out of batches"
        )

    def marks(self) -> tuple[int, ...]:
        """Return the indices at which this rank writes a one, which encode its position."""
        backwards = 3 + self._backwards % 3
        return (self._weights % 3, backwards) if self._sees_changes else (backwards,)


def agree(sums: Sequence[float]) -> bool:
    """Whether all ranks wrote the same marks, given their ``sums``."""
    if not sums:
        return True
    if not math.isfinite(sum(sums)):
        return False
    a, b, c, d, e, f = sums
    return (a > 0) + (b > 0) + (c > 0) < 2 and (d > 0) + (e > 0) + (f > 0) < 2


def _before_step(known: Callable[[], Alignment | None], optimizer: torch.optim.Optimizer) -> None:
    alignment = known()
    if alignment is not None:
        alignment.before_step(optimizer)


NOWHERE = PassPlace(-1, -1)
"""The place of a rank in a pass of the others."""

STOPPED = "stop_on_non_finite: gradients of this backward pass are not finite"
"""The finding that all ranks report that were to stop at such gradients."""


class PassNotes:
    """This rank's notes on its backward passes, and the errors that follow from their sums."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        settings: ReductionSettings,
        communicator: Communicator,
    ) -> None:
        self.alignment = Alignment(named, is_alone=communicator.is_alone)
        self.static = StaticGraph([name for name, _ in named]) if settings.is_static else None
        self.values = NonFiniteValues() if settings.is_watched else None
        """This rank's own gradients that were not finite, in the last backward pass."""
        self.reduced = NonFiniteValues() if settings.stops_on_non_finite else None
        """Values that communication hooks have made of the gradients and are not finite."""

    @property
    def numel(self) -> int:
        """The number of notes that `write` fills in."""
        return NOTES + (self.static is not None) + (self.reduced is not None)

    def begin(self, *, parts_copies: bool) -> None:
        """Begin a backward pass that reduces; ``parts_copies``: gradients may differ by rank."""
        self.alignment.begin_backward(parts_copies=parts_copies)
        for values in (self.values, self.reduced):
            if values is not None:
                values.clear()

    def write(self, notes: torch.Tensor, *, lacks: bool) -> None:
        """Write all notes, once all gradients of this rank are known.

        ``lacks``: some parameter has no gradient.
        """
        self.alignment.write(notes[:NOTES])
        if lacks:
            notes[MARKS].fill_(1)
        if self.static is not None:
            notes[NOTES].fill_(self.static.deviates())
        if self.values is not None and self.reduced is not None:
            self.values.add_to(notes[-1].zero_())

    def add_reduced(self, notes: torch.Tensor) -> None:
        """Add what was found in gradients that communication hooks have reduced."""
        if self.reduced is not None:
            self.reduced.add_to(notes[-1])

    def judge(
        self,
        communicator: Communicator,
        place: PassPlace,
        differences: str,
        sums: Sequence[float],
    ) -> Exception | None:
        """Make the error that every rank raises if a rank has marked this pass as void.

        ``place`` is this rank's position in that pass, `NOWHERE` for a pass of other ranks only,
        and ``differences`` are the deviations from the first pass. The ``sums`` of notes are equal
        on all ranks, so all enter the same collectives, and none where nothing is wrong.
        """
        if place is not NOWHERE and not agree(sums[:MARKS]):
            error = self.alignment.refuse(communicator, place)
            if error is not None:
                return error
        copies = self.alignment.copies
        if sums[ODD] > 0:
            copies.ask()
        # Inline: it is on the path of each pass. Sums that are not a number are of marks above.
        if max(map(min, sums[ONES:ZEROS], sums[ZEROS:NOTES])) > 0:
            error = self.alignment.doubt(communicator, is_in=place is not NOWHERE)
            if error is not None:
                return error
        if self.static is not None and sums[NOTES] > 0:
            return self.static.refuse(communicator, differences)
        return None

    def refuse_non_finite(
        self, notes: torch.Tensor, communicator: Communicator, *, is_local: bool
    ) -> NonFiniteError | None:
        """Make the error that every rank raises for non-finite gradients, if it should raise.

        ``is_local``: a communication hook has left all gradients on their rank.
        """
        # Asked for: a device is waited for, so that no optimizer steps with what is not finite.
        if self.values is None or self.reduced is None or notes[-1].real.item() == 0:
            return None
        found, sums = self.values.gradients(), self.reduced.gradients()
        if is_local:
            return non_finite_error({communicator.ranks[communicator.rank]: found}, STOPPED, sums)
        return agree_on_non_finite(communicator, found, what=STOPPED, sums=sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """Non-finite gradients of this rank, found when the sums of sharded units have ended."""

    flags: tuple[bool, ...] = ()
    """One flag for the other ranks: True where something was found; none if not asked for."""
    found: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    axes: tuple[Communicator, ...] = ()
    """The axes whose ranks know that one of them has found something."""

    @classmethod
    def of(cls, units: Sequence[Unit]) -> NonFinite:
        """Collect what watched ``units`` have found and not yet delivered."""
        values: list[str] = []
        sums = NonFiniteValues()
        for unit in reversed(units):
            values += unit.found_non_finite
            for group in unit.trainable_groups:
                if group.mean is not None:
                    named = [(f"unit {unit.name!r}", group.mean)]
                    sums.look(group.mean, partial(list, named))
        found = tuple(f"the gradient of {name!r}" for name in values)
        in_sums = tuple(sums.names())
        return cls(flags=(bool(found or in_sums),), found=found, sums=in_sums)

    def error(self) -> NonFiniteError:
        """Make the error that every rank of `axes` raises; collective."""
        return agree_on_non_finite(union(self.axes), self.found, what=STOPPED, sums=self.sums)


class UseCounts:
    """Exchanges which parameters had a gradient on any rank, pass by pass.

    A rank that had all gradients needs no answer and does not wait for it: the next pass takes it,
    long after it has arrived.
    """

    def __init__(self) -> None:
        self._told: list[Callable[[], object]] = []

    def begin_pass(self) -> None:
        """Complete the exchanges of the previous pass."""
        while self._told:
            self._told.pop()()

    def on_any(self, flags: list[bool], communicators: Sequence[Communicator]) -> list[bool]:
        """The ``flags`` that are set on any rank of all ``communicators`` together; collective."""
        for axis in communicators:
            started = axis.start_equal(bytes(flags), "use counts")
            if all(flags):
                self._told.append(started)
                continue
            everyones = started()
            flags = [any(everyones[n :: len(flags)]) for n in range(len(flags))]
        return flags


def sum_notes(notes: Sequence[torch.Tensor], communicator: Communicator) -> None:
    """Sum ``notes`` over the ranks, in place and in one collective, apart from gradients."""
    mine = torch.cat([note.real if note.is_complex() else note for note in notes])
    mine = mine.to(torch.float32)
    everyone = mine.new_empty(communicator.size * mine.numel())
    communicator.all_gather_list(everyone, mine, label="use counts").wait()
    total = everyone.view(communicator.size, -1).sum(0)
    for note, part in zip(notes, total.split([len(note) for note in notes]), strict=True):
        note.copy_(part)
