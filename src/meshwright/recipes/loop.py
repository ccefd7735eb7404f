"""The training loop: a model on its data, with the layout of the plan.

SIGINT and SIGTERM (under SLURM also SIGUSR1) stop all ranks after the same step::

    signal on rank 1     |
    rank 0   step 7 ----------- agree -- step 8 ---------- agree: stop, save
    rank 1   step 7 --- flag -- agree -- step 8 ---------- agree: stop, save
                        the flag travels beside step 8, whose work hides it
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Self, cast

import torch

import meshwright
from meshwright import checkpoint
from meshwright.axes import SUM_AXES
from meshwright.checkpoint import PendingSave
from meshwright.comm import Communicator, Pending, check_peers, phase, settle
from meshwright.comm.failures.sameness import require_equal
from meshwright.composition import StepResult, Trainable, parallelize
from meshwright.environment import cluster, is_launched
from meshwright.errors import CheckpointWriteError, NonFiniteError, PlanError, ScheduleError
from meshwright.gradients import apply_loss
from meshwright.integrations.trackers import Tracker, flat, tracker_of
from meshwright.planner.hardware import require_machine, this_machine
from meshwright.planner.predictions import Prediction, predict
from meshwright.planner.utilization import StepWork
from meshwright.precision import dtype_bytes
from meshwright.randomness import name_seed
from meshwright.recipes.config import TrainConfig
from meshwright.recipes.language_model import learning_rate, set_learning_rate
from meshwright.recipes.metrics import MetricsFile, RunProgress, StepTrace, live_display
from meshwright.recipes.parity import Parity, check_parity
from meshwright.recipes.run_folder import (
    RunFolder,
    choose_folder,
    describe_run,
    restore_run,
    save_run,
)
from meshwright.recipes.task import Built, Task, model_text, open_task, to_device
from meshwright.recipes.tensors.rows import Header, trace_file
from meshwright.recipes.tensors.trace import TensorTrace, open_trace
from meshwright.recipes.text import Samples
from meshwright.recipes.usage import memory_in_step, memory_of, memory_of_ranks
from meshwright.report import METRICS, PREDICTION, read_run, write_runs
from meshwright.sampling import Sampler
from meshwright.toml_source import dump

_log = logging.getLogger("meshwright")

Write = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The result of a run; equal on all ranks except for the speed."""

    step: int
    steps: int
    ranks: int
    backend: str
    """The transport of the collectives: ``meshwright`` (shared memory), ``gloo``, ``nccl``."""
    loss: float | None
    """Training loss of the last step, for text in nats per byte; None when no step was taken."""
    validation_loss: float | None
    """The same on held-out data; None without any, or when the run was stopped, to end quickly."""
    unigram_loss: float | None
    """Nats per byte of the same windows under the byte frequencies of the training text."""
    unit: str
    """The unit of losses and of the speed: ``byte``, ``token`` or ``sample``."""
    tokens_per_second: float
    """Bytes, tokens or samples a second."""
    seconds: float
    """Wall time of the steps taken now."""
    flops_per_second: float
    """Floating-point operations that the model needs, a second, of all ranks; 0 if not known, and
    on ranks that do not tell them: all but rank 0."""
    mfu: float | None
    """Share of the peak of all ranks' devices; None where either is not known."""
    hfu: float | None
    """The same with what is recomputed."""
    peak_memory: int
    """Largest ``peak`` of `memory_of` over all ranks."""
    peak_rank: int
    """The rank that had it."""
    parity: str
    """The line of the parity check; empty when it was not asked for."""
    folder: str
    checkpoint: str
    trace: str
    report: str
    """The HTML page; empty when no timeline was requested, and on rank 0, which draws it, when that
    failed."""
    tensors: str
    """Folder of the tensor traces; empty when they were not requested."""
    export: str
    """Folder of the exported weights; empty when that was not requested."""

    @property
    def is_finished(self) -> bool:
        """True when all steps have been taken; otherwise the run was stopped on request."""
        return self.step >= self.steps


