"""A cell of the matrix on several ranks, and the same training in one process."""

from __future__ import annotations

import contextlib
import functools
import json
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from matrix.cells import ROWS, Cell, loss_of, optimizer_of, plan_of
from matrix.refusals import refusal_of
from meshwright.comm import communicator
from meshwright.composition import Trainable, parallelize
from meshwright.gradients import cut_batch
from meshwright.randomness import Draws, replace_dropout
from meshwright.testing import Ranks
from support.internals.reference import ReferenceRun, first_difference, record, train_reference

SKIPPED = 1
"""The step that overflows in float16."""
TOLERANCE = {"double": 1e-9, "bfloat16": 0.1, "float16": 2e-2, "narrow": 0.1}

"""In half precision a last bit may round the other way, which is 2**-8 of a bfloat16; a sum that is
left out, or taken twice, is further off."""

Pair = tuple[Any, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a cell on a rank."""

    refused: str = ""
    """What was raised at construction."""
    wrong: str = ""
    """What was raised later, or differs from one process."""


# --------------------------------------------------------------------------------- both sides


def built(cell: Cell) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ROWS[cell.model].sample.build().to(dtype_of(cell))


def dtype_of(cell: Cell) -> torch.dtype:
    return torch.float64 if cell.precision == "double" else torch.float32


def batches(cell: Cell) -> list[Pair]:
    """Global batches. Where a loss counts its terms, shares differ in rows and in terms."""
    generator = torch.Generator().manual_seed(5)
    rows = 48 if cell.world <= 4 else 96
    found = []
    for _ in range(cell.steps):
        size = rows + 5 if cell.loss == "counted" else rows
        batch, target = ROWS[cell.model].sample.example_batch(size, generator)
        if cell.loss == "counted":
            few = torch.rand(target.shape, generator=generator) < 0.6
            few[size // 3 :] = False
            target = target.masked_fill(few, -100)
        found.append((batch, target))
    return found


def autocast(cell: Cell) -> contextlib.AbstractContextManager[object]:
    compute = {"bfloat16": torch.bfloat16, "narrow": torch.bfloat16, "float16": torch.float16}
    if cell.precision == "double":
        return contextlib.nullcontext()
    # A cast that is kept would be of weights from before the optimizer's step.
    return torch.autocast("cpu", compute[cell.precision], cache_enabled=False)


# -------------------------------------------------------------------------------- one process


def expected_of(cell: Cell) -> ReferenceRun:
    """What one process computes; cells that differ in their layout alone share it."""
    axes = "replicate=4" if cell.world <= 4 else "replicate=8"
    plain = replace(cell, axes=axes, schedule="", method="")
    if not cell.batch_norm:
        return _expected(replace(plain, accumulate=1, option=""), (1, 1))
    parts = cell.accumulate * cell.microbatches
    return _expected(replace(plain, accumulate=1, option=""), (cell.shares, parts))


@functools.lru_cache(maxsize=256)
def _expected(cell: Cell, parts: tuple[int, int]) -> ReferenceRun:
    """``parts``: of BatchNorm, the shares of a batch, and what each of them is cut into."""
    shares, pieces = parts
    given = batches(cell)
    if cell.batch_norm == "sync":
        # One piece of every share is a batch of which statistics are taken.
        given = [tuple(_interleaved(each, shares, pieces) for each in pair) for pair in given]
    steps = list(range(cell.steps))
    if cell.precision == "float16":
        del given[SKIPPED], steps[SKIPPED]
    model = built(cell)
    if cell.model == "dropout":
        _draw(model, steps)
    with autocast(cell):
        return train_reference(
            model,
            given,
            optimizer=optimizer_of(cell),
            loss=loss_of(cell),
            clip_norm=plan_of(cell).train.clip_norm,
            accumulate=pieces if cell.batch_norm == "sync" else shares * pieces,
            dtype=dtype_of(cell),
        )


def _draw(model: nn.Module, steps: Sequence[int]) -> None:
    """Let each forward pass of ``model`` draw the masks of the next of ``steps``."""
    draws, left, entered = Draws(seed=0), iter(steps), contextlib.ExitStack()
    replace_dropout(model, draws)

    def begin(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        draws.begin_step(next(left))
        entered.enter_context(draws.microbatch(0, range(len(args[0]))))

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(lambda *_: entered.close())


def _interleaved(tensor: torch.Tensor, shares: int, pieces: int) -> torch.Tensor:
    return tensor.unflatten(0, (shares, pieces, -1)).transpose(0, 1).flatten(0, 2)


# -------------------------------------------------------------------------------------- ranks


def lay_out(cell: Cell) -> Trainable:
    model = built(cell)
    batch, _ = ROWS[cell.model].sample.example_batch(4, torch.Generator().manual_seed(1))
    given = tree_map(partial(_in_dtype, dtype_of(cell)), batch)
    example = given if isinstance(given, dict) else (given,)
    return parallelize(
        model,
        plan_of(cell),
        optimizer=optimizer_of(cell),
        loss=loss_of(cell),
        example=example,
    )


def _in_dtype(dtype: torch.dtype, value: object) -> object:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


def train(trainable: Trainable, cell: Cell) -> ReferenceRun:
    shares = []
    for batch, target in batches(cell):
        mine, goal, _ = cut_batch(batch, target, trainable.data_size)[trainable.data_rank]
        shares.append((mine, goal))
    if cell.precision != "float16":
        return record(trainable, shares, dtype=dtype_of(cell))
    # Gradients of a sum over counted terms are as many times larger than those of a mean.
    return _record_with_a_skip(trainable, shares, 2.0**4 if cell.loss == "counted" else 2.0**10)


def _record_with_a_skip(trainable: Trainable, shares: Sequence[Pair], scale: float) -> ReferenceRun:
    """Without the step whose gradients overflow, which has to change nothing."""
    runs = []
    for step, pair in enumerate(shares):
        assert trainable.loss_scale is not None
        if step == SKIPPED:
            before = {name: value.clone() for name, value in trainable.weights().items()}
            trainable.loss_scale.scale = 2.0**120
            assert trainable.step(*pair).skipped
            assert trainable.loss_scale.scale == 2.0**119
            for name, value in trainable.weights().items():
                assert torch.equal(value, before[name]) or _is_statistic(name), name
        else:
            trainable.loss_scale.scale = scale
            runs.append(record(trainable, [pair]))
    return ReferenceRun(
        losses=tuple(run.losses[0] for run in runs),
        gradients=tuple(run.gradients[0] for run in runs),
        norms=tuple(run.norms[0] for run in runs),
        weights=runs[-1].weights,
    )


def compared(run: ReferenceRun, expected: ReferenceRun, cell: Cell) -> str:
    if cell.batch_norm and (cell.batch_norm == "local" or cell.precision == "float16"):
        # Statistics are those of one rank's microbatches, which one process has not seen.
        run, expected = _without_buffers(run), _without_buffers(expected)
    tolerance = TOLERANCE[cell.precision]
    if "mixture" in cell.model and cell.precision != "double":
        tolerance *= 2  # a rounding may send a token to another expert
    found = first_difference(run, expected, tolerance)
    return "" if found is None else str(found)


def _without_buffers(run: ReferenceRun) -> ReferenceRun:
    return replace(run, weights={n: w for n, w in run.weights.items() if not _is_statistic(n)})


def _is_statistic(name: str) -> bool:
    """Of BatchNorm; a step that is skipped moves it too."""
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def body(cells: Sequence[tuple[Cell, ReferenceRun]]) -> list[Outcome]:
    """Outcomes of the first cells; the one that fails in a step is the last."""
    return list(_outcomes(cells))


def _outcomes(cells: Sequence[tuple[Cell, ReferenceRun]]) -> Iterator[Outcome]:
    world = communicator()
    for cell, expected in cells:
        refused, trainable = "", None
        try:
            trainable = lay_out(cell)
        except Exception as error:
            refused = f"{type(error).__name__}: {error}"
        everywhere = world.gather_bytes(json.dumps(refused).encode(), label="who refuses a cell")
        texts = [json.loads(each) for each in everywhere]
        if trainable is None or any(texts):
            some = "" if all(texts) else f"refused on some ranks only: {texts}"
            yield Outcome(refused=refused or "on another rank", wrong=some)
            continue
        try:
            wrong = compared(train(trainable, cell), expected, cell)
        except Exception:
            yield Outcome(wrong=traceback.format_exc())
            return
        yield Outcome(wrong=wrong)


# ------------------------------------------------------------------------------------ verdict


def check(ranks: Ranks, cells: list[Cell], timeout: float) -> None:
    """Each of ``cells`` trains as one process, or is refused as `REFUSALS` says, on all ranks."""
    wrong: list[str] = []
    for world in sorted({cell.world for cell in cells}):
        chosen = [cell for cell in cells if cell.world == world]
        given = [(cell, expected_of(cell)) for cell in chosen]
        for rank, outcomes in enumerate(ranks(world, body, given, timeout=timeout)):
            for cell, outcome in zip(chosen, outcomes, strict=False):
                refusal = refusal_of(cell)
                if refusal is None and (outcome.wrong or outcome.refused):
                    wrong.append(f"rank {rank}, {cell}: {outcome.wrong or outcome.refused}")
                elif refusal is not None and refusal.text not in outcome.refused:
                    found = outcome.refused or outcome.wrong or "it trains"
                    wrong.append(f"rank {rank}, {cell}: expected {refusal.text!r}, found {found}")
            if len(outcomes) < len(chosen):
                wrong.append(f"rank {rank}: {len(chosen) - len(outcomes)} cells were not reached")
    assert not wrong, "\n".join(wrong)
