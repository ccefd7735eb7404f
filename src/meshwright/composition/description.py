"""Descriptions of layouts: parameters, collectives of one step, settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import is_replicated, known_at_rest
from meshwright.data_parallel import Replica
from meshwright.data_parallel.shards.unit import Unit
from meshwright.gradients import LossWindow
from meshwright.plan import Plan
from meshwright.timeline import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """The placement of one parameter, and how its gradient is reduced."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: str
    """The placement on the ranks of each axis, such as ``replicate(4)``."""
    bucket: int | None
    """The bucket that its gradient is reduced in; None when it is frozen, belongs to a unit, or no
    other rank has it."""
    unit: str | None = None
    """The unit that it is gathered and reduced with; None for a replicated parameter."""
    is_trained: bool = True
    """True when it has a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The result of `Trainable.describe`; its ``str()`` is a page of text."""

    rank: int
    parameters: tuple[ParameterRow, ...]
    collectives: tuple[Collective, ...]
    """The collectives of one optimizer step on this rank: over data axes, with buckets in launch
    order, then of modules over axis tensor, pass by pass, then of the gradient norm."""
    settings: tuple[str, ...]
    """One line for each setting of the plan, with its effect."""

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.parameters), default=0)
        total = sum(collective.bytes for collective in self.collectives)
        lines = [f"rank {self.rank}", "parameters:"]
        for row in self.parameters:
            where = "no data axis" if row.is_trained else "frozen"
            if row.bucket is not None:
                where = f"bucket {row.bucket}"
            if row.unit is not None:
                where = f"unit {row.unit}"
            lines.append(
                f"  {row.name:<{width}}  {row.dtype} {row.shape}  {row.placement}, {where}"
            )
        lines.append(f"collectives of one step ({total} bytes):")
        counts = Counter(replace(each, sequence=0) for each in self.collectives)
        lines += [
            f"  {count} x {_said(each)}: {each.bytes} bytes each" for each, count in counts.items()
        ]
        lines.append("settings:")
        lines += [f"  {line}" for line in self.settings]
        return "\n".join(lines)


def describe_replicated(module: nn.Module, plan: Plan, replica: Replica) -> Description:
    """Describe a replicated module."""
    axis = replica.communicator
    bucket_of = {
        slot.name: layout.index for layout in replica.reducer.layouts for slot in layout.slots
    }
    return Description(
        rank=axis.rank,
        parameters=_rows(module, f"{axis.axis}({axis.size})", bucket_of),
        collectives=tuple(_step_collectives(axis, replica)),
        settings=tuple(_settings(plan, axis)),
    )


def describe_lone(module: nn.Module, rank: int) -> Description:
    """Describe a module without collectives over data axes."""
    return Description(
        rank=rank, parameters=_rows(module, "whole", {}), collectives=(), settings=()
    )


def _rows(
    module: nn.Module, placement: str, bucket_of: Mapping[str, int]
) -> tuple[ParameterRow, ...]:
    return tuple(
        ParameterRow(
            name=name,
            shape=tuple(parameter.shape),
            dtype=_dtype_name(parameter.dtype),
            placement=f"{placement}{_cut_of(parameter)}",
            bucket=bucket_of.get(name),
            is_trained=parameter.requires_grad,
        )
        for name, parameter in module.named_parameters()
    )


def _cut_of(parameter: torch.Tensor) -> str:
    """The placement of ``parameter`` on axis tensor, as a suffix to that on the data axes."""
    known = known_at_rest(parameter)
    if known is None or "tensor" not in (known.mesh.mesh_dim_names or ()):
        return ""
    number = (known.mesh.mesh_dim_names or ()).index("tensor")
    placement = known.placements[number]
    what = "whole" if is_replicated(placement) else f"dim {getattr(placement, 'dim', 0)} cut"
    return f", tensor({known.mesh.size(number)}) {what}"


def describe_sharded(
    module: nn.Module,
    plan: Plan,
    units: Sequence[Unit],
    everyone: Communicator,
    *,
    has_buffers: bool,
) -> Description:
    """Describe a sharded module."""
    cuts = {name: _cut_of(parameter) for name, parameter in module.named_parameters()}
    rows: list[ParameterRow] = []
    collectives: list[Collective] = []
    for unit in units:
        placement = ", ".join(f"{axis.axis}({axis.size})" for axis in unit.communicators)
        for group in unit.groups:
            layout = group.buffer.layout
            rows += [
                ParameterRow(
                    name=name,
                    shape=shape,
                    dtype=_dtype_name(group.types.master),
                    placement=f"{placement}{cuts.get(name, '')}",
                    bucket=None,
                    unit=unit.name,
                )
                for slot, shape in zip(group.slots, layout.shapes, strict=True)
                for name in slot.names[:1]
            ]
        collectives += _unit_collectives(unit)
    return Description(
        rank=everyone.rank,
        parameters=tuple(rows),
        collectives=tuple(
            replace(each, sequence=number) for number, each in enumerate(collectives)
        ),
        settings=(
            f"axes: parameters are sharded over {units[0].groups[0].axes.parts} ranks; each of "
            f"{everyone.size} trains on 1/{plan.data_size} of a batch",
            *list(_settings(plan, everyone))[2:],
            *(("buffers are those of rank 0 after each step",) if has_buffers else ()),
        ),
    )


