"""Data parallelism inside a stage."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import meshwright as mw
import meshwright.fsdp
from meshwright.comm import Recorder, communicator, observe
from meshwright.errors import CollectiveMismatchError, RankFailedError
from meshwright.pipelining import PipelineScheduleMulti, PipelineStage, get_schedule_class
from meshwright.pipelining.schedules import SCHEDULE_NAMES
from meshwright.testing import Ranks
from support.internals.comm import whole
from support.internals.pipelining import find_residencies
from support.internals.schedule import UNSHARD, stage_ranks

QUICK = ("GPipe", "ZBVZeroBubble")
"""The schedules of the quick run: one stage on a rank and two."""


class Block(nn.Module):
    """A unit of its own around two more."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6, bias=False))
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x)) * self.gain


def sharded(layer: nn.Module, mesh: Any) -> nn.Module:
    """Three units, one in the other."""
    mw.fully_shard(layer.inner[0], mesh=mesh)
    mw.fully_shard(layer.inner, mesh=mesh)
    return mw.fully_shard(layer, mesh=mesh)


def wrapped(layer: nn.Module, mesh: Any, *, use_orig_params: bool = False) -> nn.Module:
    """Two wrappers, one in the other."""
    wrap = partial(
        mw.FullyShardedDataParallel,
        process_group=mesh.get_group(),
        use_orig_params=use_orig_params,
    )
    with warnings.catch_warnings():
        # On a mesh of one rank nothing is cut, which it says.
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        layer.inner = wrap(layer.inner)
        return wrap(layer)


def replicated_around(layer: nn.Module, mesh: Any) -> nn.Module:
    """Replicas around a sharded module."""
    mw.fully_shard(layer.inner, mesh=mesh)
    return mw.replicate(layer, device_mesh=mesh)


KINDS: dict[str, tuple[Callable[[nn.Module, Any], nn.Module], int, int]] = {
    "replicate": (lambda layer, mesh: mw.replicate(layer, device_mesh=mesh), 0, 1),
    "DistributedDataParallel": (
        lambda layer, mesh: mw.DistributedDataParallel(
            layer, process_group=mesh.get_group(), static_graph=True
        ),
        0,
        1,
    ),
    "fully_shard": (sharded, 3, 3),
    "wrappers": (wrapped, 2, 2),
    "wrappers with originals": (partial(wrapped, use_orig_params=True), 2, 2),
    "replicas around shards": (replicated_around, 1, 2),
}
"""By name: how a stage is spread, its gathers and its reductions in a step."""


def gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    found = parameter.grad
    return None if found is None else whole(found)


def gradients(layer: nn.Module) -> dict[str, torch.Tensor | None]:
    """Whole gradients by original name."""
    if not isinstance(layer, mw.FullyShardedDataParallel):
        return {
            name.removeprefix("module."): gradient(parameter)
            for name, parameter in layer.named_parameters()
        }
    before = values(layer)
    for sign in (-1, 1):  # what a step of size one changes
        with torch.no_grad():
            for parameter in layer.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=sign)
        if sign < 0:
            after = values(layer)
    return {name: before[name] - after[name] for name in before}


