"""Cross entropy of the logits of a linear layer, in chunks of rows: no more logits exist at once.

With ``x_c`` the logits of a row (after ``softcap``: ``cap tanh(x / cap)``), ``y`` its label, ``s``
the smoothing, ``C`` the number of classes, ``z`` the weight of the z-loss and
``L = log sum_c exp x_c``, a row adds to the sum::

    loss    = L - (1 - s) x_y - s / C sum_c x_c + z L^2
    d / dx_c = (1 + 2 z L) exp(x_c - L) - s / C - (1 - s) [c = y]

The gradients of hidden states, weight and bias are computed in the forward, chunk by chunk, and
the backward multiplies them by the gradient of the sum. Recomputing the logits of each chunk in
the backward would be a fourth product of matrices beside three: a third more time. It would save
memory of the size of the weight from forward to backward, but a loss comes last, so its backward
follows at once (a pipeline that runs all forwards first has one such buffer a microbatch). The
backward reads no weight, so that a sharded one is gathered once.

Where the weight is split over the vocabulary, each chunk sends its largest logits and their sums,
as `cross_entropy_of_parts` does, and the backward sums the gradient of the hidden states. Chunks
are rows in their order, and add up in it, on every layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import (
    known_at_rest,
    mesh_communicators,
    our_placement,
    torch_placements,
)
from meshwright.comm.dtensors.local_leaves import local_part_of
from meshwright.gradients import IGNORED, mean_axes
from meshwright.layout import Partial, Replicate, Shard
from meshwright.layout import chunk as own_chunk
from meshwright.tensor_parallel.functions import start_sum
from meshwright.tensor_parallel.loss import check_target, largest_of
from meshwright.torch_internals.tracing import not_traced


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """The options of `linear_cross_entropy`."""

    ignore_index: int = IGNORED
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    chunk: int = 1024

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"expected a chunk of at least 1 row, found {self.chunk}")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The classes of a weight, and the axis that they are split over, if any."""

    classes: int
    axis: Communicator | None = None
    name: str = "linear_cross_entropy"
    """Begins the labels of what is sent."""

    @property
    def first(self) -> int:
        """This rank's first class."""
        axis = self.axis
        return 0 if axis is None else own_chunk(self.classes, axis.size, axis.rank)[0]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the cross entropy of ``hidden @ weight.T + bias``: its sum, and the count of labels.

    ``hidden`` has shape ``(..., width)``, ``labels`` class indices of shape ``(...)``, ``weight``
    ``(classes, width)``, ``bias`` ``(classes,)``. Logits of at most ``chunk`` rows exist at once.
    The sum is in nats, over labels other than ``ignore_index``; the count is theirs.
    ``label_smoothing`` is that of `torch.nn.functional.cross_entropy`, ``z_loss`` the factor of the
    squared log of the sum of exponentials (PaLM, Chowdhery et al., 2022, section 5); ``softcap``
    bounds logits by ``cap tanh(x / cap)`` (Gemma 2, 2024, section 2). The sum is in float32 where
    hidden states, or autocast, have 16 bits; with float16 all is computed in float32.

    A weight that `meshwright.tensor_parallel` has split over its classes stays so: hidden states
    and labels are equal on all ranks of that axis, and all of them call this. One that rests in
    shards of `meshwright.fully_shard` is gathered once.

    The gradients are computed in the forward, and one backward hands them out: a second one
    (``retain_graph=True``) and a double backward raise RuntimeError. Raises ValueError for shapes,
    dtypes and placements that do not fit, IndexError for a label that is no class (on a device, a
    failed assertion).

    >>> total, count = linear_cross_entropy(hidden, model.lm_head.weight, labels)
    >>> (total / count).backward()
    """
    options = LossOptions(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        chunk=chunk,
    )
    axis, own_weight, own_bias = local_parts(weight, bias)
    vocabulary = Vocabulary(weight.shape[0], axis)
    return sum_and_count(hidden, own_weight, labels, own_bias, vocabulary, options)


def local_parts(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[Communicator | None, torch.Tensor, torch.Tensor | None]:
    """Return the axis that the classes are split over, and what this rank computes with."""
    rest = known_at_rest(weight)
    if rest is None:
        return None, weight, bias
    axes = mesh_communicators(rest.mesh, "tensor")
    if means := mean_axes((weight,)):
        if any(not axis.is_alone and axis.ranks not in [m.ranks for m in means] for axis in axes):
            raise ValueError(
                "linear_cross_entropy: the weight rests in shards, and is split over another axis "
                f"too ({', '.join(axis.axis for axis in axes)}): call it in the forward of the "
                "weight's unit, as in_chunks(model) does"
            )
        averaged = torch_placements([Partial("avg")] * len(axes))
        whole = [
            None if each is None else each.full_tensor(grad_placements=averaged)  # pyrefly: ignore
            for each in (weight, bias)
        ]
        return None, whole[0], whole[1]  # pyrefly: ignore[bad-return]
    placed = [our_placement(each, "weight") for each in rest.placements]
    if placed not in ([Shard(0)], [Replicate()]):
        raise ValueError(
            "linear_cross_entropy: expected a weight that is split over its classes on one axis, "
            f"Shard(0), found placements {tuple(placed)} on {rest.mesh}"
        )
    own_bias = None if bias is None else local_part_of(bias)
    return axes[0] if placed == [Shard(0)] else None, local_part_of(weight), own_bias


@not_traced
def sum_and_count(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    vocabulary: Vocabulary,
    options: LossOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `linear_cross_entropy`; weight and bias are those of this rank's classes."""
    width = weight.shape[-1]
    if hidden.shape[-1] != width or labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{vocabulary.name}: expected hidden states of shape (..., {width}) and labels of "
            f"shape (...), found {tuple(hidden.shape)} and {tuple(labels.shape)}"
        )
    kind = hidden.device.type
    dtype = hidden.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    elif weight.dtype != dtype:
        raise ValueError(
            f"{vocabulary.name}: expected hidden states and weight of one dtype, found {dtype} "
            f"and {weight.dtype}"
        )
    if dtype == torch.float16:  # whose smallest numbers are larger than most probabilities
        dtype = torch.float32
    rows, target = hidden.reshape(-1, width), labels.reshape(-1).long()
    check_target(target, vocabulary.classes, options.ignore_index)
    needs = tuple(
        torch.is_grad_enabled() and each is not None and each.requires_grad
        for each in (hidden, weight, bias)
    )
    total = _LossOfChunks.apply(rows, weight, bias, target, vocabulary, options, dtype, needs)
    return total, (target != options.ignore_index).sum()


