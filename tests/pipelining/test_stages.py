"""The upstream test of pipeline stages, on CPU: traced and manual stages at 2 and 4 ranks.

What rank 0 does wrong on purpose it does alone: the other ranks are not in a step then.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.comm import communicator
from meshwright.errors import CollectiveMismatchError, PipelinePeerError
from meshwright.pipelining import (
    PipelineScheduleMulti,
    PipelineStage,
    PipeliningShapeError,
    ScheduleGPipe,
    Source,
    SplitPoint,
    StageEdges,
    balanced,
    build_stage,
    get_schedule_class,
    pipe_split,
    pipeline,
)
from meshwright.testing import Ranks, RanksFailed
from support.internals.schedule import stage_ranks

HIDDEN, BATCH, CHUNKS = 512, 256, 4
CPU = torch.device("cpu")


class Example(nn.Module):
    """Cut in its forward; a constant and a value without gradient are used behind the cut."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(
            torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5 for _ in range(stages)
        )
        self.register_buffer("constant", torch.randn(HIDDEN))
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_positive, constant = x > 0, self.constant.clone()
        for number, matrix in enumerate(self.matrices):
            if number:
                pipe_split()
            x = torch.relu(torch.mm(x, matrix)) + constant * is_positive
        return self.linear(x)


class Chain(nn.Module):
    """Cut by a spec."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
            for _ in range(stages)
        )
        self.split_spec = {f"layers.{i}": SplitPoint.BEGINNING for i in range(1, stages)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class WithKeyword(Example):
    """Takes a tensor by keyword, which its first stage uses."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if y is None else x + y)


class Places(nn.Module):
    """Makes tensors on the device of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + torch.arange(HIDDEN, device=x.device)
        return x


def hook_of(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return lambda module, inputs, output: tree_map_only(torch.Tensor, change, output)


def fail_alone(
    run: Callable[[torch.Tensor], object], module: nn.Module, x: torch.Tensor, rounds: int
) -> None:
    """Rank 0 refuses steps by itself, each from a clean state; then the schedule has ended."""
    if communicator().rank == 0:
        for _ in range(rounds):
            with pytest.raises(PipeliningShapeError, match="shape mismatch"):
                run(torch.randn(BATCH + 1, HIDDEN))
            with pytest.raises(PipeliningShapeError, match="dtype mismatch"):
                run(x.to(torch.int32))
            handle = module.register_forward_hook(hook_of(torch.flatten))
            with pytest.raises(PipeliningShapeError, match="shape mismatch"):
                run(x)
            handle.remove()
            handle = module.register_forward_hook(hook_of(torch.Tensor.bfloat16))
            with pytest.raises(PipeliningShapeError, match="dtype mismatch"):
                run(x)
            handle.remove()
    communicator().barrier()  # who is in a step that another rank refuses raises too


def body_traced() -> None:
    """Forward alone, from a spec, from marks in the code, and with a keyword."""
    world = communicator()
    for kind in (Example, Chain, WithKeyword):
        torch.manual_seed(0)
        model = kind(world.size)
        x, y = torch.randn(2, BATCH, HIDDEN)
        more, chunk = ({"y": y}, {"y": y.chunk(CHUNKS)[0]}) if kind is WithKeyword else ({}, None)
        spec = getattr(model, "split_spec", None)
        pipe = pipeline(model, mb_args=(x.chunk(CHUNKS)[0],), mb_kwargs=chunk, split_spec=spec)
        assert pipe.num_stages == world.size
        if kind is WithKeyword:
            stage = build_stage(pipe.get_stage_module(world.rank), world.rank, pipe.info(), CPU)
        else:
            stage = pipe.build_stage(world.rank, CPU)
        schedule = ScheduleGPipe(stage, CHUNKS)
        run = lambda given: schedule.step(given, **more)  # noqa: B023, E731
        fail_alone(run, stage.submod, x, 1)
        schedule = ScheduleGPipe(stage, CHUNKS)
        out = run(x) if world.rank == 0 else schedule.step()
        if world.rank == world.size - 1:
            torch.testing.assert_close(out, model(x, **more), atol=1e-3, rtol=5e-2)
        assert stage.submod.state_dict().keys() <= model.state_dict().keys()
        fail_alone(run, stage.submod, x, 4 if kind is WithKeyword else 1)


def body_refused() -> None:
    """What a traced stage cannot take is told before anything runs, and names what to do."""
    world = communicator()
    torch.manual_seed(0)
    x = torch.randn(BATCH, HIDDEN)
    part = x.chunk(CHUNKS)[0]
    pipe = pipeline(WithKeyword(world.size), (part,), {"y": part})
    stage = pipe.build_stage(world.rank, CPU)
    schedule = ScheduleGPipe(stage, CHUNKS)
    if world.rank == 0:
        fixed = "microbatch 3, has a shape mismatch.*must be a multiple of it, or .*dynamic_shapes"
        with pytest.raises(PipeliningShapeError, match=fixed):
            schedule.step(x[:-1], y=x[:-1])
        with pytest.raises(PipeliningShapeError, match="stride mismatch"):
            schedule.step(x, y=x.t().contiguous().t())
        with pytest.raises(ValueError, match=r"reads the keyword arguments \['y'\]"):
            schedule.step(x)
        with pytest.raises(ValueError, match=r"keyword arguments \['z'\] that the model was not"):
            schedule.step(x, y=x, z=x)
        with pytest.raises(ValueError, match="expects 1 positional arguments.* got 2"):
            schedule.step(x, x, y=x)
    world.barrier()
    schedule = ScheduleGPipe(stage, CHUNKS)
    placed = pipeline(Places(), (part,), split_policy=balanced(2))
    elsewhere = placed.build_stage(world.rank, torch.device("meta")).submod
    given = [torch.empty(BATCH // CHUNKS, HIDDEN, device="meta")]
    assert {t.device.type for t in tree_leaves(elsewhere(*given))} == {"meta"}
    assert elsewhere is placed.get_stage_module(world.rank)  # its parameters are the model's
    out = schedule.step(*(x,)[: world.rank == 0], **({} if world.rank else {"y": x}))
    assert (out is None) == (world.rank < world.size - 1)


def body_wrong_dtype() -> None:
    world = communicator()
    pipe = pipeline(Plain(), (torch.ones(2, 8),), split_spec={"1": SplitPoint.BEGINNING})
    schedule = ScheduleGPipe(pipe.build_stage(world.rank, CPU), 2, loss_fn=nn.MSELoss())
    x = torch.ones(4, 8)
    schedule.step(*((x.double(),) if world.rank == 0 else ()), target=x if world.rank else None)


def test_peers_hear_of_a_wrong_dtype(ranks: Ranks) -> None:
    """It is an error of its type on the first rank, and no rank waits for its time to run out."""
    with pytest.raises(RanksFailed) as found:
        ranks(2, body_wrong_dtype, timeout=60)
    first, peer = found.value.outcomes
    assert "PipeliningShapeError" in first.headline()
    assert "dtype mismatch: expected torch.float32 actual torch.float64" in first.details()
    assert "PipeliningShapeError: [Stage 0] argument" in peer.headline()
    assert "rank 0" in peer.details()


class Folded(nn.Module):
    """Sizes of the batch, a mask without gradient and an early value are used in later stages."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(stages))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, early, rows = x > 0, None, x.shape[0]
        for number, layer in enumerate(self.layers):
            if number:
                pipe_split()
            x = torch.tanh(layer(x)).view(rows * 2, 4).view(rows, 8) * mask
            early = x if early is None else early
        return x + early


