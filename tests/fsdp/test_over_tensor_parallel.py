"""The facade over modules that tensor parallelism has cut."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as peer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import parallel as peer_styles

from meshwright import fsdp, tensor_parallel
from meshwright.comm import Recorder, communicator, observe
from meshwright.errors import LayoutError
from meshwright.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from meshwright.gradients import clip_grad_norm_
from meshwright.mesh import DeviceMesh, init_device_mesh
from meshwright.testing import Ranks
from support.data_parallel import tensor_parallel_samples as samples
from support.internals.fsdp import clean_name

FULL = (StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())
SHARDED = (
    StateDictType.SHARDED_STATE_DICT,
    ShardedStateDictConfig(),
    ShardedOptimStateDictConfig(),
)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    # Without decay: the flat gradient of a parameter that is not used is zero, not None.
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)


def wrapped(model: nn.Module, mesh: DeviceMesh, **options: Any) -> FullyShardedDataParallel:
    policy = ModuleWrapPolicy({samples.Block})
    return FullyShardedDataParallel(model, device_mesh=mesh, auto_wrap_policy=policy, **options)


def place(mesh: DeviceMesh) -> tuple[int, int]:
    names = [name for name in mesh.mesh_dim_names if name != "tensor"]
    index, count = 0, 1
    for name in names:
        index = index * mesh[name].size() + mesh.get_local_rank(name)
        count *= mesh[name].size()
    return index, count


def same_values(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in found.items():
        torch.testing.assert_close(
            samples.whole(value),
            expected[name],
            rtol=1e-9,
            atol=1e-9,
            msg=lambda t, n=name: f"{n}: {t}",
        )


def named_state(one: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {name: optimizer.state[p] for name, p in one.named_parameters() if p in optimizer.state}


def steps(
    model: FullyShardedDataParallel,
    one: nn.Module,
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer],
    at: tuple[int, int],
    count: int,
) -> None:
    """Each of two passes, the first of which is not reduced; norms and weights agree."""
    for step in range(count):
        for part, scope in ((0, model.no_sync()), (1, warnings.catch_warnings())):
            given = samples.batch(2 * step + part)
            with scope:
                loss = samples.loss_of(model, *samples.share(given, *at))
                loss.backward()
            samples.loss_of(one, *given).backward()
        norm = nn.utils.clip_grad_norm_(one.parameters(), 0.5)
        torch.testing.assert_close(model.clip_grad_norm_(0.5), norm, rtol=1e-9, atol=1e-9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with FullyShardedDataParallel.state_dict_type(model, *FULL):
            same_values(model.state_dict(), one.state_dict())


def body_training(use_orig_params: bool) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    one = samples.net()
    options = {"use_orig_params": use_orig_params}
    model = wrapped(samples.cut(one, mesh["tensor"]), mesh["shard"], **options)
    optimizers = adam(model), adam(one)
    steps(model, one, optimizers, place(mesh), 5 if use_orig_params else 2)

    # Dicts of both kinds, into another model of the same layout; then on with the training.
    for kind in (FULL, SHARDED):
        with FullyShardedDataParallel.state_dict_type(model, *kind):
            saved = {name: value.clone() for name, value in model.state_dict().items()}
            state = FullyShardedDataParallel.optim_state_dict(model, optimizers[0])
        if kind is SHARDED:
            assert all(type(value) is DTensor for value in saved.values())
            assert saved["words.weight"].device_mesh.mesh_dim_names == ("shard", "tensor")
            assert str(saved["words.weight"].placements) == "(Shard(dim=0), Shard(dim=0))"
        same_values(saved, one.state_dict())
        expected = named_state(one, optimizers[1])
        for name, own in expected.items():
            for key, value in own.items():
                found = samples.whole(state["state"][name][key])
                # Full states are given to the host.
                torch.testing.assert_close(found.cpu(), value.cpu(), rtol=1e-9, atol=1e-9)
        other = wrapped(samples.cut(samples.net(7), mesh["tensor"]), mesh["shard"], **options)
        fresh = adam(other)
        with FullyShardedDataParallel.state_dict_type(other, *kind):
            other.load_state_dict(saved)
            load = FullyShardedDataParallel.optim_state_dict_to_load(other, fresh, state)
        fresh.load_state_dict(load)
        model, optimizers = other, (fresh, optimizers[1])
    steps(model, one, optimizers, place(mesh), 1)

    recorder, operators = Recorder(), samples.CountDTensorOperators()
    given = samples.share(samples.batch(5), *place(mesh))
    with observe(recorder), operators:
        samples.loss_of(model, *given).backward()
    assert operators.found == []
    assert {c.axis for c in recorder.collectives} == {"shard", "tensor"}
    # One for each unit; sums of both kinds take the place of no other collective.
    assert sum(c.label == "partial gradients" for c in recorder.collectives) == 3
    if use_orig_params:
        samples.loss_of(one, *samples.batch(5)).backward()
        norm = nn.utils.clip_grad_norm_(one.parameters(), 0.5)
        torch.testing.assert_close(clip_grad_norm_(model, 0.5), norm, rtol=1e-9, atol=1e-9)
    else:
        with pytest.raises(LayoutError, match="holds some that tensor parallelism has cut"):
            clip_grad_norm_(model, 0.5)


@pytest.mark.parametrize("use_orig_params", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_facade_trains_cut_modules_as_one_process(ranks: Ranks, use_orig_params: bool) -> None:
    ranks(4, body_training, use_orig_params)


# ------------------------------------------------------------- reading weights in a forward


class Penalized(samples.Net):
    """A net whose forward reads weights beside the layers that hold them."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        sizes = [samples.whole(parameter).norm() for parameter in self.parameters()]
        return super().forward(ids) * (1 + 0.1 * torch.stack(sizes).sum())


