"""A model of a case laid out over the ranks: by a program's own hands, or by a plan."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate

import meshwright as mw
from fuzz.blocks import linears_of
from fuzz.cases import Case
from fuzz.mixtures import mixtures_in
from fuzz.models import build, call, last_of, loss_of, output_of
from fuzz.optimizers import OPTIMIZERS, optimizer_of
from meshwright.comm import communicator
from meshwright.data_parallel import FSDPModule, batch_norms, synchronize_batch_norm
from meshwright.expert_parallel import (
    ExpertParallel,
    auxiliary_loss,
    balance_experts,
    z_loss,
)
from meshwright.fsdp import (
    BackwardPrefetch,
    CustomPolicy,
    FlatParameter,
    ShardingStrategy,
    StateDictType,
)
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.mesh import DeviceMesh, init_device_mesh
from meshwright.plan import (
    BucketPlan,
    ExpertPlan,
    PipelinePlan,
    Plan,
    ShardPlan,
    TensorPlan,
    TrainPlan,
)
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel
from support.in_backward import apply_in_backward
from support.internals.axes import Axes

__all__ = [
    "AUXILIARY",
    "CLIP",
    "RATE",
    "Z_LOSS",
    "ByHand",
    "Laid",
    "Part",
    "Planned",
    "lay_out",
    "losses_of",
    "split_in",
    "step_in_backward",
]

Part = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets of one pass."""

WHOLE = StateDictOptions(full_state_dict=True)
CLIP = 0.05
AUXILIARY, Z_LOSS, RATE = 0.3, 0.05, 0.02


