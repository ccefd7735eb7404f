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

Equal counts may hide different changes: no count tells a write on one rank alone, which makes
copies diverge, from one on all. So some passes also send digests of the weights::

    compared in   passes 1, 2, 4, 8, ... and from 1024 on each 1024th
                  the pass after one in which a rank had another number of writes than before

Where digests differ, weights are only in doubt: a pass may have changed them on each rank for
itself (noise, or an ascent step on its own batch) and undo that before the step. So the weights are
compared before the next optimizer step, or some passes later if there is none. Ranks with different
processors may differ by the rounding of many steps: that warns once. A larger difference is an
error on every rank.

Optimizers that split the parameters among ranks change weights of a rank that does not see it.
Where counts differ, the weights themselves are compared; if they are equal, such a rank stops
marking its weights. On a device the comparison comes one step later, when such an optimizer has
made the weights equal again, so a digest of each pass is kept from then on.

The full notes of a replica::

    | where the rank is | lacks a gradient, was written otherwise | bits of a digest |
          6 numbers                     1 + 1                              2 x 16
    | has left the path of its first pass | digests of experts      | is not finite |
          1, of a static graph only         2 x 16 for each rank of    1, if asked for
                                            an exchange of samples

Ranks that hold other experts write the digests of theirs to places of their own. So the check costs
no collective of its own until a rank reports a fault. Where the gradients are on a device, the sums
are read when the next pass begins, before it sends anything. Sharded units send their notes after
the sums, together with the use counts.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from meshwright.comm import Communicator, LateNumbers
from meshwright.comm.dtensors.dtensor import is_dtensor, local_of
from meshwright.comm.dtensors.exchanging import NO_EXPERTS, ExpertRanks
from meshwright.comm.dtensors.subclasses import values_of
from meshwright.comm.failures.sameness import RowDifference, first_difference, refusal, told
from meshwright.data_parallel.checks.step_watch import Steps, StepWatch
from meshwright.data_parallel.replicas.options import ReductionSettings
from meshwright.data_parallel.replicas.static_graph import StaticGraph
from meshwright.errors import CollectiveMismatchError, NonFiniteError, warn
from meshwright.gradients import (
    NonFiniteValues,
    agree_on_non_finite,
    beyond_rounding_first,
    digest_of_all,
    digests_of,
    non_finite_error,
)
from meshwright.gradients.closeness import MOST_APART
from meshwright.torch_internals.tensors import version_of

BITS = 16
"""Bits of a digest that travel: others differ by chance alone in one of 65,536 comparisons."""
FREE, SHARE = 4, 32
"""Comparisons on request: `FREE` of them, and one more in each `SHARE` passes."""
PATIENCE = 8
"""Passes after which copies in doubt are compared although no optimizer of torch's has stepped."""
ROUNDING = 0.1
"""Of what gradients may differ by: weights add up the rounding of updates, small beside them."""
_NUMBER = (1 << 52) - 1

MARKS = 6
ODD = MARKS + 1
ONES = ODD + 1
ZEROS = ONES + BITS
NOTES = ZEROS + BITS
"""Numbers that travel behind the gradients: the marks, one where a gradient is lacking, one where
weights were written otherwise than before, and the bits of a digest of them."""

REMEDY = (
    "Something has written the weights on some ranks alone: a state dict that is loaded there, a "
    "forward pass that writes them by its batch, or an optimizer whose settings are others there, "
    "as a learning rate, or whose state is that of fewer steps, as after join(). Do it on every "
    "rank, or broadcast the result to all. Undo what is for one pass, as noise, before the step of "
    "a torch.optim.Optimizer. Parameters that are to differ are left out as ignored ones, and a "
    "communication hook that lets copies part says so: hook.parts_copies = True"
)


