"""What users do with stages and schedules beside a plain step, and what they do amiss."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright import pipelining
from meshwright.comm import communicator
from meshwright.errors import PipelinePeerError
from meshwright.pipelining import PipelineScheduleMulti, PipelineStage, get_schedule_class
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
from meshwright.testing import Ranks
from support.internals.comm import whole
from support.internals.pipelining import _ScheduleForwardOnly
from support.internals.schedule import stage_ranks

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


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
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


@pytest.mark.devices("host", reason="no host waits for a device's message, and looks")
def test_what_a_function_of_the_user_raises_is_named_everywhere(ranks: Ranks) -> None:
    ranks(2, body_errors, timeout=60)


def by_hand(kind: str, split: bool) -> None:
    """Two stages of one rank, driven by their methods; replicas are summed by what they are."""
    world = communicator()
    alone = communicator(init_device_mesh("cpu", (2, 1), mesh_dim_names=("d", "p")).get_group("p"))
    ones = [layer(seed) for seed in range(2)]
    modules = [copy.deepcopy(one) for one in ones]
    if kind == "replicate":
        modules = [mw.replicate(module) for module in modules]
    first, last = (PipelineStage(m, s, 2, CPU, group=alone.group) for s, m in enumerate(modules))
    x, target = torch.randn(2, 16, 6, dtype=torch.float64, generator=torch.manual_seed(4))
    mean = nn.MSELoss()
    mean(nn.Sequential(*ones)(x), target).backward()
    parts = [z.chunk(2)[world.rank] if kind == "replicate" else z for z in (x, target)]
    cut = list(zip(*(part.chunk(4) for part in parts), strict=True))
    for stage in (first, last):
        stage.clear_runtime_states()
        stage.has_backward = True
    with pytest.raises(RuntimeError, match="has no outputs of stages .0. for chunk 0"):
        last.forward_one_chunk(0, ())
    for k, (rows, wanted) in enumerate(cut):
        output = first.forward_one_chunk(fwd_chunk_id=k, args=(rows,), kwargs={})
        last.set_local_fwd_input((output,), mb_index=k)
        loss = mean(last.forward_one_chunk(k, ()), wanted)
        last.backward_one_chunk(bwd_chunk_id=k, loss=loss, full_backward=not split)
        first.set_local_bwd_input(last.get_local_bwd_output(k), k)
        first.backward_one_chunk(k, full_backward=not split)
        if split:
            last.backward_weight_one_chunk(bwd_chunk_id=k)
            first.backward_weight_one_chunk(k)
    for stage, text in ((first, "has no gradients for chunk 4"), (last, "starts from a loss")):
        last.set_local_fwd_input((output,), 4)
        stage.forward_one_chunk(4, (rows,))
        with pytest.raises(RuntimeError, match=text):
            stage.backward_one_chunk(4)
    for stage, one in zip((first, last), ones, strict=True):
        stage.perform_reduce_grad(4)
        for a, b in zip(stage.submod.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        stage.scale_grads(2)
        for a, b in zip(stage.submod.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad / 2)


def body_values_by_hand() -> None:
    """A backward of given values, as torch's own stages run it."""
    stage = PipelineStage(layer(0), communicator().rank, 2, CPU)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    at_once, halves = copy.deepcopy(stage.submod), stage.submod
    at_once(x).sum().backward()
    expected, x.grad = x.grad, None
    output = halves(x)
    given = {"stage_output": (output,), "output_grads": (torch.ones_like(output),)}
    gradients, groups = stage.backward_maybe_with_nosync(
        "input", {**given, "input_values": [x]}, last_backward=True
    )
    torch.testing.assert_close(gradients[0], expected)
    assert all(p.grad is None for p in halves.parameters())
    stage.backward_maybe_with_nosync("weight", {"param_groups": groups})
    for a, b in zip(halves.parameters(), at_once.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def body_hand() -> None:
    for kind in ("plain", "replicate"):
        for split in (False, True):
            by_hand(kind, split)
    body_values_by_hand()


def test_stages_are_driven_by_hand(ranks: Ranks) -> None:
    ranks(2, body_hand)


class Adds(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x


def body_in_place() -> None:
    """Stages that begin by writing to what they receive."""
    world = communicator()
    x, target = torch.randn(2, 8, 6, dtype=torch.float64, generator=torch.manual_seed(3))
    for name in ("1F1B", "ZBVZeroBubble"):
        _, ones, mine = made(name, "plain")
        ones = [nn.Sequential(nn.ReLU(inplace=True), one[:1]) for one in ones]
        stages = [PipelineStage(copy.deepcopy(ones[s]), s, len(ones), CPU) for s in mine]
        nn.MSELoss()(nn.Sequential(*ones)(x.clone()), target).backward()
        one_or_all: Any = stages if len(stages) > 1 else stages[0]
        schedule = get_schedule_class(name)(one_or_all, 4, loss_fn=nn.MSELoss())
        last = {"target": target} if len(ones) - 1 in mine else {}
        schedule.step(*((x.clone(),) if 0 in mine else ()), **last)
        for stage, s in zip(stages, mine, strict=True):
            for a, b in zip(stage.submod.parameters(), ones[s].parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad)
    module = nn.Sequential(Adds(), layer(1)) if world.rank else layer(0)
    stage = PipelineStage(module, world.rank, 2, CPU)
    schedule = get_schedule_class("GPipe")(stage, 4, loss_fn=nn.MSELoss())
    with pytest.raises(RuntimeError, match="Stage 1.* let its first operation make a new"):
        schedule.step(*(() if world.rank else (x,)), **({"target": x} if world.rank else {}))


def test_a_stage_may_write_in_place_to_what_it_receives(ranks: Ranks) -> None:
    ranks(2, body_in_place)


def body_frozen() -> None:
    world = communicator()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    pipe, share = communicator(mesh.get_group("pipe")), world.rank // 2
    x, target = torch.randn(2, 16, 6, dtype=torch.float64, generator=torch.manual_seed(3))
    mine = x.chunk(2)[share], target.chunk(2)[share]
    for name, kind in itertools.product(("1F1B", "InterleavedZeroBubble"), ("copies", "shards")):
        ones = [layer(seed).requires_grad_(seed != 1) for seed in range(2)]
        module = copy.deepcopy(ones[pipe.rank])
        if kind == "copies":
            mw.replicate(module, device_mesh=mesh["data"])
        else:
            mw.fully_shard(module, mesh=mesh["data"])
        stage: Any = PipelineStage(module, pipe.rank, 2, CPU, group=pipe.group)
        kind_of_schedule: Any = get_schedule_class(name)
        schedule = kind_of_schedule(stage if name == "1F1B" else [stage], 4, loss_fn=nn.MSELoss())
        nn.MSELoss()(nn.Sequential(*ones)(x), target).backward()
        args, last = ((), {"target": mine[1]}) if pipe.rank else ((mine[0],), {})
        schedule.step(*args, **last)
        for a, b in zip(module.parameters(), ones[pipe.rank].parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None) == (pipe.rank == 1)
            if b.grad is not None:
                torch.testing.assert_close(whole(a.grad), b.grad)


def test_a_stage_without_anything_to_train(ranks: Ranks) -> None:
    ranks(4, body_frozen)


def refuse(cases: list[tuple[Callable[[], object], type[Exception], str]]) -> None:
    for call, kind, text in cases:
        with pytest.raises(kind, match=text):
            call()
        communicator().barrier()


def body_amiss() -> None:
    rank = communicator().rank
    stage: Any = PipelineStage(layer(rank), rank, 2, CPU)
    gpipe: Any = get_schedule_class("GPipe")
    many: Any = get_schedule_class("InterleavedZeroBubble")
    compiled = PipelineStage(copy.deepcopy(stage.submod), rank, 2, CPU)
    compiled.submod.compile(backend="eager")
    third = PipelineStage(layer(rank), rank, 3, CPU)
    only = "schedule is not supported with stage modules that have used torch.compile."
    local = stage.set_local_bwd_input if rank == 0 else stage.set_local_fwd_input
    wrong: tuple[Callable[[], object], str] = (
        (lambda: stage.set_local_bwd_input((), 0), "can't set bwd input if this stage is last")
        if rank
        else (lambda: stage.get_local_bwd_output(0), "can't get bwd output if this stage is first")
    )
    refuse(
        [
            (lambda: gpipe([stage], 4), TypeError, "found list"),
            (lambda: gpipe(stage.submod, 4), TypeError, "found Sequential"),
            (lambda: many(stage, 4), TypeError, "found PipelineStage"),
            (lambda: many([], 4), ValueError, "expected different stages"),
            (lambda: many([stage, stage], 4), ValueError, "expected different stages"),
            (lambda: many([third], 4), ValueError, "found 3 stages for 2 ranks"),
            (lambda: many([compiled], 4), RuntimeError, f"InterleavedZeroBubble {only}"),
            (lambda: gpipe(stage, 4.0), TypeError, "n_microbatches to be an int, found 4.0"),
            (lambda: gpipe(stage, 4, loss_fn="mse"), TypeError, "expected loss_fn"),
            (lambda: local(1, 0), AssertionError, "Expected tuple, got"),
            (wrong[0], AssertionError, wrong[1]),
        ]
    )
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.manual_seed(1))
    forward, schedule = _ScheduleForwardOnly(stage, 4), gpipe(stage, 4, loss_fn=nn.MSELoss())
    with torch.no_grad():
        refuse([(schedule.step, RuntimeError, "step.. requires gradients to be enabled")])
        refuse([(schedule.step_microbatches, RuntimeError, "step.. requires gradients")])
    cut, given = schedule.step_microbatches, None if rank else [(x,)] * 4
    assert gpipe._step_microbatches is gpipe.step_microbatches
    refuse(
        [
            (lambda: forward.step(x, target=x), RuntimeError, "Forward-only schedule does not"),
            (lambda: cut(arg_mbs=((x,),)), TypeError, "arg_mbs must be a list but got a"),
            (lambda: cut(kwarg_mbs=[{}]), ValueError, "Expecting 4 kwarg_mbs but got 1"),
            (lambda: cut(target_mbs=[x] * 5), ValueError, "Expecting 4 target_mbs but got 5"),
            (lambda: cut([x] * 4), TypeError, "a tuple of arguments .* a Tensor for microbatch 0"),
            (lambda: cut(None, [{}, {}, (), {}]), TypeError, "a mapping .* tuple for microbatch 2"),
            (lambda: cut(given, losses=()), TypeError, "losses must be a list but got a"),
        ]
    )
    args, last = ((), {"target": x}) if rank else ((x,), {})
    output = schedule.step(*args, **last)
    gradients = [p.grad for p in stage.submod.parameters()]
    stage.submod.zero_grad()
    parts = list(x.chunk(4))
    given = {"target_mbs": parts} if rank else {"arg_mbs": [(part,) for part in parts]}
    again = cut(**given)
    for parameter, gradient in zip(stage.submod.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    evaluated = schedule.eval_microbatches(**given)
    for found in (again, evaluated):
        assert found is None if rank == 0 else torch.equal(found, output)


def test_what_is_amiss_is_said(ranks: Ranks) -> None:
    ranks(2, body_amiss)


def body_compiled() -> None:
    """Compiled stages, uneven batches of changing sizes, an evaluation."""
    rank = communicator().rank
    layers = [layer(seed) for seed in range(4)]
    ones = nn.Sequential(*copy.deepcopy(layers))
    for one in layers:
        one.compile(backend="aot_eager")
    mine = [rank, rank + 2]
    stages = [PipelineStage(layers[s], s, 4, CPU) for s in mine]
    schedule = get_schedule_class("Interleaved1F1B")(stages, 4, loss_fn=nn.MSELoss())
    for rows in (9, 8):
        torch.manual_seed(rows)
        x, target = torch.randn(2, rows, 6, dtype=torch.float64)
        args, last = ((), {"target": target}) if rank else ((x,), {})
        output, evaluated = schedule.step(*args, **last), schedule.eval(*args)
        expected = ones(x)
        nn.MSELoss()(expected, target).backward()
        for s in mine:
            for a, b in zip(layers[s].parameters(), ones[s].parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)
        for found in (output, evaluated):
            assert (found is None) == (rank == 0)
            if found is not None:
                torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_compiled_stages_train(ranks: Ranks) -> None:
    ranks(2, body_compiled, timeout=120)


def body_orders() -> None:
    """Logs and plots read the order of each rank; torch's has more idle slots."""
    import torch.distributed as dist
    from torch.distributed import pipelining as torchs

    rank = dist.get_rank()
    for name in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"):
        found = []
        for room in (pipelining, torchs):
            stages = [
                room.PipelineStage(nn.Linear(2, 2), index, 4, torch.device("cpu"))
                for index in (rank, rank + 2)
            ]
            schedule = getattr(room, name)(stages, 4, loss_fn=nn.functional.mse_loss)
            order = schedule.pipeline_order
            rows = [[str(action) for action in order[row] if action is not None] for row in order]
            found.append((rows, schedule.stage_index_to_group_rank))
        assert found[0] == found[1], name


def test_the_order_of_each_rank_can_be_read(ranks: Ranks) -> None:
    ranks(2, body_orders)
