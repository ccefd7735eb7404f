"""The parts of a layout that ``[train] compile`` compiles, and those that it cannot.

=====================  ================================================================
layout                 one graph, or several
=====================  ================================================================
axis replicate, none   the model, or this rank's stage of it
axis shard             each unit that holds no other: no graph reaches over its gathers
=====================  ================================================================

The loss and the optimizer stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

import meshwright
from meshwright.data_parallel.sharded_modules.module_hooks import driver_of
from meshwright.plan import Plan
from meshwright.schedule.builders import build
from meshwright.settings import Problem

__all__ = ["compile_problems", "compiled"]


def compiled(module: nn.Module, plan: Plan) -> nn.Module:
    """``module``, laid out by ``plan``, with what that wants compiled in place."""
    if plan.train.compile:
        # Loaded here alone: a compiler takes seconds to import.
        for part in _parts(module, plan):
            meshwright.compiler.compile_module(part)
    return module


def compile_problems(plan: Plan, chunks: int) -> Iterator[Problem]:
    """Find what ``[train] compile`` cannot do in ``plan``, of ``chunks`` stages on each rank."""
    pipeline, ranks = plan.pipeline, plan.axes.size("pipeline")
    if not plan.train.compile or ranks == 1:
        return
    if build(pipeline.schedule, ranks, pipeline.microbatches, chunks).split_backward:
        yield Problem(
            ("train", "compile"),
            f"compile = true: schedule = {pipeline.schedule!r} in [pipeline] runs a backward in "
            "two halves, and the graph of a compiled stage has one: take a schedule with whole "
            'backwards, such as "1f1b" or "interleaved1f1b", or remove compile',
        )


def _parts(module: nn.Module, plan: Plan) -> list[nn.Module]:
    if plan.axes.size("shard") == 1:
        return [module]
    units = [part for part in module.modules() if driver_of(part) is not None]
    return [part for part in units if not any(_inside(part, other) for other in units)]


def _inside(module: nn.Module, other: nn.Module) -> bool:
    return other is not module and any(part is other for part in module.modules())