class SameWeights:
    """The weights of one rank, and when they are compared with those of the others."""

    def __init__(
        self,
        named: Callable[[], Sequence[tuple[str, torch.Tensor]]],
        experts: Mapping[int, ExpertRanks] = NO_EXPERTS,
    ) -> None:
        """``experts`` are compared over the ranks that hold the same, by the ``id`` of each."""
        self._named = named
        self._experts = experts
        self._kinds = tuple(dict.fromkeys(experts.values()))
        self._late = LateNumbers()
        self.start_over()
        self._may_part = False
        self._said: set[str] = set()

    def start_over(self) -> None:
        """Restart the count of passes; call it when all ranks have the same weights."""
        self.passes = 0
        """Passes so far."""
        self._next = 1
        self.digest: torch.Tensor | None = None
        """The digest of the current pass, if it is compared: 64 bits, where the weights lie."""
        self.of_experts: tuple[torch.Tensor | None, ...] = ()
        """Digests of experts in that pass, by place; of other ranks' experts None."""
        self._answered = 0
        self._number = 0.0
        self._doubt: tuple[int, Communicator, bool] | None = None

    @property
    def is_in_doubt(self) -> bool:
        """True when digests have differed and weights are to be compared, see `judge`."""
        return self._doubt is not None

    @contextlib.contextmanager
    def parting(self) -> Iterator[None]:
        """A block in which copies may diverge, as inside ``join``: differences only warn."""
        self._may_part = True
        try:
            yield
        finally:
            self._may_part = False

    def ask(self) -> None:
        """Compare the next pass; all ranks call this after the same pass."""
        if self._answered < FREE + self.passes // SHARE:
            self._answered += 1
            self._next = self.passes + 1

    def begin_pass(self, *, compares: bool = True) -> None:
        """Count a pass, and take the digest if it ``compares`` weights and a digest is due."""
        self.digest, self.of_experts = None, ()
        if not compares:
            return
        self.passes += 1
        if self.passes < self._next:
            return
        # The next one that `is_due`: a power of two, or a multiple of `MOST_APART`.
        multiple = self.passes // MOST_APART * MOST_APART + MOST_APART
        self._next = min(1 << self.passes.bit_length(), multiple)
        digest = self.digest_of_now()
        if self._kinds:
            self.of_experts = tuple(self._digests_of_experts())
        self._late.settle()
        if digest is not None:
            self.digest = digest
            self._late.look(digest.reshape(1), self._keep)

    def _keep(self, numbers: Sequence[float]) -> None:
        self._number = float(int(numbers[0]) >> 11 & _NUMBER) + 1.0

    def number(self) -> float:
        """Return the digest as a number, once (0.0: none); a device's in the next pass."""
        if self.digest is None:
            self._late.settle()  # that of a pass before
        number, self._number = self._number, 0.0
        return number

    def digest_of_now(self) -> torch.Tensor | None:
        """Compute a digest of all weights but experts', 64 bits on their device, None without."""
        named = self._held_as(None) if self._kinds else self._named()
        return digest_of_all([tensor for _, tensor in named])

    @property
    def places(self) -> int:
        """The number of places for digests of experts: one for each rank of their exchanges."""
        return sum(kind.exchange.size for kind in self._kinds)

    def _digests_of_experts(self) -> Iterator[torch.Tensor | None]:
        for kind in self._kinds:
            digest = digest_of_all([tensor for _, tensor in self._held_as(kind)])
            for rank in range(kind.exchange.size):
                yield digest if rank == kind.exchange.rank else None

    def _held_as(self, kind: ExpertRanks | None) -> Sequence[tuple[str, torch.Tensor]]:
        """The experts of one ``kind``, or what all ranks hold."""
        return [each for each in self._named() if self._experts.get(id(each[1])) == kind]

    def _digests(
        self, kind: ExpertRanks | None
    ) -> list[tuple[tuple[str, torch.Tensor], torch.Tensor]]:
        named = self._held_as(kind)
        digests = digests_of([tensor for _, tensor in named])
        pairs = zip(named, digests, strict=True)
        return [(held, digest) for held, digest in pairs if digest is not None]

    def doubt(self, axis: Communicator, *, is_in: bool = True) -> CollectiveMismatchError | None:
        """Handle digests that differ, which all ranks of ``axis`` see; returns the error to raise.

        Without ``is_in`` the weights of this rank are not compared.
        """
        since = self.passes if self._doubt is None else self._doubt[0]
        if self._may_part or self.passes >= since + PATIENCE:
            self._doubt = None
            return self._compare(axis, is_in=is_in)
        self._doubt = since, axis, is_in
        self._next = min(self._next, since + PATIENCE)
        return None

    def judge(self) -> None:
        """Compare weights in doubt; called before an optimizer step, which all ranks make.

        Raises CollectiveMismatchError on every rank where they differ.
        """
        # Ranks that are done make no steps inside of join, whose end makes all equal.
        if self._doubt is None or self._may_part:
            return
        (_, axis, is_in), self._doubt = self._doubt, None
        error = self._compare(axis, is_in=is_in)
        if error is not None:
            raise error

    def _compare(self, axis: Communicator, *, is_in: bool) -> CollectiveMismatchError | None:
        """Make the error that every rank of ``axis`` raises where weights differ; collective.

        Returns None, and warns once, where they differ only by rounding. Without ``is_in`` the
        weights of this rank are not compared.
        """
        error = self._compare_kind(axis, None, is_in=is_in)
        for kind in self._kinds:  # what some find of their experts, all raise
            found = self._compare_kind(kind.holders, kind, is_in=is_in)
            texts = axis.gather_values("" if found is None else str(found), label="experts")
            error = error or next((CollectiveMismatchError(text) for text in texts if text), None)
        return error

    def _compare_kind(
        self, axis: Communicator, kind: ExpertRanks | None, *, is_in: bool
    ) -> CollectiveMismatchError | None:
        found = self._digests(kind)
        mine = [digest.item() for _, digest in found] if is_in else None
        everyone = axis.gather_values(mine, label="compare weights")
        meaning = "copies of the weights"
        names = [name for (name, _), _ in found]
        said = {rank: row for rank, row in zip(axis.ranks, everyone, strict=True) if row}
        place = first_difference([*said], [*said.values()])
        if place is None:
            return None
        name = names[int(place.place)]
        beyond: RowDifference | str | None
        if len(said) < axis.size:
            beyond = f"{name!r} has some values on {place.sides}"
        else:
            held = [(name, values_of(local_of(tensor)).detach()) for (name, tensor), _ in found]
            beyond = beyond_rounding_first(axis, held, everyone, share=ROUNDING)
        if beyond is None:
            self._say(
                f"axis {axis.axis}: copies of the weights differ by rounding, {name!r} first, with "
                f"some on {place.sides}. Processors of other kinds, or other numbers of threads, "
                "round norms in other ways, as those of clipped gradients. If ranks are alike, "
                "something has written a little on some of them alone"
            )
            return None
        text = refusal(axis, meaning, beyond, REMEDY)
        if not self._may_part:
            return CollectiveMismatchError(text)
        self._say(f"{text}. join() goes on; at its end all get the weights of the last rank")
        return None

    def _say(self, text: str) -> None:
        """Warn, once of each kind."""
        kind = text.partition(",")[0]
        if kind not in self._said:
            self._said.add(kind)
            warn(text)