def values(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters by original name."""
    with mw.FullyShardedDataParallel.summon_full_params(layer):
        return {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}


def moved(recorder: Recorder) -> tuple[int, int]:
    """How many gathers and reductions of gradients there were."""
    labels = [each.label.split()[0] for each in recorder.collectives if each.label]
    return labels.count("unshard"), labels.count("reduce")


def body_ours(name: str, kinds: Sequence[str]) -> None:
    world = communicator()
    replicas = world.size // 2
    mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("data", "pipeline"))
    data, pipeline = mesh["data"], communicator(mesh.get_group("pipeline"))
    kind = get_schedule_class(name)
    is_multi = issubclass(kind, PipelineScheduleMulti)
    count = 4 if is_multi else 2
    holders = stage_ranks(2, count, "v" if "V" in name else "loop")
    mine = [s for s, r in enumerate(holders) if r == pipeline.rank]
    share = mesh.get_local_rank("data")
    torch.manual_seed(9)
    x, target = torch.randn(2, 32, 6, dtype=torch.float64)
    args = (x.chunk(replicas)[share],) if 0 in mine else ()
    kwargs = {"target": target.chunk(replicas)[share]} if count - 1 in mine else {}
    for spread in kinds:
        wrap, gathers, reductions = KINDS[spread]
        torch.manual_seed(3)
        ones: list[nn.Module] = [Block().double() for _ in range(count)]
        layers = {s: wrap(copy.deepcopy(ones[s]), data) for s in mine}
        stages = [
            PipelineStage(layers[s], s, count, torch.device("cpu"), group=pipeline.group)
            for s in mine
        ]
        schedule = kind(stages if is_multi else stages[0], 8, loss_fn=nn.MSELoss())
        nn.MSELoss()(nn.Sequential(*ones)(x), target).backward()
        # The second step reduces nothing; the third reduces what both have left.
        for number, is_synchronized in enumerate((True, False, True)):
            with contextlib.ExitStack() as stack:
                if not is_synchronized:
                    for s in mine:
                        stack.enter_context(layers[s].no_sync())
                        if wrap is replicated_around:
                            stack.enter_context(layers[s].inner.no_sync())
                with observe(recorder := Recorder()):
                    schedule.step(*args, **kwargs)
            if replicas > 1:
                due = reductions if is_synchronized else 0
                assert moved(recorder) == (gathers * len(mine), due * len(mine)), spread
            schedule.eval(*args)
            if not is_synchronized:
                continue
            for s in mine:
                found = gradients(layers[s])
                assert len(found) == 6
                for n, parameter in ones[s].named_parameters():
                    torch.testing.assert_close(
                        found[n],
                        (number + 1) * parameter.grad,
                        rtol=1e-10,
                        atol=1e-13,
                        msg=partial("{}, stage {}, {}: {}".format, spread, s, n),
                    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in SCHEDULE_NAMES
    ],
)
def test_ours_is_one_process(ranks: Ranks, name: str) -> None:
    """Nested units, accumulated steps, evaluation, no_sync; gathered and reduced once a step."""
    ranks(4, body_ours, name, list(KINDS))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", QUICK)
def test_a_stage_alone_on_its_mesh(ranks: Ranks, name: str) -> None:
    ranks(2, body_ours, name, list(KINDS))


def pair(layers: Sequence[nn.Module], microbatches: int, **more: Any) -> Any:
    """A schedule on two data ranks by two pipeline ranks, its stages, and what it takes."""
    name = more.pop("name", "1F1B")
    kind = get_schedule_class(name)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    pipeline = communicator(mesh.get_group("pipeline"))
    mine = range(pipeline.rank, len(layers), 2)
    wrap = more.pop("wrap", mw.fully_shard)
    for s in mine:
        wrap(layers[s], mesh=mesh["data"])
    stages = [
        PipelineStage(layers[s], s, len(layers), torch.device("cpu"), group=pipeline.group)
        for s in mine
    ]
    one_or_all = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    schedule = kind(one_or_all, microbatches, loss_fn=nn.MSELoss(), **more)
    torch.manual_seed(4)
    x, target = torch.randn(2, 16, 6, dtype=torch.float64)
    share = mesh.get_local_rank("data")
    args = (x.chunk(2)[share],) if pipeline.rank == 0 else ()
    kwargs = {"target": target.chunk(2)[share]} if pipeline.rank == 1 else {}
    return schedule, mine, mesh["data"], args, kwargs, (x, target)


def blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(5)
    return [Block().double() for _ in range(count)]


def body_few_at_a_time() -> None:
    """With one stage gathered at a time there are more gathers, and the same gradients."""
    layers = blocks(4)
    ones = copy.deepcopy(layers)
    schedule, mine, _, args, kwargs, (x, target) = pair(
        layers, 4, name="Interleaved1F1B", unsharded=1
    )
    nn.MSELoss()(nn.Sequential(*ones)(x), target).backward()
    with observe(recorder := Recorder()):
        schedule.step(*args, **kwargs)
    row = schedule.lowered.actions(schedule._first.group_rank)
    gathers = [action for action in row if action.operation is UNSHARD]
    assert len(gathers) > 2
    assert moved(recorder) == (len(gathers), 2)
    for s in mine:
        for a, b in zip(layers[s].parameters(), ones[s].parameters(), strict=True):
            torch.testing.assert_close(whole(a.grad), b.grad, rtol=1e-10, atol=1e-13)


def body_mixed() -> None:
    """Sums over microbatches are made in the dtype of the reduction, as without a pipeline."""
    precision = mw.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrap = partial(mw.fully_shard, mp_policy=precision)
    layers = [layer.float() for layer in blocks(2)]
    ones = copy.deepcopy(layers)
    schedule, mine, mesh, args, kwargs, (x, target) = pair(layers, 8, wrap=wrap, name="1F1B")
    args = tuple(value.float() for value in args)
    kwargs = {name: value.bfloat16() for name, value in kwargs.items()}
    schedule.step(*args, **kwargs)
    model = nn.Sequential(*(wrap(one, mesh=mesh) for one in ones))
    wrap(model, mesh=mesh)
    share = mesh.get_local_rank()
    parts = zip(x.chunk(2)[share].chunk(8), target.chunk(2)[share].chunk(8), strict=True)
    for number, (a, b) in enumerate(parts):
        model.set_requires_gradient_sync(number == 7)
        (nn.MSELoss()(model(a.float()), b.bfloat16()) / 8).backward()
    for one, layer in ((ones[s], layers[s]) for s in mine):
        for a, b in zip(layer.parameters(), one.parameters(), strict=True):
            assert a.grad.dtype is torch.float32
            assert torch.equal(whole(a.grad), whole(b.grad))


def body_alone(wrap: Any) -> None:
    """One rank fails by itself in its first forward: its pipeline is told, and so are replicas."""
    layers = blocks(2)
    schedule, _, _, args, kwargs, _ = pair(layers, 4, wrap=wrap)
    schedule.step(*args, **kwargs)
    text = "rank [01]"  # a replica of rank 1, which has left, is told of that
    if communicator().rank == 0:
        layers[0].register_forward_pre_hook(lambda _, __: 1 / 0)
        text = "failed to run forward"
    with pytest.raises(RuntimeError, match=text):
        schedule.step(*args, **kwargs)


def replicate_on(layer: nn.Module, mesh: Any) -> None:
    mw.replicate(layer, device_mesh=mesh)


def body_schedules_that_differ(wrap: Any, told: type[Exception]) -> None:
    """Of the pipelines that share stages one runs other microbatches, or another order."""
    first = communicator().rank < 2
    layers = blocks(4)
    for microbatches, name in (
        (8, "Interleaved1F1B" if first else "InterleavedZeroBubble"),
        (4 if first else 8, "Interleaved1F1B"),
    ):
        schedule, _, _, args, kwargs, _ = pair(layers, microbatches, wrap=wrap, name=name)
        text = r"a step of .* with \d microbatches .*a step of .* with \d microbatches"
        with pytest.raises((CollectiveMismatchError, told), match=text):
            schedule.step(*args, **kwargs)
        if told is RankFailedError:
            return  # it has told the board of the run, which ends what else would be done
        wrap = lambda *_, **__: None  # noqa: E731


def body_joined() -> None:
    """A schedule inside join is refused by name, and works behind it."""
    for wrap in (mw.fully_shard, replicate_on):
        layers = blocks(2)
        schedule, mine, _, args, kwargs, _ = pair(layers, 4, wrap=wrap)
        schedule.step(*args, **kwargs)
        module: Any = layers[mine[0]]
        with pytest.raises(RuntimeError, match="join.. does not reach into a pipeline"):  # noqa: SIM117
            with module.join():
                schedule.step(*args, **kwargs)
        communicator().barrier()
        schedule.step(*args, **kwargs)


@pytest.mark.slow
def test_details_of_sharded_stages(ranks: Ranks) -> None:
    ranks(4, body_joined)
    ranks(4, body_few_at_a_time)
    ranks(4, body_mixed)
    ranks(4, body_alone, mw.fully_shard)
    ranks(4, body_alone, replicate_on)
    ranks(4, body_schedules_that_differ, mw.fully_shard, RankFailedError)
    ranks(4, body_schedules_that_differ, replicate_on, CollectiveMismatchError)


@pytest.mark.devices("host", reason="torch's own class compares the indexes of devices")
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "wrap"),
    [
        ("DistributedDataParallel", DistributedDataParallel),
        ("FSDPModule", torch.distributed.fsdp.fully_shard),
        (
            "FullyShardedDataParallel",
            partial(torch.distributed.fsdp.FullyShardedDataParallel, device_id=torch.device("cpu")),
        ),
    ],
)
def test_modules_that_torch_has_wrapped_are_refused(
    ranks: Ranks, kind: str, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    def body() -> None:
        module = nn.Sequential(wrap(nn.Linear(2, 2)))
        alone = torch.distributed.new_subgroups(1)[0]
        with pytest.raises(
            TypeError, match=f"'0' of a pipeline stage is wrapped by torch's {kind}"
        ):
            get_schedule_class("GPipe")(
                PipelineStage(module, 0, 1, torch.device("cpu"), group=alone), 2
            )

    ranks(2, body)


def test_a_plain_module_needs_nothing() -> None:
    assert find_residencies(nn.Sequential(nn.Linear(2, 2))) == ()
