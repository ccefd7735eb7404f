"""Every method of `FSDPModule`: its effect, or the record that it has none here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.comm import Mark, Recorder, communicator, observe
from meshwright.data_parallel import FSDPModule, UnshardHandle, fully_shard, share_comm_ctx
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.internals.timeline import Collective


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)
    ).double()


def shard_all(model: nn.Module, **options: Any) -> Any:
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).double()


def share(x: torch.Tensor) -> torch.Tensor:
    world = communicator()
    count = len(x) // world.size
    return x[world.rank * count : (world.rank + 1) * count]


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss(model: nn.Module, seed: int, *, mine: bool) -> torch.Tensor:
    return model(share(batch(seed)) if mine else batch(seed)).square().mean()


def same_gradients(model: nn.Module, one: nn.Module, factor: float = 1.0) -> None:
    for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(
            whole(mine.grad), whole(theirs.grad) * factor, rtol=1e-9, atol=1e-9
        )


def same_gradients_kept(model: nn.Module, one: nn.Module) -> None:
    """As `same_gradients`, of the parameters at rest while modules hold whole ones."""
    drivers = [fully_shard.state(layer).unit for layer in (model[0], model[2], model[4])]
    shown = [unit.exposure.shown(slot) for unit in drivers for slot in unit.slots]
    for mine, theirs in zip(shown, one.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), whole(theirs.grad), rtol=1e-9, atol=1e-9)


def recorded(call: Callable[[], object]) -> list[tuple[str, str]]:
    recorder = Recorder()
    with observe(recorder):
        call()
    compared = ("compare parameters: sizes", "compare parameters", "compare starting values")
    checks = ("order", "use counts", *compared)
    return [kind for kind in recorder.kinds() if kind[1] not in checks]


def step(model: nn.Module, seed: int = 0) -> Callable[[], None]:
    return lambda: loss(model, seed, mine=True).backward()


def reduced(found: list[tuple[str, str]]) -> list[str]:
    return [label for kind, label in found if kind != "all_gather"]


def gathered(found: list[tuple[str, str]]) -> list[str]:
    return [label.removeprefix("unshard ") for kind, label in found if kind == "all_gather"]


# ------------------------------------------------------------------------ cases


def case_unshard_and_reshard() -> None:
    model = shard_all(mlp())
    assert recorded(model[0].unshard) == [("all_gather", "unshard Linear")]
    assert not isinstance(model[0].weight, DTensor)
    assert isinstance(model[2].weight, DTensor), "it is not recursive"
    assert recorded(model[0].unshard) == [], "once is enough"
    model[0].reshard()
    assert isinstance(model[0].weight, DTensor)
    handle = model[0].unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    handle.wait()
    handle.wait()
    assert not isinstance(model[0].weight, DTensor)
    model[0].reshard()
    model[0].unshard(async_op=True)
    assert gathered(recorded(step(model))) == ["2", "4", "4", "2", "0"], "the forward waits for it"


def case_reset_iter_state() -> None:
    one = mlp()
    model = shard_all(copy.deepcopy(one))
    model.reset_iter_state()  # before the first forward there is nothing to give up
    out = loss(model, 0, mine=True)
    model[2].unshard()
    model.reset_iter_state()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())
    del out
    step(model)()
    loss(one, 0, mine=False).backward()
    same_gradients(model, one)


def case_requires_gradient_sync() -> None:
    one = mlp()
    model = shard_all(copy.deepcopy(one))
    model.set_requires_gradient_sync(False)
    assert reduced(recorded(step(model, 0))) == []
    assert all(p.grad is None for p in model.parameters())
    model[2].set_requires_gradient_sync(True)
    assert reduced(recorded(step(model, 1))) == ["reduce 2"]
    model.set_requires_gradient_sync(True, recurse=False)
    model.set_requires_gradient_sync(True)
    with model.no_sync():
        assert reduced(recorded(step(model, 2))) == []
    assert reduced(recorded(step(model, 3))) == ["reduce 4", "reduce 2", "reduce 0"]
    for seed in range(4):
        loss(one, seed, mine=False).backward()
    same_gradients(model, one)


def case_is_last_backward() -> None:
    one = mlp()
    model = shard_all(copy.deepcopy(one))
    model.set_is_last_backward(False)
    for seed in range(3):
        found = recorded(step(model, seed))
        assert reduced(found) == ["reduce 4", "reduce 2", "reduce 0"]
        assert all(p.grad is None for p in model.parameters())
        loss(one, seed, mine=False).backward()
    # The last one is still on its way, and the order for prefetching is remembered.
    iteration = fully_shard.state(model).driver.iteration
    assert [unit.name for unit in iteration.in_flight] == ["0"]
    assert iteration.finished
    model[2].set_is_last_backward(True)  # any module of the root will do
    step(model, 3)()
    loss(one, 3, mine=False).backward()
    assert not iteration.in_flight
    assert not iteration.finished
    same_gradients(model, one)

    # An exception drops what waits.
    model.set_is_last_backward(False)
    step(model)()
    model.reset_iter_state()
    assert not iteration.in_flight
    model.zero_grad()
    one.zero_grad()
    model.set_is_last_backward(True)
    step(model)()
    loss(one, 0, mine=False).backward()
    same_gradients(model, one)


def case_reshard_after_forward() -> None:
    model = shard_all(mlp())
    model.set_reshard_after_forward(False)
    assert gathered(recorded(step(model))) == ["0", "2", "4"]
    model[2].set_reshard_after_forward(True, recurse=False)
    assert gathered(recorded(step(model))) == ["0", "2", "4", "2"]
    model.set_reshard_after_forward(True)
    assert gathered(recorded(step(model))) == ["0", "2", "4", "4", "2", "0"]


def case_reshard_after_backward() -> None:
    one = mlp()
    model = shard_all(copy.deepcopy(one))
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, one))
    model.set_reshard_after_backward(False)
    for seed in range(2):
        with model.no_sync():
            step(model, seed)()
            assert not any(isinstance(p, DTensor) for p in model.parameters())
            # No gradient, so no step: the next forward finds all of it.
            assert gathered(recorded(step(model, seed))) == ["4", "2", "0"]
        step(model, seed)()
        for _ in range(3):
            loss(one, seed, mine=False).backward()
        same_gradients_kept(model, one)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    model.set_reshard_after_backward(True)
    step(model)()
    loss(one, 0, mine=False).backward()
    same_gradients(model, one)
    assert all(isinstance(p, DTensor) for p in model.parameters())


def case_unshard_in_backward() -> None:
    one = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 3)).double()
    model = copy.deepcopy(one)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model[0].set_unshard_in_backward(False)
    ids = torch.tensor([[0, 1], [2, 4]])
    found = recorded(lambda: model(share(ids)).square().mean().backward())
    assert gathered(found) == ["0", "1", "1"]
    one(ids).square().mean().backward()
    same_gradients(model, one)


def case_prefetch() -> None:
    model = shard_all(mlp())
    step(model)()
    model[0].set_modules_to_forward_prefetch([model[4], model[2]])
    model[4].set_modules_to_backward_prefetch([model[0], model[2]])
    assert gathered(recorded(step(model))) == ["0", "4", "2", "4", "0", "2"]


def case_gradient_factors() -> None:
    one = mlp()
    model = shard_all(copy.deepcopy(one))
    for layer in (model[0], model[2], model[4]):
        layer.set_gradient_divide_factor(1.0)
    step(model)()
    loss(one, 0, mine=False).backward()
    same_gradients(model, one, communicator().size)
    model.zero_grad()
    for layer in (model[0], model[2], model[4]):
        layer.set_reduce_scatter_divide_factor(4.0)
    step(model)()
    same_gradients(model, one, communicator().size / 4)


def case_all_reduce_hook() -> None:
    one = mlp()
    model = shard_all(copy.deepcopy(one))
    seen: list[tuple[int, ...]] = []

    def hook(shard: torch.Tensor) -> None:
        seen.append(tuple(shard.shape))
        shard.mul_(2.0)

    for layer in (model[0], model[2], model[4]):
        layer.set_all_reduce_hook(hook)
    step(model)()
    loss(one, 0, mine=False).backward()
    same_gradients(model, one, 2.0)
    assert len(seen) == 3
    with pytest.raises(ValueError, match="expected a callable hook"):
        model.set_all_reduce_hook("sum")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = fully_shard(mlp(), mesh=mesh)
    with pytest.raises(ValueError, match="stream cannot be set when using native HSDP"):
        hybrid.set_all_reduce_hook(hook, stream="a stream")


class Waits:
    """The order in which reduce-scatters begin and are waited for."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def issued(self, collective: Collective) -> None:
        if collective.kind == "reduce_scatter":
            self.order.append("issued")

    def completed(self, collective: Collective, start: Mark, end: Mark) -> None:
        if collective.kind == "reduce_scatter":
            self.order.append("completed")


