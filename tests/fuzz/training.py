"""A case trained in one process and over the ranks, and what became of it on each rank."""

from __future__ import annotations

import copy
import faulthandler
import gc
import json
import os
import re
import traceback
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from fuzz.cases import CHANGED, STEPS, Case
from fuzz.layouts import CLIP, RATE, Part, lay_out, losses_of, split_in, step_in_backward
from fuzz.mixtures import Balance
from fuzz.models import build, call, last_of, output_of
from fuzz.optimizers import optimizer_of
from fuzz.sequences import expected_steps, over_ranks
from meshwright.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InternalError,
    NonFiniteError,
    RankFailedError,
)

__all__ = ["Found", "is_refusal", "run_cases", "told"]

RTOL, ATOL = 1e-9, 1e-11

Kind = Literal["same", "told", "refused", "followed", "no program", "differs", "warned", "raised"]

EXPECTED_WARNINGS = re.compile(
    r"The `NO_SHARD` sharding strategy is deprecated|FSDP is switching to use `NO_SHARD`"
    r"|adds .* padding|We do not recommend wrapping such modules"
    r"|Slicing a flattened dim from root mesh"
    r"|None of the inputs have requires_grad|clip_grad_norm_\(\) on rank \d+ with no gradients"
)
"""What a case may be told, by us or by torch."""

SAYS_DIFFERS = re.compile(r"declare_element_wise|BatchNorm|in one flat parameter with others")
"""Warnings by name of what gives other numbers than one process, as torch's own does."""

SECONDS = 40.0
"""For one case, on a loaded machine: then the rank shows where it is, and ends."""

Fault = Callable[[Case], AbstractContextManager[object]]
"""What a test of the fuzzer does to the training over ranks."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What became of a case on a rank."""

    kind: Kind
    text: str = ""
    """What was raised or warned of, or what differs."""
    step: int = -1
    """In which it was, -1 while the model was laid out."""
    trace: str = ""


# --------------------------------------------------------------------------------- both sides


def parts(case: Case, step: int) -> list[list[Part]]:
    """The global batch of a step: for each share of it, its parts, one for each pass."""
    draw = torch.Generator().manual_seed(1000 * case.seed + step)
    rows = 1 if "smaller" in case.loop and step == STEPS - 1 else 2
    passes = case.passes * case.microbatches

    def some(features: int) -> torch.Tensor:
        size = (case.data_ranks, passes, rows, features)
        return torch.randn(size, generator=draw, dtype=torch.float64)

    x, target = some(4), some(3)
    return [[*zip(x[share], target[share], strict=True)] for share in range(case.data_ranks)]


def change(
    case: Case,
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    step: int,
) -> None:
    """What a program does to its model between two steps."""
    prefix = "0." if case.model.is_chain else "blocks.0."
    if "freeze" in case.loop and step in (CHANGED, CHANGED + 1):
        for name, parameter in named.items():
            if name.startswith(prefix) and (
                parameter.is_floating_point() or parameter.is_complex()
            ):
                if step == CHANGED:
                    vars(parameter)["_fuzz_trained"] = parameter.requires_grad
                    parameter.requires_grad_(False)
                else:
                    parameter.requires_grad_(vars(parameter).get("_fuzz_trained", True))
    if "scale weights" in case.loop and step == CHANGED:
        with torch.no_grad():
            for parameter in named.values():
                parameter.mul_(0.75)
    if "late hook" in case.loop and step == 0:
        # Not the last that this rank has: other stages have it.
        name = f"{len(case.model.blocks)}.weight" if case.model.is_chain else "head.weight"
        if name in named:
            named[name].register_hook(lambda gradient: 0.5 * gradient)
    if "new parameter" in case.loop and step == CHANGED:
        inner = getattr(model, "module", model)
        layer = last_of(inner)
        layer.weight = nn.Parameter(1.5 * layer.weight.detach())
        if optimizer is not None:
            optimizer.add_param_group({"params": [layer.weight]})
        else:
            step_in_backward(case, [layer.weight])


class One:
    """The model in one process."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._begin()

    def _begin(self) -> None:
        self.model = build(self.case.model)
        self.balance = Balance(self.model, split_in(self.case, self.model))
        self.optimizer = optimizer_of(self.case)(self.model.parameters())

    def train(self, step: int) -> float:
        return self._passes(step).item()

    def _again(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        return self._passes(self.at)

    def _passes(self, step: int) -> torch.Tensor:
        self.at = step
        shares = parts(self.case, step)
        passes = [
            tuple(torch.cat([share[n][i] for share in shares]) for i in range(2))
            for n in range(len(shares[0]))
        ]
        total = torch.zeros(())
        for x, target in passes:
            balance = self.balance.auxiliary, self.balance.z
            loss = losses_of(self.case, self.model, self.model, x, target, *balance) / len(passes)
            loss.backward()
            total += loss.detach()
        return total

    def gradients(self) -> dict[str, torch.Tensor]:
        named = self.model.named_parameters()
        return {n: p.grad.to_dense().clone() for n, p in named if p.grad is not None}

    def step(self) -> None:
        if any(each.startswith("clip") for each in self.case.loop):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step(*([self._again] if self.case.optimizer == "lbfgs" else []))
        self.optimizer.zero_grad(set_to_none="keep zeros" not in self.case.loop)
        self.balance.move(RATE if "bias rate" in self.case.loop else 0.0)

    @torch.no_grad()
    def evaluate(self, x: torch.Tensor) -> torch.Tensor:
        self.model.eval()
        args, options = call(self.case.model, x)
        main, _ = output_of(self.model(*args, **options))
        self.model.train()
        return main

    def begin_again(self) -> None:
        state = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        self._begin()
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one process has of a step."""

    loss: float
    gradients: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    output: torch.Tensor | None = None