def body_trained(name: str) -> None:
    """Uneven batches of sizes that the trace left open, trained under any schedule."""
    world, kind = communicator(), get_schedule_class(name)
    is_multi = issubclass(kind, PipelineScheduleMulti)
    count = world.size * 2 if is_multi else world.size
    torch.manual_seed(0)
    model = Folded(count)
    alone = copy.deepcopy(model)
    open_sizes = {"x": {0: torch.export.Dim("rows", min=2)}}
    pipe = pipeline(model, (torch.zeros(3, 8).double(),), dynamic_shapes=open_sizes)
    holders = stage_ranks(world.size, count, "v" if "V" in name else "loop")
    mine = [s for s, r in enumerate(holders) if r == world.rank]
    stages = [pipe.build_stage(s, CPU) for s in mine]
    schedule = kind(stages if is_multi else stages[0], 4, loss_fn=nn.MSELoss())
    for rows in (10, 16):
        x, target = torch.randn(2, rows, 8, dtype=torch.float64)
        more = {"target": target} if count - 1 in mine else {}
        out = schedule.step(*((x,) if 0 in mine else ()), **more)
        expected = alone(x)
        nn.MSELoss()(expected, target).backward()
        if out is not None:
            torch.testing.assert_close(out, expected)
        for stage in stages:
            for key, parameter in stage.submod.named_parameters():
                wanted = alone.get_parameter(key).grad
                torch.testing.assert_close(parameter.grad, wanted, rtol=1e-10, atol=1e-12)
    if 0 in mine:
        with pytest.raises(PipeliningShapeError, match="dtype mismatch"):
            schedule.step(torch.ones(8, 8), **more)
        with pytest.raises(PipeliningShapeError, match=r"expected \['any', 8\] actual \[2, 9\]"):
            schedule.step(torch.ones(8, 9).double(), **more)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_traced_stages_train(ranks: Ranks, name: str) -> None:
    ranks(2, body_trained, name)


