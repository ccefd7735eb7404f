"""A training loop laid out in twelve ways, and the state that all of them must save alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from meshwright import checkpoint
from meshwright.checkpoint import Reader, unflatten
from meshwright.comm import communicator
from meshwright.composition import parallelize
from meshwright.data_parallel import DistributedDataParallel, flat_groups, fully_shard, replicate
from meshwright.fsdp import FullyShardedDataParallel, ModuleWrapPolicy
from meshwright.mesh import DeviceMesh, init_device_mesh
from meshwright.plan import PipelinePlan, Plan, TrainPlan
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from support.internals.axes import Axes
from support.internals.sampling import Sampler

__all__ = ["IDS", "LAYOUTS", "STEP", "Net", "begin", "chain", "saved_state"]

STEP = 2
IDS = torch.arange(16).view(4, 4) % 8


class Net(nn.Module):
    """Rows that divide by 4 and rows that do not, a buffer, a tied weight."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(8, 6)
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 6)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(float(seed)))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.last(self.norm(self.first(self.embed(ids))))
        return self.head(hidden + self.count)


class Part(nn.Module):
    """Some modules of a model under their names: a stage of a pipeline of the user's."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, getattr(model, name))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.1, amsgrad=True)


class Loop(NamedTuple):
    """What a loop gives to `save` and `load`."""

    model: Any
    optimizer: Optimizer | None


def _with_adamw(model: nn.Module) -> Loop:
    return Loop(model, adamw(model.parameters()))


def _sharded(*shape: int) -> Loop:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = Net(7)
    for part in (model.first, model.last, model):
        fully_shard(part, mesh=mesh)
    return _with_adamw(model)


def _flat_groups() -> Loop:
    model = fully_shard(Net(7))
    return Loop(model, adamw(flat_groups(model)))


def _flat() -> Loop:
    policy = ModuleWrapPolicy({nn.Linear})
    return _with_adamw(FullyShardedDataParallel(Net(7), auto_wrap_policy=policy))


def _in_units(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_mesh=mesh, use_orig_params=True
    )


def _tensor(wrap: Callable[..., nn.Module]) -> Loop:
    mesh = init_device_mesh(
        "cpu", (communicator().size // 2, 2), mesh_dim_names=("shard", "tensor")
    )
    model = parallelize_module(
        Net(7), mesh["tensor"], {"first": ColwiseParallel(), "last": RowwiseParallel()}
    )
    return _with_adamw(wrap(model, mesh=mesh["shard"]))


def _stages() -> Loop:
    model, rank = Net(7), communicator().rank
    if rank:  # as a stage of another process has it
        model.head.weight = copy.deepcopy(model.embed.weight)
    part = Part(model, [["embed", "first"], ["norm", "last", "head"]][rank])
    if rank:
        part.register_buffer("count", model.count)
    return _with_adamw(part)


def _planned(train: TrainPlan | None = None, **axes: int) -> Loop:
    pipeline = PipelinePlan(schedule="1f1b", microbatches=2, split="parameters")
    plan = Plan(axes=Axes.of(axes), pipeline=pipeline, train=train or TrainPlan())
    return Loop(parallelize(Net(7), plan, optimizer=adamw, loss=loss_of, example=IDS), None)


LAYOUTS: Mapping[str, tuple[int, Callable[[], Loop]]] = {
    "plain": (1, lambda: _with_adamw(Net(7))),
    "replicate": (2, lambda: _with_adamw(replicate(Net(7)))),
    "DistributedDataParallel": (2, lambda: _with_adamw(DistributedDataParallel(Net(7)))),
    "fully_shard": (2, lambda: _sharded(2)),
    "flat groups": (2, _flat_groups),
    "FullyShardedDataParallel, flat": (2, _flat),
    "stages": (2, _stages),
    "plan, pipeline": (2, lambda: _planned(pipeline=2)),
    "fully_shard over replicas": (4, lambda: _sharded(2, 2)),
    "FullyShardedDataParallel over tensor": (4, lambda: _tensor(wrap=_in_units)),
    "fully_shard over tensor": (4, lambda: _tensor(wrap=fully_shard)),
    "plan, shard and pipeline": (4, lambda: _planned(TrainPlan(flat=True), shard=2, pipeline=2)),
}
"""By name the ranks, and the model and optimizer, with values of their own."""


def _others(optimizer: Optimizer | None) -> tuple[dict[str, Any], Sampler]:
    sampler = Sampler(64, 8, seed=1)
    if optimizer is None:
        return {"data": sampler}, sampler
    return {"data": sampler, "scheduler": StepLR(optimizer, 10, gamma=0.5)}, sampler


def begin(folder: Path) -> Path:
    """Train two steps in one process, and save."""
    model = Net(0)
    optimizer = adamw(model.parameters())
    others, sampler = _others(optimizer)
    for _ in range(STEP):
        loss_of(model(IDS), IDS).backward()
        optimizer.step()
        optimizer.zero_grad()
        others["scheduler"].step()
        sampler.next_indices()
    return checkpoint.save(
        folder, STEP, model=model, optimizer=optimizer, extra={"note": "begun"}, **others
    )


def chain(start: Path, folder: Path, names: Sequence[str]) -> Path:
    """Load under each of ``names`` what the one before has saved, and save; the last one's."""
    path = start
    for number, name in enumerate(names):
        model, optimizer = LAYOUTS[name][1]()
        others, sampler = _others(optimizer)
        given = {"model": model, "optimizer": optimizer, **others}
        found = checkpoint.load(path, **given)
        assert (found.step, found.extra) == (STEP, {"note": "begun"}), name
        assert sampler.position == STEP * 8, name
        if "scheduler" in others:
            assert others["scheduler"].last_epoch == STEP, name
        else:  # a plan's optimizer is its own; its scheduler goes on as it was saved
            given["scheduler"] = _Kept(
                checkpoint.load(path, scheduler=(kept := _Kept({}))) and kept.state
            )
        path = checkpoint.save(
            folder / f"{number}-{name}", STEP, extra=found.extra, random=False, **given
        )
    return path


class _Kept:
    """A state that is carried from one checkpoint into the next."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def saved_state(path: Path) -> dict[str, Any]:
    """Read the state of a checkpoint, in whole tensors; a tied parameter once, groups sorted."""
    with Reader(path) as reader:
        structure = dict(reader.manifest.metadata["state"])
        tensors = {name: reader.read(name) for name in reader.manifest.tensors}
    for key in ("random", "steps"):
        structure.pop(key, None)
    state = unflatten(structure, tensors)
    optimizer = state["optimizer"]
    optimizer["state"].pop("head.weight", None)  # a stage of its own has it under its own name
    for group in optimizer["param_groups"]:
        group["params"] = sorted({name for name in group["params"] if name != "head.weight"})
    return state
