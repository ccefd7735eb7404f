"""Every refusal of `fully_shard`: its type and the beginning of its message; and what it allows."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard

from meshwright.comm import communicator
from meshwright.data_parallel import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
    replicate,
    share_comm_ctx,
)
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks


def linear() -> nn.Module:
    return nn.Linear(2, 2)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2).t())


class WithForward(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


def apply_twice() -> None:
    fully_shard(fully_shard(linear()))


def meta_at_first_forward() -> None:
    fully_shard(nn.Linear(2, 2, device="meta"))(torch.ones(1, 2))


def on_another_device_under_offload() -> None:
    model = fully_shard(linear(), offload_policy=CPUOffloadPolicy())
    group = fully_shard.state(model).unit.groups[0]
    with FakeTensorMode():
        group.buffer.shard = torch.empty(3, device="cuda")
    model(torch.ones(1, 2))


def inner_forward_first() -> None:
    model = nn.Sequential(fully_shard(linear()))
    model[0](torch.ones(1, 2))
    fully_shard(model)
    model(torch.ones(1, 2))


def two_roots() -> None:
    fully_shard([linear(), linear()])[0](torch.ones(1, 2))


def replicate_after() -> None:
    replicate(fully_shard(linear()))


def fully_shard_after() -> None:
    fully_shard(replicate(linear()))


def with_mesh(*shape: int) -> Callable[[], object]:
    return lambda: fully_shard(linear(), mesh=init_device_mesh("cpu", shape))


def with_reshard(after: Any) -> Callable[[], object]:
    return lambda: fully_shard(linear(), reshard_after_forward=after)


def with_placement(module: Callable[[], nn.Module], dim: int) -> Callable[[], object]:
    return lambda: fully_shard(module(), shard_placement_fn=lambda _: Shard(dim))


def call(method: str, *args: Any) -> Callable[[], object]:
    return lambda: getattr(fully_shard(linear()), method)(*args)


ONCE = "Each distinct composable distributed API can only be applied to a module once."
CONTAINER = "fully_shard does not support containers that do not implement forward: "
MESH = "fully_shard expects a 1D or 2D DeviceMesh but got"
KIND = "reshard_after_forward should be a bool or an int representing the group size to reshard to"
FACTOR = "If passing reshard_after_forward as an int, it should be a factor of"
LAZY = (
    "FSDP state has already been lazily initialized for 0\n"
    "FSDP requires running forward through the root module first"
)
ROWS: list[tuple[str, type[BaseException], str, Callable[[], object]]] = [
    ("list container", ValueError, CONTAINER, lambda: fully_shard(nn.ModuleList([linear()]))),
    ("dict container", ValueError, CONTAINER, lambda: fully_shard(nn.ModuleDict({"a": linear()}))),
    ("in a list", ValueError, CONTAINER, lambda: fully_shard([linear(), nn.ModuleList()])),
    ("twice", AssertionError, ONCE, apply_twice),
    (
        "deepcopy",
        AssertionError,
        "FSDP does not support deepcopy. Please use state dict for serialization.",
        lambda: copy.deepcopy(fully_shard(linear())),
    ),
    ("mesh ndim", ValueError, MESH, with_mesh(1, 1, 2)),
    (
        "mesh names",
        AssertionError,
        "Please init the 2D mesh for HSDP with mesh_dim_names specified",
        with_mesh(1, 2),
    ),
    ("reshard str", ValueError, KIND, with_reshard("no")),
    ("reshard float", ValueError, KIND, with_reshard(2.0)),
    ("reshard 3 of 2", ValueError, FACTOR, with_reshard(3)),
    ("reshard 0", ValueError, FACTOR, with_reshard(0)),
    ("reshard negative", ValueError, FACTOR, with_reshard(-2)),
    (
        "uneven",
        NotImplementedError,
        "FSDP does not support uneven sharding on dim 1",
        with_placement(lambda: nn.Linear(3, 2, bias=False), 1),
    ),
    ("dim", AssertionError, "Shard dim 2 is invalid for 2D tensor", with_placement(linear, 2)),
    ("negative dim", AssertionError, "Shard dim -3 is invalid", with_placement(linear, -3)),
    (
        "offload device",
        RuntimeError,
        "FSDP parameters should be materialized on CPU when enabling CPU offloading.",
        on_another_device_under_offload,
    ),
    (
        "non-contiguous",
        NotImplementedError,
        "FSDP does not support non-contiguous parameters",
        lambda: fully_shard(Strided()),
    ),
    (
        "scalar",
        ValueError,
        "fully_shard doesn't support scalar parameters. Change scale to a 1D tensor",
        lambda: fully_shard(Scalar()),
    ),
    (
        "meta",
        RuntimeError,
        "FSDP parameters should be materialized from meta device before training",
        meta_at_first_forward,
    ),
    ("inner first", RuntimeError, LAZY, inner_forward_first),
    ("two roots", RuntimeError, "FSDP requires a single root module but got", two_roots),
    (
        "replicate after",
        RuntimeError,
        "Cannot apply `replicate()` on a Module already managed by `fully_shard`",
        replicate_after,
    ),
    (
        "fully_shard after",
        RuntimeError,
        "Cannot apply `fully_shard()` on a Module already managed by `replicate`",
        fully_shard_after,
    ),
    (
        "no such method",
        ValueError,
        "FSDPLinear does not have a method 'generate'",
        lambda: register_fsdp_forward_method(fully_shard(linear()), "generate"),
    ),
    (
        "forward prefetch",
        ValueError,
        "Expects FSDPModule but got Linear",
        call("set_modules_to_forward_prefetch", [nn.Linear(2, 2)]),
    ),
    (
        "backward prefetch",
        ValueError,
        "Expects FSDPModule but got Linear",
        call("set_modules_to_backward_prefetch", [nn.Linear(2, 2)]),
    ),
    (
        "shared streams",
        ValueError,
        "Expects FSDPModule but got",
        lambda: share_comm_ctx([linear()]),
    ),
    (
        "reshard setter",
        ValueError,
        "reshard_after_forward should be a bool, got int",
        call("set_reshard_after_forward", 2),
    ),
    (
        "buffers str",
        TypeError,
        "max_input_buffers must be",
        call("set_reduce_scatter_max_input_buffers", "two"),
    ),
    (
        "buffers bool",
        TypeError,
        "max_input_buffers must be",
        call("set_reduce_scatter_max_input_buffers", True),
    ),
    (
        "buffers 0",
        ValueError,
        "max_input_buffers must be",
        call("set_reduce_scatter_max_input_buffers", 0),
    ),
    (
        "no state",
        ValueError,
        "expected a module that fully_shard was applied to",
        lambda: fully_shard.state(linear()),
    ),
]


def body_rows(rows: list[tuple[str, type[BaseException], str, Callable[[], object]]]) -> list[str]:
    found: list[str] = []
    for name, kind, text, refused in rows:
        try:
            refused()
        except BaseException as error:
            if type(error) is not kind or not re.match(re.escape(text), str(error)):
                found.append(f"{name}: {type(error).__name__}: {error}")
        else:
            found.append(f"{name}: nothing was raised")
    return found


def test_every_row_of_errors(ranks: Ranks) -> None:
    for found in ranks(2, body_rows, ROWS):
        assert found == []


def body_many_on_meta() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2, device="meta") for _ in range(11)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    with pytest.raises(RuntimeError) as refused:
        model(torch.ones(1, 2))
    names = ", ".join(str([f"{n}.weight", f"{n}.bias"]) for n in range(10))
    assert f"still on meta device: {names} and 2 more. Call module.to_empty" in str(refused.value)


def test_all_that_is_on_the_meta_device_is_named(ranks: Ranks) -> None:
    ranks(2, body_many_on_meta)


ALONE = """
import warnings
import torch
import meshwright as mw
from meshwright.comm import connect, disconnect

