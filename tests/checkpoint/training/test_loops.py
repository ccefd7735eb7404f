"""`save` and `load`: any layout goes on from any other, to the last bit."""

from __future__ import annotations

import io
import itertools
import logging
import math
import random
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from meshwright import checkpoint
from meshwright.comm import communicator
from meshwright.composition import Trainable, parallelize
from meshwright.data_parallel import (
    DistributedDataParallel,
    fully_shard,
    keep_batch_norm_local,
)
from meshwright.errors import CheckpointError, CheckpointMismatchError
from meshwright.fsdp import FullyShardedDataParallel, ShardingStrategy
from meshwright.mesh import init_device_mesh
from meshwright.plan import PipelinePlan, Plan, TrainPlan
from meshwright.tensor_parallel import ColwiseParallel, parallelize_module
from meshwright.testing import Ranks
from support.checkpoint.loop_layouts import IDS, LAYOUTS, Net, begin, chain, saved_state
from support.checkpoint.memory import BOUND, COUNT, TENSOR_BYTES, Wide, peak_growth
from support.internals.axes import Axes
from support.internals.comm import local_of, whole
from support.internals.sampling import Sampler


def assert_same_state(path: Path, expected: Path) -> None:
    assert_equal(saved_state(path), saved_state(expected))


def assert_equal(found: Any, expected: Any, place: str = "state") -> None:
    """Same keys, values and bits."""
    assert type(found) is type(expected), place
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, place
        assert torch.equal(found, expected), place
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for key, value in expected.items():
            assert_equal(found[key], value, f"{place}.{key}")
    else:
        assert found == expected, place


def runs(names: list[str]) -> list[tuple[int, list[str]]]:
    """Cut a chain of layouts into runs of equal numbers of ranks."""
    found = itertools.groupby(names, lambda name: LAYOUTS[name][0])
    return [(size, list(part)) for size, part in found]


def test_layouts_go_on_from_each_other(ranks: Ranks, tmp_path: Path) -> None:
    """Each layout loads what another has saved, up and down through one, two and four ranks."""
    start = path = begin(tmp_path)
    names = list(LAYOUTS)
    for number, (size, part) in enumerate(runs([*names, "plain"])):
        folder = tmp_path / str(number)
        path = chain(path, folder, part) if size == 1 else ranks(size, chain, path, folder, part)[0]
        assert_same_state(path, start)


@pytest.mark.few(0)
@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_goes_on_from_every_other(ranks: Ranks, tmp_path: Path, source: str) -> None:
    start = begin(tmp_path)
    path = ranks(LAYOUTS[source][0], chain, start, tmp_path / "source", [source])[0]
    for target, (size, _) in LAYOUTS.items():
        found = ranks(size, chain, path, tmp_path / "targets" / target, [target])[0]
        assert_same_state(found, start)


def test_all_of_a_loop_goes_on(tmp_path: Path) -> None:
    """Two optimizers, a scheduler of milestones, groups, random numbers, nested values."""

    def build(seed: int) -> dict[str, Any]:
        model = Net(seed)
        ends = {id(p) for p in (*model.last.parameters(), *model.norm.parameters())}
        begin = [p for p in model.parameters() if id(p) not in ends]
        groups = [{"params": model.last.parameters()}, {"params": model.norm.parameters(), "lr": 1}]
        optimizers = [torch.optim.SGD(begin, lr=0.1, momentum=0.9), torch.optim.AdamW(groups)]
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizers[0], [1, 3])
        return {"model": model, "optimizer": optimizers, "scheduler": {"first": scheduler}}

    def step(loop: dict[str, Any]) -> None:
        loop["model"](IDS).square().sum().backward()
        for optimizer in loop["optimizer"]:
            optimizer.step()
            optimizer.zero_grad()
        loop["scheduler"]["first"].step()

    one, other = build(0), build(1)
    step(one)
    extra = {"losses": (1.5, float("inf")), "mean": torch.ones(2)}
    checkpoint.save(tmp_path, 1, extra=extra, **one)
    drawn = [torch.rand(3), np.random.rand(), random.random()]
    found = checkpoint.load(tmp_path, **other)
    assert found.has_random
    assert torch.equal(drawn[0], torch.rand(3))
    assert drawn[1:] == [np.random.rand(), random.random()]
    assert_equal(found.extra, extra)
    step(one)
    step(other)
    assert_equal(dict(other["model"].state_dict()), dict(one["model"].state_dict()))
    for a, b in zip(one["optimizer"], other["optimizer"], strict=True):
        assert_equal(b.state_dict(), a.state_dict())
    assert one["scheduler"]["first"].state_dict() == other["scheduler"]["first"].state_dict()