def penalized() -> Penalized:
    model = samples.net()
    model.__class__ = Penalized
    return model  # pyrefly: ignore


def body_read_in_forward() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    for use_orig_params in (False, True):
        one = penalized()
        cut = samples.cut(one, mesh["tensor"])
        model = FullyShardedDataParallel(
            cut, device_mesh=mesh["shard"], use_orig_params=use_orig_params
        )
        steps(model, one, (adam(model), adam(one)), place(mesh), 2)
    one = penalized()
    sharded = fully_shard(samples.cut(one, mesh["tensor"]), mesh=mesh["shard"])
    samples.train(sharded, one, torch.optim.AdamW, place(mesh), steps=2)


@pytest.mark.slow
def test_a_forward_that_reads_cut_weights_trains_as_one_process(ranks: Ranks) -> None:
    ranks(4, body_read_in_forward)


# --------------------------------------------------------------------- beside torch's class


class Even(nn.Module):
    """Cut along both dims, and a layer that has no style."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.down(self.up(self.norm(x)).tanh()))


def side(
    library: Any, styles: Any, mesh: DeviceMesh, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of torch's classes or ours after one step."""
    torch.manual_seed(0)
    plan = {"up": styles.ColwiseParallel(), "down": styles.RowwiseParallel()}
    model = styles.parallelize_module(Even().double(), mesh["tensor"], plan)
    model = library.FullyShardedDataParallel(
        model, device_mesh=mesh["shard"], device_id=communicator().device, **options
    )
    model_optimizer = adam(model)
    step(model, model_optimizer, mesh)
    return model, model_optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    drawn = torch.Generator().manual_seed(mesh.get_local_rank("shard"))
    model(torch.randn(4, 8, dtype=torch.float64, generator=drawn)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def lies_alike(found: Any, expected: Any, name: str) -> None:
    assert type(found) is type(expected), name
    if isinstance(found, DTensor):
        assert found.placements == expected.placements, name
        assert found.device_mesh == expected.device_mesh, name
        assert found.shape == expected.shape, name
        found, expected = found.to_local(), expected.to_local()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=name)


def body_beside(use_orig_params: bool) -> None:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    sides = [
        (library, *side(library, styles, mesh, use_orig_params=use_orig_params))
        for library, styles in ((peer, peer_styles), (fsdp, tensor_parallel))
    ]
    dicts: list[tuple[dict[str, Any], dict[str, Any]]] = []
    shown: list[dict[str, Any]] = []
    for library, model, optimizer in sides:
        cls = library.FullyShardedDataParallel
        cls.set_state_dict_type(
            model,
            library.StateDictType.SHARDED_STATE_DICT,
            library.ShardedStateDictConfig(),
            library.ShardedOptimStateDictConfig(),
        )
        dicts.append((model.state_dict(), cls.optim_state_dict(model, optimizer)))
        with cls.summon_full_params(model):
            shown.append({
                clean_name(n): (type(p), p.detach().clone()) for n, p in model.named_parameters()
            })  # fmt: skip
            with torch.no_grad():  # what is written comes back to the shards
                for parameter in model.parameters():
                    parameter.mul_(0.5)
    (theirs, their_state), (ours, our_state) = dicts
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        lies_alike(value, theirs[name], name)
    for name, own in our_state["state"].items():
        for key, value in own.items():
            lies_alike(value, their_state["state"][name][key], f"{name} {key}")
    assert set(shown[1]) == set(shown[0])
    for name, (kind, value) in shown[1].items():
        assert kind is shown[0][name][0], name
        lies_alike(value, shown[0][name][1], name)
    # Ours goes on from the state of the optimizer that torch's class has saved.
    for (library, model, optimizer), saved in zip(sides, (theirs, ours), strict=True):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value.to_local() * 2, saved[name].to_local(), msg=name)
        if library is fsdp:
            load = fsdp.FullyShardedDataParallel.optim_state_dict_to_load
            optimizer.load_state_dict(load(model, optimizer, their_state))
        step(model, optimizer, mesh)
    (_, model, _), (_, other, _) = sides
    for (name, value), expected in zip(
        other.state_dict().items(), model.state_dict().values(), strict=True
    ):
        lies_alike(value, expected, name)


