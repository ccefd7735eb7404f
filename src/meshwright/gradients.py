"""What happens to gradients over all axes: the loss they are of, their norm, clipping, the stop.

The loss contract. A loss function returns a mean, or ``(sum, count)``. Over microbatches and ranks
the gradient is that of the global mean::

    mean           the mean of all means; every microbatch on every rank must be equally large
    (sum, count)   sum of all sums / sum of all counts

Counts of later microbatches are not known when the first gradients arrive, so gradients of sums
gather on each rank, and the one factor is applied on their way into the reduction.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshwright.comm import Communicator, Pending
from meshwright.comm.spread import check_meshes, is_distributed, local_part, spread_of
from meshwright.errors import InternalError, NonFiniteError

__all__ = [
    "LocalLoss",
    "LossScale",
    "LossWindow",
    "SpreadGradients",
    "agree_on_non_finite",
    "apply_loss",
    "call_module",
    "clip_grad_norm_",
    "cut_batch",
    "global_norm",
    "group_by_spread",
    "read_loss",
    "scale_to_norm",
]

NORM_ROW = 65536
"""Elements whose norm is taken at once: longer sums in float32 lose digits on a CPU."""


# ------------------------------------------------------------------------------- norm and clip


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadGradients:
    """Gradients of which each rank of ``communicators`` holds other elements.

    Without communicators every rank holds the whole, as after an all-reduce.
    """

    gradients: tuple[torch.Tensor, ...]
    communicators: tuple[Communicator, ...] = ()
    dtype: torch.dtype = torch.float32
    """At least how wide the norm is, also on a rank that has no gradient here."""


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their joint norm is at most ``max_norm``; returns the old norm.

    It is the norm one process would find, for any mix of plain parameters, flat shards and
    DTensors: parts of a gradient are summed over the axes on which it is sharded, and it counts
    once on axes that replicate it and where it is used in several places. Every rank calls this
    with the same parameters in the same order; a gradient may be None on some. The norm is a plain
    tensor on the gradients' device; one reduction is made for each axis that shards.

    Raises RuntimeError when the norm is not finite and ``error_if_nonfinite`` is set, ValueError
    for a negative ``max_norm``, `LayoutError` for DTensors that cannot be combined.

    >>> clip_grad_norm_(model, 1.0)
    >>> clip_grad_norm_(model.parameters(), 1.0, norm_type=math.inf)
    """
    if max_norm < 0:
        raise ValueError(f"expected max_norm >= 0, found {max_norm}")
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = (parameters,)
    spread = group_by_spread(parameters)
    norm = global_norm(spread, norm_type)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(
            f"the gradient norm of order {norm_type} is {norm.item()}, so gradients cannot be "
            "clipped. Find what overflows, or pass error_if_nonfinite=False"
        )
    scale_to_norm([gradient for group in spread for gradient in group.gradients], norm, max_norm)
    return norm


def group_by_spread(parameters: Iterable[torch.Tensor]) -> list[SpreadGradients]:
    """This rank's parts of the gradients of ``parameters``, by the axes they lie spread over.

    The groups and their order follow from the parameters alone, so they are equal on all ranks
    also where a gradient is None. A parameter that comes twice counts once.
    """
    once = list({id(parameter): parameter for parameter in parameters}.values())
    check_meshes(once)
    groups: dict[tuple[Communicator, ...], list[torch.Tensor]] = {}
    dtypes: dict[tuple[Communicator, ...], torch.dtype] = {}
    for parameter in once:
        gradient = parameter.grad
        communicators = spread_of(parameter)
        if gradient is not None and is_distributed(gradient):
            communicators = spread_of(gradient)  # a plain one lies as its parameter does
        group = groups.setdefault(communicators, [])
        if gradient is not None and gradient.is_sparse:
            # Each row once, or parts of a sum would count as if they stood alone.
            parameter.grad = gradient.coalesce()
            group.append(parameter.grad.values())
        elif gradient is not None:
            group.append(local_part(gradient))
        known = dtypes.get(communicators, torch.float32)
        dtypes[communicators] = torch.promote_types(known, parameter.dtype)
    return [
        SpreadGradients(
            gradients=tuple(gradients), communicators=communicators, dtype=dtypes[communicators]
        )
        for communicators, gradients in groups.items()
    ]