def test_what_does_not_fit_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, model=Net(0), extra=1)
    model = Net(1)
    optimizer = torch.optim.SGD(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match="holds no optimizer, but .*model"):
        checkpoint.load(path, model=model, optimizer=optimizer)
    model.more = torch.nn.Linear(2, 2)
    model.norm = torch.nn.LayerNorm(9)
    with pytest.raises(CheckpointMismatchError) as caught:
        checkpoint.load(path, model=model)
    for text in ("more.weight' is expected but not", "norm.bias' is float32 (8,) in the"):
        assert text in str(caught.value)
    small = Net(1)
    del small.norm
    with pytest.raises(CheckpointMismatchError, match="'norm.bias' is in the checkpoint but not"):
        checkpoint.load(path, model=small)
    assert_equal(
        {n: v for n, v in model.state_dict().items() if n in before and "norm" not in n},
        {n: v for n, v in before.items() if "norm" not in n},
    )
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        checkpoint.load(tmp_path / "none", model=model)
    with pytest.raises(TypeError, match="model: expected modules or a Trainable, found a str"):
        checkpoint.save(tmp_path, 2, model=["a"])  # pyrefly: ignore
    with pytest.raises(ValueError, match="optimizer was given without model"):
        checkpoint.save(tmp_path, 2, optimizer=optimizer)
    with pytest.raises(ValueError, match="is not in the model: build it from"):
        checkpoint.save(tmp_path, 2, model=Net(0), optimizer=optimizer)
    with pytest.raises(TypeError, match="optimizer: expected optimizers, found a str"):
        checkpoint.save(tmp_path, 2, model=Net(0), optimizer={"a": optimizer})  # pyrefly: ignore
    with pytest.raises(ValueError, match="extra/a': expected a dense tensor, found one of layout"):
        checkpoint.save(tmp_path, 2, extra={"a": torch.eye(2).to_sparse()})
    with pytest.raises(TypeError, match="expected something with state_dict"):
        checkpoint.save(tmp_path, 2, data=3)
    tensors = checkpoint.save_tensors(tmp_path, {"a": torch.ones(1)}, {}, step=9)
    with pytest.raises(CheckpointMismatchError, match="was not saved by checkpoint.save"):
        checkpoint.load(tensors, model=model)


def test_other_data_are_refused_before_anything_is_changed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, model=Net(0), data=Sampler(10, 2, seed=1))
    other = Net(1)
    before = [parameter.clone() for parameter in other.parameters()]
    with pytest.raises(ValueError, match="the state is of size 10, and size 11 is given"):
        checkpoint.load(tmp_path, model=other, data=Sampler(11, 2, seed=1))
    assert all(map(torch.equal, other.parameters(), before))


def test_other_groups_are_refused_before_anything_is_changed(tmp_path: Path) -> None:
    model = Net(0)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(IDS).sum().backward()
    optimizer.step()
    path = checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer)
    other = Net(1)
    first, *rest = other.parameters()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": rest}], momentum=0.9)
    before = [parameter.clone() for parameter in other.parameters()]
    with pytest.raises(CheckpointMismatchError) as caught:
        checkpoint.load(path, model=other, optimizer=optimizer)
    assert "'first.bias' is in group 0 in the checkpoint, in group 1 here" in str(caught.value)
    assert "1 groups in the checkpoint, 2 here" in str(caught.value)
    assert all(map(torch.equal, other.parameters(), before))
    with pytest.raises(CheckpointMismatchError, match="holds 1 optimizers, 2 were passed"):
        checkpoint.load(path, model=other, optimizer=[optimizer, optimizer])


