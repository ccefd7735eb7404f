"""Steady steps under a simulated device: the host never waits for the device in any of them."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from meshwright import clip_grad_norm_
from meshwright.comm import communicator
from meshwright.composition import parallelize
from meshwright.data_parallel import (
    DistributedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    replicate,
)
from meshwright.data_parallel.comm_hooks import (
    PowerSGDState,
    allreduce_hook,
    bf16_compress_hook,
    powerSGD_hook,
    quantization_pertensor_hook,
)
from meshwright.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedGradScaler,
    ShardingStrategy,
)
from meshwright.fsdp.wrap import ModuleWrapPolicy
from meshwright.mesh import init_device_mesh
from meshwright.pipelining import PipelineScheduleMulti, PipelineStage, get_schedule_class
from meshwright.pipelining.schedules import SCHEDULE_NAMES
from meshwright.plan import Plan
from meshwright.tensor_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from meshwright.testing import Ranks, RanksFailed, on_devices
from meshwright.testing.simulated import device_of
from support.internals.schedule import stage_ranks
from support.tensor_parallel import samples

WARM, STEADY = 3, 6
"""Steps before the host may not wait any more, and those in which it may not: number 4 and 8 of a
model are among them, at which more is compared than at others."""


class Block(nn.Module):
    """A layer with a shortcut, and one that nobody uses."""

    def __init__(self, *, has_unused: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8) if has_unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Net(nn.Module):
    """Three blocks and what is read from them."""

    def __init__(self, *, has_unused: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(has_unused=has_unused) for _ in range(3)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


Step = Callable[[], object]


def training(
    model: nn.Module,
    *,
    parts: int = 1,
    clip: Callable[[nn.Module], object] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Step:
    """Make a step of SGD; of several ``parts``, all but the last are not reduced."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, target = torch.randn(8, 8), torch.randn(8, 4)

    def step() -> None:
        for part in range(parts):
            with waiting(model, is_last=part == parts - 1):
                loss = nn.functional.mse_loss(model(x).float(), target)
                (loss if scaler is None else scaler.scale(loss)).backward()
        if clip is not None:
            clip(model)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    return step


def waiting(model: Any, *, is_last: bool) -> contextlib.AbstractContextManager[object]:
    """Keep gradients of all parts but the last on their rank, in the words of ``model``."""
    if hasattr(model, "no_sync"):
        return contextlib.nullcontext() if is_last else model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_last)
    return contextlib.nullcontext()


def replicated(*, has_unused: bool = False, **options: Any) -> nn.Module:
    return replicate(Net(has_unused=has_unused), bucket_cap_mb=0.0005, **options)


def hooked(hook: Callable[..., Any], state: Callable[[], object] = lambda: None) -> nn.Module:
    model: Any = replicated()
    model.register_comm_hook(state(), hook)
    return model


def buffered() -> nn.Module:
    model = Net()
    model.register_buffer("seen", torch.zeros(3))
    return replicate(model)


def joining() -> Step:
    model: Any = replicated()
    step = training(model)
    model.join().__enter__()
    return step


def sharded(*, has_unused: bool = False, **options: Any) -> nn.Module:
    model = Net(has_unused=has_unused)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def wrapped(**options: Any) -> nn.Module:
    policy = ModuleWrapPolicy({Block})
    with warnings.catch_warnings():  # of a strategy that shards nothing
        warnings.simplefilter("ignore", FutureWarning)
        return FullyShardedDataParallel(Net(), auto_wrap_policy=policy, **options)


def mesh_of(*names: str) -> Any:
    size = communicator().size
    return init_device_mesh("cpu", (2,) * (size // 2), mesh_dim_names=names)


CUT = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def cut(*, shards: bool = False) -> nn.Module:
    mesh = mesh_of("shard", "tensor") if shards else mesh_of("tensor")
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8))
    model.append(nn.Linear(8, 4))
    parallelize_module(model, mesh["tensor"], CUT)
    return fully_shard(model, mesh=mesh["shard"]) if shards else model


