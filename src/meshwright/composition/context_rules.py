"""Rules of axis context: what of a batch is split, and how a split model is compared."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshwright.comm import Communicator, LateNumbers
from meshwright.comm.streams import moved
from meshwright.composition.whole_run import AxisSplit
from meshwright.context_parallel.attention import Attending, attending
from meshwright.context_parallel.split import ContextSplit, document_lengths
from meshwright.gradients import IGNORED, LocalLoss, terms_of
from meshwright.plan import ContextPlan, Plan
from meshwright.randomness import DimPart, Draws
from meshwright.settings import Problem
from meshwright.torch_internals.trees import tree_flatten, tree_leaves, tree_unflatten

PADDING, LABELS = "attention_mask", "labels"
"""Keys of a batch for a Hugging Face model."""


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """How one batch is split over the ranks of axis context."""

    state: Attending
    dims: Mapping[str, int]
    places: torch.Tensor | None = None
    """Where documents begin; its part goes to the device, so that it may lie on the host."""

    def part(self, value: Any) -> Any:  # noqa: ANN401 - nested as the user has it
        """Return this rank's part of a batch, a target or an output, nested alike."""
        if isinstance(value, Mapping) and self.dims and {*self.dims} <= {*value}:
            return {
                key: self._own(each, self.dims[key]) if key in self.dims else each
                for key, each in value.items()
            }
        leaves, tree = tree_flatten(value)
        length = self.state.split.length
        return tree_unflatten(
            [
                self._own(leaf, 1)
                if isinstance(leaf, torch.Tensor) and leaf.ndim > 1 and leaf.shape[1] == length
                else leaf
                for leaf in leaves
            ],
            tree,
        )

    def _own(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        state = self.state
        part = state.split.part(whole, state.axis.rank, dim)
        part = moved(part, state.axis.device) if whole is self.places else part
        if part.dtype == torch.int64:
            state.parts.append(part)
        return part

    def of_rows(self, start: int, stop: int) -> BatchSplit:
        """How the rows from ``start`` up to ``stop`` are split, as a batch of their own."""
        rows, padding = self.state.split.rows, self.state.padding
        if len(rows) > 1:
            rows = rows[start:stop]
            rows = rows[:1] if len({*rows}) == 1 else rows
        if padding is not None and len(padding) > 1:
            padding = padding[start:stop]
        state = self.state
        own = Attending(state.axis, ContextSplit(rows), state.method, padding, state.parts)
        return BatchSplit(own, self.dims, self.places)

    def watch_loss(self, output: object, target: object, late: LateNumbers) -> None:
        """Refuse, in the backward, a loss that shifts labels inside of this rank's part.

        It gives no last position a gradient, though the label of one counts elsewhere, so that it
        is none that the loss ignores.
        """
        if not isinstance(target, torch.Tensor) or target.dtype != torch.int64:
            return
        shapes = [(x.shape[:2], x) for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
        found = [x for shape, x in shapes if x.ndim == 3 and shape == target.shape]
        if not found or not found[0].requires_grad:
            return
        axis = self.state.axis

        def judge(numbers: list[float]) -> None:
            if numbers[0]:
                raise ValueError(
                    f"axis {axis.axis}: the loss gives the last position of this rank's part no "
                    "gradient, as one that shifts labels itself, whose next label is on another "
                    "rank. Shift labels before: target = labels of the next tokens"
                )

        def look(gradient: torch.Tensor) -> None:
            is_used, last = (gradient != 0).any(-1), target[:, -1]
            is_unused = ~(is_used[:, -1] & (last != IGNORED)).any()
            is_elsewhere = torch.isin(last, target.where(is_used, IGNORED - 1)).any()
            late.look((is_unused & is_elsewhere).reshape(1), judge)

        found[0].register_hook(look)

    @contextlib.contextmanager
    def attending(self, draws: Draws | None = None) -> Iterator[None]:
        """Catch attention of this batch in the block, and drop as the whole batch does."""
        state = self.state
        split, axis = state.split, state.axis
        places = split.positions_on(axis.rank, axis.device)
        own = DimPart(dim=1, index=axis.rank, parts=axis.size, whole=split.length, positions=places)
        with attending(state), contextlib.nullcontext() if draws is None else draws.split(own):
            yield


def split_batch(batch: object, plan: ContextPlan, axis: Communicator) -> BatchSplit:
    """Find how ``batch``, which is equal on all ranks of ``axis``, is split over them.

    Raises ValueError for labels that the model would shift, and where no length is to be found.
    """
    named = batch if isinstance(batch, Mapping) else {}
    if LABELS in named:
        raise ValueError(
            f"axis context = {axis.size}: batch key 'labels' goes to a model that shifts it, and "
            "the last label of a part is on another rank. Give 'shift_labels' "
            "(PackedDataLoader(..., shifted=True)), or take the loss out of the model: "
            "loss(output, target)"
        )
    dims = {} if plan.sequence is None else dict(plan.sequence)
    if unknown := sorted({*dims} - {*named}):
        raise ValueError(
            f"axis context: [context] sequence names {unknown[0]!r}, and the batch has "
            f"{sorted(named) or 'no keys'}"
        )
    lengths = [named[key].shape[dim] for key, dim in dims.items()]
    if not dims:
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        lengths = [each.shape[1] for each in tensors[:1] if each.ndim > 1]
        unclear = [x.shape for x in tensors if lengths and x.shape[1:].count(lengths[0]) > 1]
        if unclear:
            raise ValueError(
                f"axis context = {axis.size}: a tensor of the batch, of shape {tuple(unclear[0])}, "
                f"has the length of the sequences, {lengths[0]}, in several dims. Give a dict, and "
                "name what is split, and its dim, in [context] sequence"
            )
    if len({*lengths}) != 1:
        raise ValueError(
            f"axis context = {axis.size}: expected one length of the sequences, in dim 1 of the "
            f"first tensor of a batch or in [context] sequence, found {lengths or 'none'}"
        )
    places = named.get(plan.documents)
    places = places if isinstance(places, torch.Tensor) and places.ndim == 2 else None
    rows = [lengths] if places is None else document_lengths(places)
    if len({*map(tuple, rows)}) == 1:
        rows = rows[:1]
    how = plan.split
    if how == "auto":
        balanced = "zigzag" if places is None else "documents"
        how = "contiguous" if plan.method == "all-to-all" else balanced
    split = ContextSplit.of(rows, axis.size, how, plan.max_share)
    padding = named.get(PADDING)
    if padding is not None:
        padding = (padding != 0).cpu() if padding.ndim == 2 else None
    return BatchSplit(Attending(axis, split, plan.method, padding), dims, places)


def over_parts(local: LocalLoss, target: object, axis: Communicator) -> LocalLoss:
    """Add up the loss of all parts of one batch. Collective; without gradients.

    A mean weighs as many elements as the ``target`` of its part has, and nothing without any.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=axis.device)
    sums[0] += local.total.detach()
    sums[1] += terms_of(target) if local.is_mean else local.count
    if local.is_mean:
        sums[0] = torch.where(sums[1] > 0, sums[0] * sums[1], 0.0)
    axis.all_reduce(sums, label="loss of all parts").wait()
    return replace(local, total=sums[0], count=sums[1])


def context_split(
    axis: Communicator,
    judges: Communicator,
    batch: BatchSplit,
    draws: Draws | None,
    inside: AxisSplit | None,
) -> AxisSplit:
    """How axis context splits a model on the example ``batch``; ``inside``: one with experts."""
    text = f"axis context: split over {axis.size} ranks, the model's outputs differ on the example"
    remedy, across = "Exclude such layers or set axis context = 1", ""
    if any(len(row.ends) > 1 for row in batch.state.split.rows):
        across = '; for a model that attends across documents, set documents = "none" in [context]'

    def explain(model: nn.Module, run: Callable[[bool], object]) -> Iterator[str]:
        found = first_mixing(model, batch, run)
        if found is not None:
            name, module, error = found
            what = f"({type(module).__name__}; relative error {error:.2g})"
            if not name:
                yield (
                    f"{text}, and all its modules agree: the model itself {what} computes over "
                    "positions. Take a loss out of it: loss(output, target)"
                )
                return
            yield (
                f"{text}, first in {name!r} {what}, which mixes positions without attention. "
                f"{remedy}{across}"
            )

    split = inside or AxisSplit(
        axis=axis,
        judges=judges,
        setting="axis context",
        on_shapes="Each rank computes its positions of every sequence: return a row for each",
        on_outputs=f"a layer mixes positions without attention. {remedy}",
        on_gradients=f"A layer mixes positions without attention. {remedy}",
    )
    return replace(
        split,
        inputs=batch.part,
        part=batch.part,
        computing=functools.partial(batch.attending, draws),
        explain=explain,
        sums=(*split.sums, axis),
    )


def context_problems(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """Yield what axis context cannot do with ``model`` and the rest of ``plan``."""
    if plan.axes.size("context") == 1:
        return
    for name, module in model.named_modules():
        p = getattr(module, "attention_dropout", None)
        if isinstance(p, float) and p:
            yield Problem(
                ("axes", "context"),
                f"axis context: attention of {name!r} uses attention dropout (p = {p}), which "
                "cannot match one process. Set it to 0",
            )


def first_mixing(
    model: nn.Module, batch: BatchSplit, run: Callable[[bool], object]
) -> tuple[str, nn.Module, float] | None:
    """Find the first module whose output on this rank's part is not the part of its output.

    ``run`` runs the model on the whole example, or on this rank's part of it. Returns its name, it,
    and the relative error. All ranks of the axis call this.
    """
    wholes: dict[str, list[list[torch.Tensor]]] = {}  # of each call in order
    found: list[tuple[str, nn.Module, float]] = []

    def keep(name: str, module: nn.Module, given: object, output: object) -> None:
        call = [t.detach() for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        wholes.setdefault(name, []).append(call)

    def look(name: str, module: nn.Module, given: object, output: object) -> None:
        mine = [t.detach() for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        whole = wholes[name].pop(0) if wholes.get(name) else ()
        for one, other in zip(whole, mine, strict=False):
            part = batch.part(one)
            if part.shape == other.shape and part.is_floating_point():
                error = float((part - other).norm() / part.norm().clamp(min=1e-30))
                if error > _ROUNDING[part.dtype.itemsize]:
                    found.append((name, module, error))

    for is_part, hook in ((False, keep), (True, look)):
        handles = [
            part.register_forward_hook(functools.partial(hook, name))
            for name, part in model.named_modules()
        ]
        try:
            with torch.no_grad():
                run(is_part)
        finally:
            for handle in handles:
                handle.remove()
    return found[0] if found else None


_ROUNDING = {8: 1e-9, 4: 1e-3, 2: 0.1}
"""Relative errors of layers by the bytes of a number, above which a layer computes other values."""
