"""By row of the specification's table of errors, the tests that show its type and its text.

Most are shown where they belong; what has no other place has its test here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache
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
from meshwright.schedule.actions import Action, B, F, I
from meshwright.schedule.builders import build
from meshwright.testing import Ranks

CPU = torch.device("cpu")
TESTS = Path(__file__).resolve().parent.parent

TRACING, SCHEDULES = "pipelining/test_tracing.py", "pipelining/test_schedules.py"
CUSTOM, MICROBATCH = "pipelining/test_custom.py", "pipelining/test_microbatch.py"
HERE, SEED = "pipelining/test_error_rows.py", "pipelining/test_seed_000.py"
LOWERING, BUILDERS = "schedule/test_lowering.py", "schedule/test_builders.py"

# The situation; then file, test, type and (part of) the text, for each kind of it.
Row = tuple[str, str, type[BaseException], str]
ROWS: dict[str, tuple[Row, ...]] = {
    "both split_spec and split_policy": (
        (TRACING, "test_errors", ValueError, "Cannot specify both `split_spec` and `split_policy`"),
    ),
    "export fails": (
        (TRACING, "test_errors", RuntimeError, "cannot capture your model as a full graph"),
    ),
    "bad FQN in split_spec": (
        (TRACING, "test_errors", AttributeError, "Specified target layers.7 referenced nonexist"),
    ),
    "unknown split point": ((TRACING, "test_errors", ValueError, "Unknown split point type."),),
    "get_stage_module out of range": (
        (TRACING, "test_errors", ValueError, "Invalid stage index 2!"),
    ),
    "calling split_gm": (
        (TRACING, "test_errors", RuntimeError, "invoke the Pipe object directly, not `split_gm`"),
    ),
    "pipe graph does not match": (
        (
            TRACING,
            "test_errors",
            PipeliningShapeError,
            "Number of submodules in pipe graph 2 does not match number of stages 3",
        ),
    ),
    "stage index": (
        (TRACING, "test_errors", ValueError, "Stage index 2 is out of range of 2"),
        (SCHEDULES, "test_stages_of_another_map_are_refused", ValueError, "Stage index 4 is out"),
    ),
    "group too big": (
        (
            SCHEDULES,
            "test_stages_of_another_map_are_refused",
            RuntimeError,
            "Pipeline group size 2 cannot be larger than",
        ),
    ),
    "non-tensor stage argument": (
        (HERE, "test_declared", PipeliningShapeError, "Stage arg[1] has type object"),
    ),
    "inference fails": (
        (HERE, "test_declared", RuntimeError, "Failed to perform pipeline shape inference"),
    ),
    "metadata mismatch": (
        (SEED, "test_stages", PipeliningShapeError, "shape mismatch"),
        (SEED, "test_stages", PipeliningShapeError, "dtype mismatch"),
        (SEED, "test_what_a_traced_stage_refuses", PipeliningShapeError, "stride mismatch"),
    ),
    "forward raises": ((HERE, "test_by_hand", RuntimeError, "[Stage 0] failed to run forward: a"),),
    "backward raises": (
        (HERE, "test_by_hand", RuntimeError, "Failed to run stage backward: "),
        (HERE, "test_by_hand", RuntimeError, "Failed to run stage backward input: "),
    ),
    "chunk id": (
        (HERE, "test_functions_of_the_user", RuntimeError, "Chunk id 7 is out of range [0, 2)"),
        (HERE, "test_by_hand", RuntimeError, "Attempted to access chunk_id before chunks have"),
    ),
    "unknown backward type": (
        (
            SCHEDULES,
            "test_weight_gradients_of_the_user",
            RuntimeError,
            "Unknown backward type: half",
        ),
    ),
    "W before I": (
        (
            HERE,
            "test_by_hand",
            AssertionError,
            "[Stage 0] Attempted to run backward_weight_one_chunk for chunk 0 without first",
        ),
    ),
    "I with no forward": (
        (HERE, "test_by_hand", AssertionError, "[Stage 0] cannot run a partial backward for chunk"),
    ),
    "step under no_grad": (
        (CUSTOM, "test_what_is_amiss_is_said", RuntimeError, "requires gradients to be enabled"),
    ),
    "list arguments": (
        (CUSTOM, "test_what_is_amiss_is_said", TypeError, "arg_mbs must be a list but got a"),
        (CUSTOM, "test_what_is_amiss_is_said", TypeError, "losses must be a list but got a"),
    ),
    "number of microbatches given": (
        (CUSTOM, "test_what_is_amiss_is_said", ValueError, "Expecting 4 kwarg_mbs but got 1"),
        (CUSTOM, "test_what_is_amiss_is_said", ValueError, "Expecting 4 target_mbs but got 5"),
    ),
    "losses missing": (
        (HERE, "test_functions_of_the_user", RuntimeError, "Expecting 2 losses but got 3"),
        (HERE, "test_functions_of_the_user", RuntimeError, "Loss for microbatch 1 is not avail"),
        (HERE, "test_by_hand", RuntimeError, "Loss for microbatch 0 is not available: "),
    ),
    "forward-only with target": (
        (CUSTOM, "test_what_is_amiss_is_said", RuntimeError, "Forward-only schedule does not"),
    ),
    "unknown schedule": (
        (SCHEDULES, "test_names_of_schedules", ValueError, "Unknown schedule name 'x'. The valid"),
    ),
    "1F1B, too few microbatches": (
        (
            BUILDERS,
            "test_sizes_that_a_schedule_cannot_have",
            ValueError,
            "Number of microbatches (3) must be greater than or equal to",
        ),
    ),
    "rounds": (
        (
            HERE,
            "test_rounds",
            ValueError,
            "Interleaved 1F1B requires the number of microbatches to be a multiple of the",
        ),
        (HERE, "test_rounds", ValueError, "Zero bubble requires the number of microbatches to be"),
    ),
    "V schedules without 2 local stages": (
        (
            BUILDERS,
            "test_sizes_that_a_schedule_cannot_have",
            ValueError,
            "ZBV requires exactly 2 stages per rank, but got 1.",
        ),
        (
            BUILDERS,
            "test_sizes_that_a_schedule_cannot_have",
            ValueError,
            "DualPipeV requires exactly 2 stages per rank, but got 3.",
        ),
    ),
    "DualPipeV, too few microbatches": (
        (
            BUILDERS,
            "test_sizes_that_a_schedule_cannot_have",
            ValueError,
            "DualPipeV requires at least as many microbatches as stages",
        ),
    ),
    "V mapping": (
        (BUILDERS, "test_stage_maps", ValueError, "num_stages 5 must be evenly divisible by pp_s"),
        (BUILDERS, "test_stage_maps", ValueError, "Style snake is not supported"),
    ),
    "halves of compiled stages": (
        (
            CUSTOM,
            "test_what_is_amiss_is_said",
            RuntimeError,
            "schedule is not supported with stage modules that have used torch.compile.",
        ),
    ),
    "chunk spec length": (
        (MICROBATCH, "test_what_cannot_be_cut", ValueError, "2 entries for 1 positional"),
        (MICROBATCH, "test_what_cannot_be_cut", ValueError, "for the 1 keyword arguments"),
    ),
    "batch smaller than chunks": (
        (
            "pipelining/test_defects.py",
            "test_a_batch_that_is_too_small_is_one_error_everywhere",
            ValueError,
            "batch size 3 .*4 chunks|3 .* 4",
        ),
        (MICROBATCH, "test_what_cannot_be_cut", ValueError, "argument 0 has 3 rows along dim 0"),
    ),
    "BlockMask": (
        (
            MICROBATCH,
            "test_block_masks_are_cut_along_their_batch",
            AssertionError,
            "BlockMask only supports split_dim=0",
        ),
        (
            MICROBATCH,
            "test_block_masks_are_cut_along_their_batch",
            AssertionError,
            "fewer batch size than the number of chunks",
        ),
    ),
    "bad spec": ((MICROBATCH, "test_what_cannot_be_cut", ValueError, "Unsupported chunk spec: 7"),),
    "merge": (
        (
            MICROBATCH,
            "test_merging_by_other_means",
            ValueError,
            "Chunk 1 did not match chunk spec",
        ),
        (HERE, "test_functions_of_the_user", AssertionError, "one kind of tensor with equal pl"),
    ),
    "action text": (
        (HERE, "test_texts", RuntimeError, "Invalid action string: '2F', should be formatted as"),
        (HERE, "test_texts", RuntimeError, "Invalid computation type G"),
    ),
    "communication among compute": (
        (
            LOWERING,
            "test_communication_in_a_compute_schedule_is_refused",
            ValueError,
            "Expected compute-only schedule but found communication",
        ),
    ),
    "lowering cannot finish": (
        (
            LOWERING,
            "test_an_order_that_cannot_end_is_refused",
            AssertionError,
            "Malformed compute schedule, can't schedule",
        ),
    ),
    "CSV format": (
        (HERE, "test_orders_of_files", NotImplementedError, "format='json' is not supported"),
        (HERE, "test_orders_of_files", AssertionError, 'format must be "compute_only"'),
    ),
    "custom function type": (
        (
            CUSTOM,
            "test_what_a_function_of_the_user_raises_is_named_everywhere",
            ValueError,
            "Invalid computation type SEND_F. Only F.* are supported",
        ),
    ),
    "local hand-over": (
        (CUSTOM, "test_what_is_amiss_is_said", AssertionError, "can't get bwd output if this sta"),
        (CUSTOM, "test_what_is_amiss_is_said", AssertionError, "can't set bwd input if this stag"),
        (CUSTOM, "test_what_is_amiss_is_said", AssertionError, "Expected tuple, got"),
    ),
    "order check": (
        (
            LOWERING,
            "test_the_number_of_ranks_is_checked",
            AssertionError,
            "Schedule has incorrect number of ranks - expected 3, actual 2",
        ),
        (
            LOWERING,
            "test_incomplete_schedules",
            AssertionError,
            "Schedule is missing actions for rank 1",
        ),
        (
            LOWERING,
            "test_incomplete_schedules",
            AssertionError,
            "Got 1 F microbatches for stage 1, expected 2",
        ),
        (
            LOWERING,
            "test_incomplete_schedules",
            AssertionError,
            "Invalid backward microbatches for stage 1",
        ),
    ),
    "a peer failed": (
        (
            SCHEDULES,
            "test_a_failing_stage_is_named_on_every_rank",
            PipelinePeerError,
            "stage .* failed in .*: RuntimeError: .*planted",
        ),
    ),
}

# What cannot happen here, and the test that shows it.
LIFTED = {
    "args and kwargs are split into different number of chunks": (
        MICROBATCH,
        "test_cutting_and_merging_is_the_identity",
    ),
}


@cache
def read(file: str) -> tuple[str, frozenset[str]]:
    """A test file as one line without the seams of strings, and the names of its functions."""
    text = (TESTS / file).read_text(encoding="utf-8")
    names = frozenset(n.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef))
    if file == HERE:
        text = text.partition("def test_every_row_has_its_tests")[2]  # behind the table
    seamless = re.sub(r'"\s*\n\s*f?r?"', "", text).replace("\\", "")
    return re.sub(r"\s+", " ", seamless), names


def kinds(of: type[BaseException]) -> set[str]:
    """The names of ``of`` and of what derives from it."""
    return {of.__name__}.union(*(kinds(kind) for kind in of.__subclasses__()))


def test_every_row_has_its_tests() -> None:
    for file, name in LIFTED.values():
        assert name in read(file)[1]
    for situation, rows in ROWS.items():
        for file, name, kind, fragment in rows:
            text, names = read(file)
            assert name in names, situation
            assert fragment in text, (situation, fragment)
            assert any(k in text for k in kinds(kind)), (situation, kind)


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


def test_the_part_of_an_overlap_that_failed_is_named(ranks: Ranks) -> None:
    ranks(2, body_overlaps, timeout=60)
