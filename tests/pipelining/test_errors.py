"""Errors of stages and schedules that belong to no other file: their types and their texts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright.comm import communicator
from meshwright.errors import PipelinePeerError
from meshwright.pipelining import (
    PipelineScheduleMulti,
    PipelineScheduleRuntime,
    PipelineStage,
    PipeliningShapeError,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    merge_chunks,
)
from meshwright.pipelining.schedules import FORWARD, FULL_BACKWARD, OVERLAP_F_B
from meshwright.schedule import Action
from meshwright.testing import Ranks
from support.internals.schedule import B, F, I, build

CPU = torch.device("cpu")


def refuse(cases: list[tuple[Callable[[], object], type[Exception], str]]) -> None:
    for call, kind, text in cases:
        with pytest.raises(kind, match="^" + re.escape(text)):
            call()


def test_rounds() -> None:
    one = (
        "Interleaved 1F1B requires the number of microbatches to be a multiple of the number of "
        "rounds"
    )
    other = "Zero bubble requires the number of microbatches to be a multiple of the number of"
    refuse(
        [
            (lambda: build("interleaved1f1b", 2, 5, 2), ValueError, one),
            (lambda: build("zb1p", 2, 5, 2), ValueError, other),
        ]
    )


def test_texts() -> None:
    text = "Invalid action string: '2F', should be formatted as [stage][action type][(microbatch)]"
    refuse(
        [
            (lambda: Action.parse("2F"), RuntimeError, text),
            (lambda: Action.parse("2G0"), RuntimeError, "Invalid computation type G"),
        ]
    )


def layer(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()


class Fails(nn.Module):
    """Raises in its ``number``-th forward or backward."""

    def __init__(self, number: int, *, backward: bool) -> None:
        super().__init__()
        self.layer, self.left, self.backward = layer(0), number, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.backward and y.requires_grad:
            y.register_hook(self.count)
        elif not self.backward:
            self.count(y)
        return y

    def count(self, _: torch.Tensor) -> None:
        self.left -= 1
        if not self.left:
            raise OSError("planted")


class Sparse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to_sparse()


def body_declared() -> None:
    world = communicator()
    for given, kind, text in (
        ((torch.ones(2), object()), PipeliningShapeError, "Stage arg[1] has type object"),
        (
            torch.eye(2).to_sparse(),
            RuntimeError,
            "Failed to perform pipeline shape inference: [Stage 1] input_args",
        ),
    ):
        with pytest.raises(kind, match=re.escape(text)):
            PipelineStage(layer(0), 1, 2, CPU, input_args=given)
    schedule = ScheduleGPipe(PipelineStage(Sparse(), world.rank, 2, CPU), 2)
    if world.rank == 0:
        with pytest.raises(RuntimeError, match="pipeline shape inference: .Stage 0. output of mic"):
            schedule.step(torch.ones(2, 2))


@pytest.mark.devices("host", reason="no host waits for a device's message, and looks")
def test_declared(ranks: Ranks) -> None:
    ranks(2, body_declared)


def body_by_hand() -> None:
    stage = PipelineStage(Fails(1, backward=False), 0, 2, CPU)
    last = PipelineStage(layer(1), 1, 2, CPU)
    x = torch.ones(2, 4, dtype=torch.float64)
    half, weight = (
        lambda: stage.backward_one_chunk(0, full_backward=False),
        lambda: stage.backward_weight_one_chunk(0),
    )
    failed = "[Stage 0] failed to run forward: args: (float64[2, 4]) kwargs: {}: planted"
    missing = "[Stage 0] Attempted to run backward_weight_one_chunk for chunk 0 without first"
    refuse(
        [
            (lambda: stage.forward_one_chunk(0, (x,)), RuntimeError, failed),
            (half, AssertionError, "[Stage 0] cannot run a partial backward for chunk 0: no f"),
            (weight, AssertionError, missing),
            (
                lambda: last.get_local_bwd_output(0),
                RuntimeError,
                "Attempted to access chunk_id before chunks have been configured.",
            ),
        ]
    )
    last.has_backward = True
    for full, text in (
        (True, "Failed to run stage backward: "),
        (False, "Failed to run stage backward input: "),
    ):
        last.submod = Fails(1, backward=True)
        last.set_local_fwd_input((x.clone().requires_grad_(),), 0)
        loss = last.forward_one_chunk(0, ()).sum()
        call = lambda loss=loss, full=full: last.backward_one_chunk(0, loss, full)  # noqa: E731
        refuse([(call, RuntimeError, text)])
    last.set_local_fwd_input((x,), 0)
    last.forward_one_chunk(0, ())
    refuse(
        [
            (
                lambda: last.backward_one_chunk(0),
                RuntimeError,
                "Loss for microbatch 0 is not available: ",
            )
        ]
    )


def test_by_hand(ranks: Ranks) -> None:
    ranks(2, body_by_hand)


def another(action: Any, ctx: Any) -> None:
    ctx.schedule_ref.stages[action.stage].forward_one_chunk(7, ctx.arg_mbs[0])


def appends(action: Any, ctx: Any) -> None:
    ctx.run(action)
    if ctx.losses and action.microbatch == 1:
        ctx.losses.append(torch.ones(()))


def forgets(action: Any, ctx: Any) -> None:
    ctx.run(action)
    if ctx.losses:
        ctx.losses[1] = None


def body_functions() -> None:
    """What is told of functions of the user, and of outputs of two kinds."""
    world = communicator()
    x = torch.ones(4, 4, dtype=torch.float64)
    args, last = ((), {"target": x}) if world.rank else ((x,), {})
    for operation, function, text in (
        (FORWARD, another, "Chunk id 7 is out of range [0, 2)"),
        (FORWARD, appends, "Expecting 2 losses but got 3"),
        (FULL_BACKWARD, forgets, "Loss for microbatch 1 is not available"),
    ):
        stage = PipelineStage(layer(world.rank), world.rank, 2, CPU)
        schedule = ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss())
        schedule.register_custom_function(operation, function)
        if function is another:
            with pytest.raises(RuntimeError, match=re.escape(text)):
                schedule.step(*args, **last)
        elif world.rank:
            refuse([(lambda s=schedule: s.step(target=x), RuntimeError, text)])
        else:
            schedule.step(x)
        world.barrier()
    mesh = init_device_mesh("cpu", (2,))
    whole = DTensor.from_local(x, mesh, [Replicate()])
    for other in (x, DTensor.from_local(x, mesh, [Shard(0)])):
        with pytest.raises(AssertionError, match="one kind of tensor with equal placements"):
            merge_chunks([whole, other])


def test_functions_of_the_user(ranks: Ranks) -> None:
    ranks(2, body_functions, timeout=60)


ORDERS = (
    "0F2,0F0,0B2,0F1,0B1,0B0\n1F2,1B2,1F0,1F1,1B1,1B0\n",
    "0F1,0F2,0I2,0W2,0F0,0I1,0I0,0W0,0W1\n1F1,1F2,1I2,1W2,1I1,1F0,1W1,1I0,1W0\n",
)


def body_orders(folder: str) -> None:
    """Orders of files, with forwards in another order than microbatches; formats there are not."""
    world = communicator()
    x, target = torch.randn(2, 7, 4, dtype=torch.float64, generator=torch.manual_seed(3))
    args, last = ((), {"target": target}) if world.rank else ((x,), {})
    mean = nn.MSELoss()
    for number, text in enumerate(ORDERS):
        path = Path(folder) / f"{number} {world.rank}.csv"
        path.write_text(text, encoding="utf-8")
        ones = [layer(seed) for seed in range(2)]
        stage = PipelineStage(layer(world.rank), world.rank, 2, CPU)
        schedule = PipelineScheduleRuntime([stage], 3, loss_fn=mean)
        schedule._load_csv(path)
        losses: list[torch.Tensor] = []
        out = schedule.step(*args, losses=losses, **last)
        expected = nn.Sequential(*ones)(x)
        mean(expected, target).backward()
        for a, b in zip(stage.submod.parameters(), ones[world.rank].parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        if world.rank:
            torch.testing.assert_close(out, expected)
            parts = zip(expected.tensor_split(3), target.tensor_split(3), strict=True)
            torch.testing.assert_close(losses, [mean(*part) for part in parts])
            sizes = [len(chunk) for chunk in stage.output_chunks]
            assert sizes == [3, 2, 2]
            torch.testing.assert_close(schedule.eval(), expected)
        else:
            schedule.eval(x)
    chains: PipelineScheduleMulti = ScheduleInterleaved1F1B([stage], 3)
    with pytest.raises(NotImplementedError, match="format='json' is not supported"):
        schedule._load_csv(path, format="json")
    with pytest.raises(AssertionError, match='format must be "compute_only"'):
        chains._load_csv(path, format="compute_comms")
    chains._load_csv(path)
    assert [str(action) for action in chains.schedule.actions(0)] == ORDERS[1].split()[0].split(",")


def test_orders_of_files(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, body_orders, str(tmp_path))


KINDS = ({F}, {B, I})
"""Operations that run forwards, and those that run the hooks of a last stage's output."""


