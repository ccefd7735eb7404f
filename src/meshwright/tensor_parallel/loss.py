"""Cross entropy of logits whose classes are sharded over ranks; logits are never gathered.

With ``x_c`` the logits of a token, ``y`` its class, ``w`` the weights of classes, ``s`` the
smoothing, ``C`` the number of classes, ``z`` the weight of the z-loss, ``L = log sum_c exp x_c``::

    loss = (1 - s) w_y (L - x_y)  +  s / C sum_c w_c (L - x_c)  +  z w_y L^2

Three all-reduces of one number for each token: the largest logit, the sum of exponentials, ``x_y``;
one more with smoothing. The backward is local: a scaled softmax minus the one-hot target. The
z-loss is that of PaLM (Chowdhery et al., 2022, section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import (
    AtRest,
    is_dtensor,
    known_at_rest,
    mesh_communicators,
    our_placement,
)
from meshwright.comm.dtensors.edges import entered, wrapped
from meshwright.comm.streams import is_host
from meshwright.layout import Partial, Placement, Replicate, Shard, chunk
from meshwright.tensor_parallel.functions import Labels, reduce_from, start_sum
from meshwright.torch_internals.tensors import assert_soon

REDUCTIONS = ("none", "sum", "mean", "sum and count")
_TOTAL = Labels("the loss", "loss and count", "loss and count")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """The options of the loss, and this rank's columns."""

    axis: Communicator
    start: int
    """The class of this rank's first column."""
    classes: int
    """The number of classes; columns beyond it are padding."""
    ignore_index: int
    smoothing: float
    z_loss: float


def cross_entropy_of_parts(
    logits: torch.Tensor,
    target: torch.Tensor,
    axis: Communicator,
    *,
    classes: int | None = None,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    data_axes: Sequence[Communicator] = (),
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `torch.nn.functional.cross_entropy` of this rank's columns of the logits.

    ``logits`` has the shape ``(tokens, columns)`` or ``(batch, columns, ...)``, or ``(columns,)``;
    ``target`` has class indices in that shape without the columns, the same on all ranks of
    ``axis``. The columns are chunks of ``classes``; if they are longer, the vocabulary is padded
    and columns beyond ``classes`` are left out. With None all columns are classes, equally many on
    each rank. ``weight`` has an element for each class. ``z_loss`` is the factor of the squared log
    of the sum of exponentials.

    ``reduction`` is ``"none"``, ``"sum"``, ``"mean"`` over tokens that are not ignored (weighted by
    their classes), or ``"sum and count"``: the pair that `Trainable` takes, which is correct when
    ranks have different numbers of tokens. With ``data_axes`` sums and counts are those of all
    ranks of these axes, one all-reduce for each; the gradient is that of the total.

    The result is float32 for logits of 16 bits. Raises ValueError for shapes that do not fit,
    IndexError for a target that is no class (on a device, a failed assertion).
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"{reduction!r} is not a reduction: expected one of {REDUCTIONS}")
    dim = 0 if logits.ndim == 1 else 1
    expected = (*logits.shape[:dim], *logits.shape[dim + 1 :])
    if target.dtype.is_floating_point or tuple(target.shape) != expected:
        raise ValueError(
            f"expected class indices of shape {expected} as target, found {target.dtype} of shape "
            f"{tuple(target.shape)} (class probabilities are not supported)"
        )
    start, classes = _columns(logits.shape[dim], axis, classes)
    if weight is not None and tuple(weight.shape) != (classes,):
        raise ValueError(f"expected {classes} class weights, found shape {tuple(weight.shape)}")
    check_target(target, classes, ignore_index)
    terms = _Terms(
        axis=axis,
        start=start,
        classes=classes,
        ignore_index=ignore_index,
        smoothing=label_smoothing,
        z_loss=z_loss,
    )
    losses = _TokenLoss.apply(logits.movedim(dim, -1), target, weight, terms)
    if reduction == "none":
        return losses
    return _reduced(losses, _counts(target, weight, terms), reduction, data_axes)


def _columns(found: int, axis: Communicator, classes: int | None) -> tuple[int, int]:
    """Return the class of this rank's first column, and the number of classes."""
    whole = found * axis.size
    if classes is None:
        return axis.rank * found, whole
    start, length = chunk(classes, axis.size, axis.rank)
    if found == length:
        return start, classes
    if whole < classes:
        raise ValueError(
            f"expected rank {axis.rank} of axis {axis.axis} to hold {length} of {classes} classes, "
            f"or padded columns, as many on each rank; found {found}"
        )
    return axis.rank * found, classes


def check_target(target: torch.Tensor, classes: int, ignore_index: int) -> None:
    """Raise IndexError for a target on the host that is no class; on a device, assert it."""
    is_right = ((target >= 0) & (target < classes)) | (target == ignore_index)
    if not is_host(target.device):
        assert_soon(is_right.all())
    elif not is_right.all():
        wrong = target[~is_right][0].item()
        raise IndexError(
            f"Target {wrong} is out of bounds: expected classes from 0 to {classes - 1}, or "
            f"ignore_index={ignore_index}"
        )


