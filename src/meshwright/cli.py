"""The command line: ``meshwright train``, ``compare``, ``report``, ``doctor``, ``simulate``,
``checkpoint verify``, ``show``, ``diff``, ``export``, ``import``.

Exit status: 0 when done, 1 when a run or a check failed or two runs differ, 2 when a command or a
configuration is wrong (before any process starts), 128 plus the signal's number when a signal ended
the run.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import math
import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Protocol

import tyro

from meshwright import __version__
from meshwright.cli_checkpoint import CHECKPOINT_COMMANDS
from meshwright.comm import connect, disconnect, phase
from meshwright.comm.failures.membership import record_failure
from meshwright.comm.groups.launch import launch
from meshwright.composition import check_model
from meshwright.doctor import examine, report_lines
from meshwright.environment import cluster, is_launched
from meshwright.errors import (
    CheckpointMismatchError,
    LaunchError,
    MeshwrightError,
    PlanError,
    ScheduleError,
)
from meshwright.integrations.trackers import tracker_of
from meshwright.recipes.config import TrainConfig, option_lines, read_config
from meshwright.recipes.loop import Outcome, nats, train
from meshwright.recipes.run_folder import (
    METRICS,
    describe_run,
    folder_of,
    look_ahead,
    require_folder,
    require_free,
    require_start,
    resume_hint,
)
from meshwright.recipes.task import Task, model_text, open_task, sketch
from meshwright.recipes.tensors.compare import compare_runs
from meshwright.recipes.tensors.trace import traced_modules
from meshwright.report import (
    read_chrome_trace,
    read_metrics,
    write_page,
    write_simulation,
)
from meshwright.schedule.actions import Schedule
from meshwright.schedule.builders import build
from meshwright.schedule.lowering import lower
from meshwright.schedule.simulate import Costs, simulate
from meshwright.schedule.text import draw, dump_csv, load_csv
from meshwright.settings import nearest, split_overrides

# Set for the ranks that this command line starts: their launcher reports for them.
_UNDER_LAUNCHER = "MESHWRIGHT_LAUNCHER"


class _Command(Protocol):
    """The options of a command, and what it does."""

    def run(self, words: list[str]) -> int:
        """Run it, given as ``words``; returns the exit status."""


@dataclass(frozen=True, kw_only=True)
class _TrainCommand:
    """Train a model of yours, one of Hugging Face, or a byte-level one on text.

    Starts one process for each rank of the plan, unless torchrun has started them. Every key of
    the configuration can be given here too: --train.seed 3, --run.steps=50 or run.steps=50.
    """

    config: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CONFIG.toml")]
    """The configuration, a TOML file; ``example`` is one that comes with the package."""
    nproc: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Number of ranks; 0 means the product of the plan's axes."""
    resume: Annotated[str, tyro.conf.arg(metavar="WHERE")] = ""
    """Short for --run.resume."""
    check_parity: tyro.conf.FlagCreatePairsOff[bool] = False
    """Short for --run.check_parity true."""
    trace_tensors: tyro.conf.FlagCreatePairsOff[bool] = False
    """Short for --run.trace_tensors true."""

    def run(self, words: list[str]) -> int:
        """Check the configuration, and train here or on ranks that are started here."""
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
        if _UNDER_LAUNCHER not in os.environ:
            _check(config, ranks)
        if is_launched() or ranks == 1:
            return _train_here(config)
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
                lines.append(f"signal 9 is nearly always memory: {metrics} has that of each rank")
            raise LaunchError("\n".join(lines)) from None


@dataclass(frozen=True, kw_only=True)
class _CompareCommand:
    """Name the first tensor in which two runs differ, whatever their layouts.

    Both were started with --trace-tensors. The exit status is 0 when they agree, else 1.
    """

    first: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN_A")]
    """The folder of a run."""
    second: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN_B")]
    """The folder of another."""
    tolerance: Annotated[str, tyro.conf.arg(metavar="X")] = ""
    """Relative difference that is rounding; by default 1e-9, 1e-3, 3e-2 by the narrowest dtype."""

    def run(self, words: list[str]) -> int:
        """Print what was found."""
        try:
            tolerance = _at_least_0("--tolerance", self.tolerance) if self.tolerance else None
            found = compare_runs(self.first, self.second, tolerance=tolerance)
        except ValueError as error:
            raise PlanError(str(error)) from error
        print("\n".join(found.lines()))
        return int(found.divergence is not None)


@dataclass(frozen=True, kw_only=True)
class _DoctorCommand:
    """Show what this machine offers, measure small collectives, and say what to mend."""

    measure: bool = True
    """Start two ranks and measure; otherwise look only."""

    def run(self, words: list[str]) -> int:
        """Print the findings."""
        findings = examine(measure_collectives=self.measure)
        print("\n".join(report_lines(findings)))
        return int(any(finding.is_broken for finding in findings))