def read_in_parts() -> Step:
    """Make a step of a model whose sequences and logits are in parts, and so is its loss."""
    logits = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    model = parallelize_module(
        samples.Block(), mesh_of("tensor"), samples.sequence_plan() | {"head": logits}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.randint(0, 13, (2, 6))

    def step() -> None:
        with loss_parallel():
            nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def piped(name: str) -> Step:
    """Make a step of two or four stages, over all ranks."""
    world, kind = communicator(), get_schedule_class(name)
    is_multi = issubclass(kind, PipelineScheduleMulti)
    count = world.size * (2 if is_multi else 1)
    owners = stage_ranks(world.size, count, "v" if "V" in name else "loop")
    mine = [stage for stage, owner in enumerate(owners) if owner == world.rank]
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in mine]
    found: Any = [
        PipelineStage(layer, stage, count, world.device)
        for layer, stage in zip(layers, mine, strict=True)
    ]
    schedule = kind(found if is_multi else found[0], 4 * world.size, loss_fn=nn.MSELoss())
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    x, target = torch.randn(8 * world.size, 8), torch.randn(8 * world.size, 8)

    def step() -> None:
        more = {"target": target} if count - 1 in mine else {}
        schedule.step(*((x,) if 0 in mine else ()), losses=[], **more)
        optimizer.step()
        optimizer.zero_grad()

    return step


def clip(model: nn.Module) -> object:
    return clip_grad_norm_(model, 0.01, error_if_nonfinite=True)


def trainable(axes: str, settings: str = "") -> Step:
    made = parallelize(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        Plan.from_toml(f"[axes]\n{axes}\n{settings}\n"),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=nn.functional.mse_loss,
        example=(torch.randn(8, 8),),
    )
    x, target = torch.randn(8, 8), torch.randn(8, 4)
    return lambda: made.step(x, target)


LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
TENSOR = '[tensor.rules]\n"0" = "colwise"\n"2" = "rowwise"\n'
PIPELINE = "[pipeline]\nmicrobatches = 4\n"
CLIPS = "[train]\nclip_norm = 0.01\n"

