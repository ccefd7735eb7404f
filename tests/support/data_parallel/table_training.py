"""One cell of the strategy table: the training on ranks, the same in one process, the difference.

The one process keeps the graphs of all microbatches of all ranks and differentiates their one
mean, so it shares no scale, no sum and no order of calls with what it judges. In low precision it
casts where the strategies are asked to cast, and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from meshwright.comm import communicator
from meshwright.data_parallel import keep_batch_norm_local
from support.data_parallel.table_models import ROWS, Row, share_of
from support.data_parallel.table_strategies import STRATEGIES, Laid, Request

STEPS = 5
SCALE = 1024.0
OVERFLOWS = 2
"""The step in which the loss of the last microbatch of the last rank is infinite."""

ACCUMULATIONS: Mapping[str, tuple[bool, ...]] = MappingProxyType(
    {
        "once": (True,),
        "no_sync": (False, False, True),
        "synced": (True, True, True),
        "mixed": (True, False, True),
    }
)
"""For each microbatch of a step whether its gradients are reduced at once."""

PRECISIONS = ("double", "narrow", "autocast")
"""float64; a policy of bfloat16 with sums in float32; autocast to bfloat16 with a loss scaler."""

OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = MappingProxyType(
    {
        "adam": lambda parameters, eps: torch.optim.Adam(parameters, lr=0.01, eps=eps),
        "sgd": lambda parameters, eps: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    }
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row of the product."""

    strategy: str
    model: str
    precision: str
    accumulation: str

    def __str__(self) -> str:
        return f"{self.strategy} / {self.model} / {self.precision} / {self.accumulation}"


@dataclass(kw_only=True)
class Course:
    """What one process computed."""

    losses: dict[tuple[int, int, int], float] = field(default_factory=dict)
    """By step, microbatch and rank."""
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """By rank: those of a rank that sees its own microbatches."""
    scale: float = 1.0


# --------------------------------------------------------------------------------- one process


@functools.lru_cache(maxsize=4)
def course(
    model: str, precision: str, accumulation: str, kind: str, world: int, casts_norms: bool
) -> Course:
    """Train in one process what ``world`` ranks train together."""
    row = ROWS[model]
    one = built(row, precision, judges=True)
    optimizer = OPTIMIZERS[kind](one.parameters(), eps_of(precision))
    scaler = GradScaler("cpu", init_scale=SCALE, enabled=precision == "autocast")
    count = len(ACCUMULATIONS[accumulation])
    found = Course(buffers=[_buffers(one) for _ in range(world)])
    for step in range(STEPS):
        if row.flips:
            one.get_submodule(row.flips).requires_grad_(step % 2 == 0)
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(count):
            for rank in range(world):
                _load(one, found.buffers[rank])
                batch, target = data(row, precision, step, micro, rank, world)
                with autocast(precision):
                    output = (
                        _narrow(one, batch, casts_norms)
                        if precision == "narrow"
                        else (call(one, batch))
                    )
                loss = row.sample.loss(widened(output), target) / count
                found.losses[step, micro, rank] = loss.item()
                if overflows(precision, step, (micro, count), (rank, world)):
                    loss = loss * float("inf")
                found.buffers[rank] = _buffers(one)
                total = total + loss / world
        scaler.scale(total).backward()
        scaler.unscale_(optimizer)
        found.gradients.append(
            {n: p.grad.clone() for n, p in one.named_parameters() if p.grad is not None}
        )
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=clears(row, step))
    found.weights = {n: p.detach() for n, p in one.named_parameters(remove_duplicate=False)}
    found.scale = scaler.get_scale()
    return found


def _narrow(model: nn.Module, batch: object, casts_norms: bool) -> object:
    """The forward pass with every parameter, and the inputs, in bfloat16."""
    kept = {
        id(p)
        for part in model.modules()
        if isinstance(part, nn.BatchNorm1d) and not casts_norms
        for p in part.parameters()
    }
    cast = {
        name: parameter if id(parameter) in kept else parameter.to(torch.bfloat16)
        for name, parameter in model.named_parameters()
    }
    narrow = tree_map(_to_narrow, batch)
    if isinstance(narrow, dict):
        return functional_call(model, cast, kwargs=narrow)
    return functional_call(model, cast, (narrow,))


