"""`fully_shard`: parity with one process, DTensors at rest, collectives, and every refusal."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import (
    MixedPrecisionPolicy,
    flat_groups,
    fully_shard,
    register_fsdp_forward_method,
)
from meshwright.mesh import init_device_mesh
from meshwright.testing import MODELS, Ranks

FAMILIES = {"sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "adam": torch.optim.Adam}


def raises(kind: type[BaseException], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


def shard_all(model: nn.Module, **options: Any) -> nn.Module:
    """Every module with parameters of its own is a unit, and so is the root."""
    for part in model.modules():
        if part is not model and list(part.parameters(recurse=False)):
            fully_shard(part, **options)
    return fully_shard(model, **options)


def shard_root(model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(model, **options)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def call(model: nn.Module, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, Mapping) else model(batch)


def share(value: Any, rank: int, size: int) -> Any:
    if isinstance(value, Mapping):
        return {key: share(item, rank, size) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        count = value.shape[0] // size
        return value[rank * count : (rank + 1) * count]
    return value


def to_double(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: to_double(item) for key, item in value.items()}
    return (
        value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
    )


def same(found: nn.Module, expected: nn.Module, *, gradients: bool, tolerance: float) -> None:
    pairs = zip(found.named_parameters(), expected.named_parameters(), strict=True)
    for (name, mine), (other, theirs) in pairs:
        assert name == other
        torch.testing.assert_close(
            whole(mine.detach()), theirs.detach(), rtol=tolerance, atol=tolerance
        )
        if not gradients:
            continue
        assert (mine.grad is None) is (theirs.grad is None), name
        if theirs.grad is not None and mine.grad is not None:
            torch.testing.assert_close(
                whole(mine.grad), theirs.grad, rtol=tolerance, atol=tolerance
            )


def body_parity(name: str, how: str, family: str, options: dict[str, Any]) -> None:
    world = communicator()
    sample = MODELS[name]
    torch.manual_seed(0)
    one = sample.build().double()
    model = copy.deepcopy(one)
    options = dict(options)
    if options.pop("hybrid", False):
        names = ("replicate", "shard")
        options["mesh"] = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=names)
    {"all": shard_all, "root": shard_root}[how](model, **options)
    ours, theirs = (FAMILIES[family](m.parameters()) for m in (model, one))
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        batch, target = sample.example_batch(4 * world.size, generator)
        batch = to_double(batch)
        sample.loss(call(one, batch), target).backward()
        mine = share(batch, world.rank, world.size)
        sample.loss(call(model, mine), share(target, world.rank, world.size)).backward()
        same(model, one, gradients=True, tolerance=1e-9)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    same(model, one, gradients=False, tolerance=1e-9)


NAMES = [n for n, sample in MODELS.items() if not sample.depends_on]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
def test_trains_as_one_process(ranks: Ranks, name: str) -> None:
    ranks(2, body_parity, name, "all", "sgd", {})


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["tied", "unused", "frozen"])
def test_trains_as_one_process_in_one_unit(ranks: Ranks, name: str) -> None:
    ranks(2, body_parity, name, "root", "adam", {})


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("name", ["uneven", pytest.param("transformer", marks=pytest.mark.slow)])
def test_trains_as_one_process_in_hybrid(ranks: Ranks, name: str) -> None:
    ranks(4, body_parity, name, "all", "adam", {"hybrid": True})


@pytest.mark.slow
def test_trains_as_one_process_without_resharding(ranks: Ranks) -> None:
    ranks(3, body_parity, "transformer", "all", "sgd", {"reshard_after_forward": False})


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def body_at_rest() -> None:
    model = mlp()
    weight = model[0].weight.detach().clone()
    shard_all(model)
    assert type(model).__name__ == "FSDPSequential"
    assert not type(model).__module__.startswith("torch.")  # compilers look closely at it
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
    assert torch.equal(model[0].weight.full_tensor(), weight)
    seen: list[type] = []
    model[0].register_forward_hook(lambda m, *_: seen.append(type(m.weight)), prepend=True)
    model(torch.randn(2, 6).double()).sum().backward()
    assert seen == [nn.Parameter]
    assert isinstance(model[0].weight, DTensor)
    assert isinstance(model[0].weight.grad, DTensor)


def test_parameters_are_dtensors_at_rest(ranks: Ranks) -> None:
    ranks(2, body_at_rest)


def body_collectives() -> list[tuple[str, str]]:
    model = shard_all(mlp())
    recorder = Recorder()
    with observe(recorder):
        model(torch.randn(2, 6).double()).sum().backward()
    return recorder.kinds()


def test_collectives_of_a_step(ranks: Ranks) -> None:
    for found in ranks(2, body_collectives):
        assert found == [
            ("all_gather", "compare parameters"),
            ("all_gather", "compare starting values"),
            ("all_gather", "unshard 0"),
            ("all_gather", "unshard 2"),
            ("all_gather", "order"),
            ("all_gather", "unshard 2"),
            ("all_gather", "unshard 0"),
            ("reduce_scatter", "reduce 2"),
            ("reduce_scatter", "reduce 0"),
            ("all_gather", "use counts"),
        ]


def body_accumulation(mode: str) -> None:
    world = communicator()
    one = mlp()
    model = shard_all(copy.deepcopy(one))
    batches = [
        torch.randn(4, 6, generator=torch.Generator().manual_seed(i)).double() for i in range(3)
    ]
    recorder = Recorder()
    with observe(recorder):
        for number, batch in enumerate(batches):
            if mode == "no_sync":
                model.set_requires_gradient_sync(number == 2)
            model(share(batch, world.rank, world.size)).square().mean().backward()
    for batch in batches:
        one(batch).square().mean().backward()
    same(model, one, gradients=True, tolerance=1e-10)
    reductions = [kind for kind, _ in recorder.kinds() if kind == "reduce_scatter"]
    assert len(reductions) == (2 if mode == "no_sync" else 6)


@pytest.mark.parametrize("mode", ["no_sync", "every"])
def test_accumulation_equals_one_backward(ranks: Ranks, mode: str) -> None:
    ranks(2, body_accumulation, mode)


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def body_recompute(reentrant: bool) -> list[tuple[str, str]]:
    world = communicator()
    one = mlp()
    model = Recomputed(copy.deepcopy(one), reentrant)
    shard_all(model)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5)).double()
    x.requires_grad_(reentrant)
    recorder = Recorder()
    with observe(recorder):
        model(share(x, world.rank, world.size)).square().mean().backward()
    one(x).square().mean().backward()
    same(model.inner, one, gradients=True, tolerance=1e-10)
    return [kind for kind in recorder.kinds() if kind[0] == "reduce_scatter"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations(ranks: Ranks, reentrant: bool) -> None:
    for found in ranks(2, body_recompute, reentrant):
        assert len(found) == 2


def body_several_forwards() -> None:
    world = communicator()
    one = mlp()
    model = shard_all(copy.deepcopy(one))
    batches = [
        torch.randn(4, 6, generator=torch.Generator().manual_seed(i)).double() for i in range(2)
    ]
    sum(model(share(batch, world.rank, world.size)).square().mean() for batch in batches).backward()
    sum(one(batch).square().mean() for batch in batches).backward()
    same(model, one, gradients=True, tolerance=1e-10)
    losses = [model(share(b, world.rank, world.size)).square().mean() for b in batches]
    for loss in losses:
        loss.backward()
    sum(one(batch).square().mean() for batch in batches).backward()
    same(model, one, gradients=True, tolerance=1e-10)


def test_several_forwards_before_a_backward(ranks: Ranks) -> None:
    ranks(2, body_several_forwards)


class Fails(nn.Module):
    where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise ValueError("planted")
        if self.where == "backward":
            x.register_hook(self._raise)
        return x * 1.0

    def _raise(self, _: torch.Tensor) -> None:
        raise ValueError("planted")


def body_exceptions(where: str) -> None:
    world = communicator()
    one = mlp()
    one.insert(1, Fails())
    model = shard_all(copy.deepcopy(one))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5)).double()
    mine = share(x, world.rank, world.size)
    model(mine).square().mean().backward()
    model.zero_grad()
    Fails.where = where
    raises(ValueError, "planted", lambda: model(mine).square().mean().backward())
    Fails.where = ""
    model.zero_grad()
    model(mine).square().mean().backward()
    one(x).square().mean().backward()
    same(model, one, gradients=True, tolerance=1e-10)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_iteration_after_an_exception_trains(ranks: Ranks, where: str) -> None:
    ranks(2, body_exceptions, where)


def body_evaluation() -> None:
    one = mlp()
    model = shard_all(copy.deepcopy(one))
    x = torch.randn(4, 6).double()
    with torch.inference_mode():
        torch.testing.assert_close(model(x), one(x))
    for _ in range(2):
        model.train()
        model(x).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad)
                parameter.grad = None
        one(x).square().mean().backward()
        model.eval()
        with torch.no_grad():
            model(x)
        model(x)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_evaluation_between_steps(ranks: Ranks) -> None:
    ranks(2, body_evaluation)


def body_mixed_precision() -> None:
    model = mlp().float()
    one = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_all(model, mp_policy=policy)
    kinds: list[torch.dtype] = []
    model[0].register_forward_hook(lambda m, *_: kinds.append(m.weight.dtype), prepend=True)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))
    out = model(x)
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    assert kinds == [torch.bfloat16]
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    one(x).square().mean().backward()
    same(model, one, gradients=True, tolerance=3e-2)


def test_mixed_precision(ranks: Ranks) -> None:
    ranks(2, body_mixed_precision)


def body_frozen_between_steps() -> None:
    world = communicator()
    one = mlp()
    model = shard_all(copy.deepcopy(one))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5)).double()
    for frozen in (None, "0.weight", "2.bias"):
        for each in (model, one):
            each.zero_grad()
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(name != frozen)
        model(share(x, world.rank, world.size)).square().mean().backward()
        one(x).square().mean().backward()
        same(model, one, gradients=True, tolerance=1e-10)


def test_freezing_between_steps(ranks: Ranks) -> None:
    ranks(2, body_frozen_between_steps)


def body_conversions() -> None:
    world = communicator()
    one = mlp().float()
    model = shard_all(copy.deepcopy(one))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5)).double()
    model.double()
    one.double()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model(share(x, world.rank, world.size)).square().mean().backward()
    one(x).square().mean().backward()
    same(model, one, gradients=True, tolerance=1e-7)
    model.zero_grad()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    model(share(x, world.rank, world.size)).square().mean().backward()
    same(model, one, gradients=True, tolerance=1e-7)


def test_conversions_and_loading(ranks: Ranks) -> None:
    ranks(2, body_conversions)


def body_one_unit_of_several_modules() -> list[tuple[str, str]]:
    world = communicator()
    one = mlp()
    model = copy.deepcopy(one)
    fully_shard([model[0], model[2]])
    fully_shard(model)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5)).double()
    recorder = Recorder()
    with observe(recorder):
        model(share(x, world.rank, world.size)).square().mean().backward()
    one(x).square().mean().backward()
    same(model, one, gradients=True, tolerance=1e-10)
    return recorder.kinds()


def test_one_unit_of_several_modules(ranks: Ranks) -> None:
    for found in ranks(2, body_one_unit_of_several_modules):
        words = ("unshard", "reduce")
        kinds = [kind for kind, label in found if label.startswith(words)]
        assert kinds == ["all_gather", "all_gather", "reduce_scatter"]


class Method(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + 1.0


def body_methods() -> None:
    torch.manual_seed(0)
    one = Method()
    model = fully_shard(copy.deepcopy(one))
    assert type(model).__module__ == Method.__module__  # where programs of others look
    register_fsdp_forward_method(model, "encode")
    register_fsdp_forward_method(one, "encode")
    raises(ValueError, "does not have a method", lambda: register_fsdp_forward_method(model, "x"))
    x = torch.randn(2, 3)
    torch.testing.assert_close(model.encode(x), one.encode(x))
    model.encode(x).sum().backward()
    one.encode(x).sum().backward()
    same(model, one, gradients=True, tolerance=1e-5)
    handle = model.unshard(async_op=True)
    assert handle is not None
    handle.wait()
    assert not isinstance(model.layer.weight, DTensor)
    model.reshard()
    assert isinstance(model.layer.weight, DTensor)


def test_methods_gather_too(ranks: Ranks) -> None:
    ranks(2, body_methods)


def body_torch_clips() -> None:
    world = communicator()
    one = mlp()
    model = shard_all(copy.deepcopy(one))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5)).double()
    model(share(x, world.rank, world.size)).square().mean().backward()
    one(x).square().mean().backward()
    mine = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    expected = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.01)
    torch.testing.assert_close(whole(mine), expected)
    same(model, one, gradients=True, tolerance=1e-10)


def test_clipping_by_torch(ranks: Ranks) -> None:
    ranks(2, body_torch_clips)


class Tower(nn.Module):
    """Two towers side by side whose last layers are one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.right = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.right[1].weight = self.left[1].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)