def _counts(target: torch.Tensor, weight: torch.Tensor | None, terms: _Terms) -> torch.Tensor:
    """The weight of each token in a mean."""
    kept = target != terms.ignore_index
    return kept if weight is None else kept * _of_target(weight.detach(), target, terms)


def _reduced(
    losses: torch.Tensor,
    counts: torch.Tensor,
    reduction: str,
    data_axes: Sequence[Communicator],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    total, count = losses.sum(), counts.sum().to(losses.dtype)
    for axis in data_axes:
        pair = reduce_from(torch.stack([total, count]), axis, _TOTAL)
        total, count = pair[0], pair[1].detach()
    if reduction == "sum and count":
        return total, count
    return total if reduction == "sum" else total / count


class _TokenLoss(torch.autograd.Function):
    """The loss of each token; classes are the last dim of ``logits``."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        terms: _Terms,
    ) -> torch.Tensor:
        x = _classes(logits, terms)
        largest = largest_of(x, terms.axis)
        exponentials = (x - largest.unsqueeze(-1)).exp_().sum(-1)
        exponentials = _sum(exponentials, terms.axis, "sum of exponentials")
        log_sum = exponentials.log_().add_(largest)
        column = target - terms.start
        is_here = (column >= 0) & (column < x.shape[-1])
        column = column.masked_fill(~is_here, 0).unsqueeze(-1)
        if x.shape[-1]:
            picked = x.gather(-1, column).squeeze(-1).masked_fill_(~is_here, 0)
        else:
            picked = torch.zeros_like(log_sum)
        picked = _sum(picked, terms.axis, "logit of the class")
        kept = (target != terms.ignore_index).to(x.dtype)
        of_class = kept if weight is None else kept * _of_target(weight, target, terms).to(x.dtype)
        loss = (log_sum - picked).mul_(of_class)
        if terms.smoothing:
            own = _own_weights(weight, x, terms)
            smoothed = _sum((x * own).sum(-1), terms.axis, "logits that are smoothed")
            whole = terms.classes if weight is None else weight.sum().to(x.dtype)
            rest = (log_sum * whole - smoothed).mul_(kept)
            loss = (1 - terms.smoothing) * loss + terms.smoothing / terms.classes * rest
        if terms.z_loss:
            loss = loss + terms.z_loss * of_class * log_sum.square()
        ctx.save_for_backward(logits, target, log_sum, of_class)
        ctx.kept = terms, weight  # pyrefly: ignore[missing-attribute]
        return loss

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        logits, target, log_sum, of_class = ctx.saved_tensors  # pyrefly: ignore[missing-attribute]
        terms, weight = ctx.kept  # pyrefly: ignore[missing-attribute]
        x = _classes(logits, terms)
        kept = (target != terms.ignore_index).to(x.dtype)
        picked = (1 - terms.smoothing) * of_class
        scale = picked + 2 * terms.z_loss * of_class * log_sum
        found = (x - log_sum.unsqueeze(-1)).exp_()
        if terms.smoothing:
            whole = terms.classes if weight is None else weight.sum().to(x.dtype)
            share = terms.smoothing / terms.classes * kept
            found.mul_((scale + share * whole).unsqueeze(-1))
            found.sub_(share.unsqueeze(-1) * _own_weights(weight, x, terms))
        else:
            found.mul_(scale.unsqueeze(-1))
        column = target - terms.start
        is_here = (column >= 0) & (column < x.shape[-1])
        if x.shape[-1]:
            column = column.masked_fill(~is_here, 0).unsqueeze(-1)
            found.scatter_add_(-1, column, (-picked * is_here).unsqueeze(-1))
        found.mul_(grad.unsqueeze(-1))
        padding = logits.shape[-1] - x.shape[-1]
        if padding:
            found = functional.pad(found, (0, padding))
        return found.to(logits.dtype), None, None, None


def _classes(logits: torch.Tensor, terms: _Terms) -> torch.Tensor:
    """The columns that are classes, in at least float32."""
    kept = min(max(terms.classes - terms.start, 0), logits.shape[-1])
    x = logits.detach()[..., :kept]
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def largest_of(x: torch.Tensor, axis: Communicator | None) -> torch.Tensor:
    """Compute the largest logit of each row, on all ranks of ``axis`` together."""
    if x.shape[-1]:
        found = x.amax(-1).contiguous()
    else:
        found = x.new_full(x.shape[:-1], -torch.inf)
    if axis is not None and not axis.is_alone:
        with axis.functional():
            axis.all_reduce(found, reduction="max", label="largest logit").wait()
    return found


def _sum(x: torch.Tensor, axis: Communicator, label: str) -> torch.Tensor:
    return start_sum(x.contiguous(), axis, label)()


def _of_target(weight: torch.Tensor, target: torch.Tensor, terms: _Terms) -> torch.Tensor:
    return weight[target.clamp(0, terms.classes - 1)]


def _own_weights(weight: torch.Tensor | None, x: torch.Tensor, terms: _Terms) -> torch.Tensor:
    if weight is None:
        return x.new_ones(x.shape[-1])
    return weight[terms.start : terms.start + x.shape[-1]].to(x.dtype)


# -------------------------------------------------------------------------- DTensors


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Compute cross entropy in the block without gathering logits whose classes are sharded.

    ``torch.nn.functional.cross_entropy`` and ``torch.nn.CrossEntropyLoss`` of a DTensor then use
    `cross_entropy_of_parts`; other inputs are not affected. Exactly one dim of the mesh must shard
    the classes; the others shard or replicate. The target has class indices, replicated over the
    sharding dim: a plain tensor, or a DTensor if another dim shards. The result is a DTensor. A
    mean is over all tokens of the mesh. The backward may run outside of the block.

    Raises ValueError for other placements and for class probabilities.
    """
    with _CrossEntropy():
        yield


class _CrossEntropy(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., torch.Tensor],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        options = kwargs or {}
        given = args[0] if args else options.get("input")
        if func is functional.cross_entropy and is_dtensor(given):
            return _cross_entropy(*args, **options)
        return func(*args, **options)


def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Compute torch's ``cross_entropy`` for logits that are a DTensor."""
    if size_average is not None or reduce is not None:
        raise ValueError("loss_parallel(): give reduction in place of size_average and reduce")
    rest = known_at_rest(input)
    if rest is None:
        raise ValueError(f"expected a DTensor as logits, found {type(input).__name__}")
    dim = 0 if len(rest.shape) == 1 else 1
    own = [our_placement(found, "logits") for found in rest.placements]
    cutting = _cutting(own, dim)
    placed = [
        Replicate() if number == cutting else _without(found, dim)
        for number, found in enumerate(own)
    ]
    axes = mesh_communicators(rest.mesh, "tensor")
    sharding = [axis for axis, found in zip(axes, placed, strict=True) if isinstance(found, Shard)]
    found = cross_entropy_of_parts(
        entered(input),
        _local(target, placed, rest),
        axes[cutting],
        classes=rest.shape[dim],
        weight=None if weight is None else _local(weight, [Replicate()] * len(own), rest),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        data_axes=sharding if reduction == "mean" else (),
    )
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"{reduction!r} is not a reduction: expected none, sum or mean")
    if reduction == "none":
        return wrapped(found, rest.mesh, placed, (*rest.shape[:dim], *rest.shape[dim + 1 :]))
    # Each rank sums other tokens, so the results are summands of the total.
    is_part = reduction == "sum"
    ends = [Partial() if is_part and isinstance(p, Shard) else Replicate() for p in placed]
    return wrapped(found, rest.mesh, ends, ())