def expected_of(case: Case) -> list[Record]:
    """Each step in one process. What raises here is no program."""
    if case.sequences is not None:
        steps = expected_steps(case.sequences)
        return [
            Record(loss=one.loss, gradients=one.gradients, weights=one.weights) for one in steps
        ]
    one = One(case)
    found: list[Record] = []
    for step in range(STEPS):
        if step == CHANGED and "round trip" in case.loop:
            one.begin_again()
        change(case, one.model, dict(one.model.named_parameters()), one.optimizer, step)
        loss = one.train(step)
        gradients = one.gradients()
        one.step()
        output = one.evaluate(evaluated(case)) if "eval" in case.loop else None
        record = Record(loss=loss, gradients=gradients, weights=one.weights(), output=output)
        if not all(torch.isfinite(v).all() for v in record.weights.values() if v.numel()):
            raise ArithmeticError("the weights are not finite")
        found.append(record)
    return found


def evaluated(case: Case) -> torch.Tensor:
    """What the model is evaluated on: the same on all ranks, with a row for each microbatch."""
    return parts(case, 77)[0][0][0].repeat(case.microbatches, 1)


# -------------------------------------------------------------------------------------- ranks


class Differs(Exception):  # noqa: N818 - what it says is no error of a program
    """Something is not what one process has."""


def follow(case: Case, expected: Sequence[Record], at: dict[str, int]) -> None:
    """Train ``case`` over the ranks; ``at`` says in which step it is. Raises `Differs`."""
    if case.sequences is not None:
        found = over_ranks(case.sequences)
        for step, record in enumerate(expected):
            mine = next(found)
            at["step"] = step
            close(torch.tensor(mine.loss), torch.tensor(record.loss), "the loss")
            compare_gradients(case, mine.gradients, record.gradients)
            compare(mine.weights, record.weights)
        return
    laid = lay_out(case)
    for step, record in enumerate(expected):
        at["step"] = step
        if step == CHANGED and "round trip" in case.loop:
            state = copy.deepcopy(laid.state())
            laid = lay_out(case, seed=1)
            laid.load(state)
        change(case, laid.model, laid.named(), laid.optimizer, step)
        loss = laid.train(parts(case, step)[laid.data_rank], step)
        gradients = laid.gradients()
        laid.step(step)
        close(torch.tensor(loss), torch.tensor(record.loss), "the loss")
        if gradients is not None:
            compare_gradients(case, gradients, record.gradients)
        compare(laid.weights(), record.weights)
        if record.output is not None:
            x = evaluated(case)
            output = laid.evaluate(x, torch.zeros(len(x), 3, dtype=x.dtype))
            close(output, record.output, "the output of an evaluation")