def body_shared_between_units() -> None:
    world = communicator()
    torch.manual_seed(0)
    one = Tower().double()
    model = copy.deepcopy(one)
    fully_shard(model.left)
    fully_shard(model.right)
    assert model.left[1].weight is model.right[1].weight
    raises(
        RuntimeError, "no unit contains them all", lambda: model.left(torch.randn(2, 3).double())
    )
    fully_shard(model)
    assert model.left[1].weight is model.right[1].weight
    units = [fully_shard.state(part).unit for part in (model, model.left, model.right)]
    assert [len(unit.slots) for unit in units] == [1, 3, 3]
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(5)).double()
    for _ in range(2):
        model.zero_grad()
        one.zero_grad()
        model(share(x, world.rank, world.size)).square().mean().backward()
        one(x).square().mean().backward()
        same(model, one, gradients=True, tolerance=1e-10)


def test_a_parameter_shared_between_units_moves_up(ranks: Ranks) -> None:
    ranks(2, body_shared_between_units)


def body_flat_groups() -> None:
    world = communicator()
    one = mlp()
    model = shard_all(copy.deepcopy(one))
    flat = flat_groups(model)
    assert [tensor.ndim for tensor in flat] == [1, 1]
    ours, theirs = torch.optim.AdamW(flat, lr=0.01), torch.optim.AdamW(one.parameters(), lr=0.01)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5)).double()
    for step in range(4):
        for _ in range(2):
            model(share(x, world.rank, world.size)).square().mean().backward()
            one(x).square().mean().backward()
        same(model, one, gradients=True, tolerance=1e-10)
        ours.step()
        theirs.step()
        ours.zero_grad(set_to_none=step % 2 == 0)
        theirs.zero_grad()
    same(model, one, gradients=False, tolerance=1e-10)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    raises(ValueError, "found none in this Linear", lambda: flat_groups(frozen))