@dataclass(frozen=True, kw_only=True)
class _ReportCommand:
    """Draw a run as a page for a browser: its numbers over the steps, and its last steps in time.

    A run that has not ended has no timeline yet. Of a pipeline the last step is drawn, and under it
    what its schedule should have done.
    """

    timeline: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """A run's folder, or a timeline.json."""
    output: Annotated[str, tyro.conf.arg(metavar="FILE.html")] = ""
    """The file to write; by default report.html beside the timeline."""

    def run(self, words: list[str]) -> int:
        """Write the page."""
        given = Path(self.timeline)
        folder = given if given.is_dir() else given.parent
        output = Path(self.output) if self.output else folder / "report.html"
        trace = folder / "timeline.json" if given.is_dir() else given
        metrics = folder / METRICS
        try:
            is_there = metrics.exists() and given.is_dir()
            rows = read_metrics(metrics) if is_there else []
            timeline = None if is_there and not trace.exists() else read_chrome_trace(trace)
            write_page(timeline, output, title=f"Run {folder.resolve().name}", metrics=rows)
        except (ValueError, ScheduleError) as error:
            raise PlanError(str(error)) from error
        print(f"wrote {output}")
        return 0


@dataclass(frozen=True, kw_only=True)
class _SimulateCommand:
    """Draw a pipeline schedule and say how long it idles and what it holds, without running it."""

    schedule: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SCHEDULE")]
    """gpipe, 1f1b, interleaved1f1b, loopedbfs, zb1p, zbv, dualpipev, or a CSV file."""
    ranks: Annotated[int, tyro.conf.arg(metavar="N")] = 4
    """Number of ranks of the pipeline."""
    stages: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Number of stages; 0 means as many for each rank as the schedule is made for."""
    microbatches: Annotated[int, tyro.conf.arg(metavar="N")] = 8
    """Number of parts of a batch that follow each other through the stages."""
    forward: float = 1.0
    """Time of one microbatch's forward through a rank's whole share."""
    input: float = 1.0
    """The same of the input half of the backward."""
    weight: float = 1.0
    """The same of the weight half."""
    transfer: float = 0.0
    """Time of one message between ranks."""
    write: Annotated[str, tyro.conf.arg(metavar="FILE.csv")] = ""
    """Write the schedule with its transfers to a CSV file."""
    page: Annotated[str, tyro.conf.arg(metavar="FILE.html")] = ""
    """Draw it as a page for a browser."""

    def run(self, words: list[str]) -> int:
        """Print what was simulated."""
        try:
            for name in ("forward", "input", "weight", "transfer"):
                _at_least_0(f"--{name}", str(getattr(self, name)))
            compute = self._schedule()
            lowered = lower(compute)
        except (ValueError, ScheduleError) as error:
            raise PlanError(str(error)) from error
        share = len(compute.stages_of(0))
        costs = replace(
            Costs.shared(share, self.forward, self.input, self.weight),
            transfer=self.transfer,
        )
        found = simulate(lowered, costs, events=bool(self.page))
        print(draw(compute))
        print()
        for rank, (busy, idle) in enumerate(zip(found.compute, found.bubbles, strict=True)):
            print(
                f"rank {rank}: computes {busy:g}, idles {idle:g}, holds the activations of at most "
                f"{found.peaks[rank]:g} microbatches"
            )
        print(f"in all {found.makespan:g}, {found.bubble_fraction:.1%} of it idle")
        if self.write:
            dump_csv(lowered, self.write)
        if self.page:
            write_simulation(found.timeline, self.page, title=f"{self.schedule}, simulated")
        return 0

    def _schedule(self) -> Schedule:
        if self.schedule.endswith(".csv"):
            return load_csv(self.schedule)
        if self.stages % max(1, self.ranks):
            raise ValueError(
                f"--stages: expected a multiple of the {self.ranks} ranks, found {self.stages}"
            )
        chunks = self.stages // max(1, self.ranks) or None
        return build(self.schedule, self.ranks, self.microbatches, chunks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(words: list[str]) -> int:
    for name, kind in _COMMANDS.items():
        begin, rest = words[: len(name.split())], words[len(name.split()) :]
        if begin == name.split():
            try:
                return _parse(kind, name, rest).run(rest)
            except PlanError as error:
                return _fail(name, *error.args[0].splitlines(), status=2)
            except LaunchError as error:
                return _fail(name, *str(error).splitlines(), status=1)
            except MeshwrightError as error:
                return _fail(name, _one_line(error), status=1)
            except OSError as error:
                where = f"{error.filename}: {error.strerror}"
                return _fail(name, where if error.filename else _one_line(error), status=2)
    if words and words[0] in ("-h", "--help", "help", "--version"):
        print(f"meshwright {__version__}" if words[0] == "--version" else _overview())
        return 0
    group = [name for name in _COMMANDS if words and name.startswith(f"{words[0]} ")]
    if group and words[1:2] in (["-h"], ["--help"]):
        print(_overview(group, f"{words[0]} COMMAND"))
        return 0
    if group and len(words) == 1:
        return _fail(words[0], f"expected a command: {', '.join(group)}", status=2)
    if not words:
        return _fail("", f"expected a command: {', '.join(_COMMANDS)}", status=2)
    close = nearest(" ".join(words[:2]), list(_COMMANDS)) or nearest(words[0], list(_COMMANDS))
    hint = f"did you mean '{close}'?" if close else f"known commands: {', '.join(_COMMANDS)}"
    return _fail("", f"unknown command '{words[0]}'; {hint}", status=2)


# ---------------------------------------------------------------------------------------- train


def _check(config: TrainConfig, ranks: int) -> None:
    """Find, before any process starts, what can be known to go wrong."""
    problems: list[str] = []
    task: Task | None = None
    try:
        task = open_task(config)
    except PlanError as error:
        problems.extend(error.problems)
    try:
        model = sketch(config) if task is None else task.sketch()
        problems += [
            f"[run] trace_modules: {pattern!r} matches no module of the model"
            for pattern in config.run.trace_modules
            if not traced_modules([pattern], model)
        ]
        problems += task.problems(model) if task is not None else ()
        check_model(model, config.plan, ranks)
    except PlanError as error:
        problems.extend(str(error).splitlines())
    for name in config.run.trackers:
        try:
            tracker_of(name)
        except PlanError as error:
            problems.append(f"[run] trackers: {error}")
    resume = config.run.resume
    try:
        require_start(resume)
        is_named = resume not in ("auto", "never")
        require_folder(Path(config.run.folder or (resume if is_named else "runs")))
        if config.run.export:
            require_free(Path(config.run.export))
    except PlanError as error:
        problems.extend(str(error).splitlines())
    if problems or task is None:
        raise PlanError([*dict.fromkeys(problems)])
    try:
        look_ahead(config, describe_run(config, task.data.fingerprint, model_text(config)))
    except CheckpointMismatchError as error:
        raise PlanError(str(error)) from error


def _train_here(config: TrainConfig) -> int:
    """Train as this process's rank; only rank 0 prints, and a launcher of ours tells of errors."""
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
        return _fail("train", where + _one_line(error), status=1)
    finally:
        disconnect()
    if rank == 0:
        print("\n".join(_summary(outcome)))
    return 0


