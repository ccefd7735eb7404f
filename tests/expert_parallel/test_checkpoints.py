"""Checkpoints of experts: any layout goes on from any other, to the last bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from matrix.cells import ROWS
from meshwright import checkpoint
from meshwright.composition import parallelize
from meshwright.plan import Plan
from meshwright.testing import Ranks
from support.checkpoint.loop_layouts import saved_state
from support.internals.axes import Axes

IDS = torch.arange(24).view(12, 2) % 11
LAYOUTS = [
    {axis: ranks for axis, ranks in (("shard", shards), ("expert", experts)) if ranks > 1}
    for shards in (1, 2)
    for experts in (1, 2, 3, 4)
]
QUICK = ({"expert": 2}, {"shard": 2}, {"expert": 3}, {"expert": 2})


def model() -> nn.Module:
    return ROWS["mixture"].sample.build()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, amsgrad=True)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def begin(folder: Path) -> Path:
    """Train in one process, and save."""
    torch.manual_seed(0)
    one = model()
    optimizer = adamw(one.parameters())
    for _ in range(2):
        loss_of(one(IDS), IDS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return checkpoint.save(folder, 2, model=one, optimizer=optimizer)


def body_goes_on(path: Path, folder: Path, axes: dict[str, int]) -> Path:
    """Load what another layout has saved, and save it."""
    torch.manual_seed(1)
    laid = parallelize(
        model(), Plan(axes=Axes.of(axes)), optimizer=adamw, loss=loss_of, example=IDS
    )
    checkpoint.load(path, model=laid)
    return checkpoint.save(folder, 2, model=laid, random=False)


def same(path: Path, expected: Path) -> None:
    one, other = saved_state(path), saved_state(expected)
    assert flat(one).keys() == flat(other).keys()
    assert len(flat(one)) > 40  # weights, and three tensors of AdamW for each
    for name, value in flat(one).items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(flat(other)[name])), name


def flat(state: Any, place: str = "") -> dict[str, Any]:
    """The tensors and numbers in ``state``, by their place."""
    if isinstance(state, dict):
        rows = [flat(value, f"{place}.{key}") for key, value in state.items()]
        return dict(itertools.chain.from_iterable(row.items() for row in rows))
    return {place: state} if isinstance(state, torch.Tensor | int | float) else {}


def test_layouts_go_on_from_each_other(ranks: Ranks, tmp_path: Path) -> None:
    start = path = begin(tmp_path)
    for number, axes in enumerate(QUICK):
        size = Axes.of(axes).world_size
        path = ranks(size, body_goes_on, path, tmp_path / f"{number}", axes)[0]
        same(path, start)


def body_goes_on_from_all(paths: list[Path], folder: Path, axes: dict[str, int]) -> list[Path]:
    return [body_goes_on(path, folder / f"{n}", axes) for n, path in enumerate(paths)]


@pytest.mark.slow
def test_every_layout_goes_on_from_every_other(ranks: Ranks, tmp_path: Path) -> None:
    start = begin(tmp_path)
    paths = [start]
    for name in ("saved", "again"):
        saved = []
        for number, axes in enumerate(LAYOUTS):
            folder, size = tmp_path / f"{name}-{number}", Axes.of(axes).world_size
            saved += ranks(size, body_goes_on_from_all, paths, folder, axes)[0]
        for path in saved:
            same(path, start)
        paths = saved
    assert len(paths) == len(LAYOUTS) ** 2
