"""``meshwright train``: on ranks that it starts, or as a rank that a launcher started."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import nn

from meshwright.cli.plan import PlanCommand
from meshwright.cli.words import fail, one_line
from meshwright.comm import connect, disconnect, phase
from meshwright.comm.failures.membership import record_failure
from meshwright.comm.groups.launch import launch
from meshwright.composition import check_model
from meshwright.composition.example_run import Inputs, left_as_it_is
from meshwright.composition.stages import cut_model
from meshwright.composition.tensor_rules import ModelCut
from meshwright.doctor.survey import usable_cores
from meshwright.environment import cluster, is_launched
from meshwright.errors import CheckpointMismatchError, LaunchError, MeshwrightError, PlanError
from meshwright.gradients import call_module
from meshwright.integrations.trackers import tracker_of
from meshwright.plan import Plan
from meshwright.planner.hardware import require_machine, this_machine
from meshwright.planner.predictions import best_plan
from meshwright.recipes.config import TrainConfig, option_lines, read_config
from meshwright.recipes.loop import RunOutcome, carrier, device_name, nats, train, use_text
from meshwright.recipes.run_folder import (
    describe_run,
    folder_of,
    look_ahead,
    require_folder,
    require_free,
    require_start,
    resume_hint,
)
from meshwright.recipes.task import Task, model_text, open_task, sketch, to_device
from meshwright.recipes.tensors.trace import traced_modules
from meshwright.report import METRICS
from meshwright.settings import split_overrides

# Set for the ranks that this command starts: their launcher reports their errors.
_UNDER_LAUNCHER = "MESHWRIGHT_LAUNCHER"
_MEASURED_SECONDS = 5


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train your own model, one of Hugging Face, or a byte-level one on text.

    Starts one process for each rank of the plan, unless torchrun has started them. Options can
    override every key of the configuration: --train.seed 3, --run.steps=50 or run.steps=50.
    """

    config: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CONFIG.toml")]
    """The configuration, a TOML file; ``example`` is the one that comes with the package."""
    nproc: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Number of ranks; 0 means the product of the plan's axes."""
    plan: Annotated[Literal["given", "auto"], tyro.conf.arg(metavar="given|auto")] = "given"
    """auto: take the sizes of axes replicate and shard, passes and recomputing that the planner
    finds fastest on this machine, and show what it predicts in the report."""
    rehearse: Annotated[int | None, tyro.conf.arg(metavar="RANK")] = None
    """Train nothing: print the bytes of a rank, by a step of it without the others."""
    resume: Annotated[str, tyro.conf.arg(metavar="WHERE")] = ""
    """Short for --run.resume."""
    check_parity: tyro.conf.FlagCreatePairsOff[bool] = False
    """Short for --run.check_parity true."""
    trace_tensors: tyro.conf.FlagCreatePairsOff[bool] = False
    """Short for --run.trace_tensors true."""

    option_lines = staticmethod(option_lines)

    def run(self, words: list[str]) -> int:
        """Check the configuration, then train in this process or start the ranks."""
        overrides, _ = split_overrides(words)
        if self.resume:
            overrides.append(f"run.resume={self.resume}")
        flags = {"check_parity": self.check_parity, "trace_tensors": self.trace_tensors}
        overrides += [f"run.{flag}=true" for flag, is_given in flags.items() if is_given]
        config = read_config(self.config, overrides)
        if self.nproc < 0:
            raise PlanError(f"--nproc: expected a whole number of at least 0, found {self.nproc}")
        ranks = self.nproc or config.plan.axes.world_size
        if is_launched():
            ranks = cluster().size
        if ranks < 1:
            raise PlanError("[axes] dp_shard = -1 takes the ranks that are left: give --nproc")
        if self.plan == "auto":
            config = planned(config, ranks)
        if (axes := config.plan.over(ranks).axes) != config.plan.axes:
            overrides.append(f"axes.dp_shard={axes.size('shard') * axes.size('expert')}")
            config = read_config(self.config, overrides)
        if _UNDER_LAUNCHER not in os.environ:
            _check(config, ranks)
        if self.rehearse is not None:
            print(open_task(config).rehearse(self.rehearse))
            return 0
        if is_launched() or ranks == 1:
            return _train_here(config)
        if ranks > (cores := usable_cores()) and not torch.cuda.is_available():
            print(
                f"{ranks} ranks share {cores:g} core{'s' * (cores != 1)}: expect each step to take "
                "several times as long",
                flush=True,
            )
        os.environ[_UNDER_LAUNCHER] = "1"
        folder = folder_of(config)
        given = [*words, f"--run.folder={folder}"]
        try:
            return launch([sys.executable, "-m", "meshwright", "train", *given], ranks)
        except LaunchError as error:
            if "ended by signal" not in str(error):
                raise
            lines = [str(error), resume_hint(folder, f"meshwright train {shlex.join(words)}")]
            if "signal 9" in lines[0]:
                metrics = folder / METRICS
                lines.append(f"signal 9 is nearly always memory: {metrics} shows each rank's")
            raise LaunchError("\n".join(lines)) from None


