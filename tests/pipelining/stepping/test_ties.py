"""Tied weights over stages: one parameter of one process, held several times."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

import meshwright as mw
from meshwright.comm import communicator
from meshwright.errors import LayoutError
from meshwright.pipelining import (
    PipelineScheduleMulti,
    PipelineStage,
    PipeliningShapeError,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
    Tie,
    clip_grad_norm_,
    get_schedule_class,
    pipeline,
)
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel
from meshwright.testing import Ranks
from support.internals.comm import whole
from support.internals.schedule import stage_ranks

CPU = torch.device("cpu")
WORDS, WIDTH, ROWS = 11, 6, 8


class Tied(nn.Module):
    """Embedding and head share their weight; the last layer has the first one's bias."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(stages))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.layers[-1].bias = self.layers[0].bias
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Part(nn.Module):
    """One stage of it, by hand, with copies of what others hold too."""

    def __init__(self, model: Tied, stage: int, stages: int) -> None:
        super().__init__()
        self.embed = copy.deepcopy(model.embed) if stage == 0 else None
        self.layer = copy.deepcopy(model.layers[stage])
        self.head = copy.deepcopy(model.head) if stage == stages - 1 else None
        if self.head is not None:  # The values are those of the owner.
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        x = x + torch.tanh(self.layer(x))
        return x if self.head is None else self.head(x)


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def made(name: str, model: Tied, stages: int, *, is_traced: bool) -> Any:
    """The schedule on this rank."""
    world, kind = communicator(), get_schedule_class(name)
    style = "v" if "V" in name else "loop"
    mine = [s for s, r in enumerate(stage_ranks(world.size, stages, style)) if r == world.rank]
    microbatches = 4 * world.size
    if is_traced:
        spec = {f"layers.{i}": SplitPoint.BEGINNING for i in range(1, stages)}
        pipe = pipeline(model, (torch.zeros(ROWS // 4, 3, dtype=torch.long),), split_spec=spec)
        built: list[PipelineStage] = [pipe.build_stage(s, CPU) for s in mine]
    else:
        last = stages - 1
        ties = (
            Tie(0, ((0, "embed.weight"), (last, "head.weight"))),
            Tie(0, ((0, "layer.bias"), (last, "layer.bias"))),
        )
        parts = {s: Part(model, s, stages) for s in mine}
        built = [PipelineStage(parts[s], s, stages, CPU, ties=ties) for s in mine]
    is_multi = issubclass(kind, PipelineScheduleMulti)
    return kind(built if is_multi else built[0], microbatches, loss_fn=cross_entropy)


def refuse_to_clip(stages: list[PipelineStage]) -> None:
    """Each rank would clip by the norm of its own stages."""
    for stage in stages:
        part = stage.submod
        with pytest.raises(LayoutError, match=r"'pipeline' hold the others, and each would clip"):
            mw.clip_grad_norm_(part.parameters(), 0.05)
        if isinstance(part, mw.FullyShardedDataParallel):
            with pytest.raises(LayoutError, match=r"Use meshwright.pipelining.clip_grad_norm_"):
                part.clip_grad_norm_(0.05)


def body_equal(name: str, is_traced: bool) -> None:
    """Three steps of an optimizer, each of two accumulated ones and a clip."""
    world = communicator()
    chunks = 2 if issubclass(get_schedule_class(name), PipelineScheduleMulti) else 1
    stages = world.size * chunks
    torch.manual_seed(0)
    model = Tied(stages)
    alone = copy.deepcopy(model)
    schedule = made(name, model, stages, is_traced=is_traced)
    held = schedule._stages
    mine = [p for stage in held.values() for p in stage.submod.parameters()]
    optimizer, expected = torch.optim.Adam(mine, 0.1), torch.optim.Adam(alone.parameters(), 0.1)
    for number in range(3):
        torch.manual_seed(10 + number)
        optimizer.zero_grad()
        expected.zero_grad()
        for _ in range(2):
            tokens = torch.randint(WORDS, (ROWS * world.size, 3))
            target = torch.randint(WORDS, (ROWS * world.size, 3))
            more = {"target": target} if stages - 1 in held else {}
            schedule.step(*((tokens,) if 0 in held else ()), **more)
            cross_entropy(alone(tokens), target).backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        refuse_to_clip(list(held.values()))
        torch.testing.assert_close(clip_grad_norm_(list(held.values()), 0.05), norm)
        for index, stage in held.items():
            layer = alone.layers[index]
            wanted = {"layer.weight": layer.weight, "layer.bias": layer.bias}
            wanted |= {f"layers.{index}.{k.split('.')[1]}": v for k, v in wanted.items()}
            wanted |= {"embed.weight": alone.embed.weight, "head.weight": alone.embed.weight}
            for key, parameter in stage.submod.named_parameters():
                torch.testing.assert_close(parameter.grad, wanted[key].grad, rtol=1e-9, atol=1e-12)
        optimizer.step()
        expected.step()
        schedule.eval(*((tokens,) if 0 in held else ()))
    weights = [
        parameter.detach()
        for stage in held.values()
        for key, parameter in stage.submod.named_parameters()
        if key in ("embed.weight", "head.weight")
    ]
    for weight in weights:
        torch.testing.assert_close(weight, alone.embed.weight, rtol=1e-7, atol=1e-9)
    payload = b"".join(weight.numpy().tobytes() for weight in weights)
    every = b"".join(world.gather_bytes(payload, label="weights"))
    assert len(every) == 2 * WORDS * WIDTH * 8
    assert every[: len(every) // 2] == every[len(every) // 2 :]


NAMES = (
    *("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZB2P"),
    *("ZBVZeroBubble", "VHalf", "VMin", "DualPipeV"),
)


def body_all(names: tuple[str, ...]) -> None:
    for name in names:
        body_equal(name, is_traced=False)
    body_equal(names[0], is_traced=True)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_holders_stay_one_parameter(ranks: Ranks, size: int) -> None:
    ranks(size, body_all, NAMES, timeout=120)


def body_refused() -> None:
    world = communicator()
    sizes = (3, 4)
    tie = Tie(0, ((0, "weight"), (1, "weight")))
    module = nn.Linear(3, sizes[world.rank])
    stage = PipelineStage(module, world.rank, 2, CPU, ties=[tie])
    for wrong, text in (
        (Tie(1, ((0, "weight"), (2, "weight"))), "expected a tie of different stages below 2"),
        (Tie(1, ((0, "weight"), (0, "bias"))), "expected a tie of different stages below 2"),
        (Tie(0, ((0, "heavy"), (1, "heavy"))), r"stage \d has no parameter 'heavy'"),
    ):
        with pytest.raises(ValueError, match=text):
            ScheduleGPipe(PipelineStage(module, world.rank, 2, CPU, ties=[wrong]), 2)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss())
    x = torch.ones(2, 3)
    more = {} if world.rank == 0 else {"target": torch.ones(2, 4)}
    text = "has shape .4, 3. and torch.float32, and 'weight' of stage 0 another"
    with pytest.raises(PipeliningShapeError, match=text):
        schedule.step(*((x,) if world.rank == 0 else ()), **more)
    assert module.weight.grad is None


@pytest.mark.devices("host", reason="no host waits for a device's message, and looks")
def test_what_is_no_tie(ranks: Ranks) -> None:
    ranks(2, body_refused)


def body_placed() -> None:
    """Local parts of one shape, of a weight split by rows and of one split by columns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    line = communicator(mesh.get_group("pipeline"))
    module = nn.Linear(4, 8, bias=False) if line.rank == 0 else nn.Linear(8, 4, bias=False)
    styles = (
        ColwiseParallel(output_layouts=Replicate()),
        RowwiseParallel(input_layouts=Replicate()),
    )
    mw.parallelize_module(module, mesh["tensor"], styles[line.rank])
    tie = Tie(0, ((0, "weight"), (1, "weight")))
    stage = PipelineStage(module, line.rank, 2, CPU, group=line.group, ties=[tie])
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss())
    more = {"target": torch.ones(2, 4)} if line.rank else {}
    text = "has shape .4, 4. .* another shape, dtype or placement"
    with pytest.raises(PipeliningShapeError, match=text):
        schedule.step(*(() if line.rank else (torch.ones(2, 4),)), **more)


@pytest.mark.devices("host", reason="no host waits for a device's message, and looks")
def test_holders_placed_otherwise_are_no_tie(ranks: Ranks) -> None:
    ranks(4, body_placed)


def body_one_object() -> None:
    """Two stages of one rank that hold one object, not copies: its gradient would count twice."""
    world = communicator()
    first, last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    last.weight = first.weight
    tie = Tie(0, ((0, "weight"), (1, "weight")))
    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]

    def made(*modules: nn.Module, ties: tuple[Tie, ...] = (), **options: Any) -> Any:
        stages = [
            PipelineStage(module, index, 2, world.device, group=alone, ties=ties)
            for index, module in enumerate(modules)
        ]
        return ScheduleInterleaved1F1B(stages, 2, **options)

    training = {"loss_fn": nn.functional.mse_loss}
    with pytest.raises(ValueError, match=r"stages \[0, 1\] of this rank hold one object as"):
        made(first, last, ties=(tie,), **training)
    x, y = torch.randn(4, 3, device=world.device), torch.randn(4, 3, device=world.device)
    first.to(world.device)
    made(first, last, **training).step(x, target=y)
    shared = first.weight.grad
    assert shared is not None
    expected = first.weight.detach().clone().requires_grad_()
    nn.functional.mse_loss(x @ expected.T @ expected.T, y).backward()
    torch.testing.assert_close(shared, expected.grad)
    made(first, last, ties=(tie,)).eval(x)  # which has no gradients
    replicas = [mw.replicate(module) for module in (first, last)]
    with pytest.raises(ValueError, match="stages 0 and 1 of this rank share parameter 'weight'"):
        made(*replicas, **training)
    first.requires_grad_(False)
    made(*replicas, **training)


def test_stages_of_one_rank_that_hold_one_object(ranks: Ranks) -> None:
    ranks(2, body_one_object)


def body_frozen() -> None:
    """The owner says whether a tied parameter trains: users may hold no other."""
    world = communicator()
    torch.manual_seed(0)
    model = Tied(2)
    alone = copy.deepcopy(model)
    schedule = made("GPipe", model, 2, is_traced=False)
    part = schedule._stages[world.rank].submod
    held = (part.embed or part.head).weight
    tokens = torch.randint(WORDS, (ROWS * world.size, 3))
    more = {} if world.rank == 0 else {"target": tokens}
    for trains in (True, False, True):
        alone.embed.weight.requires_grad_(trains)
        if world.rank == 0:
            held.requires_grad_(trains)
        alone.zero_grad()
        part.zero_grad()
        cross_entropy(alone(tokens), tokens).backward()
        schedule.step(*((tokens,) if world.rank == 0 else ()), **more)
        torch.testing.assert_close(held.grad, alone.embed.weight.grad)
    held.requires_grad_(world.rank == 0)
    text = "'embed.weight' trains in stage 0, and its copy 'head.weight' in stage 1 is frozen"
    with pytest.raises(LayoutError, match=text):
        schedule.step(*((tokens,) if world.rank == 0 else ()), **more)


def test_a_tied_parameter_is_frozen_in_all_stages(ranks: Ranks) -> None:
    ranks(2, body_frozen)


def body_spread(kind: str) -> None:
    """Holders that are replicated or sharded over two data ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    data, line = mesh["data"], communicator(mesh.get_group("pipeline"))
    torch.manual_seed(0)
    model = Tied(2)
    alone = copy.deepcopy(model)
    part = Part(model, line.rank, 2)
    if kind == "replicate":
        mw.replicate(part, device_mesh=data)
    elif kind == "fully_shard":
        mw.fully_shard(part.head if part.embed is None else part.embed, mesh=data)
        mw.fully_shard(part, mesh=data)
    module = part
    if kind == "wrapper":
        wrap = mw.FullyShardedDataParallel
        module = wrap(part, process_group=data.get_group(), use_orig_params=True)
    ties = (
        Tie(0, ((0, "embed.weight"), (1, "head.weight"))),
        Tie(0, ((0, "layer.bias"), (1, "layer.bias"))),
    )
    stage = PipelineStage(module, line.rank, 2, CPU, group=line.group, ties=ties)
    schedule = ScheduleGPipe(stage, 4, loss_fn=cross_entropy)
    mine = list(module.parameters())
    optimizer, expected = torch.optim.SGD(mine, 0.5), torch.optim.SGD(alone.parameters(), 0.5)
    for number in range(2):
        torch.manual_seed(10 + number)
        optimizer.zero_grad()
        expected.zero_grad()
        for _ in range(2):
            tokens, target = torch.randint(WORDS, (2, 2 * ROWS, 3))
            share = mesh.get_local_rank("data")
            more = {"target": target.chunk(2)[share]} if line.rank else {}
            schedule.step(*(() if line.rank else (tokens.chunk(2)[share],)), **more)
            cross_entropy(alone(tokens), target).backward()
        optimizer.step()
        expected.step()
    with contextlib.ExitStack() as stack:
        if kind == "wrapper":
            stack.enter_context(mw.FullyShardedDataParallel.summon_full_params(module))
        layer, weight = alone.layers[line.rank], alone.embed.weight
        wanted = {"layer.weight": layer.weight, "layer.bias": layer.bias}
        wanted |= {"embed.weight": weight, "head.weight": weight}
        for name, parameter in module.named_parameters():
            key = name.removeprefix("_fsdp_wrapped_module.")
            torch.testing.assert_close(
                whole(parameter.detach()), wanted[key], rtol=1e-9, atol=1e-12
            )


def body_spreads() -> None:
    for kind in ("replicate", "fully_shard", "wrapper"):
        body_spread(kind)


def test_holders_may_be_spread_over_data_ranks(ranks: Ranks) -> None:
    ranks(4, body_spreads)


def sharded(part: nn.Module, mesh: Any) -> nn.Module:
    """The head is a unit of its own, the embedding lies in that of its stage."""
    if isinstance(part.head, nn.Module):
        mw.fully_shard(part.head, mesh=mesh)
    return mw.fully_shard(part, mesh=mesh)


KINDS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "replicate": lambda part, mesh: mw.replicate(part, device_mesh=mesh),
    "DistributedDataParallel": lambda part, mesh: mw.DistributedDataParallel(
        part, process_group=mesh.get_group()
    ),
    "fully_shard": sharded,
    "FullyShardedDataParallel": lambda part, mesh: mw.FullyShardedDataParallel(
        part, process_group=mesh.get_group(), use_orig_params=True
    ),
}


def body_data_parallel(kind: str, name: str) -> None:
    """Two pipelines, two replicas of each stage: three steps, accumulated, clipped."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    data, group = mesh["data"], mesh["pipeline"].get_group()
    world, schedule_class = communicator(group), get_schedule_class(name)
    is_multi = issubclass(schedule_class, PipelineScheduleMulti)
    stages = 4 if is_multi else 2
    torch.manual_seed(0)
    model = Tied(stages)
    alone = copy.deepcopy(model)
    style = "v" if "V" in name else "loop"
    mine = [s for s, r in enumerate(stage_ranks(2, stages, style)) if r == world.rank]
    last = stages - 1
    ties = (
        Tie(0, ((0, "embed.weight"), (last, "head.weight"))),
        Tie(0, ((0, "layer.bias"), (last, "layer.bias"))),
    )
    built = []
    for s in mine:
        part = KINDS[kind](Part(model, s, stages), data)
        built.append(PipelineStage(part, s, stages, CPU, group=group, ties=ties))
    schedule = schedule_class(built if is_multi else built[0], 4, loss_fn=cross_entropy)
    parameters = [p for stage in built for p in stage.submod.parameters()]
    optimizer, expected = torch.optim.SGD(parameters, 0.1), torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        expected.zero_grad()
        for _ in range(2):
            tokens, target = torch.randint(WORDS, (2, 16, 3))
            rank = data.get_local_rank()
            more = {"target": target.chunk(2)[rank]} if last in mine else {}
            schedule.step(*((tokens.chunk(2)[rank],) if 0 in mine else ()), **more)
            cross_entropy(alone(tokens), target).backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        refuse_to_clip(built)
        torch.testing.assert_close(clip_grad_norm_(built, 0.05), norm)
        optimizer.step()
        expected.step()
    for stage in built:
        layer = alone.layers[stage.stage_index]
        wanted = {"layer.weight": layer.weight, "layer.bias": layer.bias}
        wanted |= {"embed.weight": alone.embed.weight, "head.weight": alone.embed.weight}
        is_wrapper = isinstance(stage.submod, mw.FullyShardedDataParallel)
        gathered = mw.FullyShardedDataParallel.summon_full_params(stage.submod)
        with gathered if is_wrapper else contextlib.nullcontext():
            for key, parameter in stage.submod.named_parameters():
                name = key.removeprefix("module.").removeprefix("_fsdp_wrapped_module.")
                torch.testing.assert_close(whole(parameter), wanted[name])


def body_kinds(name: str) -> None:
    for kind in KINDS:
        body_data_parallel(kind, name)


def test_ties_of_spread_stages_in_a_v(ranks: Ranks) -> None:
    """Both holders are on one rank there."""
    ranks(4, body_kinds, "ZBVZeroBubble", timeout=120)
