"""Communication hooks with buckets on sharded and hybrid modules, each against its formula."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import Communicator, Recorder, communicator, observe
from meshwright.data_parallel import GradBucket, fully_shard
from meshwright.data_parallel import comm_hooks as hooks
from meshwright.fsdp import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy
from meshwright.mesh import DeviceMesh, init_device_mesh
from meshwright.testing import Ranks
from support.internals.comm import mesh_communicators


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def share(step: int = 0) -> torch.Tensor:
    torch.manual_seed(communicator().rank + 10 * step)
    return torch.randn(5, 6)


def plane() -> DeviceMesh:
    world = communicator()
    return init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard"))


def means(model: nn.Module, step: int = 0) -> list[torch.Tensor]:
    """The mean gradients over all ranks, by a plain copy of the model."""
    world = communicator()
    model.zero_grad()
    model(share(step)).square().sum().backward()
    found = []
    for parameter in model.parameters():
        gradient = parameter.grad.clone()
        world.all_reduce(gradient, label="check").wait()
        found.append(gradient / world.size)
    return found


def shard(model: nn.Module, mesh: DeviceMesh | None) -> Any:
    for part in (model[0], model[2]):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def body_means(is_hybrid: bool) -> None:
    """Hooks that give the mean do, in the dtype that they send."""
    for hook, tolerance in (
        (hooks.allreduce_hook, 1e-5),
        (hooks.bf16_compress_hook, 5e-2),
        (hooks.fp16_compress_wrapper(hooks.allreduce_hook), 5e-3),
    ):
        mesh = plane() if is_hybrid else None
        ours = shard(net(), mesh)
        ours.register_comm_hook(None, hook)
        with pytest.raises(RuntimeError, match="register_comm_hook can only be called once"):
            ours.register_comm_hook(None, hook)
        for _ in range(2):
            ours.zero_grad()
            ours(share()).square().sum().backward()
            for a, b in zip(ours.parameters(), means(net()), strict=True):
                torch.testing.assert_close(
                    a.grad.full_tensor(), b, rtol=tolerance, atol=tolerance * 10
                )


def body_buckets() -> None:
    """In hybrid a bucket holds this rank's chunks, as matrices, and is sent between the copies."""
    seen: list[tuple[int, bool, list[tuple[int, ...]], str]] = []

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        shapes = [tuple(gradient.shape) for gradient in bucket.gradients()]
        seen.append((bucket.index(), bucket.is_last(), shapes, bucket.communicator.axis))
        return hooks.allreduce_hook(state, bucket)

    ours = shard(net(), plane())
    ours.register_comm_hook(None, hook)
    parts = communicator().size // 2
    value = ours(share()).square().sum()
    with observe(recorder := Recorder()):
        value.backward()
    assert seen == [
        (1, False, [(4 // parts, 8), (4 // parts,)], "replicate"),
        (0, True, [(8 // parts, 6), (8 // parts,)], "replicate"),
    ]
    kinds = [kind for kind, label in recorder.kinds() if label.startswith(("reduce", "replicate"))]
    assert kinds == ["reduce_scatter", "all_reduce"] * 2
    with pytest.raises(TypeError, match="Communication hook must be callable"):
        shard(net(), plane()).register_comm_hook(None, 3)


def power_sgd(matrix: torch.Tensor, q: torch.Tensor, axis: Communicator) -> torch.Tensor:
    p = matrix @ (q / q.norm())
    axis.all_reduce(p, label="check").wait()
    p /= p.norm()
    q = matrix.t() @ p
    axis.all_reduce(q, label="check").wait()
    return p @ (q / axis.size).t()


def body_power_sgd() -> None:
    """PowerSGD on the shards of the replicating axis, by hand, with the hook's Q."""
    mesh = plane()
    replicate, shards = mesh_communicators(mesh)
    state = hooks.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    model = nn.Sequential(nn.Linear(8, 12, bias=False))
    plain = copy.deepcopy(model)
    ours = fully_shard(model, mesh=mesh)
    ours.register_comm_hook(state, hooks.powerSGD_hook)
    rows = 12 // shards.size
    error, q = torch.zeros(rows, 8), None
    for step in range(4):
        torch.manual_seed(communicator().rank + 10 * step)
        x = torch.randn(4, 8)
        for each in (ours, plain):
            each.zero_grad()
            each(x).square().sum().backward()
        whole = plain[0].weight.grad
        shards.all_reduce(whole, label="check").wait()
        own = whole.chunk(shards.size)[shards.rank] / shards.size
        found = ours[0].weight.grad.to_local()
        if step < 2:
            replicate.all_reduce(own, label="check").wait()
            torch.testing.assert_close(found, own / replicate.size, rtol=1e-4, atol=1e-4)
            continue
        matrix = own + error
        if q is not None:
            torch.testing.assert_close(found, power_sgd(matrix, q, replicate), rtol=1e-3, atol=1e-3)
        q = state.q_memory_dict[0][0]
        assert torch.linalg.matrix_rank(found) == 1
        error = matrix - found
        torch.testing.assert_close(state.error_dict[0].view(rows, 8), error, rtol=1e-3, atol=1e-3)


def body_facade() -> None:
    """A hook with a bucket, in every strategy; one without, as torch's."""
    strategies = [ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD]
    for strategy in strategies:
        is_hybrid = strategy is ShardingStrategy.HYBRID_SHARD
        ours = FullyShardedDataParallel(
            net(),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            sharding_strategy=strategy,
            device_mesh=plane() if is_hybrid else None,
            use_orig_params=True,
        )
        ours.register_comm_hook(None, hooks.allreduce_hook)
        with pytest.raises(AssertionError, match="A communication hook is already registered"):
            ours.register_comm_hook(None, hooks.allreduce_hook)
        ours(share()).square().sum().backward()
        expected = means(net())
        with FullyShardedDataParallel.summon_full_params(ours, with_grads=True):
            for a, b in zip(ours.parameters(), expected, strict=True):
                torch.testing.assert_close(a.grad, b, rtol=1e-5, atol=1e-5)


def body_all() -> None:
    bodies: list[Callable[[], None]] = [body_buckets, body_power_sgd, body_facade]
    for body in bodies:
        body()
    body_means(True)
    body_means(False)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, 4])
def test_hooks_on_shards(ranks: Ranks, size: int) -> None:
    ranks(size, body_all)