class Laid(Protocol):
    """A model over ranks, its optimizer, and what a step is made of."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    data_rank: int
    data_size: int

    def train(self, parts: Sequence[Part], step: int) -> float: ...

    def gradients(self) -> Mapping[str, torch.Tensor] | None: ...

    def step(self, step: int) -> None: ...

    def weights(self) -> Mapping[str, torch.Tensor]: ...

    def evaluate(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor: ...

    def named(self) -> Mapping[str, nn.Parameter]: ...

    def state(self) -> Any: ...

    def load(self, state: Any) -> None: ...


def losses_of(
    case: Case,
    model: nn.Module,
    plain: nn.Module,
    x: torch.Tensor,
    target: torch.Tensor,
    auxiliary: Callable[[], torch.Tensor],
    z: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """The loss of a pass of ``model``, which is ``plain`` or wraps it, as the loop computes it.

    ``auxiliary`` and ``z`` are the losses of the last forward that balance experts.
    """

    def once(x: torch.Tensor) -> torch.Tensor:
        loss = _loss_of_one(case, model, plain, x, target)
        loss = loss + AUXILIARY * auxiliary() if "auxiliary" in case.loop else loss
        return loss + Z_LOSS * z() if "z loss" in case.loop else loss

    if "gradient of input" in case.loop:
        x = x.clone().requires_grad_()
    loss = once(x)
    if "two forwards" in case.loop:
        loss = (loss + once(x * 0.5)) / 2
    if "gradient of input" in case.loop:
        torch.autograd.grad(loss, x, retain_graph=True)
    return loss


def _loss_of_one(
    case: Case, model: nn.Module, plain: nn.Module, x: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    args, options = call(case.model, x)
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in case.loop):
        if "functional call" in case.loop:
            weights = {name: 0.9 * p for name, p in model.named_parameters()}
            output = torch.func.functional_call(model, weights, args, options)
        else:
            output = model(*args, **options)
    loss = loss_of(output, target)
    if "loss reads weights" in case.loop:
        loss = loss + 0.01 * last_of(plain).weight.square().sum()
    return loss


# ------------------------------------------------------------------------------------ by hand


def _units(model: nn.Module, case: Case) -> list[nn.Module]:
    """The blocks that are units of their own."""
    blocks = list(model.children() if case.model.is_chain else model.blocks.children())  # pyrefly: ignore
    draw = random.Random(case.seed + 1)
    chosen = [each for each in blocks if draw.random() < 0.5]
    return [] if "one unit" in case.options else [m for m in chosen if [*m.parameters()]]


def _shard(model: nn.Module, case: Case, mesh: DeviceMesh | None = None) -> nn.Module:
    keeps: dict[str, Any] = {"reshard_after_forward": False} if "keep" in case.options else {}
    if "block of 2" in case.options and case.world == 4:
        keeps = {"reshard_after_forward": 2}
    for unit in _units(model, case):
        mw.fully_shard(unit, mesh=mesh, **keeps)
    return mw.fully_shard(model, mesh=mesh, **keeps)


def _in_class(model: nn.Module, case: Case, mesh: DeviceMesh | None = None) -> nn.Module:
    strategies = [s for s in ("SHARD_GRAD_OP", "NO_SHARD") if s in case.options]
    strategy = "HYBRID_SHARD" if case.layout == "hybrid class" else [*strategies, "FULL_SHARD"][0]
    chosen = set(_units(model, case))
    prefetch = None if "no prefetch" in case.options else BackwardPrefetch.BACKWARD_PRE
    return FSDP(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=CustomPolicy(chosen.__contains__) if chosen else None,
        backward_prefetch=prefetch,
        forward_prefetch="forward prefetch" in case.options,
        use_orig_params="orig" in case.options,
        device_mesh=mesh,
    )


def _in_ddp(model: nn.Module, case: Case) -> nn.Module:
    options = set(case.options)
    return mw.DistributedDataParallel(
        model,
        find_unused_parameters="find unused" in options,
        gradient_as_bucket_view="views" in options,
        static_graph="static graph" in options,
        bucket_cap_mb=1e-4 if "small buckets" in options else None,
    )


def _cut(model: nn.Module, case: Case, mesh: DeviceMesh) -> nn.Module:
    """Layers over tensor ranks, each with whole inputs and outputs."""
    draw, whole = random.Random(case.seed + 2), Replicate()
    styles = {
        name: ColwiseParallel(output_layouts=whole)
        if draw.random() < 0.5
        else RowwiseParallel(input_layouts=whole)
        for name in linears_of(model)
        if draw.random() < 0.6
    }
    return mw.parallelize_module(model, mesh, styles)


def split_in(case: Case, model: nn.Module) -> list[str]:
    """The modules of experts that axis expert splits."""
    names = [name for name, _ in mixtures_in(model)]
    return names[:1] if "others whole" in case.options else names


def _expert_mesh(case: Case) -> DeviceMesh:
    count, replicas = case.expert_ranks, 2 if "hybrid" in case.layout else 1
    sizes = (replicas, case.data_ranks // replicas // count, count, case.tensor_ranks)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "ep", "tensor"))


def _with_experts(model: nn.Module, case: Case, mesh: DeviceMesh) -> nn.Module:
    """Experts over ranks, and all else over the same ranks, as a program of torch has it."""
    style = ExpertParallel(exchange="pairs" if "pairs" in case.options else "tokens")
    if case.tensor_ranks > 1:
        _cut(model, case, mesh["tensor"])
    mw.parallelize_module(model, mesh["ep"], dict.fromkeys(split_in(case, model), style))
    dense = mesh["shard", "ep"]._flatten("dense")
    match case.layout.split(", ")[-1]:
        case "replicate":
            return mw.replicate(model, device_mesh=dense)
        case "fully_shard":
            return _shard(model, case, dense)
        case "hybrid":
            return _shard(model, case, mesh["replicate", "dense"])
    return model


class ByHand:
    """A model that the program has wrapped itself."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        """``seed`` is added to that of the values that the model starts from."""
        self.case = case
        model, mesh = _built(case, seed), None
        self.data_size, self.data_rank = case.data_ranks, communicator().rank // case.tensor_ranks
        data = communicator()
        if case.layout.startswith("tensor"):
            mesh = init_device_mesh(
                "cpu", (case.data_ranks, case.tensor_ranks), mesh_dim_names=("data", "tensor")
            )
            data = communicator(mesh.get_group("data"))
        elif case.layout.startswith("expert"):
            mesh = _expert_mesh(case)
            axes = ("replicate", "shard", "ep") if "hybrid" in case.layout else ("shard", "ep")
            data = communicator(mesh[axes]._flatten("data").get_group())
        elif "hybrid" in case.layout:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        if batch_norms(model) and data.size > 1 and "own statistics" not in case.loop:
            synchronize_batch_norm(model, data)
        self.plain = model
        self.model = self._wrapped(model, mesh)
        self._flat = list(mw.flat_groups(self.model)) if "flat groups" in case.options else None
        self.optimizer: torch.optim.Optimizer | None = None
        if "step in backward" in case.loop:
            step_in_backward(case, self.held)
        else:
            self.optimizer = optimizer_of(case)(self.held)

    @property
    def held(self) -> list[nn.Parameter]:
        """The model that is trained now."""
        return list(self.model.parameters()) if self._flat is None else self._flat

    def _wrapped(self, model: nn.Module, mesh: DeviceMesh | None) -> nn.Module:
        case = self.case
        if mesh is not None and "expert" in case.layout:
            return _with_experts(model, case, mesh)
        if mesh is not None and "tensor" in case.layout:
            model = _cut(model, case, mesh["tensor"])
            mesh = mesh["data"]
        match case.layout.removeprefix("tensor").removeprefix(", "):
            case "replicate":
                return mw.replicate(model, **({} if mesh is None else {"device_mesh": mesh}))
            case "ddp":
                return _in_ddp(model, case)
            case "fully_shard" | "hybrid":
                return _shard(model, case, mesh)
            case "class" | "hybrid class":
                return _in_class(model, case, mesh)
        return model

    def train(self, parts: Sequence[Part], step: int) -> float:
        total = self._pass(parts)
        dist.all_reduce(total)
        return (total / dist.get_world_size()).item()

    def _pass(self, parts: Sequence[Part]) -> torch.Tensor:
        """This rank's loss, whose gradients are there then."""
        self._parts = parts
        total = torch.zeros((), dtype=torch.float64)
        joining: Any = getattr(self.model, "join", contextlib.nullcontext)
        with joining() if "join" in self.case.loop else contextlib.nullcontext():
            for number, (x, target) in enumerate(parts):
                is_last = number == len(parts) - 1 or "every pass" in self.case.loop
                with self._passing(is_last):
                    loss = self._loss(x, target) / len(parts)
                    (loss / self._own_sum).backward()
                total += loss.detach()
        if self._own_sum > 1:
            self._sum_gradients()
        return total

    @property
    def _own_sum(self) -> int:
        """Over how many ranks the program itself sums gradients."""
        return self.case.world if self.case.layout == "expert" else 1

    @torch.no_grad()
    def _sum_gradients(self) -> None:
        """Experts have had the tokens of all ranks."""
        for parameter in self.model.parameters():
            if parameter.grad is not None and not isinstance(parameter, DTensor):
                parameter.grad = parameter.grad.to_dense()
                dist.all_reduce(parameter.grad)

    def _again(self) -> torch.Tensor:
        """What LBFGS calls."""
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        return self._pass(self._parts)

    def _loss(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return losses_of(
            *(self.case, self.model, self.plain, x, target),
            lambda: auxiliary_loss(self.plain, 1.0),
            lambda: z_loss(self.plain, 1.0),
        )

    @contextlib.contextmanager
    def _passing(self, is_last: bool) -> Iterator[None]:
        model: Any = self.model
        if hasattr(model, "no_sync"):
            with contextlib.nullcontext() if is_last else model.no_sync():
                yield
            return
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(is_last)
        yield

    def gradients(self) -> Mapping[str, torch.Tensor] | None:
        if "step in backward" in self.case.loop or "flat groups" in self.case.options:
            return None
        if not isinstance(self.model, FSDP):
            return {n: _full(p.grad) for n, p in self.named().items() if p.grad is not None}
        is_mixed = "tensor" in self.case.layout
        if "orig" not in self.case.options or "NO_SHARD" in self.case.options or is_mixed:
            return None
        with FSDP.summon_full_params(self.model, with_grads=True):
            named = self.named()
            return {n: p.grad.detach().clone() for n, p in named.items() if p.grad is not None}

    def step(self, step: int) -> None:
        loop = self.case.loop
        if "clip ours" in loop:
            mw.clip_grad_norm_(self.held, CLIP)
        elif "clip torch" in loop:
            torch.nn.utils.clip_grad_norm_(self.held, CLIP)
        elif "clip class" in loop:
            self.model.clip_grad_norm_(CLIP)  # pyrefly: ignore
        if self.optimizer is not None:
            self.optimizer.step(*([self._again] if self.case.optimizer == "lbfgs" else []))
            self.optimizer.zero_grad(set_to_none="keep zeros" not in loop)
        if "bias rate" in loop:
            balance_experts(self.plain, RATE)

    def weights(self) -> Mapping[str, torch.Tensor]:
        if isinstance(self.model, FSDP):
            with FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT):
                found = self.model.state_dict()
        else:
            found = self.model.state_dict()
        return {_clean(name): _full(value) for name, value in found.items()}

    @torch.no_grad()
    def evaluate(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.model.eval()
        args, options = call(self.case.model, x)
        main, _ = output_of(self.model(*args, **options))
        self.model.train()
        return main

    def named(self) -> Mapping[str, nn.Parameter]:
        return {_clean(name): p for name, p in self.model.named_parameters()}

    def state(self) -> Any:
        optimizer = self.optimizer
        assert optimizer is not None
        if isinstance(self.model, FSDP):
            with FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT):
                return self.model.state_dict(), FSDP.optim_state_dict(self.model, optimizer)
        if _is_distributed(self.model):
            return get_state_dict(self.model, optimizer, options=WHOLE)
        return self.model.state_dict(), optimizer.state_dict()

    def load(self, state: Any) -> None:
        model, values = state
        optimizer = self.optimizer
        assert optimizer is not None
        if isinstance(self.model, FSDP):
            with FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT):
                self.model.load_state_dict(model)
                values = FSDP.optim_state_dict_to_load(self.model, optimizer, values)
            optimizer.load_state_dict(values)
        elif _is_distributed(self.model) and not values["state"]:
            # torch looks for a device in what an optimizer has kept.
            set_model_state_dict(self.model, model, options=WHOLE)
        elif _is_distributed(self.model):
            set_state_dict(
                self.model,
                optimizer,
                model_state_dict=model,
                optim_state_dict=values,
                options=WHOLE,
            )
        else:
            self.model.load_state_dict(model)
            optimizer.load_state_dict(values)