def _summary(outcome: Outcome) -> list[str]:
    minutes, seconds = divmod(round(outcome.seconds), 60)
    state = "finished" if outcome.is_finished else "stopped on request"
    carrier = "shared memory" if outcome.backend == "meshwright" else outcome.backend
    of = nats(outcome.unit)
    unit = "samples" if outcome.unit == "sample" else "tokens"
    lines = [
        f"{state} at step {outcome.step} of {outcome.steps} on {outcome.ranks} ranks over "
        f"{carrier}, {minutes}:{seconds:02} now, {outcome.tokens_per_second:,.0f} {unit}/s"
    ]
    if outcome.loss is None and outcome.is_finished:
        lines = [
            f"nothing left to do: all {outcome.steps} steps had been taken; for more give a larger "
            "--run.steps and --run.accept_changes true, for a new run another --run.folder"
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
        lines.append(f"to resume, give the same command --resume {outcome.folder}")
    return lines


def _at_least_0(option: str, given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{option}: expected a number of at least 0, found {given}")
    return value


_COMMANDS: Mapping[str, type[_Command]] = MappingProxyType(
    {
        "train": _TrainCommand,
        "compare": _CompareCommand,
        "doctor": _DoctorCommand,
        "report": _ReportCommand,
        "simulate": _SimulateCommand,
        **CHECKPOINT_COMMANDS,
    }
)


# ------------------------------------------------------------------------------- words and lines


def _parse(kind: type[_Command], name: str, words: list[str]) -> _Command:
    """Find the command's own arguments; a mistake in them is one line and exit status 2."""
    told = io.StringIO()
    about = inspect.cleandoc(kind.__doc__ or "")
    own = split_overrides(words)[1] if kind is _TrainCommand else words
    try:
        with contextlib.redirect_stderr(told):
            return tyro.cli(kind, prog=f"meshwright {name}", args=own, description=about)
    except SystemExit as error:
        if error.code:
            raise PlanError(_unboxed(told.getvalue())) from None
        print("\n".join(option_lines() if kind is _TrainCommand else []))
        raise


def _unboxed(text: str) -> str:
    """Put the text of tyro on one line, without the box around it and its advice below."""
    text = re.sub(r"\x1b\[[0-9;]*m|[\u2500-\u257f]", " ", text)
    text = re.split(r"Argument helptext|For full helptext", text)[0]
    text = re.sub(r"^\s*(Required|Unrecognized) options\s|^\s*Value error\s", "", text)
    return " ".join(word for word in text.split() if set(word) != {"-"}) or "wrong arguments"


def _overview(names: Sequence[str] = (), usage: str = "COMMAND") -> str:
    lines = [
        f"  {name:<18} {(_COMMANDS[name].__doc__ or '').strip().splitlines()[0]}"
        for name in names or _COMMANDS
    ]
    return "\n".join(
        [f"usage: meshwright {usage} ...", "", *lines, "", f"meshwright {usage} --help tells more."]
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _fail(command: str, *lines: str, status: int) -> int:
    for line in lines:
        print(f"meshwright {command}: {line}".replace(" :", ":"), file=sys.stderr)
    return status
