"""Checks that copies of weights stay equal, by digests that are compared in some passes.

A write on one rank alone makes copies diverge, and no count of writes tells it from one on all::

    compared in   passes 1, 2, 4, 8, ... and from 1024 on each 1024th
                  the pass after one in which a rank had another number of writes than before

Where digests differ, weights are only in doubt: a pass may have changed them on each rank for
itself (noise, or an ascent step on its own batch) and undo that before the step. So the weights are
compared before the next optimizer step, or some passes later if there is none. Ranks with different
processors may differ by the rounding of many steps: that warns once. A larger difference is an
error on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from meshwright.comm import Communicator, LateNumbers
from meshwright.comm.dtensors.dtensor import local_of
from meshwright.comm.dtensors.subclasses import values_of
from meshwright.comm.failures.sameness import RowDifference, first_difference, refusal
from meshwright.errors import CollectiveMismatchError, warn
from meshwright.gradients import beyond_rounding_first, digest_of_all, digests_of, is_due

BITS = 16
"""Bits of a digest that travel: others differ by chance alone in one of 65,536 comparisons."""
FREE, SHARE = 4, 32
"""Comparisons on request: `FREE` of them, and one more in each `SHARE` passes."""
PATIENCE = 8
"""Passes after which copies in doubt are compared although no optimizer of torch's has stepped."""
ROUNDING = 0.1
"""Of what gradients may differ by: weights add up the rounding of updates, small beside them."""
_NUMBER = (1 << 52) - 1

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

    def __init__(self, named: Callable[[], Sequence[tuple[str, torch.Tensor]]]) -> None:
        self._named = named
        self._late = LateNumbers()
        self.start_over()
        self._may_part = False
        self._said: set[str] = set()

    def start_over(self) -> None:
        """Restart the count of passes, after all ranks were given the same weights."""
        self.passes = 0
        """Passes so far."""
        self._next = 1
        self.digest: torch.Tensor | None = None
        """The digest of the current pass, if it is compared: 64 bits, where the weights lie."""
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
        self.digest = None
        if not compares:
            return
        self.passes += 1
        if self.passes >= self._next:
            self._take()

    def _take(self) -> None:
        self._next = self.passes + 1
        while not is_due(self._next):
            self._next += 1
        digest = self.digest_of_now()
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
        """Compute a digest of all weights, 64 bits on their device; None without weights."""
        return digest_of_all([tensor for _, tensor in self._named()])

    def _digests(self) -> list[tuple[tuple[str, torch.Tensor], torch.Tensor]]:
        named = self._named()
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
        found = self._digests()
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
