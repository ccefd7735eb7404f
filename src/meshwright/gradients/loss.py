"""Losses: what a loss function may return, and its mean over microbatches and ranks.

A loss function returns a mean, or ``(sum, count)``. Over microbatches and ranks the gradient is
that of the global mean::

    mean           the mean of all means; every microbatch on every rank has equally many terms
    (sum, count)   sum of all sums / sum of all counts

Counts of later microbatches are not known when the first gradients arrive, so gradients of sums add
up on each rank, and the one factor is applied on their way into the reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from meshwright.comm import Communicator, Pending
from meshwright.comm.dtensors.dtensor import is_dtensor
from meshwright.comm.failures.sameness import told
from meshwright.comm.streams import is_host, moved
from meshwright.errors import InternalError
from meshwright.torch_internals.tensors import foreach_mul_
from meshwright.torch_internals.trees import tree_flatten, tree_leaves, tree_unflatten

Factor = float | torch.Tensor
"""A number that gradients are multiplied by: of the host, or 0-dim on their device."""

IGNORED = -100
"""Labels that no loss counts."""
_PRIME = 1_048_573
"""Terms are summed modulo this, so that sums of squares are exact in float64."""


def times(gradient: torch.Tensor, factor: Factor, out: torch.Tensor) -> torch.Tensor:
    """Write ``gradient * factor`` to ``out``, and return that; see `multiply_`."""
    is_narrow = isinstance(factor, torch.Tensor) and gradient.element_size() < 4
    return torch.mul(gradient.float() if is_narrow else gradient, factor, out=out)


@torch.no_grad()
def multiply_(gradients: Sequence[torch.Tensor], factor: Factor) -> None:
    """Multiply ``gradients`` in place; a ``factor`` on a device is rounded to no half precision."""
    if isinstance(factor, torch.Tensor) and any(g.element_size() < 4 for g in gradients):
        for gradient in gradients:
            gradient.copy_(gradient.float().mul_(factor))
    elif isinstance(factor, torch.Tensor) or factor != 1.0:
        foreach_mul_(gradients, factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLoss:
    """The loss of one microbatch on this rank, ready for the backward pass."""

    total: torch.Tensor
    """A sum, or a mean, with its graph."""
    count: torch.Tensor | float
    """The number of terms in the sum; 1 for a mean."""
    is_mean: bool


def read_loss(value: object) -> LocalLoss:
    """Convert the result of a loss function to a `LocalLoss`.

    Raises TypeError for any other result.
    """
    found = type(value).__name__
    is_plain = type(value) is torch.Tensor
    if not is_plain and any(map(is_dtensor, value if isinstance(value, tuple) else (value,))):
        raise TypeError(
            "expected the loss function to return plain tensors, found a DTensor: it reads "
            "parameters that lie in parts over ranks. Take their `full_tensor()` where they are "
            "cut on axis tensor, or compute the term in the model's forward"
        )
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return LocalLoss(total=value.reshape(()), count=1.0, is_mean=True)
        found = f"a tensor of shape {tuple(value.shape)}"
    elif isinstance(value, tuple) and len(value) == 2:
        total, count = value
        found = f"({type(total).__name__}, {type(count).__name__}) of another shape"
        if isinstance(count, torch.Tensor):
            count = count.detach().reshape(()) if count.numel() == 1 else None
        is_sum = isinstance(total, torch.Tensor) and total.numel() == 1
        if is_sum and isinstance(count, torch.Tensor | int | float):
            return LocalLoss(total=total.reshape(()), count=count, is_mean=False)
    raise TypeError(
        "expected the loss function to return a tensor with one element (a mean), or "
        f"(sum, count) with one element each; found {found}"
    )


def call_module(module: Callable[..., object], batch: object) -> object:
    """Call ``module`` on a batch: a sequence holds positional, a mapping keyword arguments."""
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return module(*batch)
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(batch)


def cut_batch(batch: object, target: object, parts: int) -> list[tuple[object, object, int]]:
    """Split tensors along dim 0 into microbatches with targets and sizes; the rest is shared.

    Raises ValueError when the tensors have different lengths, or fewer rows than ``parts``.
    """
    leaves, tree = tree_flatten((batch, target))
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim}
    size = min(sizes, default=1)
    if parts == 1:
        return [(batch, target, size)]
    if len(sizes) != 1 or size < parts:
        raise ValueError(
            f"expected tensors with one length of at least {parts} along dim 0, to be cut into "
            f"accumulate = {parts} microbatches; found lengths {sorted(sizes)}"
        )
    pieces = [
        leaf.tensor_split(parts)
        if isinstance(leaf, torch.Tensor) and leaf.ndim
        else (leaf,) * parts
        for leaf in leaves
    ]
    shares = [size // parts + (number < size % parts) for number in range(parts)]
    return [
        (*tree_unflatten([piece[number] for piece in pieces], tree), share)
        for number, share in enumerate(shares)
    ]


def terms_of(target: object) -> int | torch.Tensor:
    """Count the elements of a ``target``, nested as it is, that a mean is over: -100 is no label.

    On a device a 0-dim tensor, for which no host waits. 0 for what has no tensor.
    """
    terms: int | torch.Tensor = 0
    for leaf in tree_leaves(target):
        if not isinstance(leaf, torch.Tensor):
            continue
        if leaf.dtype != torch.int64 or is_dtensor(leaf):
            terms += leaf.numel()
        else:
            counted = (leaf != IGNORED).sum()
            terms += int(counted) if is_host(leaf.device) else counted
    return terms


def apply_loss(
    loss: Callable[..., object],
    output: object,
    target: object,
    look: Callable[[torch.Tensor, Collection[object]], None] | None = None,
) -> LocalLoss:
    """Compute the loss of one microbatch; without a target the loss function gets none.

    ``look`` is called with the total, and with the autograd nodes of the loss's inputs.
    """
    ends = [
        get_gradient_edge(leaf).node
        for leaf in (*tree_leaves(output), *tree_leaves(target))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    value = loss(output) if target is None else loss(output, target)
    total = value[0] if isinstance(value, tuple) and value else value
    if look is not None and isinstance(total, torch.Tensor):
        look(total, ends)
    return read_loss(value)


def leaves_of(total: torch.Tensor, ends: Collection[object]) -> list[torch.Tensor]:
    """List the leaves that a loss gives gradients to, up to the autograd nodes ``ends``."""
    found: list[torch.Tensor] = []
    seen: set[object] = {None, *ends}
    stack: list[Any] = [total.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        for following, _ in node.next_functions:
            stack.append(following)
    return found


class LossWindow:
    """The losses of all microbatches and ranks that belong to one optimizer step.

    ``add`` each microbatch, ``close`` after the last forward pass, then ``factor`` and ``mean`` are
    those of all ranks. On a device they are tensors, without a host sync; the sums are checked when
    they have reached the host, see `know`.
    """

    WIDTH = 6
    """Numbers that are summed over the ranks: total, count (of means: 1 each), samples and terms of
    means, the squares of these two, and microbatches whose loss is no mean."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._sums = torch.empty(0, dtype=torch.float64, device="cpu")
        """Of all ranks, once they have been reduced."""
        self._sizes: list[tuple[int, int | torch.Tensor]] = []
        """Samples of this rank's microbatches, and terms of means."""
        self._counts = [0.0] * self.WIDTH
        """The numbers of this rank that the host knows; the others are added on the device."""
        self._known_late: dict[int, torch.Tensor] = {}
        """What the host does not know of them, by place; 0 is the sum of this rank's losses."""
        self._pending: Pending | None = None
        self._beside: list[float] = []
        self._totals: list[float] | None = None
        self.is_closed = False
        """True when no more microbatches may be added."""

    @property
    def is_finite(self) -> bool:
        """True when this rank's own losses are finite, regardless of other ranks."""
        return 0 not in self._known_late or math.isfinite(self._known_late[0].item())

    def add(self, loss: LocalLoss, size: int, target: object = None) -> None:
        """Add a microbatch of ``size`` samples; a mean is over the elements of a ``target``."""
        if self.is_closed:
            raise InternalError("a microbatch came after the window of losses was closed")
        # Targets of most means, without a call.
        is_plain = isinstance(target, torch.Tensor) and target.is_floating_point()
        terms = target.numel() if is_plain else terms_of(target) if loss.is_mean else 0
        self._sizes.append((size, terms))
        each = terms % _PRIME
        row = (loss.total, loss.count, size, each, each**2, 0.0 if loss.is_mean else 1.0)
        self._counts[4] += size**2
        for place, number in enumerate(row):
            if isinstance(number, torch.Tensor):
                more = number.detach().to(self._communicator.device, torch.float64)
                before = self._known_late.get(place)
                self._known_late[place] = more if before is None else before + more
            else:
                self._counts[place] += number

    def close(self, beside: Sequence[torch.Tensor] = ()) -> None:
        """Start summing over the ranks, after this rank's last microbatch.

        ``beside`` are other numbers that are summed with it, equally many on all ranks.
        """
        if self._communicator.is_rehearsed and not self._counts[1]:
            self._counts[1] = 1.0  # the ranks that count are missing
        counts = torch.tensor(self._counts, dtype=torch.float64, device="cpu")
        sums = moved(counts, self._communicator.device)
        for place, more in self._known_late.items():
            sums[place] += more
        self._sums = torch.cat([sums, *(n.reshape(1).to(sums) for n in beside)]) if beside else sums
        self._pending = self._communicator.all_reduce(self._sums, label="loss and counts")
        self.is_closed = True

    def factor(self) -> Factor:
        """Compute the factor of the summed gradients: one over the global count.

        Raises ValueError if nothing was counted on any rank; on a device it is infinite then.
        """
        if not self._communicator.is_on_host:
            return self.sums()[1].reciprocal()
        count = self._global()[1]
        if count == 0:
            raise _nothing_counted()
        return 1.0 / count

    def mean(self) -> torch.Tensor:
        """Compute the global mean of the loss, on the communicator's device, in float64."""
        if not self._communicator.is_on_host:
            return self.sums()[0] / self.sums()[1]
        total, count = self._global()[:2]
        return torch.tensor(total / count if count else math.nan, dtype=torch.float64, device="cpu")

    def sums(self) -> torch.Tensor:
        """Return the sums over the ranks; on a device the stream waits for them, not the host."""
        if self._pending is None:
            raise InternalError("the window of losses was read before it was closed")
        self._pending.wait()
        return self._sums

    def know(self, sums: Sequence[float]) -> None:
        """Check ``sums`` that have reached the host. Raises ValueError if they give no mean."""
        self._totals, self._beside = list(sums[: self.WIDTH]), list(sums[self.WIDTH :])
        if sums[1] == 0:
            raise _nothing_counted()
        self.check_sizes()

    def beside(self) -> list[float]:
        """Return the sums over the ranks of the ``beside`` numbers given to `close`."""
        self._global()
        return self._beside

    def check_sizes(self) -> None:
        """Raise ValueError, on every rank, when means over unequally many terms were averaged."""
        _, *numbers, sums = self._totals or self._global()
        # All ranks judge alike, those without a loss too: what follows is a collective.
        if sums:
            return
        batches, samples, terms, squares = map(int, numbers)
        if batches * squares == samples**2 + terms**2:
            return
        own = [(size, int(terms)) for size, terms in self._sizes]
        everyones = self._communicator.gather_values(own, label="batch sizes")
        is_even = len({size for sizes in everyones for size, _ in sizes}) == 1
        each = (", ".join(str(pair[is_even]) for pair in sizes) for sizes in everyones)
        raise ValueError(
            "the loss is a mean, so all microbatches of a step must have equally many "
            f"{'elements of the target (not counting labels of -100)' if is_even else 'samples'}; "
            f"found {told(self._communicator.ranks, each)}. Give every rank an equal share, or "
            "return (sum, count) from the loss function"
        )

    def _global(self) -> list[float]:
        if self._totals is None:
            sums = self.sums().tolist()
            self._totals, self._beside = sums[: self.WIDTH], sums[self.WIDTH :]
        return self._totals


def _nothing_counted() -> ValueError:
    return ValueError(
        "the loss function returned a count of 0 on every rank, so there is no mean: leave out "
        "such batches, or count at least one term"
    )