def test_ties_may_differ_where_values_do_not(tmp_path: Path) -> None:
    apart = Net(0)
    apart.head.weight = torch.nn.Parameter(apart.embed.weight.detach().clone())
    tied = Net(1)
    checkpoint.load(checkpoint.save(tmp_path, 1, model=apart), model=tied)
    assert torch.equal(tied.head.weight, apart.head.weight)
    assert tied.head.weight is tied.embed.weight
    again = Net(2)
    again.head.weight = torch.nn.Parameter(torch.zeros(8, 6))
    path = checkpoint.save(tmp_path, 2, model=tied)
    assert "state/model/head.weight" not in checkpoint.read_manifest(path).tensors
    checkpoint.load(path, model=again)
    assert torch.equal(again.head.weight, apart.head.weight)
    torch.nn.init.ones_(apart.head.weight)
    with pytest.raises(CheckpointMismatchError, match="differ in the checkpoint"):
        checkpoint.load(checkpoint.save(tmp_path, 3, model=apart), model=tied)


def test_names_of_several_modules_are_those_of_one_tensor(tmp_path: Path) -> None:
    """Another network under the same names was lost; so was a stage's copy when it was loaded."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(m.parameters(), momentum=0.9) for m in (first, second)]
    with pytest.raises(ValueError, match="several of the modules have a 'weight'"):
        checkpoint.save(tmp_path, 1, model=[first, second], optimizer=optimizers)
    both = nn.ModuleDict({"first": first, "second": second})
    found = checkpoint.load(checkpoint.save(tmp_path, 1, model=both, optimizer=optimizers))
    assert found.step == 1

    second.load_state_dict(first.state_dict())
    optimizer = torch.optim.SGD(both.parameters(), momentum=0.9)
    for parameter in both.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    path = checkpoint.save(tmp_path, 2, model=[first, second], optimizer=optimizer)
    ends = [nn.Linear(2, 2), nn.Linear(2, 2)]
    loaded = torch.optim.SGD([p for m in ends for p in m.parameters()], momentum=0.9)
    checkpoint.load(path, model=ends, optimizer=loaded)
    for module in ends:
        assert_equal(dict(module.state_dict()), dict(first.state_dict()))
    assert_equal(loaded.state_dict()["state"], optimizer.state_dict()["state"])
    plain = nn.Linear(2, 2)
    checkpoint.load(path, model=plain, optimizer=torch.optim.SGD(plain.parameters(), momentum=0.9))
    optimizer.state[second.weight]["momentum_buffer"] += 1
    with pytest.raises(ValueError, match="other state for one 'weight' than for its copy"):
        checkpoint.save(tmp_path, 3, model=[first, second], optimizer=optimizer)


def copies_under_wrappers(folder: Path) -> None:
    plain, inner = nn.Linear(2, 2), nn.Linear(2, 2)
    inner.load_state_dict(plain.state_dict())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        modules = [plain, FullyShardedDataParallel(inner, use_orig_params=True)]
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], momentum=0.9)
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    path = checkpoint.save(folder, 1, model=modules, optimizer=optimizer)
    optimizer.state[plain.weight]["momentum_buffer"] += 1
    with pytest.raises(ValueError, match="other state for one 'weight' than for its copy"):
        checkpoint.save(folder, 2, model=modules, optimizer=optimizer)
    checkpoint.load(path, model=modules, optimizer=optimizer)
    for module in modules:
        for parameter in module.parameters():
            state = optimizer.state[parameter]["momentum_buffer"]
            assert torch.equal(state, torch.ones_like(state))


def test_copies_under_several_wrappers_are_told_apart(ranks: Ranks, tmp_path: Path) -> None:
    """The state of one replaced that of the other without a word."""
    ranks(1, copies_under_wrappers, tmp_path)


def uneven_over_both(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("shard", "tensor"))
    model = nn.Sequential(nn.Linear(5, 7))
    parallelize_module(model, mesh["tensor"], {"*": ColwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    checkpoint.load(folder, model=model)
    checkpoint.save(folder, 2, model=model)


def test_rows_that_two_axes_cut_unevenly_are_saved_and_loaded(ranks: Ranks, tmp_path: Path) -> None:
    """One of 7 rows over 2 tensor ranks and 3 of shards was looked for on another rank."""
    model, other = nn.Sequential(nn.Linear(5, 7)), nn.Sequential(nn.Linear(5, 7))
    checkpoint.save(tmp_path, 1, model=model)
    ranks(6, uneven_over_both, tmp_path)
    assert checkpoint.load(tmp_path, model=other).step == 2
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


def test_schedulers_that_do_not_fit_are_refused_before_anything_is_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    steps = [torch.optim.lr_scheduler.StepLR(optimizer, n) for n in (1, 2, 3)]
    saved: list[tuple[Any, list[Any]]] = [
        (steps[0], [steps[:1], {"a": steps[0]}]),
        (steps[:2], [steps, steps[:1], steps[0]]),
        ({"a": steps[0]}, [steps[0], {"a": steps[0], "b": steps[1]}, {"a": steps[:1]}]),
    ]
    for step, (given, others) in enumerate(saved):
        path = checkpoint.save(tmp_path, step, model=model, scheduler=given)
        other = nn.Linear(2, 2)
        before = other.weight.clone()
        for wrong in others:
            with pytest.raises(CheckpointMismatchError, match="scheduler.* was saved from"):
                checkpoint.load(path, model=other, scheduler=wrong)
        assert torch.equal(other.weight, before)
        checkpoint.load(path, model=other, scheduler=given)
    assert "StepLR" not in caplog.text
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    checkpoint.load(path, scheduler={"a": cosine})
    assert "is the state of a StepLR, and a CosineAnnealingLR is given it" in caplog.text


def different(folder: Path) -> list[str]:
    rank, said = communicator().rank, []
    for extra in ({"mine": rank}, {f"mine/{rank}": rank}):
        try:
            checkpoint.save(folder, len(said), extra=extra)
            said.append(str(checkpoint.load(folder).extra))
        except ValueError as error:
            said.append(str(error))
    return said


def test_ranks_save_what_they_have_alike_or_under_keys_of_their_own(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks(2, different, tmp_path)
    assert first == second
    assert "state.extra.mine differs between ranks: 0 and 1" in first[0]
    assert first[1] == "{'mine/0': 0, 'mine/1': 1}"


def statistics_of_each_rank(folder: Path) -> tuple[list[float], list[float]]:
    layers = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)]
    model = torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(8))
    keep_batch_norm_local(model)
    DistributedDataParallel(model)(torch.full((2, 4), 1.0 + communicator().rank) * torch.eye(2, 4))
    own = [float(buffer.sum()) for buffer in model.buffers()]
    checkpoint.save(folder, 0, model=model)
    checkpoint.load(folder, model=model)
    return own, [float(buffer.sum()) for buffer in model.buffers()]


def test_what_differs_between_ranks_is_saved_of_one_of_them(ranks: Ranks, tmp_path: Path) -> None:
    (first, saved), (second, again) = ranks(2, statistics_of_each_rank, tmp_path)
    assert first != second
    assert saved == again == first


def other_part_of_each_rank(folder: Path) -> str:
    torch.manual_seed(communicator().rank)
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("meshwright").addHandler(handler)
    try:
        checkpoint.save(folder, 0, model=nn.Linear(4, 4))
        return said.getvalue()
    finally:
        logging.getLogger("meshwright").removeHandler(handler)


def test_parameters_that_differ_between_ranks_are_named(ranks: Ranks, tmp_path: Path) -> None:
    """As the stages of a pipeline that each rank has built by itself: one would be lost."""
    first, second = ranks(2, other_part_of_each_rank, tmp_path)
    found = r"the values that rank 0 has of 'state/model/(bias|weight)', and 1 more: other ranks"
    assert re.search(found, first)
    assert second == ""


def weights_alone(path: Path) -> dict[str, torch.Tensor]:
    trainable = LAYOUTS["plan, pipeline"][1]().model
    with pytest.raises(CheckpointMismatchError, match=r"pass model=trainable\.module"):
        checkpoint.load(path, model=trainable)
    checkpoint.load(path, model=trainable.module)
    return trainable.weights()


def test_a_trainable_takes_weights_alone(ranks: Ranks, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, model=Net(0))
    for found in ranks(2, weights_alone, path):
        assert_equal(found, dict(Net(0).state_dict()))


def in_mesh(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    return FullyShardedDataParallel(model, device_mesh=mesh, use_orig_params=True)


def over_tensor_ranks(model: nn.Module) -> nn.Module:
    """Twelve layers of as many bytes as the weights of ``model``, cut over axis tensor."""
    rows = [nn.Linear(*weight.shape, bias=False) for weight in model.parameters()]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    return parallelize_module(nn.Sequential(*rows), mesh, {"*": ColwiseParallel()})


def over_both(*shape: int, original: bool) -> Callable[[nn.Module], nn.Module]:
    """Shard what is cut over axis tensor, in one unit."""

    def wrap(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("shard", "tensor"))
        rows = [nn.Linear(*weight.shape, bias=False) for weight in model.parameters()]
        plan = {"*": ColwiseParallel()}
        cut = parallelize_module(nn.Sequential(*rows), mesh["tensor"], plan)
        options: dict[str, Any] = {"device_mesh": mesh["shard"], "use_orig_params": original}
        kind = ShardingStrategy.FULL_SHARD if shape[0] > 1 else ShardingStrategy.NO_SHARD
        return FullyShardedDataParallel(cut, sharding_strategy=kind, **options)

    return wrap


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fully_shard": fully_shard,
    "tensor": over_tensor_ranks,
    "flat": FullyShardedDataParallel,
    "original": partial(FullyShardedDataParallel, use_orig_params=True),
    "in a mesh": in_mesh,
    "flat over tensor": over_both(2, 1, original=False),
    "whole over tensor": over_both(1, 2, original=True),
}


def held_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """List the state of what this rank has elements of."""
    values = (value for own in optimizer.state.values() for value in own.values())
    return [local_of(value) for value in values if value.ndim and value.numel()]


def growth(folder: Path, wrap: str) -> list[int]:
    model = WRAPS[wrap](Wide())
    own = folder / str(communicator().rank)
    own.mkdir()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    loop: dict[str, Any] = {"model": model, "optimizer": optimizer}
    saving = peak_growth(lambda: checkpoint.save(folder, 1, **loop), own)
    loading = peak_growth(lambda: checkpoint.load(folder, model=model), own)
    loop["optimizer"] = torch.optim.AdamW(model.parameters())
    both = peak_growth(lambda: checkpoint.load(folder, **loop), own)
    again, moments = map(held_by, (loop["optimizer"], optimizer))
    assert len(again) == len(moments) > 0
    assert all(map(torch.equal, again, moments))
    # Two moments of half of each weight; of a flat parameter the line of each is a tensor.
    lines = COUNT // 2 * TENSOR_BYTES if wrap.startswith("flat") else 0
    return [saving, loading, both - COUNT * TENSOR_BYTES - lines]


@pytest.mark.few(4)
@pytest.mark.parametrize("wrap", WRAPS)
def test_no_rank_holds_more_than_its_part_and_one_tensor(
    ranks: Ranks, tmp_path: Path, wrap: str
) -> None:
    """The weights are there already: what is read goes into them; of moments the part is added."""
    for grown in ranks(2, growth, tmp_path, wrap):
        assert max(grown) < BOUND, grown


def begun(plan: Plan) -> Trainable:
    rows = [nn.Linear(*weight.shape, bias=False) for weight in Wide().parameters()]
    return parallelize(
        nn.Sequential(*rows),
        plan,
        optimizer=torch.optim.AdamW,
        loss=lambda output, target: (output - target).square().mean(),
        example=torch.ones(4, rows[0].in_features),
    )


def growth_of_a_plan(folder: Path, axes: dict[str, int], is_flat: bool) -> list[int]:
    own = folder / str(communicator().rank)
    own.mkdir()
    plan = Plan(
        axes=Axes.of(axes),
        pipeline=PipelinePlan(schedule="1f1b", microbatches=2, split="parameters"),
        train=TrainPlan(flat=is_flat),
    )
    trainable, batch = begun(plan), torch.ones(4, Wide().rows[0].shape[0])
    trainable.step(batch, batch)
    saving = peak_growth(lambda: checkpoint.save(folder, 1, model=trainable), own)
    loading = peak_growth(lambda: checkpoint.load(folder, model=trainable.module), own)
    trainable = begun(plan)
    both = peak_growth(lambda: checkpoint.load(folder, model=trainable), own)
    # Two moments of each weight of the stage; where it is flat, the line of one is a tensor.
    held = COUNT * TENSOR_BYTES // math.prod(axes.values())
    return [saving, loading, both - 2 * held - (held if is_flat else 0)]


@pytest.mark.parametrize(
    ("axes", "is_flat"),
    [
        ({"pipeline": 2}, True),
        pytest.param({"pipeline": 2}, False, marks=pytest.mark.slow),
        pytest.param({"shard": 2, "pipeline": 2}, True, marks=pytest.mark.slow),
    ],
    ids=["flat stages", "stages", "sharded flat stages"],
)
def test_no_rank_of_a_pipeline_holds_more_than_its_part_and_one_tensor(
    ranks: Ranks, tmp_path: Path, axes: dict[str, int], is_flat: bool
) -> None:
    for grown in ranks(math.prod(axes.values()), growth_of_a_plan, tmp_path, axes, is_flat):
        assert max(grown) < BOUND, grown


class Headed(nn.Module):
    def __init__(self, classes: int, head: str = "head") -> None:
        super().__init__()
        torch.manual_seed(classes)
        self.body = nn.Linear(3, 4)
        self.add_module(head, nn.Linear(4, classes))


def body_new_head(folder: Path, shards: bool) -> None:
    saved = Headed(2)
    checkpoint.save(folder, 1, model=saved)
    for new in (Headed(5), Headed(2, "classifier")):
        before = {name: value.clone() for name, value in new.state_dict().items()}
        model = fully_shard(new) if shards else new
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(CheckpointMismatchError, match=r"strict=False\) fills what has one"):
            checkpoint.load(folder, model=model)
        with pytest.raises(ValueError, match="fills weights alone"):
            checkpoint.load(folder, model=model, optimizer=optimizer, strict=False)
        found = checkpoint.load(folder, model=model, strict=False)
        assert [*found.missing] == sorted(name for name in before if not name.startswith("body"))
        assert {*found.unexpected} == {"head.weight", "head.bias"} - before.keys()
        expected = {**before, **{k: v for k, v in saved.state_dict().items() if "body" in k}}
        for name, value in model.state_dict().items():
            torch.testing.assert_close(whole(value), expected[name], rtol=0, atol=0)


@pytest.mark.parametrize("shards", [False, True])
def test_a_model_with_a_new_head_takes_the_rest(ranks: Ranks, tmp_path: Path, shards: bool) -> None:
    ranks(2, body_new_head, tmp_path, shards)