def _cutting(placements: Sequence[Placement], dim: int) -> int:
    """The dim of the mesh that shards the classes; ValueError for other placements."""
    cutting = [number for number, found in enumerate(placements) if found == Shard(dim)]
    if len(cutting) != 1:
        raise ValueError(
            f"loss_parallel() requires exactly one mesh dim to shard tensor dimension {dim}, but "
            f"got placements {tuple(placements)} with {len(cutting)} such mesh dim(s)."
        )
    for number, found in enumerate(placements):
        if isinstance(found, Partial):
            raise ValueError(
                "loss_parallel() expects non-TP mesh dims to be Shard or Replicate, got "
                f"{found} at dim {number}."
            )
    return cutting[0]


def _without(placement: Placement, dim: int) -> Placement:
    """The placement after dim ``dim`` of the tensor is removed."""
    if isinstance(placement, Shard) and placement.dim > dim:
        return Shard(placement.dim - 1)
    return placement


def _local(tensor: torch.Tensor, placements: Sequence[Placement], like: AtRest) -> torch.Tensor:
    """The local tensor of ``tensor``; ValueError unless it is placed so on the mesh of ``like``."""
    rest = known_at_rest(tensor)
    if rest is None:
        if any(isinstance(found, Shard) for found in placements):
            raise ValueError(
                "loss_parallel() requires a DTensor (not a plain torch.Tensor) when the derived "
                f"placements {tuple(placements)} contain Shard: wrap it with DTensor.from_local or "
                "distribute_tensor"
            )
        return tensor
    found = [our_placement(each, "target") for each in rest.placements]
    if rest.mesh != like.mesh or found != list(placements):
        raise ValueError(
            f"loss_parallel(): expected a tensor placed {tuple(placements)} on {like.mesh}, found "
            f"{tuple(found)} on {rest.mesh}: redistribute it first"
        )
    return rest.local