def train(config: TrainConfig, communicator: Communicator, write: Write) -> RunOutcome:
    """Train as ``config`` says; every rank calls it. ``write`` shows a line, on rank 0 only."""
    with phase("set up"):
        task = open_task(config)
        run = describe_run(config, task.data.fingerprint, model_text(config))
        require_equal(
            communicator,
            run,
            "configuration and data",
            label="compare runs",
            error=PlanError,
            remedy="Give all ranks the same files and overrides",
        )
        folder = choose_folder(config, communicator)
        write(task.data.description)
    parity: Parity | None = None
    if config.run.check_parity:
        with phase("parity check"):
            steps = min(config.run.parity_steps, config.run.steps)
            write(f"parity: training {steps} steps twice in float64")
            parity = check_parity(task, communicator)
    with phase("set up"):
        training = _Training(task, run, folder, communicator, write, parity)
    with StopRequest(communicator) as stop:
        training.run(stop)
    return training.finish()


class _Training:
    """A run: the trainable, its position in the data, and what has been measured so far."""

    def __init__(
        self,
        task: Task,
        run: dict[str, object],
        folder: RunFolder,
        communicator: Communicator,
        write: Write,
        parity: Parity | None,
    ) -> None:
        self._config = config = task.config
        self._task = task
        self._built = built = task.build()
        self._dtype: torch.dtype = getattr(torch, config.plan.precision.parameters)
        self._tokens = config.data.batch_size * task.data.size
        """Bytes, tokens or samples per step."""
        self._run = run
        self._folder = folder
        self._world = communicator
        self._parity = parity
        self._trainable: Trainable = parallelize(
            built.model,
            config.plan,
            optimizer=task.optimizer,
            loss=built.loss,
            example=to_device(task.example(built.model), torch.device("cpu"), self._dtype),
        )
        self._sampler: Sampler = self._trainable.sampler(
            len(task.data.training), config.data.batch_size
        )
        self._trace = StepTrace(communicator.device, keep=config.run.trace_steps)
        self._tensors: TensorTrace | None = None
        self._losses: list[float] = []
        self._saved: Path | None = folder.checkpoint
        self._saving: tuple[int, PendingSave] | None = None
        """The step of the save that goes on in the background, and the save."""
        self._seconds = 0.0
        if folder.checkpoint is not None:
            allowed = config.run.accept_changes
            restore_run(
                folder.checkpoint, self._trainable, self._sampler, run, accept_changes=allowed
            )
            write(f"resumed from {folder.checkpoint} after step {self._step}")
        self._first = self._step + 1
        self._metrics = self._open_metrics()
        self._trackers = self._start_trackers()
        # Rank 0 alone tells them.
        self._work = StepWork(0.0) if communicator.rank else task.work()
        self._predicted = self._predict() if config.run.predict else None
        self._held: dict[str, int] = {}
        """Bytes by category, measured in the first step, where a step is predicted."""
        options = config.run
        self._progress = RunProgress(
            write,
            steps=options.steps,
            every=options.log_every,
            done=self._step,
            unit=self._speed_unit,
            display=None if communicator.rank else live_display(),
        )

    @property
    def _step(self) -> int:
        return self._trainable.steps

    @property
    def _speed_unit(self) -> str:
        return "samples" if self._task.data.unit == "sample" else "tokens"

    def run(self, stop: StopRequest) -> None:
        """Take the remaining steps, or stop when the ranks agree to; save at the end."""
        options = self._config.run
        traced = self._trace_tensors() if options.trace_tensors else None
        try:
            is_stopped = False
            while self._step < options.steps and not is_stopped:
                # A launcher that died takes the store with it, which no collective would notice.
                check_peers()
                stop.begin()
                self._take_step()
                self._note_saved()
                is_stopped = stop.is_agreed()
                is_last = is_stopped or self._step == options.steps
                if is_stopped:
                    self._progress.note(f"step {self._step}: stopping on request; saving")
                if is_last or (options.save_every and self._step % options.save_every == 0):
                    self._save(is_last=is_last)
                is_due = options.validate_every and self._step % options.validate_every == 0
                if is_due and (value := self._validate()) is not None:
                    of = nats(self._task.data.unit)
                    self._progress.note(f"step {self._step}: validation loss {value:.4f}{of}")
                    self._record(step=self._step, validation_loss=value)
        finally:
            self._progress.close()
            for file in (self._metrics, traced):
                if file is not None:
                    file.close()
            self._track(lambda tracker: tracker.finish())

    def finish(self) -> RunOutcome:
        """Validate, write trace, summary, report and export; return how the run ended."""
        with phase("finish"):
            is_finished = self._step >= self._config.run.steps
            validation = self._validate() if is_finished else None
            trace = self._trace.write(self._folder.path / "timeline.json", self._world)
            peak = memory_of(self._trainable, self._world.device)["peak"]
            peaks = [int(of) for (of,) in self._world.gather_numbers([peak], label="peak memory")]
        is_sound = validation is None or math.isfinite(validation)
        is_exported = is_finished and is_sound and self._saved is not None
        count = len(self._losses)
        parity = self._parity
        outcome = RunOutcome(
            step=self._step,
            steps=self._config.run.steps,
            ranks=self._world.size,
            backend=self._world.backend,
            loss=self._losses[-1] if self._losses else None,
            validation_loss=validation,
            unigram_loss=self._task.baseline(),
            unit=self._task.data.unit,
            tokens_per_second=count * self._tokens / self._seconds if count else 0.0,
            seconds=self._seconds,
            **self._use(self._seconds / count if count else 0.0),
            peak_memory=max(peaks),
            peak_rank=peaks.index(max(peaks)),
            parity="" if parity is None else parity.line(self._losses if self._first == 1 else ()),
            folder=str(self._folder.path),
            checkpoint=str(self._saved or ""),
            trace=str(trace or ""),
            report="" if trace is None else str(self._folder.path / "report.html"),
            tensors=str(trace_file(self._folder.path, 0).parent)
            if self._config.run.trace_tensors
            else "",
            export=self._config.run.export if is_exported else "",
        )
        if self._world.rank == 0:
            if compared := self._compare():
                self._write(PREDICTION, compared)
            outcome = self._tell(outcome)
        if outcome.export and self._saved is not None:
            with phase("export"):
                self._task.export(self._saved, self._world)
        if not is_sound:
            raise NonFiniteError(
                f"the validation loss is {validation:g} after step {self._step}: the weights in "
                f"{self._saved} are of no use; lower [optimizer] learning_rate or choose wider "
                "[precision] parameters, and resume from an earlier checkpoint"
            )
        return outcome

    def _tell(self, outcome: RunOutcome) -> RunOutcome:
        """Write the summary and draw the report; if the report fails, the run does not."""
        self._write("summary.json", asdict(outcome))
        if outcome.report:
            try:
                run = read_run(self._folder.path)
                write_runs([run], outcome.report, title=f"Run {run.name}")
            except (OSError, ValueError, ScheduleError) as error:
                self._progress.note(f"error: {outcome.report} cannot be written: {error}")
                outcome = replace(outcome, report="")
                self._write("summary.json", asdict(outcome))
        return outcome

    def _write(self, name: str, values: Mapping[str, object]) -> None:
        text = json.dumps(dict(values), indent=2) + "\n"
        (self._folder.path / name).write_text(text, encoding="utf-8")

    def _open_metrics(self) -> MetricsFile | None:
        hosts = self._world.gather_values(socket.gethostname(), label="hosts")
        self._peak = self._find_peak(len(set(hosts)))
        if self._world.rank:
            return None
        path = self._folder.path
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.toml").write_text(dump(self._config), encoding="utf-8")
        (path / "summary.json").unlink(missing_ok=True)  # a run that is resumed has not ended
        facts = {
            "hosts": ", ".join(dict.fromkeys(hosts)),
            "ranks": str(self._world.size),
            "backend": carrier(self._world.backend),
            "versions": f"meshwright {meshwright.__version__}, torch {torch.__version__}, "
            f"Python {platform.python_version()}",
        }
        if self._parity is not None:
            facts["parity"] = self._parity.finding
        self._write("run.json", facts)
        return MetricsFile(path / METRICS, step=self._step)

    def _start_trackers(self) -> dict[str, Tracker]:
        if self._world.rank:
            return {}
        trackers = {name: tracker_of(name) for name in self._config.run.trackers}
        for tracker in trackers.values():
            tracker.start(self._folder.path, self._run)
        return trackers

    def _track(self, call: Callable[[Tracker], None]) -> None:
        """Call each tracker; one that fails is reported once and dropped."""
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # third-party code may raise anything
                del self._trackers[name]
                self._progress.note(f"error: tracker {name}: {error}; training goes on without it")

    def _find_peak(self, hosts: int) -> float:
        """Return the peak operations per second of all devices; 0 where it is not known."""
        ranks, size = self._world.size, self._config.plan.precision.resolved().compute
        if (given := self._config.run.peak_tflops) is not None:
            return given * 1e12 * ranks
        found = this_machine(device_name(self._world.device))
        return found.shared(ranks // hosts).peak(dtype_bytes(str(size))) * ranks if found else 0.0

    def _predict(self) -> Prediction:
        """Predict a step; raises ``PlanError`` for other axes, or an unknown machine."""
        machine = require_machine(device_name(self._world.device)).shared(self._world.size)
        samples = self._config.data.batch_size // self._world.size
        return predict(self._task.trace(samples), self._config.plan, machine)

    def _compare(self) -> dict[str, dict[str, tuple[float, float]]]:
        """List what was predicted beside what was measured: seconds of lanes, bytes."""
        if self._predicted is None:
            return {}
        lanes = self._trace.lanes(self._world.rank)
        memory = {**memory_of(self._trainable, self._world.device), **self._held}
        pairs = ("time", self._predicted.lanes, lanes), ("memory", self._predicted.memory, memory)
        return {
            what: {
                name: (predicted[name], measured[name]) for name in predicted if name in measured
            }
            for what, predicted, measured in pairs
        }

    def _use(self, seconds: float) -> dict[str, Any]:
        """Say how well a step of ``seconds`` uses the devices: fields of a `RunOutcome`."""
        work, peak = self._work, self._peak
        is_known = bool(peak and work.forward and seconds)
        return {
            "flops_per_second": work.model / seconds if seconds else 0.0,
            "mfu": work.mfu(seconds, peak) if is_known else None,
            "hfu": work.hfu(seconds, peak) if is_known else None,
        }

    def _record(self, step: int, **values: object) -> None:
        if self._metrics is None:
            return
        if problem := self._metrics.write({"step": step, **values}):
            self._progress.note(f"error: {problem}; training goes on")
        numbers: dict[str, float] = {}
        for name, value in flat(values).items():
            if isinstance(value, int | float):
                of, _, what = name.rpartition(".")
                name = f"memory/{what}" if of else name  # the most of any rank
                numbers[name] = max(float(value), numbers.get(name, -math.inf))
        self._track(lambda tracker: tracker.log(step, numbers))

    def _memory(self, number: int) -> dict[str, object]:
        """Ask all ranks for their memory after the first step and those whose line is printed."""
        options = self._config.run
        if number % options.log_every and number not in (self._first, options.steps):
            return {}
        return {"memory": memory_of_ranks(self._trainable, self._world)}

    def _trace_tensors(self) -> MetricsFile:
        """Make each step write its tensors until the file is full."""
        options = self._config.run
        header = Header(
            rank=self._world.rank,
            ranks=self._world.size,
            layout=str(self._config.plan.axes),
            step=self._step + 1,
            run=self._run,
        )
        file = open_trace(self._folder.path, header, options.trace_mb * 2**20, self._world)

        def write(row: Mapping[str, object]) -> None:
            if problem := file.write(row):
                self._progress.note(f"error: {problem}; training goes on")
                self._tensors = None

        share = self._config.data.batch_size // self._trainable.data_size
        self._tensors = TensorTrace(
            self._trainable, write, share=share, modules=options.trace_modules
        )
        return file

    def _take_step(self) -> None:
        started = time.monotonic()
        number = self._step + 1
        rate = learning_rate(self._config.optimizer, number, self._config.run.steps)
        with self._trace.step(self._world.rank), self._telling_breaks(number):
            if self._predicted is not None and number == self._first:
                with memory_in_step(self._trainable) as self._held:
                    result = self._train_once(number, rate)
            else:
                result = self._train_once(number, rate)
        seconds = time.monotonic() - started
        self._seconds += seconds
        settle()  # raises what was found late, before the numbers of a bad step are logged
        loss = result.loss.item()
        self._losses.append(loss)
        more: dict[str, object] = {}
        if self._work.forward:
            more |= {key: value for key, value in self._use(seconds).items() if value}
        if found := self._trainable.expert_imbalance():
            more["imbalance"] = found
        self._record(
            step=number,
            loss=loss,
            grad_norm=result.grad_norm.item(),
            learning_rate=rate,
            **{self._speed_unit: number * self._tokens},
            seconds=seconds,
            **more,
            **self._memory(number),
        )
        mean = self._seconds / len(self._losses)
        left = mean * (self._config.run.steps - number)
        use = use_text(**self._use(mean))
        self._progress.step(number, loss=loss, speed=self._tokens / mean, left=left, use=use)

    @contextlib.contextmanager
    def _telling_breaks(self, number: int) -> Iterator[None]:
        """Log graph breaks of the first two steps: in the first, dropout is watched."""
        if not self._config.plan.train.compile or number > self._first + 1:
            yield
            return
        with meshwright.compiler.GraphBreaks() as breaks:
            yield
        for each in breaks.found:
            _log.info("step %d: a graph ends at %s", number, each)

    def _train_once(self, number: int, rate: float) -> StepResult:
        trainable = self._trainable
        if trainable.optimizer is not None:
            set_learning_rate(trainable.optimizer, rate)
        # Nothing random outlives a step, so a resumed run needs no generator's state.
        torch.manual_seed(name_seed(self._config.plan.train.seed, number, *trainable.draws))
        batch = self._built.read(self._task.data.training.batch(self._sampler.next_indices()))
        take = trainable.step if self._tensors is None else self._tensors.step
        inputs = to_device(batch, self._world.device, self._dtype)
        try:
            return take(*inputs)
        except CheckpointWriteError as error:  # of the save under way: the step has not begun
            self._note_lost(error)
            return take(*inputs)

    def _save(self, *, is_last: bool) -> None:
        """Save; before the last step, a failure is reported and training continues."""
        is_background = self._config.run.save == "background" and not is_last
        with phase("save", step=self._step):
            # Here and below it is the same error on all ranks; caught in the phase, it is nobody's
            # failure.
            try:
                checkpoint.finish()
            except CheckpointWriteError as error:
                self._note_lost(error)
            self._note_saved()
            try:
                saved = save_run(
                    self._folder,
                    self._trainable,
                    self._sampler,
                    self._run,
                    self._world,
                    self._config.run.keep_last,
                    background=is_background,
                )
            except CheckpointWriteError as error:
                if is_last:
                    raise
                self._note_lost(error)
                return
        if isinstance(saved, Path):
            self._saved = saved
            self._progress.note(f"step {self._step}: saved {saved}")
            return
        self._saving = self._step, saved
        if saved.staged:
            self._progress.note(
                f"step {self._step}: saving {saved.path.name} in the background, from a copy of "
                f"{saved.staged / 1e6:.1f} MB on rank 0"
            )
        self._note_saved()

    def _note_saved(self) -> None:
        """Tell when the save in the background has its name."""
        if self._saving is not None and self._saving[1].path.is_dir():
            (step, saved), self._saving = self._saving, None
            self._saved = saved.path
            self._progress.note(f"step {step}: saved {saved.path}")

    def _note_lost(self, error: CheckpointWriteError) -> None:
        self._saving = None
        self._progress.note(f"error: {error}; training goes on")

    def _validate(self) -> float | None:
        """Compute the loss on held-out data; None without any."""
        if not self._task.data.validation:
            return None
        with phase("validate", step=self._step):
            return validation_loss(
                self._trainable, self._task, self._built, self._world, dtype=self._dtype
            )


def validation_loss(
    trainable: Trainable,
    task: Task,
    built: Built,
    communicator: Communicator,
    *,
    dtype: torch.dtype,
) -> float:
    """Compute the mean loss over a fixed sample of the held-out data, split over the ranks.

    A loss that is a mean is weighted by its samples. All ranks call it together and get the same
    value; each runs the model equally often, since a layout may need every rank in a forward.
    """
    held_out, options = cast(Samples, task.data.validation), task.config.data
    batch = max(1, options.batch_size // trainable.data_size)
    sample = task.data.validation_sample(options.validation_windows)
    sums = torch.zeros(2, dtype=torch.float64, device=communicator.device)
    coordinate = trainable.plan.axes.coordinate(communicator.rank)
    # Of the ranks that have the same outputs, only the first one's loss counts.
    speaks = not any(coordinate[axis] for axis in coordinate if axis not in SUM_AXES)
    places = range(len(sample))[trainable.data_rank :: trainable.data_size]
    most = -(-len(sample) // trainable.data_size)
    for start in range(0, most, batch):
        mine = places[start : start + batch]
        # A rank that has none left runs the first once more, as others may need it in a forward.
        given = built.read(held_out.batch([sample[place] for place in mine or (0,)]))
        inputs, targets = to_device(given, communicator.device, dtype)
        result = trainable.eval(inputs, targets)
        if speaks and mine:
            found = apply_loss(built.loss, result.output, result.target)
            weight = len(mine) if found.is_mean else 1
            sums[0] += found.total.double() * weight
            sums[1] += found.count * weight
    total = communicator.all_reduce(sums, label="validation").wait()
    summed, count = (sums if total is None else total).tolist()
    return summed / count if count else math.nan


def use_text(flops_per_second: float, mfu: float | None, hfu: float | None) -> str:
    """Say how well devices are used, as `RunOutcome` has it; empty where it is not known."""
    if mfu is not None and hfu is not None:
        return f"MFU {mfu:.1%}, HFU {hfu:.1%}" if hfu > mfu else f"MFU {mfu:.1%}"
    return f"{flops_per_second / 1e9:,.4g} GFLOP/s" if flops_per_second else ""


def device_name(device: torch.device) -> str:
    """Name the kind of a device, as hardware files do."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def carrier(backend: str) -> str:
    """Name the transport of ``backend`` as messages do."""
    return "shared memory" if backend == "meshwright" else backend


def nats(unit: str) -> str:
    """Return the unit that follows a loss in messages; empty for samples."""
    return "" if unit == "sample" else f" nats a {unit}"


# A launcher and a terminal may both deliver the one signal a user sent.
_SAME_REQUEST_SECONDS = 0.5

_ACKNOWLEDGED = b"\nstopping after this step, then saving; a second signal ends at once, unsaved\n"

_Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


class StopRequest:
    """A context that turns signals into a request to stop; another one ends the process at once.

    A signal within half a second of the first is part of the same request. The signals are SIGINT
    and SIGTERM, and under SLURM also SIGUSR1 (`meshwright.environment.cluster`). Rank 0
    acknowledges the first one at once.

    The ranks agree through one small all-reduce that overlaps each step: ``begin`` issues it before
    the step's work, ``is_agreed`` waits for it afterwards.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._first: float | None = None
        self._previous: dict[signal.Signals, _Handler] = {}
        self._pending: Pending | None = None

    def begin(self) -> None:
        """Tell the other ranks whether this one was asked to stop, without waiting for them."""
        flag = torch.tensor([int(self._first is not None)], dtype=torch.int32, device="cpu")
        flag = flag.to(self._communicator.device)
        self._pending = self._communicator.all_reduce(flag, reduction="max", label="stop request")

    def is_agreed(self) -> bool:
        """True if any rank had been asked to stop at the last ``begin``; equal on all ranks."""
        if self._pending is None:
            return False
        flag, self._pending = self._pending.wait(), None
        return flag is not None and bool(flag.item())

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            signals = cluster().signals if is_launched() else (signal.SIGINT, signal.SIGTERM)
            self._previous = {each: signal.signal(each, self._receive) for each in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._previous.items():
            signal.signal(each, handler)
        self._previous = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
            if self._communicator.rank == 0:
                # Not print: the signal may have interrupted one. Standard output may be closed.
                with contextlib.suppress(OSError):
                    os.write(1, _ACKNOWLEDGED)
        elif now - self._first > _SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