def run_both(action: Any, ctx: Any) -> None:
    for part in action.sub_actions:
        ctx.run(part)


def body_overlaps() -> None:
    """In an overlap that part is named which has failed."""
    world = communicator()
    x = torch.ones(8, 4, dtype=torch.float64)
    holders = [world.rank, 3 - world.rank]
    for function in (None, run_both):
        for is_back in (False, True):
            modules = {s: layer(s) for s in holders}
            stages = [PipelineStage(modules[s], s, 4, CPU) for s in holders]
            schedule = ScheduleDualPipeV(stages, 8, loss_fn=nn.MSELoss())
            if function is not None:
                schedule.register_custom_function(OVERLAP_F_B, function)
            pairs = [action.parts for action in schedule.schedule.actions(0) if action.parts]
            found = next(p for p in pairs if p[0].stage != p[1].stage)
            bad = found[is_back]
            row = [q for a in schedule.schedule.actions(0) for q in a.parts or (a,)]
            alike = [q for q in row if q.stage == bad.stage and q.operation in KINDS[is_back]]
            own = f"{bad} of ({found[0]};{found[1]})OVERLAP_F_B"
            theirs = re.escape(f"rank 0 stage {bad.stage} failed in {own}: ") + ".*planted"
            if world.rank == 0:
                stages[holders.index(bad.stage)].submod = Fails(
                    alike.index(bad) + 1, backward=is_back
                )
                with pytest.raises(RuntimeError, match="planted"):
                    schedule.step(x, target=x)
            else:
                with pytest.raises(PipelinePeerError, match=theirs):
                    schedule.step()
            world.barrier()


