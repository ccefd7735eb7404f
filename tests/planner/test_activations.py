"""What a forward leaves behind, traced without memory, against what is alive after a real one."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from matrix.cells import ROWS
from meshwright import Plan
from meshwright.gradients import call_module
from meshwright.plan import TrainPlan
from meshwright.planner import trace_model
from support.internals.composition import recompute_modules

NAMES = ("transformer", "tied", "skip", "uneven", "reused", "language model", "attention")
ROWS_OF_BATCH = 512


class Made(TorchDispatchMode):
    """Holds on to no storage that an operator has made, and knows which live."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                self.seen.append(weakref.ref(leaf.untyped_storage()))
        return found

    def alive(self) -> int:
        gc.collect()
        found = {id(s): s for reference in self.seen if (s := reference()) is not None}
        return sum(storage.nbytes() for storage in found.values())


def left_behind(name: str, recompute: tuple[str, ...]) -> int:
    """Bytes that live while only the loss is held: what autograd and recomputing keep."""
    row = ROWS[name]
    model = row.sample.build()
    recompute_modules(model, Plan(train=TrainPlan(recompute=recompute)))
    batch, target = row.sample.example_batch(ROWS_OF_BATCH, torch.Generator().manual_seed(0))

    with Made() as made:
        given, goal = tree_map(torch.clone, (batch, target))
        loss = row.sample.loss(call_module(model, given), goal)
        del given, goal
        before = made.alive()

    return before - loss.untyped_storage().nbytes()


@pytest.mark.few(7, slow=7)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", ["keep", "recompute"])
def test_what_is_alive_after_a_forward_is_what_was_traced(name: str, option: str) -> None:
    row = ROWS[name]
    recompute = row.recompute if option == "recompute" else ()
    batch, target = row.sample.example_batch(ROWS_OF_BATCH, torch.Generator().manual_seed(0))
    trace = trace_model(row.sample.build, batch, target=target, loss=row.sample.loss)
    real = left_behind(name, recompute)
    assert abs(trace.saved(recompute) - real) <= 0.02 * real, (trace.saved(recompute), real)
    if name in ("transformer", "language model", "attention") and recompute:
        assert trace.saved(recompute) < 0.6 * trace.saved()