class _LossOfChunks(torch.autograd.Function):
    """The sum of the losses of all rows; its forward computes the gradients."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401 - a node, which has no public type
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        vocabulary: Vocabulary,
        options: LossOptions,
        dtype: torch.dtype,
        needs: tuple[bool, bool, bool],
    ) -> torch.Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        # A second tensor of a chunk's size exists beside these: half of the rows then.
        has_two = dtype != wide or options.softcap is not None
        size = max(min(options.chunk // (2 if has_two else 1), len(hidden)), 1)
        own = weight.to(dtype)
        logits = own.new_empty((size, len(own)), dtype=wide)
        total = own.new_zeros((), dtype=wide)
        of_hidden = own.new_empty(hidden.shape) if needs[0] else None
        of_weight = own.new_zeros(own.shape, dtype=wide) if needs[1] else None
        of_bias = own.new_zeros(len(own), dtype=wide) if needs[2] else None
        with torch.autocast(own.device.type, enabled=False):
            for start in range(0, len(hidden), size):
                here = slice(start, start + size)
                rows = hidden[here].to(dtype)
                x = logits[: len(rows)]
                if dtype == wide:
                    torch.mm(rows, own.t(), out=x)
                else:
                    x.copy_(rows @ own.t())
                if bias is not None:
                    x.add_(bias)
                total.add_(_losses_(x, target[here], vocabulary, options))
                if of_bias is not None:
                    of_bias.add_(x.sum(0))
                x = x.to(dtype)
                if of_hidden is not None:
                    torch.mm(x, own, out=of_hidden[here])
                if of_weight is None:
                    continue
                if dtype == wide:
                    of_weight.addmm_(x.t(), rows)
                else:
                    of_weight.add_(x.t() @ rows)
        # No saved tensors: the backward writes to them, and hands each out once.
        ctx.gradients, ctx.vocabulary = [of_hidden, of_weight, of_bias], vocabulary
        return total

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        grad: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        found: list[torch.Tensor | None] = [None] * 8
        vocabulary: Vocabulary = ctx.vocabulary
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{vocabulary.name}: a second derivative was asked for (create_graph=True), which "
                "a loss in chunks does not have: compute the loss of all logits"
            )
        # A pipeline may ask for the gradient of hidden states first, and later for the others.
        for place, is_wanted in enumerate(ctx.needs_input_grad[:3]):
            if not is_wanted:
                continue
            gradient: torch.Tensor | None = ctx.gradients[place]
            if gradient is None:
                raise RuntimeError(
                    f"{vocabulary.name}: a second backward through one loss: its gradients were "
                    "computed in the forward, and are handed out once. Run the forward again in "
                    "place of retain_graph=True"
                )
            ctx.gradients[place] = None
            found[place] = gradient.mul_(grad)  # autograd casts it to the dtype of the input
            if place == 0 and vocabulary.axis is not None:
                found[0] = start_sum(gradient, vocabulary.axis, f"{vocabulary.name} backward")()
        return tuple(found)


def _losses_(
    x: torch.Tensor, target: torch.Tensor, vocabulary: Vocabulary, options: LossOptions
) -> torch.Tensor:
    """Return the sum of the losses of the logits ``x``, and replace them by its gradient."""
    axis, smoothing, softcap = vocabulary.axis, options.label_smoothing, options.softcap
    is_kept = target != options.ignore_index
    column = target - vocabulary.first
    is_here = is_kept & (column >= 0) & (column < x.shape[1])
    kept, here = is_kept.to(x.dtype), is_here.to(x.dtype)
    column = column.masked_fill(~is_here, 0).unsqueeze(1)
    slope = None
    if softcap is not None:
        x.div_(softcap).tanh_()
        slope = torch.mul(x, x).neg_().add_(1)
        x.mul_(softcap)
    largest = largest_of(x, axis)
    picked = x.gather(1, column).squeeze(1) if x.shape[1] else torch.zeros_like(largest)
    sums = [picked.masked_fill_(~is_here, 0), *([x.sum(1)] if smoothing else [])]
    sums.append(x.sub_(largest.unsqueeze(1)).exp_().sum(1))
    if axis is not None:
        sums = [*start_sum(torch.stack(sums), axis, f"{vocabulary.name} forward")()]
    log_sum = sums[-1].log() + largest
    losses = log_sum - (1 - smoothing) * sums[0] + options.z_loss * log_sum.square()
    if smoothing:
        losses -= smoothing / vocabulary.classes * sums[1]
    factor = (1 + 2 * options.z_loss * log_sum) / sums[-1]
    x.mul_(factor.masked_fill_(~is_kept, 0).unsqueeze(1))
    if smoothing:
        x.sub_((smoothing / vocabulary.classes * kept).unsqueeze(1))
    if x.shape[1]:
        x.scatter_add_(1, column, ((smoothing - 1) * here).unsqueeze(1))
    if slope is not None:
        x.mul_(slope)
    return losses.masked_fill_(~is_kept, 0).sum()