def global_norm(spread: Sequence[SpreadGradients], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of order ``norm_type`` of all gradients together, over all axes, as a 0-dim tensor.

    Every rank of the axes calls it with the same number of groups, in the same order. The groups
    that lie spread over one axis are reduced over it together.
    """
    parts = [_local_norm(group.gradients, norm_type) for group in spread]
    axes = list(dict.fromkeys(c for group in spread for c in group.communicators))
    if not axes:
        if len(parts) <= 1:
            return parts[0] if parts else torch.zeros(())
        return _norm_of_norms([part.to(parts[0].device) for part in parts], norm_type)
    widest = functools.reduce(
        torch.promote_types, [*(part.dtype for part in parts), *(group.dtype for group in spread)]
    )
    # Powers of a float32 norm overflow where the norm itself does not.
    norms = torch.stack([part.to(axes[0].device, torch.float64) for part in parts])
    for axis in axes:
        mine = [number for number, group in enumerate(spread) if axis in group.communicators]
        if math.isinf(norm_type):
            # The maximum of a NaN and a number is the number on some backends.
            is_nan = norms[mine].isnan()
            both = torch.cat([norms[mine].masked_fill(is_nan, 0.0), is_nan.double()])
            axis.all_reduce(both, reduction="max", label="gradient norm").wait()
            reduced, seen = both.chunk(2)
            reduced = reduced.masked_fill(seen > 0, math.nan)
        else:
            powers = norms[mine].pow(norm_type)
            axis.all_reduce(powers, label="gradient norm").wait()
            reduced = powers.pow(1.0 / norm_type)
        norms[mine] = reduced
    return torch.linalg.vector_norm(norms, norm_type).to(widest)


@torch.no_grad()
def scale_to_norm(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Multiply ``gradients`` in place by ``max_norm / norm`` where that is less than one."""
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if coefficient.device.type == "cpu" and coefficient.item() == 1.0:
        return
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, group in by_device.items():
        torch._foreach_mul_(group, coefficient.to(device))


@torch.no_grad()
def _local_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    norms: list[torch.Tensor] = []
    for gradient in gradients:
        if gradient.numel() > NORM_ROW and gradient.is_contiguous():
            rows = gradient.numel() // NORM_ROW
            flat = gradient.view(-1)
            whole = flat[: rows * NORM_ROW].view(rows, NORM_ROW)
            wide = torch.float32 if gradient.dtype.itemsize < 4 else None
            rows_norm = torch.linalg.vector_norm(whole, norm_type, dim=1, dtype=wide)
            norms.append(_norm_of_norms(rows_norm, norm_type))
            gradient = flat[rows * NORM_ROW :]
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (_, dtype), group in by_kind.items():
        wide = torch.float32 if dtype.itemsize < 4 else None
        filled = [g for g in group if g.numel()]
        if filled:
            norms.extend(torch._foreach_norm(filled, norm_type, dtype=wide))
    if not norms:
        return torch.zeros(())
    device = norms[0].device
    return _norm_of_norms([norm.to(device) for norm in norms], norm_type)


def _norm_of_norms(norms: torch.Tensor | Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    if not isinstance(norms, torch.Tensor):
        widest = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
        norms = torch.stack([norm.to(widest) for norm in norms])
    return torch.linalg.vector_norm(norms, norm_type)


# -------------------------------------------------------------------------------- loss contract


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLoss:
    """The loss of one microbatch on this rank, ready for the backward pass."""

    total: torch.Tensor
    """A sum, or a mean, with its graph."""
    count: torch.Tensor | float
    """How many terms the sum has; 1 for a mean."""
    is_mean: bool


def read_loss(value: object) -> LocalLoss:
    """What a loss function returned, as one form. Raises TypeError when it keeps no contract."""
    found = type(value).__name__
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return LocalLoss(total=value.reshape(()), count=1.0, is_mean=True)
        found = f"a tensor of shape {tuple(value.shape)}"
    elif isinstance(value, tuple) and len(value) == 2:
        total, count = value
        if isinstance(count, torch.Tensor) and count.numel() == 1:
            count = count.detach().reshape(())
        if (
            isinstance(total, torch.Tensor)
            and total.numel() == 1
            and isinstance(count, torch.Tensor | int | float)
            and (not isinstance(count, torch.Tensor) or count.numel() == 1)
        ):
            return LocalLoss(total=total.reshape(()), count=count, is_mean=False)
        found = f"({type(total).__name__}, {type(count).__name__}) of another shape"
    raise TypeError(
        "expected the loss function to return a tensor with one element (a mean), or "
        f"(sum, count) with one element each; found {found}"
    )


def call_module(module: Callable[..., object], batch: object) -> object:
    """Call ``module`` on a batch: a sequence is its arguments, a mapping its keyword arguments."""
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return module(*batch)
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(batch)


def cut_batch(batch: object, target: object, parts: int) -> list[tuple[object, object, int]]:
    """Microbatches with their targets and sizes: tensors are cut along dim 0, the rest is shared.

    Raises ValueError when the tensors have different lengths, or less than ``parts``.
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


def apply_loss(loss: Callable[..., object], output: object, target: object) -> LocalLoss:
    """The loss of one microbatch; a loss function gets no target where there is none."""
    return read_loss(loss(output) if target is None else loss(output, target))


class LossWindow:
    """The losses of all microbatches and ranks that belong to one optimizer step.

    ``add`` each microbatch, ``close`` after the last forward pass, then ``factor`` and ``mean``
    hold for all ranks.
    """

    WIDTH = 6
    """Numbers that are summed over the ranks: total, count, microbatches, samples, squares, and
    microbatches whose loss is no mean."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._sums = torch.zeros(self.WIDTH, dtype=torch.float64, device=communicator.device)
        self._sizes: list[int] = []
        self._own: torch.Tensor | None = None
        self._pending: Pending | None = None
        self._totals: list[float] | None = None

    @property
    def is_closed(self) -> bool:
        """Whether no more microbatches may be added."""
        return self._pending is not None

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been added."""
        return not self._sizes

    @property
    def is_finite(self) -> bool:
        """Whether this rank's own losses are finite, whatever those of other ranks are."""
        return self._own is None or math.isfinite(self._own[0].item())

    def add(self, loss: LocalLoss, size: int) -> None:
        """Count in a microbatch of ``size`` samples."""
        if self.is_closed:
            raise InternalError("a microbatch came after the window of losses was closed")
        self._sizes.append(size)
        counts = [0.0, 0.0, 1.0, size, size * size, 0.0 if loss.is_mean else 1.0]
        numbers = torch.tensor(counts, dtype=torch.float64)
        row = numbers.to(self._sums.device)
        row[0] = loss.total.detach()
        row[1] = loss.count
        self._sums += row

    def close(self) -> None:
        """Start summing over the ranks; this rank's last microbatch is in."""
        self._own = self._sums.clone()
        self._pending = self._communicator.all_reduce(self._sums, label="loss and counts")

    def factor(self) -> float:
        """What the summed gradients are multiplied by: one over the global count.

        Raises ValueError when nothing was counted on any rank.
        """
        count = self._global()[1]
        if count == 0:
            raise ValueError(
                "the loss function returned a count of 0 on every rank, so there is no mean: "
                "leave out such batches, or count at least one term"
            )
        return 1.0 / count

    def mean(self) -> torch.Tensor:
        """The global mean of the loss, on the CPU, in float64."""
        total, count = self._global()[:2]
        return torch.tensor(total / count if count else math.nan, dtype=torch.float64)

    def check_sizes(self) -> None:
        """Raise ValueError, on every rank, when means of batches of unequal size were averaged."""
        _, _, batches, samples, squares, sums = self._global()
        # All ranks judge alike, those without a loss too: what follows is a collective.
        if sums or batches * squares == samples * samples:
            return
        mine = json.dumps(self._sizes).encode()
        sizes = self._communicator.gather_bytes(mine, label="batch sizes")
        found = "; ".join(
            f"rank {rank}: {', '.join(map(str, json.loads(text)))}"
            for rank, text in zip(self._communicator.ranks, sizes, strict=True)
        )
        raise ValueError(
            "the loss is a mean, so all microbatches of a step must have equally many samples; "
            f"found {found}. Give every rank an equal share, or return (sum, count) from the loss "
            "function"
        )

    def _global(self) -> list[float]:
        if self._totals is None:
            if self._pending is None:
                raise InternalError("the window of losses was read before it was closed")
            self._pending.wait()
            self._totals = self._sums.tolist()
        return self._totals


# ------------------------------------------------------------------------------ non-finite stop


class LossScale:
    """Keeps small gradients of a float16 computation from vanishing.

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
        """Take in how a step went; returns whether a bad one may be skipped."""
        if is_finite:
            self.good_steps += 1
            if self.good_steps >= self.interval:
                self.scale, self.good_steps = self.scale * 2.0, 0
            return True
        self.scale, self.good_steps = self.scale / 2.0, 0
        return self.scale >= self.smallest

    def state_dict(self) -> dict[str, float]:
        """Scale and count of good steps."""
        return {"scale": self.scale, "good_steps": float(self.good_steps)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` returned."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


def agree_on_non_finite(
    communicator: Communicator, found: Sequence[str], *, what: str
) -> NonFiniteError:
    """The same error on every rank, naming the first rank and parameter that broke the step.

    ``found`` names this rank's parameters whose own gradient was not finite, in order of arrival,
    and ``what`` says what all ranks have seen, for example "step 12: the gradient norm is nan".
    """
    texts = communicator.gather_bytes(json.dumps(list(found)).encode(), label="who is not finite")
    culprits = {
        rank: json.loads(text)
        for rank, text in zip(communicator.ranks, texts, strict=True)
        if json.loads(text)
    }
    if not culprits:
        return NonFiniteError(
            f"{what}, although every rank's own values are finite: their sum overflows. Lower the "
            "learning rate or the loss, or reduce in a wider dtype. No rank has stepped"
        )
    rank, names = next(iter(culprits.items()))
    others = [other for other in culprits if other != rank]
    also = f"; also on rank {', '.join(map(str, others))}" if others else ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return NonFiniteError(
        f"{what}: on rank {rank} {names[0]}{more} is not finite{also}. No rank has stepped; "
        "look at that rank's batch and at the learning rate"
    )