def body_manual() -> None:
    """Stages of one's own, and weight gradients that the user computes."""
    world = communicator()
    torch.manual_seed(0)
    model = Chain(world.size)
    x, target = torch.randn(2, BATCH, HIDDEN)
    module = model.get_submodule(f"layers.{world.rank}")
    first = x.chunk(CHUNKS)[0]
    stage = PipelineStage(module, world.rank, world.size, CPU, input_args=first)
    schedule = ScheduleGPipe(stage, CHUNKS)
    out = schedule.step(x) if world.rank == 0 else schedule.step()
    if out is not None:
        torch.testing.assert_close(out, model(x))
    fail_alone(schedule.step, module, x, 1)
    calls: list[int] = []
    stage = PipelineStage(
        module,
        world.rank,
        world.size,
        CPU,
        input_args=first,
        dw_builder=lambda: lambda: calls.append(1),
    )
    schedule = ScheduleGPipe(stage, CHUNKS, loss_fn=nn.MSELoss(reduction="sum"))
    if world.rank == 0:
        out = schedule.step(x)
    else:
        out = schedule.step(target=target) if world.rank == world.size - 1 else schedule.step()
    assert len(calls) == CHUNKS
    if out is not None:
        torch.testing.assert_close(out, model(x))
    if world.rank == 0:
        with pytest.raises(PipeliningShapeError, match="shape mismatch"):
            schedule.step(torch.randn(BATCH + 1, HIDDEN))
    fresh = PipelineStage(
        module, world.rank, world.size, CPU, input_args=first, dw_builder=lambda: lambda: None
    )
    with pytest.raises(AssertionError, match="backward_one_chunk"):
        fresh.backward_weight_one_chunk(bwd_chunk_id=0)
    fresh = PipelineStage(module, world.rank, world.size, CPU, input_args=first)
    with pytest.raises(AssertionError, match="dw_builder"):
        fresh.backward_one_chunk(bwd_chunk_id=0, full_backward=False)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            body_traced,
            marks=pytest.mark.devices("host", reason="a device's first step needs all ranks"),
        ),
        body_manual,
    ],
)
@pytest.mark.few(1)
def test_stages(ranks: Ranks, body: Callable[[], None], size: int) -> None:
    ranks(size, body)


class Scaled(nn.Module):
    """Reads what its edges give it by keyword."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor | None = None, shift: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = self.layer(x)
        y = y if scale is None else y * scale
        return y if shift is None else y + shift


def body_edges() -> None:
    """What no edge names is refused on all ranks; what an edge names comes, by whatever name."""
    world = communicator()
    layers = [Scaled(seed) for seed in range(world.size)]
    ones = copy.deepcopy(layers)
    edges = [
        StageEdges((Source(None, 0),)),
        StageEdges(
            (Source(0, 0),), (("scale", Source(None, "factor")), ("shift", Source(None, 1)))
        ),
    ]
    with pytest.raises(ValueError, match="edges of all 3 stages, found 2"):
        PipelineStage(layers[world.rank], world.rank, 3, CPU, edges=edges)
    stage = PipelineStage(layers[world.rank], world.rank, world.size, CPU, edges=edges)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    x, shift, target = torch.randn(3, 4, 8)
    factor = torch.rand(4, 1)
    last = {"target": target} if world.rank == 1 else {}
    for wrong in ({"scale": factor}, {"factor": factor, "mask": factor}):
        name = [key for key in wrong if key != "factor"]
        with pytest.raises(ValueError, match=rf"{name[0]}.*no stage name.*\['factor'\]"):
            schedule.step(x, shift, **wrong, **last)
    with pytest.raises(ValueError, match="got 3 positional arguments.*only the first 2"):
        schedule.step(x, shift, x, **last)
    schedule.step(x, shift, factor=factor, **last)
    y = ones[1](ones[0](x), scale=factor, shift=shift)
    nn.functional.mse_loss(y, target).backward()
    for a, b in zip(layers[world.rank].parameters(), ones[world.rank].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.few(1)
def test_edges_name_all_that_a_batch_has(ranks: Ranks) -> None:
    ranks(2, body_edges)


class Plain(nn.Sequential):
    """Two cuts give stages with inputs and outputs of the same shapes."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(8, 8) for _ in range(3)))


def body_split_differently() -> None:
    world = communicator()
    pipe = pipeline(Plain(), (torch.ones(2, 8),), split_spec={str(world.rank): SplitPoint.END})
    schedule = ScheduleGPipe(pipe.build_stage(world.rank, CPU), 2)
    if world.rank == 0:  # It may hear of it before it is done, or not.
        with contextlib.suppress(PipelinePeerError):
            schedule.step(torch.ones(4, 8))
    else:
        with pytest.raises(CollectiveMismatchError, match="disagree: split is .* on ranks .1.;"):
            schedule.step()


@pytest.mark.devices("host", reason="no host waits for a device's message, and looks")
def test_ranks_that_cut_differently_are_named(ranks: Ranks) -> None:
    ranks(2, body_split_differently)


@pytest.mark.devices("host", reason="traces take the device that C++ knows")
def test_what_a_traced_stage_refuses(ranks: Ranks) -> None:
    ranks(2, body_refused)