def case_max_input_buffers() -> None:
    model = shard_all(mlp())
    most: list[int] = []

    def watch(_: torch.Tensor) -> None:
        most.append(len(fully_shard.state(model).driver.iteration.in_flight))

    for layer in (model[0], model[2], model[4]):
        layer.set_all_reduce_hook(watch)
    step(model)()
    iteration = fully_shard.state(model).driver.iteration
    assert iteration.most_in_flight is None, "one for each axis"
    assert max(most) == 1
    model.set_reduce_scatter_max_input_buffers(1)
    assert iteration.most_in_flight == 1
    most.clear()
    step(model)()
    assert max(most) == 1
    model[0].set_reduce_scatter_max_input_buffers(3)
    most.clear()
    step(model)()
    assert most == [3, 3, 3], "none is waited for before the end"
    waits = Waits()
    with observe(waits):
        step(model)()
    # On a device the stream of the sums waits for each at once; computation and host do not.
    pair = ["issued", "completed"]
    on_host = ["issued"] * 3 + ["completed"] * 3
    assert waits.order == (on_host if communicator().is_on_host else pair * 3), "they overlap"
    later = shard_all(mlp())
    later.set_reduce_scatter_max_input_buffers(5)
    step(later)()
    assert fully_shard.state(later).driver.iteration.most_in_flight == 5