QUICK: dict[str, Callable[[], Step]] = {
    "replicate": lambda: training(replicated()),
    "replicate, unused layers": lambda: training(
        replicated(has_unused=True, find_unused_parameters=True)
    ),
    "replicate, static graph": lambda: training(replicated(static_graph=True)),
    "replicate, clipping": lambda: training(replicated(), clip=clip),
    "fully_shard": lambda: training(sharded()),
    "class": lambda: training(wrapped(use_orig_params=True)),
    "tensor": lambda: training(cut()),
    "pipeline, 1F1B": lambda: piped("1F1B"),
    "Trainable, replicate": lambda: trainable("replicate = 2"),
    "Trainable, shard": lambda: trainable("shard = 2", CLIPS),
}
PAIRS: dict[str, Callable[[], Step]] = {
    "replicate, views": lambda: training(replicated(gradient_as_bucket_view=True)),
    "replicate, plain clipping": lambda: training(
        replicated(), clip=lambda model: clip_grad_norm_(model, 0.01)
    ),
    "replicate, largest element": lambda: training(
        replicated(), clip=lambda model: clip_grad_norm_(model, 0.01, norm_type=math.inf)
    ),
    "replicate, 2 parts": lambda: training(replicated(), parts=2),
    "replicate, buffers": lambda: training(buffered()),
    "replicate, hook": lambda: training(hooked(allreduce_hook)),
    "replicate, half precision": lambda: training(hooked(bf16_compress_hook)),
    "replicate, quantized": lambda: training(hooked(quantization_pertensor_hook)),
    "replicate, PowerSGD": lambda: training(
        hooked(powerSGD_hook, lambda: PowerSGDState(start_powerSGD_iter=2))
    ),
    "class of replicas": lambda: training(DistributedDataParallel(Net()), parts=2),
    "class of replicas, joining": joining,
    "fully_shard, unused layers": lambda: training(sharded(has_unused=True)),
    "fully_shard, clipping": lambda: training(sharded(), clip=clip),
    "fully_shard, 2 parts": lambda: training(sharded(), parts=2),
    "fully_shard, kept": lambda: training(sharded(reshard_after_forward=False)),
    "fully_shard, bf16": lambda: training(sharded(mp_policy=MixedPrecisionPolicy(**LOW))),
    "class, flat": lambda: training(wrapped()),
    "class, 2 parts": lambda: training(wrapped(use_orig_params=True), parts=2),
    "class, clipping": lambda: training(
        wrapped(use_orig_params=True), clip=lambda model: model.clip_grad_norm_(0.01)
    ),
    "class, bf16": lambda: training(wrapped(mixed_precision=MixedPrecision(**LOW))),
    "class, gradients alone": lambda: training(
        wrapped(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    ),
    "class, whole": lambda: training(wrapped(sharding_strategy=ShardingStrategy.NO_SHARD)),
    "tensor, clipping": lambda: training(cut(), clip=clip),
    "tensor, sequences and loss in parts": read_in_parts,
    **{f"pipeline, {name}": partial(piped, name) for name in SCHEDULE_NAMES if name != "1F1B"},
    "Trainable, replicate, 2 parts": lambda: trainable("replicate = 2", f"{CLIPS}accumulate = 2"),
    "Trainable, shard, 2 parts": lambda: trainable("shard = 2", "[train]\naccumulate = 2"),
    "Trainable, tensor": lambda: trainable("tensor = 2", TENSOR + CLIPS),
    "Trainable, pipeline": lambda: trainable("pipeline = 2", PIPELINE + CLIPS),
    "Trainable, bf16": lambda: trainable("shard = 2", '[precision]\ncompute = "bfloat16"'),
}
FOURS: dict[str, Callable[[], Step]] = {
    "hybrid": lambda: training(sharded(mesh=mesh_of("replicate", "shard")), clip=clip),
    "class, hybrid": lambda: training(
        wrapped(
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_mesh=mesh_of("replicate", "shard"),
            use_orig_params=True,
        ),
    ),
    "fully_shard and tensor": lambda: training(cut(shards=True), clip=clip),
    "Trainable, hybrid": lambda: trainable("replicate = 2\nshard = 2", CLIPS),
    "Trainable, replicate and tensor": lambda: trainable("replicate = 2\ntensor = 2", TENSOR),
    "Trainable, shard and tensor": lambda: trainable("shard = 2\ntensor = 2", TENSOR + CLIPS),
    "Trainable, pipeline and shard": lambda: trainable("pipeline = 2\nshard = 2", PIPELINE),
    "pipeline, 1F1B": lambda: piped("1F1B"),
}
ASKED: dict[str, tuple[Callable[[], Step], str]] = {
    "replicate, non-finite": (
        lambda: training(replicated(stop_on_non_finite=True)),
        "checks/alignment.py",
    ),
    "class, scaler": (
        lambda: training(wrapped(), scaler=ShardedGradScaler()),
        "simulated/test_host_stops.py",
    ),
    "Trainable, float16": (
        lambda: trainable("replicate = 2", '[precision]\ncompute = "float16"'),
        "composition/trainable.py",
    ),
}
"""Kinds that are to stop before an optimizer steps, and so wait for the device."""


def steady(make: Callable[[], Step]) -> None:
    step = make()
    for _ in range(WARM):
        step()
    with device_of(communicator()).forbid_stops():
        for _ in range(STEADY):
            step()


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", QUICK)
def test_the_host_does_not_wait_in_a_steady_step(ranks: Ranks, kind: str) -> None:
    on_devices(ranks)(2, steady, QUICK[kind])


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.few(0, slow=12)
def test_the_host_does_not_wait_in_other_steady_steps(ranks: Ranks, kind: str) -> None:
    on_devices(ranks)(2, steady, PAIRS[kind])


@pytest.mark.parametrize("kind", FOURS)
@pytest.mark.slow
def test_the_host_does_not_wait_in_a_steady_step_of_several_axes(ranks: Ranks, kind: str) -> None:
    on_devices(ranks)(4, steady, FOURS[kind])


@pytest.mark.parametrize("kind", ASKED)
@pytest.mark.slow
def test_a_stop_that_was_asked_for_is_one_a_step(ranks: Ranks, kind: str) -> None:
    make, where = ASKED[kind]
    with pytest.raises(RanksFailed, match=rf"{STEADY} host stops: .* at .*{where}"):
        on_devices(ranks)(2, steady, make)


def stopping() -> None:
    model = replicated()
    step = training(model)
    with device_of(communicator()).forbid_stops():
        step()
        next(model.parameters()).sum().item()


def test_a_host_stop_is_named(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"1 host stops: .*_local_scalar_dense.* at .*py:\d+"):
        on_devices(ranks)(2, stopping)
