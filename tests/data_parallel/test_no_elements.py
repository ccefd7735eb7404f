"""Parameters without elements train, are clipped, saved and loaded as in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from meshwright.comm import communicator
from meshwright.composition import parallelize
from meshwright.data_parallel import DistributedDataParallel, fully_shard, replicate
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.gradients import clip_grad_norm_
from meshwright.plan import Plan, TensorPlan, TrainPlan
from meshwright.testing import Ranks
from support.internals.axes import Axes

AdamW = partial(torch.optim.AdamW, lr=0.1)


def linear(inputs: int, outputs: int) -> nn.Linear:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is nothing to initialize
        return nn.Linear(inputs, outputs)


class Net(nn.Module):
    """A layer of no rows and one of no columns, modules that units may hold, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.none = linear(4, 0)
        self.back = linear(0, 4)
        self.rows = nn.Parameter(torch.empty(0, 4))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return torch.cat([x + self.back(self.none(x)), self.rows])


def in_units(model: nn.Module) -> nn.Module:
    for child in model.children():
        fully_shard(child)
    return fully_shard(model)


def in_wrappers(model: nn.Module, **options: Any) -> nn.Module:
    for name, child in list(model.named_children()):
        setattr(model, name, FSDP(child, **options))
    return FSDP(model, **options)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "static": partial(DistributedDataParallel, static_graph=True, gradient_as_bucket_view=True),
    "replicate": replicate,
    "fully_shard": fully_shard,
    "fully_shard units": in_units,
    "original": partial(in_wrappers, use_orig_params=True),
    "flat": partial(in_wrappers, use_orig_params=False),
}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, clip: Any = clip_grad_norm_
) -> float:
    """One step on this rank's share; the norm of all gradients."""
    world = communicator()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(number)).double()
    is_one = type(model) is Net
    optimizer.zero_grad()
    model(x if is_one else x.chunk(world.size)[world.rank]).square().mean().backward()
    if clip is not clip_grad_norm_ and isinstance(model, FSDP):
        norm = model.clip_grad_norm_(0.1)
    else:
        norm = (nn.utils.clip_grad_norm_ if is_one else clip)(model.parameters(), 0.1)
    optimizer.step()
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("module."): v.full_tensor() if hasattr(v, "full_tensor") else v
        for name, v in model.state_dict().items()
    }


def body(wrap: str, folder: Path) -> None:
    """Two steps, one of them by torch's clipping; then one more from what was saved."""
    one, model = Net(), WRAPS[wrap](Net())
    optimizers = AdamW(one.parameters()), AdamW(model.parameters())
    for number, clip in enumerate((clip_grad_norm_, nn.utils.clip_grad_norm_)):
        expected = train(one, optimizers[0], number)
        assert train(model, optimizers[1], number, clip) == pytest.approx(expected)
    own, state = get_state_dict(model, optimizers[1])
    dcp.save({"model": own, "optimizer": state}, checkpoint_id=folder)
    # Into the same layout, and into a plain model.
    for other, no_dist in ((WRAPS[wrap](Net()), False), (Net(), True)):
        optimizer = AdamW(other.parameters())
        own, state = get_state_dict(other, optimizer)
        dcp.load({"model": own, "optimizer": state}, checkpoint_id=folder, no_dist=no_dist)
        set_state_dict(other, optimizer, model_state_dict=own, optim_state_dict=state)
        train(other, optimizer, 2)
        if not no_dist:
            train(one, optimizers[0], 2)
        torch.testing.assert_close(values(other), values(one), rtol=1e-9, atol=1e-11)


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "wrap",
    [pytest.param(w, marks=() if w in ("original", "flat") else pytest.mark.slow) for w in WRAPS],
)
def test_trains_and_is_saved_as_one_process(ranks: Ranks, tmp_path: Path, wrap: str) -> None:
    ranks(2, body, wrap, tmp_path)


def body_plan(sizes: dict[str, int]) -> None:
    rules = {"none": "colwise", "back": "rowwise"} if "tensor" in sizes else None
    plan = Plan(axes=Axes.of(sizes), train=TrainPlan(clip_norm=0.1), tensor=TensorPlan(rules=rules))
    one, x = Net(), torch.ones(4, 4).double()
    options: Any = {"optimizer": AdamW, "loss": F.mse_loss, "example": (x,)}
    trainable = parallelize(Net(), plan, **options)
    optimizer = AdamW(one.parameters())
    mine = x.chunk(trainable.data_size)[trainable.data_rank]
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(one(x), x * 0).backward()
        nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        optimizer.step()
        trainable.step(mine, mine * 0)
    state = trainable.state_dict()
    torch.testing.assert_close(dict(state["model"]), values(one), rtol=1e-9, atol=1e-11)
    parallelize(Net(), plan, **options).load_state_dict(state)


@pytest.mark.parametrize("sizes", [{"shard": 2}, {"tensor": 2}])
def test_plans_train_as_one_process(ranks: Ranks, sizes: dict[str, int]) -> None:
    ranks(2, body_plan, sizes)


def body_meta() -> None:
    """Units of nothing but parameters without elements have no gradients before the first step."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), linear(4, 0), linear(0, 4))
    plan = Plan(axes=Axes.of({"shard": 2}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in `linear`
        trainable = parallelize(model, plan, optimizer=AdamW, loss=F.mse_loss)
    trainable.step(torch.ones(2, 4), torch.zeros(2, 4))
    alone = fully_shard(linear(4, 0))
    alone.double()
    assert all(parameter.grad is None for parameter in alone.parameters())


def test_a_unit_of_parameters_without_elements_can_be_converted(ranks: Ranks) -> None:
    ranks(2, body_meta)