def _unit_collectives(unit: Unit) -> Iterator[Collective]:
    """Yield a gather before the forward, one before the backward unless kept, and reductions.

    Groups over the same ranks share one launch.
    """
    trainable = [group for group in unit.groups if group.is_trainable]
    gathers = [(g.axes.shard, g.buffer.gathered, g.types.compute) for g in unit.groups]
    sums = [(g.axes.shard, sum(line.numel for line in g.lines), g.types.reduce) for g in trainable]
    further = [
        (axis, g.buffer.layout.shard_size, g.types.reduce, "replicate")
        for g in trainable
        if (axis := g.axes.replicate) is not None
    ]
    found = [("all_gather", *each, "unshard") for each in _joined(gathers)]
    if not unit.settings.keep_full_after_forward:
        found *= 2
    found += [("reduce_scatter", *each, "reduce") for each in _joined(sums)]
    found += [("all_reduce", *each) for each in further]
    for kind, axis, numel, dtype, why in found:
        yield Collective(
            kind=kind,
            axis=axis.axis,
            shape=(numel,),
            dtype=_dtype_name(dtype),
            reduction=None if kind == "all_gather" else "sum",
            label=f"{why} {unit.name}",
            sequence=0,
        )


def _joined(
    amounts: Iterable[tuple[Communicator | None, int, torch.dtype]],
) -> Iterator[tuple[Communicator, int, torch.dtype]]:
    """Sum elements by communicator; bytes for a communicator with several dtypes."""
    by_axis: dict[Communicator, list[tuple[int, torch.dtype]]] = {}
    for axis, numel, dtype in amounts:
        if axis is not None:
            by_axis.setdefault(axis, []).append((numel, dtype))
    for axis, found in by_axis.items():
        dtypes = {dtype for _, dtype in found}
        if len(dtypes) == 1:
            yield axis, sum(numel for numel, _ in found), found[0][1]
        else:
            yield axis, sum(numel * dtype.itemsize for numel, dtype in found), torch.uint8


def _step_collectives(axis: Communicator, replica: Replica) -> Iterator[Collective]:
    shapes = [("loss and counts", LossWindow.WIDTH, "float64")]
    shapes += [(x.label, x.numel, _dtype_name(x.dtype)) for x in replica.reducer.layouts]
    for sequence, (label, numel, dtype) in enumerate(shapes):
        yield Collective(
            kind="all_reduce",
            axis=axis.axis,
            shape=(numel,),
            dtype=dtype,
            reduction="sum",
            label=label,
            sequence=sequence,
        )
    buffers = replica.buffers.look().values()
    if buffers:
        yield Collective(
            kind="broadcast",
            axis=axis.axis,
            shape=(sum(buffer.nbytes for buffer in buffers),),
            dtype="uint8",
            peer=0,
            label="broadcast buffers",
            sequence=len(shapes),
        )


def _settings(plan: Plan, axis: Communicator) -> Iterator[str]:
    train, precision = plan.train, plan.precision
    share = f"1/{plan.data_size} of a batch"
    yield f"axes: {axis.size} ranks hold the whole model, each trains on {share}"
    yield (
        f"buckets.cap_mb = {plan.buckets.cap_mb:g}: gradients are reduced in buckets of about that "
        "size, the first of at most 1"
    )
    yield (
        f"train.accumulate = {train.accumulate}: each rank's share is trained on in "
        f"{train.accumulate} parts; gradients are reduced once, after the last"
    )
    if train.clip_norm is None:
        yield "train.clip_norm is not set: gradients are not clipped, only their norm is computed"
    else:
        yield f"train.clip_norm = {train.clip_norm:g}: gradients are scaled to at most that 2-norm"
    if train.recompute:
        names = ", ".join(train.recompute)
        yield f"train.recompute = {names}: activations of these modules are recomputed"
    if train.compile:
        yield "train.compile = true: modules run as graphs; the loss and the optimizer do not"
    if train.loss_chunk is not None:
        yield (
            f"train.loss_chunk = {train.loss_chunk}: the head computes the loss of as many rows of "
            "logits at a time; over axis tensor each chunk sends their largest and their sums"
        )
    if train.batch_norm is not None:
        yield f"train.batch_norm = {train.batch_norm}: {_STATISTICS[train.batch_norm]}"
    if train.dropout == "global":
        yield "train.dropout = global: masks are those of one process, by step and sample"
    if train.flat:
        yield "train.flat = true: the optimizer gets a few 1-D parameters, see flat_groups"
    yield (
        f"train.seed = {train.seed}: the order of samples, and starting values of a model that is "
        "given on the meta device"
    )
    yield (
        f"precision: compute in {precision.compute or 'the dtype of the parameters'}, reduce in "
        f"{precision.reduce or 'the dtype of the parameters'}"
    )
    if precision.needs_loss_scaling:
        yield "precision: the loss is scaled, and steps that overflow are skipped by all ranks"


_STATISTICS = MappingProxyType(
    {
        "local": "each rank normalizes by its own share; running statistics are those of rank 0",
        "sync": "each BatchNorm gathers statistics in every forward pass and reduces their "
        "gradients in every backward pass, in addition to the collectives above",
    }
)


def _said(each: Collective) -> str:
    return str(each).replace(f" #{each.sequence}", "", 1)


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
