"""Non-finite losses and gradients: all ranks skip or stop together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from meshwright.comm import Communicator
from meshwright.comm.dtensors.sharded_axes import local_part
from meshwright.comm.failures.sameness import told
from meshwright.comm.streams import is_host
from meshwright.errors import NonFiniteError
from meshwright.torch_internals.tensors import foreach_norm


class LossScale:
    """A loss scale, which keeps small gradients of a float16 computation from underflowing.

    The loss is multiplied by ``scale`` before the backward pass, and the gradients by its inverse
    on the way into the reduction. A step whose gradients are not finite on some rank is skipped by
    all ranks and halves the scale; ``interval`` good steps in a row double it.
    """

    def __init__(
        self, initial: float = 65536.0, interval: int = 2000, smallest: float = 1.0
    ) -> None:
        self.scale = initial
        self.interval = interval
        self.smallest = smallest
        """A scale below this means that something else is wrong: then nothing is skipped."""
        self.good_steps = 0

    def update(self, is_finite: bool) -> bool:
        """Adapt the scale to the outcome of a step; returns whether a bad one may be skipped."""
        if is_finite:
            self.good_steps += 1
            if self.good_steps >= self.interval:
                self.scale, self.good_steps = self.scale * 2.0, 0
            return True
        self.scale, self.good_steps = self.scale / 2.0, 0
        return self.scale >= self.smallest

    def state_dict(self) -> dict[str, float]:
        """Return the scale and the count of good steps."""
        return {"scale": self.scale, "good_steps": float(self.good_steps)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


class NonFiniteValues:
    """The gradients of this rank, by name, that were not finite before the reduction.

    Looking reads each element once, without waiting for a device: its flags are read on request.
    """

    def __init__(self) -> None:
        self._found: list[str] = []
        self._unread: list[tuple[Sequence[str], torch.Tensor]] = []

    def clear(self) -> None:
        """Forget what was found."""
        self._found.clear()
        self._unread.clear()

    def look(
        self, line: torch.Tensor, parts: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    ) -> None:
        """Check ``line``, which consists of ``parts()``: names and tensors."""
        if is_host(line.device):
            # A sum of finite values may overflow, so a bad one is a reason to look closer.
            if not math.isfinite(abs(line.sum().item())):
                self._found += [name for name, part in parts() if not torch.isfinite(part).all()]
            return
        rows = [(name, part.detach()) for name, part in parts() if part.numel()]
        if rows:
            largest = torch.stack(foreach_norm([part for _, part in rows], math.inf))
            self._unread.append(([name for name, _ in rows], largest))

    def add_to(self, note: torch.Tensor) -> None:
        """Add a number above 0 to ``note``, a 0-dim tensor, if something was found."""
        if self._found:
            note.add_(1)
        for _, largest in self._unread:
            note.add_(largest.isfinite().logical_not().any())

    def gradients(self) -> list[str]:
        """Describe what was found: ``the gradient of 'layers.0.weight'`` for each name."""
        return [f"the gradient of {name!r}" for name in self.names()]

    def names(self) -> list[str]:
        """Name the gradients that were found, in the order of the checks."""
        for names, largest in self._unread:
            rows = zip(names, largest.isfinite().tolist(), strict=True)
            self._found += [name for name, is_finite in rows if not is_finite]
        self._unread.clear()
        return list(dict.fromkeys(self._found))


UNTOUCHED = "No rank has stepped"
UNWRITTEN = "Its optimizer has written nothing"
ZEROED = "Its gradients were set to zero, and each rank may have made one step with that"


def agree_on_non_finite(
    communicator: Communicator,
    found: Sequence[str],
    *,
    what: str,
    sums: Sequence[str] = (),
    harm: str = UNTOUCHED,
) -> NonFiniteError:
    """Make one error on every rank, naming the first rank and parameter at fault; a collective.

    ``found`` names this rank's parameters whose own gradient was not finite, in order of arrival,
    ``sums`` those whose sum over the ranks is not, as far as this rank holds it. ``what`` describes
    what all ranks have seen, for example "step 12: the gradient norm is nan", and ``harm`` its
    consequence.
    """
    rows = communicator.gather_values([list(found), list(sums)], label="who is not finite")
    overflown = list(dict.fromkeys(name for _, names in rows for name in names))
    by_rank = {rank: names for rank, (names, _) in zip(communicator.ranks, rows, strict=True)}
    return non_finite_error(by_rank, what, overflown, harm)


def non_finite_error(
    found: Mapping[int, Sequence[str]],
    what: str,
    sums: Sequence[str] = (),
    harm: str = UNTOUCHED,
) -> NonFiniteError:
    """Make the error that names what was ``found``, by rank, or else the ``sums``."""
    culprits = {rank: names for rank, names in found.items() if names}
    if not culprits:
        whose = f", that of {sums[0]} first" if sums else ""
        return NonFiniteError(
            f"{what}, although every rank's own values are finite: their sum overflows{whose}. "
            f"Lower the learning rate or the loss, or reduce in a wider dtype. {harm}"
        )
    first = [n[0] + (f" and {len(n) - 1} more" if n[1:] else "") for n in culprits.values()]
    return NonFiniteError(
        f"{what}: not finite: {told(culprits, first)}. {harm}; look at the batches there and the "
        "learning rate"
    )


def non_finite_gradients(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """List the parameters whose gradient is not finite in this rank's part. Sends nothing.

    They are in reverse order of ``named``, the order of a backward pass.
    """
    return [
        name
        for name, parameter in reversed(list(named))
        if parameter.grad is not None
        and not math.isfinite(abs(local_part(parameter.grad).sum().item()))
    ]