@pytest.mark.devices("host", reason="no host waits for a device's message, and looks")
def test_the_part_of_an_overlap_that_failed_is_named(ranks: Ranks) -> None:
    ranks(2, body_overlaps, timeout=60)


def body_dtypes(is_declared: bool, has_stepped: bool) -> None:
    rank = communicator().rank
    x = torch.ones(4, 3, dtype=torch.float64)
    declared = (x[:2],) if is_declared else None
    module = nn.Linear(3, 3).double()
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), input_args=declared)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    if has_stepped:
        schedule.step(*((x,) if rank == 0 else ()), **({} if rank == 0 else {"target": x}))
    text = "argument 0 has a dtype mismatch: expected torch.float64 actual torch.float32"
    if rank == 0:
        with pytest.raises(PipeliningShapeError, match=text):
            schedule.step(x.float())
    else:
        with pytest.raises(PipelinePeerError, match=text):
            schedule.step(target=x)


@pytest.mark.few(2)
@pytest.mark.parametrize("has_stepped", [False, True], ids=["first step", "later"])
@pytest.mark.parametrize("is_declared", [False, True], ids=["learned", "declared"])
def test_a_wrong_dtype_into_the_first_stage_is_one_error(
    ranks: Ranks, is_declared: bool, has_stepped: bool
) -> None:
    ranks(2, body_dtypes, is_declared, has_stepped)
