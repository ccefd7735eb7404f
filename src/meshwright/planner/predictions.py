"""A step of any traced model over data axes: seconds by lane, bytes by category, the best plan.

Operations and kept bytes are those of the trace, rates and collectives those of the hardware file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.axes import Axes
from meshwright.errors import PlanError
from meshwright.plan import Plan, match_names
from meshwright.planner.hardware import Hardware
from meshwright.planner.memory import GIB, USABLE
from meshwright.planner.network import Group
from meshwright.planner.steps import beside
from meshwright.planner.traced import ModelTrace
from meshwright.planner.utilization import work_of
from meshwright.precision import dtype_bytes

_TOUCHES = 6
"""Times that an eager step reads or writes what its forward keeps."""
_KERNELS = 9
"""Kernels of a module, forward and backward."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a rank does in a step, and holds."""

    plan: Plan
    lanes: Mapping[str, float]
    """Seconds in which each lane of the timeline is busy: ``compute`` from the forward to the
    optimizer, with the collectives that it waits for."""
    memory: Mapping[str, float]
    """Bytes: parameters, gradients, optimizer (AdamW's), units (gathered ones), activations."""
    total: float
    """Bytes at the peak, with a recomputed block and gradients that are not yet scattered."""

    def __str__(self) -> str:
        train = self.plan.train
        again = f", recompute {', '.join(train.recompute)}" if train.recompute else ""
        return (
            f"{self.plan.axes}, accumulate {train.accumulate}{again}: predicted "
            f"{self.lanes['compute']:.3g} s a step, {self.total / 2**20:,.1f} MiB of tensors a rank"
        )


def predict(trace: ModelTrace, plan: Plan, machine: Hardware) -> Prediction:
    """Predict a step in which each rank of ``plan`` trains on a batch like that of ``trace``.

    Raises ``PlanError`` for axes other than replicate and shard.
    """
    _check_axes(plan)
    constants, passes = machine.constants, plan.train.accumulate
    shards, reshards = plan.axes.size("shard"), plan.shard.reshard_after_forward
    dtypes = plan.precision.resolved()
    master, size, summed = (
        dtype_bytes(str(each)) for each in (dtypes.parameters, dtypes.compute, dtypes.reduce)
    )
    patterns = plan.train.recompute
    recomputed = [name for each in patterns for name in match_names(each, trace.inputs)]
    # A product of smallest dim s has s / (s + half) of the largest rate.
    slower = [1 + constants.half_size / max(1, *unit.shape[-1:]) for unit in trace.units]
    work = work_of(trace.flops, recomputed)
    again = work.again / max(1.0, work.forward)
    # Forward, gradients of what enters, and of the weights that train.
    products = sum(
        unit.flops
        * more
        * (2 + again + (unit.trainable / unit.parameters if unit.parameters else 1))
        for unit, more in zip(trace.units, slower, strict=True)
    )
    rate = machine.products[min(size, 4)] * getattr(constants, f"product_{machine.generation}")
    moved = machine.memory_gbps * 1e9
    compute = max(
        constants.launch * _KERNELS * len(trace.inputs) * passes,
        products / rate + _TOUCHES * trace.saved() / moved,
    )
    units = [unit.parameters for unit in trace.units if unit.parameters]
    trained = [unit.trainable for unit in trace.units if unit.trainable]
    kept, updated = sum(units) / shards, sum(trained) / shards
    inside = Group(shards, 1, machine)
    across = Group(plan.axes.size("replicate"), shards, machine)
    gather = sum(inside.gather(size * n, constants) for n in units) * passes * (1 + reshards)
    reduce = sum(inside.gather(summed * n, constants) for n in trained)
    reduce += across.reduce(summed * updated, constants)
    seconds = beside(compute, gather + reduce, constants)
    seconds += constants.optimizer / 4 * master * updated / moved
    # The current unit and the next two, and on a device the one before, still in use; or all.
    count = (3 + (machine.name != "cpu")) if reshards else len(units)
    ahead = sum(sorted(units)[-count:]) if shards > 1 else 0
    memory = {
        "parameters": master * kept,
        "gradients": master * updated,
        "optimizer": 2 * master * updated,
        "units": float(size * ahead),
        "activations": trace.saved(patterns) / passes,
    }
    live = max(unit.saved for unit in trace.units) / passes if recomputed else 0.0
    if shards > 1:
        live += summed * (sum(trained) if passes > 1 else max(trained, default=0))
    lanes = {"compute": seconds, "gather": gather, "reduce": reduce, "transfer": 0.0}
    return Prediction(plan, lanes, memory, sum(memory.values()) + live)


def _check_axes(plan: Plan) -> None:
    known = ("replicate", "shard")
    if others := [n for n in plan.axes.names if n not in known and plan.axes.size(n) > 1]:
        raise PlanError(
            f"[axes] {', '.join(others)}: --plan auto and [run] predict know axes replicate and "
            "shard alone; remove the others, or plan by hand with meshwright plan"
        )


def best_plan(
    trace: ModelTrace, plan: Plan, machine: Hardware, ranks: int, samples: int
) -> Prediction:
    """Find the fastest plan that fits where each rank trains on ``samples``; other settings stay.

    Tried are all sizes of axes replicate and shard, numbers of passes, and to recompute all blocks.
    Raises ``PlanError`` where none fits, and for other axes.
    """
    _check_axes(plan)
    found = [predict(trace, each, machine) for each in _plans(trace, plan, ranks, samples)]
    most = USABLE * machine.memory_gib * GIB
    fitting = [each for each in found if each.total <= most]
    if fitting:
        return min(fitting, key=lambda each: each.lanes["compute"])
    least = min(found, key=lambda each: each.total)
    largest = max(least.memory, key=lambda name: least.memory[name])
    raise PlanError(
        f"plan auto: nothing fits: the least of {len(found)} plans needs {least.total / GIB:.3g} "
        f"of {most / GIB:.3g} GiB, of it {least.memory[largest] / GIB:.3g} for {largest}"
    )


def _plans(trace: ModelTrace, plan: Plan, ranks: int, samples: int) -> Iterator[Plan]:
    blocks = tuple(dict.fromkeys(f"{name.rpartition('.')[0]}.*" for name in trace.blocks))
    for shard in (size for size in range(1, ranks + 1) if ranks % size == 0):
        sizes = {"replicate": ranks // shard, "shard": shard}
        axes = Axes.of({name: size for name, size in sizes.items() if size > 1})
        for reshards in (True, False)[: 1 + (shard > 1)]:
            for passes in (n for n in range(1, samples + 1) if samples % n == 0):
                for again in dict.fromkeys((plan.train.recompute, blocks)):
                    yield replace(
                        plan,
                        axes=axes,
                        shard=replace(plan.shard, reshard_after_forward=reshards),
                        train=replace(plan.train, accumulate=passes, recompute=again),
                    )