def test_the_flat_view_gives_the_same_update(ranks: Ranks) -> None:
    ranks(2, body_flat_groups)


def body_no_dtensor_operator() -> None:
    model = shard_all(mlp())
    x = torch.randn(4, 6).double()
    model(x).sum().backward()
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        model(x).sum().backward()
    assert not seen


def test_no_dtensor_operator_runs_in_a_step(ranks: Ranks) -> None:
    ranks(2, body_no_dtensor_operator)


def body_settings() -> None:
    model = shard_all(mlp())
    text = "Expects FSDPModule but got"
    for method in (model.set_modules_to_forward_prefetch, model.set_modules_to_backward_prefetch):
        raises(ValueError, text, lambda method=method: method([nn.Linear(2, 2)]))
        method([model[2]])
    wrong = model.set_reduce_scatter_max_input_buffers
    raises(TypeError, "max_input_buffers must be", lambda: wrong("two"))
    raises(ValueError, "max_input_buffers must be", lambda: wrong(0))
    raises(
        ValueError,
        "reshard_after_forward should be a bool",
        lambda: model.set_reshard_after_forward(2),
    )
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5)).double()
    model(x).sum().backward()
    before = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for part in (model[0], model[2]):
        part.set_gradient_divide_factor(4.0)
        part.set_all_reduce_hook(lambda tensor: tensor.mul_(3.0))
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    model(x).sum().backward()
    assert not isinstance(model[0].weight, DTensor)
    model[0].reshard()
    model[2].reshard()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), before[name] * 1.5)


def test_settings_of_a_sharded_module(ranks: Ranks) -> None:
    ranks(2, body_settings)


def body_other_dim() -> None:
    world = communicator()
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4), nn.Linear(4, 4)).double()
    model = copy.deepcopy(one)
    choose = lambda p: Shard(1) if p.ndim == 2 and p.shape[1] == 4 else None  # noqa: E731
    shard_all(model, shard_placement_fn=choose)
    # The last weight is saved for the backward pass, and gathered again before it is used there.
    assert model[0].weight.placements[0].dim == model[3].weight.placements[0].dim == 1
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(5)).double()
    for _ in range(2):
        model(share(x, world.rank, world.size)).square().mean().backward()
        one(x).square().mean().backward()
    same(model, one, gradients=True, tolerance=1e-10)


def test_sharding_along_another_dim(ranks: Ranks) -> None:
    ranks(2, body_other_dim)


def body_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    shard_all(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model(torch.ones(2, 4)).sum().backward()
    assert all(whole(p.grad).abs().sum() > 0 for p in model.parameters())


def test_parameters_from_the_meta_device(ranks: Ranks) -> None:
    ranks(2, body_meta)