def compare_gradients(
    case: Case, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    for name in sorted({*found, *expected}):
        mine, theirs = found.get(name), expected.get(name)
        if mine is None or theirs is None:
            other = theirs if mine is None else mine
            assert other is not None
            if other.numel() and other.any():
                lacks = "missing" if mine is None else "none in one process"
                raise Differs(f"the gradient of {name!r} is {lacks}")
            continue
        close(mine.to_dense(), theirs, f"the gradient of {name!r}")


def compare(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    if {*found} != {*expected}:
        raise Differs(
            f"state dict: {sorted({*expected} - {*found})} are missing, "
            f"{sorted({*found} - {*expected})} are not known"
        )
    for name, value in expected.items():
        close(found[name], value, f"{name!r} after the step")


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if found.shape != expected.shape:
        raise Differs(f"{what} has shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    if found.dtype != expected.dtype and "loss" not in what:
        raise Differs(f"{what} is {found.dtype}, not {expected.dtype}")
    if not expected.numel():
        return
    size, worst = expected.abs().max().item(), (found - expected).abs().max().item()
    if not worst <= RTOL * size + ATOL:
        raise Differs(f"{what} differs by {worst:.2g} of {size:.2g}")


TORCH_REFUSES = re.compile(r"^Missing optimizer state for parameter")
"""What torch says itself of a program that is not to be."""

MIXED = "got mixed torch.Tensor and DTensor"
"""What torch says, with an operator's name, of what a program mixes outside of the model."""

TORCH_CANNOT = re.compile(r"Sharding propagation failed for aten\.view\.default\(Spec")
"""Texts of torch on views that its own functions take of DTensors with uneven parts, or none."""


def is_refusal(error: BaseException, case: Case) -> bool:
    """Whether ``error`` was raised by the library, on purpose, of what it was asked for."""
    if isinstance(error, RuntimeError) and TORCH_REFUSES.search(str(error)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if MIXED in str(error):
        # The library looks at what torch refuses, and raises it as it is where it names nothing.
        names = [frame.name for frame in frames]
        frames = frames[: names.index("_explained")] if "_explained" in names else frames
    if MIXED in str(error) and not any("/meshwright/" in frame.filename for frame in frames):
        # Torch's function for norms, or a loss of the program's own that reads a weight.
        in_norm = any(frame.filename.endswith("nn/utils/clip_grad.py") for frame in frames)
        adds = "loss reads weights" in case.loop or "penalty" in case.model.traits
        return not case.is_plan and (
            in_norm or (adds and frames[-1].name == "_engine_run_backward")
        )
    if isinstance(error, RuntimeError) and TORCH_CANNOT.search(str(error)):
        return not any("/meshwright/" in frame.filename for frame in frames)
    if isinstance(error, CollectiveMismatchError) and "to have the same values on" in str(error):
        return "other start" in case.loop
    unsound = (CollectiveMismatchError, CollectiveTimeoutError, InternalError, NonFiniteError)
    if isinstance(error, unsound) or not isinstance(error, ValueError | TypeError | RuntimeError):
        is_contract = isinstance(error, AssertionError) and len(str(error)) > 30
        if not is_contract or isinstance(error, unsound):
            return False
    return "/meshwright/" in frames[-1].filename and (frames[-1].line or "").startswith("raise")


def outcome(case: Case, fault: Fault) -> Found:
    """Train ``case`` on this rank, and say how that went."""
    at = {"step": -1}
    # Numbers that optimizers keep are of the default dtype, and turn into the model's when loaded.
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings(record=True) as usual:
        warnings.simplefilter("always")
        try:
            expected = expected_of(case)
        except Exception as error:
            return Found(kind="no program", text=f"{type(error).__name__}: {error}")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with fault(case):
                follow(case, expected, at)
            found = Found(kind="same", step=at["step"])
        except Differs as error:
            found = Found(kind="differs", text=str(error), step=at["step"])
        except RankFailedError as error:
            return Found(kind="followed", text=str(error), step=at["step"])
        except Exception as error:
            kind: Kind = "refused" if is_refusal(error, case) else "raised"
            text = f"{type(error).__name__}: {error}"
            return Found(kind=kind, text=text, step=at["step"], trace=traceback.format_exc())
    return _with_warnings(found, told, {str(warning.message) for warning in usual})


def _with_warnings(
    found: Found, told: Sequence[warnings.WarningMessage], usual: Container[str]
) -> Found:
    """``found`` together with what was said of it, which is not ``usual`` in one process."""
    for warning in told:
        text = str(warning.message)
        if SAYS_DIFFERS.search(text):
            return replace(found, kind="told", text=f"{found.kind}, after a warning: {text}")
    for warning in told:
        text = str(warning.message)
        known = text in usual or EXPECTED_WARNINGS.search(text) or not _counts(warning)
        if not known and found.kind == "same":
            return replace(found, kind="warned", text=f"{warning.category.__name__}: {text}")
    return found


def _counts(warning: warnings.WarningMessage) -> bool:
    """Torch warns itself of much that it does inside."""
    return not issubclass(warning.category, DeprecationWarning | FutureWarning)


def run_cases(
    cases: Sequence[Case], folder: str, fault: Fault = nullcontext, seconds: float = SECONDS
) -> None:
    """Let `folder` know what becomes of each of ``cases`` on this rank, as they end.

    Raises RuntimeError where the ranks do not come out of a case together.
    """
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    store: Any = dist.distributed_c10d._get_default_store()
    path = Path(folder) / f"rank{rank}"
    for number, case in enumerate(cases):
        _tell(path, {"begun": number})
        faulthandler.dump_traceback_later(seconds, exit=True)
        found = asdict(outcome(case, fault))
        _tell(path, {"number": number, **found})
        gc.collect()
        key = f"fuzz/{os.path.basename(folder)}/{number}"
        store.set(f"{key}/{rank}", "done")
        # Who raised has left the collectives that others wait in.
        is_well = found["kind"] in ("same", "told", "no program", "warned")
        patience = seconds if is_well else 3.0
        try:
            store.wait([f"{key}/{each}" for each in range(size)], timedelta(seconds=patience))
        except Exception:
            raise RuntimeError(f"the ranks did not end case {case.seed} together") from None
        faulthandler.cancel_dump_traceback_later()


def _tell(path: Path, what: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(what) + "\n")


def told(folder: Path, size: int) -> Iterator[list[dict[str, Any]]]:
    """What each rank has said in ``folder``."""
    for rank in range(size):
        path = folder / f"rank{rank}"
        yield [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