@pytest.mark.parametrize("use_orig_params", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_state_and_whole_parameters_lie_as_torchs(ranks: Ranks, use_orig_params: bool) -> None:
    ranks(4, body_beside, use_orig_params)


def body_shown_gradients() -> None:
    """Gradients of DTensors are DTensors, and what is written to them is kept."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    one = samples.net()
    model = wrapped(samples.cut(one, mesh["tensor"]), mesh["shard"], use_orig_params=True)
    samples.loss_of(model, *samples.share(samples.batch(0), *place(mesh))).backward()
    samples.loss_of(one, *samples.batch(0)).backward()
    before = list(model.parameters())
    for factor in (1.0, 3.0):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            for (name, shown), expected in zip(
                model.named_parameters(), one.parameters(), strict=True
            ):
                assert type(shown) is DTensor or "blocks" not in name
                for found, wanted in ((shown, expected), (shown.grad, expected.grad)):
                    if wanted is None:
                        assert found is None
                        continue
                    wanted = wanted.detach() * factor
                    torch.testing.assert_close(samples.whole(found.detach()), wanted, msg=name)
                    found.detach().mul_(3.0)
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.slow
def test_whole_gradients_of_cut_parameters(ranks: Ranks) -> None:
    ranks(4, body_shown_gradients)


# ------------------------------------------------------------------------------- the rest


def body_others(shape: tuple[int, int, int]) -> None:
    """Copies of shards; shards of copies of nothing; another dtype; refused."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tensor"))
    one = samples.net()
    strategy = ShardingStrategy.HYBRID_SHARD
    data = mesh["replicate", "shard"]
    model = wrapped(samples.cut(one, mesh["tensor"]), data, sharding_strategy=strategy)
    recorder = Recorder()
    with observe(recorder):
        steps(model, one, (adam(model), adam(one)), place(mesh), 2)
    sums = {c.axis for c in recorder.collectives if c.label.startswith(("reduce", "unshard"))}
    assert sums <= {"shard"}
    others = {c.axis for c in recorder.collectives if c.label != "gradient norm"}
    assert others <= {"replicate", "shard", "tensor"}

    one = samples.net()
    strategy = ShardingStrategy.NO_SHARD
    cut = samples.cut(one, mesh["tensor"])
    flat = mesh["replicate", "shard"]._flatten("data")
    model = wrapped(cut, flat, sharding_strategy=strategy, use_orig_params=True)
    steps(model, one, (adam(model), adam(one)), place(mesh), 2)

    one = samples.net()
    precision = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float64)
    cut = samples.cut(one, mesh["tensor"])
    model = wrapped(cut, flat, mixed_precision=precision, use_orig_params=True)
    for part, given in (
        (model, samples.share(samples.batch(0), *place(mesh))),
        (one, samples.batch(0)),
    ):
        samples.loss_of(part, *given).backward()
    norm = nn.utils.clip_grad_norm_(one.parameters(), 0.5)
    torch.testing.assert_close(model.clip_grad_norm_(0.5), norm, rtol=1e-5, atol=1e-5)

    for bad, text in (
        ({"process_group": mesh.get_group("shard")}, "needs the data axes of the same mesh"),
        ({"device_mesh": mesh["tensor"]}, "in common with the data axis 'shard': a mean"),
    ):
        with pytest.raises(ValueError, match=text):
            FullyShardedDataParallel(samples.cut(one, mesh["tensor"]), **bad)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 2, 2)])
def test_copies_of_shards_other_dtypes_and_refusals(
    ranks: Ranks, shape: tuple[int, int, int]
) -> None:
    ranks(shape[0] * shape[1] * shape[2], body_others, shape)
