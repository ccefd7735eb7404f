"""Guards under a simulated device: they look one step late, and nothing leaves before they have."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import clip_grad_norm_
from meshwright.checkpoint import save_tensors
from meshwright.comm import LateNumbers, communicator, disconnect, settle
from meshwright.composition import parallelize
from meshwright.data_parallel import DistributedDataParallel, fully_shard, replicate
from meshwright.errors import CollectiveMismatchError, LayoutError, NonFiniteError
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.mesh import init_device_mesh
from meshwright.plan import Plan
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from meshwright.testing import Ranks, RanksFailed, on_devices
from support.internals.recipes import TensorTrace

LATE = "One step of an optimizer may have used"


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def sharded() -> nn.Module:
    model = layers()
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def replicated() -> nn.Module:
    return replicate(layers())


SAID = {
    sharded: "Optimizer steps differ across ranks: before forward 4 .*weights were changed on",
    replicated: "the ranks reduced gradients of different passes together: backward pass 1 of",
}
GIVEN_OUT: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "settle": lambda model, optimizer: settle(),
    "state_dict": lambda model, optimizer: model.state_dict(),
    "state of the optimizer": lambda model, optimizer: optimizer.state_dict(),
    "disconnect": lambda model, optimizer: disconnect(),
    "next pass": lambda model, optimizer: model(torch.ones(2, 4)).sum().backward(),
}


def body_left_out(make: Callable[[], nn.Module], end: str) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = communicator().rank
    for number in (1, 2, 3, 4):
        model(torch.ones(2, 4)).sum().backward()
        if (number, rank) != (3, 1):
            optimizer.step()  # which rank 1 leaves out once
        optimizer.zero_grad()
    with pytest.raises(CollectiveMismatchError, match=SAID[make]) as raised:
        GIVEN_OUT[end](model, optimizer)
    assert LATE in str(raised.value)


@pytest.mark.few(3)
@pytest.mark.parametrize("end", GIVEN_OUT)
@pytest.mark.parametrize("make", SAID)
def test_a_step_that_a_rank_left_out_shows_before_anything_leaves(
    ranks: Ranks, make: Callable[[], nn.Module], end: str
) -> None:
    on_devices(ranks)(2, body_left_out, make, end)


def body_guard_off() -> None:
    LateNumbers.look = lambda *_: None
    body_left_out(replicated, "next pass")


def test_a_guard_that_is_off_is_seen(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="DID NOT RAISE"):
        on_devices(ranks)(2, body_guard_off)


Exits = dict[str, Callable[[], object]]
"""Calls that give out something of a step."""


def trained(model: nn.Module) -> Any:
    """Make an optimizer that has stepped, of a model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


