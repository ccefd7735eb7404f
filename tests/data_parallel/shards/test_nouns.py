"""The classes between a sharded parameter and its gradient are few, and docs/concepts.md has them.

Counted are the unit that a module's hooks drive, the classes of ours below it whose objects, after
steps of a model, hold memory of a parameter or of its gradient or lead to one that does, and the
two that move units: its driver and the iteration. Frozen descriptions (places, axes, dtypes,
settings) hold none, nor do the checks of what other ranks do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.data_parallel import fully_shard
from meshwright.testing import Ranks
from support.internals.data_parallel import HOME

PAGE = Path(__file__).parents[3] / "docs" / "concepts.md"
COUNTED = ("meshwright.data_parallel.shard", "meshwright.comm.memory")


class Walk:
    """Goes through fields of objects of ours, and notes which lead to memory of the model."""

    def __init__(self, memory: set[int]) -> None:
        self.memory = memory
        self.leads: dict[int, tuple[type, bool]] = {}
        self.kept: list[object] = []

    def leads_there(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return storage_of(value) in self.memory
        if isinstance(value, dict):
            return self.one_leads_there([*value.keys(), *value.values()])
        if isinstance(value, (list, tuple, set)):
            return self.one_leads_there(value)
        kind = type(value)
        if not kind.__module__.startswith(COUNTED) or isinstance(value, nn.Module):
            return False
        if id(value) not in self.leads:
            self.leads[id(value)] = kind, False
            self.kept.append(value)
            self.leads[id(value)] = kind, self.one_leads_there(fields_of(value))
        return self.leads[id(value)][1]

    def one_leads_there(self, values: Iterable[object]) -> bool:
        """Look at all of them, also behind the first that does."""
        return sum(map(self.leads_there, values)) > 0


def fields_of(value: object) -> Iterator[object]:
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name != "__weakref__" and hasattr(value, name):
                yield getattr(value, name)


def storage_of(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata


def classes_on_the_way(side: int) -> set[tuple[str, ...]]:
    model = nn.Sequential(*[nn.Linear(side, side) for _ in range(3)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, side)).sum().backward()
        optimizer.step()
    memory: set[int] = set()
    drivers = []
    for parameter in model.parameters():
        memory |= {storage_of(parameter), storage_of(parameter.grad)}
        slot = parameter.__dict__[HOME]()
        memory |= {storage_of(slot.full), storage_of(slot.leaf)}
        drivers.append(slot.driver)
    walk = Walk(memory)
    for driver in drivers:
        assert walk.leads_there(driver.unit)
    found = {kind for kind, leads in walk.leads.values() if leads}
    found |= {type(mover) for driver in drivers for mover in (driver, driver.iteration)}
    return {tuple(base.__name__.lstrip("_") for base in kind.__mro__[:-1]) for kind in found}


@pytest.mark.parametrize("side", [8, 1024], ids=["small", "with pages of its own"])
def test_at_most_eleven_classes_and_all_on_the_page(ranks: Ranks, side: int) -> None:
    page = PAGE.read_text(encoding="utf-8").partition("# Terms of the code")[2]
    for found in ranks(2, classes_on_the_way, side):
        # A class is on the page by its own name or by that of the kind that it is.
        assert [names for names in found if not any(f"`{name}`" in page for name in names)] == []
        assert 8 <= len(found) <= 11, sorted(found)