def planned(config: TrainConfig, ranks: int) -> TrainConfig:
    """Put the planner's plan for ``ranks`` of this machine into ``config``.

    Measures the machine first where its rates are not known; ranks of a launcher raise then.
    """
    device = device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if this_machine(device) is None and not is_launched():
        print(f"this machine is not known yet: measuring it for {_MEASURED_SECONDS} s", flush=True)
        PlanCommand(calibrate=True, seconds=_MEASURED_SECONDS).run([])
    samples, rest = divmod(config.data.batch_size, ranks)
    if rest or not samples:
        raise PlanError(
            f"[data] batch_size = {config.data.batch_size} cannot be shared by {ranks} ranks; "
            f"choose a multiple of {ranks}"
        )
    machine = require_machine(device).shared(ranks)
    found = best_plan(open_task(config).trace(samples), config.plan, machine, ranks, samples)
    if not is_launched():
        print(f"plan auto: {found}", flush=True)
    return replace(config, plan=found.plan, run=replace(config.run, predict=True))


def _check(config: TrainConfig, ranks: int) -> None:
    """Find, before any process starts, every problem that can be known by then."""
    problems: list[str] = []

    @contextlib.contextmanager
    def gathering(key: str = "") -> Iterator[None]:
        try:
            yield
        except PlanError as error:
            problems.extend(key + line for line in str(error).splitlines())

    task: Task | None = None
    with gathering():
        task = open_task(config)
    with gathering():
        model = sketch(config)
        problems += [
            f"[run] trace_modules: {pattern!r} matches no module of the model"
            for pattern in config.run.trace_modules
            if not traced_modules([pattern], model)
        ]
        problems += task.problems(model) if task is not None else ()
        _check_model(model, config.plan, ranks, task)
    for name in config.run.trackers:
        with gathering("[run] trackers: "):
            tracker_of(name)
    resume = config.run.resume
    with gathering():
        require_start(resume)
        is_named = resume not in ("auto", "never")
        require_folder(Path(config.run.folder or (resume if is_named else "runs")))
        if config.run.export:
            require_free(Path(config.run.export))
    if problems or task is None:
        raise PlanError([*dict.fromkeys(problems)])
    try:
        look_ahead(config, describe_run(config, task.data.fingerprint, model_text(config)))
    except CheckpointMismatchError as error:
        raise PlanError(str(error)) from error