def _built(case: Case, seed: int) -> nn.Module:
    model = build(case.model)
    seed += "other start" in case.loop and communicator().rank
    if seed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    return model


def step_in_backward(case: Case, held: Sequence[nn.Parameter]) -> None:
    """Step an optimizer for each of ``held`` as soon as its gradient is there."""
    trained = [parameter for parameter in held if parameter.requires_grad]
    make: Any = OPTIMIZERS[case.optimizer]
    is_flat = any(isinstance(parameter, FlatParameter) for parameter in trained)
    if case.seed % 2 and isinstance(make, partial) and not is_flat:
        apply_in_backward(make.func, trained, make.keywords)  # pyrefly: ignore
        return
    for parameter in trained:
        optimizer = make([parameter])

        def step_now(each: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            each.grad = None

        parameter.register_post_accumulate_grad_hook(step_now)


def _loss_with(model: nn.Module, output: Any, target: torch.Tensor) -> torch.Tensor:
    """A loss that reads a weight, too."""
    return loss_of(output, target) + 0.01 * last_of(model).weight.square().sum()


def _is_distributed(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule) or any(
        hasattr(p, "placements") for p in model.parameters()
    )


def _clean(name: str) -> str:
    return name.removeprefix("module.").replace("_fsdp_wrapped_module.", "")


def _full(value: Any) -> torch.Tensor:
    found = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found.detach().clone()


# -------------------------------------------------------------------------------------- plans


class Planned:
    """A model that `parallelize` has laid out."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        model = _built(case, seed)
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        args, options = call(case.model, x)
        self.optimizer = None
        self.trainable = mw.parallelize(
            model,
            plan_of(case, model),
            optimizer=optimizer_of(case),
            loss=partial(_loss_with, model) if "loss reads weights" in case.loop else loss_of,
            example=options or args,
        )
        self.model = self.trainable.module
        self.data_rank, self.data_size = self.trainable.data_rank, self.trainable.data_size

    def _batch(self, x: torch.Tensor) -> Any:
        args, options = call(self.case.model, x)
        return options or args

    def train(self, parts: Sequence[Part], step: int) -> float:
        x, target = (torch.cat(each) for each in zip(*parts, strict=True))
        self.trainable.forward_backward(self._batch(x), target)
        self._found = {n: _full(g) for n, g in self.trainable.gradients().items()}
        self._result = self.trainable.optimizer_step()
        return self._result.loss.item()

    def gradients(self) -> Mapping[str, torch.Tensor] | None:
        return self._found

    def step(self, step: int) -> None:
        """The optimizer has stepped."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.trainable.weights()

    def evaluate(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output_of(self.trainable.eval(self._batch(x), target).output)[0]

    def named(self) -> Mapping[str, nn.Parameter]:
        return self.trainable.named_parameters()

    def state(self) -> Any:
        return self.trainable.state_dict()

    def load(self, state: Any) -> None:
        self.trainable.load_state_dict(state)


def plan_of(case: Case, model: nn.Module) -> Plan:
    """The plan of a case, whose options name blocks of ``model``."""
    draw, axes = random.Random(case.seed + 3), case.axes
    prefix = "" if case.model.is_chain else "blocks."
    blocks = [f"{prefix}{n}" for n in range(len(case.model.blocks))]
    styles = ("colwise_gathered", "rowwise_scattered")
    rules = {n: draw.choice(styles) for n in linears_of(model) if draw.random() < 0.6}
    some = tuple(name for name in blocks if draw.random() < 0.5)
    if "reversed" in case.options:
        axes = dict(reversed([*axes.items()]))
    return Plan(
        axes=Axes.of(axes),
        expert=_expert_plan(case, model) if "expert" in axes else ExpertPlan(),
        pipeline=PipelinePlan(
            schedule=case.schedule,  # pyrefly: ignore
            microbatches=case.microbatches,
            split="parameters" if "split parameters" in case.options else "auto",
        )
        if case.schedule
        else PipelinePlan(),
        tensor=TensorPlan(rules=(rules or None) if axes.get("tensor") else None),
        shard=ShardPlan(
            units=("",) if "one unit" in case.options or not some else some,
            reshard_after_forward="keep" not in case.options,
        )
        if axes.get("shard")
        else ShardPlan(),
        buckets=BucketPlan(cap_mb=1e-4) if "small buckets" in case.options else BucketPlan(),
        train=TrainPlan(
            accumulate=case.passes,
            clip_norm=CLIP if "clip ours" in case.loop else None,
            recompute=some[:1] if "recompute" in case.options else (),
            batch_norm="sync"
            if batch_norms(model) and case.data_ranks * case.microbatches > 1
            else None,
            flat="flat" in case.options,
        ),
    )


def _expert_plan(case: Case, model: nn.Module) -> ExpertPlan:
    return ExpertPlan(
        modules=(*split_in(case, model),) if "others whole" in case.options else "auto",
        balance="global" if "auxiliary" in case.loop else None,
        auxiliary=AUXILIARY * ("auxiliary" in case.loop),
        z_loss=Z_LOSS * ("z loss" in case.loop),
        bias_rate=RATE if "bias rate" in case.loop else None,
        exchange="pairs" if "pairs" in case.options else "tokens",
    )


def lay_out(case: Case, seed: int = 0) -> Laid:
    """The model of ``case`` over the ranks. Every rank calls it."""
    return Planned(case, seed) if case.is_plan else ByHand(case, seed)