with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    mw.fully_shard(torch.nn.Linear(2, 2))
    mw.fully_shard(torch.nn.Linear(2, 2))
    disconnect()
    connect()
    mw.fully_shard(torch.nn.Linear(2, 2))
for warning in found:
    print(warning.category.__name__, warning.message, warning.filename)
"""


def test_a_script_that_nobody_has_launched_is_told() -> None:
    launchers = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_RANK", "SLURM_", "PET_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(launchers)}
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        env=kept,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (told,) = done.stdout.splitlines()
    assert told.startswith("UserWarning fully_shard found no launcher, and no run that this")
    assert "torchrun --nproc-per-node N" in told
    assert told.endswith(" <string>")


# ----------------------------------------------------------------- what torch refuses


class Tied(nn.Module):
    """Two groups of parameters, of which one is used in both; dtypes differ in each."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.right.weight = self.left.weight
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(self.left(x)).double() * self.scale


def body_lifted() -> None:
    world = communicator()
    torch.manual_seed(0)
    one = Tied()
    model = copy.deepcopy(one)
    fully_shard(model.left)
    fully_shard(model.right)  # its only parameter belongs to another group
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)  # two dtypes before, and of what is reduced
    assert model.left.weight is model.right.weight
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    mine = x[world.rank * 2 : world.rank * 2 + 2]
    model(mine).square().mean().backward()
    one(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), one.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        assert ours.grad.dtype == theirs.dtype
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-6)


def body_allowed() -> None:
    plain = linear()
    register_fsdp_forward_method(plain, "generate")  # not sharded: nothing happens
    assert not hasattr(plain, "generate")
    inner = WithForward([nn.Linear(2, 2)])
    fully_shard(inner)
    inner(torch.ones(1, 2)).sum().backward()
    fully_shard(linear(), offload_policy=OffloadPolicy())
    beside = nn.Sequential(replicate(nn.Linear(2, 2)), nn.Linear(2, 2))
    fully_shard(beside)
    assert not isinstance(beside[0].weight, DTensor)
    assert isinstance(beside[1].weight, DTensor)


@pytest.mark.parametrize("body", [body_lifted, body_allowed], ids=["lifted", "allowed"])
def test_what_is_not_refused(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)