def _check_model(model: nn.Module, plan: Plan, ranks: int, task: Task | None) -> None:
    """Raise PlanError for what ``plan`` and ``model``, which may be on meta, contradict."""
    stages = plan.axes.size("pipeline")
    example: Inputs | None = None
    if task is not None and (stages > 1 or plan.train.dropout == "global"):
        held = next(model.parameters(), torch.empty(0, device="cpu"))
        example = to_device(task.example(model), held.device, held.dtype)
        try:
            with left_as_it_is(model), torch.no_grad():
                call_module(model, example)
        except Exception:
            # Many models need values, which meta tensors lack; the ranks have them and report.
            example = None
    check_model(model, plan, ranks, example)
    if example is None or stages == 1:
        return
    try:
        cut_model(
            model, plan.pipeline, stages, example, tensor=ModelCut(styles={}, widths={}, ranks=1)
        )
    except PlanError as error:
        # A trace may fail on meta tensors only.
        if not isinstance(error.__cause__, RuntimeError):
            raise


def _train_here(config: TrainConfig) -> int:
    """Train as this process's rank; only rank 0 prints. Our launcher, if any, reports errors."""
    rank = cluster().rank if is_launched() else 0
    logging.basicConfig(format=f"rank {rank}: %(message)s", level=logging.WARNING)
    try:
        world = connect(timeout=config.run.timeout)
        with phase("train"):
            outcome = train(
                config, world, partial(print, flush=True) if rank == 0 else lambda line: None
            )
    except (MeshwrightError, OSError) as error:
        record_failure(error)
        disconnect()  # tells the other ranks why, too
        if _UNDER_LAUNCHER in os.environ:
            return 1
        where = f"rank {rank}: " if is_launched() else ""
        return fail("train", where + one_line(error), status=1)
    finally:
        disconnect()
    if rank == 0:
        print("\n".join(_summary(outcome)))
    return 0


def _summary(outcome: RunOutcome) -> list[str]:
    minutes, seconds = divmod(round(outcome.seconds), 60)
    state = "finished" if outcome.is_finished else "stopped on request"
    of = nats(outcome.unit)
    unit = "samples" if outcome.unit == "sample" else "tokens"
    lines = [
        f"{state} at step {outcome.step} of {outcome.steps} on {outcome.ranks} ranks over "
        f"{carrier(outcome.backend)}, {minutes}:{seconds:02} now, "
        f"{outcome.tokens_per_second:,.0f} {unit}/s"
        + (
            f", {use}"
            if (use := use_text(outcome.flops_per_second, outcome.mfu, outcome.hfu))
            else ""
        )
    ]
    if outcome.loss is None and outcome.is_finished:
        lines = [
            f"nothing left to do: all {outcome.steps} steps are done; to train longer, give a "
            "larger --run.steps and --run.accept_changes true; for a new run, another --run.folder"
        ]
    if outcome.loss is not None:
        lines.append(f"training loss {outcome.loss:.4f}{of}")
    if outcome.validation_loss is not None:
        line = f"validation loss {outcome.validation_loss:.4f}{of}"
        if outcome.unigram_loss is not None:
            fall = outcome.unigram_loss - outcome.validation_loss
            line += (
                f"; unigram byte frequencies give {outcome.unigram_loss:.4f} ({abs(fall):.4f} "
                f"{'below' if fall > 0 else 'above'} them)"
            )
        lines.append(line)
    if outcome.parity:
        lines.append(outcome.parity)
    most = f"{outcome.peak_memory / 2**20:,.0f} MiB"
    lines.append(f"memory     {most} at most, on rank {outcome.peak_rank}")
    lines.append(f"checkpoint {outcome.checkpoint}")
    if outcome.export:
        lines.append(f"export     {outcome.export}")
    lines.append(f"metrics    {os.path.join(outcome.folder, METRICS)}")
    if outcome.trace:
        lines.append(f"trace      {outcome.trace} (opens in https://ui.perfetto.dev)")
    if outcome.report:
        lines.append(f"report     {outcome.report} (open it in a browser)")
    if outcome.tensors:
        lines.append(
            f"tensors    {outcome.tensors} (meshwright compare {outcome.folder} OTHER_RUN)"
        )
    if not outcome.is_finished:
        lines.append(f"to resume, add --resume {outcome.folder} to the same command")
    return lines