def _to_narrow(value: object) -> object:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(torch.bfloat16) if is_float else value


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _load(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    # New tensors: the graphs of other microbatches hold the old ones.
    for name in buffers:
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = buffers[name].clone()


# ---------------------------------------------------------------------------------- both sides


def built(row: Row, precision: str, *, judges: bool = False) -> nn.Module:
    torch.manual_seed(0)
    sample = row.judge if judges and row.judge is not None else row.sample
    model = sample.build().to(dtype_of(precision))
    keep_batch_norm_local(model)
    return row.convert(model)


def dtype_of(precision: str) -> torch.dtype:
    return torch.float64 if precision == "double" else torch.float32


def eps_of(precision: str) -> float:
    """In low precision Adam must not make a step of full size out of rounding."""
    return 1e-8 if precision == "double" else 1e-2


def data(
    row: Row, precision: str, step: int, micro: int, rank: int, world: int
) -> tuple[Any, torch.Tensor]:
    seed = (step * 8 + micro) * 8 + rank
    return share_of(row, rank, seed, dtype_of(precision))


def autocast(precision: str) -> contextlib.AbstractContextManager[object]:
    is_on = precision == "autocast"
    return torch.autocast("cpu", torch.bfloat16) if is_on else contextlib.nullcontext()


def call(model: nn.Module, batch: object) -> object:
    return model(**batch) if isinstance(batch, dict) else model(batch)


def widened(output: object) -> Any:
    """A loss is computed in float32 at least."""
    return tree_map(
        lambda x: x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x,
        output,
    )


def overflows(precision: str, step: int, micro: tuple[int, int], rank: tuple[int, int]) -> bool:
    is_last = micro[0] == micro[1] - 1 and rank[0] == rank[1] - 1
    return precision == "autocast" and step == OVERFLOWS and is_last


def clears(row: Row, step: int) -> bool:
    """Gradients become None or zeros in turn; a frozen one may not be zeros."""
    return step % 2 == 0 or bool(row.flips)


# --------------------------------------------------------------------------------------- ranks


def train(cell: Cell, kind: str) -> list[str]:
    """Train a cell on this rank; returns where it differs from one process."""
    strategy, row = STRATEGIES[cell.strategy], ROWS[cell.model]
    world = communicator()
    model = built(row, cell.precision)
    request = Request(
        model=model,
        units=row.units(model),
        is_narrow=cell.precision == "narrow",
        scale=SCALE,
    )
    laid = strategy.lay_out(request)
    expected = course(
        cell.model, cell.precision, cell.accumulation, kind, world.size, strategy.casts_norms
    )
    optimizer = OPTIMIZERS[kind](laid.parameters(), eps_of(cell.precision))
    scaler = laid.scaler() if cell.precision == "autocast" else GradScaler("cpu", enabled=False)
    found: list[str] = []
    for step in range(STEPS):
        if row.flips:
            laid.set_trainable(row.flips, step % 2 == 0)
        for micro, loss in enumerate(_backward(cell, laid, scaler, step)):
            wanted = expected.losses[step, micro, world.rank]
            exact = torch.tensor(wanted, dtype=torch.float64)
            found += differences(f"step {step}: loss", loss, exact, limit(cell, step), abs(wanted))
        scaler.unscale_(optimizer)
        found += _judge(cell, laid, expected, step)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=clears(row, step))
    if scaler.is_enabled() and scaler.get_scale() != expected.scale:
        found.append(f"the loss scale is {scaler.get_scale()}, expected {expected.scale}")
    return found + list(_judge_weights(cell, laid, expected))


def _backward(cell: Cell, laid: Laid, scaler: GradScaler, step: int) -> Iterator[torch.Tensor]:
    row, world = ROWS[cell.model], communicator()
    reduces = ACCUMULATIONS[cell.accumulation]
    for micro, is_reduced in enumerate(reduces):
        batch, target = data(row, cell.precision, step, micro, world.rank, world.size)
        with contextlib.nullcontext() if is_reduced else laid.no_sync():
            with autocast(cell.precision):
                output = call(laid.module, batch)
            loss = row.sample.loss(widened(output), target) / len(reduces)
            yield loss.detach()
            ends = (micro, len(reduces)), (world.rank, world.size)
            if overflows(cell.precision, step, *ends):
                loss = loss * float("inf")
            scaler.scale(loss).backward()


def _judge(cell: Cell, laid: Laid, expected: Course, step: int) -> Iterator[str]:
    wanted = expected.gradients[step]
    if cell.precision == "autocast" and step == OVERFLOWS:
        return
    largest = max(each.abs().max().item() for each in wanted.values())
    for name, mine, theirs in laid.gradients(wanted):
        what = f"step {step}: gradient of {name}"
        if (mine is None) is not (theirs is None):
            yield f"{what} is {'None' if mine is None else 'there'} and should not be"
        elif mine is not None and theirs is not None:
            own = [w.abs().max().item() for n, w in wanted.items() if n in name.split()]
            # A gradient that is zero but for rounding, as of a bias before BatchNorm, is no scale.
            floor = largest * (1e-4 if cell.precision == "double" else 0.1)
            yield from differences(what, mine, theirs, limit(cell, step), max([*own, floor]))


def _judge_weights(cell: Cell, laid: Laid, expected: Course) -> Iterator[str]:
    weights = laid.weights()
    for name, wanted in expected.weights.items():
        size = max(wanted.abs().max().item(), 0.1)
        yield from differences(name, weights[name], wanted, limit(cell, STEPS), size)
    rank = communicator().rank
    if rank == 0 or not STRATEGIES[cell.strategy].broadcasts:
        for name, wanted in expected.buffers[rank].items():
            size = max(wanted.double().abs().max().item(), 0.1)
            yield from differences(name, weights[name], wanted, limit(cell, STEPS), size)


def limit(cell: Cell, step: int) -> float:
    """The relative difference that is allowed.

    In low precision the first step differs by the order of sums in float32 alone. Later a last
    bit of a float32 weight may round its bfloat16 copy the other way, which is 2**-8 of it.
    """
    if cell.precision == "double":
        return ROWS[cell.model].tolerance
    return 1e-5 if step == 0 else 2e-2


def differences(
    what: str, mine: torch.Tensor, theirs: torch.Tensor, tolerance: float, size: float
) -> Iterable[str]:
    if mine.shape != theirs.shape:
        return [f"{what} has shape {tuple(mine.shape)}, expected {tuple(theirs.shape)}"]
    error = (mine.detach().double() - theirs.double()).abs()
    worst = error.max().item() / max(size, 1e-300) if error.numel() else 0.0
    if worst <= tolerance:
        return []
    return [f"{what} differs by {worst:.1e} relative, expected at most {tolerance:.0e}"]