def bits_of(digest: torch.Tensor) -> torch.Tensor:
    """Encode ``digest`` as numbers whose sums over the ranks tell whether all ranks agree.

    `BITS` bits and their complements: where two ranks differ in a bit, both sums are above zero, in
    any dtype.
    """
    ones = (digest >> torch.arange(64 - BITS, 64, device=digest.device)).bitwise_and_(1)
    return torch.cat([ones, 1 - ones])


class PassPlace(NamedTuple):
    """The place of one rank in a backward pass that reduces."""

    weights: int
    """Changes of the weights before it."""
    backwards: int
    """Backward passes since, with this one."""
    digest: torch.Tensor | None = None
    """Of the weights, where it is kept."""


class Alignment:
    """Checks that all ranks are in the same backward pass, with the same weights.

    In each pass `write` fills in this rank's notes, first of all its position: how often weights
    changed, and which backward pass this is. The ranks sum the notes with the gradients. `judge`
    makes an error of sums that cannot be right, the same one on every rank.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        settings: ReductionSettings,
        communicator: Communicator,
        experts: Mapping[int, ExpertRanks] = NO_EXPERTS,
    ) -> None:
        self._communicator = communicator
        self._parameters = parameters = [parameter for _, parameter in named]
        self.copies = SameWeights(partial(tuple, named), experts)
        """The weights, to be compared."""
        self.static = StaticGraph([name for name, _ in named]) if settings.is_static else None
        first = NOTES + (self.static is not None)
        self._places = range(first, first + 2 * BITS * self.copies.places, 2 * BITS)
        """Where the bits of experts' digests begin in the notes."""
        self.values = NonFiniteValues() if settings.is_watched else None
        """This rank's own gradients that were not finite, in the last backward pass."""
        self.reduced = NonFiniteValues() if settings.stops_on_non_finite else None
        """Values that communication hooks have made of the gradients and are not finite."""
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
        """Restart the counts; call it when all ranks have the same weights."""
        self._weights, self._version, self._writes = 0, -1, 0
        self.has_parted = False
        self.copies.start_over()
        self._steps.take()

    def begin_forward(self) -> None:
        """Begin a forward pass: count a change of the weights since the previous one."""
        version = sum(map(version_of, self._parameters))
        if self._distributed:  # a write to a DTensor is one to the memory below it
            version += sum(map(version_of, map(local_of, self._distributed)))
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

    def doubt(self, *, is_in: bool = True) -> CollectiveMismatchError | None:
        """Handle copies of the weights that seem to differ, see `SameWeights.doubt`."""
        error = self.copies.doubt(self._communicator, is_in=is_in and not self.has_parted)
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
        compares = not (parts_copies or self._communicator.is_alone or self.has_parted)
        self.copies.begin_pass(compares=compares)
        self.place = PassPlace(self._weights, self._backwards, self._digest)
        for values in (self.values, self.reduced):
            if values is not None:
                values.clear()

    @property
    def numel(self) -> int:
        """The number of notes that `write` fills in."""
        experts = 2 * BITS * len(self._places)
        return NOTES + (self.static is not None) + experts + (self.reduced is not None)

    def write(self, notes: torch.Tensor, *, lacks: bool) -> None:
        """Write all notes, once all gradients of this rank are known.

        ``lacks``: some parameter has no gradient.
        """
        notes.zero_()
        for place in self.marks():
            notes[place].fill_(1)  # to assign a number would wait for the device
        if lacks:
            notes[MARKS].fill_(1)
        if self.is_odd:
            self.is_odd = False
            notes[ODD].fill_(1)
        if self.copies.digest is not None:
            notes[ONES:NOTES].add_(bits_of(self.copies.digest))
        for at, digest in zip(self._places, self.copies.of_experts, strict=False):
            if digest is not None:
                notes[at : at + 2 * BITS].add_(bits_of(digest))
        if self.static is not None:
            notes[NOTES].fill_(self.static.deviates())
        if self.values is not None and self.reduced is not None:
            self.values.add_to(notes[-1])

    def say(self) -> tuple[float, float]:
        """Return as numbers: the digest, and whether the number of writes has changed."""
        is_odd, self.is_odd = self.is_odd, False
        return self.copies.number(), float(is_odd)

    def judge(self, place: PassPlace, differences: str, sums: Sequence[float]) -> Exception | None:
        """Make the error that every rank raises if a rank has marked this pass as void.

        ``place`` is this rank's position in that pass, `NOWHERE` for a pass of other ranks only,
        and ``differences`` are the deviations from the first pass. The ``sums`` of notes are equal
        on all ranks, so all enter the same collectives, and none where nothing is wrong.
        """
        if place is not NOWHERE and not agree(sums[:MARKS]):
            error = self.refuse(place)
            if error is not None:
                return error
        if sums[ODD] > 0:
            self.copies.ask()
        # Inline: it is on the path of each pass. Sums that are not a number are of marks above.
        is_apart = max(map(min, sums[ONES:ZEROS], sums[ZEROS:NOTES])) > 0
        for at in self._places:
            ones, zeros = sums[at : at + BITS], sums[at + BITS : at + 2 * BITS]
            is_apart = is_apart or max(map(min, ones, zeros)) > 0
        if is_apart:
            error = self.doubt(is_in=place is not NOWHERE)
            if error is not None:
                return error
        if self.static is not None and sums[NOTES] > 0:
            return self.static.refuse(self._communicator, differences)
        return None

    def refuse_non_finite(self, notes: torch.Tensor, *, is_local: bool) -> NonFiniteError | None:
        """Make the error that every rank raises for non-finite gradients, if it should raise.

        ``is_local``: a communication hook has left all gradients on their rank.
        """
        # Asked for: a device is waited for, so that no optimizer steps with what is not finite.
        if self.values is None or self.reduced is None or notes[-1].real.item() == 0:
            return None
        axis, found, sums = self._communicator, self.values.gradients(), self.reduced.gradients()
        if is_local:
            return non_finite_error({axis.ranks[axis.rank]: found}, STOPPED, sums)
        return agree_on_non_finite(axis, found, what=STOPPED, sums=sums)

    def refuse(
        self, place: PassPlace | None = None, *, gave_up: bool = False
    ) -> CollectiveMismatchError | None:
        """Make the error for ranks in different passes; collective. ``gave_up``: this rank raised.

        ``place`` is the judged pass, where this rank is already in the next one. Returns None, and
        lets ranks continue, where all have the same weights and are in the same pass.
        """
        axis = self._communicator
        weights, backwards, digest = place or PassPlace(self._weights, self._backwards)
        digest = self.copies.digest_of_now() if digest is None else digest
        values = "" if digest is None else str(digest.item())
        mine = [weights, backwards, gave_up, values]
        rows = axis.gather_values(mine, label="alignment")
        if all(row[1:] == [backwards, False, values] for row in rows):
            most = max(row[0] for row in rows)
            self._sees_changes = self._sees_changes and weights == most
            self._keeps_digests = not axis.is_on_host
            self._weights += most - weights
            return None
        found = (
            "a backward pass that raised and was given up,"
            if is_void
            else f"backward pass {backwards} of a forward pass, after {weights - 1} weight changes,"
            for weights, backwards, is_void, _ in rows
        )
        used = "No optimizer has" if axis.is_on_host else "One step of an optimizer may have"
        return CollectiveMismatchError(
            f"axis {axis.axis}: the ranks reduced gradients of different passes together: "
            f"{told(axis.ranks, found)}. {used} used them. Run as many backward passes on "
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


def on_any(axis: Communicator, flags: list[bool], unread: list[Callable[[], object]]) -> list[bool]:
    """Return the use ``flags`` that are set on any rank of ``axis``; a collective.

    A rank on which all are set needs no answer and does not wait for it: the answer goes to
    ``unread``, which the next pass takes, long after it has arrived.
    """
    started = axis.start_equal(bytes(flags), "use counts")
    if all(flags):
        unread.append(started)
        return flags
    everyones = started()
    return [any(everyones[n :: len(flags)]) for n in range(len(flags))]


def sum_notes(notes: Sequence[torch.Tensor], communicator: Communicator) -> None:
    """Sum ``notes`` over the ranks, in place and in one collective, apart from gradients."""
    mine = torch.cat([note.real if note.is_complex() else note for note in notes])
    mine = mine.to(torch.float32)
    everyone = mine.new_empty(communicator.size * mine.numel())
    communicator.all_gather_list(everyone, mine, label="use counts").wait()
    total = everyone.view(communicator.size, -1).sum(0)
    for note, part in zip(notes, total.split([len(note) for note in notes]), strict=True):
        note.copy_(part)
