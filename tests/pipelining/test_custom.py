"""Functions of the user in a schedule, and stages that are driven by hand."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.comm import communicator
from meshwright.comm.whole import whole
from meshwright.errors import PipelinePeerError
from meshwright.pipelining import (
    PipelineScheduleMulti,
    PipelineStage,
    get_schedule_class,
)
from meshwright.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    REDUCE_GRAD,
    RESHARD,
    SEND_F,
    UNSHARD,
)
from meshwright.schedule.builders import stage_ranks
from meshwright.testing import Ranks

CPU = torch.device("cpu")
ALL = (
    FORWARD,
    FULL_BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    OVERLAP_F_B,
    UNSHARD,
    RESHARD,
    REDUCE_GRAD,
)


def layer(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()


def made(name: str, kind: str, *, scale: bool = True) -> tuple[Any, list[nn.Module], list[int]]:
    """A schedule on one or two pipelines of two ranks, the whole model, the stages here."""
    mesh = init_device_mesh("cpu", (communicator().size // 2, 2), mesh_dim_names=("data", "pipe"))
    pipe = communicator(mesh.get_group("pipe"))
    schedule_class = get_schedule_class(name)
    is_multi = issubclass(schedule_class, PipelineScheduleMulti)
    count = 4 if is_multi else 2
    ones = [layer(seed) for seed in range(count)]
    ranks = stage_ranks(2, count, "v" if "V" in name else "loop")
    mine = [s for s in range(count) if ranks[s] == pipe.rank]
    modules = [copy.deepcopy(ones[s]) for s in mine]
    if kind == "replicate":
        modules = [mw.replicate(module, device_mesh=mesh["data"]) for module in modules]
    elif kind == "fully_shard":
        modules = [mw.fully_shard(module, mesh=mesh["data"]) for module in modules]
    stages = [
        PipelineStage(module, s, count, CPU, group=pipe.group)
        for module, s in zip(modules, mine, strict=True)
    ]
    loss = nn.MSELoss(reduction="mean" if scale else "sum")
    one_or_all: Any = stages if is_multi else stages[0]
    return schedule_class(one_or_all, 4, loss_fn=loss, scale_grads=scale), ones, mine


def by_stages(action: Any, ctx: Any) -> None:
    """Every operation by the methods of the stage, as torch's own runtime would call them."""
    if action.sub_actions:
        for part in action.sub_actions:
            by_stages(part, ctx)
        return
    stage, k = ctx.schedule_ref.stages[action.stage_index], action.microbatch_index
    operation = action.computation_type
    if operation is FORWARD:
        stage.forward_one_chunk(k, ctx.arg_mbs[k], ctx.kwarg_mbs[k])
    elif operation is FULL_BACKWARD or operation is BACKWARD_INPUT:
        loss = ctx.losses[k] if stage.is_last else None
        stage.backward_one_chunk(k, loss=loss, full_backward=operation is FULL_BACKWARD)
    elif operation is BACKWARD_WEIGHT:
        stage.backward_weight_one_chunk(k)
    elif operation is REDUCE_GRAD:
        stage.perform_reduce_grad(4 if ctx.schedule_ref.scale_grads else 1)
    else:
        ctx.run(action)


def by_run(action: Any, ctx: Any) -> None:
    ctx.run(action)


def body_equal(cases: list[tuple[str, str, bool]]) -> None:
    world = communicator()
    x, target = torch.randn(2, 20, 6, dtype=torch.float64, generator=torch.manual_seed(9))
    share = world.rank // 2
    seen: Counter[Any] = Counter()
    for name, kind, scale in cases:
        schedule, ones, mine = made(name, kind, scale=scale)
        replicas = world.size // 2
        full = nn.Sequential(*ones)(x)
        nn.MSELoss(reduction="mean" if scale else "sum")(full, target).backward()
        args = (x.chunk(replicas)[share],) if 0 in mine else ()
        targets = target.chunk(replicas)[share]
        last = {"target": targets} if len(ones) - 1 in mine else {}
        for times, function in enumerate((by_stages, by_run), 1):
            calls: Counter[Any] = Counter()

            def counted(
                action: Any, ctx: Any, function: Any = function, calls: Any = calls
            ) -> None:
                calls[action.computation_type] += 1
                function(action, ctx)

            for operation in ALL:
                schedule.register_custom_function(operation, counted)
            schedule.step(*args, **last)
            row = schedule.lowered.actions(world.rank % 2)
            assert calls == Counter(a.operation for a in row if a.operation in ALL)
            seen += calls
            for s in mine:
                module = schedule.stages[s].submod
                for a, b in zip(module.parameters(), ones[s].parameters(), strict=True):
                    # Replicas mean, so a sum over the batch is divided by their number.
                    expected = times * b.grad / (1 if scale else replicas)
                    torch.testing.assert_close(whole(a.grad), expected)
        evaluated = schedule.eval(*args)
        if evaluated is not None:
            torch.testing.assert_close(evaluated, full.chunk(replicas)[share])
    assert set(seen) == set(ALL)


@pytest.mark.parametrize("size", [2, 4])
def test_functions_of_the_user_train_to_the_same_numbers(ranks: Ranks, size: int) -> None:
    kinds = ("plain",) if size == 2 else ("replicate", "fully_shard")
    names = (("1F1B", True), ("InterleavedZeroBubble", True), ("DualPipeV", False))
    ranks(size, body_equal, [(name, kind, scale) for kind in kinds for name, scale in names])


def fails(action: Any, ctx: Any) -> None:
    raise OSError(f"planted in {action}")


def nothing(action: Any, ctx: Any) -> None: ...


def another(action: Any, ctx: Any) -> None:
    ctx.run(action._replace(stage=7))


def body_errors() -> None:
    x = torch.randn(8, 6, dtype=torch.float64)
    cases = [(OVERLAP_F_B, another, ValueError, "OVERLAP_F_B, which runs now")]
    for operation in (FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OVERLAP_F_B):
        cases.append((operation, fails, OSError, f"planted in .*{operation.value}"))
        cases.append((operation, nothing, RuntimeError, f"{operation.name} has left .* undone"))
    for operation, function, kind, text in cases:
        schedule, _, mine = made("DualPipeV", "plain")
        here = 0 in mine
        if here:
            schedule.register_custom_function(operation, function)
            with pytest.raises(kind, match=text):
                schedule.step(x, target=x)
        else:
            with pytest.raises(PipelinePeerError, match=f"rank 0 stage . failed in .*{text}"):
                schedule.step()
    with pytest.raises(ValueError, match="Invalid computation type SEND_F. Only F.* are supported"):
        schedule.register_custom_function(SEND_F, fails)
    with pytest.raises(ValueError, match="Invalid computation type F"):
        schedule.register_custom_function("F", fails)


def test_what_a_function_of_the_user_raises_is_named_everywhere(ranks: Ranks) -> None:
    ranks(2, body_errors, timeout=60)
