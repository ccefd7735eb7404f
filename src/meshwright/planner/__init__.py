"""The planner: what fits and how fast, before a run, and why. Only the last two
files import torch.

Bottom-up:

    constants  what no data sheet says, with ranges and sources
    hardware   one kind of machine, and the shipped ones
    utilization  MFU and HFU
    shapes     the sizes of a decoder, from a configuration
    layouts    how a run lays a model over its GPUs, and what its program does
    software   what ours and programs of published runs do
    network    collectives by topology
    kernels    seconds of a layer
    memory     bytes of a rank
    steps      seconds of a step
    search     the best layouts, and why not the others
    recompute  what to recompute within a budget of memory
    plans      the answer in words, and as a `Plan`
    published  published runs as questions
    fitting    constants from answers
    scoring    errors by source
    traced     any module, run once without memory
    rehearsed  one rank of many, run in one process
    predictions  a step of a traced module, and the best plan
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.planner.hardware import Hardware, load_hardware
    from meshwright.planner.rehearsed import RankBytes, rehearse
    from meshwright.planner.scoring import Score, score
    from meshwright.planner.search import best_layouts
    from meshwright.planner.shapes import ModelShape, model_shape
    from meshwright.planner.traced import (
        ModelTrace,
        UnitTrace,
        named_model,
        recompute_for,
        trace_model,
    )

__all__ = [
    "Hardware",
    "ModelShape",
    "ModelTrace",
    "RankBytes",
    "Score",
    "UnitTrace",
    "best_layouts",
    "load_hardware",
    "model_shape",
    "named_model",
    "recompute_for",
    "rehearse",
    "score",
    "trace_model",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The last two, which import torch, are asked for what no other has.
    homes = ("hardware", "shapes", "search", "scoring", "traced", "rehearsed")
    modules = (import_module(f"{__name__}.{home}") for home in homes)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