def exits_of_modules() -> Exits:
    whole, parts, tensor = replicated(), sharded(), layers()
    wrapped: Any = DistributedDataParallel(layers())
    flat: Any = FullyShardedDataParallel(layers())
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(tensor, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    given = {
        "replicate": whole,
        "class of replicas": wrapped,
        "its module": wrapped.module,
        "fully_shard": parts,
        "class": flat,
        "tensor": tensor,
    }
    models = (whole, parts, tensor)
    optimizers = {type(m).__name__: trained(m) for m in models} | {"class": trained(flat)}
    return {
        **{f"state of {name}": model.state_dict for name, model in given.items()},
        **{f"optimizer of {name}": each.state_dict for name, each in optimizers.items()},
        "state of the class's optimizer": lambda: flat.optim_state_dict(flat, optimizers["class"]),
        "whole parameters": lambda: flat.summon_full_params(flat).__enter__(),
    }


def exits_of_plans() -> Exits:
    found: Exits = {}
    for axes, settings in (
        ("replicate = 2", ""),
        ("tensor = 2", TENSOR),
        ("pipeline = 2", "[pipeline]\nmicrobatches = 2"),
    ):
        many, _ = made(axes, settings)
        x, target = torch.ones(4, 4).double(), torch.ones(4, 2).double()
        many.forward_backward(x, target)
        trace = TensorTrace(many, lambda _: None, share=4)
        for name, call in {
            "gradients": many.gradients,
            "weights": many.weights,
            "state": many.state_dict,
            "eval": functools.partial(many.eval, x, target),
            "trace": functools.partial(trace._write_all, "parameter"),
        }.items():
            found[f"{name}, {axes}"] = call
    return found


def exits_of_folders(folder: str) -> Exits:
    values = {"w": torch.ones(2)}
    return {"save": lambda: save_tensors(folder, values, {}, step=1, communicator=communicator())}


def refuse(numbers: list[float]) -> None:
    raise NonFiniteError(f"a guard has found {numbers}")


def body_exits(folder: str) -> None:
    exits = exits_of_modules() | exits_of_plans() | exits_of_folders(folder)
    settle()
    open_ones: list[str] = []
    for name, give_out in exits.items():
        late = LateNumbers()
        late.look(torch.ones(1), refuse)
        with contextlib.suppress(NonFiniteError):
            give_out()
        if late.coming:
            open_ones.append(name)
            late.coming.clear()
    assert not open_ones, f"given out before guards were looked at: {open_ones}"


@pytest.mark.slow
def test_nothing_is_given_out_before_guards_were_looked_at(ranks: Ranks, tmp_path: Path) -> None:
    on_devices(ranks)(2, body_exits, str(tmp_path))


class Branches(nn.Module):
    """Three layers of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](x)


def body_branches(sharded: bool) -> None:
    world = communicator()
    torch.manual_seed(1)
    one = Branches().double()
    many: Any = copy.deepcopy(one)
    many = fully_shard(many) if sharded else replicate(many, bucket_cap_mb=0.0001)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (one, many)]
    for step in range(8):
        which = [[0, 0], [0, 0], [0, 1], [1, 1], [1, 2], [2, 2], [0, 2], [1, 1]][step]
        x = torch.full((2, 4), 1.0 + step).double()
        (sum(one(x + rank, which[rank]).sum() for rank in range(2)) / 2).backward()
        many(x + world.rank, which[world.rank]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for wanted, found in zip(one.parameters(), many.parameters(), strict=True):
        whole = found.full_tensor() if sharded else found
        torch.testing.assert_close(whole, wanted)


@pytest.mark.parametrize("sharded", [True, False])
def test_paths_that_change_train_as_in_one_process(ranks: Ranks, *, sharded: bool) -> None:
    on_devices(ranks)(2, body_branches, sharded)


def body_static() -> None:
    model = replicate(Branches(), static_graph=True)
    rank = communicator().rank
    for step in range(4):
        model(torch.ones(2, 4), 1 if (step, rank) == (2, 1) else 0).sum().backward()


def test_another_path_of_a_static_graph_shows_in_the_next_pass(ranks: Ranks) -> None:
    said = (
        "Your training graph has changed in this iteration.*did not use .*layers.0.* on ranks .1."
    )
    with pytest.raises(RanksFailed, match=re.compile(said, re.DOTALL)):
        on_devices(ranks)(2, body_static)


TENSOR = '[tensor.rules]\n"0" = "colwise"\n"2" = "rowwise"'
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def made(
    axes: str,
    settings: str = "",
    loss: Any = nn.functional.mse_loss,
    optimizer: Any = MOMENTUM,
) -> tuple[Any, Any]:
    """Make a Trainable, and one of the same model in one process, which is given all batches."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    plan = Plan.from_toml(f"[axes]\n{axes}\n{settings}\n")
    one = copy.deepcopy(model)
    example = (torch.ones(4, 4).double(),)
    many = parallelize(model, plan, optimizer=optimizer, loss=loss, example=example)
    return many, (one, optimizer(one.parameters()))


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over the rows of which the first target is positive, and count them, on the device."""
    is_wanted = target[:, :1] > 0
    return ((output - target).square() * is_wanted).sum(), is_wanted.sum()


def body_trainable(axes: str, settings: str) -> None:
    many, (one, optimizer) = made(axes, settings, counted)
    for step in range(4):
        torch.manual_seed(step)
        x, target = torch.randn(8, 4).double(), torch.randn(8, 2).double()
        total, count = counted(one(x), target)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        share = slice(
            many.data_rank * 8 // many.data_size, (many.data_rank + 1) * 8 // many.data_size
        )
        result = many.step(x[share], target[share])
        torch.testing.assert_close(result.loss.item(), (total / count).item())
    for name, wanted in one.named_parameters():
        torch.testing.assert_close(many.weights()[name], wanted.detach())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("axes", "settings"),
    [
        ("replicate = 2", "[train]\naccumulate = 2"),
        ("shard = 2", "[train]\naccumulate = 4"),
        ("tensor = 2", TENSOR),
    ],
)
def test_a_count_that_the_device_alone_knows(ranks: Ranks, axes: str, settings: str) -> None:
    on_devices(ranks)(2, body_trainable, axes, settings)


def body_not_finite(axes: str, end: str) -> None:
    many, _ = made(axes)
    x, target = torch.ones(4, 4).double(), torch.ones(4, 2).double()
    spoiled = x.clone()
    spoiled[0, 0] = torch.inf
    for step in range(3):
        is_spoiled = (step, communicator().rank) == (2, 1)
        many.step(spoiled if is_spoiled else x, target)
    whole = [whole_of(parameter) for parameter in many.module.parameters()]
    assert all(parameter.isfinite().all() for parameter in whole), "a step without gradients"
    said = r"step 3: the loss is [0-9.]+ and the gradient norm nan: not finite: .* on ranks .1."
    with pytest.raises(NonFiniteError, match=said) as raised:
        many.state_dict() if end == "state" else many.step(x, target)
    assert "Its gradients were set to zero" in str(raised.value)


@pytest.mark.few(1)
@pytest.mark.parametrize("end", ["state", "step"])
@pytest.mark.parametrize("axes", ["replicate = 2", "shard = 2"])
def test_a_step_that_is_not_finite_changes_nothing_for_good(
    ranks: Ranks, axes: str, end: str
) -> None:
    on_devices(ranks)(2, body_not_finite, axes, end)


FUSED = functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1, fused=True)


def body_fused(axes: str, settings: str) -> None:
    many, _ = made(axes, settings, optimizer=FUSED)
    x, target = torch.ones(4, 4).double(), torch.ones(4, 2).double()
    for _ in range(2):
        many.step(x, target)
    state = many.state_dict()
    before = copy.deepcopy((state["model"], state["optimizer"]["state"]))
    many.step(x * (torch.inf if communicator().rank == 1 or many.data_size == 1 else 1.0), target)
    with pytest.raises(NonFiniteError, match="Its optimizer has written nothing"):
        settle()
    after = many.state_dict()
    for found, wanted in zip((after["model"], after["optimizer"]["state"]), before, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    many.step(x, target)
    changed = [not torch.equal(before[0][n], now) for n, now in many.weights().items()]
    assert any(changed), "a step that is finite counts again"


@pytest.mark.parametrize(
    ("axes", "settings"),
    [
        ("replicate = 2", ""),
        pytest.param("shard = 2", "", marks=pytest.mark.slow),
        pytest.param("tensor = 2", TENSOR, marks=pytest.mark.slow),
    ],
)
def test_a_fused_optimizer_writes_nothing_in_a_step_that_is_not_finite(
    ranks: Ranks, axes: str, settings: str
) -> None:
    on_devices(ranks)(2, body_fused, axes, settings)


def body_clipped(make: Callable[[], nn.Module]) -> None:
    model, rank = make(), communicator().rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(value: float) -> None:
        model(torch.full((2, 4), value)).sum().backward()
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()

    step(1.0)
    step(torch.inf if rank == 1 else 1.0)
    assert all(whole_of(parameter).isfinite().all() for parameter in model.parameters())
    with pytest.raises(
        RuntimeError, match="is nan, so gradients cannot be clipped: .*the gradient of"
    ):
        step(1.0)


@pytest.mark.parametrize("make", [sharded, replicated])
def test_a_norm_that_is_not_finite_shows_in_the_next_call(
    ranks: Ranks, make: Callable[[], nn.Module]
) -> None:
    on_devices(ranks)(2, body_clipped, make)


def body_apart() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    if communicator().rank == 1:
        model[2].bias.grad.mul_(3)
    optimizer.step()
    with pytest.raises(LayoutError, match=r"the gradient of 2.bias is .*; off by .* on ranks"):
        model(torch.ones(2, 4))


def test_gradients_that_differ_show_in_the_next_pass(ranks: Ranks) -> None:
    on_devices(ranks)(2, body_apart)


def whole_of(parameter: Any) -> torch.Tensor:
    """Gather a parameter, where it is in parts."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