class Counting:
    """torch's protocol for collectives of one's own, on the functions that torch has."""

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.groups: list[object] = []

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        assert len(size) == 1
        self.allocated.append(size[0])
        return torch.empty(*size, dtype=dtype, device=device)


class OwnGather(Counting):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        self.groups.append(group)
        parts = list(output_tensor.view(group.size(), -1).unbind(0))
        return dist.all_gather(parts, input_tensor.clone(), group=group, async_op=async_op)


class OwnReduceScatter(Counting):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self.groups.append(group)
        assert not async_op
        dist.all_reduce(input_tensor, op=op, group=group)
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


def case_custom_collectives() -> None:
    world = communicator()
    one = mlp()
    one.append(nn.Linear(3, 1, bias=False).double())  # one line: its gather needs no copy
    one.append(nn.Linear(1, 2**17).double())  # without a custom gather each tensor goes alone
    model = copy.deepcopy(one)
    layers = [model[0], model[2], *model[4:]]
    gather, scatter = OwnGather(), OwnReduceScatter()
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True)
        layer.set_custom_all_gather(gather)
        layer.set_custom_reduce_scatter(scatter)
    fully_shard(model)
    for seed in range(2):
        found = recorded(step(model, seed))
        loss(one, seed, mine=False).backward()
        same_gradients(model, one)
    assert gathered(found) == ["0", "2", "4", "5", "6", "6", "5", "4", "2", "0"]
    assert len(reduced(found)) == 5
    assert len(gather.allocated) == len(gather.groups) == 20
    assert len(scatter.groups) == 10
    assert len(scatter.allocated) == 20
    groups = [fully_shard.state(layer).unit.groups[0] for layer in layers]
    sizes = [group.buffer.layout.padded_size for group in groups]
    assert gather.allocated[:5] == sizes
    assert scatter.allocated[:2] == [sizes[-1], sizes[-1] // world.size]
    assert {id(group) for group in (*gather.groups, *scatter.groups)} == {
        id(fully_shard.state(model[0]).unit.groups[0].axes.shard.group)
    }


def case_without_effect() -> None:
    """Settings for CUDA: recorded, and a step is what it was."""
    model = shard_all(mlp())
    before = recorded(step(model))
    event = object()
    model.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(True)
    model.set_separate_reduce_scatter_group()
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_symm_mem_for_comm()
    model.set_post_optim_event(event)
    assert fully_shard.state(model).without_effect == {
        "force_sum_reduction_for_comms": True,
        "reduce_scatter_unused_params": True,
        "separate_reduce_scatter_group": True,
        "allocate_memory_from_process_group_for_comm": True,
        "symm_mem_for_comm": "NCCL",
        "post_optim_event": event,
    }
    assert set(fully_shard.state(model[0]).without_effect) == {
        "reduce_scatter_unused_params",
        "separate_reduce_scatter_group",
    }
    assert recorded(step(model)) == before
    share_comm_ctx([model, fully_shard(nn.Linear(2, 2))])


CASES = {name: case for name, case in list(globals().items()) if name.startswith("case_")}


def body_cases(cases: dict[str, Callable[[], None]]) -> None:
    for name, case in cases.items():
        try:
            case()
        except BaseException as error:
            error.add_note(f"in {name}")
            raise


@pytest.mark.few(1)
@pytest.mark.parametrize("part", range(3))
def test_methods_of_a_sharded_module(ranks: Ranks, part: int) -> None:
    ranks(2, body_cases, dict(list(CASES.items())[part::3]))


ELSEWHERE = {
    "compile": "tests/compiler/test_sharded.py",
    "join": "test_uneven_inputs",
    "named_parameters": "test_between_passes",
    "pipeline_residency": "tests/pipelining/stepping/test_residency.py",
    "register_comm_hook": "test_shard_hooks",
    "set_requires_all_reduce": "test_sums_may_wait_for_the_replicating_axis",
}


def test_every_method_has_a_case() -> None:
    methods = {n for n, value in vars(FSDPModule).items() if callable(value) and n[0] != "_"}
    used = {name for case in CASES.values() for name in case.__code__.co_names}
    assert methods - used - set(ELSEWHERE) == set()
